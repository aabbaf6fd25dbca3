"""Mathematics: which notations are the same answer, which are not; the handlers `math` and `math_tools`."""

from __future__ import annotations

import pytest

from rollout.schema import Blame, State
from rollout.trajectory import Message, ToolCall, Trajectory
from tests.helpers.players import complaints, documented_row, finish
from workers.agent.replay import Action, Call
from workers.errors import TaskError
from workers.handlers.answers import boxed, boxed_answer, stated
from workers.handlers.math import CHECK, JUDGE, Math, MathTools

RIGHT = {
    r"\frac{1}{2}": ["1/2", "0.5"],
    r"\frac12": [r"\dfrac{1}{2}"],
    "1/2": [r"\tfrac12"],
    r"\frac{7}{2}": [r"3\frac{1}{2}"],
    "7/2": ["3 1/2"],
    "3.5": [r"3 \frac{1}{2}"],
    r"50\%": ["50%", "0.5"],
    "50": [r"50\%"],
    "0.5": [r"50\%"],
    "12": [r"12 \text{ cm}", "12 cm", r"12\text{ square units}", r"12\,\mathrm{cm}^2"],
    r"12 \text{ cm}": ["12"],
    r"\{1, 2, 3\}": [r"\{3, 2, 1\}"],
    r"\{1,2\}": ["1, 2", r"x=1 \text{ or } x=2"],
    "1,2": ["2,1", "x = 1, x = 2"],
    "1, 2": [r"1 \text{ and } 2"],
    "[0,1)": [r"\left[0,1\right)"],
    r"(-\infty, 3]": [r"\left(-\infty,3\right]", r"x \le 3"],
    r"(1,2)\cup(3,4)": [r"(3,4) \cup (1,2)"],
    "(1,2)": [r"\left( 1, 2 \right)"],
    "(1, -2)": [r"\left(1,-2\right)"],
    r"(\frac12, 3)": ["(0.5, 3)"],
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": [r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"],
    r"\begin{pmatrix}1\\2\end{pmatrix}": [r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"],
    r"2\sqrt{3}": [r"\sqrt{12}", r"\sqrt{3} \cdot 2", "2√3"],
    r"\frac{\sqrt{2}}{2}": [r"\frac{1}{\sqrt{2}}"],
    r"\sqrt[3]{2}": ["2^{1/3}"],
    "2sqrt(3)": [r"2\sqrt3"],
    r"1.2\times 10^5": ["120000"],
    "120000": [r"1.2 \cdot 10^{5}", "1.2 × 10^5"],
    "0.0012": ["1.2e-3"],
    "1,234,567": ["1234567"],
    "1234567": ["1,234,567", "1{,}234{,}567", r"1\,234\,567"],
    "10000": [r"10,\!000", "10 000"],
    r"90^\circ": ["90"],
    "90": [r"90^{\circ}", "90°", r"90 \text{ degrees}"],
    r"\text{yes}": ["Yes"],
    "east": [r"\text{East}"],
    "Monday": [r"\textbf{Monday}"],
    r"\text{even}": ["even."],
    r"\frac{\pi}{4}": ["pi/4", "π/4"],
    r"2\pi": [r"2 \pi \text{ radians}"],
    r"1 \pm \sqrt{2}": [r"1+\sqrt{2}, 1-\sqrt{2}"],
    r"\{1+\sqrt2, 1-\sqrt2\}": [r"1 \pm \sqrt{2}"],
    r"\pm 3": ["3, -3"],
    "x > 3": [r"(3, \infty)"],
    "x>3": ["3 < x"],
    r"x \ge 2": [r"x \geqslant 2"],
    r"1 < x \le 4": ["(1, 4]"],
    "3": ["x=3", "x = 3.", "f(2) = 3", r"3\,"],
    "x=3": ["3"],
    "5": ["a + b = 5"],
    "A": ["(A)", r"\text{A}"],
    "B": [r"\textbf{(B)}"],
    "C": ["C."],
    "(D)": ["D"],
    "E": [r"\mathrm{(E)}\ 42"],
    "x^2+2x+1": ["(x+1)^2"],
    r"\sin^2 x": [r"1-\cos^2 x"],
    "e^{2x}": [r"\exp(2x)"],
    r"\ln 2": [r"\log_e 2"],
    "2x+1": ["1+2x"],
    "f(x)=2x+1": ["2x+1"],
    "y = 2x + 1": ["2x+1"],
    "y=2x+1": ["2x - y + 1 = 0"],
    r"\binom{5}{2}": ["10"],
    "2^{10}": ["1024"],
    r"\frac{10!}{5!5!}": ["252"],
    "-3": ["−3"],
    "3+4i": ["4i+3"],
    r"\frac{1}{3}": [r"0.\overline{3}"],
    "0": ["-0"],
    "1": ["1.0"],
    "18": [r"\$18", "18 dollars"],
    "18.00": [r"\$18"],
    "1/3": ["1 : 3"],
    "10_{2}": ["10_2"],
    "1011_2": ["1011_{2}"],
    "|x|": [r"\left|x\right|"],
    r"\varnothing": [r"\emptyset"],
    r"\infty": ["∞"],
    r"x \in \mathbb{R}": [r"\mathbb{R}"],
    "42": [r"\boxed{42}", "$42$", "**42**"],
    r"\log_2 3": [r"\frac{\ln 3}{\ln 2}"],
    r"\tan 45^\circ": ["1"],
    "6.0221e23": [r"6.0221\times10^{23}"],
    r"3 \text{ m/s}": ["3 m/s"],
    "(2,3),(4,5)": ["(4,5), (2,3)"],
    r"2\frac{3}{4}": ["2.75"],
    r"\frac{11}{4}": [r"2\tfrac{3}{4}"],
    "-7/2": [r"-3\frac12"],
    r"\left(\frac{3}{5},\frac{8}{3}\right]": [r"(\frac{3}{5}, \frac{8}{3}]"],
    "4": ["4 apples"],
    "2": [r"\frac{4}{2}"],
}
WRONG = {
    "1/2": ["1/3", "2"],
    "50": ["0.5"],
    r"\{1,2,3\}": [r"\{1,2\}"],
    "1,2": ["1"],
    "1": ["1,2"],
    "[0,1)": ["(0,1]"],
    "(1,2)": ["(2,1)"],
    "[0,1]": ["(0,1)"],
    r"2\sqrt3": [r"3\sqrt2"],
    "1234567": ["1234", r"1\,234\,576"],
    "1,234": ["234"],
    "90": ["180"],
    "A": ["B"],
    "B": ["A or B"],
    "x>3": ["x<3", r"x \ge 3"],
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": [r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"],
    "yes": ["no"],
    "42": ["", "I do not know", r"\text{answer}"],
    r"1 \pm \sqrt2": [r"1+\sqrt2"],
    "x^2+1": ["x^2-1"],
    "3": ["-3", "3i", "2 or 3", "3 or 4", r"5} \boxed{3", "3} or {4", "3=4"],
    "7/2": [r"3 \cdot \frac12", "3 1/3"],
    "100": ["1000"],
    "0.333": ["0.334"],
    "12": ["x"],
    "4": ["2+3"],
    "5": ["1,2,3,4,5", "f(5)"],
    "10": ["10^{10}"],
    "2^{10}": ["2^{11}"],
    r"3 \text{ m}": ["3 cm x"],
    "23": ["2.3"],
    r"\text{Monday}": ["Tuesday"],
    "east": ["west", "seat"],
    "(2,3)": ["2"],
    "C": ["D. C"],
    "x=3": ["y=4"],
    "120": ["1.2"],
    "5!": ["5"],
    "1/3": ["0.33"],
    "0": [r"\emptyset"],
    "25": [r"x \in (0,25)"],
    "Monday": ["dynaMo"],
    "7": ["x = 3, x = 7"],
    r"\frac{1}{3}": [r"0.\overline{2}"],
    "E": ["E = mc^2"],
    "18": ["18 or 19 dollars"],
    r"\text{yes}": ["yes and no"],
}


def pairs_of(answers):
    return [(gold, answer) for gold, several in answers.items() for answer in several]


def judged(players, pairs):
    """The pairs of an accepted answer and an answer that count as the same."""
    verdicts = players.score(JUDGE, [{"gold": [gold], "answer": answer} for gold, answer in pairs])
    return [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict["correct"]]


# -- comparison ----------------------------------------------------------------------------------


def test_the_same_value_in_another_notation_is_right(players):
    pairs = pairs_of(RIGHT)
    assert len(pairs) >= 50
    assert set(pairs) - set(judged(players, pairs)) == set()


def test_another_value_is_wrong_however_it_is_written(players):
    pairs = pairs_of(WRONG)
    assert len(pairs) >= 20
    assert judged(players, pairs) == []


def test_every_accepted_answer_that_a_test_uses_is_read(players):
    assert players.score(CHECK, [{"gold": list(RIGHT)}]) == [{"unreadable": []}]


def test_an_accepted_answer_that_says_nothing_is_found_out(players):
    broken = [r"\frac{1}{", r"\text{}", r"\nosuch{3}", "x =", "3 +", "$$", r"\begin{cases} x & y"]
    assert players.score(CHECK, [{"gold": ["1", *broken]}]) == [{"unreadable": broken}]


def test_one_of_several_accepted_answers_is_enough(players):
    verdicts = players.score(
        JUDGE, [{"gold": ["1/3", "0.33"], "answer": answer} for answer in ("0.33", "0.3")]
    )
    assert [verdict["correct"] for verdict in verdicts] == [True, False]


def test_an_answer_of_enormous_length_is_wrong(players):
    assert judged(players, [("3", "1+" * 2000 + "1")]) == []


# -- what the answer is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{5}", "5"),
        (r"first \boxed{4}, no: \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{3} and \boxed{ }", "3"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\fbox {9}", "9"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        ("no box", None),
    ],
)
def test_the_last_whole_box_that_is_not_empty_counts(text, box):
    assert boxed(text) == box


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        ("The answer is: 42", "42"),
        ("I computed it.\n\n**Final answer:** $42$\n", "$42$"),
        ("So the final answer is x = 3.", "x = 3."),
        ("Answer", "Answer"),
    ],
)
def test_a_message_states_its_answer_in_the_last_line(text, answer):
    assert stated(text) == answer


# -- the handlers ---------------------------------------------------------------------------------

TASK = {"problem": "What is 6 times 7?", "answer": 42}


@pytest.mark.parametrize(
    ("text", "reward", "answered"),
    [
        (r"It is $6 \cdot 7$, so \boxed{42}.", 1.0, 1.0),
        (r"\boxed{42} or rather \boxed{43}", 0.0, 1.0),
        ("It is 42.", 0.0, 0.0),
        (r"<think>maybe \boxed{42}", 0.0, 0.0),
        (r"<think>\boxed{41}</think>\boxed{42}", 1.0, 1.0),
    ],
)
def test_without_tools_the_last_box_is_the_answer(players, text, reward, answered):
    done = players.play(Math(), TASK, [text])
    assert (done.state, done.reward) == (State.COMPLETED, reward), done.error
    assert done.reward_components == {"correct": reward, "answered": answered}


def test_the_other_names_of_fields_and_lists_of_answers_are_taken():
    for task in ({"prompt": "1+1?", "answer": "2"}, {"question": "1+1?", "ground_truth": [2, "two"]}):
        assert Math().check_task(task).problem == "1+1?"
        assert complaints(Math(), task) == []
    assert Math().check_task({"problem": "?", "answer": [2, 0.5, "x"]}).answer == ["2", "0.5", "x"]
    for answer in ([], "", " ", [""], None, True):
        with pytest.raises(TaskError, match=r"task\.answer"):
            Math().check_task({"problem": "?", "answer": answer})


def test_the_gateway_names_the_field_that_is_missing():
    """It knows a handler by its JSON schema alone."""
    assert complaints(Math(), {"answer": 1}) == ["'problem' is a required property"]
    assert complaints(Math(), {"prompt": "?"}) == ["'answer' is a required property"]
    assert complaints(Math(), {"problem": "?", "answer": []}) != []


def test_a_task_whose_answer_cannot_be_read_is_at_fault_itself(players):
    done = players.play(Math(), {"problem": "?", "answer": r"\frac{1}{"}, [r"\boxed{1}"])
    assert done.state is State.FAILED and done.error.blame is Blame.TASK and done.reward is None
    assert done.error.stage == "init" and r"\frac{1}{" in done.error.message


def test_without_math_verify_the_error_says_what_to_install(players, monkeypatch):
    monkeypatch.setattr("workers.handlers.packages.find_spec", lambda name: None)
    done = players.play(Math(), TASK, [r"\boxed{42}"])
    assert done.error.blame is Blame.HANDLER and "rollout-service[math]" in done.error.message


def test_an_answer_that_math_verify_cannot_finish_is_wrong(players, monkeypatch):
    """The second look shows that the scorer is well: the accepted answer is compared in no time."""
    monkeypatch.setattr("workers.handlers.math.SCORE_S", 3.0)
    players.play(Math(), TASK, [r"\boxed{1}"])  # imports are done
    done = players.play(Math(), TASK, [r"\boxed{9^{9^{9^9}}}"])
    assert (done.state, done.reward) == (State.COMPLETED, 0.0), done.error
    assert done.reward_components == {"correct": 0.0, "answered": 1.0}


def test_a_scorer_that_is_slow_on_every_answer_gives_no_reward(players, monkeypatch):
    monkeypatch.setattr("workers.handlers.math.JUDGE", "tests.helpers.scorers:hang")
    monkeypatch.setattr("workers.handlers.math.SCORE_S", 0.2)
    monkeypatch.setattr("workers.handlers.math.CHECK", "tests.helpers.scorers:all_readable")
    done = players.play(Math(), TASK, [r"\boxed{42}"], limits={"max_attempts": 1})
    assert done.state is State.FAILED and done.reward is None and done.drop
    assert done.error.blame is Blame.INFRASTRUCTURE and done.error.type == "ScorerTimeout"


def test_with_tools_the_message_of_finish_is_the_answer(players):
    cell = Action(tool_calls=[Call(name="execute_ipython_cell", arguments={"code": "6 * 7"})])
    done = players.play(MathTools(), TASK, [cell, finish("The answer is 42")])
    assert (done.state, done.reward) == (State.COMPLETED, 1.0), done.error
    assert "42" in next(message.text for message in done.trajectory.messages if message.role == "tool")


@pytest.mark.parametrize(
    ("turns", "answer"),
    [
        ([finish(r"done: \boxed{42}")], "42"),
        ([r"\boxed{41}", finish("42")], "42"),
        ([finish("", r"It is \boxed{42}.")], "42"),
        ([finish("all done", r"It is \boxed{42}.")], "42"),
        (["I give up."], None),
    ],
)
def test_a_box_goes_before_bare_words(turns, answer):
    messages = []
    for turn in turns:
        action = Action(content=turn) if isinstance(turn, str) else turn
        calls = [ToolCall(id="1", **call.model_dump()) for call in action.tool_calls]
        messages.append(Message(role="assistant", content=action.content, tool_calls=calls))
    assert boxed_answer(Trajectory(unread=messages)) == answer


def test_the_row_of_the_guide_runs_as_written(players):
    task = documented_row("math")
    assert players.play(Math(), task, [r"\boxed{x = -0.5 \text{ or } x = 1}"]).reward == 1.0
    assert players.play(Math(), task, [r"\boxed{x = 0.5 \text{ or } x = 1}"]).reward == 0.0
