r"""Are two math answers the same? LaTeX in, a reason out, on math-verify and its parser.

    compare(answer, gold) -> "correct", "wrong" or "parse_error"

Both texts are brought into one spelling: first TeX itself, its commands, arguments and groups
(`_group`), then what people write with it (`SPELLINGS`). What is more than one expression is taken
apart here (`_equal`): options, dates, named values, quantities, approximations, conditions. The
rest goes through latex2sympy, math-verify's own parser, and math-verify's `verify` decides, except
for what it accepts too easily (`_same`).

  - A unit may be missing on either side, and its power too: 5 cm is right for 5 and for 5 cm^2. Two
    known units must be the same: 5 cm is wrong for 5 m. A percent sign may be missing on one side.
  - Words are compared as words, without capitals, spaces and full stops. So are texts with a colon
    on both sides: half past four is not the ratio 4:30.
  - Decimals are equal if they agree to 12 places. No other number is equal to a rounded one.

Nothing in an answer is run as code: sympy's `sympify` sees only what the parser's grammar accepts
as a number. Time and memory are not limited here, although a tower of powers or 3,000 open brackets
take long: `rewards.py` calls this in processes that it can kill. Importing this file takes most of
a second.
"""

import contextlib
import itertools
import logging
import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache

from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from math_verify import verify
from sympy import (
    Basic, Eq, Expr, Float, I, Intersection, MatrixBase, Pow, Set, Symbol, Union, S,
    expand_power_base, real_root, simplify, solve,
)  # fmt: skip
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that there is no time limit

# units: the parser's own rule drops the m of 6m as metres, and everything between the first \text
# and the last, so that "5\text{ or }6\text{ cm}" would be 5. boxed: the parser would read a box in
# the box instead of the box.
CLEANING = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
MEANING = ConversionConfig(lowercase_symbols=False)  # otherwise R - r is 0

# ---- TeX: commands, arguments and groups ---------------------------------------------------------

UNICODE = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "°": r"^\circ ",
     "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "…": r"\ldots ",
     "≈": r"\approx ", "≡": r"\equiv ", "′": "'", "½": r"\frac12", "¼": r"\frac14",
     "¾": r"\frac34", "⅓": r"\frac13", "⅔": r"\frac23", "⁄": "/", "∈": r"\in ", "μ": r"\mu ",
     "µ": r"\mu ", "Ω": r"\Omega ", "√": r"\sqrt "}
) | str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻₀₁₂₃₄₅₆₇₈₉", "0123456789-0123456789")  # fmt: skip
TOKEN = re.compile(r"\\!\s*|\\[,;:> ]|\\[A-Za-z]+\*?|\\.|[~\s]+|.", re.S)
# Commands that change nothing but the appearance, and those that make their argument upright.
APPEARANCE = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lrm]?|(?:display|text|script)style|(?:no)?limits|!\s*|"
    r"[lL]arge|LARGE|[hH]uge|small|footnotesize|tiny|normalsize|boldmath|[()\[\]])"
)
UPRIGHT = re.compile(
    r"\\(?:text(?:bf|it|rm|tt|sf|normal|md|up)?|math(?:rm|bf|it|sf|tt|normal)|boldsymbol|bm|[mh]box|"
    r"emph|underline|operatorname\*?)"
)
UPRIGHT_TO_THE_END = re.compile(r"\\(?:rm|bf|it|sf|tt|(?:rm|bf|it)(?:family|series|shape))")
# Other names of commands.
NAMES = {
    **dict.fromkeys([r"\dfrac", r"\tfrac", r"\cfrac"], r"\frac"),
    **dict.fromkeys([r"\le", r"\leqslant"], r"\leq"), r"\lt": "<",
    **dict.fromkeys([r"\ge", r"\geqslant"], r"\geq"), r"\gt": ">",
    r"\ne": r"\neq", r"\thickapprox": r"\approx", r"\varnothing": r"\emptyset", r"\%": "%",
    r"\lbrace": r"\{", r"\rbrace": r"\}", r"\langle": "(", r"\rangle": ")", r"\qquad": r"\quad",
    r"\degree": r"^{\circ}", **dict.fromkeys([r"\lor", r"\vee"], " or "), **dict.fromkeys([r"\land", r"\wedge", r"\&"], " and "),
    r"\lg": r"\log_{10}", r"\vert": "|", r"\mid": "|", r"\colon": ":",
    r"\prime": "'", "\\": "", "\\\\": ", ",
}  # fmt: skip
ARGUMENTS = {r"\frac": 2, r"\binom": 2} | dict.fromkeys(r"\sqrt \pmod \boxed \fbox ^ _".split(), 1)
ACCENTS = (
    r"\overline \bar \dot \hat \vec \tilde \widehat \overrightarrow \mathbb \mathcal".split()
)
FRACTIONS = {r"\over": r"\frac", r"\choose": r"\binom"}  # between their arguments
FUNCTION = (
    r"(?:arc|ar)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|gcd|lcm|max|min|det"  # in upright type
)
MATRIX = re.compile(r"(?:[pbB]|small)?matrix|array")
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
NUMBERS = ONES + [
    f"{ten}-{one}".removesuffix("-zero") for ten, one in itertools.product(TENS, ONES[:10])
]


def _group(tokens: list[str]) -> str:
    """The tokens, last first, up to the brace that closes their group, in one spelling.

    These tokens are removed.
    """
    items = []
    while tokens:
        token = tokens.pop()
        if token == "}":
            break
        if token in FRACTIONS:
            return f"{FRACTIONS[token]}{{{''.join(items)}}}{{{_group(tokens)}}}"
        items.append(_item(token, tokens))
    return "".join(items)


def _item(token: str, tokens: list[str]) -> str:
    """A token with its arguments, which are removed from `tokens`, in one spelling."""
    token = NAMES.get(token, token)
    if token == "{":
        inside = _group(tokens)
        return f"{{{inside}}}" if re.search("[-+]", inside) else inside
    if token in (r"\color", r"\textcolor"):
        _argument(tokens)
        return ""
    if token == r"\begin":
        return _environment(tokens)
    if token == r"\not":
        relation = _argument(tokens).strip()
        return {"=": r"\neq ", r"\in": r"\notin "}.get(relation, rf"\not {relation}")
    if UPRIGHT.fullmatch(token):
        return _upright(_argument(tokens))
    if UPRIGHT_TO_THE_END.fullmatch(token):
        inside = _group(tokens)
        tokens.append("}")  # it closes the group that this command stands in, too
        return _upright(inside)
    if APPEARANCE.fullmatch(token):
        return ""
    if re.fullmatch(r"\\[,;:> ]|[~\s]+", token):
        return " "
    root = ""
    if token == r"\sqrt" and tokens and tokens[-1] == "[":
        while not root.endswith("]"):
            root += tokens.pop()
    count = ARGUMENTS.get(token, token in ACCENTS)
    arguments = [
        _argument(tokens, digits=place == count and token not in ACCENTS)
        for place in range(1, count + 1)
    ]
    return token + root + "".join(f"{{{argument.strip()}}}" for argument in arguments) + " " * (
        token[:1] == "\\" and token[-1].isalpha() and not arguments
    )


def _argument(tokens: list[str], digits: bool = False) -> str:
    """The next group or item without its braces; a whole number, if it may have several `digits`."""
    while tokens and tokens[-1].isspace():
        tokens.pop()
    if not tokens:
        return ""
    token = tokens.pop()
    if token == "{":
        return _group(tokens)
    if token in "+-":
        return token + _argument(tokens, digits)
    while digits and token.isdigit() and tokens and tokens[-1].isdigit():
        token += tokens.pop()
    return _item(token, tokens)


def _environment(tokens: list[str]) -> str:
    r"""What follows \begin, up to its \end. All matrices without a determinant are pmatrix."""
    name = _argument(tokens)
    if name == "array":
        _argument(tokens)  # its columns
    if MATRIX.fullmatch(name):
        name = "pmatrix"
    body = ""
    while tokens:
        token = tokens.pop()
        if token == r"\end":
            _argument(tokens)
            break
        body += token if token == r"\\" else _item(token, tokens)
    body = re.sub(r"\\\\ ?\[[0-9.]+ ?[a-z]{2}\]", r"\\\\", body)  # \\[4pt] between rows
    return rf"\begin{{{name}}}{body}\end{{{name}}}"


def _upright(text: str) -> str:
    r"""Upright text as \text{...}, or as math if that is what it holds."""
    text = text.strip()
    number = text.lower().replace(" ", "-")
    if number in NUMBERS:
        return str(NUMBERS.index(number))
    if re.fullmatch("[eid]", text):
        return text
    if re.search(r"[0-9()=\\^_{]|^[A-Z](?:(?:,| and| or)+ ?[A-Z])+$", text):
        return f" {text} "
    return rf"\text{{{text}}}"


# ---- what people write with it -------------------------------------------------------------------

# What a word after a number multiplies it by.
FACTORS = {
    "ten": "10^{1}", "hundred": "10^{2}", "thousand": "10^{3}", "million": "10^{6}",
    "billion": "10^{9}", "trillion": "10^{12}", "dozen": "12", "half|halve": "2^{-1}",
    "third": "3^{-1}", "fourth": "4^{-1}", "fifth": "5^{-1}", "sixth": "6^{-1}",
    "seventh": "7^{-1}", "eighth": "8^{-1}", "ninth": "9^{-1}", "pi": r"\\pi ",
}  # fmt: skip
# Words that are no unit: a hedge, a number, an operation; a time of day.
HEDGE = (
    r"(?:perhaps|maybe|possibly|probably|either|plus|minus|times(?= *\w)|factorial|least|most|"
    r"twice|thrice|doubled|tripled|halved|quadrillions?|lakhs?|crores?|(?:ten|hundred)-[a-z]+ths?|"
    r"twelfths?|[a-z]+(?:teen|tie)ths?|below|[KkMB] [a-z]{3,}|"
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty)(?!-))"
)
NO_UNIT = rf"(?:and|or|not|but|for|at|if|when|where|with|[ap]\.?m|{HEDGE})"
# Other names of units, which a prefix may precede: kilometers, km.
UNITS = dict(
    pair.split("=")
    for pair in (
        "meter=m metre=m gram=g liter=L litre=L l=L second=s sec=s minute=min hour=h hr=h day=d "
        "inch=in inche=in foot=ft feet=ft yard=yd mile=mi pound=lb ounce=oz newton=N joule=J "
        "watt=W volt=V ampere=A amp=A pascal=Pa hertz=Hz ohm=Ω mole=mol dollar=USD euro=EUR "
        "celsius=C fahrenheit=F kilo=k centi=c milli=m"
    ).split()
)
SYMBOL = (
    r"(?:[kcdmμnMG]?(?:m|g|s|L|l|N|J|W|V|A|Pa|Hz|Ω|mol|cal|eV)|"
    r"h|hr|min|sec|d|ft|in|yd|mi|lbs?|oz|mph|K|C|F|USD|EUR|GBP)"
)
UNIT_TEXT = rf"\\text\{{(?!(?:squared|cubed|[eix-z]\b)|[^{{}}]*\b{NO_UNIT}\b)[A-Za-z .,/-]+\}}"
# A plain unit needs a space before it, if it has one letter or is no unit that is known here.
UNIT_PLAIN = (
    r"(?:(?<=[0-9/({])(?:[kcm]m|kg|mg|m[lL]|ft|lbs?|oz|min|mph)|"
    rf"(?:(?<=[0-9}})] )|(?<= \()|(?<=[/{{])|(?<=t )|(?<=[mgsNJWVAh}}] )){SYMBOL}|"
    rf"(?:(?<=[0-9a-z}})] )|(?<= \())(?!{NO_UNIT}\b)[a-z]{{4,}})(?![A-Za-z'])"
)
UNIT_ITEM = (
    rf"(?:{UNIT_TEXT}|{UNIT_PLAIN}|\\mu ?|\\Omega|\^\{{\\circ\}}(?: ?[CF](?![a-z]))?)"
    r"(?:\^\{-?[0-9]\})?"
)
UNIT = re.compile(rf" ?(?:\(|\\frac\{{)?{UNIT_ITEM}(?:[ /(){{}}]|\\cdot ?|{UNIT_ITEM})*")
# What the parser would add or multiply, take for one number, or leave out: 5 6, [5,5],
# 5 \text{perhaps six}, \not=5, and two statements, of which it would take the last.
NO_ANSWER = (
    r"\\not(?![a-z])|^[0-9.]+( [0-9.]+)+$|^\[([^,\[\]]+), ?\2\]$|!!|"
    rf"[0-9}}] ?(?:\\text\{{)?(?:squared|cubed)\b|(?<![\\A-Za-z]){HEDGE}\b|"
    r"(?<!_\{[a-z])\\(?:to|implies|therefore|because|(?:[lL]ong)?[rR]ightarrow|iff)(?![a-z])|"
    r"=[^,=]*(?:(?<!_\{)\\text|:|\|[^|=]*(?==))[^,]*=|"
    r"\\text\{[^{}]*\b(?:not|false|wrong|incorrect|never)\b.*="
)
# What stands behind a value and says where it holds.
CONDITION = re.compile(
    r"(.+?)(?:[, ]*(?:\\text\{,? ?(?:for|where|when|if|at|with) ?\b([^{}]*)\}|"
    r"\b(?:for|where|when|if|at) )|, ?(?=[a-z]\\in\\mathbb))((?:(?!\b(?:and|or|if|for|when)\b)[^,;])*)"
)
TUPLE = r"\([^()]*,[^()]*\)"
SET = r"(?:[a-zA-Z]\\in)?\\\{(?!.*[:|]).*\\\}|.* or .*"
NAME = r"(?:\\[a-z]+ ?)?(?:[A-Za-z]{1,2}|\\text\{[^{}]*\})?'*(?:_\{[^{}]*\})?(?:\([^()=]*\))?"
# The i of 2i, or what has complex values: no real z is equal to it.
COMPLEX = r"(?<![\\A-Za-z_])i(?![A-Za-z])|\\(?:imath|arg|Re|Im|mathbb\{C\})(?![a-z])"
# Symbols with another meaning: `verify` takes a symbol called E for the number e.
LETTERS = {"i": I, "E": Symbol("energy", real=True)}
PERCENT = r"((?:[0-9]+ ?)?\\(?:frac\{[^{}]+\}|sqrt)\{[^{}]+\}|\([^()]*\)) ?%"
DECIMAL = r"([0-9]*)\.([0-9]+)"
LABEL = r"(?i:(?:the )?(?:final |correct )?(?:answer|ans\.?)(?: is)?)(?![a-z]) ?:?"


def _both_signs(match: re.Match) -> str:
    r"""(0,\pm2) as (0,+2),(0,-2).

    Part of a group, or a text with two signs that may go together, stays as it is.
    """
    text = match[0]
    parts = re.split(r"\\pm(?![a-z])", text)
    if len(parts) != 2 or not _is_balanced(text):
        return text
    return "+".join(parts) + "," + "-".join(parts)


def _exactly(match: re.Match) -> str:
    """A decimal as a fraction."""
    return match.expand(r"\\frac{\1\2}{1") + "0" * len(match[2]) + "}"


def _is_balanced(text: str) -> bool:
    return text.count("{") == text.count("}") and text.count("(") == text.count(")")


SPELLINGS: list[tuple[str, str | Callable[[re.Match], str]]] = [
    (r" ?([-+*/=<>^_&|]) ?| (?=[)}\]]|\\(?!text|quad|mu|Omega)[a-z])|(?<=[({\[]) ", r"\1"),  # spaces that mean nothing
    (r"(\\[A-Za-z]+) (?![A-Za-z])", r"\1"),
    (r"^\*\*(.*)\*\*$", r"\1"),
    (r"\^\{\^\{\\circ\}\}", r"^{\\circ}"),
    (r" ?\(?\\begin\{pmatrix\}", r"\\begin{pmatrix}"), (r"(?<=\\end\{pmatrix\})[)\]]", ""),
    (rf"^(?:\\text\{{{LABEL}\}}|{LABEL}) ?", ""),
    # joined items, statements and conditions
    (r"(?<=[\w})\]])( ?\\quad) ?(?=[-\w(]|\\(?!text|pmod))| ?\\quad ?",
     lambda m: ", " if m[1] else " "),
    (r",? ?\\text\{,? ?(and|or),?\},? ?|,? ?\b(and|or),? ", r" \1\2 "),
    (r"(?<=[a-z]),? (and|or)\} ?", r"} \1 "),
    (r"(?<=[0-9}]) (?=[a-z]=)", ", "),
    (r"^\\\{([a-z])(?:\\in\\mathbb\{R\})? ?[:|] ?"
     r"((?=.*\1)(?!.*=).*(?:[<>]|\\[lgn]eq).*)\\\}$", r"\2"),  # \{x\mid x>3\}
    (r"^([a-z])=[^,=]+(?:(?:,| and) ?\1=[^,=]+)+$", r"\\{\g<0>\\}"),  # x=3, x=4 is no (3,4)
    (rf"\\text\{{({FUNCTION})\}}(?=[ (0-9A-Za-z\\])|(?<![\\A-Za-z{{])({FUNCTION})(?=[ (0-9\\])",
     r"\\\1\2 "),
    (r"(\\(?:max|min|gcd|lcm)) ?\\\{([^{}]*)\\\}", r"\1(\2)"),
    (r"^(?i:negative) ?|^\\text\{(?i:negative)\} ?", "-"),
    # currency, and dollar signs around math
    (r"(?:\\text\{)?\b(?:US|USD|EUR|GBP|INR|CAD|AUD|Rs)\b\.?\}? ?(?=\\?\$|[0-9])|\\?\$|[£€¥¢₹]"
     r"|\\text\{[£€¥¢₹]\}", ""),
    # numbers
    (r"(?<![\w.])([0-9]*\.[0-9]+)[eE]\+?(-?[0-9]+)(?![\w.])", r"\1\\cdot10^{\2}"),  # 1.5e3
    (r"(^|[=;]|, | and | or )([-+]?[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?![0-9]|,[0-9])",
     lambda m: m[1] + m[2].replace(",", "")),
    (r"(^|=)([-+]?[1-9][0-9]{0,2}(?: [0-9]{3})+)(?![0-9]| ?[,;])",
     lambda m: m[1] + m[2].replace(" ", "")),
    (r"^(-?[0-9]+) ([0-9]+)/([0-9]+)\b", r"\1\\frac{\2}{\3}"),  # 7 3/4 is 7 + 3/4
    (r"(?<![0-9])([0-9]{0,30})\.([0-9]{0,30})\\(?:overline|bar|dot)\{([0-9]{1,30})\}(?![0-9])",
     lambda m: m.expand(r"\\frac{0\1\2\3-0\1\2}{") + "9" * len(m[3]) + "0" * len(m[2]) + "}"),
    *[(rf"(?<=[0-9}}]) *(\\text\{{)? *(?:{word})s?(?=(?:ths?)?\b)(?!-)", rf"\\cdot {factor}\1")
      for word, factor in FACTORS.items()],  # 3\text{million}
    (r"(?<=\\cdot 10\^\{)([0-9]+\}(?:\\text\{)?)ths?\b", r"-\1"),  # 3\text{hundredths}
    (r"\\text\{ ?\}", ""),
    (r"([0-9])(?: |\^\{| ?\\text\{)*(?:st|nd|rd|th)\}*$", r"\1"),  # 5^{\text{th}}
    (r"(\^\{[^{}]*?)" + DECIMAL, lambda m: m[1] + _exactly(re.match(DECIMAL, m[0][len(m[1]):]))),
    (DECIMAL + r"(?=\\(?:times|cdot) ?10\^)", _exactly),  # 6.7\times10^{-34}
    # 52_8 is not 52_9
    (r"(?<![\w.^])(\()?([0-9][0-9A-F]*)(?(1)\))_\{([0-9]+)\}(?![\w!])", r"\\text{\2 base \3}"),
    (r"([A-Za-z]|[0-9]+)!\^", r"(\1!)^"),  # the parser does not know n!^2
    (r"(\\(?:sin|cos|tan|cot|sec|csc) ?)([0-9.]+)\^\{\\circ\}", r"\1(\2\\pi/180)"),
    (r"\((\\?[^()]*?\\approx[^()]*)\)", r"\1"),  # \frac13 (\approx .33)
    (r"^=", ""),
    # congruences
    (r" ?\(?(?:\\(?:pmod|[bp]?mod)|\\text\{mod\}|\bmod\b) ?\{?([^{} ()]+)\}?\)?$", r"\\pmod{\1}"),
    (r"^(?:[a-z]\\equiv)?(?=-?[0-9]+\\pmod)", r"\\equiv"),  # 3 (mod 7) is right for x = 3
    # f'(x), f^\prime(x) and f^{\prime}(x) are f_{prime}(x), which is not f(x)
    (r"\^\{('+)\}", r"\1"), (r"(?<=[A-Za-z])('+)", r"_{\1}"), (r"(?<=[{'])'", "prime"),
    (r"'", r"^{\\prime}"),
    (r",? ?(?:\\[lcd]?dots[bcmio]?|\.\.\.),?", r",\\text{dots},"),  # 1,...,5 is not 1,5
    (TUPLE, _both_signs),  # (0,\pm2)
    (r"[^,]+", _both_signs),  # \frac{1\pm\sqrt5}{2}, which the parser does not know
    (r"^((?:\\[a-z]+|[^A-Za-z=,<>\\])+)=([A-Za-z](?:\([^()]*\))?)$", r"\2=\1"),  # 5 = x
    (rf"(^|\()((?i:{'|'.join(NUMBERS)}))(?=\)?$)",
     lambda m: m[1] + str(NUMBERS.index(m[2].lower()))),
    (r"^(.+) \(\1\)$", r"\1"),  # 12 (twelve)
]  # fmt: skip
DATES = "%Y-%m-%d %d%B%Y %d%b%Y %B%d%Y %b%d%Y %H:%M %I:%M%p".split()
DATE = re.compile(
    "[0-9]{4}-[0-9]|[0-9]{1,2}:[0-9]{2}|[0-9]*(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)"
)


@lru_cache(maxsize=4096)  # a group of rollouts has few different answers
def compare(answer: str, gold: str) -> str:
    """Return "correct" if `answer` equals `gold`, otherwise "wrong" or "parse_error".

    Both are LaTeX without a box around them.
    """
    if answer.replace(", ", ",") == gold.replace(", ", ","):  # 100,200 may be a list
        return "correct"
    try:
        return "correct" if _equal(_normalise(answer), _normalise(gold)) else "wrong"
    except Exception:  # of any class: the parser and sympy raise what they like
        return "parse_error"


@lru_cache(maxsize=4096)  # all answers of a group are compared with one gold answer
def _normalise(text: str) -> str:
    """The text in the spellings that the parser knows, without a final full stop."""
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", r"^{\g<0>}", text)  # x²
    text = re.sub("[₀-₉]+", r"_{\g<0>}", text)
    text = re.sub(r"√ ?(\([^()]*\)|[0-9.]+)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<=[0-9])(?:,\\!|\{,\})\s*(?=[0-9]{3})", "", text)  # 1,\!000 and 1{,}000
    tokens = TOKEN.findall(text.translate(UNICODE).strip().rstrip("."))[::-1]
    text = re.sub(" +", " ", _group(tokens)).strip()
    if tokens:
        raise ValueError("a brace closes no group")
    while text.startswith("{") and text.endswith("}") and _is_balanced(text[1:-1]):
        text = text[1:-1]
    for pattern, replacement in SPELLINGS:
        text = re.sub(pattern, replacement, text)
    return text.strip().rstrip(".")


def _words(text: str) -> str:
    r"""The text without upright commands, spaces, full stops, commas after words and capitals.

    For example, 4:30 \text{PM} and \text{4:30 p.m.} become equal.
    """
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    # 1 23 is not 12 3, nor 1.5 15.
    text = re.sub(r"(?<![0-9])\s+|\s+(?![0-9])|\.(?![0-9])|,(?![0-9])", "", text)
    return re.sub(r"^\((\w)\)$", r"\1", text).casefold()


def _is_words(text: str) -> bool:
    """Whether a text is nothing but words."""
    return bool(re.fullmatch(r"(?:\\text\{[A-Za-z .,'-]+\}|[A-Za-z]{3,}|no| )+", text))


def _moment(text: str) -> datetime | None:
    """The date or the time of day that a text is."""
    words = re.sub(r"(?<=[0-9])(?:st|nd|rd|th)|[, ]", "", _words(text))
    if DATE.match(words):
        for form in DATES:
            with contextlib.suppress(ValueError):
                return datetime.strptime(words, form)
    return None


def _choice(text: str) -> str | None:
    """The letter of an option, with or without its text."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    match = re.fullmatch(
        r"(?i:option|choice|answer)? ?\(?([A-J])\)?(?:[).:] ?(?!.*\b(?:[A-J]|or|not|but)\b).+|"
        r"(?<=\)) ?(?!.*\b(?:[A-J]|or|not|but)\b).*)?",
        text,
    )
    return match and match[1]


def _named(text: str) -> dict[str, str]:
    """Several named values, x=3, y=4 or (x,y)=(3,4); empty for other texts.

    They stand in the order of the names, if that is the alphabet's of a, b, c or x, y, z.
    """
    vector = re.fullmatch(r"\(([^()]*)\)=\(([^()]*)\)", text)
    if vector:
        names = re.split(", ?", vector[1])
        values = re.split(", ?", vector[2])
    else:
        items = [re.fullmatch(rf"({NAME})=([^=<>]+)", item) for item in re.split(",? and |, ?", text)]
        if not all(items):
            return {}
        names = [item[1] for item in items]
        values = [item[2] for item in items]
    if len(names) != len(values) or len(set(names)) < max(2, len(names)):
        return {}
    pairs = list(zip(names, values))
    if not vector and all(re.fullmatch("[a-cx-z]", name) for name in names):
        pairs.sort()
    return dict(pairs)


def _quantities(text: str) -> list[tuple[list[str], str]]:
    """The units, in one spelling, and the number of each quantity, or ([], text) for other texts."""
    pieces = UNIT.split(text)
    numbers = [re.sub("^ ?(?:,|and )? ?", "", piece) for piece in pieces]
    found = []
    for number, unit in zip(numbers, UNIT.findall(text)):
        is_number = not re.search(r"(?<![\\A-Za-z])[A-Za-z]", number.rpartition("=")[2])
        if (
            not number
            or not _is_balanced(number)
            or re.search(r"(?:[-+*/^_=(,]|\\times|\\cdot)$", number)
            or not (is_number or r"\text" in unit)
        ):
            return [([], text)]
        found.append((_units(unit), number.strip()))
    return [([], text)] if numbers[-1] or not found else found


def _units(text: str) -> list[str]:
    """The words of a unit in one spelling, without powers and degrees."""
    text = text.replace(r"\mu", "μ").replace(r"\Omega", "Ω").replace(r"\text", "")
    words = []
    for word in re.findall("[A-Za-zμΩ]+", re.sub(r"\\[a-z]+|μ[{ ]*(?=[A-Za-z])", lambda m: "μ" * (m[0][0] == "μ"), text)):
        if not re.fullmatch("(?i:per|square|cubic|sq|cu|squared|cubed|degrees?|units?)", word):
            prefix, name = re.fullmatch("((?i:kilo|centi|milli)?)(.*?)", word).groups()
            name = UNITS.get(name) or UNITS.get(name.lower().removesuffix("s"), name)
            words.append(UNITS.get(prefix.lower(), "") + name)
    return sorted(words)


def _equal(answer: str, gold: str) -> bool:
    """Whether two texts in one spelling are the same answer."""
    answer_words = _words(answer)
    gold_words = _words(gold)
    if (answer_words == gold_words and ("text" in gold or _is_words(gold))) or re.sub(
        r"(?<![0-9]) | (?![0-9])", "", answer
    ) == re.sub(r"(?<![0-9]) | (?![0-9])", "", gold):
        return True
    if _is_words(gold) and _is_words(answer):
        return False
    gold_moment = _moment(gold)
    if gold_moment and (gold_moment.year > 1900 or _moment(answer)):
        return gold_moment == _moment(answer)
    if ":" in gold and ":" in answer and not ("=" in gold and "=" in answer):
        return _words(answer.rpartition("=")[2]) == _words(gold.rpartition("=")[2])
    letter = _choice(gold)
    if letter and _choice(answer):
        return letter == _choice(answer)
    answer_values = _named(answer)
    gold_values = _named(gold)
    if answer_values and gold_values:
        return answer_values.keys() == gold_values.keys() and all(
            _equal(answer_values[name], gold_values[name]) for name in gold_values
        )
    if gold_values:
        gold = f"({','.join(gold_values.values())})"
    elif answer_values and gold.startswith("("):
        answer = f"({','.join(answer_values.values())})"
    return _equal_values(answer, gold)


def _equal_values(answer: str, gold: str) -> bool:
    """Whether two values are equal, without their conditions and approximations."""
    answer, answer_condition = _without_condition(answer)
    gold, gold_condition = _without_condition(gold)
    if answer_condition and gold_condition and answer_condition != gold_condition:
        return False
    exact, rounded = _without_approximation(answer)
    gold, _ = _without_approximation(gold)
    return _equal_expressions(exact, gold) or ("." in gold and _equal_expressions(rounded, gold))


def _without_condition(text: str) -> tuple[str, str]:
    """A value, and the condition behind it or an empty text."""
    match = CONDITION.fullmatch(text)
    if match is None:
        return text, ""
    return match[1], re.sub(" ", "", (match[2] or "") + match[3])


def _without_approximation(text: str) -> tuple[str, str]:
    """A value and its approximation, twice the same text without one.

    Raises ValueError for an approximation that is off by a unit in its last place.
    """
    exact, sign, rounded = text.partition(r"\approx")
    if not sign:
        return text, text
    if re.fullmatch(NAME, exact):
        return rounded, rounded
    unit = 10.0 ** -len(rounded.rstrip("%").partition(".")[2]) / (100 if "%" in rounded else 1)
    error = _read(exact.rpartition("=")[2]).doit() - _read(rounded).doit()
    if not abs(error.evalf()) < unit:
        raise ValueError(f"{text} is not one answer")
    return exact, rounded


def _equal_expressions(answer: str, gold: str) -> bool:
    """Whether two expressions, perhaps with units, are equal."""
    answers = sorted(_quantities(answer))
    golds = sorted(_quantities(gold))
    if len(answers) > 1 or len(golds) > 1:
        return [unit for unit, _ in answers] == [unit for unit, _ in golds] and all(
            _equal_expressions(mine[1], theirs[1])
            for mine, theirs in zip(answers, golds, strict=True)
        )
    answer_unit, answer = answers[0]
    gold_unit, gold = golds[0]
    known = all(re.fullmatch(SYMBOL, unit) for unit in answer_unit + gold_unit)
    if answer_unit and gold_unit and known and answer_unit != gold_unit:
        return False
    if answer.startswith("(") or gold.startswith("("):  # a column as a tuple, and a point's name
        answer = _as_tuple(answer)
        gold = _as_tuple(gold)
    if " base " not in answer:
        # The question named the base: 52 is right for 52_8.
        gold = re.sub(r"\\text\{(\w+) base [0-9]+\}", r"\1", gold)
    if answer == gold:
        return True
    if re.fullmatch(f"{TUPLE};(?:{SET})|(?:{SET});{TUPLE}", f"{answer};{gold}"):
        return False
    right = _same(_read(gold), _read(answer))
    if not right and ("%" in answer) != ("%" in gold):  # 10 is right for 10\%
        right = _same(_read(gold.replace("%", "")), _read(answer.replace("%", "")))
    return right


def _as_tuple(text: str) -> str:
    """A column vector as a tuple, and a point without its name; other texts as they are."""
    column = re.fullmatch(r"\\begin\{pmatrix\}([^&]*)\\end\{pmatrix\}", text)
    if column:
        return "(" + column[1].strip("\\").replace(r"\\", ",") + ")"
    return re.sub(rf"^[A-Z](?={TUPLE}$)", "", text)


@lru_cache(maxsize=4096)  # all answers of a group are compared with one gold answer
def _read(text: str) -> Basic | MatrixBase:
    """The parser's reading of a text.

    If it cannot read an equation as a whole, it reads the side after the `=`. Raises ValueError for
    what is not one answer, and what the parser raises.
    """
    if re.search(NO_ANSWER, text):
        raise ValueError(f"{text} is not one answer")
    text = re.sub(PERCENT, r"\\frac{\1}{100}", text)
    is_real = not re.search(COMPLEX, text)
    try:
        expr = latex2sympy(
            text, is_real=is_real, normalization_config=CLEANING, conversion_config=MEANING
        )
    except Exception:  # of any class, see `compare`, which gets it unless this is an equation
        value = re.fullmatch(r"(?:[^,;<>=()]|\([^()]*\))+=([^=,;<>]+)", text)
        if value is None:
            raise
        return _read(value[1])
    if isinstance(expr, FiniteSet) and re.search(" or | and ", text):
        expr = _joined(expr, Union if " or " in text else Intersection)
    if isinstance(expr, And):
        expr = _forwards(expr)
    letters = {e: LETTERS[e.name] for e in expr.free_symbols if e.name in LETTERS}
    expr = expr.xreplace(letters)
    if is_real and r"\sqrt[" in text:
        expr = real_root(expr)  # otherwise \sqrt[3]{-8} is complex
    if not isinstance(expr, Expr) or not expr.free_symbols:
        return expr
    # `verify` compares a symbol with anything else by its name: \frac{2x}{2} would not be x.
    expr = expr.doit()
    return _divided_roots(expr) if r"\sqrt" in text else expr


def _divided_roots(expr: Expr) -> Expr:
    r"""The expression with \sqrt{1/n} as 1/\sqrt{n}, which differ in sign for no real value."""
    return expand_power_base(expr, force=True).replace(
        lambda e: e.is_Pow and e.base.is_Pow and e.base.exp == -1 and e.exp.is_Rational,
        lambda e: Pow(e.base.base, -e.exp),
    )


def _is_inequality(expr: Basic) -> bool:
    return isinstance(expr, Relational) and not isinstance(expr, Eq) and not expr.has(AppliedUndef)


def _joined(conditions: FiniteSet, join: Callable) -> Basic:
    """Conditions such as x<2 or x>3 as one set of numbers.

    What is no inequality, or has no such set, stays as it is.
    """
    if not all(map(_is_inequality, conditions)):
        return conditions
    with contextlib.suppress(Exception):  # of any class; `verify` then compares the conditions
        return join(*[condition.as_set() for condition in conditions])
    return conditions


def _forwards(chain: And) -> And:
    """The chain 5 > x > 0 as 0 < x < 5; other chains as they are."""
    if all(part.rel_op in (">", ">=") for part in chain._unsorted_args):
        return And(*[part.reversed for part in reversed(chain._unsorted_args)])
    return chain


def _solutions(condition: Basic) -> Basic:
    """Inequalities for one number as the set of its solutions; everything else as it is."""
    parts = getattr(condition, "_unsorted_args", [condition])
    if not all(map(_is_inequality, parts)):
        return condition
    parts = [part.doit() for part in parts]
    with contextlib.suppress(Exception):  # of any class, for several numbers
        return Intersection(
            *[S.Reals if part == True else S.EmptySet if part == False else part.as_set()  # noqa: E712
              for part in parts]
        )  # fmt: skip
    return condition


def _same(gold: Basic | MatrixBase, answer: Basic | MatrixBase) -> bool:
    """math-verify's verdict, except for what it accepts too easily.

    That is 6=5 for 5, 2 for 2,2, {1},{2} for 1,2, x>=x for the empty set, unsolvable equations.
    """
    items = answer._unsorted_args if isinstance(answer, FiniteSet) else [answer]
    if isinstance(gold, FiniteSet):
        gold_items = gold._unsorted_args
        if len(gold_items) > len(gold) and len(items) != len(gold_items):
            return False
        if isinstance(items[0], FiniteSet) != isinstance(gold_items[0], FiniteSet):
            return False
    elif isinstance(answer, FiniteSet) and len(items) > len(answer):
        return False
    if isinstance(gold, Set):
        answer = _solutions(answer)
    elif isinstance(answer, Set):
        gold = _solutions(gold)
    for equation in answer.atoms(Eq):  # x=2+3=5 has one between plain numbers
        is_numeric = not equation.has(Symbol, AppliedUndef)
        if is_numeric and not verify(equation.lhs, equation.rhs, 12, timeout_seconds=None):
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
