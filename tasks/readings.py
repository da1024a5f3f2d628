r"""Answers as their authors wrote them: how they are read, and which no response may ever equal.

    read_answer(value)      -> its text: a number's digits, the last box, what follows ####
    boxed_answer(solution)  -> the last box of a worked solution
    doubt_of(answer)        -> what the author of a file's answer should change
    without_copies(...)     -> the verdict of a response that may only repeat its problem

They look at texts alone, so that thousands of answers take no time.
"""

import math
import re
from collections.abc import Callable
from decimal import Decimal
from numbers import Number

from grading.spelling import CHARACTERS, KEYBOARD, PLAIN_WORD, UNIT, respell, rewrite
from rewards import Verdict, last_box, verdict

# TeX's \boxed 2: up to the next space or the end of the formula, without a full stop
UNBRACED = re.compile(r"\\boxed(?![a-zA-Z])\s*+([^\s{$](?:(?!\\[)\]])[^\s$])*+)")
# What a spreadsheet shows where a formula failed, and where nobody has filled in a cell.
NO_ANSWER = re.compile(
    r"#[A-Z/0]{2,}[!?]?|err:[0-9]+|n/?a|nan|null|tb[ad]|todo|=[A-Z]+[0-9].*|\?+|[-\u2014]|\.{3}",
    re.I,
)

# About 5, ca. 5 m. Not ~5 and ≈5, which are 5 to the grader.
HEDGED = re.compile(
    r"(?:\\text\{)?\s*(?:about|around|approximately|roughly|nearly|almost|circa|(?:ca|approx)\b\.?)"
    r"\b(?=[^A-Za-z]*[0-9])",
    re.I,
)
# 2,5 l or 2,5. In 2, 5 it is a list; 2,500 l and 1,2,3 are no decimals.
DECIMAL_COMMA = re.compile(
    r"(?!.*(?:,.*,|\b(?:and|or)\b))[-+]?(€|£)?\s?(?:0|[1-9][0-9]*),[0-9]{1,2}(?![0-9])"
    r"(?(1)|\s?(?:$|\\text|\\?%|[°€£]|[A-Za-z]{2}|(?<=\s)[A-Za-z]))"
)
# 1'234, 1_234, 1.234,50, 1.234.567
GROUPED = re.compile(
    r"\W*[0-9]{1,3}(?:(?:['\u2019_·][0-9]{3})+|(?:\.[0-9]{3})+,[0-9]+|(?:\.[0-9]{3}){2,})(?![0-9])"
)
# (b) 12, B. 12
LABELLED = re.compile(r"\(?[A-Za-z]\)\s+[^\s+*/=^(-]|[A-Z]\.\s+\S")
FACTORIAL = re.compile(r"[0-9]+\s?!+")
# 5 apples and 3 pears; not 2pi, 3pi
TWO = re.compile(r"[^\\^]*[0-9]\s?(?!pi\b)[A-Za-z]{2,}(?:,|\s+and)\s+[0-9]")
# 0.333..., 0.(3)
ENDLESS = re.compile(r"-?[0-9]*\.[0-9]*(?:[0-9]\.{3}|\u2026|\([0-9]+\))")
# 7 (1 mark); not 3 (mod 5)
REMARK = re.compile(r"[^()\\]*[^\s()\\]\s\((?!mod)[^()\\]*[A-Za-z]{2}[^()\\]*\)")
# 12 R 3, 5 & 6, 5'11"
NOT_READ = re.compile(r"[0-9]+\s?[Rr]\.?\s?[0-9]+|[^\\]+\s&\s[^\\]+|[0-9]+'[0-9]+\"?")
IN_WORDS = re.compile(r"[^0-9]*\b(?:half|halves|quarters?|thirds?|dozen|twice)\b[^0-9]*", re.I)
UNDEFINED = re.compile(
    r"undefined|unknown|none|no (?:real )?solutions?|infinite(?:ly many)?|all (?:real )?numbers",
    re.I,
)
MARKED = re.compile(
    r"[`':;,]|\*(?!\*[^*])|__|[^\\^]*(?<!\*)[*_`:;,]$|.*(?:\\n$|</?(?:b|i|p|br|div|span)>|&[a-z]+;|//|\s#)"
)
CALCULATED = re.compile(r"(?=.*=)[-+*/0-9.\s()\xd7\xb2\xb3]*+=[^=A-Za-z]*$")
# in the one spelling: what is no word there, although it has letters
NO_WORD = re.compile(
    r"\\(?:begin|end|text|mathbb)\{[^{}]*\}|\\[A-Za-z]+|_\{(?:prime)+\}|\b(?:and|or)\b"
)
LONGEST = 300  # characters of an answer that is looked at: some patterns take quadratic time


def read_answer(value: object) -> object:
    r"""An answer as text: a number by its decimal digits, and of a text its last box.

    Of GSM8K's it is what follows "####". Other values come back as they are. Raises ValueError for
    a cell that holds no answer.
    """
    if isinstance(value, Number) and not isinstance(value, bool):
        number = Decimal(str(value))
        # not 5e-05, which a grader reads as LaTeX; whole numbers may be 27.0
        return f"{number:f}".removesuffix(".0") if number.is_finite() else value
    if not isinstance(value, str):
        return value
    if NO_ANSWER.fullmatch(value.strip()):
        raise ValueError(f"the answer is {value.strip()}; fill it in, or delete the row")
    return boxed_answer(value) or value.rpartition("####")[2].strip()


def boxed_answer(solution: object) -> str | None:
    r"""The last box of a solution as MATH's authors write it, also as \boxed 2 or \fbox{2}."""
    if not isinstance(solution, str):
        return None

    def braced(match: re.Match) -> str:
        return rf"\boxed{{{match[1].rstrip('.,;')}}}"

    return last_box(UNBRACED.sub(braced, solution.replace(r"\fbox", r"\boxed")))


def equals_no_number(answer: str) -> bool:
    """Whether an answer holds a number, and words that the grader does not read as its unit."""
    try:
        text = respell(answer)
    except (IndexError, RecursionError):  # an argument is missing; `lab.tools.answers` names it
        return False
    pieces = UNIT.split(text)  # number, unit, number, unit, rest
    numbers = pieces[:-1:2]
    is_quantity = not pieces[-1] and all(re.search("[0-9]", number) for number in numbers)
    rest = NO_WORD.sub(" ", " ".join(pieces[::2]) if is_quantity else text)
    has_word = re.search(rf"(?<![A-Za-z])(?:{PLAIN_WORD}|is)(?![A-Za-z])", rest)
    return bool(has_word and re.search("[0-9]", rest))


DOUBTS: list[tuple[Callable[[str], object], str]] = [
    (HEDGED.match, 'answers with "about" or "ca." are right only in their words; give the number'),
    (DECIMAL_COMMA.match, "answers with a decimal comma are read as lists; write 2.5, or 2, 5"),
    (GROUPED.match, "answers with other marks than commas between thousands; write 1,234.50"),
    (CALCULATED.match, "answers with their calculation are right only in full; write its result"),
    (MARKED.match, "answers with marks around them are right only with them; leave them out"),
    (LABELLED.match, "answers with an option's letter and its text need both; keep one"),
    (FACTORIAL.fullmatch, "answers such as 12! are factorials; leave the mark out if it is none"),
    (TWO.match, "answers with two quantities are right only in these words; ask for one number"),
    (ENDLESS.fullmatch, "answers with digits that go on are right only as typed; give a fraction"),
    (NOT_READ.fullmatch, "answers such as 12 R 3, 5 & 6 and 6'2 are not read so; write numbers"),
    (REMARK.fullmatch, "answers with a remark in brackets are right only with it; leave it out"),
    (UNDEFINED.fullmatch, "answers with no value are right only in the same word; check them"),
    (IN_WORDS.fullmatch, "answers with parts in words are right only in them; give the number"),
    (equals_no_number, "answers with words beside a unit are right only in them; give the number"),
]  # fmt: skip


def doubt_of(answer: str) -> str | None:
    """What the author of an answer should change, if no response may ever equal it, else None."""
    if len(answer) > LONGEST:
        return None
    return next((remedy for matches, remedy in DOUBTS if matches(answer)), None)


# ---- copies --------------------------------------------------------------------------------------

# A sum, a fraction, a power, a root or a product: 4+5, 2/3, (x-1)(x+1); no name and no unit.
OPERATION = r"(?:[0-9)!}]|(?<![A-Za-z])[A-Za-z])[-+*/^]|\\sqrt|[0-9)]\(|\)[\w\\]"
# Spellings of a calculation that are the same.
CALCULATION = [
    *CHARACTERS, *KEYBOARD,
    (r"(?<=[0-9])\s?x\s?(?=[0-9])", "*"),
    (r"(?<=[0-9A-Za-z)}])(?:\s[A-Za-z]{2,}(?:\^?[0-9])?)+$", ""),  # a unit
    (r"\\(?:left|right|displaystyle|,|;|:|!|quad)(?![a-z])|\\?\$|[~\s]", ""),
    (r"\\text\{[^{}]*\}(?:\^\{?[0-9]\}?)?|\^\{?\\circ\}?|°", ""),
    (r"\\[dtc]?frac(?:\{([^{}]*)\}|([0-9]))(?:\{([^{}]*)\}|([0-9]))", r"\1\2/\3\4"),
    (r"\{\(([^()]*)\)\}", r"{\1}"),
    (r"\\times(?![a-z])|\\cdot(?![a-z])|[\xd7\xb7]", "*"),
    (r"\\div(?![a-z])|÷", "/"), ("[{}]", ""),
    (r"^[A-Za-z](?:\([A-Za-z]\))?=", ""),  # a name
]  # fmt: skip
NUMERAL = re.compile(r"-?([0-9]{0,30})(?:\\sqrt\s?(?:\[[0-9]+\])?([0-9]{1,9}))?(?:/([0-9]{1,30}))?")


def without_copies(graded: Verdict, response: str, gold: str, problem: str) -> Verdict:
    r"""The verdict, or "copied" for a right answer that only repeats a calculation of the problem.

    \boxed{4 + 5} for "What is 4 + 5?" is right only if the gold answer is written so.
    """
    if graded.reason == "correct" and is_copied(last_box(response) or "", gold, problem):
        return verdict("copied")
    return graded


def is_copied(answer: str, gold: str, problem: str) -> bool:
    """Whether a right answer is a calculation that occurs in the problem, but not the gold answer.

    Numerals, names and options are no calculations. The gold answer may have another order, a name
    or a unit. Brackets around all of it do not count.
    """
    answer, gold, problem = (rewrite(text, CALCULATION) for text in (answer, gold, problem))
    # [4+5] is a copy of 4+5, but 2(x+1) is none of 2x+1, and (1/2,3) is a point
    inside = re.sub(r"^[(\[]([^,]*)[)\]]$", r"\1", answer)
    if not re.search(OPERATION, answer) or _is_numeral(inside):
        return False
    if _parts(gold) in (_parts(answer), _parts(inside)):
        return False
    copies = rf"(?<![0-9.])(?:{re.escape(answer)}|{re.escape(inside)})(?![0-9])"
    return re.search(copies, problem) is not None


def _parts(text: str) -> list[str]:
    """The terms and factors of a calculation, whose order does not count."""
    return sorted(re.findall(r"\([^()]*\)|[^+*,()]+", text))


def _is_numeral(text: str) -> bool:
    """Whether a fraction or a root is in lowest terms: 2/3, 2sqrt(3); not 12/18, 6/1, sqrt(12)."""
    match = NUMERAL.fullmatch(text)
    if match is None:
        return False
    factor, radicand, divisor = (int(digits or 1) for digits in match.groups())
    has_square = any(radicand % n**2 == 0 for n in range(2, math.isqrt(radicand) + 1))
    return math.gcd(factor, divisor) == 1 and not has_square and "1" not in match.groups()[1:]
