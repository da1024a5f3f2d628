"""Verdicts: is a response's answer right? Math so far, on math-verify behind an exact fast path.

    grade_math(solution, gold) -> Verdict(score, reason)

  - The answer is the last `\\boxed{...}` of the solution. If that one is never closed, or there is none, there
    is no answer: an earlier box does not stand in, or a model could hedge.
  - Exact first: equal text, or two plain numbers, which are compared as rationals, digit for digit.
  - Else math-verify reads gold and answer in the same way and decides. Its tolerance for decimals is switched
    off as far as it allows. Nothing in a box is ever run as code.

Whether a response was cut at the length limit is not decided here but by the task (`tasks.Task.verdicts`).

What this does not cover: time and memory. math-verify runs in this process without a limit (it would use
SIGALRM, which works in main threads only), so a tower of powers in a box can take long.
"""

import logging
import re
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from math_verify import LatexExtractionConfig, parse, verify

# math-verify logs every expression it cannot read, with a traceback; the verdict's reason says it.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

NUMBER = re.compile(r"[-+]?([0-9]{1,1000}(\.[0-9]{0,1000})?|\.[0-9]{1,1000})")


class Verdict(NamedTuple):
    """1.0 right, 0.0 wrong, None no verdict; and why: correct, wrong, no_answer, parse_error, truncated."""

    score: float | None
    reason: str


def grade_math(solution: str, gold: str) -> Verdict:
    """Compare the last boxed answer of `solution` with `gold`, both LaTeX. Reasons as in `Verdict`."""
    answer = last_box(solution)
    if answer is None or not answer.strip():
        return Verdict(0.0, "no_answer")
    answer, gold = _tidy(answer), _tidy(gold)
    if answer == gold:
        return Verdict(1.0, "correct")
    if NUMBER.fullmatch(answer) and NUMBER.fullmatch(gold):
        right = Fraction(answer) == Fraction(gold)
        return Verdict(1.0, "correct") if right else Verdict(0.0, "wrong")
    readings = [_read(text) for text in (gold, answer)]
    if not all(readings):
        return Verdict(0.0, "parse_error")
    right = verify(*readings, float_rounding=12, strict=True, timeout_seconds=None)
    return Verdict(1.0, "correct") if right else Verdict(0.0, "wrong")


def scores_of(verdicts: list[Verdict]) -> np.ndarray:
    """The scores as (B,) float64, NaN where there is no verdict."""
    return np.array([np.nan if verdict.score is None else verdict.score for verdict in verdicts])


def last_box(text: str) -> str | None:
    """What stands in the last `\\boxed{...}`, None if there is none or its brace is never closed."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth, escaped = 1, False
    for end in range(start, len(text)):
        if escaped:
            escaped = False  # \{ and \} are printed braces, not groups
        elif text[end] == "\\":
            escaped = True
        elif text[end] in "{}":
            depth += 1 if text[end] == "{" else -1
            if depth == 0:
                return text[start:end]
    return None


def _tidy(text: str) -> str:
    """The answer without a final full stop, dollar signs around it, and spaces at its ends."""
    return text.strip().rstrip(".").strip("$").strip()


def _read(text: str) -> list:
    """math-verify's reading of one LaTeX expression, empty if it cannot read it."""
    return parse(
        f"${text}$", extraction_config=[LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
    )
