r"""Gold answers and problems as their authors wrote them: what the math grader makes of them.

    reading_of(answer, solution)      -> how an answer is read, or "" for an ordinary one
    read_answer(value)                -> an answer's text: a number's digits, what follows ####
    forms_of(answer)                  -> the forms in which a response may write it
    is_copied(answer, gold, problem)  -> does it only repeat a calculation of the problem?

They look at texts alone, so that thousands of answers take no time.
"""

import re
from decimal import Decimal
from numbers import Number

from grading.spelling import CHARACTERS, UNIT, respell, rewrite

# A number and letters that may be a unit, and nothing else.
LETTERS = re.compile(r"[-+0-9.,/\s]*[0-9]\s*(?:[mgshLlNWVJAtK]|[A-Za-z]{2,})")
SUBTRACTION = re.compile(r"[0-9]+(?:\s?[-–]\s?[0-9]+)+")
WORKED = re.compile(r"\\boxed|\n\s*\S|[a-z0-9]\.\s+[A-Z]|(?:[A-Za-z]{2,}[\s,]+){12}")
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


def reading_of(answer: str, solution: object = None) -> str:
    """How an answer is read, if perhaps not as it was meant.

    `solution` is the text that it was taken from, if it was.
    """
    boxes = str(solution).split(r"\boxed{")
    if len(boxes) > 2 and boxes[-1].startswith(answer):
        return "the last of several boxes"
    if WORKED.search(answer):
        return "a worked solution, which no response equals"
    if not _is_balanced(answer):
        return "not equal to itself, as its braces do not match"
    if SUBTRACTION.fullmatch(answer.strip()) and r"\text" not in respell(answer):
        return "read as a subtraction"
    if LETTERS.fullmatch(answer) and re.search("[0-9]\\s?[A-Za-z]", UNIT.sub("", respell(answer))):
        return "read as a product with letters, no unit; a unit of one letter needs a space before"
    return ""


def _is_balanced(text: str) -> bool:
    """Whether each brace has its counterpart; printed ones do not count."""
    braces = re.sub(r"\\.|[^{}]", "", text)
    while "{}" in braces:
        braces = braces.replace("{}", "")
    return not braces


def forms_of(answer: str) -> list[str]:
    r"""An answer, and as far as it is a number with a word: the number alone, and \text{ word}."""
    match = re.fullmatch(r"([-+$0-9.,/\s]*)(?:\\text\{)?([A-Za-z][A-Za-z/^.\s]*[0-9]?)\}?", answer)
    if match is None:
        return [answer]
    number, word = match.groups()
    return [answer, rf"{number}\text{{{word}}}", *[number] * bool(number.strip())]


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
