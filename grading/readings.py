r"""Gold answers and problems as their authors wrote them: what the math grader makes of them.

    read_answer(value)                -> an answer's text: a number's digits, what follows ####
    is_copied(answer, gold, problem)  -> does it only repeat a calculation of the problem?

They look at texts alone, so that thousands of answers take no time.
"""

import re
from decimal import Decimal
from numbers import Number

from grading.spelling import CHARACTERS, rewrite

# A sum, a fraction, a power, a root or a product: 4+5, 2/3, (x-1)(x+1); no name and no unit.
OPERATION = r"(?:[0-9)!}]|(?<![A-Za-z])[A-Za-z])[-+*/^]|\\sqrt|[0-9)]\(|\)[\w\\]"
# Spellings of a calculation that are the same.
CALCULATION = [
    *CHARACTERS,
    (r"\\(?:left|right|displaystyle|,|;|:|!|quad)(?![a-z])|\\?\$|[~\s]", ""),
    (r"\\text\{[^{}]*\}(?:\^\{?[0-9]\}?)?|\^\{?\\circ\}?|°", ""),
    (r"\\[dtc]?frac(?:\{([^{}]*)\}|([0-9]))(?:\{([^{}]*)\}|([0-9]))", r"\1\2/\3\4"),
    (r"\\times(?![a-z])|\\cdot(?![a-z])|[×·]", "*"),
    (r"\\div(?![a-z])|÷", "/"), ("[{}]", ""),
]  # fmt: skip


def read_answer(value: object) -> object:
    """An answer as text: a number by its decimal digits, and of GSM8K's what follows "####".

    Other values come back as they are.
    """
    if isinstance(value, Number) and not isinstance(value, bool):
        number = Decimal(str(value))
        # not 5e-05, which a grader reads as LaTeX; whole numbers may be 27.0
        return f"{number:f}".removesuffix(".0") if number.is_finite() else value
    if isinstance(value, str) and "####" in value:
        return value.rpartition("####")[2].strip()
    return value


def is_copied(answer: str, gold: str, problem: str) -> bool:
    """Whether an answer is a calculation that occurs in the problem, but not the gold answer.

    Numerals, names and options are no calculations.
    """
    answer = _calculation(answer)
    return (
        re.search(OPERATION, answer) is not None
        and answer != _calculation(gold)
        and re.search(rf"(?<![0-9.]){re.escape(answer)}(?![0-9])", _calculation(problem))
        is not None
    )


def _calculation(text: str) -> str:
    r"""A text without spaces, braces and units, with / for \frac and * for \times."""
    return rewrite(text, CALCULATION)
