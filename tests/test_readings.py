"""tasks/readings.py: answers as their authors wrote them, and responses that copy the problem."""

import functools
import re

import pytest

from base.errors import BadInput
from base.files import write_rows
from rewards import Verdict, grade_math
from tasks.problems import load_problems
from tasks.readings import doubt_of, read_answer, without_copies

patient = functools.partial(grade_math, timeout_s=60.0)  # the machine may be busy


@pytest.mark.parametrize(
    "named, answers",
    [
        ('"about"', ["about 2000 ml", "ca. 7", "Approximately $5", r"\text{about 5 m}"]),
        ("decimal comma", ["2,5 l", "€2,50", "-0,5 °C", r"2,5\%", r"12,5\text{ km/h}", "2,5"]),
        ("between thousands", ["1'234", "1\u2019234", "1_000", "1.234,50", "€1.234.567", "1·234"]),
        ("calculation", ["2 + 2 = 4", "3*4=12"]), ("no value", ["undefined", "None"]),
        ("marks", ["*4*", "`4`", "<b>4</b>", "'4", "4,", ": 4", "4&nbsp;", r"4\n", "4 # sure", "4 // a"]),
        ("words", ["She has 4 apples left.", "4 because 2+2=4", "Result: 4", "It is 4", "4 (approx.)"]),
        ("", ["~5 m", "≈5", "about noon", "3 calves", "$2,500", "2,500 m", "9:20", "4 apples are left", "3 abc"]),
        ("", ["2, 5 cm", "(2,5)", "1,2 and 3 m", "1,2x", r"1,2\pi", "1,2,30 m", "1.234", "x=2, y=5", "sin 2x"]),
        ("", [r"x=\frac{1}{2}\text{ or }x=3", r"\begin{pmatrix}1\\2\end{pmatrix}", "f(x)=2x+1", "x<5", "a*b"]),
    ],
)  # fmt: skip
def test_answers_that_no_number_equals_are_named(named, answers):
    """Such an answer is right in its own words alone; the doubt says what is wrong with it."""
    for answer in answers:
        doubt = doubt_of(answer)
        assert named in doubt if named else doubt is None, answer


def test_a_warning_names_the_first_five_rows_in_doubt(tmp_path):
    """A row without a doubt is not among them."""
    answers = ["5", "about 2", "about 3", "about 4", "about 5", "about 6", "about 7"]
    write_rows(tmp_path / "x.jsonl", [{"problem": text, "answer": text} for text in answers])
    _, (_, warning) = load_problems("math", str(tmp_path / "x.jsonl"))
    assert warning.startswith("WARNING: row 2, row 3, row 4, row 5, row 6, ...: answers with")


@pytest.mark.parametrize(
    "answer", ["#N/A", "#DIV/0!", "#NAME?", "Err:502", "TBD", " NaN ", "null", "??"]
)
def test_cells_without_an_answer_are_refused(answer, tmp_path):
    """A spreadsheet writes them where a formula failed, and people where nobody filled one in."""
    write_rows(tmp_path / "x.jsonl", [{"problem": "p", "answer": answer}])
    with pytest.raises(BadInput, match=f"row 1: the answer is {re.escape(answer.strip())}; fill"):
        load_problems("math", str(tmp_path / "x.jsonl"))


@pytest.mark.parametrize(
    "value, answer",
    [
        ("So it is \\boxed{3}, no, \\boxed{4}.", "4"), ("<think>1</think>$$\\boxed{\\frac12}$$", r"\frac12"),
        (r"\fbox{2}", "2"), (r"\boxed 2", "2"), ("2+2=4\n#### 4", "4"), (r"\boxed{4", r"\boxed{4"), ("#1", "#1"),
    ],
)  # fmt: skip
def test_an_answer_in_a_box_is_the_last_box(value, answer):
    """Without one that is closed, it is the text itself."""
    assert read_answer(value) == answer


@pytest.mark.parametrize(
    "problem, gold, answer, is_copied",
    [
        ("What is 4 + 5?", "9", "4 + 5", True), ("What is 7 * 8?", "56", r"7 \times 8", True),
        (r"Simplify $\frac{12}{18}$.", r"\frac23", r"\dfrac{12}{18}", True), (r"Find $\sqrt{16}$.", "4", r"\sqrt{16}", True),
        ("Expand (x-1)(x+1).", "x^2-1", "(x-1)(x+1)", True), ("Write 10^4 in full.", "10000", "10^{4}", True),
        ("What is 4 + 5?", "9", "[4 + 5]", True), ("Expand (x-1)(x+1).", "x^2-1", "((x-1)(x+1))", True),
        ("What is $1^{(2^{235})}$?", "1", "1^{2^{235}}", True), ("What is 15+4?", "9", "5+4", False),
        ("What is 2x+1 plus 1?", "2x+2", "2(x+1)", False),
        (r"Which is more, $\frac23$ or $\frac35$?", r"\frac{2}{3}", r"\frac23", False), ("Is (A) or (B) right?", "B", "(B)", False),
        ("Is it 4, -5 or 6?", "-5", "-5", False), ("Who was first, Jean-Luc or Bo?", "Jean-Luc", r"\text{Jean-Luc}", False),
        ("He drives at 60 km/h.", "60", r"60\text{ km/h}", False), (r"Angles of $90^\circ$ and less", "90", r"90^\circ", False),
        # in lowest terms it cannot be computed further
        ("Is it -3/2?", "-1.5", "-3/2", False), ("What is 6/1?", "6", "6/1", True),
        (r"Sides of $2\sqrt{3}$ and 1.", r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}", False),
        (r"What is $\sqrt{12}$?", r"2\sqrt3", r"\sqrt{12}", True),
        # the gold answer has another order, a name or a unit
        ("Is it n^2+1 or n^2+3?", "1+n^2", "n^2+1", False), ("Simplify x^2+1.", "f(x) = x^2+1", "x^2+1", False),
        ("f(x)=2x+1. What is f?", "2x+1", "f(x)=2x+1", False), ("Is it x+5 or x+6 long?", "x+5 cm", "x+5", False),
        ("What is 4 + 5?", "x = 9", "x = 4 + 5", True), ("What is 4 + 5?", "9 cm", "4 + 5 cm", True),
    ],
)  # fmt: skip
def test_a_calculation_that_is_copied_from_the_problem_is_wrong(problem, gold, answer, is_copied):
    """A copy is right only if the gold answer is written so.

    Numerals, names and options may be repeated.
    """
    response = rf"So it is \boxed{{{answer}}}."
    graded = patient(response, gold)
    assert graded.reason == "correct"
    final = without_copies(graded, response, gold, problem)
    assert final == (Verdict(0.0, "copied") if is_copied else graded)
    wrong = Verdict(0.0, "wrong")
    assert without_copies(wrong, response, "1", problem) == wrong
