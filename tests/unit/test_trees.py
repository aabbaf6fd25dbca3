"""What each turn of a tree is worth, and that each is trained once."""

from __future__ import annotations

import itertools
import json
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rollout.adapters import areal, base, nemo_gym, prime_rl, skyrl, slime, trl, verl
from rollout.arrays import Arrays, decode, encode, pack_ids, pack_logprobs
from rollout.cli.render import rollout_view, rollouts_table
from rollout.schema import Rollout
from rollout.trajectory import Message, Segment
from rollout.trees import Tree, tokens_ratio
from services.gateway.page.watched import Watched
from services.state.turns.entries import Sampled
from tests.helpers.trees import PROMPT, family, rolled, turn_ids

FAMILY = family()
THIRDS = [pytest.approx(-1 / 3)] * 2 + [pytest.approx(2 / 3)]
SAMPLED = sum(len(turn_ids(call)) for call in "abcdef")


def values_of(tree: Tree, name: str) -> list[tuple]:
    return [(s.after, s.until, s.leaves, s.value, s.advantage) for s in tree.spans(name)]


def test_a_span_is_worth_the_leaves_below_it_less_what_begins_beside_it():
    tree = Tree([*FAMILY, rolled("t", "xy", 0.0), rolled("ff", "aez", 1.0, ("f2", 2))])
    assert values_of(tree, "s") == [(0, 1, 4, 0.5, 0.25), (1, None, 1, 1.0, 0.5)]
    assert values_of(tree, "f1") == [(1, None, 1, 0.0, -0.5)]
    assert values_of(tree, "f2") == [(1, 2, 2, 0.5, 0.0), (2, None, 1, 0.0, -0.5)]
    assert values_of(tree, "ff") == [(2, None, 1, 1.0, 0.5)]
    assert values_of(tree, "t") == [(0, None, 1, 0.0, -0.25)]
    (row,) = tree.advantages("s")
    assert row == [
        *([0.25] * len(turn_ids("a")) + [0.0]),
        *([0.5] * len(turn_ids("b")) + [0.0]),
        *([0.5] * len(turn_ids("c")) + [0.0]),
    ]
    assert len(row) == len(FAMILY[0].trajectory.response_ids)
    assert tree.advantages("ff") == [[0.5] * len(turn_ids("z")) + [0.0]], "what it shares is its prompt"


def test_a_fork_before_its_source_was_a_fork_is_one_of_the_first():
    # It names f1, but of that only the turn that s has sampled.
    tree = Tree([*FAMILY, rolled("late", "ag", 1.0, ("f1", 1))])
    assert values_of(tree, "late") == [(1, None, 1, 1.0, 0.5)]
    assert values_of(tree, "s")[1] == (1, None, 1, 1.0, 0.5) and len(values_of(tree, "f1")) == 1


def test_what_was_dropped_counts_nowhere_and_cuts_nothing():
    rows = [rolled("s", "abc", 1.0), rolled("t", "xy", 0.0), rolled("f", "ad", None, ("s", 1))]
    tree = Tree(rows)
    assert [span.advantage for span in tree.spans("s")] == [0.5, 0.5], "as if it had no fork"
    assert values_of(tree, "f") == [(1, None, 0, None, 0.0)]
    assert tree.advantages("f") == [[0.0] * 4]
    # The source was dropped: its shared turn counts by its forks, and is not learned from in it.
    rows = [rolled("s", "abc", None), rolled("t", "xy", 0.0), rolled("f", "ad", 1.0, ("s", 1))]
    tree = Tree(rows)
    assert values_of(tree, "s")[0] == (0, 1, 1, 1.0, 0.5) and values_of(tree, "f")[0][-1] == 0.5
    assert not any(tree.advantages("s")[0])


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (
            [rolled("f", "ab", 1.0, ("gone", 1))],
            "f is a fork of gone, which is not among them: add it, or say",
        ),
        ([rolled("s", "a"), rolled("f", "abc", 1.0, ("s", 2))], "f is a fork of s at turn 2, which has 1"),
        ([rolled("a", "xy", 1.0, ("b", 1)), rolled("b", "xz", 1.0, ("a", 1))], "lead back to it"),
        ([rolled("a", "uvxy", 1.0, ("b", 3)), rolled("b", "uvxz", 1.0, ("a", 1))], "lead back to it"),
        ([rolled("s", "a"), rolled("s", "a")], "s is there twice"),
        ([rolled("s", "a", None, drop=False, state="running")], "s has no reward: it is running"),
    ],
)
def test_what_is_no_tree_is_refused_with_the_reason(rows, error):
    with pytest.raises(ValueError, match=error):
        Tree(rows)


def test_forks_of_an_absent_rollout_are_a_tree_of_their_own():
    tree = Tree([*FAMILY[1:], rolled("f3", "ah", 1.0, ("s", 1))], absent="root")
    assert [tree.spans(name)[0].advantage for name in ("f1", "f2", "f3")] == THIRDS


# ---------------------------------------------------------------------------------- reference


@st.composite
def trees(draw) -> list[Rollout]:
    """Roots and forks: each with calls of its own, behind some turns of any one before it."""
    names = (f"{number:03d}" for number in itertools.count())
    rows: list[tuple[Rollout, list[str]]] = []
    for number in range(draw(st.integers(1, 9))):
        reward = draw(st.sampled_from([0.0, 0.25, 1.0, 1.0, None]))
        own = [next(names) for _ in range(draw(st.integers(1, 3)))]
        if rows and draw(st.integers(0, 3)):
            source, path = rows[draw(st.integers(0, len(rows) - 1))]
            turn = draw(st.integers(1, len(path)))
            calls = path[:turn] + own
            rows.append((rolled(f"r{number}", calls, reward, (source.id, turn)), calls))
        else:
            rows.append((rolled(f"r{number}", own, reward), own))
    return [rollout for rollout, _ in draw(st.permutations(rows))]


def paths(rollouts: list[Rollout]) -> dict[str, list[str]]:
    """The calls of each, and an end of its own."""
    calls = {
        r.id: [s.call_id for s in r.trajectory.chain.segments if s.role == "assistant"] for r in rollouts
    }
    return {name: [*path, f"end-{name}"] for name, path in calls.items()}


def worth(rollouts: list[Rollout], name: str, turn: int) -> float:
    """The advantage of a turn, by looking at every path: at the last step before it in which some differ."""
    every = paths(rollouts)
    judged = {r.id: r.reward for r in rollouts if base.usable(r)}
    for at in range(turn - 1, -1, -1):
        below: dict[str, list[float]] = {}
        for other, reward in judged.items():
            if every[other][:at] == every[name][:at]:
                below.setdefault(every[other][at], []).append(reward)
        mine = every[name][at]
        if mine not in below:
            return 0.0
        if len(below) > 1:
            means = {call: sum(values) / len(values) for call, values in below.items()}
            return means[mine] - sum(means.values()) / len(means)
    return 0.0


@settings(max_examples=150, deadline=None)
@given(trees())
def test_every_token_has_the_advantage_that_comparing_all_paths_gives(rollouts):
    tree = Tree(rollouts)
    trained: list[str] = []
    for rollout in rollouts:
        (row,) = tree.advantages(rollout.id) or [[]]
        sample = base.own_samples(rollout)[0]
        shared = rollout.request.origin.turn if rollout.request.origin else 0
        want, calls = [], paths(rollouts)[rollout.id][:-1]
        for turn, call in enumerate(calls[shared:], start=shared + 1):
            value = worth(rollouts, rollout.id, turn) if base.usable(rollout) else 0.0
            want += [value] * len(turn_ids(call)) + [0.0]
            trained.append(call)
        assert row == pytest.approx(want) and len(row) == len(sample.response_ids)
    assert len(trained) == len(set(trained)), "each call is sampled in one rollout alone"
    spans = [span for rollout in rollouts for span in tree.spans(rollout.id)]
    assert all((span.value is None) == (span.leaves == 0) for span in spans)


def test_without_forks_it_is_the_advantage_of_the_group():
    rows = [rolled(name, name, reward) for name, reward in zip("abcd", (1.0, 0.0, 0.5, None), strict=True)]
    tree = Tree(rows)
    assert [tree.spans(row.id)[0].advantage for row in rows] == base.advantages(rows)


# ---------------------------------------------------------------------------------- trainers

TRAINED = {
    "areal": lambda rows: sum(int(areal.tensor_dict(row)["loss_mask"].sum()) for row in rows),
    "nemo_gym": lambda rows: sum(
        len(item.get("generation_token_ids", ()))
        for row in rows
        for item in nemo_gym.run_response(row)["response"]["output"]
    ),
    "prime_rl": lambda rows: sum(sum(s["mask"]) for row in rows for s in prime_rl.training_samples(row)),
    "verifiers": lambda rows: sum(
        sum(node["mask"]) for row in rows for node in prime_rl.trace_fields(row)["nodes"] if "mask" in node
    ),
    "skyrl": lambda rows: sum(map(sum, skyrl.generator_output(rows, step_wise=True)["loss_masks"])),
    "slime": lambda rows: sum(sum(s["loss_mask"]) for s in slime.sample_dicts(rows, group_index=0)),
    "trl": lambda rows: sum(map(sum, trl.rollout_func_result(rows)["env_mask"])),
    "verl": lambda rows: sum(sum(verl.agent_loop_output(row)["response_mask"]) for row in rows),
}


@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
def test_a_tree_is_trained_once_by_every_adapter(trained):
    assert trained(FAMILY) == SAMPLED


def test_what_a_fork_shares_is_its_prompt_everywhere():
    fork = FAMILY[1]
    prompt, response = [*PROMPT, *turn_ids("a"), 9], [*turn_ids("d"), 9]
    assert trl.rollout_func_result([fork])["prompt_ids"] == [prompt]
    assert skyrl.generator_output([fork])["prompt_token_ids"] == [prompt]
    row = verl.agent_loop_output(fork)
    assert (row["prompt_ids"], row["response_ids"]) == (prompt, response)
    with pytest.raises(ValueError, match=r"prompt of f1 has 5 ids and rollout.prompt_length is 4"):
        verl.agent_loop_output(fork, prompt_length=4)
    (sample,) = slime.sample_dicts([fork], group_index=0)
    assert sample["tokens"] == prompt + response and sample["response_length"] == len(response)
    assert [message["content"] for message in sample["prompt"]] == ["Q", "a", "saw a"]
    item = nemo_gym.run_response(fork)["response"]["output"][0]
    assert (item["prompt_token_ids"], item["generation_token_ids"]) == (prompt, turn_ids("d"))
    assert areal.tensor_dict(fork)["versions"].tolist() == [[-1] * 5 + [3] * len(turn_ids("d")) + [-1]]
    nodes = prime_rl.trace_fields(fork)["nodes"]
    assert [node["sampled"] for node in nodes] == [False, False, False, True, False]


def test_prime_rl_takes_the_advantages_of_a_tree():
    tree = Tree(FAMILY)
    rows = [prime_rl.training_samples(row, token_advantages=tree.advantages(row.id))[0] for row in FAMILY]
    first, fork = turn_ids("a"), turn_ids("d")
    assert rows[0]["advantages"][: len(PROMPT) + len(first)] == [0.0] * len(PROMPT) + [0.0] * len(first)
    assert rows[1]["advantages"] == [0.0] * 5 + [pytest.approx(-1 / 3)] * len(fork) + [0.0]
    assert all(len(row["advantages"]) == len(row["token_ids"]) for row in rows)


def test_forks_are_a_group_of_their_own_to_trainers_that_know_no_tree():
    assert base.advantages(FAMILY) == [0.0, 0.0, 0.0]
    assert base.advantages([*FAMILY, rolled("f3", "ah", 1.0, ("s", 1))]) == [0.0, *THIRDS]


def test_a_branch_comes_back_from_arrays_and_from_json():
    fork = FAMILY[2]
    record = decode(encode(fork.trajectory))
    assert record.trajectory() == fork.trajectory and record.trajectory().branch.turn == 1
    arrays = Arrays(record)
    assert arrays.prompt_tokens == fork.trajectory.branch.tokens
    assert int(arrays.loss_mask.sum()) == fork.trajectory.sampled_tokens
    assert Rollout.model_validate_json(fork.model_dump_json()) == fork
    light = fork.model_copy(update={"trajectory": None})
    light.__dict__["arrays"] = arrays
    assert Tree([FAMILY[0], light]).advantages(fork.id) == Tree([FAMILY[0], fork]).advantages(fork.id)


def test_the_tokens_of_a_tree_are_told_beside_those_of_rollouts_that_share_none():
    apart = sum(len(turn_ids(call)) for call in "abcadaef")
    assert tokens_ratio(FAMILY) == SAMPLED / apart
    with pytest.raises(ValueError, match="without trajectories"):
        tokens_ratio([rolled("s", "a", trajectory=None)])


# ---------------------------------------------------------------------------------- shown


def shown(view) -> str:
    console = Console(width=100, file=StringIO(), color_system=None)
    console.print(view)
    return console.file.getvalue()


def test_the_command_line_tells_where_a_fork_left_which_rollout_and_what_it_shares():
    fork = FAMILY[2].model_copy(update={"moved": 2, "resumed": 1})
    text = shown(rollout_view(fork))
    assert "attempt 1, taken over 1 times, moved 2 times" in text
    assert "from s at turn 1, 5 tokens shared, 2 of them sampled there" in text
    assert text.count(", shared") == 3 and "assistant  2 tokens, shared" in text
    assert "turn 2, 2 tokens sampled" in text and "turn 3, 3 tokens sampled" in text
    assert "moved" not in shown(rollout_view(FAMILY[0])) and "shared" not in shown(rollout_view(FAMILY[0]))
    assert "fork of s at turn 1" in shown(rollouts_table([fork]))


def test_the_shared_turns_of_a_running_fork_are_shown_as_given():
    said = [Message(role="assistant", content=text).model_dump_json() for text in ("old", "new")]
    ids, logprobs, spans = pack_ids([5, 6]), pack_logprobs([-0.5, -0.5]), [("v1", 0, 2)]
    entries = [
        Sampled(call, ids, *logprobs, spans, "stop", text, [], 0.1)
        for call, text in zip("ab", said, strict=True)
    ]
    for rollout, want in ((FAMILY[1], [False, True]), (FAMILY[0], [True, True])):
        event = Watched(rollout).turns(entries).decode()
        pieces = json.loads(event.partition("data: ")[2])["pieces"]
        assert [piece["segment"]["sampled"] for piece in pieces] == want
        assert all(Segment.model_validate(piece["segment"]) for piece in pieces)
