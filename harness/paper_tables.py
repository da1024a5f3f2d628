"""Tables 1 and 2 of arXiv 2604.23318, and which of their models a name means.

Percent: mean and standard deviation of three seeds on math, the mean alone on code (its deviation
is NaN). Each number is that of a run's best checkpoint on these very sets. The averages, under
"math" and "code", are the paper's own; on Qwen2.5-Math-7B SHEAR's 51.2 and PRM(Reshape adv.)'s 49.6
are of numbers whose means are 50.9 and 49.5.
"""

import math
import re
from collections.abc import Iterable

MATH = ("aime24", "aime25", "amc23", "math500", "olympiadbench", "math")
CODE = ("humaneval", "humaneval+", "mbpp", "mbpp+", "livecodebench", "code")


def _math(*cells: tuple[float, float]) -> dict[str, tuple[float, float]]:
    """A row of Table 1."""
    return dict(zip(MATH, cells, strict=True))


def _code(*means: float) -> dict[str, tuple[float, float]]:
    """A row of Table 2."""
    return {name: (mean, math.nan) for name, mean in zip(CODE, means, strict=True)}


PAPER = {
    "Qwen2.5-Math-7B": {
        "GRPO": _math((33.6, 1.9), (15.5, 0.6), (66.5, 1.2), (84.9, 1.7), (47.8, 0.1), (49.6, 0.8)),
        "Entropy adv.": _math(
            (32.8, 1.8), (16.7, 1.8), (66.0, 0.6), (83.4, 0.3), (48.6, 0.8), (49.5, 0.5)
        ),
        "PRM(Reshape adv.)": _math(
            (34.1, 3.2), (15.2, 1.5), (66.8, 1.7), (83.1, 1.7), (48.1, 1.8), (49.6, 1.3)
        ),
        "PRM(PURE)": _math(
            (24.5, 0.6), (16.2, 2.7), (70.0, 2.5), (82.5, 1.1), (47.6, 1.2), (48.2, 0.6)
        ),
        "SHEAR": _math(
            (35.2, 2.3), (16.8, 0.5), (70.3, 3.2), (83.3, 0.8), (48.7, 1.0), (51.2, 0.8)
        ),
    },
    "Qwen2.5-Coder-7B": {
        "GRPO": _code(75.8, 71.0, 81.8, 69.3, 17.8, 63.1),
        "SHEAR": _code(76.1, 72.1, 82.2, 70.8, 18.3, 63.9),
    },
    "Llama3.1-8B-Instruct": {
        "GRPO": _code(65.7, 60.0, 70.7, 59.7, 17.4, 54.7)
        | _math((7.9, 0.7), (0.7, 0.2), (32.7, 1.2), (57.7, 1.5), (24.5, 1.3), (24.7, 0.4)),
        "Entropy adv.": _math(
            (11.7, 2.2), (1.5, 1.3), (33.1, 2.1), (57.0, 2.5), (22.1, 0.1), (25.1, 0.0)
        ),
        "PRM(Reshape adv.)": _math(
            (12.3, 2.0), (1.1, 0.4), (33.4, 1.5), (55.2, 0.5), (23.4, 1.5), (25.1, 0.9)
        ),
        "PRM(PURE)": _math(
            (8.1, 5.1), (1.2, 1.4), (27.9, 3.4), (54.6, 1.7), (20.5, 1.1), (22.5, 0.3)
        ),
        "SHEAR": _code(70.0, 63.5, 69.5, 58.4, 17.7, 55.8)
        | _math((12.7, 1.8), (2.1, 1.4), (37.2, 0.2), (56.3, 1.3), (22.8, 0.1), (26.2, 0.1)),
    },
    "Qwen2.5-14B-Base": {
        "GRPO": _code(85.0, 79.3, 82.8, 68.8, 19.7, 67.1)
        | _math((16.5, 1.8), (15.0, 1.6), (62.4, 1.3), (83.3, 1.8), (49.9, 0.5), (45.4, 0.4)),
        "Entropy adv.": _math(
            (18.5, 1.5), (16.4, 1.7), (64.8, 1.8), (82.2, 0.4), (49.4, 1.5), (46.3, 0.1)
        ),
        "PRM(Reshape adv.)": _math(
            (12.8, 3.1), (10.6, 2.8), (58.5, 3.2), (79.7, 2.4), (44.1, 2.7), (41.2, 2.3)
        ),
        "PRM(PURE)": _math(
            (13.0, 1.6), (8.0, 1.8), (49.2, 1.2), (76.1, 0.1), (40.7, 0.1), (37.4, 0.1)
        ),
        "SHEAR": _code(85.5, 79.6, 83.1, 69.0, 21.1, 67.7)
        | _math((18.7, 1.5), (16.9, 1.1), (62.2, 3.9), (84.5, 1.1), (52.0, 1.1), (46.9, 1.0)),
    },
}


def backbone_of(name: str) -> str | None:
    """Which of the paper's models this is, by its name."""
    plain = re.sub("[-_.]", "", name.lower())
    keys = {
        "qwen25math7b": "Qwen2.5-Math-7B",
        "qwen25coder7b": "Qwen2.5-Coder-7B",
        "llama318b": "Llama3.1-8B-Instruct",
        "qwen2514b": "Qwen2.5-14B-Base",
    }
    return next((backbone for key, backbone in keys.items() if key in plain), None)


def suite_of(names: Iterable[str]) -> str | None:
    """The suite whose benchmarks these are, all of them: "math", "code" or None."""
    return next((suite for *members, suite in (MATH, CODE) if set(members) == set(names)), None)
