r"""Math answers in one spelling: TeX first, then what people write with it.

    respell(text)  -> the text in the spelling that the parser of `grading/answers.py` knows

Each rule is a pattern and what takes its place; the rules of a list run in order. `TEX` gives each
command one name and makes text upright, `_group` puts braces around arguments and nowhere else, and
`SPELLINGS` rewrites what the parser does not know, or reads as something else.
"""

import contextlib
import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from unicodedata import normalize

# ---- TeX -----------------------------------------------------------------------------------------

PLAIN = str.maketrans(
    "٠١٢٣٤٥٦٧٨٩۰۱۲۳۴۵۶۷۸۹०१२३४५६७८९০১২৩৪৫৬৭৮৯๐๑๒๓๔๕๖๗๘๙、。【】∶⩽≦⩾≧—‒−–′⁄",
    "01234567890123456789012345678901234567890123456789,.[]:≤≤≥≥----'/",
)
# NFKC of all characters would make 52 of 5², and 13 of ①③.
CHARACTERS = [
    # What is not seen (Unicode's Default_Ignorable_Code_Point: joiners, soft hyphens, marks of
    # direction, variation selectors), and marks at the end of a proof.
    ("[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
     "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff■□∎✓✔]", ""),
    ("[٠-٩۰-۹०-९০-৯๐-๙、。【】∶⩽≦⩾≧—‒−–′″⁄！-～﹐-﹫℃℉µ㎀-㏟\U0001d400-\U0001d7ff]",
     lambda m: normalize("NFKC", m[0]).translate(PLAIN)),
]  # fmt: skip
UNICODE = str.maketrans(
    {"×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "°": r"^\circ ",
     "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "∪": r"\cup ", "…": r"\ldots ", "∈": r"\in ",
     "≈": r"\approx ", "≡": r"\equiv ", "√": r"\sqrt ", "Ω": r"\Omega ",
     "μ": r"\mu ", "≠": r"\neq ", "±": r"\pm ", "€": r"\text{EUR}", "£": r"\text{pounds}",
     "₹": r"\text{INR}",
     "¢": r"\text{cents}"}
) | str.maketrans(
    "⁰¹²³⁴⁵⁶⁷⁸⁹⁻₀₁₂₃₄₅₆₇₈₉厘毫千米克升秒", "0123456789-0123456789cmkmgLs"
)  # fmt: skip
# Commands that mean the same; appearance means nothing.
NAMES = {
    r"left|right|middle|[bB]igg?[lrm]?|(?:display|text|(?:script)+)style|(?:no)?limits|[lL]arge|LARGE|"
    r"[hH]uge|small|tiny|(?:normal|footnote|script)size|(?:black)?square|Box|qed(?:symbol)?|"
    r"checkmark|(?:math)?strut|nonumber|notag|(?:allow|no)break|relax|protect|noindent": "",
    "(?:math|text)dollar": r"\\$", "pounds|textsterling": "£",
    "(?:[dtcsx]|nice|flat)frac": r"\\frac", "leq?(?:slant)?": r"\\leq ",
    "geq?(?:slant)?": r"\\geq ", "lt": "<", "gt": ">", "ne": r"\\neq ", "langle": "(",
    "rangle": ")", "lbrace": r"\\{", "rbrace": r"\\}",
    "degree": r"^\\circ ", "lg": r"\\log_{10}", "varnothing": r"\\emptyset ", "prime": "'",
    "lor|vee": r"\\text{or}", "land|wedge": r"\\text{and}", "mid|vert": "|", "colon": ":",
    "qquad": r"\\quad ", r"not\s?\\in": r"\\notin ", "thickapprox|simeq|doteq": r"\\approx ",
    "ast": "*",
}  # fmt: skip
UPRIGHT = (
    r"\\(?:text(?:[a-z]{2}|normal)?|math(?:[a-z]{2}|normal)(?<!bb)|boldsymbol|bm|[mh]box|emph|"
    r"underline|operatorname\*?|bf|rm|it|tt|sf)\s*(?=\{)"
)
SYMBOL = (
    r"(?:[kcdmμnMG]?(?:m|g|s|L|l|N|J|W|V|A|Pa|Hz|Ω|mol|cal|eV|Wh|Ah)|"
    r"[kKMGT]B|dB|rpm|h|hr|min|sec|d|ft|in|yd|mi|lbs?|oz|mph|K|C|F|USD|EUR|INR|cents|deg|%)"
)
GROUP = r"(?:[^{}]|\{[^{}]*\})*"
# what stands between a round bracket and its counterpart
ROUND = r"((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)"
# As on a keyboard: x**2, 6.02 x 10^23, +-2, >=5, pi/2, sqrt 2.
KEYBOARD = [
    (r"(?<=[\w)}\]])\s?\*\*\s?(?=[\w({\\-])", "^"),
    (r"(?<=[\w)}\]])\s?\*\s?(?=[\w({\\-])", r"\\cdot "),
    (r"(?<=[0-9])\s?x\s?(?=10\s?\^)", r"\\times "),
    (r"\+\s?/\s?-|(?:^|(?<==))\+-|\+-(?=\s?\\?sqrt)", r"\\pm "),
    (">=", r"\\geq "), ("<=", r"\\leq "),
    (r"(?<=[0-9])\s?pi(?![A-Za-z])", r"\\cdot \\pi "),  # 4/3 pi is 4/3 of it
    (r"(?<![\\A-Za-z])(?<!\\text\{)(pi|alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|rho|"
     r"sigma|tau|phi|chi|omega)(?![A-Za-z]|\s[A-Za-z]{3}|,\s?[a-z]{2})", r"\\\1 "),
    (r"(?<![\\A-Za-z])(sqrt)(?=\s?[0-9(A-Za-z\\{\[])", r"\\\1 "),
    (rf"(?<![\\A-Za-z])cbrt\({ROUND}\)", r"\\sqrt[3]{\1}"),
    (rf"(?<![\\A-Za-z])abs\({ROUND}\)", r"|\1|"),
    (r"(?<![\\A-Za-z])log([0-9]+)\s?(?=\()", r"log_{\1}"),
    # a bracket after ^, _ and a root is its argument: 2^(n-1), a_(n+1)
    *[(rf"([\^_√]|\\sqrt(?:\[[^\[\]]*\])?)\s?\({ROUND}\)", r"\1{\2}"),
      (r"([\^_])\[([^\[\]]*)\]", r"\1{\2}")] * 4,
]  # fmt: skip
TEX = [
    *CHARACTERS,
    # a system: \left\{\begin{array}{l}x=1\\y=2\end{array}\right.
    (r"(?:\\left\s*)?\\(?:\{|lbrace)\s*\\begin\{(array|aligned|matrix|gathered|split)\}(?:\{[lcr]*\})?"
     r"((?:(?!\\end)[\s\S])*)\\end\{\1\}(?!\s*(?:,|\\right\s*\\|\\\}))",
     r"\\begin{cases}\2\\end{cases}"),
    (r"(\\(?:begin|end))\{(?:[dr]?cases|(?:aligned|align|gathere?d?|split|eqnarray)\*?)\}",
     r"\1{cases}"),
    (r"``([^'`]*)''|[“”]", r"\1"), ("或", " or "), ("[和与且]", " and "),
    ("[¼-¾⅐-⅞]", lambda m: r"\frac{" + normalize("NFKC", m[0]).replace("⁄", "}{") + "}"),
    ("[⁰¹²³⁴-⁹⁻]+", r"^{\g<0>}"), ("[₀-₉]+", r"_{\g<0>}"),
    (r"(?<=[0-9])(?:,\\!|\{,\})\s*(?=[0-9]{3})", ""),  # thousands: 1,\!000 and 1{,}000
    (r"\\\\\s?\[[0-9.]+\s?[a-z]{2}\]", r"\\\\"),  # \\[4pt] between the rows of a matrix
    (r"(?<!\\)\\[!()\[\]]\s?|\\(?:text|page)?color(?:\[\w+\])?\{[^{}]*\}|"
     r"\\[hv]?phantom\{[^{}]*\}|\\(?:tag|label)\*?\{[^{}]*\}|"
     r"\\(?:left|right)\s?\.|^\\(?:bf|rm|it|tt|sf)\s|^\*\*|\*\*$|(?<!\\)\\$", ""),
    (r"(?:(?<!\\)\\[,;:>\s]|[~\s]|\\(?:[hv]space\*?|[hm]skip|m?kern)\s?\{?-?[0-9.]+\s?[a-z]{2}\}?|"
     r"\\(?:(?:en|thin|med|thick|nobreak)?space|enskip|hfill?)(?![a-z])|"
     r"\\(?:fcolorbox\{[^{}]*\}|colorbox|raisebox|scalebox)\{[^{}]*\}|"
     r"\\(?:f|frame)box(?![a-z])|\\(?:ensuremath|smash|[lr]lap)(?![a-z]))+", " "),  # one space
    *[(rf"\\(?:{names})(?![A-Za-z])\s?", name) for names, name in NAMES.items()],
    (r"\\not\s?=", r"\\neq "), (r"\\%", "%"), (r"\\&", r"\\text{and}"),
    *KEYBOARD,
    (r"\\begin\{array\}\s?\{[^{}]*\}|\\begin\{(?:[bBp]|small)?matrix\}", r"\\begin{pmatrix}"),
    (r"\\end\{(?:array|(?:[bBp]|small)?matrix)\}", r"\\end{pmatrix}"),
    (UPRIGHT, r"\\text"), (r"\{\\(?:bf|rm|it|tt|sf)(?![a-z])", r"\\text{"),
    (r"\\text\{\(([A-Za-z\s]{3,})\)\}", r"\\text{\1}"),
    # the power of an upright unit: \text{cm^3}, \text{mol L^{-1}}
    *[(r"(\\text\{[A-Za-z/\s.]*(?:[A-Za-z]{2}|(?<![A-Za-z])[gJLmNs]))\^\{?(-?[0-9])\}?",
       r"\1}^{\2}\\text{")] * 2,
    # no text: \text{36 dollars}, \text{(C)}, \mathrm{e}, \text{A and C}
    (rf"\\text\{{({GROUP}[0-9()=\[\\^_]{GROUP}|[eid]|[A-Z](?:,?\s(?:and\s)?[A-Z])+)\}}", r" \1 "),
    (r"(\{[^{}]*\})|([一-鿿①-⑳]+)", r"\1\\text{\2}"),  # 12\text{元}
    (r"\\text\{([^A-Za-z一-鿿①-⑳{}]*)\}", r"\1"),
]  # fmt: skip
# All digits of an exponent and of a denominator are one argument: x^12 is x^{12}, \frac112 is 1/12.
TOKEN = re.compile(
    r"\\(?:begin|end|text)\{[^{}]*\}|\\sqrt\[[^\[\]]*\]|\\[A-Za-z]+\s?|\\.|(?<=\\log_)(?:10|[0-9])|"
    r"(?<=\^)-?[0-9]*\.?[0-9]+|(?<=_)-?[0-9]+|"
    r"(?<=\\sqrt\s)[0-9.]+|(?<=\\sqrt)[0-9.]+|(?<=\\frac[0-9])[0-9]+|.",
    re.S,
)
ARGUMENT = re.compile(r"\\(?:frac|binom|sqrt.*|pmod|bar|overline|dot|vec|text|mathbb|fbox)|[\^_]")


def _group(tokens: list[str]) -> str:
    """The tokens up to the end of their group, with braces around arguments and nowhere else.

    The tokens come last first, and those that were read are removed.
    """
    text = ""
    while tokens and tokens[-1] != "}":
        text += _item(tokens)
    del tokens[-1:]
    return re.sub(r"^(.*)\\choose(.*)", r"\\binom{\1}{\2}", text)


def _item(tokens: list[str]) -> str:
    """The next token with its arguments, or the next group without its braces.

    Raises IndexError for an argument that is missing.
    """
    token = tokens.pop()
    if token == "{":
        return _group(tokens)
    command = token.strip()
    if not ARGUMENT.fullmatch(command):
        return token
    for _argument in range(2 if command in (r"\frac", r"\binom") else 1):
        while tokens[-1] == " ":
            tokens.pop()
        command += f"{{{_item(tokens).strip()}}}"
    return command


# ---- what people write with it -------------------------------------------------------------------

# What a word after a number multiplies it by.
FACTORS = {
    "ten": "10^{1}", "hundred": "10^{2}", "thousand": "10^{3}", "million": "10^{6}",
    "billion": "10^{9}", "trillion": "10^{12}", "dozen": "12", "half|halve": "2^{-1}",
    "third": "3^{-1}", "fourth": "4^{-1}", "fifth": "5^{-1}", "sixth": "6^{-1}",
    "seventh": "7^{-1}", "eighth": "8^{-1}", "ninth": "9^{-1}", "pi": r"\\pi",
}  # fmt: skip
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
FUNCTION = r"(?:arc|ar)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|gcd|lcm|max|min"
# `(?<![0-9])` here and below: a pattern that is tried from every digit takes quadratic time.
DECIMAL = r"(?<!\\approx)(?<![0-9])([0-9]*)\.([0-9]+)"
NEGATION = r"[^{}]*\b(?:not|false|wrong|incorrect|never)\b"
LABEL = r"(?i:(?:the\s)?(?:final\s|correct\s)?(?:answer|ans\.?)(?:\sis)?)(?![a-z])\s?:?"
TUPLE = r"\([^()]*,[^()]*\)"


def _both_signs(match: re.Match) -> str:
    r"""(0,\pm2) as (0,+2),(0,-2).

    Part of a group, or a text with two signs that may go together, stays as it is.
    """
    text = match[0]
    parts = re.split(r"\\pm(?![a-z])", text)
    if len(parts) != 2 or text.count("{") != text.count("}") or text.count("(") != text.count(")"):
        return text
    return "+".join(parts) + "," + "-".join(parts)


def _exactly(match: re.Match) -> str:
    """A decimal as a fraction."""
    return match.expand(r"\\frac{\1\2}{1") + "0" * len(match[2]) + "}"


# The last one is a time of day.
DATES = "%Y-%m-%d %d%B%Y %d%b%Y %B%d%Y %b%d%Y %A%B%d%Y %A%d%B%Y %I:%M%p".split()


def _date(match: re.Match) -> str:
    """A date or a time of day as 2026-02-05 or 15:35; other texts as they are."""
    text = re.sub(r"\\text|(?<=[0-9])(?:st|nd|rd|th)|[{}\s.,]", "", match[0])
    for form in DATES:
        with contextlib.suppress(ValueError):
            moment = datetime.strptime(text, form)
            if "%A" not in form or moment.strftime("%A") in text:
                return moment.strftime(r"\text{%Y-%m-%d}" if "%Y" in form else "%H:%M")
    return match[0]


SPELLINGS: list[tuple[str, str | Callable[[re.Match], str]]] = [
    (r"\^\{\^\{(.*?)\}\}", r"^{\1}"),  # 30^\degree
    (r"(\\[A-Za-z]+)\s(?![A-Za-z])", r"\1"),
    (r"\\text\{\s?([^{}]*?)\s?\}", r"\\text{\1}"), (r"\s+", " "),
    (r"(?<=[0-9}]\s)(?:sq|cu)\.?\s(?=[a-z])", ""),  # powers of units do not count: 7 sq. ft, 7 m2
    (r"(?<=[0-9]\s)([kcdm]?m|ft|in|yd|mi)[23](?![0-9A-Za-z])", r"\1"),
    (r"\s?([-+*/=<>^_&|])\s?|\s(?=[)}\]]|\\(?!text|quad|mu|Omega)[a-z])|(?<=[({\[])\s", r"\1"),
    (r"[(\[]?(\\begin\{pmatrix\}.*\\end\{pmatrix\})[)\]]?", r"\1"),
    # a system is a list of its rows; a piecewise value keeps its rows
    (r"&(?=[=<>])|(?<=[=<>])&|[,;]\s?(?=\\\\|&|\\end)|^[A-Za-z]\([a-z]\)=(?=\\begin)|"
     r"(?<=&)(?:\\text\{)?(?:if|for|when|where)\b\s?\}?\s?", ""),
    (r"\\begin\{cases\}([^&]*?)\\end\{cases\}", r"\1"),
    # \text{Final answer: }, \text{Total: }, \text{Therefore, she has }
    (rf"^(?:\\text\{{(?:{LABEL}|(?!{NEGATION}|(?i:option|choice))(?:[^{{}}]{{3,}}:|"
     r"(?i:so|thus|then|hence|therefore),?|[^{}]*\b(?:is|are|was|were|equals?|makes?|has|have|gets?|earns?|"
     r"needs?|costs?|pays?|takes?|spends?|saves?|sells?|buys?|receives?|obtain)))\}|"
     rf"(\\text\{{)?{LABEL})\s?", r"\1"),
    (r"^[0-9]{4}-[0-9-]+$|"
     r"^[^=]*(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[^=]*[0-9]{4}\}?$|"
     r"^[0-9]+:[0-9]{2}.*[aApP]\.?[mM]\.?\}?$", _date),
    (r"^([0-9]+)\s?(?:\\text\{to\}|to)\s?([0-9]+)$", r"\1:\2"),
    # statements: x=6 \quad y=5, x=6\\y=5
    (r"(?<=[\w})\]])\s?(?:\\quad|\\\\(?!.*\\end))\s?(?=[-\w(]|\\(?!text|pmod))", ", "),
    (r"\s?\\quad\s?|&(?!.*\\end)", " "),
    (r",?\s?\\text\{,?\s?(and|or),?\},?\s?|,?\s\b(and|or),?\s", r" \1\2 "),
    (r"(?<=[a-z]),?\s(and|or)\}\s?", r"} \1 "), (r"\\text\{,\}\s?", ", "),
    (r"^\\\{([a-z])(?:\\in\\mathbb\{R\})?\s?[:|]\s?"
     r"((?=.*\1)(?!.*=).*(?:[<>]|\\[lgn]eq).*)\\\}$", r"\2"),  # \{x\mid x>3\}
    # \frac13 (about 0.33)
    (r"(?<=.)[\s,]*\(?(?:\\text\{)?[,\s]*(?:or\s)?(?<!\\)(?:approximately|approx\.?|about|"
     r"roughly)\}?\s?(?=[0-9])([^()]*)\)?$", r"\\approx\1"),
    # a time, a line, what is true of every x, names of coordinates
    (r"^0(?=[0-9]:)|^l:(?=.*[-+xy].*=)|^(?:[a-z]\\in)?\\mathbb\{R\}(?:,\s?|\sand\s)(?=[a-z]\\neq)|"
     r"\([a-z](?:,\s?[a-z])+\)=(?=\(.*,\s?\(|\(.*\s(?:or|and)\s)|(?<=or\s)\(x,\s?y\)=", ""),
    # the condition under which a value holds stands behind a bar
    (r"(?<=.)[,\s(]*(?:\\text\{,?\s?(?:for|where|when|if|at|with|provided|such|since|because|as)\b([^{}]*)\}|"
     r"\b(?:for|where|if|at)\s|"
     r",\s?(?=[a-z]\\in\\mathbb)|[,\s]*\((?=[a-z]\\in\\mathbb)|"
     r"[,\s]+\((?=[a-z](?:[<>]|\\[lgn]eq)))((?:(?!\b(?:and|or|if|for|when)\b)[^,;])*)$", r"¦\1\2"),
    (r"^(?!.*(?:[<>]|\\[lgn]eq).*,)([^,]+),\s?([a-z](?:[<>]|\\[lgn]eq)[^,;]*)$", r"\1¦\2"),
    (r"(?<!_\{[0-9a-z]\})(?<=[0-9}])\s(?=[a-z]=)", ", "),  # x=6\ y=5
    (r"^\((a|m|x),\s?(b|n|y)\)=\(([^(),]+),\s?([^(),]+)\)$", r"\1=\3, \2=\4"),
    (r"^([a-z])=[^,=]+(?:(?:,|\sand)\s?\1=[^,=]+)+$", r"\\{\g<0>\\}"),  # x=3, x=4 is no (3,4)
    (rf"\\text\{{({FUNCTION})\}}(?=[\s(0-9A-Za-z\\^_])|"
     rf"(?<![\\A-Za-z{{])({FUNCTION})(?=[\s(0-9\\^_])", r"\\\1\2 "),
    (r"(\\(?:max|min|gcd|lcm))\s?\\\{([^{}]*)\\\}", r"\1(\2)"),
    (r"^(?i:\\text\{(?:negative|minus)\}|negative|minus)\s?", "-"),
    # currency, and dollar signs around math
    (r"^(?:US)?\\\$\s?(?=[0-9.,\s]+$)", r"\\text{USD}"),
    (r"^(?:\\text\{)?(USD|EUR|INR|pounds)\}?\s?([0-9.,\s]+)$", r"\2\\text{\1}"),
    (r"(?:\\text\{)?\b(?:US|USD|EUR|pounds|GBP|INR|CAD|AUD|JPY|CHF|CNY|Rs)\b\.?\}?\s?(?=\\?\$|[0-9])|"
     r"\\?\$|¥", ""),  # and 1.5e3
    (r"(?<![\w.])([0-9]*\.[0-9]+|[0-9]+(?=[eE][0-9]))(?:[eE]|\\text\{E\})\+?(-?[0-9]+)(?![\w.])",
     r"\1\\cdot10^{\2}"),
    # thousands: 1,000 beside a unit or in a list, and 1 000
    (r"(?:(?<=[=;])|(?<=[,;]\s)|(?<=d\s)|(?<=r\s)|^)"
     r"[-+]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])|"
     r"(?:^|(?<==))[-+]?[1-9][0-9]{0,2}(?:\s[0-9]{3})+(?![0-9]|\s?[,;])",
     lambda m: re.sub(r"[,\s]", "", m[0])),
    (r"^(-?[0-9]+)\s([0-9]+)/([0-9]+)\b", r"\1\\frac{\2}{\3}"),  # 7 3/4 is 7 + 3/4
    (r"(?<![0-9])([0-9]{0,30})\.([0-9]{0,30})\\(?:overline|bar|dot)\{([0-9]{1,30})\}(?![0-9])",
     lambda m: m.expand(r"\\frac{0\1\2\3-0\1\2}{") + "9" * len(m[3]) + "0" * len(m[2]) + "}"),
    *[(rf"(?<=[0-9}}])\s*(\\text\{{)?\s*(?:{word})s?(?=(?:ths?)?\b)(?!-)", rf"\\cdot {factor}\1")
      for word, factor in FACTORS.items()],  # 3\text{million}
    (r"(?<=\\cdot\s10\^\{)([0-9]+\}(?:\\text\{)?)ths?\b", r"-\1"),  # 3\text{hundredths}
    (r"\\text\{\s?\}", ""), (r"\s?\\text\{percent\}|\spercent$", "%"),
    (r"(?<=[0-9])(?:\s|\^\{|\\text\{)*(?:st|nd|rd|th)\}*$", ""),  # 5^{\text{th}}
    (r"(?<=\^\{)[^{}.]*[0-9]*\.[0-9]+", lambda m: re.sub(DECIMAL, _exactly, m[0])),  # 2^{0.5}
    (DECIMAL + r"(?=\\(?:times|cdot)\s?10\^)", _exactly),  # 6.7\times10^{-34}
    # 52_8 is not 52_9
    (r"(?<![\w.^])(\()?([0-9][0-9A-F]*)(?(1)\))_\{([0-9]+)\}(?![\w!])", r"\\text{\2 base \3}"),
    (r"([A-Za-z]|(?<![0-9])[0-9]+)!\^", r"(\1!)^"),  # the parser does not know n!^2
    (r"(\\(?:sin|cos|tan|cot|sec|csc)\s?)([0-9.]+)\^\{\\circ\}", r"\1(\2\\pi/180)"),
    (r"\\sqrt\{(?:\\frac\{([^{}-]+)\}\{([^{}-]+)\}|([^{}/-]+)/([^{}/-]+))\}",
     r"\\frac{\\sqrt{\1\3}}{\\sqrt{\2\4}}"),  # of letters, which are real
    (r"\s?\((\\approx[^()]*)\)", r"\1"),
    (r"^([A-Za-z](?:_\{\w+\})?)\\approx", r"\1="), (r"(?<![0-9.])([0-9]+)\.0+(?![0-9])", r"\1"),
    # x^{2}=49\Rightarrow x=7; but x=8\Rightarrow x=7 has two values
    (r"^(?=.*=.*=)(?:(?!(?<![\w}+*-])[a-z]=)[^,;])*\\(?:implies|(?:Long)?[rR]ightarrow)\s?"
     r"(?=[a-z]=[^=,;]+$)|^(?:\\approx|=|\\therefore|\\Rightarrow|\\implies)\s?", ""),
    (r"\s?\(?(?:\\(?:pmod|[bp]?mod)|\\text\{mod\}|\bmod\b)\s?\{?([^{}\s()]+)\}?\)?$",
     r"\\pmod{\1}"),
    (r"^(?:[a-z]\\equiv)?(?=-?[0-9]+\\pmod)", r"\\equiv"),  # 3 (mod 7) is right for x = 3
    # f'(x), f^\prime(x) and f^{\prime}(x) are f_{prime}(x), which is not f(x)
    (r"\^\{('+)\}", r"\1"), (r"(?<=[A-Za-z])('+)", r"_{\1}"), (r"(?<=[{'])'", "prime"),
    (r"'", r"^{\\prime}"),
    (r"\\[lcd]?dots[bcmio]?|\.\.\.", r"\\text{dots}"),  # 1,...,5 is not 1,5
    (TUPLE, _both_signs),  # (0,\pm2)
    (r"[^,]+", _both_signs),  # \frac{1\pm\sqrt5}{2}, which the parser does not know
    (r",\s?(?=[a-z]\\neq)", " and "),
    (r"^((?:\\[a-z]+|[^A-Za-z=,<>\\])+)=([A-Za-z](?:\([^()]*\))?)$", r"\2=\1"),  # 5 = x
    # 5>x>0
    (r"^([^<>=,]+)>([^<>=,]+)>([^<>=,]+)$", r"\3<\2<\1"),
    (r"^([^<>=,]+)\\geq([^<>=,]+)\\geq([^<>=,]+)$", r"\3\\leq \2\\leq \1"),
    (r"^([^<>=,]+(?:>|\\geq))([^<>=,]+)((?:>|\\geq)[^<>=,]+)$", r"\1\2 and \2\3"),
    (rf"(?:^|(?<=[{{(-]))(?i:{'|'.join(NUMBERS)})(?=[}})]|$)",
     lambda m: str(NUMBERS.index(m[0].lower()))),
    (r"(?<![0-9])([0-9]*?)([0-9]{1,2})\s\((?:[a-z]+-)?\2\)$", r"\1\2"),  # 9 (nine)
]  # fmt: skip

# ---- units ---------------------------------------------------------------------------------------

# Words that are no unit: a hedge, a number, an operation; a time of day.
HEDGE = (
    r"(?:perhaps|maybe|possibly|probably|approximately|about|either|plus|minus|times(?=\s*\w)|"
    r"factorial|least|most|than|ish|around|nearly|almost|"
    r"twice|thrice|doubled|tripled|halved|quadrillions?|lakhs?|crores?|(?:ten|hundred)-[a-z]+ths?|"
    r"twelfths?|[a-z]+(?:teen|tie)ths?|below|[KkMB]\s(?!and\b)[a-z]{3,}|"
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty)(?!-))"
)
NO_UNIT = rf"(?:and|or|not|but|for|at|if|when|where|with|[kMB](?!\}}\\Omega)|[ap]\.?m|{HEDGE})"
# A plain word. Of three letters it begins with a consonant and a vowel, as 5 mgh and 3 uvw are
# products; other short ones are named.
PLAIN_WORD = (
    r"(?!a?b?c?d?x?y?z?(?![A-Za-z]))"
    r"(?:[A-Za-z][a-z]{3,}|[B-DF-HJ-NP-TV-Zb-df-hj-np-tv-z][aeiou][a-z]|tsp|ppl|pts|bpm|hrs|mph|kph|atm|"
    r"psi|are|all|old|egg|ant|ice|oak|owl|arm|ear|eye|sky|fly|(?:yr|wk|pc|qt)s?|mo|ct|ox|the|of(?:\san?)?(?=\s))"
)
NUMBER_WORD = (
    r"(?:thir|four|fif|six|seven|eigh|nine)teen|(?:thir|for|fif|six|seven|eigh|nine)ty|zero|score|"
    r"(?:hundred|thousand|million|billion|trillion|dozen|third|fourth|fifth|sixth|seventh|eighth|ninth)s?|half"
)
NO_WORD = (
    rf"{NO_UNIT}|{NUMBER_WORD}|pi|ln|log|(?:sin|cos|tan|cot|sec|csc)h?[xyz]?|arc[a-z]+|exp|mod|mi[lo]|bil|doz|"
    r"hex|bin|neg|negative|wrong|incorrect|false|never|repeating|rep|nil|lac|max|per(?=\s[0-9])|cis|lim|sum|det|"
    r"rem|div|inf(?:inity)?|sqrt|root"
)
WORD = rf"(?!(?i:{NO_WORD})\b){PLAIN_WORD}"
# What something is counted per, in 60 miles/hour and 12/day.
RATE = r"(?:second|minute|hour|day|week|month|year|person|mile|foot|gallon|pound|box|bag|page)s?\b"
# Upright words; a plain unit, after a space if it has one letter; other words after a space.
UNIT_ITEM = (
    rf"(?:\\text\{{(?!(?:squared|cubed|[eix-z]\b)|[^{{}}]*\b{NO_UNIT}\b|"
    r"[^{}]*[万亿百千十倍半余多约左右上下不非几])"
    r"[A-Za-z一-鿿\s.,/-]+\}|"
    r"(?:(?<=[0-9/({])(?:[kcm]m|kg|mg|m[lL]|ft|lbs?|oz|min|mph)|"
    rf"(?:(?<=[0-9}})]\s)|(?<=\s[(\[])|(?<=[/{{])|(?<=t\s)|(?<=\\mu\s)|(?<=\\pi\s)(?=[cmk]m|yd)|"
    rf"(?<=[mgsNJWVAh}}]\s)){SYMBOL}|"
    rf"(?:(?<=[0-9a-z}})]\s)|(?<=\s[(\[]))"
    rf"(?!(?<=[0-9}}]\s)(?:squared|cubed)\b){WORD}|(?<=[0-9a-z]/){RATE}|"
    r"(?<=[0-9]\s)(?:ha|gal|qt|pt))(?![A-Za-z'])|"
    r"\\mu\s?|(?:\s?[kM])?\\Omega|\^\{\\circ\}(?:\s?[CF](?![a-z]))?)(?:\^\{-?[0-9]\})?"
)
UNIT = re.compile(
    rf"(?<!\\cdot)(?<!\\cdot\s)((?:\s?(?:[(\[]|\\frac\{{)?|/(?={RATE})){UNIT_ITEM}"
    rf"(?:[\s/(){{}}\]]|\\cdot\s?|{UNIT_ITEM})*)"
)
# In one spelling, units of which two are different quantities.
KNOWN = rf"(?:{SYMBOL}|yr|wk|mo|tsp|cup|ton|atm|bar|psi|rad|acre|ha|gal|qt|pt)"
# Other spellings of units; powers do not count.
UNIT_NAMES: list[tuple[str, str | Callable[[re.Match], str]]] = [
    (r"\^\{\\circ\}(?!\s?[CF])|\bdegrees?(?!\s[CF])", "deg"),
    (r"\\text|\\frac|\\cdot|\^\{[^{}]*\}|\b(?:per|square|cubic|squared|cubed|degrees?|units?)\b|"
     "平方|立方",
     " "),
    (r"\\mu\W*", "μ"), (r"\b(k|c|m)(?:ilo|enti|illi)(?=[a-z]{4})", r"\1"),
    (r"(?:met(er|re)|gram|lit(er|re)|second|hour|volt|watt|joule|newton)s?\b", lambda m: m[0][0]),
    (r"\bsecs?\b", "s"), (r"\bhrs?\b|小时", "h"), ("minutes?|mins|分钟", "min"),
    ("inch(?:es)?", "in"),
    ("foot|feet", "ft"), ("pounds?|lbs", "lb"), ("L", "l"), ("dollars?", "USD"), ("euros?", "EUR"),
    ("[Cc]elsius", "C"), ("[Ff]ahrenheit", "F"), ("days?", "d"), ("miles?", "mi"),
    ("mph", "mi h"), ("yards?", "yd"), ("ounces?", "oz"), ("gallons?", "gal"),
    ("quarts?|qts", "qt"), ("pints?", "pt"), ("hectares?", "ha"), ("decibels?", "dB"),
    (r"\b(kg|yd|cup|ton|acre)s\b", r"\1"), ("years?|yrs", "yr"), ("weeks?|wks", "wk"),
    ("months?", "mo"),
    ("kB", "KB"), ("teaspoons?", "tsp"), ("radians?", "rad"),
    ("kilobytes?", "KB"), ("megabytes?", "MB"), ("gigabytes?", "GB"), ("terabytes?", "TB"),
]  # fmt: skip


@lru_cache(maxsize=4096)  # all answers of a group are compared with one gold answer
def respell(text: str) -> str:
    r"""The text in one spelling, without a final full stop.

    A condition on its value stands behind a bar, as in 2^{n-1}¦n\geq1.
    """
    text = rewrite(text.strip().rstrip("."), TEX)
    text = _group(TOKEN.findall(text.translate(UNICODE))[::-1]).strip()
    return rewrite(text, SPELLINGS).strip().rstrip(".")


def rewrite(text: str, rules: list) -> str:
    """The text after the rules, in their order."""
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text
