"""Chains of a session: what was sampled is in them, each id with loss once, under the roles that they had.

The tokenizers are real. A conversation is held as capture holds it, and what an engine would be sent is kept.
"""

from __future__ import annotations

import hashlib
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from rollout import arrays
from rollout.arrays import pack_ids
from rollout.schema.trajectory import TRAINED
from rollout.trajectory import Message, Trajectory
from services.capture.call import ModelCall
from services.capture.chains import MOST_ASKED, build, timed
from services.capture.tree import Tree
from services.state.capture.nodes import ROOT, decode, encode
from tests.helpers.published import TOOLS, directory
from tests.helpers.stack import CHECKPOINT
from tests.unit.capture.conversations import few, node_of, respelled
from workers.agent.codec import load_codec


class Capture:
    """A session, with what the engine was sent and what it sampled for each call."""

    def __init__(self, codec) -> None:
        self.codec, self.tree = codec, Tree()
        self.prompts: list[list[int]] = []
        self.sampled: list[list[int]] = []

    def call(self, messages, said="", *, tools=TOOLS, ids=None, backend="vllm b0", versions=("v1",)):
        """The conversation with its answer, as the program has it then."""
        call = ModelCall(list(messages), tools)
        attached = self.tree.attach(call)
        if attached.parent == ROOT:
            before, new = [], self.codec.render(call.messages, call.tools)
        else:
            prompt, sampled = self.tree.prompt(attached.parent), self.tree.sampled(attached.parent)
            before = prompt + sampled
            new = self.codec.bridge(prompt, sampled, attached.tail)
        self.prompts.append(before + new)
        self.sampled.append(ids or [*self.codec.encode(said), self.codec.stop_token_ids[0]])
        answer = self.codec.parse(self.prompts[-1], self.sampled[-1]).message
        length = len(self.sampled[-1])
        edges = [length * at // len(versions) for at in range(len(versions) + 1)]
        spans = [span for span in zip(versions, edges, edges[1:], strict=False) if span[1] < span[2]]
        node = node_of(self.tree, call, answer, new, self.sampled[-1], spans=spans, backend=backend)
        self.tree.add(node)
        return [*messages, answer]

    def chains(self, **more):
        """The chains and the receipt, with all that holds of every session seen to."""
        nodes = list(decode(encode(node) for node in self.tree.nodes))
        chains, receipt = build(nodes, "command", **more)
        calls = {node.call_id: place for place, node in enumerate(nodes)}
        # Every prompt is what the engine was sent, and every chain the last of them and what it sampled.
        again = Tree(nodes)
        for place, (prompt, sampled) in enumerate(zip(self.prompts, self.sampled, strict=True)):
            assert again.prompt(place) == prompt and again.sampled(place) == sampled
        leaves = [place for place in range(len(nodes)) if not again.children(place)]
        wholes = [self.prompts[leaf] + self.sampled[leaf] for leaf in leaves]
        assert sorted(chain.token_ids for chain in chains) == sorted(wholes)
        # Each sampled id has loss once.
        trained = [s for chain in chains for s in chain.segments if s.sampled]
        for node, sampled in zip(nodes, self.sampled, strict=True):
            pieces = [s for s in trained if s.call_id == node.call_id]
            assert [token for s in pieces for token in s.token_ids] == sampled
            assert [s.policy_version for s in pieces] == [version for version, _, _ in node.spans]
        for number, chain in enumerate(chains):
            seen, last = [], None
            for segment in chain.segments:
                if segment.call_id:
                    assert seen == self.prompts[calls[segment.call_id]] or segment.call_id == last
                    last = segment.call_id
                seen += segment.token_ids
            assert chain.parent != number and (chain.parent is None or 0 <= chain.parent < len(chains))
        if chains:
            assert chains[-1].role in TRAINED
            assert all(s.sampled for s in chains[-1].segments if s.call_id)
        # Parents lead to a chain that has none.
        for chain in chains:
            steps = 0
            while chain.parent is not None:
                chain, steps = chains[chain.parent], steps + 1
                assert steps <= len(chains)
        self.check_receipt(receipt, chains)
        trajectory = Trajectory(chains=chains, receipt=receipt)
        assert arrays.decode(arrays.encode(trajectory)).trajectory() == trajectory
        return chains, receipt

    def check_receipt(self, receipt, chains):
        digest = b""
        for prompt, sampled in zip(self.prompts, self.sampled, strict=True):
            digest = hashlib.sha256(digest + pack_ids(prompt) + pack_ids(sampled)).digest()
        total = sum(map(len, self.sampled))
        kept = sum(len(s.token_ids) for c in chains if c.role in TRAINED for s in c.segments if s.sampled)
        assert (receipt.drift, receipt.calls, receipt.digest) == (0, len(self.prompts), digest.hex())
        assert (receipt.sampled_tokens, receipt.share_delivered) == (total, kept / total if total else 1.0)
        assert receipt.branches == sum(node.parent == ROOT for node in self.tree.nodes)


@pytest.fixture(scope="module", params=["Qwen3", "demo"])
def codec(request, tmp_path_factory):
    if request.param == "demo":
        return load_codec(str(CHECKPOINT))
    return load_codec(str(directory("Qwen3", tmp_path_factory.mktemp("published"))))


@pytest.fixture
def capture(codec):
    return Capture(codec)


def user(text):
    return Message(role="user", content=text)


def tool(text, of=None):
    return Message(role="tool", content=text, tool_call_id=of)


def calls(*words):
    shown = ({"name": "look", "arguments": {"word": word}} for word in words)
    return "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in shown)


def answered(messages, *texts):
    asked = [call.id for call in messages[-1].tool_calls]
    assert len(asked) == len(texts)
    return [*messages, *(tool(text, of) for text, of in zip(texts, asked, strict=True))]


def table(chains):
    return [(chain.role, chain.parent) for chain in chains]


SYSTEM = Message(role="system", content="You are one who looks words up.")
START = [SYSTEM, user("What is an ox?")]
SUMMARY = (
    "The user asks what an ox is. We looked the word up twice, and it is an animal of the field, with horns."
)


def test_one_conversation_is_one_chain(capture):
    now = answered(capture.call(START, calls("ox"), versions=("v1", "v2")), "an animal")
    now = answered(capture.call(now, calls("ox", "horn"), backend="sglang b1"), "an animal", "a bone")
    capture.call(now, "An animal with horns.")
    chains, receipt = capture.chains(retries=2, refused=1)
    assert table(chains) == [("agent", None)]
    assert [s.role for s in chains[0].segments] == [
        *("user", "assistant", "assistant", "tool", "assistant", "tool", "assistant")
    ]
    assert (receipt.engines, receipt.retries, receipt.refused) == (["vllm b0", "sglang b1"], 2, 1)
    assert receipt.versions == ["v1", "v2"]
    assert (receipt.harness, receipt.branches, receipt.share_delivered) == ("command", 1, 1.0)


def test_no_call_is_no_chain(capture):
    chains, receipt = capture.chains()
    assert (chains, receipt.calls, receipt.digest) == ([], 0, "")


def test_of_a_fork_what_came_before_has_loss_in_the_chain_that_reached_the_end(capture):
    now = answered(capture.call(START, calls("ox")), "an animal")
    first = capture.call([*now, user("Go on.")], "One.")
    capture.call([*first, user("And?")], "Two.")
    capture.call([*now, user("Stop.")], "Three.")
    chains, _ = capture.chains()
    assert table(chains) == [("agent", 1), ("agent", None)]
    assert [s.sampled for s in chains[0].segments if s.call_id] == [False, True, True]
    assert [s.sampled for s in chains[1].segments if s.call_id] == [True, True]
    shared = chains[0].segments[1]
    assert shared.messages == chains[1].segments[1].messages and shared.role == "assistant"


def test_a_first_answer_that_was_asked_for_again_is_discarded(capture):
    lost = calls("lost")
    capture.call(START, lost)
    now = answered(capture.call(START, calls("ox")), "an animal")
    capture.call(now, "Lost as well.")
    now = [*capture.call(now, "Kept."), user("And?")]
    capture.call(now, "Done.")
    chains, receipt = capture.chains()
    assert table(chains) == [("discarded", 2), ("discarded", 2), ("agent", None)]
    assert receipt.share_delivered < 1


def test_of_two_last_answers_neither_is_discarded(capture):
    capture.call(START, "One.")
    capture.call(START, "Two.")
    assert table(capture.chains()[0]) == [("agent", None), ("agent", 0)]


def test_what_a_discarded_leaf_shares_has_loss_where_it_is_trained(capture):
    now = [*capture.call(START, "One."), user("And?")]
    capture.call([*capture.call(now, "Kept."), user("Go on.")], "Two.")
    capture.call(now, "Asked for once more.")
    capture.call([Message(role="system", content="You are another."), *START[1:]], "Done.")
    chains, _ = capture.chains()
    assert table(chains) == [("agent", None), ("discarded", 0), ("agent", 0)]
    assert [s.sampled for s in chains[0].segments if s.call_id] == [True, True, True]
    assert [s.sampled for s in chains[1].segments if s.call_id] == [False, True]


@pytest.mark.parametrize("told", ["{}", "Here is it:\n\n{}\nGo on.", "first turn"])
@pytest.mark.parametrize(
    "said", [SUMMARY, f"<think>hm</think>So: <summary>\n{SUMMARY}\n</summary> That is all."]
)
def test_a_summary_makes_the_chain_from_which_the_next_goes_on(capture, said, told):
    now = answered(capture.call(START, calls("ox")), "an animal")
    now = answered(capture.call(now, calls("ox")), "an animal")
    capture.call([*now, user("Summarise.")], said)
    if told == "first turn":
        after = [
            *START,
            capture.codec.parse(capture.prompts[-1], capture.sampled[-1]).message,
            user("Go on."),
        ]
    else:
        after = [SYSTEM, user(told.format(SUMMARY.replace(" ", "\n", 3)))]
    now = answered(capture.call(after, calls("horn")), "a bone")
    capture.call(now, "Done.")
    chains, receipt = capture.chains()
    assert table(chains) == [("compaction", None), ("agent", 0)]
    assert (receipt.branches, receipt.share_delivered) == (2, 1.0)


def test_a_program_may_have_a_conversation_summed_up_that_it_tells_as_one_text(capture):
    """As opencode does: the call for it is short, and what goes on keeps its last turns."""
    now = answered(capture.call(START, calls("ox")), "an animal")
    last = capture.call(now, calls("horn"))[-1]
    told = [Message(role="system", content="You sum up."), user("[User] … [Tool] an animal. Sum this up.")]
    summary = capture.call(told, SUMMARY, tools=[])[-1]
    after = answered([SYSTEM, user("What did we do so far?"), summary, last], "a bone")
    capture.call(after, "Done.")
    chains, receipt = capture.chains()
    assert table(chains) == [("agent", None), ("compaction", None), ("agent", 1)]
    assert receipt.share_delivered == 1.0


def test_a_history_that_was_only_edited_is_no_compaction(capture):
    now = answered(capture.call(START, calls("ox")), "an animal " * 20)
    now = [*capture.call(now, SUMMARY), user("And?")]
    now[3] = now[3].model_copy(update={"content": tool("(cut)").content})
    capture.call(now, "Done.")
    assert table(capture.chains()[0]) == [("agent", None), ("agent", 0)]


def test_a_turn_in_a_longer_history_of_another_system_is_no_compaction(capture):
    now = capture.call(START, SUMMARY)
    capture.call([Message(role="system", content="You are another."), *now[1:], user("And?")], "Done.")
    assert table(capture.chains()[0]) == [("agent", None), ("agent", 0)]


def test_words_of_its_own_prompt_make_no_compaction(capture):
    now = [SYSTEM, user(f"Say so: {SUMMARY}")]
    capture.call([user("Another matter.")], "yes", tools=[])
    capture.call(now, SUMMARY)
    assert table(capture.chains()[0]) == [("auxiliary", None), ("agent", None)]


def test_a_sub_agents_compaction_is_the_parent_of_what_then_reports(capture):
    now = capture.call(START, calls("ox"))
    helper = answered(capture.call([user("Look up ox.")], calls("ox")), "an animal")
    capture.call([*helper, user("Summarise.")], SUMMARY)
    report = "An ox is an animal that many people keep in their fields."
    capture.call([user(f"Go on from: {SUMMARY}")], report)
    capture.call(answered(now, report), "Done.")
    assert table(capture.chains()[0]) == [("compaction", 2), ("sub_agent", 0), ("agent", None)]


def test_a_root_whose_text_a_tool_then_told_is_a_sub_agents(capture):
    now = capture.call(START, calls("ox", "horn"))
    one = [Message(role="system", content="You help."), user("Look up ox.")]
    other = [Message(role="system", content="You help."), user("Look up horn.")]
    first = answered(capture.call(one, calls("ox")), "an animal")
    capture.call(other, "bone")
    report = capture.call(first, "An ox is an animal that many people keep in their fields.")[-1].text
    capture.call(answered(now, f"The agent said: {report}", "bone"), "Done.")
    assert table(capture.chains()[0]) == [("sub_agent", 2), ("sub_agent", 2), ("agent", None)]


def test_short_words_of_a_tool_make_no_sub_agent(capture):
    now = capture.call(START, calls("ox"))
    capture.call([user("Another matter?")], "an animal")
    capture.call(answered(now, "it is an animal with horns"), "Done.")
    assert "sub_agent" not in [chain.role for chain in capture.chains()[0]]


def test_what_a_tool_says_that_was_called_later_is_no_sub_agents_report(capture):
    now = answered(capture.call(START, calls("ox")), "a beast")
    said = "It is an animal that many people keep in their fields."
    capture.call([user("Another matter?")], said)
    now = capture.call(now, calls("ox"))
    capture.call(answered(now, said), "Done.")
    assert table(capture.chains()[0]) == [("agent", 1), ("agent", None)]


def test_calls_beside_the_task_are_auxiliary(capture):
    capture.call([user("Is this a new topic?")], "yes", tools=[])
    now = answered(capture.call(START, calls("ox")), "an animal")
    capture.call([user("A title, please.")], "Of oxen")
    capture.call(now, "Done.")
    chains, receipt = capture.chains()
    assert table(chains) == [("auxiliary", None), ("auxiliary", None), ("agent", None)]
    assert receipt.share_delivered < 1


def test_the_first_call_with_tools_is_the_agents_though_others_came_before(capture):
    capture.call([user("Is this a new topic?")], "yes", tools=[])
    capture.call(START, "Done.")
    assert table(capture.chains()[0]) == [("auxiliary", None), ("agent", None)]


def test_where_no_call_has_tools_they_make_no_difference(capture):
    now = capture.call(START, "Look: ox", tools=[])
    capture.call([*now, user("an animal")], "Done.", tools=[])
    assert table(capture.chains()[0]) == [("agent", None)]


def test_another_system_prompt_makes_another_chain_of_the_agent(capture):
    now = answered(capture.call(START, calls("ox")), "an animal")
    capture.call([user("A title, please.")], "Of oxen")
    swapped = [Message(role="system", content="You are another."), *now[1:]]
    capture.call(swapped, "Done.")
    chains, receipt = capture.chains()
    assert table(chains) == [("agent", None), ("auxiliary", None), ("agent", 0)]
    assert receipt.branches == 3


def test_a_node_behind_another_conversation_than_its_own_is_drift(capture):
    capture.call([user("Another matter.")], "Zero.")
    now = capture.call(START, "One.")
    capture.call([*now, user("And?")], "Two.")
    assert capture.chains()[1].drift == 0
    capture.tree.nodes[2].parent = 0
    assert build(capture.tree.nodes, "command")[1].drift == 1


def test_what_was_asked_of_sampling_is_told_once_with_its_calls_and_without_end_never(capture):
    for wanted in ({"top_k": 1, "seed": 2}, {}, {"seed": 2, "top_k": 1}):
        capture.call(START, "An animal.")
        capture.tree.nodes[-1].asked = wanted
    told = [(asked.parameters, asked.calls) for asked in capture.chains()[1].asked]
    assert told == [({"top_k": 1, "seed": 2}, 2), ({}, 1)]
    for seed in range(60):
        capture.call(START, "An animal.")
        capture.tree.nodes[-1].asked = {"seed": seed % 50}
    asked = capture.chains()[1].asked
    assert len(asked) == MOST_ASKED and asked[0].calls == 2
    assert [one.calls for one in asked[2:]] == [2] * 10 + [1] * 20


def test_a_program_that_begins_anew_in_each_call_keeps_nobody_for_long():
    """Of its texts some are looked for; what is left when that has taken long enough is an agent's."""
    tree = Tree()
    for number in range(700):
        call = ModelCall([user(f"{number} {'y' * 10_000}"), *[user("z" * 10_000)] * 3])
        said = Message(role="assistant", content=f"{number} {'x' * 1000}")
        tree.add(node_of(tree, call, said, [1, 2, 3], [4, 5]))
    began = time.process_time()
    chains, receipt = build(tree.nodes, "command")
    assert time.process_time() - began < 10
    assert receipt.branches == len(chains) == 700 and {chain.role for chain in chains} <= TRAINED | {
        "auxiliary"
    }


def test_what_there_is_no_time_to_look_for_is_an_agents(capture, monkeypatch):
    capture.call([*capture.call(START, "It is an animal."), user("Really?")], "Yes.")
    capture.call([user("What might be the title of this?")], "Oxen.", tools=TOOLS)
    assert table(capture.chains()[0])[0] == ("auxiliary", None)
    monkeypatch.setattr("services.capture.chains.MOST_COMPARED", 10)
    assert {chain.role for chain in capture.chains()[0]} == {"agent"}


def test_the_calls_of_a_session_are_told_with_their_times_unless_an_earlier_release_wrote_them(codec):
    capture = Capture(codec)
    history = capture.call([SYSTEM, user("An ox?")], calls("ox"))
    capture.call([*history, tool("a", history[-1].tool_calls[0].id)], "done")
    capture.call([SYSTEM, user("Another?")], "no")
    nodes = [structs.replace(node, took_ms=1500, at_ms=1_700_000_002_000) for node in capture.tree.nodes]
    told = timed(nodes)
    assert [call.id for call in told] == [node.call_id for node in nodes]
    assert [call.prompt_tokens for call in told] == [len(prompt) for prompt in capture.prompts]
    assert {(call.kind, call.backend, call.at, call.seconds) for call in told} == {
        ("model", "b0", 1_700_000_000.5, 1.5)
    }
    assert timed(capture.tree.nodes) == []


@st.composite
def sessions(draw, capture):
    """A program by chance: it goes on, forks, tries again, compacts, asks something else."""
    held = [START]
    for number in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(["on", "on", "on", "fork", "retry", "compact", "sub", "aside"]))
        at = len(held) - 1 if kind == "on" else draw(st.integers(0, len(held) - 1))
        messages = list(held[at])
        if kind in ("retry", "fork") and messages[-1].role == "assistant":
            messages.pop()
        if kind == "fork":
            messages.append(user(f"Or {draw(few)} {number}?"))
        if messages[-1].role == "assistant":
            asked = messages[-1].tool_calls
            messages += [tool(draw(few), call.id) for call in asked] or [user(draw(few) or "?")]
        if kind == "compact":
            messages = [SYSTEM, user(messages[-1].text + SUMMARY)]
        elif kind in ("sub", "aside"):
            messages = [user(f"{kind} {draw(few)}")]
        ids = draw(st.none() | st.lists(st.integers(0, 60), min_size=1, max_size=6))
        said = draw(st.sampled_from([calls("ox"), calls("ox", "ox"), SUMMARY, "an animal", ""]))
        offered = [] if kind == "aside" else TOOLS
        versions = draw(st.sampled_from([("v1",), ("v1", "v2"), (None,)]))
        sent = draw(respelled(messages))
        now = capture.call(sent, said, ids=ids, tools=offered, versions=versions)
        held.append([*messages, now[-1]])
    return capture


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_whatever_a_program_does_its_ids_are_those_of_the_engine_and_learned_from_once(codec, data):
    capture = data.draw(sessions(Capture(codec)))
    chains, _ = capture.chains()
    assert chains
