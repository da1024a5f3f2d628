"""rewards.py: right and wrong answers side by side, and what counts as an answer at all.

Run: pytest tests/test_rewards.py
"""

import pytest

from rewards import grade_math, last_box


@pytest.mark.parametrize(
    "answer, gold, reason",
    [
        ("7", "7", "correct"),
        ("007", "7", "correct"),
        ("0.50", ".5", "correct"),
        (r"\frac{1}{2}", "0.5", "correct"),
        (r"\dfrac12", r"\frac{1}{2}", "correct"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \frac{\pi}{2})", "correct"),
        (r"3 \sqrt{2}", r"\sqrt{18}", "correct"),
        ("x^2+2x+1", "(x+1)^2", "correct"),
        ("$5$.", "5", "correct"),
        ("8", "7", "wrong"),
        ("1000000", "1000001", "wrong"),
        ("0.3333333", r"\frac{1}{3}", "wrong"),
        ("1", "1,2", "wrong"),
        ("(1,2]", "(1,2)", "wrong"),
        ("x=3", "x=4", "wrong"),
        (r"4\sqrt{2}", "4", "wrong"),
        ("", "0", "no_answer"),
        ("  ", "0", "no_answer"),
    ],
)
def test_verdicts(answer, gold, reason):
    """One row a case; the score is 1 exactly for `correct`."""
    verdict = grade_math(rf"We find \boxed{{{answer}}}.", gold)
    assert verdict == (1.0 if reason == "correct" else 0.0, reason)


@pytest.mark.parametrize(
    "text, box",
    [
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} but \boxed{2", None),
        (r"\boxed{\}", None),
        ("the answer is 2", None),
        ("", None),
    ],
)
def test_the_last_box_is_the_answer_if_it_is_closed(text, box):
    """An earlier box does not stand in for one that is never closed: that would reward hedging."""
    assert last_box(text) == box
    if box is None:
        assert grade_math(text, "1").reason == "no_answer"


def test_nothing_in_a_box_is_run(tmp_path):
    """Python in a box stays text."""
    target = tmp_path / "made"
    verdict = grade_math(rf"\boxed{{__import__('os').mkdir('{target}')}}", "1")
    assert verdict.score == 0.0 and not target.exists()


def test_absurd_numbers_are_answered():
    """A hundred thousand digits are wrong, not an exception."""
    assert grade_math(rf"\boxed{{{'9' * 100_000}}}", "1").score == 0.0
