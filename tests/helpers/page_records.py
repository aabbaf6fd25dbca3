"""Rollouts that are written straight into the store: such as would take a model hours, or a hostile one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from redis import Redis

from rollout.schema import Chain, Receipt, RolloutRequest, Segment, Stage, State
from rollout.trajectory import Branch, FinishReason, Message, ToolCall, Trajectory
from services.dispatch import _expand
from services.settings import Settings
from services.state.rollouts.store import Finish, RolloutStore
from services.state.tenants import Tenant
from tests.helpers.stack import CHECKPOINT
from workers.agent.codec import Codec, load_codec

LONG_TURNS, LONG_TOKENS = 200, 128_000


def write(
    client: Redis, url: str, trajectory: Trajectory, *, reward: float = 1.0, tenant: str = "default", **fields
) -> str:
    """A rollout that was completed with this trajectory; its id. No worker may run, which could take it."""
    store = RolloutStore(client, Settings(redis_url=url))
    request = RolloutRequest(**{"handler": "mend", "task": {"prompt": "written"}, **fields})
    (new,) = _expand(request)
    store.submit([new], Tenant(name=tenant))
    for stage, outcome in (
        (Stage.INIT, Finish(State.READY)),
        (Stage.RUN, Finish(State.EVALUATING, trajectory=trajectory)),
        (Stage.EVAL, Finish(State.COMPLETED, _result(trajectory, reward))),
    ):
        claim = store.claim(new.id, 1, stage, "writer")
        assert not isinstance(claim, str), claim
        assert store.finish(claim, outcome) == outcome.next
    return new.id


def _result(trajectory: Trajectory, reward: float) -> dict[str, str]:
    return {
        "reward": json.dumps(reward),
        "reward_components": json.dumps({"tests": reward}),
        "finish_reason": str(trajectory.finish_reason or FinishReason.STOP),
        "policy_versions": json.dumps(trajectory.versions_used),
    }


def codec() -> Codec:
    """Of the demo model, whose tokens all texts here are in."""
    return load_codec(str(CHECKPOINT))


def sampled(text: str, call: str, version: str = "v1", message: Message | None = None) -> Segment:
    """A turn that the engine sampled."""
    ids = codec().encode(text)
    said = message or Message(role="assistant", content=text)
    logprobs = [-((number * 7) % 40) / 10 for number in range(len(ids))]
    return Segment(
        role="assistant",
        token_ids=ids,
        sampled=True,
        logprobs=logprobs,
        policy_version=version,
        call_id=call,
        finish_reason="stop",
        messages=[said],
    )


def given(role: str, text: str, ids: list[int] | None = None, **fields: object) -> Segment:
    """What was given to the model, such as a tool's output."""
    message = Message(role=role, content=text, **fields)
    return Segment(role=role, token_ids=ids or codec().encode(text), messages=[message])


def chain(*segments: Segment, **fields: object) -> Chain:
    """These segments, one after the other."""
    made = Chain(**fields)
    for segment in segments:
        made.append(segment)
    return made


def of(*chains: Chain, **fields: object) -> Trajectory:
    """A trajectory as the demo model's would be."""
    known = {"model": "demo", "tokenizer": codec().digest, "finish_reason": FinishReason.STOP}
    return Trajectory(chains=list(chains), **{**known, "logprobs_mode": "processed_logprobs", **fields})


def turn(number: int, text: str, output: str, version: str = "v1") -> Sequence[Segment]:
    """A call of the shell with what it printed."""
    call = ToolCall(id=f"call-{number}", name="execute_bash", arguments={"command": text})
    said = Message(role="assistant", content=f"Turn {number}.", tool_calls=[call])
    spoken = json.dumps({"name": call.name, "arguments": call.arguments})
    first = sampled(f"Turn {number}.\n<tool_call>\n{spoken}\n</tool_call>", f"c{number}", version, said)
    return first, given("tool", output, tool_call_id=call.id, name="execute_bash")


def long_trajectory() -> Trajectory:
    """200 turns, 128k tokens."""
    each = LONG_TOKENS // LONG_TURNS
    segments = [given("user", "Count for a long time.")]
    for number in range(LONG_TURNS):
        first, second = turn(number, f"echo line {number}", f"output of turn {number}\n")
        filler = codec().encode("all work and no play makes a dull boy ")
        missing = each - len(first.token_ids) - len(second.token_ids)
        second.token_ids += (filler * (missing // len(filler) + 1))[:missing]
        segments += [first, second]
    return of(chain(*segments))


HTML = '<img src="http://evil.example/x.png" onerror="window.harmed = 1"><script>window.harmed = 2</script>'
ANSI = (
    "\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2J\x1b[1;1Hhome \x1b]8;;http://evil.example/\x07link\x1b]8;;\x07"
)
RTL = "abc \u202etxet desrever\u202c \u200f\u2066hidden\u2069 \u0000nul \ufeffbom"
WIDE_LINE = 10_000_000


def hostile_trajectory() -> Trajectory:
    """Output that would like to be more than text."""
    begins = given("user", f"Look at {HTML}")
    first = turn(0, f"cat page.html # {HTML}", f"{HTML}\n{ANSI}\n{RTL}\nafter the hostile lines")
    second = turn(1, "cat wide", "x" * 1000)
    wide = second[1].messages[0]
    wide.content[0].text = "W" * WIDE_LINE
    return of(
        chain(begins, *first, *second), warnings=[HTML], artifacts={"patch.diff": f"--- a\n+++ b\n+{HTML}"}
    )


def branched_trajectory() -> Trajectory:
    """A program's session: its own turns, a sub-agent's, those after a summary, and some that nobody used."""
    root = [
        given("user", "Mend the program."),
        *turn(0, "ls", "a.py b.py\n"),
        *turn(1, "cat a.py", "print(1)\n"),
    ]
    sub = [given("user", "Look for callers."), *turn(2, "grep -r a", "b.py: import a\n", "v2")]
    after = [
        given("user", "Summary so far: a.py prints 1."),
        *turn(3, "sed -i s/1/2/ a.py", "1 line\n", "v2"),
    ]
    vain = [given("user", "Mend the program."), sampled("I never was used.", "c9", "v2")]
    receipt = Receipt(
        harness="codex",
        engines=["vllm b1"],
        model="demo",
        versions=["v1", "v2"],
        calls=5,
        retries=1,
        branches=3,
        sampled_tokens=400,
        share_delivered=0.9,
        digest="ab" * 32,
    )
    return of(
        chain(*root),
        chain(*sub, role="sub_agent", parent=0),
        chain(*after, role="compaction", parent=0),
        chain(*vain, role="discarded", parent=0),
        receipt=receipt,
        warnings=["two policy versions sampled this rollout"],
    )


def forked_trajectory() -> Trajectory:
    """A fork of `branched` behind its first turn, which is given here, and two turns of its own."""
    said, answer = turn(0, "ls", "a.py b.py\n")
    shared = said.model_copy(
        update={
            "sampled": False,
            **dict.fromkeys(("logprobs", "policy_version", "call_id", "finish_reason")),
        }
    )
    own = [*turn(5, "cat b.py", "import a\n", "v2"), sampled("Nothing to mend.", "c6", "v2")]
    made = chain(given("user", "Mend the program."), shared, answer, *own)
    tokens = sum(len(segment.token_ids) for segment in made.segments[:3])
    branch = Branch(rollout="branched", turn=1, tokens=tokens, sampled_tokens=len(shared.token_ids))
    return of(made, branch=branch)


def judged_trajectory() -> Trajectory:
    """What two other policies said, a judge of it in text only, before the agent's own turns."""
    words = [
        Message(role="user", content="Is it mended?"),
        Message(role="assistant", content="I judge it so."),
    ]
    judge = Chain(role="judge", policy="strict", model="large", text_only=True, trained=False, texts=words)
    about = {"role": "opponent", "policy": "rival", "model": "demo", "trained": True}
    rival = chain(given("user", "Mend it first."), sampled("I am the rival.", "c7", "r1"), **about)
    return of(judge, rival, chain(given("user", "Mend it."), *turn(0, "ls", "a.py\n")))
