"""Verdicts: is a response right? Math answers, programs, and many of them in parallel.

    grade_math(solution, gold)             -> Verdict(score, reason)
    grade_code(response, tests)            -> the same
    grade_all(grade, responses, references) -> one for each, in order

**Math.** The answer is the last `\\boxed{...}` of the solution. If that one is never closed, or there is none,
there is no answer: an earlier box does not stand in, or a model could hedge. Equal texts and plain numbers are
decided here, digit for digit; the rest by math-verify (`grading/answers.py`), which reads gold and answer in the
same way. That can take for ever, so it works in processes of its own (`grading/workers.py`).

**Code.** The program is the last complete fenced block, and runs in a sandbox that holds its inputs and nothing
else (`grading/sandbox.py`, which says what it covers and what it does not). Four kinds of tests, told by their keys:

    {"inputs": [str], "outputs": [str]}                      a script's standard input and output
    {"fn_name": str, "inputs": [[arg]], "outputs": [value]}  a function's, or a method's of `class Solution`
    {"asserts": [str], "setup": str}                         assertions on the program's names
    {"prompt": str, "test": str, "entry_point": str}         HumanEval: `check(candidate)`

Outputs are compared here: lines without white space at their ends, and numbers to 1e-6 where the expected one has
a decimal point.

A verdict is None, and its sample leaves its group, only where the grading failed and not the response: no process
to be had, a broken sandbox, tests that cannot be run. What fails because of the response is 0. Whether a response
was cut at the length limit is not decided here but by the task (`Task.verdicts`).

Left out: sets of several right answers, checkers for problems with many right outputs, partial credit.
"""

import math
import os
import re
import textwrap
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from grading import sandbox
from grading.sandbox import SandboxError
from grading.workers import in_worker

REASONS = "correct wrong no_answer parse_error timeout memory output crashed truncated infra_error".split()
NUMBER = re.compile(r"(?=[-+]?\.?[0-9])([-+]?)([0-9]*)(?:\.([0-9]*))?")
DECIMAL = re.compile(r"[-+]?([0-9]{1,400}\.[0-9]{0,400}|\.[0-9]{1,400}|[0-9]{1,400}(?=e))(e[-+]?[0-9]{1,3})?", re.I)
INTEGER = re.compile(r"[-+]?[0-9]{1,400}")
FENCE = re.compile(r"([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+\{?\.?([\w+#-]*+)([^`]*+)")  # indent, marks, language, a title
STATEMENT = re.compile(r"\w\(|^[ \t]*(import|from|def|class|for|while|if|with|try|return)\b", re.M)
CONSOLE = re.compile(r"^(>>>|\$) ", re.M)


class Verdict(NamedTuple):
    """1.0 right, 0.0 wrong, None no verdict; and why, one of REASONS."""

    score: float | None
    reason: str


def verdict(reason: str) -> Verdict:
    """The verdict that goes with a reason; one that is none is a failure."""
    reason = reason if reason in REASONS else "crashed"
    return Verdict({"correct": 1.0, "infra_error": None}.get(reason, 0.0), reason)


def infra_error(error: Exception) -> Verdict:
    """No verdict; the cause is shown once."""
    warnings.warn(f"no verdict: {error}", RuntimeWarning, stacklevel=3)
    return verdict("infra_error")


def scores_of(verdicts: list[Verdict]) -> np.ndarray:
    """The scores as (B,) float64, NaN where there is no verdict."""
    return np.array([np.nan if score is None else score for score, _ in verdicts])


def grade_all(grade: Callable, responses: list[str], references: list, *, workers: int = 0, **options) -> list[Verdict]:
    """`grade(response, reference, **options)` for each pair, in order, with a progress bar on a terminal.

    `workers` at a time, 0: as many as there are cores, shared among the processes that torchrun starts on a
    machine. They are threads that wait: the work is done in processes, each with its own time limit.
    """
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    pool = ThreadPoolExecutor(workers or max(1, cores))
    try:
        pairs = list(zip(responses, references, strict=True))
        verdicts = pool.map(lambda pair: grade(*pair, **options), pairs)
        bars = None if os.environ.get("RANK", "0") == "0" else True  # on a terminal, of one rank
        return list(tqdm(verdicts, desc="grade", total=len(pairs), leave=False, disable=bars))
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C: what has begun ends at its limit


# ---- math -----------------------------------------------------------------------------------------------------


def grade_math(solution: str, gold: str, timeout_s: float = 5.0) -> Verdict:
    """Compare the last boxed answer of `solution` with `gold`, both LaTeX, in `timeout_s` seconds."""
    answer = last_box(solution)
    if answer is None or not answer.strip():
        return verdict("no_answer")
    answer, gold = (re.sub(r"^\$|(?<!\\)\$$", "", text.strip().rstrip(".")).strip() for text in (answer, gold))
    if answer and answer == gold:
        return verdict("correct")
    numbers = [plain_number(text) for text in (answer, gold)]
    if all(numbers):
        return verdict("correct" if numbers[0] == numbers[1] else "wrong")
    try:
        return verdict(in_worker(answer, gold, timeout_s))
    except OSError as error:
        return infra_error(error)


def last_box(text: str) -> str | None:
    """What stands in the last `\\boxed{...}`, None if there is none or its brace is never closed."""
    place = box_place(text)
    return text[place[1] : place[2]] if place else None


def box_place(text: str) -> tuple[int, int, int] | None:
    """Where the last `\\boxed{...}` starts, and its inside starts and ends; None as in `last_box`."""
    box = max(re.finditer(r"\\boxed\s*\{", text), key=re.Match.end, default=None)
    if box is None:
        return None
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[box.end() :], re.S):  # \{ and \} are printed braces, not groups
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return box.start(), box.end(), box.end() + brace.start()
    return None


def plain_number(text: str) -> tuple[str, str, str] | None:
    """Sign, digits before and digits after the point of a number that is written out; equal for equal numbers."""
    match = NUMBER.fullmatch(text)
    if match is None:
        return None
    before, after = match[2].lstrip("0"), (match[3] or "").rstrip("0")
    return "-" if match[1] == "-" and (before or after) else "", before, after


# ---- code -----------------------------------------------------------------------------------------------------


def grade_code(response: str, tests: dict, timeout_s: float = 10.0, level: str = "auto") -> Verdict:
    """Run the program of `response` against `tests`, all of them in `timeout_s` seconds.

    `level`: of the sandbox. Raises SandboxError where programs cannot be run at that level.
    """
    level = sandbox.choose_level(level)
    try:
        style = style_of(tests)
    except ValueError as error:
        return infra_error(error)
    program = program_of(response, tests)
    if program is None:
        return verdict("no_answer")
    try:
        if style == "stdio":
            return verdict(run_stdio(program, tests, timeout_s, level))
        reason, cause = sandbox.run_tests(program, tests, timeout_s=timeout_s, level=level)
        return infra_error(ValueError(cause)) if reason == "infra_error" else verdict(reason)
    except (SandboxError, ValueError) as error:  # the latter: tests that cannot be handed over
        return infra_error(error)


def style_of(tests: dict) -> str:
    """Which of the four kinds of tests these are; raises ValueError for tests that decide nothing."""
    if not isinstance(tests, dict):
        raise ValueError("must be an object")
    if all(_is_text(tests.get(key)) for key in ("prompt", "test", "entry_point")):
        return "humaneval"
    if _is_list(tests.get("asserts"), _is_text) and isinstance(tests.get("setup") or "", str):
        return "asserts"
    called = "fn_name" in tests
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if called and not (_is_text(tests["fn_name"]) and _is_list(inputs, list) and _is_list(outputs)):
        raise ValueError("needs fn_name, a list of argument lists as inputs, and a list of outputs")
    if not called and not (_is_list(inputs, str) and _is_list(outputs, str)):
        raise ValueError("needs inputs and outputs, lists of text; or asserts; or prompt, test and entry_point")
    if len(inputs) != len(outputs):
        raise ValueError(f"has {len(inputs)} inputs and {len(outputs)} outputs")
    return "fn_call" if called else "stdio"


def _is_text(value) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_list(value, kind: Callable = object) -> bool:
    """A list with something in it, all of this type or such that this function says so."""
    fits = kind if kind is _is_text else lambda item: isinstance(item, kind)
    return isinstance(value, list) and bool(value) and all(map(fits, value))


def run_stdio(program: str, tests: dict, timeout_s: float, level: str) -> str:
    """The reason of the first input whose output is not the expected one."""
    outputs = sandbox.run_program(program, tests["inputs"], timeout_s=timeout_s, level=level)
    for expected, output in zip(tests["outputs"], outputs, strict=True):
        if output.reason != "ok":
            return output.reason
        if not same_output(output.text, expected):
            outputs.close()
            return "wrong"
    return "correct"


def same_output(text: str, expected: str) -> bool:
    """Line by line: equal but for white space at the end, or of equal numbers, decimals to 1e-6."""
    lines, golds = ([line.rstrip() for line in part.rstrip().lstrip("\r\n").split("\n")] for part in (text, expected))
    return len(lines) == len(golds) and all(
        line == gold or _same_words(line.split(), gold.split()) for line, gold in zip(lines, golds, strict=True)
    )


def _same_words(words: list[str], golds: list[str]) -> bool:
    """Word by word, where a decimal is expected or nothing but numbers, between which space has no meaning."""
    decimals = [bool(DECIMAL.fullmatch(gold)) for gold in golds]
    if len(words) != len(golds) or not (any(decimals) or all(INTEGER.fullmatch(gold) for gold in golds)):
        return False
    return all(
        word == gold
        or (
            decimal
            and (DECIMAL.fullmatch(word) or INTEGER.fullmatch(word))
            and math.isclose(float(word), float(gold), rel_tol=1e-6, abs_tol=1e-6)
        )
        for word, gold, decimal in zip(words, golds, decimals, strict=True)
    )


def program_of(response: str, tests: dict) -> str | None:
    """The program that a response gives: its last complete Python block, for HumanEval after the prompt.

    Where the tests call for names, the last that defines one: an example of its use may follow.
    """
    blocks = [text for language, text in code_blocks(response) if _is_program(language, text)]
    if not blocks:
        return None
    wanted = "|".join(map(re.escape, names_of(tests)))
    defines = re.compile(rf"^((async[ \t]+)?def|class)[ \t]+({wanted})\b|^({wanted})[ \t]*[:=]", re.M)
    block = next((text for text in reversed(blocks) if wanted and defines.search(text)), blocks[-1])
    if "entry_point" not in tests:
        return block
    if not defines.search(block):
        return f"{tests['prompt']}\n{textwrap.indent(textwrap.dedent(block), '    ')}"  # the body alone
    future = re.compile(r"^from __future__ .*$", re.M)  # must come first
    return "\n".join([*future.findall(block), tests["prompt"], "    pass", future.sub("", block)])


def names_of(tests: dict) -> list[str]:
    """The names that the tests may call in a program; none for a script."""
    if "entry_point" in tests:
        return [tests["entry_point"]]
    if tests.get("fn_name"):
        return [tests["fn_name"], "Solution"]
    return sorted(set(re.findall(r"\b([A-Za-z_]\w*)[ \t]*\(", "\n".join(tests.get("asserts", ())))))


def _is_program(language: str, text: str) -> bool:
    """A block in Python, or one without a language that does something: not a sample of the output or a session."""
    if language:
        return language.lower().startswith("py") and language.lower() != "pycon"
    return bool(STATEMENT.search(text)) and not CONSOLE.search(text)


def code_blocks(text: str) -> list[tuple[str, str]]:
    """(language, text) of each fenced block that is closed; one that is begun anew is not."""
    blocks, opened, lines = [], None, []
    for line in re.split(r"\r\n?|\n", text):
        fence = FENCE.fullmatch(line)
        if opened and fence and len(fence[1]) > len(opened[1]) + 3:
            fence = None  # deeper: part of the text
        if fence and (opened is None or (fence[3] and fence[2] == opened[2])):
            opened, lines = fence, []
        elif fence and fence[2].startswith(opened[2]) and not (fence[3] + fence[4]).strip():
            body = "\n".join(lines)
            blocks.append((opened[3], textwrap.dedent(body) if opened[1] or body[:1] in " \t" else body))
            opened = None
        elif opened:
            lines.append(line)
    return blocks
