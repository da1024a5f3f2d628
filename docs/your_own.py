"""`train.py` with a reward of your own: the last integer of a response decides, in a box or not.

Run: `python -m docs.your_own --model PATH --data docs/problems.jsonl --window 12 --stride 4`, with
any other flags of train.py. On several GPUs start it with torchrun.
"""

import re
import sys
from dataclasses import replace

import train
from harness import prepare
from rewards import Verdict
from tasks import problems
from tasks.problems import Task


def grade(response: str, answer: object) -> Verdict:
    """Right if the last integer of the response is the answer."""
    numbers = re.findall(r"-?\d+", response)
    if not numbers:
        return Verdict(0.0, "no_answer")
    if numbers[-1] == answer:
        return Verdict(1.0, "correct")
    return Verdict(0.0, "wrong")


def task(*settings: object) -> tuple[Task, list[str]]:
    """The task "math" with this grader."""
    made, notes = problems.task("math", *settings)
    return replace(made, grade=grade), notes


if __name__ == "__main__":
    prepare.MAKE_TASK["math"] = task
    sys.exit(train.main())
