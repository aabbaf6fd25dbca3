"""The handler `reasoning_gym`: every dataset of the package, by its own scorer, and nothing evaluated."""

from __future__ import annotations

import json

import pytest

from rollout.schema import Blame, State
from tests.helpers.players import documented_row, finish, player
from workers.errors import TaskError
from workers.handlers.reasoning_gym import ENTRY, JUDGE, ReasoningGym

SEED = 7
CHECKS = "tests.helpers.reasoning"

NO_SOLUTION = {"boxnet", "rush_hour"}
"""The package knows no solution of these, and we search for none."""
NEEDS_CONFIG = {"composite"}
"""A mixture of others, which are named in its configuration."""
ANY_THAT_FOLLOWS = {"propositional_logic"}
"""Asks for any valid conclusion, and that of another entry may be one."""
FLOOR = {
    "advanced_geometry": 0.01,
    "arc_agi": 0.05,
    "color_cube_rotation": 0.01,
    "countdown": 0.05,
    "emoji_mystery": 0.01,
    "figlet_font": 0.1,
    "fraction_simplification": 0.01,
    "graph_color": 0.01,
    "palindrome_generation": 0.05,
    "polynomial_equations": 0.01,
    "power_function": 0.01,
    "prime_factorization": 0.01,
    "propositional_logic": 0.05,
    "puzzle24": 0.01,
    "rearc": 0.05,
    "rubiks_cube": 0.05,
    "sentence_reordering": 0.05,
    "tsumego": 0.01,
}
"""What these give at most for an answer that is wrong but not empty."""


@pytest.fixture(scope="module")
def names(players):
    """Every dataset of the package that has a default configuration."""
    (datasets,) = players.score(f"{CHECKS}:datasets", [None])
    return sorted(set(datasets) - NEEDS_CONFIG)


def source(name, index=0):
    return {"dataset": name, "seed": SEED, "index": index, "size": None, "config": {}}


def scores(players, sources, answer):
    return [
        verdict["score"]
        for verdict in players.score(JUDGE, [{"task": s, "answer": answer, "asked": None} for s in sources])
    ]


# -- every dataset -------------------------------------------------------------------------------


def test_200_tasks_of_all_datasets_take_their_own_solution_and_no_other(players, names):
    solvable = [source(name, index) for name in names if name not in NO_SOLUTION for index in (0, 1)]
    assert len(solvable) >= 200
    wrong = [s["dataset"] for s, v in zip(solvable, scores(players, solvable, None), strict=True) if v != 1.0]
    assert wrong == []
    nonsense = "@@ no answer @@"
    taken = {
        s["dataset"]: v
        for s, v in zip(solvable, scores(players, solvable, nonsense), strict=True)
        if v > FLOOR.get(s["dataset"], 0.0)
    }
    assert taken == {}


def test_the_solution_of_another_entry_is_wrong(players, names):
    """A wrong answer of the right form, where the two entries' answers differ."""
    pairs = [
        {"task": source(name), "other": source(name, 1)} for name in names if name not in ANY_THAT_FOLLOWS
    ]
    verdicts = players.score(f"{CHECKS}:swapped", pairs)
    differing = [
        (p["task"]["dataset"], f["score"]) for p, f in zip(pairs, verdicts, strict=True) if f["differs"]
    ]
    assert [name for name, value in differing if value >= 0.99] == []
    assert len(differing) > 80


def test_entries_from_a_file_are_scored_as_those_made_here(players, names):
    rows = players.score(f"{CHECKS}:row", [source(name) for name in names])
    tasks = [ReasoningGym().check_task(json.loads(json.dumps(row))).source() for row in rows]
    by_name = dict(zip(names, scores(players, tasks, None), strict=True))
    assert {name for name, value in by_name.items() if value != 1.0} == NO_SOLUTION


def test_a_mixture_is_scored_by_the_dataset_that_the_entry_is_of(players):
    parts = [{"name": "chain_sum"}, {"name": "puzzle24", "config": {"max_value": 6}}]
    sources = [{**source("composite", index), "config": {"datasets": parts}} for index in range(8)]
    assert scores(players, sources, None) == [1.0] * 8
    rows = players.score(f"{CHECKS}:row", sources)
    kinds = [row["metadata"]["source_dataset"] for row in rows]
    assert set(kinds) == {"chain_sum", "puzzle24"}
    for kind, value in zip(kinds, scores(players, sources, "4*6*1*1"), strict=True):
        assert value == 0.0 or kind == "chain_sum"


def test_an_entry_is_the_same_in_every_process(players, names):
    """Some datasets depend on the order of sets of strings, which Python changes from process to process."""
    sources = [source(name) for name in ("isomorphic_strings", "polynomial_multiplication", "ransom_note")]
    here = players.score(ENTRY, sources)
    with player() as second:
        assert second.score(ENTRY, sources) == here


@pytest.mark.parametrize(
    ("dataset", "answers"),
    [
        ("puzzle24", ["4*6*1*1", "(1+1)*2*6"]),
        ("game_of_life_halting", ["anything", "0"]),
        ("coin_flip", ["0", "0.", "nan"]),
    ],
)
def test_scorers_that_take_nearly_anything_are_held_to_the_answer(players, dataset, answers):
    for answer in answers:
        assert scores(players, [source(dataset)], answer) == [0.0]


@pytest.mark.parametrize(
    "dataset",
    [
        *("string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24"),
        *("polynomial_multiplication", "simple_integration", "intermediate_integration"),
    ],
)
def test_no_answer_is_run_as_python(players, dataset, tmp_path):
    """The package's own scorers do: with `eval`, or by sympy's `parse_expr`."""
    mark = tmp_path / "ran"
    path = "+".join(f"chr({ord(letter)})" for letter in str(mark))
    for answer in (
        f"open({str(mark)!r}, 'w')",
        f"open({path}, chr(119))",
        f"[open({str(mark)!r}, 'w')]",
        f"().__class__.__base__.__subclasses__() or open({path}, chr(119))",
    ):
        (value,) = scores(players, [source(dataset)], answer)
        assert value <= 0.05
    assert not mark.exists()


def test_lists_and_formulas_still_count_where_the_package_takes_them(players):
    assert scores(players, [source("polynomial_multiplication")], "x*0 + 1") == [0.0]
    (made,) = players.score(f"{CHECKS}:row", [source("string_insertion")])
    assert scores(players, [source("string_insertion")], str(list(made["answer"]))) == [0.1]


# -- the handler ---------------------------------------------------------------------------------

TASK = {"dataset": "basic_arithmetic", "seed": 3, "index": 5}


@pytest.fixture(scope="module")
def gold(players):
    return players.score(f"{CHECKS}:row", [{**source("basic_arithmetic", 5), "seed": 3}])[0]


def test_the_tagged_answer_or_the_message_of_finish_is_scored(players, gold):
    answer = gold["answer"]
    for turns, reward, answered in [
        ([f"It is <answer>1</answer>, no: <answer> {answer} </answer>"], 1.0, 1.0),
        ([finish(answer)], 1.0, 1.0),
        ([finish(f"<answer>{answer}</answer>")], 1.0, 1.0),
        (["<answer>77777777</answer>"], 0.0, 1.0),
        ([f"It is {answer}."], 0.0, 0.0),
    ]:
        done = players.play(ReasoningGym(), TASK, turns)
        assert (done.state, done.reward) == (State.COMPLETED, reward), done.error
        assert done.reward_components["answered"] == answered
        assert gold["question"] in done.trajectory.messages[0].text


def test_partial_credit_can_be_left_out(players):
    task = {"dataset": "countdown", "seed": 1, "index": 0}
    for more, reward in (({}, 0.05), ({"partial_credit": False}, 0.0)):
        done = players.play(ReasoningGym(), {**task, **more}, ["<answer>1 + 1</answer>"])
        assert done.reward == reward
        assert done.reward_components == {"correct": 0.0, "score": 0.05, "answered": 1.0}


def test_tasks_that_make_no_entry_are_at_fault_themselves(players):
    for task, reason in [
        (
            {"dataset": "basic_arithmetics", "seed": 1},
            "no dataset 'basic_arithmetics'; there are 'basic",
        ),
        ({"dataset": "basic_arithmetic", "seed": 1, "index": 7, "size": 7}, "index 7 is outside"),
        ({"dataset": "basic_arithmetic", "seed": 1, "config": {"min_terms": -3}}, "cannot be made"),
        ({"dataset": "basic_arithmetic", "seed": 1, "config": {"no_such": 1}}, "no_such"),
        ({"dataset": "codeio", "seed": 1}, "runs programs"),
        ({"dataset": "composite", "seed": 1, "config": {"datasets": [{"name": "codeio"}]}}, "runs programs"),
    ]:
        done = players.play(ReasoningGym(), task, ["x"])
        assert done.error.blame is Blame.TASK and done.error.stage == "init" and reason in done.error.message
    for task, reason in [
        ({"dataset": "basic_arithmetic"}, "either `dataset`, `seed` and `index`"),
        ({"question": "1+1?", "answer": "2"}, "needs its `metadata`"),
        ({"question": "1+1?", "answer": "2", "metadata": {}}, "`dataset` is missing"),
        ({"dataset": "basic_arithmetic", "seed": 1, "config": {"size": 3}}, "fields of the task"),
    ]:
        with pytest.raises(TaskError, match=reason):
            ReasoningGym().check_task(task)


def test_workers_that_make_other_entries_give_no_reward(players, monkeypatch):
    """As when the release of the package differs between the workers of RUN and of EVAL."""
    monkeypatch.setattr("workers.handlers.reasoning_gym.ENTRY", f"{CHECKS}:another_question")
    done = players.play(ReasoningGym(), TASK, ["<answer>1</answer>"], limits={"max_attempts": 1})
    assert done.state is State.FAILED and done.reward is None and done.drop
    assert done.error.blame is Blame.INFRASTRUCTURE and "the same release" in done.error.message


def test_without_the_package_the_error_says_what_to_install(players, monkeypatch):
    monkeypatch.setattr("workers.handlers.packages.find_spec", lambda name: None)
    done = players.play(ReasoningGym(), TASK, ["x"])
    assert done.error.blame is Blame.HANDLER and "rollout-service[reasoning-gym]" in done.error.message


def test_the_row_of_the_guide_runs_as_written(players):
    task = documented_row("reasoning_gym")
    (made,) = players.score(f"{CHECKS}:row", [ReasoningGym().check_task(task).source()])
    assert players.play(ReasoningGym(), task, [f"<answer>{made['answer']}</answer>"]).reward == 1.0
    assert players.play(ReasoningGym(), task, ["<answer>-5</answer>"]).reward == 0.05
