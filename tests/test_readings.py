"""tasks/readings.py: answers as their authors wrote them, and responses that copy the problem."""

import functools

import pytest
from builders.case_files import cases

from base.files import write_rows
from rewards import Verdict, grade_math
from tasks.problems import load_problems
from tasks.readings import doubt_of, read_answer, without_copies

patient = functools.partial(grade_math, timeout_s=60.0)  # the machine may be busy


@pytest.mark.parametrize("case", cases("doubts.csv"))
def test_answers_that_no_number_equals_are_named(case):
    """Such an answer is right in its own words alone; the doubt says what is wrong with it."""
    doubt = doubt_of(case["answer"])
    assert case["named"] in doubt if case["named"] else doubt is None


def test_a_warning_names_the_first_five_rows_in_doubt(tmp_path):
    """A row without a doubt is not among them."""
    answers = ["5", "about 2", "about 3", "about 4", "about 5", "about 6", "about 7"]
    write_rows(tmp_path / "x.jsonl", [{"problem": text, "answer": text} for text in answers])
    _, (_, warning) = load_problems("math", str(tmp_path / "x.jsonl"))
    assert warning.startswith("WARNING: row 2, row 3, row 4, row 5, row 6, ...: answers with")


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


@pytest.mark.parametrize("case", cases("copies.csv"))
def test_a_calculation_that_is_copied_from_the_problem_is_wrong(case):
    """A copy is right only if the gold answer is written so.

    Numerals, names and options may be repeated.
    """
    response = rf"So it is \boxed{{{case['answer']}}}."
    graded = patient(response, case["gold"])
    assert graded.reason == "correct"
    final = without_copies(graded, response, case["gold"], case["problem"])
    assert final == (Verdict(0.0, "copied") if case["copied"] == "yes" else graded)
    wrong = Verdict(0.0, "wrong")
    assert without_copies(wrong, response, "1", case["problem"]) == wrong
