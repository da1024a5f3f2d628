"""tests/cases/answers.csv, by grading/answers.py: the same answer in another spelling.

Others only look like the same answer. One pair of each kind and verdict runs by default, all of
them in CI.
"""

import pytest
from builders.case_files import cases
from builders.kinds import by_kind

from grading.answers import compare


@pytest.mark.parametrize("pair", by_kind(cases("answers.csv"), "answer", by_default=1))
def test_the_same_answer_in_another_spelling(pair):
    """No honest answer is marked wrong, and no wrong answer, hedge or trick is marked right."""
    assert (compare(pair["answer"], pair["gold"]) == "correct") == (pair["same"] == "yes")


@pytest.mark.parametrize(
    "answer, gold",
    [("9" * 1500, "9" * 1499 + "8"), (r"0.\overline{" + "3" * 10**4 + "}", "0.3")],
)
def test_long_numbers_differ_by_a_digit(answer, gold):
    """A long number is neither rounded nor cut."""
    assert compare(answer, gold) != "correct"
