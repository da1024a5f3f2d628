"""lab/learn/your_own.py, the guide's example of a reward."""

from builders.case_files import ROOT
from builders.small_models import turns_tokenizer

from base.config import Problems
from lab.tools import words


def test_the_guide_s_reward_grades():
    """The last integer decides, in word problems, too."""
    settings = Problems(reward=f"{ROOT}/lab/learn/your_own.py:grade")
    task, _ = words.task(settings, turns_tokenizer(), "M")
    assert task.grade("I say 7, or 8.", "8") == (1, "correct")
    assert task.grade("I say 8, or 7.", "8") == (0, "wrong")
    assert task.grade("I say no", "8") == (0, "no_answer")
