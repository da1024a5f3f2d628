"""A reward of your own: the last integer of a response decides, in a box or not.

Run with any other flags of train.py:

    python train.py --model PATH --data docs/problems.jsonl --reward lab/learn/your_own.py:grade
"""

import re

from rewards import Verdict


def grade(response: str, answer: object) -> Verdict:
    """Right if the last integer of the response is the answer."""
    numbers = re.findall(r"-?\d+", response)
    if not numbers:
        return Verdict(0.0, "no_answer")
    if numbers[-1] == answer:
        return Verdict(1.0, "correct")
    return Verdict(0.0, "wrong")
