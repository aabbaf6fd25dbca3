"""The loop with a scripted model and a real tokenizer: turns, parallel calls, limits, a full context."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest

from rollout.schema import Limits, RolloutRequest
from rollout.trajectory import FinishReason, Message, ToolCall, Trajectory
from tests.helpers.scripted import Look, Said, ScriptedRouter, backend, loop
from tests.helpers.stack import CHECKPOINT
from workers.agent.codec import load_codec
from workers.agent.loop import MAX_CHAINS, AgentLoop
from workers.agent.parsing import MAX_DEPTH, Malformed, tool_call
from workers.handlers.base import AgentHandler, Reward, RunContext

ASKED = [Message(role="user", content="1 plus 1")]


@pytest.fixture(scope="module")
def codec():
    return load_codec(str(CHECKPOINT))


@pytest.fixture(scope="module")
def say(codec):
    """Text that the model says, its end of turn included."""

    def answer(text: str, **fields) -> Said:
        end = "<|im_end|>" if fields.get("finish") != "length" else ""
        ids = codec._guard._tokenizer.encode(text + end, add_special_tokens=False)
        return Said(ids, **fields)

    return answer


def call(text="", name="look", **arguments) -> str:
    body = {"name": name, "arguments": {"text": text, **arguments} if name == "look" else arguments}
    return f"<tool_call>\n{json.dumps(body)}\n</tool_call>"


def run(router, agent, compact=None):
    """Run to the end, and hold every prompt equal to the chain as it was before the call."""
    reason = asyncio.run(agent.run(ASKED, compact=compact))
    calls = iter(zip(router.prompts, router.completions, strict=True))
    for chain in agent.trajectory.chains:
        before: list[int] = []
        sampled: list[int] = []
        last_call = None
        for segment in chain.segments:
            if segment.sampled and segment.call_id != last_call:
                prompt, completion = next(calls)
                assert prompt == before
                sampled, last_call = list(completion.token_ids), segment.call_id
            if segment.sampled:
                assert sampled[: len(segment.token_ids)] == segment.token_ids
                del sampled[: len(segment.token_ids)]
            before += segment.token_ids
        assert not chain._first_sampled() < len(chain.segments) or chain.segments[-1].sampled
    assert next(calls, None) is None
    again = Trajectory.model_validate_json(agent.trajectory.model_dump_json())
    assert again == agent.trajectory
    return reason


def played(answers, at=None, *, reason="stop", compact=None, **options):
    """A router and an agent that have played the answers to the end, which comes for this reason."""
    router = ScriptedRouter(answers, at)
    agent = loop(router, **options)
    assert run(router, agent, compact) == reason
    return router, agent


def texts(trajectory, role="tool"):
    return [message.text for message in trajectory.messages if message.role == role]


# -- turns and calls -----------------------------------------------------------------------------


def test_parallel_calls_are_answered_in_one_bridge_in_their_order(say, codec):
    _, agent = played([say(call("7") + call("8") + call("9")), say("done")])
    chain = agent.trajectory.chain
    assert [s.role for s in chain.segments] == ["user", "assistant", "tool", "assistant"]
    assert texts(agent.trajectory) == ["7", "8", "9"]
    ids = {c.id for c in chain.segments[1].messages[0].tool_calls}
    assert {m.tool_call_id for m in chain.segments[2].messages} == ids and len(ids) == 3
    bridge = codec._guard.decode(chain.segments[2].token_ids)
    assert bridge.count("<|im_start|>user") == 1 and bridge.index("7") < bridge.index("8") < bridge.index("9")


def test_a_malformed_call_among_others_is_answered_at_its_own_place(say):
    broken = "<tool_call>\n{nonsense\n</tool_call>"
    _, agent = played([say(call("first") + broken + call("no", name="nobody") + call("last")), say("ok")])
    first, error, unknown, last = texts(agent.trajectory)
    assert (first, last) == ("first", "last")
    assert error.startswith("Error: malformed tool call (invalid_json") and "nonsense" in error
    assert "no tool 'nobody'; there are: look, finish" in unknown
    named = [(m.name, m.tool_call_id is None) for m in agent.trajectory.chain.segments[2].messages]
    assert named == [("look", False), (None, True), ("nobody", False), ("look", False)]
    assert agent.metrics["malformed_calls"] == 1 and agent.metrics["tool_calls"] == 2


def test_finish_among_calls_ends_behind_those_before_it(say):
    _, agent = played([say(call("seen") + call(name="finish", message="bye") + call("never"))])
    assert agent.metrics["tool_calls"] == 2
    assert texts(agent.trajectory) == ["seen", "bye"], "what nobody read is kept for scorers"
    assert [s.role for s in agent.trajectory.chain.segments] == ["user", "assistant"]


def test_only_turns_without_any_sound_call_count_as_malformed_in_a_row(say):
    broken = "<tool_call>{</tool_call>"
    turns = [broken, broken + call("7"), broken, broken, "never"]
    router, agent = played(
        [say(turn) for turn in turns], reason="malformed_calls", limits={"max_malformed_calls": 2}
    )
    assert len(router.prompts) == 4
    assert "malformed" in agent.trajectory.unread[0].text


def test_the_tools_of_a_task_take_the_place_of_the_handlers_for_this_rollout(say):
    class Peek(Look):
        name = "peek"

    router = ScriptedRouter([say(call("7")), say(call("8").replace("look", "peek")), say("done")])
    agent = loop(router)
    assert asyncio.run(agent.run(ASKED, tools=[Peek()])) == "stop"
    assert texts(agent.trajectory) == ["Error: no tool 'look'; there are: peek", "8"]


def test_the_same_calls_with_the_same_answers_end_the_rollout_after_so_many_in_a_row(say):
    turns = [call("7"), call("7"), call("8"), *[call("7") + call("9")] * 3, "never"]
    router, agent = played(
        [say(turn) for turn in turns],
        reason="repeated_actions",
        limits={"max_repeated_actions": 3},
    )
    assert len(router.prompts) == 6
    assert [m.text for m in agent.trajectory.unread] == ["7", "9"], "what they were answered is kept"


def test_repeated_actions_may_be_unlimited(say):
    _, agent = played(
        [*[say(call("7")) for _ in range(12)], say("ok")], limits={"max_repeated_actions": None}
    )
    assert agent.trajectory.turns == 13


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ('{"name": 5, "arguments": {}}', "no name"),
        ('{"name": "\\ud800", "arguments": {}}', "surrogate"),
        ("[" * 3000, "recursion"),
        ('{"name": "look", "arguments": {"text": "\\ud800"}}', "surrogate"),
        ('{"name": "look", "arguments": {"text": NaN}}', "not a finite number"),
        ('{"name": "look", "arguments": {"text": 1e999}}', "not a finite number"),
        ('{"name": "look", "arguments": {"text": ' + "1" * 5000 + "}}", "4300 digits"),
        ('{"name": "look", "arguments": {"text": ' + "[" * 250 + "]" * 250 + "}}", "nested deeper"),
        ('{"name": "look", "arguments": "{}"}', "not an object"),
        ("[1]", "missing_name"),
        ('"look"', "missing_name"),
    ],
)
def test_a_call_that_no_record_could_hold_is_malformed_and_costs_nothing(say, raw, why):
    """Each of these once failed the rollout, or made a record that nobody could read again."""
    _, agent = played([say(f"<tool_call>{raw}</tool_call>"), say("ok")], backend(max_model_len=16_000))
    (answer,) = texts(agent.trajectory)
    assert answer.startswith("Error: malformed tool call") and why in answer


@pytest.mark.parametrize(("levels", "kind"), [(MAX_DEPTH, ToolCall), (MAX_DEPTH + 1, Malformed)])
def test_arguments_may_be_nested_so_deep_and_no_deeper(levels, kind):
    assert type(tool_call("look", {"text": json.loads("[" * levels + "]" * levels)}, "raw")) is kind


def test_large_integers_survive_the_record(say):
    big = 10**300
    _, agent = played([say(call(name="nobody", n=big)), say("ok")])
    assert agent.trajectory.messages[1].tool_calls[0].arguments == {"n": big}


def test_a_turn_cut_within_a_call_ends_without_invented_tokens(say):
    router, agent = played([say(call("7")[:-15], finish="length")], reason="length", max_tokens=500)
    chain = agent.trajectory.chain
    assert chain.response_ids == router.completions[0].token_ids and set(chain.loss_mask) == {1}
    assert chain.segments[-1].finish_reason == "length"


def test_the_last_allowed_turn_adds_no_observation_to_the_chain(say):
    """A chain is the last call's prompt and what it sampled; scorers still see the tool's answer."""
    _, agent = played([say(call("7")), say(call("8"))], reason="turn_limit", limits={"max_turns": 2})
    assert [s.role for s in agent.trajectory.chain.segments] == ["user", "assistant", "tool", "assistant"]
    assert [m.text for m in agent.trajectory.unread] == ["8"] and texts(agent.trajectory) == ["7", "8"]


def test_only_an_end_token_sampled_is_a_turn(say):
    _, agent = played([say("")])
    assert agent.trajectory.sampled_tokens == 1 and agent.trajectory.final_text() == ""


def test_a_turn_ended_by_a_stop_token_of_the_request_goes_on(say, codec):
    """The end of turn that the format wants is added, and is not trained on."""
    ids = say(call("7")).ids[:-1]
    _, agent = played([Said(ids), say("ok")], stop_token_ids=[ids[-1]])
    chain = agent.trajectory.chain
    end = codec._guard.convert_tokens_to_ids("<|im_end|>")
    assert chain.segments[1].token_ids == ids and chain.segments[2].token_ids[0] == end
    assert chain.loss_mask[len(ids)] == 0


def test_a_handler_that_plays_the_user_goes_on_from_any_turn(say, codec):
    """Thoughts stay in the context as they were sampled, also one that was never closed."""
    thoughts = ["<think>\nwell\n</think>\n\nyes", "<think>\nnever closed", "no thought"]

    async def talk(agent):
        await agent.start(ASKED)
        for _ in thoughts:
            await agent.query()
            assert agent.append([Message(role="user", content="and then?")])
        await agent.query()

    router = ScriptedRouter([*map(say, thoughts), say("end")])
    agent = loop(router)
    asyncio.run(talk(agent))
    context = codec._guard.decode(router.prompts[-1])
    assert all(thought + "<|im_end|>\n<|im_start|>user\nand then?" in context for thought in thoughts)
    assert router.prompts[-1] == agent.trajectory.chain.token_ids[: len(router.prompts[-1])]
    first, second, *_ = [m for m in agent.trajectory.messages if m.role == "assistant"]
    assert (first.reasoning, first.text) == ("well", "yes") and second.text == ""


def test_a_conversation_goes_on_behind_its_end_with_one_budget_of_turns(say):
    router = ScriptedRouter([say(call("7") + call(name="finish", message="one")), say("two"), say(call("8"))])
    agent = loop(router, limits={"max_turns": 3})

    async def talk() -> list[str]:
        reasons = [await agent.run(ASKED)]
        assert agent.append([*agent.trajectory.unread, Message(role="user", content="Go on.")])
        reasons.append(await agent.go_on(None))
        assert agent.trajectory.unread == [] and agent.append([Message(role="user", content="And on.")])
        return [*reasons, await agent.go_on(None), await agent.go_on(None)]

    assert asyncio.run(talk()) == ["stop", "stop", "turn_limit", "turn_limit"]
    assert texts(agent.trajectory, "user") == ["1 plus 1", "Go on.", "And on."]
    assert texts(agent.trajectory) == ["7", "one", "8"] and len(agent.trajectory.chains) == 1


def test_a_turn_is_answered_only_once(say):
    async def twice(agent):
        await agent.start(ASKED)
        with pytest.raises(ValueError, match="answered once"):
            agent.append([Message(role="user", content="before any turn")])
        await agent.query()
        assert agent.append([Message(role="user", content="once")])
        with pytest.raises(ValueError, match="all messages that follow it together"):
            agent.append([Message(role="user", content="twice")])

    asyncio.run(twice(loop(ScriptedRouter([say("hm")]))))


# -- what is asked for ---------------------------------------------------------------------------


def test_each_turn_of_each_member_of_a_group_has_a_seed_of_its_own_that_comes_again(say):
    def seeds(seed, index=0):
        router, _ = played([say(call("1")), say(call("2")), say("ok")], index=index, seed=seed)
        return [asked.seed for asked in router.calls]

    assert len({*seeds(7), *seeds(7, index=1), *seeds(8)}) == 9
    assert seeds(7) == seeds(7)
    assert seeds(None) == [None] * 3


def test_a_call_is_told_where_turns_end_what_prefixes_count_and_how_long_it_may_take(say, codec):
    limits = {"call_timeout_s": 33.0, "tool_timeout_s": 44.0}
    router, _ = played([say("ok")], backend(policy_version="v7"), limits=limits)
    (asked,) = router.calls
    assert (asked.cache_salt, router.timeouts_s) == ("v7", [33.0])
    assert codec.stop_token_ids and codec.end_ids and codec.vocab_size
    for name in ("stop_token_ids", "end_ids", "vocab_size"):
        expected = getattr(codec, name)
        assert getattr(asked, name) == (frozenset(expected) if name == "stop_token_ids" else expected)


def test_a_takeover_by_a_longer_context_gives_the_calls_behind_it_more_room(say):
    answers = [say(call("1"), backend=backend(id="c", max_model_len=3000)), say("ok")]
    router, _ = played(answers, backend(max_model_len=2048))
    assert [asked.max_tokens + len(asked.prompt) for asked in router.calls] == [2048, 3000]


# -- what is recorded ----------------------------------------------------------------------------


def test_what_came_from_the_prefix_cache_is_summed_up(say):
    _, agent = played([say(call("1"), cached_tokens=5), say(call("2")), say("ok", cached_tokens=7)])
    assert agent.metrics["cached_prompt_tokens"] == 12


@pytest.mark.parametrize(
    ("sampling", "mode", "lines"),
    [
        ({}, "processed_logprobs", []),
        ({}, "raw_logprobs", []),
        ({}, None, ["does not say what its log-probs mean"]),
        ({"temperature": 0.7}, "raw_logprobs", ["raw log-probs ignore the temperature (0.7)"]),
        ({"temperature": 0.7}, "processed_logprobs", ["only if it divides its logits"]),
        ({"temperature": 0.0}, "processed_logprobs", ["temperature 0 samples greedily"]),
        ({"top_p": 0.9}, "processed_logprobs", ["top_p or top_k"]),
        ({"top_k": 5, "temperature": 0.0}, None, ["does not say", "temperature 0", "top_p or top_k"]),
    ],
)
def test_a_log_prob_that_no_trainer_matches_is_warned_of(say, sampling, mode, lines):
    _, agent = played([say("ok")], backend(logprobs_mode=mode), **sampling)
    assert agent.trajectory.logprobs_mode == mode
    assert len(agent.trajectory.warnings) == len(lines)
    assert all(part in line for part, line in zip(lines, agent.trajectory.warnings, strict=True))


def test_a_takeover_by_a_backend_with_other_log_probs_is_warned_of(say):
    same, raw = backend(id="c"), backend(id="d", logprobs_mode="raw_logprobs")
    answers = [say(call("1")), say(call("2"), backend=same), say(call("3"), backend=raw), say("ok")]
    _, agent = played(answers)
    (line,) = agent.trajectory.warnings
    assert line == (
        "from call 3 on the log-probs are raw_logprobs (backend d), before processed_logprobs (backend c)"
    )


def test_the_router_is_told_which_backends_may_take_the_rollout_over(say):
    router, _ = played([say("ok")])
    assert asyncio.run(router.accepts(backend(id="c"))) is None
    assert "is below 2048" in asyncio.run(router.accepts(backend(id="d", max_model_len=1000)))
    assert "cannot be loaded" in asyncio.run(router.accepts(backend(id="e", tokenizer="/nowhere/at/all")))


# -- a full context ------------------------------------------------------------------------------


def test_an_observation_that_does_not_fit_is_cut_with_a_note(say):
    router, agent = played([say(call("1 2 3 4 5 ", times=400)), say("ok")], backend(max_model_len=1024))
    (observation,) = texts(agent.trajectory)
    assert observation.startswith("1 2 3") and observation.endswith("4 5 ")
    assert "characters cut: the context has no room for them" in observation
    assert agent.metrics["truncated_observations"] == 1
    assert router.calls[1].max_tokens >= 1024 // 8, "a turn still finds room"


@pytest.mark.parametrize(("max_tokens", "cut"), [(120, False), (121, True), (None, True)])
def test_no_more_room_is_kept_for_a_turn_than_a_call_may_take(say, max_tokens, cut):
    answers = [say(call("5 ", times=600)), say("ok")]
    wide, _ = played(answers, backend(max_model_len=8192))
    narrow = len(wide.prompts[1]) + 120
    assert narrow // 8 > 120
    _, agent = played(answers, backend(max_model_len=narrow), max_tokens=max_tokens)
    assert ("truncated_observations" in agent.metrics) == cut


def test_of_little_room_half_is_left_to_the_observation(say):
    """A turn would find 1,024 ids free, of which there are hardly more: nothing could be said in the rest."""
    answers = [say("3" * 6800 + call("8 ", times=1000)), say("ok")]
    router, agent = played(answers, backend(max_model_len=8192))
    assert "characters cut" in texts(agent.trajectory)[0]
    room = 8192 - len(router.prompts[0]) - len(answers[0].ids)
    assert 1024 < room < 1500 and room // 2 <= router.calls[1].max_tokens < 0.7 * room


def test_what_leaves_not_a_single_id_for_a_turn_is_not_appended(say):
    async def budget(context):
        agent = loop(ScriptedRouter([say("ok")], backend(max_model_len=context)))
        await agent.start(ASKED)
        await agent.query()
        return agent.budget if agent.append([Message(role="user", content="and then?")]) else None

    used = 2048 - asyncio.run(budget(2048))
    assert [asyncio.run(budget(used + more)) for more in (-1, 0, 1)] == [None, None, 1]


def test_of_parallel_observations_the_long_ones_are_cut(say):
    answers = [say(call("short") + call("9 ", times=3000) + call("also short")), say("ok")]
    _, agent = played(answers, backend(max_model_len=1024))
    first, long, last = texts(agent.trajectory)
    assert (first, last) == ("short", "also short") and "characters cut" in long


def test_an_observation_without_room_for_even_its_beginning_ends_the_rollout(say):
    """The chain ends with what was sampled; the observation is kept beside it."""
    talk = "3" * 700
    _, agent = played(
        [say(talk + call("8 ", times=500))],
        backend(max_model_len=1024),
        reason="context_length",
        limits={"max_turns": 5},
    )
    assert agent.trajectory.chain.segments[-1].sampled
    assert agent.trajectory.unread[0].text == "8 " * 500


def test_a_short_observation_is_kept_whole_while_a_single_id_is_left_for_the_turn(say):
    turn = say("3" * 890 + call("8"))
    assert 1000 - len(turn.ids) < 1000 // 8
    _, agent = played([turn, say("ok, that is all")], backend(max_model_len=1000))
    assert texts(agent.trajectory) == ["8"]


def test_a_turn_that_fills_the_context_ends_with_its_reason(say):
    _, agent = played([say("3" * 500)], backend(max_model_len=100), reason="context_length")
    assert len(agent.trajectory.chain.token_ids) == 100


def test_the_limit_of_sampled_tokens_is_no_matter_for_compaction(say):
    async def compact(_):
        raise AssertionError("a budget of tokens is not a full context")

    played([say("3" * 50)], reason="token_limit", compact=compact, limits={"max_response_tokens": 20})


# -- compaction ----------------------------------------------------------------------------------


class Forgetful(AgentHandler):
    """Keeps the question and how often it was asked."""

    name = "forgetful"
    tools = (Look(),)
    advertise_tools = False

    def __init__(self) -> None:
        self.unread: list[list[str]] = []

    def prompt(self, task):
        return ASKED

    async def compact(self, ctx, trajectory):
        self.unread.append([message.text for message in trajectory.unread])
        return [*ASKED, Message(role="user", content=f"chain {len(trajectory.chains) + 1}")]

    async def evaluate(self, ctx):
        return Reward(0.0)


def test_a_handler_goes_on_in_a_new_chain_when_the_context_is_full(say):
    """Before an observation that does not fit, and behind a turn that the context cut."""
    long = call("5 ", times=700)
    router = ScriptedRouter([say(long), say("3" * 2000), say("done")], backend(max_model_len=1024))
    handler = Forgetful()
    agent = AgentLoop(RolloutRequest(handler="forgetful", limits=Limits()), 0, router, handler.tools, False)
    ctx = RunContext("r", "g", 0, 1, None, None, None, agent=agent)
    # `run` of the handler is what a worker calls; here the same, with every prompt checked.
    assert run(router, agent, partial(handler.compact, ctx)) is FinishReason.STOP
    trajectory = agent.trajectory
    assert [len(chain.segments) for chain in trajectory.chains] == [2, 2, 2]
    assert [chain.segments[0].messages[-1].text for chain in trajectory.chains[1:]] == ["chain 2", "chain 3"]
    assert handler.unread == [["5 " * 700], []]
    assert agent.metrics["compactions"] == 2 and trajectory.turns == 3 and trajectory.final_text() == "done"
    assert trajectory.unread == [] and "truncated_observations" not in agent.metrics
    assert trajectory.sampled_tokens == sum(sum(chain.loss_mask) for chain in trajectory.chains)


def test_the_default_run_calls_the_compaction_of_the_handler(say):
    router = ScriptedRouter([say(call("5 ", times=700)), say("done")], backend(max_model_len=1024))
    handler = Forgetful()
    agent = AgentLoop(RolloutRequest(handler="forgetful"), 0, router, handler.tools, False)
    ctx = RunContext("r", "g", 0, 1, None, None, None, agent=agent)
    assert asyncio.run(handler.run(ctx)) is FinishReason.STOP
    assert agent.metrics["compactions"] == 1


@pytest.mark.parametrize("compacted", [False, True])
def test_a_call_that_fails_leaves_the_chain_at_the_turn_before(say, compacted):
    """Also behind a compaction: the last chain is still the one that reached something."""

    class Gone(Exception):
        pass

    def failure(_):
        raise Gone

    async def compact(_):
        return ASKED

    times = 700 if compacted else 1
    agent = loop(ScriptedRouter([say(call("5 ", times=times)), failure], backend(max_model_len=1024)))
    with pytest.raises(Gone):
        asyncio.run(agent.run(ASKED, compact=compact if compacted else None))
    (chain,) = agent.trajectory.chains
    assert chain.segments[-1].sampled and agent.trajectory.loss_mask
    assert [m.text for m in agent.trajectory.unread] == ["5 " * times]


def test_no_compaction_is_asked_for_when_no_turn_would_follow(say):
    async def compact(_):
        raise AssertionError("there is no turn left")

    for answers, reason in (
        ([say("3" * 2000)], "context_length"),
        ([say(call("5 ", times=700))], "turn_limit"),
    ):
        played(answers, backend(max_model_len=1024), reason=reason, compact=compact, limits={"max_turns": 1})


def test_compaction_ends_after_a_number_of_chains(say):
    async def compact(_):
        return ASKED

    answers, small = [say("3" * 500)] * 50, backend(max_model_len=200)
    limits = {"max_turns": 40}
    _, agent = played(answers, small, reason="context_length", compact=compact, limits=limits)
    assert len(agent.trajectory.chains) == MAX_CHAINS and agent.metrics["compactions"] == MAX_CHAINS - 1
    assert (
        f"the context was compacted {MAX_CHAINS - 1} times, which is the limit" in agent.trajectory.warnings
    )


@pytest.mark.parametrize("made", [None, [], [Message(role="user", content="7" * 190)]])
def test_a_compaction_that_gives_nothing_usable_ends_the_rollout(say, made):
    async def compact(_):
        return made

    _, agent = played([say("3" * 500)], backend(max_model_len=200), reason="context_length", compact=compact)
    assert len(agent.trajectory.chains) == 1 and agent.trajectory.sampled_tokens
    assert any("compaction left" in line for line in agent.trajectory.warnings) == bool(made)
