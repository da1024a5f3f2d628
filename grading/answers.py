"""Are two math answers the same? LaTeX in, a reason out, on math-verify and its parser.

    compare(answer, gold) -> "correct", "wrong" or "parse_error"

Both texts go through the same rewritings (`SPELLINGS`) and through latex2sympy, math-verify's own
parser. Then math-verify's `verify` decides, except for what it accepts too easily (`_same`).

  - Units do not count: 5 cm is right for 5, for 5 m and for 5 cm^2. A percent sign may be missing
    on one side.
  - Words are compared as words, without capitals, spaces and full stops. So are texts with a colon
    on both sides: half past four is not the ratio 4:30.
  - Decimals are equal if they agree to 12 places. No other number is equal to a rounded one.

Nothing in an answer is run as code: sympy's `sympify` sees only what the parser's grammar accepts
as a number. Time and memory are not limited here, although a tower of powers or 3,000 open brackets
take long: `rewards.py` calls this in processes that it can kill. Importing this file takes most of
a second.
"""

import logging
import re
from collections.abc import Callable
from functools import lru_cache

from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.sets import FiniteSet
from math_verify import verify
from sympy import Basic, Eq, Expr, Float, I, MatrixBase, Symbol, Union, simplify, solve
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.function import AppliedUndef

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that there is no time limit

# units: the parser's own rule drops the m of 6m as metres, and everything between the first \text
# and the last, so that "5\text{ or }6\text{ cm}" would be 5. boxed: the parser would read a box in
# the box instead of the box.
CLEANING = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
MEANING = ConversionConfig(lowercase_symbols=False)  # otherwise R - r is 0

UNICODE = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "°": r"^\circ ",
     "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "…": r"\ldots ",
     "≈": r"\approx ", "≡": r"\equiv ", "′": "'", "½": r"\frac12", "¼": r"\frac14",
     "¾": r"\frac34", "⅓": r"\frac13", "⅔": r"\frac23"}
) | str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")  # fmt: skip
UPRIGHT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf|tt)|boldsymbol|bm|[mh]box)\s*\{"
# What a word after a number multiplies it by.
FACTORS = {
    "ten": "10^{1}", "hundred": "10^{2}", "thousand": "10^{3}", "million": "10^{6}",
    "billion": "10^{9}", "trillion": "10^{12}", "dozen": "12", "half|halve": "2^{-1}",
    "third": "3^{-1}", "fourth": "4^{-1}", "fifth": "5^{-1}", "sixth": "6^{-1}",
    "seventh": "7^{-1}", "eighth": "8^{-1}", "ninth": "9^{-1}",
}  # fmt: skip
# Words that are no unit: a hedge, a number, an operation; a time of day.
HEDGE = (
    r"(?:perhaps|maybe|possibly|probably|either|plus|minus|times(?= *\w)|factorial|least|most|"
    r"twice|thrice|doubled|tripled|halved|quadrillions?|lakhs?|crores?|(?:ten|hundred)-[a-z]+ths?|"
    r"twelfths?|[a-z]+(?:teen|tie)ths?|"
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty)(?!-))"
)
NO_UNIT = rf"(?:and|or|not|but|[ap]\.?m|{HEDGE})"
# Units, in upright type or as words after a number.
UNIT_WORDS = (
    rf"\\text\{{(?! *(?:squared|cubed|[eix-z]\b)|[^{{}}]*\b{NO_UNIT}\b)"
    r"(?:[A-Za-z .,/-]|\\cdot |(?:(?<=[a-z]{2})|(?<=[ghlmsAJKNVW]))\^\s?\{?-?[0-9]\}?)+\}"
)
UNIT = rf"(?:{UNIT_WORDS}|(?<=[0-9}}])(?: (?!{NO_UNIT}\b)(?:[ckm]m|kg|ft|[a-z]{{4,}})\b)+)"
# What the parser would add or multiply, take for one number, or leave out:
# 5 6, [5,5], 5 \text{perhaps six}, \not=5.
NO_ANSWER = (
    r"\\not(?![a-z])|^[0-9.]+( [0-9.]+)+$|^\[ ?([^,\[\]]+), ?\2 ?\]$|"
    rf"[0-9}}] ?(?:\\text\{{ ?)?(?:squared|cubed)\b|(?<![\\A-Za-z]){HEDGE}\b"
)
# (C) 12, with or without upright type
CHOICE = rf"(?:{UPRIGHT})?\s*\(?(?:{UPRIGHT})?([A-J])\}}?\)(?!.*\b(?:[A-J]|or|not|but)\b).*"
TUPLE = r"\([^()]*,[^()]*\)"
SET = r"\\\{(?!.*(?:[:|]|\\mid)).*\\\}"
# The i of 2i, or what has complex values: no real z is equal to it.
COMPLEX = r"(?<![\\A-Za-z_])i(?![A-Za-z])|\\(?:imath|arg|Re|Im|mathbb\{C\})(?![a-z])"
# Symbols with another meaning: `verify` takes a symbol called E for the number e.
LETTERS = {"i": I, "E": Symbol("energy", real=True)}


def _both_signs(match: re.Match) -> str:
    """(0,\\pm2) as (0,+2),(0,-2).

    Part of a group, or a text with two signs that may go together, stays as it is.
    """
    text = match[0]
    parts = re.split(r"\\pm(?![a-z])", text)
    if len(parts) != 2 or text.count("{") != text.count("}") or text.count("(") != text.count(")"):
        return text
    return "+".join(parts) + "," + "-".join(parts)


SPELLINGS: list[tuple[str, str | Callable[[re.Match], str]]] = [
    (UPRIGHT, r"\\text{"),  # one command for upright text
    (r"(?<=[0-9])(?:,\\!|\{,\})\s*(?=[0-9]{3})", ""),  # thousands: 1,\!000 and 1{,}000
    (r"(?:(?<!\\)\\(?:[,!;:> ]|q?quad\b)|~|\s)+", " "),  # every space is one space
    (r"√ ?(\([^()]*\)|\{[^{}]*\}|[0-9.]+|[a-z])", r"\\sqrt{\1}"),
    # the parser knows no \big, and none is needed
    (r"\\(?:[bB]igg?[lrm]?|middle|(?:left|right)(?= ?(?:[()\[\]]|\\[{}lr])))(?![a-z]) ?", ""),
    (r"\\lbrace(?![a-z]) ?", r"\\{"), (r"\\rbrace(?![a-z]) ?", r"\\}"),
    (r"\\not ?=", r"\\neq "),
    (r"\s?(?:\^(\{)?)?\\degree(?![a-z])(?(1)\})", r"^\\circ "),
    (r"\\log ?_ ?(?:e|\{e\})(?![a-z])", r"\\ln "),
    # unwraps \text{36 dollars}, \text{(C)}, \mathrm{e}, but not the unit of 5\text{m^2}
    (rf"(?!(?:(?<=[0-9}}])|(?<=[0-9}}] )){UNIT_WORDS})"
     r"\\text\{([^{}]*[0-9(][^{}]*|[ei])\}", r"\1"),
    (r"^(?i:(?:\\text\{ ?)?the answer is):? ?\}? ?", ""),
    (r"^\\\{ ?([a-z])(?: ?\\in ?\\mathbb ?\{?R\}?)? ?(?:\\(?:mid|vert|colon)(?![a-z])|[:|]) ?"
     r"((?=.*\1)(?!.*=).*(?:[<>]|\\[lgn]eq?(?![a-z])).*)\\\}$", r"\2"),  # \{x\mid x>3\}
    (r"^(?:[a-cx-z] ?=[^,=]+(?:,|\\text\{.?and.?\}|$) ?){2,}$",  # y=4, x=3
     lambda m: ",".join(sorted(re.split(r",\s?|\\text\{.?and.?\}", m[0])))),
    (r"^([a-z])\s?=[^,=]+(?:,\s?\1\s?=[^,=]+)+$", r"\\{\g<0>\\}"),  # x=3, x=4 is no (3,4)
    (r"(?<![\w.])([0-9]*\.[0-9]+)[eE]\+?(-?[0-9]+)(?![\w.])", r"\1\\cdot 10^{\2}"),  # 1.5e3
    (r"\\?\$|[£€¥]", ""),  # currency, and dollar signs around math
    (r"(^|=) *([-+]?[1-9][0-9]{0,2}(?:[ ,][0-9]{3})+)(?![0-9]| ?[,;])",
     lambda m: m[1] + re.sub("[ ,]", "", m[2])),  # thousands: 1 000, and 1,000 beside a unit
    (r"^(-?[0-9]+) +([0-9]+)/([0-9]+)\b", r"\1\\frac{\2}{\3}"),  # 7 3/4 is 7 + 3/4
    (r"(?<![0-9])([0-9]{0,30})\.([0-9]{0,30})\\(?:overline|bar|dot) ?"  # 0.1\overline{6}
     r"(\{)?((?(3)[0-9]{1,30}|[0-9]))(?(3)\})(?! ?[0-9])",
     lambda m: m.expand(r"\\frac{0\1\2\4-0\1\2}{") + "9" * len(m[4]) + "0" * len(m[2]) + "}"),
    *[(rf"(?<=[0-9}}]) *(\\text\{{)? *(?:{word})s?(?=(?:ths?)?\b)(?!-)", rf"\\cdot {factor}\1")
      for word, factor in FACTORS.items()],  # 3\text{ million}
    (r"(?<=\\cdot 10\^\{)([0-9]+\}(?:\\text\{)?)ths?\b", r"-\1"),  # 3\text{ hundredths}
    (r"\\(?:thick)?approx(?![a-z]) ?", "="),
    (r"^ *= *", ""),
    (r" ?\(? ?\\?(?:[pb]?mod(?![a-z])|text\{ ?mod ?\}) ?\{? ?([^{} ]+?) ?\}? ?\)?$",
     r"\\pmod{\1}"),
    (r" ?\\equiv(?![a-z]) ?", r"\\equiv "),
    (r"^(?:[a-z]\\equiv )?(?=-?[0-9]+\\pmod)", r"\\equiv "),  # 3 (mod 7) is right for x = 3
    # f'(x), f^\prime(x) and f^{\prime}(x) are f_{prime}(x), which is not f(x)
    (r"\\prime(?![a-z]) ?", "'"), (r"\^ ?(?:\{ ?('+)\}|(?='))", r"\1"),
    (r"(?<=[A-Za-z])('+)", r"_{\1}"), (r"(?<=[{'])'", "prime"),
    (r"'", r"^{\\prime}"),
    (r"(?<=[0-9])(?: |\^|\{|\\text\{)*(?:st|nd|rd|th)\}*$", ""),  # 5^{\text{th}}
    # 12\text{ cm}^2, 36 dollars
    (rf"(?<=[\w}})])(?:[ /]*{UNIT}(?: ?\^ ?\{{?-?[0-9]\}}?)?)+$", ""),
    # 52_8 is not 52_9
    (r"(?<![\w.^])(\()?([0-9][0-9A-F]*)(?(1)\))_ ?\{?([0-9]+)\}?(?![\w!])",
     r"\\text{\2 base \3}"),
    (r"\\[lcd]?dots[bcmio]?\b|\.\.\.", r"\\text{dots}"),  # 1,...,5 is not 1,5
    (r"([0-9]+)\.([0-9]+) ?\\(?:times|cdot) ?(?=10 ?\^)",  # 6.7\times 10^{-34}, exactly
     lambda m: m.expand(r"\\frac{\1\2}{1") + "0" * len(m[2]) + r"}\cdot "),
    (r"([A-Za-z]|[0-9]+)!\^", r"(\1!)^"),  # the parser does not know n!^2
    (r"\([^()]*,[^()]*\)", _both_signs),  # (0,\pm2)
    (r"[^,]+", _both_signs),  # \frac{1\pm\sqrt5}{2}, which the parser does not know
    (r"\\\\ ?\[[0-9.]+ ?[a-z]{2}\]", r"\\\\ "),  # \\[4pt] between the rows of a matrix
    (r"(\\(?:sin|cos|tan|cot|sec|csc) ?)([0-9.]+) ?\^ ?(?:\\circ|\{ ?\\circ ?\})",
     r"\1(\2\\pi/180)"),
    (r"\\varnothing\b", r"\\emptyset "),
    (r"\\(?:display|text|script)style\b|\\(?:text)?color\{\w+\}", ""),  # appearance
    (r"\\langle\b", "("), (r"\\rangle\b", ")"),
    # 5 = x
    (r"^((?:\\[a-z]+|[^A-Za-z=,<>\\])+)= ?([A-Za-z](?:\([^()]*\))?)$", r"\2=\1"),
]  # fmt: skip


@lru_cache(maxsize=4096)  # a group of rollouts has few different answers
def compare(answer: str, gold: str) -> str:
    """Return "correct" if `answer` equals `gold`, otherwise "wrong" or "parse_error".

    Both are LaTeX without a box around them.
    """
    same_words = _words(answer) == _words(gold)
    if ":" in gold and ":" in answer and "=" not in gold:
        return "correct" if same_words else "wrong"
    is_text = re.search(UPRIGHT + "|^[A-Za-z ]{3,}$", gold)
    choice = re.fullmatch(CHOICE, answer)
    if (
        (is_text and same_words)
        or answer.replace(", ", ",") == gold.replace(", ", ",")  # 100,200 may be a list
        or (choice and choice[1].casefold() == _words(gold))  # (C) 12 is right for C
    ):
        return "correct"
    answer, gold = _normalise(answer), _normalise(gold)
    column = re.fullmatch(r"\\begin\{[pb]matrix\}([^&]*)\\end\{[pb]matrix\}", gold)
    if column and answer.startswith("("):  # a column vector as a tuple
        gold = "(" + column[1].replace(r"\\", ",") + ")"
    if " base " not in answer:
        # The question named the base: 52 is right for 52_8.
        gold = re.sub(r"\\text\{(\w+) base [0-9]+\}", r"\1", gold)
    if answer == gold:
        return "correct"
    if re.fullmatch(f"{TUPLE};{SET}|{SET};{TUPLE}", f"{answer};{gold}"):
        return "wrong"
    try:
        right = _same(_read(gold), _read(answer))
        if not right and ("%" in answer) != ("%" in gold):  # 10 is right for 10\%
            right = _same(_read(re.sub(r"\\?%", "", gold)), _read(re.sub(r"\\?%", "", answer)))
    except Exception:  # of any class: the parser and sympy raise what they like
        return "parse_error"
    return "correct" if right else "wrong"


def _words(text: str) -> str:
    """The text without upright commands, spaces, full stops and capitals.

    For example, 4:30 \\text{ PM} and \\text{4:30 p.m.} become equal.
    """
    text = re.sub(UPRIGHT + r"([^{}]*)\}", r"\1", text)
    # 1 23 is not 12 3, nor 1.5 15.
    text = re.sub(r"\\[,!;:]|(?<![0-9])\s+|\s+(?![0-9])|\.(?![0-9])|\$", "", text)
    return re.sub(r"^\((\w)\)$", r"\1", text).casefold()


def _normalise(text: str) -> str:
    """The text in the spellings that the parser knows, without a final full stop."""
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", r"^{\g<0>}", text)  # x²
    text = text.translate(UNICODE).strip().rstrip(".")
    for pattern, replacement in SPELLINGS:
        text = re.sub(pattern, replacement, text)
    return text.strip().rstrip(".")


@lru_cache(maxsize=4096)  # all answers of a group are compared with one gold answer
def _read(text: str) -> Basic | MatrixBase:
    """The parser's reading of a text.

    If it cannot read an equation as a whole, it reads the side after the last `=`. Raises
    ValueError for what is not one answer, and what the parser raises.
    """
    if re.search(NO_ANSWER, text):
        raise ValueError(f"{text} is not one answer")
    try:
        expr = latex2sympy(
            text,
            is_real=not re.search(COMPLEX, text),
            normalization_config=CLEANING,
            conversion_config=MEANING,
        )
    except Exception:  # of any class, see `compare`, which gets it unless this is an equation
        value = re.fullmatch(r"[^,;<>]*[^\\<>!,;]=([^=,;<>]+)", text)
        if value is None:
            raise
        return _read(value[1])
    is_union = re.search(r"\bor\b", text) and isinstance(expr, FiniteSet)
    if is_union and not any(isinstance(e, Eq) for e in expr):
        expr = _union(expr)
    letters = {e: LETTERS[e.name] for e in expr.free_symbols if e.name in LETTERS}
    expr = expr.xreplace(letters)
    # `verify` compares a symbol with anything else by its name: \frac{2x}{2} would not be x.
    return expr.doit() if isinstance(expr, Expr) and expr.free_symbols else expr


def _union(conditions: FiniteSet) -> Basic:
    """Conditions such as x<2 or x>3 as one set of numbers.

    Conditions that sympy cannot turn into a set stay as they are.
    """
    try:
        return Union(*[condition.as_set() for condition in conditions])
    except Exception:  # of any class; `verify` then compares the conditions themselves
        return conditions


def _same(gold: Basic | MatrixBase, answer: Basic | MatrixBase) -> bool:
    """math-verify's verdict, except for what it accepts too easily.

    That is 6=5 for 5, 2 for 2,2, and unsolvable equations.
    """
    gold_has_repeats = isinstance(gold, FiniteSet) and len(gold._unsorted_args) > len(gold)
    if gold_has_repeats and len(gold._unsorted_args) != len(getattr(answer, "_unsorted_args", ())):
        return False
    for equation in answer.atoms(Eq):  # x=2+3=5 has one between plain numbers
        is_numeric = not equation.has(Symbol, AppliedUndef)
        if is_numeric and not verify(equation.lhs, equation.rhs, 12, timeout_seconds=None):
            return False
    # Decimals are compared to 12 places, constants to 300 digits: smaller differences are 0 to
    # `verify`, and with fewer digits 2^{-99} would be 2^{-100}. Decimals within constants, as in
    # 10^{0.01}, have no such digits, and sums would take a minute.
    digits = 15 if gold.has(Float, ExprWithLimits) or answer.has(Float, ExprWithLimits) else 300
    if not verify(gold, answer, 12, digits, allow_set_relation_comp=True, timeout_seconds=None):
        return False
    if (
        isinstance(gold, Eq)
        and isinstance(answer, Eq)
        and all(isinstance(e, Expr) for e in gold.args + answer.args)
    ):
        left = gold.lhs - gold.rhs
        right = answer.lhs - answer.rhs
        return simplify((left - right) * (left + right)) == 0 or bool(solve(gold))
    return True
