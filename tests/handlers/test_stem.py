"""Science: the same choice, quantity, phrase or set; the search; the handlers `stem` and `stem_tools`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rollout.schema import Blame, State
from services.settings import Settings
from tests.helpers.players import complaints, documented_row, finish
from tests.helpers.search import FileSearch
from workers.agent.replay import Action, Call
from workers.agent.tools import ToolContext
from workers.errors import HandlerError, InfrastructureError, TaskError
from workers.handlers.search import Hit, Search, SearchTool, load_search
from workers.handlers.stem import CHECK, JUDGE, Stem, StemTools

CHOICES = ["2 m", "4 m", "6 m", "8 m"]
RIGHT = [
    (
        {"answer": "B", "choices": CHOICES},
        [
            "B",
            "b",
            "(B)",
            "B.",
            "B)",
            "[B]",
            "Option B",
            "choice (b)",
            "answer: B",
            r"\text{B}",
            r"\textbf{(B)}",
            "B) 4 m",
            "B: 4 m",
            "(B) the second",
            "4 m",
            r"4\,\text{m}",
            "Ｂ",
            "**B**",
        ],
    ),
    ({"answer": "4 m", "choices": CHOICES}, ["B"]),
    ({"answer": ["A", "C"], "choices": CHOICES}, ["A, C", "C and A", "AC", "(A), (C)", "A; C", "2 m, 6 m"]),
    (
        {"answer": "9.81 m/s^2"},
        [
            "9.81 m/s^2",
            "9.81",
            "9.8 m/s²",
            r"9.81\,\text{m/s}^2",
            r"9.81\ \mathrm{m\,s^{-2}}",
            "9.81 m s^-2",
            "9.81 m s-2",
            "981 cm/s^2",
            "g = 9.81 m/s^2",
            "approximately 9.8 m/s^2",
            "≈ 9.81 meters per second squared",
            r"$9.81 \text{ m/s}^2$",
            "9.81 N/kg",
            "9.81 ± 0.02 m/s^2",
            "9.81 m/s2",
        ],
    ),
    (
        {"answer": "1.2e-3 mol"},
        [
            "1.2e-3 mol",
            r"1.2 \times 10^{-3}\ \text{mol}",
            "0.0012 mol",
            "1.2 mmol",
            "1.2 × 10^-3 mol",
            "1.2x10^-3 mol",
            "0.0012 moles",
        ],
    ),
    ({"answer": "120000"}, ["120,000", r"1.2 \cdot 10^5", "1.2e5", "120000.", "120000"]),
    ({"answer": "3/4"}, ["0.75", r"\frac{3}{4}", r"\dfrac34", "3/4"]),
    ({"answer": "25 °C"}, ["298.15 K", "25 °C", "25 degrees Celsius", r"25^\circ\text{C}", "25 C", "77 °F"]),
    ({"answer": "50%"}, ["50%", r"50\%", "50 percent", "0.5", "50"]),
    ({"answer": "90°"}, ["90 degrees", r"90^\circ", "1.5708 rad", "1.5708", "90"]),
    ({"answer": 5, "unit": "kJ/mol"}, ["5 kJ/mol", "5000 J/mol", "5000 J mol^{-1}", "5", "5 KJ/mol"]),
    ({"answer": "6.02e23"}, [r"6.022\times10^{23}", "6.0e23"]),
    ({"answer": "10 ohm"}, [r"10\,\Omega", "10 Ω", "0.01 kΩ"]),
    ({"answer": "500 nm"}, ["5e-7 m", "0.5 µm", r"0.5\,\mu m", "5000 Å"]),
    ({"answer": "-3.2 eV"}, ["−3.2 eV", "-3.2 eV", "-5.13e-19 J"]),
    ({"answer": "1000"}, ["10^3", "1,000"]),
    (
        {"answer": "the mitochondrion"},
        ["mitochondrion", "The Mitochondrion.", r"\text{Mitochondrion}", "**mitochondrion**"],
    ),
    ({"answer": "H2O"}, ["H₂O", "H_2O", r"\mathrm{H_2O}", r"\ce{H2O}", "h2o"]),
    ({"answer": "CO"}, ["CO", "co"]),
    ({"answer": "X-ray"}, ["x ray", "X-ray"]),
    ({"answer": ["Na", "K"]}, ["K, Na", "Na and K", r"\{K, Na\}"]),
    (
        {"answer": ["oxygen", "carbon dioxide", "water"]},
        ["water; carbon dioxide; oxygen", "Carbon dioxide, water, and oxygen"],
    ),
    ({"answer": ["1.5 m", "2 m"]}, ["2 m, 150 cm"]),
    ({"answer": "3 bonds"}, ["3", "3 bonds", "3 bond"]),
    ({"answer": "2-butanol"}, ["2-Butanol", "2-butanol."]),
    ({"kind": "exact", "answer": ["DNA", "deoxyribonucleic acid"]}, ["DNA", "Deoxyribonucleic acid"]),
    ({"answer": "5 m"}, [r"5~\text{m}", "~5 m", "5.0 m"]),
]
WRONG = [
    (
        {"answer": "B", "choices": CHOICES},
        ["A", "C", "A or B", "AB", "B and C", "6 m", "B) 6 m", "", "none", "E", "better", "4"],
    ),
    ({"answer": ["A", "C"], "choices": CHOICES}, ["A", "A, B", "A, B, C", "A, C, C", "ABC"]),
    (
        {"answer": "9.81 m/s^2"},
        [
            "9.81 m/s",
            "8.9 m/s^2",
            "9.81 kg",
            "9.81 apples",
            "9 or 9.81",
            "9.81-10",
            "ninety",
            "",
            "9.81 cm/s^2",
        ],
    ),
    ({"answer": "9.81 m/s^2", "unit_required": True}, ["9.81"]),
    ({"answer": "100", "rel_tolerance": 0}, ["100.1", "99"]),
    ({"answer": "3/4"}, ["4/3", "0.7"]),
    ({"answer": "25 °C"}, ["25 K", "25 °F"]),
    ({"answer": "50%"}, ["5", "0.05"]),
    ({"answer": "1.2e-3 mol"}, ["1.2e3 mol", "1.2 mol"]),
    ({"answer": "5"}, ["5 or 6", "5-6", "5, 6", "10^5", "9" * 500, "5e999"]),
    ({"answer": "the mitochondrion"}, ["nucleus", "mitochondrion or nucleus"]),
    ({"answer": "CO"}, ["Co", "CO2"]),
    ({"answer": ["Na", "K"]}, ["Na", "Na, K, Li", "Na, Na"]),
    ({"answer": ["1.5 m", "2 m"]}, ["2 m"]),
    ({"answer": 5, "unit": "kJ/mol"}, ["5 J/mol", "5 kJ"]),
    ({"answer": "3 bonds"}, ["4 bonds", "3 atoms"]),
    ({"answer": "2-butanol"}, ["butanol", "2", "3-butanol"]),
]


def task(**fields):
    whole = {"problem": "?", **fields}
    assert complaints(Stem(), whole) == []
    return Stem().check_task(whole)


def judged(players, rows):
    cases = [(fields, answer) for fields, answers in rows for answer in answers]
    verdicts = players.score(JUDGE, [task(**fields).judged(answer) for fields, answer in cases])
    return [(case, verdict["correct"]) for case, verdict in zip(cases, verdicts, strict=True)]


# -- comparison ----------------------------------------------------------------------------------


def test_the_right_answer_is_right_in_every_spelling(players):
    assert [case for case, correct in judged(players, RIGHT) if not correct] == []


def test_another_answer_is_wrong(players):
    assert [case for case, correct in judged(players, WRONG) if correct] == []


@pytest.mark.parametrize(
    ("tolerances", "text", "correct"),
    [
        ({}, "101", True),
        ({}, "101.1", False),
        ({"rel_tolerance": 0.05}, "104.9", True),
        ({"rel_tolerance": 0, "abs_tolerance": 2}, "98", True),
        ({"rel_tolerance": 0, "abs_tolerance": 2}, "97.9", False),
        ({"rel_tolerance": 0}, "100.0", True),
    ],
)
def test_a_number_may_differ_by_the_larger_tolerance(players, tolerances, text, correct):
    (verdict,) = players.score(JUDGE, [task(answer=100, **tolerances).judged(text)])
    assert verdict["correct"] is correct


def test_a_tolerance_is_taken_in_the_unit_of_the_answer(players):
    fields = {"answer": "2 km", "rel_tolerance": 0, "abs_tolerance": 0.5}
    verdicts = players.score(JUDGE, [task(**fields).judged(text) for text in ("2400 m", "2600 m")])
    assert [verdict["correct"] for verdict in verdicts] == [True, False]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"answer": "A", "choices": CHOICES}, "choice"),
        ({"answer": ["x", "y"]}, "set"),
        ({"answer": 3}, "numeric"),
        ({"answer": "-1.5 V"}, "numeric"),
        ({"answer": r"\frac{1}{2}"}, "numeric"),
        ({"answer": "many", "unit": "m"}, "numeric"),
        ({"answer": "iron"}, "exact"),
        ({"answer": "5", "kind": "exact"}, "exact"),
        ({"answer": "2-butanol"}, "exact"),
        ({"answer": "1s2 2s2 2p6"}, "exact"),
        ({"answer": "3,4-dihydroxyphenylalanine"}, "exact"),
        ({"answer": "12:30"}, "exact"),
        ({"answer": "2 Na + Cl2"}, "exact"),
        ({"answer": r"1.2\times10^{-3}\,\text{mol}"}, "numeric"),
        ({"answer": "8.314 J mol^{-1} K^{-1}"}, "numeric"),
        ({"answer": "5.0 kJ/(mol K)"}, "numeric"),
        ({"answer": "3 bonds"}, "numeric"),
    ],
)
def test_the_kind_follows_from_the_fields(fields, kind):
    assert task(**fields).kind == kind


# -- tasks at fault --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"answer": "Z", "choices": CHOICES}, "'Z' cannot be read"),
        ({"answer": ["A", "Z"], "choices": CHOICES}, "cannot be read"),
        ({"answer": "5", "unit": "florps"}, "no unit 'florps'"),
        ({"answer": "many", "kind": "numeric"}, "'many' cannot be read"),
        ({"answer": ["x", "x,y"]}, "cannot be read"),
    ],
)
def test_an_answer_that_nothing_could_equal_is_found_out(players, fields, reason):
    (verdict,) = players.score(CHECK, [task(**fields).judged("")])
    assert reason in verdict["problem"]


def test_such_a_task_fails_in_init(players):
    done = players.play(Stem(), {"problem": "?", "answer": "Z", "choices": CHOICES}, ["A"])
    assert done.state is State.FAILED and done.reward is None
    assert done.error.blame is Blame.TASK and done.error.stage == "init"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"answer": ""}, "an answer is empty"),
        ({"answer": "A", "kind": "choice"}, "two `choices` or more"),
        ({"answer": "A", "choices": {"first": "x", "second": "y"}}, "one letter each"),
        ({"answer": "1", "rel_tolerance": -1}, "rel_tolerance"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, reason):
    with pytest.raises(TaskError, match=reason):
        Stem().check_task({"problem": "?", **fields})


def test_without_pint_the_error_says_what_to_install(players, monkeypatch):
    monkeypatch.setattr("workers.handlers.packages.find_spec", lambda name: None)
    done = players.play(Stem(), {"problem": "?", "answer": "1"}, ["1"])
    assert done.error.blame is Blame.HANDLER and "rollout-service[stem]" in done.error.message


# -- the handlers ----------------------------------------------------------------------------------

QUESTION = {"question": "How far does it fall in 1 s?", "answer": "4.9 m"}


@pytest.mark.parametrize(
    ("text", "reward", "answered"),
    [
        (r"\boxed{4.905\ \text{m}}", 1.0, 1.0),
        (r"\boxed{4.9 s}", 0.0, 1.0),
        ("Half of g.\n\n**Answer:** 490 cm", 1.0, 1.0),
        ("It is 4.9 m.", 0.0, 0.0),
    ],
)
def test_without_tools_the_box_or_the_declared_answer_counts(players, text, reward, answered):
    done = players.play(Stem(), QUESTION, [text])
    assert (done.state, done.reward) == (State.COMPLETED, reward), done.error
    assert done.reward_components == {"correct": reward, "answered": answered}


def test_the_prompt_shows_the_choices_and_asks_for_a_letter(players):
    done = players.play(Stem(), {"problem": "How long?", "answer": "6 m", "choices": CHOICES}, [r"\boxed{C}"])
    asked = done.trajectory.messages[0].text
    assert "A. 2 m\nB. 4 m\nC. 6 m\nD. 8 m" in asked and "the letter of the right choice" in asked
    assert done.reward == 1.0


def test_with_tools_the_message_of_finish_is_the_answer(players):
    bash = Action(tool_calls=[Call(name="execute_bash", arguments={"command": "echo $((49 * 10)) cm"})])
    done = players.play(StemTools(), QUESTION, [bash, finish("490 cm")])
    assert (done.state, done.reward) == (State.COMPLETED, 1.0), done.error


def test_the_row_of_the_guide_runs_as_written(players):
    row = documented_row("stem")
    assert players.play(Stem(), row, [r"\boxed{299.8\ \mathrm{km\,s^{-1}}}"]).reward == 0.0
    assert players.play(Stem(), row, [r"\boxed{2.998\times10^5\ \mathrm{km\,s^{-1}}}"]).reward == 1.0


# -- search ------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / "light.txt").write_text("Speed of light\nIn vacuum it is 299792458 m/s.")
    (tmp_path / "sound.txt").write_text("Speed of sound\nIn air it is about 343 m/s at 20 degrees.")
    monkeypatch.setenv("SEARCH_DIRECTORY", str(tmp_path))
    return tmp_path


def test_a_deployment_plugs_its_search_in_by_a_setting(players, library, monkeypatch):
    config = Settings(search_tool="tests.helpers.search:FileSearch")
    monkeypatch.setattr("workers.handlers.stem.settings", lambda: config)
    handler = StemTools()
    assert "search" in handler.info().tools
    look = Action(tool_calls=[Call(name="search", arguments={"query": "sound air", "limit": 1})])
    done = players.play(
        handler, {"problem": "How fast is sound?", "answer": "343 m/s"}, [look, finish("343 m/s")]
    )
    assert (done.state, done.reward) == (State.COMPLETED, 1.0), done.error
    observation = next(message.text for message in done.trajectory.messages if message.role == "tool")
    assert observation.startswith("[1] Speed of sound (sound.txt)\n") and "light" not in observation


def test_without_the_setting_there_is_no_search():
    assert "search" not in StemTools().info().tools


def test_a_search_is_also_found_by_its_entry_point(library, monkeypatch):
    class Point:
        name, load = "files", staticmethod(lambda: FileSearch)

    monkeypatch.setattr("workers.handlers.search.entry_points", lambda group: [Point])
    assert isinstance(load_search(Settings(search_tool="files")), SearchTool)
    with pytest.raises(HandlerError, match=r"no package here has it .*there are: files"):
        load_search(Settings(search_tool="others"))
    for wrong in ("tests.helpers.search:Missing", "no_such:Thing", "tests.helpers.search:Path"):
        with pytest.raises(HandlerError, match="ROLLOUT_SEARCH_TOOL"):
            load_search(Settings(search_tool=wrong))


class Fails(Search):
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def search(self, query: str, limit: int) -> Sequence[Hit]:
        raise self.error


def test_a_search_that_fails_is_no_answer_of_the_tool(players):
    """The model reads what is wrong with its query; an outage ends the attempt."""

    async def call(search, **arguments):
        return await SearchTool(search)(arguments, ToolContext(None, 60))

    def answer(search, **arguments):
        return players._runner.run(call(search, **arguments)).text

    assert answer(Fails(ValueError("too short")), query="x") == "Error: search: too short"
    assert "limit" in answer(Fails(ValueError()), query="x", limit=99)
    with pytest.raises(InfrastructureError, match="the search failed: OSError: down"):
        answer(Fails(OSError("down")), query="x")


def test_a_long_result_is_cut_and_no_result_is_said(players, tmp_path):
    (tmp_path / "long.txt").write_text("Long\n" + "word " * 5000)
    tool = SearchTool(FileSearch(tmp_path))

    async def call(query):
        return await tool({"query": query}, ToolContext(None, 60))

    text = players._runner.run(call("word")).text
    assert len(text) < 2100 and text.endswith("[...]")
    assert players._runner.run(call("nothing like it")).text == "[no results]"
