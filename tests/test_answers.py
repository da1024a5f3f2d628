"""tests/cases/answers.csv, by grading/answers.py: the same answer in another spelling.

Others only look like the same answer.
"""

import pytest
from builders.case_files import cases

from grading.answers import compare

SAME = []
OTHER = [("9" * 1500, "9" * 1499 + "8"), (r"0.\overline{" + "3" * 10**4 + "}", "0.3")]
for case in cases("answers.csv"):
    pair = (case["answer"], case["gold"])
    (SAME if case["same"] == "yes" else OTHER).append(pair)


@pytest.mark.parametrize("answer, gold", SAME)
def test_the_same_answer_in_another_spelling(answer, gold):
    """No honest answer is marked wrong."""
    assert compare(answer, gold) == "correct"


@pytest.mark.parametrize("answer, gold", OTHER)
def test_another_answer(answer, gold):
    """No wrong answer, hedge or trick is marked right."""
    assert compare(answer, gold) != "correct"


def test_a_pair_is_judged_once():
    """Parsing takes milliseconds, and rollouts of one problem repeat their answers."""
    compare.cache_clear()
    assert compare(r"\frac{37}{74}", "0.5") == compare(r"\frac{37}{74}", "0.5") == "correct"
    assert compare.cache_info().hits == 1
