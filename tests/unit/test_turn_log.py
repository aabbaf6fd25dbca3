"""Wherever a worker is lost, the next one comes to the same end with the calls that were left."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import msgspec
import pytest
from tokenizers import Tokenizer

from rollout.schema import Limits, RolloutRequest, SamplingParams
from rollout.trajectory import FinishReason, Message, Trajectory
from services.state.turns.entries import Answered, Appended, Sampled, decode, trajectory_of
from tests.helpers.scripted import Look, Said, ScriptedRouter, backend
from tests.helpers.stack import CHECKPOINT
from workers.agent.loop import AgentLoop
from workers.agent.tools import Finish, Observation
from workers.agent.turns import MOST_UNWRITTEN, RunDiverged, TurnLog
from workers.errors import InfrastructureError
from workers.held import SHUTDOWN, Held

ASKED = [Message(role="user", content="1 plus 1")]
# Not that of a codec: every process that collects this file would import transformers.
TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def said(text: str, **fields) -> Said:
    end = "" if fields.get("finish") == "length" else "<|im_end|>"
    return Said(TOKENIZER.encode(text + end, add_special_tokens=False).ids, **fields)


def call(text="", **more) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': {'text': text, **more}})}\n</tool_call>"


class Kept:
    """The log as Redis keeps it."""

    def __init__(self, stored=()):
        self.stored = list(stored)
        self.written = len(self.stored)
        self.writes = 0

    async def write(self, at, entries):
        self.writes += 1
        there = len(self.stored)
        if there < at:
            return {"word": "behind", "at": there}
        self.stored += entries[there - at :]
        return {"word": "ok"}

    def log(self, held=None) -> TurnLog:
        return TurnLog(self.stored, self.write, held)


class Counted(Look):
    """Counts how often it really looked."""

    def __init__(self):
        self.looks = 0

    async def call(self, args, ctx):
        assert ctx.call_id
        self.looks += 1
        return await super().call(args, ctx)


async def compacted(trajectory: Trajectory) -> list[Message]:
    return [*ASKED, Message(role="user", content=f"chain {len(trajectory.chains) + 1}")]


SCENES = {
    "one answer": ([said("2")], {}),
    "tools": ([said(call("a")), said("so" + call("b")), said("2")], {}),
    "parallel and malformed": (
        [said(call("a") + "<tool_call>no" + "</tool_call>" + call("b")), said("2")],
        {},
    ),
    "unknown tool": ([said('<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>'), said("2")], {}),
    "finish": ([said(call("a") + '<tool_call>\n{"name": "finish", "arguments": {}}\n</tool_call>')], {}),
    "nothing but malformed": ([said("<tool_call>no</tool_call>")] * 3, {"max_malformed_calls": 3}),
    "the same again": ([said(call("a"))] * 3, {"max_repeated_actions": 3}),
    "turn limit": ([said(call("a"))] * 2, {"max_turns": 2}),
    "cut": ([said(call("1 2 3 4 5 ", times=400)), said("2")], {"context": 1024}),
    "no room": ([said("3" * 700 + call("8 ", times=500))], {"context": 1024}),
    "compaction": (
        [said(call("5 ", times=700)), said("3" * 2000), said("2")],
        {"context": 1024, "compacts": 1},
    ),
    "weight swap": ([said(call("a"), spans=[("v1", 0, 4), ("v2", 4, 999)]), said("2", cached_tokens=7)], {}),
    "another backend": (
        [said(call("a")), said(call("b"), backend=backend(id="c", logprobs_mode="raw_logprobs")), said("2")],
        {},
    ),
    "experts": ([said("2", routed_experts=[[1, 2], [3]])], {}),
    "length": ([said("2 and", finish="length")], {"max_tokens": 4}),
}


def spans_fitted(answer: Said) -> Said:
    if answer.spans is None:
        return answer
    *first, (version, start, _) = answer.spans
    return replace(answer, spans=[*first, (version, start, len(answer.ids))])


def play(answers, kept: Kept, *, context=2048, compacts=0, max_tokens=None, **limits):
    """The loop to its end: (reason, agent, router, how often the tool looked)."""
    router = ScriptedRouter([spans_fitted(answer) for answer in answers], backend(max_model_len=context))
    request = RolloutRequest(
        handler="scripted", limits=Limits(**limits), sampling=SamplingParams(max_tokens=max_tokens, seed=3)
    )
    look = Counted()

    async def run():
        agent = AgentLoop(request, 0, router, (look, Finish()), False, kept.log())
        return agent, await agent.run(ASKED, compact=compacted if compacts else None)

    agent, reason = asyncio.run(run())
    return reason, agent, router, look.looks


@pytest.mark.parametrize("scene", SCENES)
def test_lost_at_any_entry_the_next_worker_comes_to_the_same_end(scene):
    answers, options = SCENES[scene]
    whole = Kept()
    reason, agent, router, looks = play(answers, whole, **options)
    for count in range(len(whole.stored) + 1):
        entries = decode(whole.stored[:count])
        calls = sum(isinstance(entry, Sampled) for entry in entries)
        answered = sum(isinstance(entry, Answered) for entry in entries)
        if (
            any(entry.text is None for entry in entries if isinstance(entry, Answered))
            and not isinstance(
                next((e for e in reversed(entries) if not isinstance(e, Answered)), None), Appended
            )
            and isinstance(entries[-1], Answered)
        ):
            continue  # such an entry and the one that has its text are written together
        kept = Kept(whole.stored[:count])
        again_reason, again, again_router, again_looks = play(answers[calls:], kept, **options)
        assert again_reason is reason
        assert len(again_router.calls) == len(router.calls) - calls, "nothing is sampled twice"
        assert [asked.prompt for asked in again_router.calls] == [
            asked.prompt for asked in router.calls[calls:]
        ]
        assert [asked.seed for asked in again_router.calls] == [asked.seed for asked in router.calls[calls:]]
        assert again_looks <= max(0, looks - answered + 3), "no answered call is made again"
        assert again.metrics == agent.metrics
        assert shape(again.trajectory) == shape(agent.trajectory)
    assert len(whole.stored) >= 2 and trajectory_of(decode(whole.stored)).chains == agent.trajectory.chains


def shape(trajectory: Trajectory) -> dict:
    """All but what is drawn anew or depends on the number of a call."""
    document = trajectory.model_dump()
    for chain in document["chains"]:
        for segment in chain["segments"]:
            segment.pop("call_id")
            segment["logprobs"] = segment["logprobs"] and len(segment["logprobs"])
            for message in segment["messages"]:
                message.pop("tool_call_id")
                for tool_call in message["tool_calls"]:
                    tool_call.pop("id")
    for message in document["unread"]:
        message.pop("tool_call_id")
    for made in document["calls"]:
        for name in ("id", "at", "seconds"):
            made.pop(name)
    return document


def test_what_was_sampled_and_told_is_what_it_was_bit_for_bit():
    whole = Kept()
    answers, _ = SCENES["tools"]
    _, agent, _, _ = play(answers, whole)
    _, again, router, looks = play([], Kept(whole.stored))
    assert again.trajectory == agent.trajectory and (len(router.calls), looks) == (0, 0)


def test_a_turn_is_written_before_a_tool_is_called_and_answers_before_the_next_model_call():
    kept, seen = Kept(), []

    class Spy(Look):
        async def call(self, args, ctx):
            seen.append(("tool", [type(entry).__name__ for entry in decode(kept.stored)]))
            return Observation("seen")

    class Watched(ScriptedRouter):
        async def generate(self, request, timeout_s):
            await asyncio.sleep(0.01)  # the round trip in which it asks for its place
            seen.append(("model", [type(entry).__name__ for entry in decode(kept.stored)]))
            return await super().generate(request, timeout_s)

    async def run():
        router = Watched([said(call("a")), said("2")])
        agent = AgentLoop(RolloutRequest(handler="s"), 0, router, (Spy(),), False, kept.log())
        return await agent.run(ASKED)

    assert asyncio.run(run()) is FinishReason.STOP
    assert seen == [
        ("model", ["Begun"]),
        ("tool", ["Begun", "Sampled"]),
        ("model", ["Begun", "Sampled", "Answered", "Appended"]),
    ]
    assert kept.writes == 4, "one beside each placement, and one for each turn"


def test_the_record_says_when_each_call_was_and_where():
    kept, began = Kept(), time.time()
    _, agent, router, _ = play(SCENES["parallel and malformed"][0], kept)
    calls = agent.trajectory.calls
    assert [(made.kind, made.name) for made in calls] == [
        ("model", ""),
        *[("tool", "look")] * 2,
        ("model", ""),
    ]
    first, *tools, last = calls
    assert [made.prompt_tokens for made in (first, last)] == [len(prompt) for prompt in router.prompts]
    assert {made.backend for made in (first, last)} == {"b"}
    sampled = [segment for segment in agent.trajectory.chain.segments if segment.sampled]
    assert [first.id, last.id] == [segment.call_id for segment in sampled]
    said = [made.id for message in agent.trajectory.messages for made in message.tool_calls]
    assert [made.id for made in tools] == said
    assert all(began - 1 < made.at < time.time() and 0 <= made.seconds < 60 for made in calls)
    assert trajectory_of(decode(kept.stored)).calls == calls


def test_a_log_of_an_earlier_release_has_no_times():
    kept = Kept()
    play(SCENES["tools"][0], kept)
    timed = [hasattr(entry, "call") for entry in decode(kept.stored)]
    pairs = zip(map(msgspec.msgpack.decode, kept.stored), timed, strict=True)
    old = [msgspec.msgpack.encode(entry[:-1] if last else entry) for entry, last in pairs]
    assert any(timed) and not any(getattr(entry, "call", None) for entry in decode(old))
    _, agent, _, _ = play([], Kept(old))
    assert agent.trajectory.turns and agent.trajectory.calls == []


def test_what_redis_has_lost_is_written_again_by_the_worker_that_has_it():
    kept = Kept()

    class Forgets(ScriptedRouter):
        async def generate(self, request, timeout_s):
            await asyncio.sleep(0.01)
            if len(self.calls) == 2:
                del kept.stored[2:]
            return await super().generate(request, timeout_s)

    async def run():
        router = Forgets([said(call("a")), said(call("b")), said("2")])
        agent = AgentLoop(RolloutRequest(handler="s"), 0, router, (Look(),), False, kept.log())
        await agent.run(ASKED)
        return agent

    agent = asyncio.run(run())
    assert trajectory_of(decode(kept.stored)).chains == agent.trajectory.chains


def test_more_than_it_has_itself_a_worker_cannot_write_again():
    whole = Kept()
    play(SCENES["tools"][0], whole)
    kept = Kept(whole.stored[:4])
    log = kept.log()
    del kept.stored[2:]
    log.add_answer(Observation("a"))
    with pytest.raises(InfrastructureError, match="Redis has lost 2 entries"):
        asyncio.run(log.flush())


def test_who_has_lost_the_rollout_writes_nothing_more():
    async def lost(at, entries):
        return {"word": "lost"}

    log = TurnLog((), lost)
    log.add_answer(Observation("a"))
    with pytest.raises(InfrastructureError, match="not this worker's"):
        asyncio.run(log.flush())


def test_a_run_that_does_something_else_than_it_did_is_given_up():
    whole = Kept()
    play(SCENES["tools"][0], whole)

    async def run():
        agent = AgentLoop(
            RolloutRequest(handler="s"), 0, ScriptedRouter([]), (Look(),), False, Kept(whole.stored).log()
        )
        await agent.start(ASKED)
        agent.append([Message(role="user", content="where it had asked the model")])

    with pytest.raises(RunDiverged, match="Sampled where there is Appended"):
        asyncio.run(run())


def test_ids_of_another_format_are_not_gone_on_with():
    whole = Kept()
    play(SCENES["tools"][0], whole)
    first = decode(whole.stored[:1])[0]
    first.tokenizer = "other@0123"
    log = TurnLog((), None)
    log._old.append(first)
    with pytest.raises(RunDiverged, match="other@0123"):
        asyncio.run(AgentLoop(RolloutRequest(handler="s"), 0, ScriptedRouter([]), (), log=log).start(ASKED))


def test_an_entry_that_cannot_be_read_is_no_guess():
    with pytest.raises(RunDiverged, match="cannot be read"):
        TurnLog([b"\xc1"])


def test_half_a_character_of_a_tool_is_kept_as_a_question_mark():
    kept = Kept()

    async def run():
        log = kept.log()
        log.add_answer(Observation("a\ud800b"))
        await log.flush()

    asyncio.run(run())
    assert decode(kept.stored)[0].text == "a?b"


def test_many_answers_are_written_before_the_next_model_call():
    kept = Kept()

    async def run():
        log = kept.log()
        for number in range(MOST_UNWRITTEN):
            log.add_answer(Observation(str(number)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert len(kept.stored) == MOST_UNWRITTEN


def test_a_worker_that_stops_is_left_between_two_turns():
    kept, held = Kept(), Held("r", None)
    router = ScriptedRouter([said(call("a")), said("2")])

    class Stops(Look):
        async def call(self, args, ctx):
            held.leaving = True
            return Observation("b")

    async def run():
        held.task = asyncio.current_task()
        await AgentLoop(RolloutRequest(handler="s"), 0, router, (Stops(),), False, kept.log(held)).run(ASKED)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert held.reason == SHUTDOWN and len(router.calls) == 1
    assert [type(entry).__name__ for entry in decode(kept.stored)][-2:] == ["Answered", "Appended"]
