r"""Gold answers and problems as their authors wrote them: what the math grader makes of them.

    read_answer(value)                -> an answer's text: a number's digits, what follows ####
    is_copied(answer, gold, problem)  -> does it only repeat a calculation of the problem?
    UNMATCHED                         -> patterns of answers that no number equals, with remedies

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
    (r"\{\(([^()]*)\)\}", r"{\1}"),
    (r"\\times(?![a-z])|\\cdot(?![a-z])|[×·]", "*"),
    (r"\\div(?![a-z])|÷", "/"), ("[{}]", ""),
]  # fmt: skip

# About 5, ca. 5 m. Not ~5 and ≈5, which are 5 to the grader.
HEDGED = re.compile(
    r"(?:\\text\{)?\s*(?:about|around|approximately|roughly|nearly|almost|circa|(?:ca|approx)\b\.?)"
    r"\b\W*(?=[^A-Za-z]*[0-9])",
    re.I,
)
# 2,5 l or €2,50. Without a unit, 2,5 may be a list; 2,500 l and 1,2,3 are no decimals.
DECIMAL_COMMA = re.compile(
    r"(?!.*(?:,.*,|\b(?:and|or)\b))[-+]?(€|£)?\s?(?:0|[1-9][0-9]*),[0-9]{1,2}(?![0-9])"
    r"(?(1)|\s?(?:\\text|\\?%|[°€£]|[A-Za-z]{2}|(?<=\s)[A-Za-z]))"
)
UNMATCHED = {
    HEDGED: 'answers with "about" or "ca." are right only in the same words; write the number',
    DECIMAL_COMMA: "answers with a decimal comma are read as two numbers; write 2.5 for 2,5",
}


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

    Numerals, names and options are no calculations. Brackets around all of it do not count.
    """
    answer, gold, problem = (_calculation(text) for text in (answer, gold, problem))
    if not re.search(OPERATION, answer):
        return False
    # [4+5] is a copy of 4+5, but 2(x+1) is none of 2x+1, and (1/2,3) is a point
    inside = re.sub(r"^[(\[]([^,]*)[)\]]$", r"\1", answer)
    if gold in (answer, inside):
        return False
    copies = rf"(?<![0-9.])(?:{re.escape(answer)}|{re.escape(inside)})(?![0-9])"
    return re.search(copies, problem) is not None


def _calculation(text: str) -> str:
    r"""A text without spaces, braces and units, with / for \frac and * for \times."""
    return rewrite(text, CALCULATION)
