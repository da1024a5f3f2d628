"""lab/learn/your_own.py, the guide's example of a reward."""

from lab.learn.your_own import grade


def test_the_guide_s_reward_grades():
    """The last integer decides."""
    assert grade("I say 7, or 8.", "8") == (1, "correct")
    assert grade("I say 8, or 7.", "8") == (0, "wrong")
    assert grade("I say no", "8") == (0, "no_answer")
