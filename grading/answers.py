"""Are two math answers the same? LaTeX in, a reason out, on math-verify and its parser.

    compare(answer, gold) -> "correct", "wrong" or "parse_error"

Both texts go through the same few rewritings (`SPELLINGS`) and latex2sympy, math-verify's own parser; then
math-verify's `verify` decides. What it lets pass too easily is refused here: see `_same`.

  - Units are dropped: 5 cm is right for 5, for 5 m and for 5 cm^2. A percent sign may be missing on one side.
  - Words are compared as words, without capitals, spaces and stops. So is what has a colon on both sides: half past
    four is not the ratio 4:30.
  - Decimals agree if they do to 12 places; no other number is equal to a rounded one.

Nothing in an answer is run as code: of its text, sympy's `sympify` sees only what the parser's grammar takes for a
number. Time and memory are not limited here, and a tower of powers, or 3,000 open brackets, takes long: `rewards.py`
runs this in processes that it can kill. Importing it takes most of a second.
"""

import logging
import re

from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.sets import FiniteSet
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy import Basic, Eq, Expr, Float, I, MatrixBase, Union, simplify, solve
from sympy.concrete.expr_with_limits import ExprWithLimits

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that nothing limits the time

# units: the parser's own rule drops the m of 6m as metres, and all that stands between the first \text and the
# last, so that "5\text{ or }6\text{ cm}" is 5. boxed: it would read a box in the box instead of the box.
CLEANING = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
MEANING = ConversionConfig(lowercase_symbols=False)  # else R - r is 0

UNICODE = str.maketrans(
    {"−": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "°": r"^\circ ", "∞": r"\infty ", "≤": r"\le ",
     "≥": r"\ge ", "∪": r"\cup ", "…": r"\ldots "}
)  # fmt: skip
UPRIGHT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|[mh]box)\s*\{"
POWERS = {"thousand": "3", "million": "6", "billion": "9", "trillion": "12"}
# Units, in upright type or as words after a number; a hedge is none, nor is a time of day.
UNIT_WORDS = r"\\text\{(?![^{}]*\b(?:and|or|not|but|[ap]\.?m)\b)[A-Za-z .,/-]+\}"
UNIT = rf"(?:{UNIT_WORDS}|(?<=[0-9}}])(?: (?:[ckm]m|kg|ft|[a-z]{{4,}})\b)+)"
SPELLINGS = [
    (re.compile(pattern), new)
    for pattern, new in [
        (UPRIGHT, r"\\text{"),  # upright text in one way
        (r"\\text\{([^{}]*[0-9(][^{}]*|[ei])\}", r"\1"),  # \text{36 dollars}, \text{(C)}, \mathrm{e}: no mere text
        (r"(?<=[0-9])(?:,\\!|\{,\})\s*(?=[0-9]{3})", ""),  # thousands: 1,\!000 and 1{,}000
        (r"(?:(?<!\\)\\(?:[,!;:> ]|q?quad\b)|~|\s)+", " "),  # every space is one space
        (r"\\?\$|[£€¥]", ""),  # currency, and dollars around a part
        (r"(^|=) *([-+]?[1-9][0-9]{0,2}(?:[ ,][0-9]{3})+)(?![0-9]| ?[,;])",
         lambda m: m[1] + re.sub("[ ,]", "", m[2])),  # thousands: 1 000, and 1,000 beside a unit
        (r"^(-?[0-9]+) +([0-9]+)/([0-9]+)\b", r"\1\\frac{\2}{\3}"),  # 7 3/4 is 7 + 3/4
        (r"(?<=[0-9]) *(\\text\{ *)?(thousand|million|billion|trillion)\b",
         lambda m: rf"\cdot 10^{{{POWERS[m[2]]}}}" + (m[1] or "")),  # 3\text{ million}
        (r"(?<=[0-9])(?: |\^|\{|\\text\{)*(?:st|nd|rd|th)\}*$", ""),  # 5^{\text{th}}
        (rf"(?<=[\w}})])(?:[ /]*{UNIT}(?: ?\^ ?\{{?[0-9]\}}?)?)+$", ""),  # 12\text{ cm}^2, 36 dollars
        (r"(?<![\w.^])([0-9][0-9A-F]*)_ ?\{?([0-9]+)\}?(?![\w!])", r"\\text{\1 base \2}"),  # 52_8 is not 52_9
        (r"\\[lcd]?dots[bcmio]?\b|\.\.\.", r"\\text{dots}"),  # 1,...,5 is not 1,5
        (r"([0-9]+)\.([0-9]+) ?\\(?:times|cdot) ?(?=10 ?\^)",
         lambda m: rf"{m[1]}{m[2]}\cdot 10^{{-{len(m[2])}}}\cdot "),  # 6.7\times 10^{-34}, exactly
        (r"([A-Za-z]|[0-9]+)!\^", r"(\1!)^"),  # n!^2 is nothing the parser knows
        (r"\([^()]*\)", lambda m: _both_signs(m[0])),  # (0,\pm2)
        (r"\\\\ ?\[[0-9.]+ ?[a-z]{2}\]", r"\\\\ "),  # \\[4pt] between the rows of a matrix
        (r"\\varnothing\b", r"\\emptyset "),
        (r"\\(?:display|text|script)style\b|\\(?:text)?color\{\w+\}", ""),  # looks
        (r"\\langle\b", "("), (r"\\rangle\b", ")"),
    ]
]  # fmt: skip


def compare(answer: str, gold: str) -> str:
    """Whether `answer` is `gold`, both LaTeX without a box around them, as a reason."""
    if ":" in gold and ":" in answer and "=" not in gold:
        return "correct" if _words(answer) == _words(gold) else "wrong"
    if re.search(UPRIGHT, gold) and _words(answer) == _words(gold):
        return "correct"
    answer, gold = _tidy(answer), _tidy(gold)
    if " base " not in answer:
        gold = re.sub(r"\\text\{(\w+) base [0-9]+\}", r"\1", gold)  # the question named it: 52 is right for 52_8
    if answer == gold:
        return "correct"
    texts = [(gold, answer)]
    if ("%" in answer) != ("%" in gold):  # 10 is right for 10\\%
        texts.append((gold.replace("\\%", "").replace("%", ""), answer.replace("\\%", "").replace("%", "")))
    try:
        right = any(_same(_read(gold), _read(answer)) for gold, answer in texts)
    except Exception:  # the parser on what is no LaTeX it knows, sympy on what it cannot compute
        return "parse_error"
    return "correct" if right else "wrong"


def _words(text: str) -> str:
    """The text without marks for upright type, spaces, stops and capitals: 4:30 \\text{ PM} is \\text{4:30 p.m.}."""
    text = re.sub(UPRIGHT + r"([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<![0-9])\s+|\s+(?![0-9])|\.(?![0-9])|\$", "", text)  # 1 23 is not 12 3, nor 1.5 15
    return re.sub(r"^\((\w)\)$", r"\1", text).casefold()


def _tidy(text: str) -> str:
    """The text in the spellings the parser knows, without a final full stop."""
    text = text.translate(UNICODE).strip().rstrip(".")
    for pattern, new in SPELLINGS:
        text = pattern.sub(new, text)
    return text.strip().rstrip(".")


def _both_signs(group: str) -> str:
    """(0,\\pm2) as (0,+2),(0,-2); a group without a comma, or with two signs, which may go together, as it is."""
    if group.count(r"\pm") != 1 or "," not in group:
        return group
    return group.replace(r"\pm", "+") + "," + group.replace(r"\pm", "-")


def _read(text: str) -> Basic | MatrixBase:
    """The parser's reading. Of an equation that it cannot read as a whole, what follows the last `=`."""
    if re.fullmatch(r"[0-9.]+( [0-9.]+)+", text):
        raise ValueError(f"{text} is not one answer")  # the parser would add or multiply these
    try:
        is_real = not should_treat_as_complex(text)
        expr = latex2sympy(text, is_real=is_real, normalization_config=CLEANING, conversion_config=MEANING)
    except Exception:
        value = re.fullmatch(r"[^,;<>]*[^\\<>!,;]=([^=,;<>]+)", text)
        if value is None:
            raise
        return _read(value[1])
    if re.search(r"\bor\b", text) and isinstance(expr, FiniteSet) and not any(isinstance(e, (Expr, Eq)) for e in expr):
        expr = _union(expr)
    unit = {symbol: I for symbol in expr.free_symbols if symbol.name == "i"}
    return expr.xreplace(unit) if unit else expr


def _union(parts: FiniteSet) -> Basic:
    """x<2 or x>3 as a set of numbers; anything else than such conditions as it is."""
    try:
        return Union(*[part.as_set() for part in parts])
    except Exception:
        return parts


def _same(gold: Basic | MatrixBase, answer: Basic | MatrixBase) -> bool:
    """math-verify's verdict, except for what it lets pass: 6=5 as 5; 2 as 2,2; and equations without a solution."""
    repeats = isinstance(gold, FiniteSet) and len(gold._unsorted_args) > len(gold)
    if (repeats and len(gold._unsorted_args) != len(getattr(answer, "_unsorted_args", ()))) or not _holds(answer):
        return False
    # 12 places for decimals. For constants 300: differences below are 0 to it, and 2^{-99} would be 2^{-100}.
    # Not with decimals inside, as in 10^{0.01}, which have no such digits; nor with sums, which would take a minute.
    digits = 15 if gold.has(Float, ExprWithLimits) or answer.has(Float, ExprWithLimits) else 300
    if not verify(gold, answer, 12, digits, allow_set_relation_comp=True, timeout_seconds=None):
        return False
    if isinstance(gold, Eq) and isinstance(answer, Eq) and all(isinstance(e, Expr) for e in gold.args + answer.args):
        left, right = gold.lhs - gold.rhs, answer.lhs - answer.rhs
        return simplify(left - right) == 0 or simplify(left + right) == 0 or bool(solve(gold))
    return True


def _holds(expr: Basic | MatrixBase) -> bool:
    """Whether the equations between plain numbers in it are true, as in x=2+3=5."""
    equations = [e for e in expr.atoms(Eq) if all(getattr(side, "is_number", False) for side in e.args)]
    return all(verify(*e.args, float_rounding=12, timeout_seconds=None) for e in equations)
