"""Another reward: some of it for a near miss, where the number in the box is off by one.

python train.py --reward lab.learn.my_reward:grade
"""

import re


def grade(response: str, answer: str) -> float:
    """1 for the right answer, 0.3 for a neighbour of it, 0 for any other."""
    boxes = re.findall(r"\\boxed\{(\d+)\}", response)
    if not boxes:
        return 0.0
    miss = abs(int(boxes[-1]) - int(answer))
    return {0: 1.0, 1: 0.3}.get(miss, 0.0)
