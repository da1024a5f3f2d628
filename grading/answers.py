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

from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.sets import FiniteSet
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy import Basic, Eq, Expr, Float, I, MatrixBase, Symbol, Union, simplify, solve
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.function import AppliedUndef

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that there is no time limit

# units: the parser's own rule drops the m of 6m as metres, and everything between the first \text
# and the last, so that "5\text{ or }6\text{ cm}" would be 5. boxed: the parser would read a box in
# the box instead of the box.
CLEANING = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
MEANING = ConversionConfig(lowercase_symbols=False)  # otherwise R - r is 0

UNICODE = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "°": r"^\circ ",
     "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "…": r"\ldots ",
     "≈": r"\approx ", "≡": r"\equiv ", "′": "'"}
)  # fmt: skip
UPRIGHT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf|tt)|boldsymbol|bm|[mh]box)\s*\{"
# What a word after a number multiplies it with.
FACTORS = {"dozen": "12", "half": r"\frac{1}{2}", "halves": r"\frac{1}{2}"}
for _power, _name in (
    (1, "ten"),
    (2, "hundred"),
    (3, "thousand"),
    (6, "million"),
    (9, "billion"),
    (12, "trillion"),
):
    FACTORS |= {
        _name: f"10^{{{_power}}}",
        f"{_name}th": f"10^{{-{_power}}}",
        f"{_name}ths": f"10^{{-{_power}}}",
    }
for _n, _name in enumerate("third fourth fifth sixth seventh eighth ninth".split(), 3):
    FACTORS |= {f"{_name}s": rf"\frac{{1}}{{{_n}}}"}
# Words that are no unit: a hedge, a number, an operation; a time of day.
HEDGE = (
    r"(?:perhaps|maybe|possibly|probably|either|plus|minus|times(?= *\w)|factorial|least|most|"
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty)(?!-))"
)
NO_UNIT = rf"(?:and|or|not|but|[ap]\.?m|{HEDGE})"
# Units, in upright type or as words after a number.
UNIT_WORDS = rf"\\text\{{(?! *(?:squared|cubed)|[^{{}}]*\b{NO_UNIT}\b)[A-Za-z .,/-]+\}}"
UNIT = rf"(?:{UNIT_WORDS}|(?<=[0-9}}])(?: (?!{NO_UNIT}\b)(?:[ckm]m|kg|ft|[a-z]{{4,}})\b)+)"
# What the parser would add or multiply, take for one number, or leave out: 5 6, [5,5], 5 \text{
# perhaps six}.
NO_ANSWER = re.compile(
    r"^[0-9.]+( [0-9.]+)+$|^(?:\\left ?)?\[ ?([^,\[\]]+), ?\2 ?(?:\\right ?)?\]$|"
    rf"[0-9}}] ?(?:\\text\{{ ?)?(?:squared|cubed)\b|(?<![\\A-Za-z]){HEDGE}\b"
)
CHOICE = re.compile(r" *\(([A-J])\)(?!.*\b(?:[A-J]|or|not|but)\b).*")  # (C) 12
TUPLE = re.compile(r"(?:\\left ?)?\([^()]*,[^()]*\)")
SET = re.compile(r"(?:\\left ?)?\\\{(?!.*(?:[:|]|\\mid)).*\\\}")
IMAGINARY = re.compile(r"(?<![\\A-Za-z_])i(?![A-Za-z])")  # the i of 2i: no real z is equal to it
SPELLINGS = [
    (re.compile(pattern), new)
    for pattern, new in [
        (UPRIGHT, r"\\text{"),  # one command for upright text
        # unwraps \text{36 dollars}, \text{(C)}, \mathrm{e}
        (r"\\text\{([^{}]*[0-9(][^{}]*|[ei])\}", r"\1"),
        (r"(?<=[0-9])(?:,\\!|\{,\})\s*(?=[0-9]{3})", ""),  # thousands: 1,\!000 and 1{,}000
        (r"(?:(?<!\\)\\(?:[,!;:> ]|q?quad\b)|~|\s)+", " "),  # every space is one space
        (r"\\?\$|[£€¥]", ""),  # currency, and dollar signs around math
        (r"(^|=) *([-+]?[1-9][0-9]{0,2}(?:[ ,][0-9]{3})+)(?![0-9]| ?[,;])",
         lambda m: m[1] + re.sub("[ ,]", "", m[2])),  # thousands: 1 000, and 1,000 beside a unit
        (r"^(-?[0-9]+) +([0-9]+)/([0-9]+)\b", r"\1\\frac{\2}{\3}"),  # 7 3/4 is 7 + 3/4
        (r"(?<![0-9])([0-9]{0,30})\.([0-9]{0,30})\\(?:overline|bar|dot) "
         r"?(?:\{([0-9]{1,30})\}|([0-9]))",
         lambda m: _periodic(m[1] + m[2], m[3] or m[4], len(m[2]))),  # 0.1\overline{6}
        (rf"(?<=[0-9}}]) *(\\text\{{ *)?({'|'.join(FACTORS)})\b(?!-)",
         lambda m: rf"\cdot {FACTORS[m[2]]}" + (m[1] or "")),  # 3\text{ million}
        (r"\\(?:thick)?approx(?![a-z]) ?", "="),
        (r"^ *= *", ""),
        (r" ?\(? ?\\?(?:[pb]?mod(?![a-z])|text\{ ?mod ?\}) ?\{? ?([^{} ]+?) ?\}? ?\)?$",
         r"\\pmod{\1}"),
        (r" ?\\equiv(?![a-z]) ?", r"\\equiv "),
        (r"(?<=[A-Za-z])(?:'|\^ ?(?:\\prime(?![a-z])|\{ ?(?:\\prime ?)+\}))+",  # f'(x) is not f(x)
         lambda m: "_{" + "prime" * len(re.findall("'|prime", m[0])) + "}"),
        (r"'", r"^{\\prime}"),
        (r"(?<=[0-9])(?: |\^|\{|\\text\{)*(?:st|nd|rd|th)\}*$", ""),  # 5^{\text{th}}
        # 12\text{ cm}^2, 36 dollars
        (rf"(?<=[\w}})])(?:[ /]*{UNIT}(?: ?\^ ?\{{?[0-9]\}}?)?)+$", ""),
        # 52_8 is not 52_9
        (r"(?<![\w.^])([0-9][0-9A-F]*)_ ?\{?([0-9]+)\}?(?![\w!])", r"\\text{\1 base \2}"),
        (r"\\[lcd]?dots[bcmio]?\b|\.\.\.", r"\\text{dots}"),  # 1,...,5 is not 1,5
        (r"([0-9]+)\.([0-9]+) ?\\(?:times|cdot) ?(?=10 ?\^)",
         lambda m: rf"{m[1]}{m[2]}\cdot 10^{{-{len(m[2])}}}\cdot "),  # 6.7\times 10^{-34}, exactly
        (r"([A-Za-z]|[0-9]+)!\^", r"(\1!)^"),  # the parser does not know n!^2
        (r"\([^()]*,[^()]*\)", lambda m: _both_signs(m[0])),  # (0,\pm2)
        # \frac{1\pm\sqrt5}{2}, which the parser does not know
        (r"[^,]+", lambda m: _both_signs(m[0])),
        (r"\\\\ ?\[[0-9.]+ ?[a-z]{2}\]", r"\\\\ "),  # \\[4pt] between the rows of a matrix
        (r"(\\(?:sin|cos|tan|cot|sec|csc) ?)([0-9.]+) ?\^ ?(?:\\circ|\{ ?\\circ ?\})",
         r"\1(\2\\pi/180)"),
        (r"\\varnothing\b", r"\\emptyset "),
        (r"\\(?:display|text|script)style\b|\\(?:text)?color\{\w+\}", ""),  # appearance
        (r"\\langle\b", "("), (r"\\rangle\b", ")"),
    ]
]  # fmt: skip


def compare(answer: str, gold: str) -> str:
    """The reason "correct" if `answer` equals `gold`, both LaTeX without a box around them, or why
    it does not.
    """
    if ":" in gold and ":" in answer and "=" not in gold:
        return "correct" if _words(answer) == _words(gold) else "wrong"
    is_text = re.search(UPRIGHT, gold) or (
        re.search(UPRIGHT, answer) and re.fullmatch("[A-Za-z ]{3,}", gold)
    )
    if is_text and _words(answer) == _words(gold):
        return "correct"
    if re.sub(", +", ",", answer) == re.sub(", +", ",", gold):  # 100,200 may be a list
        return "correct"
    choice = CHOICE.fullmatch(re.sub(UPRIGHT + r"([^{}]*)\}", r"\1", answer))
    if choice and choice[1].casefold() == _words(gold):  # (C) 12 is right for C
        return "correct"
    answer, gold = _normalise(answer), _normalise(gold)
    column = re.fullmatch(r"\\begin\{[pb]matrix\}([^&]*)\\end\{[pb]matrix\}", gold)
    if column and answer.startswith("("):  # a column vector as a tuple
        gold = "(" + column[1].replace(r"\\", ",") + ")"
    if " base " not in answer:
        gold = re.sub(
            r"\\text\{(\w+) base [0-9]+\}", r"\1", gold
        )  # the question named the base: 52 is right for 52_8
    if answer == gold:
        return "correct"
    if any(
        TUPLE.fullmatch(one) and SET.fullmatch(other)
        for one, other in ((answer, gold), (gold, answer))
    ):
        return "wrong"
    try:
        right = _same(_read(gold), _read(answer))
        if not right and ("%" in answer) != ("%" in gold):  # 10 is right for 10\%
            right = _same(_read(re.sub(r"\\?%", "", gold)), _read(re.sub(r"\\?%", "", answer)))
    except (
        Exception
    ):  # parser and sympy raise errors of every class on text that they cannot read or compute
        return "parse_error"
    return "correct" if right else "wrong"


def _words(text: str) -> str:
    """The text without upright commands, spaces, full stops and capitals: 4:30 \\text{ PM} is
    \\text{4:30 p.m.}.
    """
    text = re.sub(UPRIGHT + r"([^{}]*)\}", r"\1", text)
    text = re.sub(
        r"(?<![0-9])\s+|\s+(?![0-9])|\.(?![0-9])|\$", "", text
    )  # 1 23 is not 12 3, nor 1.5 15
    return re.sub(r"^\((\w)\)$", r"\1", text).casefold()


def _normalise(text: str) -> str:
    """The text in the spellings that the parser knows, without a final full stop."""
    text = text.translate(UNICODE).strip().rstrip(".")
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(".")


def _periodic(digits: str, period: str, places: int) -> str:
    """The fraction of a periodic decimal: its digits before the period, of which so many after the
    point.
    """
    numerator = int(digits + period) - int(digits or "0")
    return rf"\frac{{{numerator}}}{{{10**places * (10 ** len(period) - 1)}}}"


def _both_signs(text: str) -> str:
    """(0,\\pm2) as (0,+2),(0,-2). Part of a group, or a text with two signs that may go together,
    stays as it is.
    """
    signs = re.findall(r"\\pm(?![a-z])", text)
    if len(signs) != 1 or text.count("{") != text.count("}") or text.count("(") != text.count(")"):
        return text
    return re.sub(r"\\pm(?![a-z])", "+", text) + "," + re.sub(r"\\pm(?![a-z])", "-", text)


def _read(text: str) -> Basic | MatrixBase:
    """The parser's reading of a text; if it cannot read an equation as a whole, that of the side
    after the last `=`.
    """
    if NO_ANSWER.search(text):
        raise ValueError(f"{text} is not one answer")
    try:
        is_real = not should_treat_as_complex(text) and not IMAGINARY.search(text)
        expr = latex2sympy(
            text, is_real=is_real, normalization_config=CLEANING, conversion_config=MEANING
        )
    except Exception:  # of any class, see `compare`, which gets it unless this is an equation
        value = re.fullmatch(r"[^,;<>]*[^\\<>!,;]=([^=,;<>]+)", text)
        if value is None:
            raise
        return _read(value[1])
    if (
        re.search(r"\bor\b", text)
        and isinstance(expr, FiniteSet)
        and not any(isinstance(e, (Expr, Eq)) for e in expr)
    ):
        expr = _union(expr)
    if (
        isinstance(expr, Eq)
        and getattr(expr.lhs, "is_number", False)
        and isinstance(expr.rhs, Symbol | AppliedUndef)
    ):
        expr = Eq(expr.rhs, expr.lhs)  # 5 = x
    imaginary = {symbol: I for symbol in expr.free_symbols if symbol.name == "i"}
    return expr.xreplace(imaginary) if imaginary else expr


def _union(conditions: FiniteSet) -> Basic:
    """x<2 or x>3 as a set of numbers; conditions that sympy cannot turn into one stay as
    they are.
    """
    try:
        return Union(*[condition.as_set() for condition in conditions])
    except Exception:  # of any class; `verify` then compares the conditions themselves
        return conditions


def _same(gold: Basic | MatrixBase, answer: Basic | MatrixBase) -> bool:
    """math-verify's verdict, except for what it accepts too easily: 6=5 as 5, 2 as 2,2, unsolvable
    equations.
    """
    gold_has_repeats = isinstance(gold, FiniteSet) and len(gold._unsorted_args) > len(gold)
    if gold_has_repeats and len(gold._unsorted_args) != len(getattr(answer, "_unsorted_args", ())):
        return False
    if not _numeric_equations_hold(answer):
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
        left, right = gold.lhs - gold.rhs, answer.lhs - answer.rhs
        return simplify(left - right) == 0 or simplify(left + right) == 0 or bool(solve(gold))
    return True


def _numeric_equations_hold(expr: Basic | MatrixBase) -> bool:
    """Whether the equations between plain numbers in an expression are true: x=2+3=5 has one."""
    equations = [
        e for e in expr.atoms(Eq) if all(getattr(side, "is_number", False) for side in e.args)
    ]
    return all(verify(e.lhs, e.rhs, float_rounding=12, timeout_seconds=None) for e in equations)
