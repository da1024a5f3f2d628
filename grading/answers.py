r"""Are two math answers the same? LaTeX in, a reason out, on math-verify and its parser.

    compare(answer, gold) -> "correct", "wrong" or "parse_error"

Both texts are brought into one spelling (`grading/spelling.py`). What is no single expression is
compared here: words, options, named values, quantities. Expressions go through latex2sympy,
math-verify's own parser, and math-verify's `verify` decides, except for what it accepts too easily
(`_same`).

  - A unit may be missing on either side, and so may its power: 5 cm is right for 5 and for 5 cm^2.
    Two different units that are known (`KNOWN`) are wrong: 5 cm for 5 m. A percent sign may be
    missing on one side.
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
from contextlib import suppress
from functools import lru_cache

from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from math_verify import verify
from math_verify.grader import sort_key
from sympy import (
    Basic,
    Eq,
    Expr,
    Float,
    I,
    Intersection,
    MatrixBase,
    S,
    Symbol,
    Tuple,
    Union,
    real_root,
    simplify,
    solve,
)
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from grading.spelling import HEDGE, KNOWN, TUPLE, UNIT, UNIT_NAMES, respell, rewrite

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that there is no time limit

# units: the parser's own rule drops the m of 6m as metres, and everything between the first \text
# and the last, so that "5\text{ or }6\text{ cm}" would be 5. boxed: the parser would read a box in
# the box instead of the box.
CLEANING = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
MEANING = ConversionConfig(lowercase_symbols=False)  # otherwise R - r is 0

# What `_equal` tells apart: a set or alternatives, words, the name of a ratio.
SET = r"(?:(?:[a-zA-Z]\\in)?\\\{(?!.*[:|]).*\\\}|.*\sor\s.*)"
WORDS = r"\\text|^[A-Za-z\s]{3,}$|^no$|^[A-Za-z]{3,}\s[0-9]+$"
PHRASE = r"(?:\\text\{[^{}]{3,}\}|[A-Za-z]+\s[A-Za-z\s]+)"
RATIO_NAME = r"^[^=]*[A-Za-z][^=]*=(?!.*=)"
SETS = r"\\\{[^{}]*\\\}"
# Pairs that the parser would take for the same: a tuple and a set, {1},{2} and {1,2}, a or b and
# a and b.
UNLIKE = rf"{TUPLE};{SET}|{SET};{TUPLE}|{SETS},.*;{SETS}|{SETS};{SETS},.*|{PHRASE};{PHRASE}"
# A fraction, a root or a bracket in percent.
PERCENT = r"((?:(?<![0-9])[0-9]+\s?)?\\(?:frac\{[^{}]+\}|sqrt)\{[^{}]+\}|\([^()]*\))\s?%"
# x = 3 among several
NAMED = (
    r"((?:\\[a-z]+\s?)?(?:[A-Za-z]{1,2}|\\text\{[^{}]*\})?(?:_\{[^{}]*\})?(?:\([^()=,]*\))?)"
    r"=([^=<>,]*[^=<>,\s])(?:,\s?|\sand\s|$)"
)
# (C) 12, Option C: a score; another letter, but for the article, is a hedge
OPTION = (
    r"(?i:option\s?|choice\s?)?\(?([A-J])"
    r"(?:\)?|[).:]\s?(?!.*\b(?:[B-J]|A(?!\s[a-z])|or|not|but)\b).+)"
)
# What the parser would add or multiply, take for one number, or leave out: 5 6, [5,5],
# 5 \text{perhaps six}, \not=5; and two statements, of which it would take the last.
NO_ANSWER = (
    r"\\not(?![a-z])|^[0-9.]+(?:\s[0-9.]+)+$|^\[([^,\[\]]+),\s?\1\]$|^(.+)\s(?:and|or)\s\2$|!!|"
    r"^([a-z])=(?!.*\s(?:or|and)\s)[^,]*\3=|"
    r"(?:^|=)[-0-9.]+\\approx|"
    rf"[0-9}}]\s?(?:\\text\{{)?(?:squared|cubed)\b|(?<![\\A-Za-z]){HEDGE}\b|"
    r"(?<!_\{[a-z])\\(?:to|implies|therefore|because|(?:[lL]ong)?[rR]ightarrow|iff)(?![a-z])|"
    r"=[^,=]*(?:(?<!_\{)\\text|:|\|[^|=]*(?==)|/(?=[a-z]=))[^,]*=|"
    r"\\text\{[^{}]*\b(?:not|false|wrong|incorrect|never)\b.*="
)
# The i of 2i, or what has complex values: no real z is equal to it.
COMPLEX = r"(?<![\\A-Za-z_])i(?![A-Za-z])|\\(?:imath|arg|Re|Im|mathbb\{C\})(?![a-z])"
# Symbols with another meaning: `verify` takes a symbol called E for the number e.
LETTERS = {"i": I, "E": Symbol("energy", real=True)}


@lru_cache(maxsize=4096)  # a group of rollouts has few different answers
def compare(answer: str, gold: str) -> str:
    """Return "correct" if `answer` equals `gold`, otherwise "wrong" or "parse_error".

    Both are LaTeX without a box around them.
    """
    if answer.replace(", ", ",") == gold.replace(", ", ","):  # 100,200 may be a list
        return "correct"
    try:
        return "correct" if _equal(respell(answer), respell(gold)) else "wrong"
    except Exception:  # of any class: the parser and sympy raise what they like
        return "parse_error"


def _equal(answer: str, gold: str) -> bool:
    """Whether two texts in one spelling are the same answer."""
    if _tight(_plain(answer)) == _tight(_plain(gold)):
        return True
    if re.search(WORDS, gold) and _words(answer) == _words(gold):
        return True
    if ":" in gold and ":" in answer and not ("=" in gold and "=" in answer):
        return _words(re.sub(RATIO_NAME, "", answer)) == _words(re.sub(RATIO_NAME, "", gold))
    option = re.fullmatch(OPTION, _plain(answer))
    gold_option = re.fullmatch(OPTION, _plain(gold))
    if option and gold_option:
        return option[1] == gold_option[1]
    names, answer = _named(answer)
    gold_names, gold = _named(gold)
    if names and gold_names and names != gold_names:
        return False
    if gold_names:
        gold = f"({gold})"
    if names and gold.startswith("("):
        answer = f"({answer})"
    answer, _, condition = answer.partition("¦")
    gold, _, gold_condition = gold.partition("¦")
    numbers, units = _quantities(answer)
    gold_numbers, gold_units = _quantities(gold)
    if len(numbers) > 1 or len(gold_numbers) > 1:
        return units == gold_units and all(map(_equal_values, numbers, gold_numbers))
    known = re.fullmatch(rf"({KNOWN}\s?)+;({KNOWN}\s?)+", ";".join(units + gold_units))
    if known and units != gold_units:
        return False
    if condition and gold_condition and condition != gold_condition:
        return False
    return _equal_values(numbers[0], gold_numbers[0])


def _plain(text: str) -> str:
    """The text without upright commands."""
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", text)


def _words(text: str) -> str:
    r"""The text without upright commands, spaces, full stops, commas behind words, and capitals.

    For example, 4:30 \text{PM} and \text{4:30 p.m.} become equal.
    """
    # 1.5 is not 15
    return _tight(re.sub(r"[.,](?![0-9])|\band\b", "", _plain(text))).casefold()


def _tight(text: str) -> str:
    """The text without spaces, but for those between digits: 1 23 is not 12 3."""
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)


def _named(text: str) -> tuple[list[str], str]:
    """The names of several named values, and the values in the order of their names.

    Other texts have no names.
    """
    pairs = sorted(re.findall(NAMED, text))
    names = [name for name, _ in pairs]
    if not re.fullmatch(f"(?:{NAMED})+", text) or len(set(names)) < max(2, len(names)):
        return [], text
    return names, ",".join(value for _, value in pairs)


def _quantities(text: str) -> tuple[list[str], list[str]]:
    """The numbers of quantities, and their units in one spelling: 2 and 30, h and min."""
    pieces = UNIT.split(text)  # number, unit, number, unit, rest
    if len(pieces) == 1 or pieces[-1] or "" in pieces[:-1]:
        return [text], re.findall("%$", text)
    units = []
    for unit in pieces[1::2]:
        units.append(" ".join(sorted(re.findall("[A-Za-zμΩ]+", rewrite(unit, UNIT_NAMES)))))
    numbers = [re.sub(r"^,?\s?(?:and\s)?", "", number) for number in pieces[:-1:2]]
    if units.count(units[0]) == len(units):  # a list
        return [",".join(numbers)], units[:1]
    return numbers, units


def _equal_values(answer: str, gold: str) -> bool:
    """Whether two expressions without units are equal."""
    if answer.startswith("(") or gold.startswith("("):
        answer = _as_tuple(answer)
        gold = _as_tuple(gold)
    if " base " not in answer:
        # The question named the base: 52 is right for 52_8.
        gold = re.sub(r"\\text\{(\w+) base [0-9]+\}", r"\1", gold)
    if _tight(answer) == _tight(gold):
        return True
    if re.fullmatch(UNLIKE, f"{answer};{gold}"):
        return False
    if _same(_read(gold), _read(answer)):
        return True
    if re.match(r"[^%]*$|.*%.*;.*%|0?\.[^;]*%;\\frac", f"{answer};{gold}"):
        return False  # .25\% is no \frac14
    return _same(_read(gold.replace("%", "")), _read(answer.replace("%", "")))  # 10 for 10\%


def _as_tuple(text: str) -> str:
    """A column vector as a tuple, and a point without its name; other texts as they are."""
    column = re.fullmatch(r"\\begin\{pmatrix\}([^&]*?)(?:\\\\)?\\end\{pmatrix\}", text)
    if column:
        return "(" + column[1].replace(r"\\", ",") + ")"
    return re.sub(rf"^[A-Z](?:_\{{[^{{}}]*\}})?\s?(?={TUPLE}$)", "", text)


@lru_cache(maxsize=4096)  # all answers of a group are compared with one gold answer
def _read(text: str) -> Basic | MatrixBase:
    """The parser's reading of a text.

    If it cannot read an equation as a whole, it reads the side after the `=`. Raises ValueError for
    what is not one answer, and what the parser raises.
    """
    if re.search(NO_ANSWER, text):
        raise ValueError(f"{text} is not one answer")
    text = re.sub(PERCENT, r"\\frac{\1}{100}", text)
    text, _, rounded = text.partition(r"\approx")
    is_real = not re.search(COMPLEX, text)
    try:
        expr = latex2sympy(
            text, is_real=is_real, normalization_config=CLEANING, conversion_config=MEANING
        )
    except Exception:  # of any class, see `compare`, which gets it unless this is an equation
        value = re.fullmatch(r"(?![-0-9.])(?:[^,;<>=()]|\([^()]*\))+=([^=,;<>]+)", text)
        if value is None:
            raise
        return _read(value[1])
    # conditions such as x<2 or x>3
    if re.match(r"(?=.*(?:[<>]|\\[lgn]eq)).*\b(?:or|and)\b", text) and len(expr.free_symbols) == 1:
        join = Union if re.search(r"\bor\b", text) else Intersection
        with suppress(Exception):  # of any class; `verify` compares what is no set
            expr = join(*[condition.as_set() for condition in expr])
    if isinstance(expr, Relational | And) and not expr.has(Eq) and expr.doit() == True:  # noqa: E712
        return S.Reals
    letters = {e: LETTERS[e.name] for e in expr.free_symbols if e.name in LETTERS}
    expr = expr.xreplace(letters)
    if is_real and r"\sqrt[" in text:
        expr = real_root(expr)  # otherwise \sqrt[3]{-8} is complex
    # `verify` compares a symbol with anything else by its name: \frac{2x}{2} would not be x.
    # Rational numbers are compared digit for digit.
    if isinstance(expr, Expr) and (expr.free_symbols or expr.is_rational):
        expr = expr.doit()
    if rounded:
        last_digit = re.sub(
            r"^-?[0-9,]*?(\.[0-9]*|)[0-9](?![0-9.,])",
            lambda m: re.sub("[0-9]", "0", m[1]) + "1",
            rounded,
        )
        if (abs(getattr(expr, "rhs", expr) - _read(rounded)) - _read(last_digit)).doit() > 0:
            raise ValueError(rounded)
    return expr


def _same(gold: Basic | MatrixBase, answer: Basic | MatrixBase) -> bool:
    """math-verify's verdict, except for what it accepts too easily.

    That is 6=5 for 5, 2 for 2,2, and unsolvable equations.
    """
    if isinstance(gold, FiniteSet) and len(gold._unsorted_args) > len(gold):
        gold = Tuple(*sorted(gold._unsorted_args, key=sort_key))
        answer = Tuple(*sorted(getattr(answer, "_unsorted_args", ()), key=sort_key))
    for equation in answer.atoms(Eq):  # x=2+3=5 has one between plain numbers
        if not equation.has(Symbol, AppliedUndef) and not verify(
            equation.lhs, equation.rhs, 12, timeout_seconds=None
        ):
            return False
    # Decimals are compared to 12 places, constants to 300 digits: smaller differences are 0 to
    # `verify`, and with fewer digits 2^{-99} would be 2^{-100}. Sums would take a minute.
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
