"""Verdicts: is a response right? Math answers, programs, and many of them in parallel.

    grade_math(solution, gold)              -> Verdict(reward, reason)
    grade_code(response, tests)             -> Verdict(reward, reason)
    grade_all(grade, responses, references) -> one Verdict for each response, in order

**Math.** The answer is the last `\\boxed{...}` of the solution. If that box is missing or never
closed, there is no answer: an earlier box does not count, since a model could hedge with it. Equal
texts and plain numbers are decided here, digit for digit. math-verify decides the rest
(`grading/answers.py`) in a process of its own that can be killed (`grading/workers.py`), because it
may never end.

**Code.** The program is the last complete fenced block of Python (`program_of` has the details). It
runs in a sandbox that holds its inputs and nothing else (`grading/sandbox.py` says what the sandbox
covers); tests written as code may then fail it beside the program, too. The keys of the tests tell
their kind:

    {"inputs": [str], "outputs": [str]}                      a script's standard input and output
    {"fn_name": str, "inputs": [[arg]], "outputs": [value]}  calls of a function, or of a method
    {"asserts": [str], "setup": str}                         assertions on the program's names
    {"prompt": str, "test": str, "entry_point": str}         HumanEval: `check(candidate)`

A method is one of `class Solution`.

A script's outputs are compared here, line by line without surrounding white space, and numbers as
numbers: to 1e-6 where the expected one has a decimal point or an exponent, else exactly. An
expected 007 or 1e5 may be no number, and is compared as text.

The reward is None only if grading itself failed: no process could be started, the sandbox broke, or
the tests cannot be run or need what the sandbox cannot show. That rollout leaves its group. A
failure of the response has reward 0. The task decides whether a response was cut at the length
limit, or is copied from the problem (`Task.verdicts`).

Left out: problems with several alternative answers, checkers for problems with many right outputs,
partial credit.
"""

import builtins
import contextlib
import math
import os
import re
import textwrap
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from grading import sandbox
from grading.sandbox import SandboxError
from grading.workers import in_worker

REASONS = (
    "correct wrong no_answer parse_error copied timeout memory output crashed truncated infra_error"
).split()
NUMBER = re.compile(r"(?=[-+]?\.?[0-9])([-+]?)([0-9]*)(?:\.([0-9]*))?")
DECIMAL = re.compile(  # within the range of floats
    r"[-+]?([0-9]{1,300}\.[0-9]{0,400}|\.[0-9]{1,400}|"
    r"([0-9]{1,8}\.?[0-9]{0,400}|\.[0-9]{1,400})e[-+]?[0-2]?[0-9]{1,2})",
    re.I,
)
INTEGER = re.compile(r"[-+]?[0-9]{1,400}")
DIGITS = re.compile(r"[-+]?0[0-9].*|[0-9]+e[0-9]+", re.I | re.S)  # 007 and 1e5 may be text
TAGS = r"(?:</?\w++>[ \t]*+)*+"  # <answer>, on the line of a fence
LIST_ITEM = r"(?:[-*+]|[0-9]{1,9}[.)])[ \t]++"
FENCE = re.compile(
    rf"(?P<indent>[ \t]*+(?:{LIST_ITEM})?){TAGS}"
    r"(?P<marks>`{3,}+|~{3,}+)[ \t]*+"
    r"\{?\.?(?P<language>[\w+#-]*+)(?P<title>[^`]*+)"
)
STATEMENT = re.compile(r"\w\(|^[ \t]*(import|from|def|class|for|while|if|with|try|return)\b", re.M)
CODE = re.compile(r"^[ \t]*+[^\s#]", re.M)  # not comments alone
CONSOLE = re.compile(r"^(>>>|\$) ", re.M)
KEYS = {  # of the four kinds of tests
    "stdio": ("inputs", "outputs"),
    "fn_call": ("fn_name", "inputs", "outputs"),
    "asserts": ("asserts", "setup"),
    "humaneval": ("prompt", "test", "entry_point"),
}
# microseconds of CPU time per period, or "max" for no limit, and the period in microseconds
QUOTA = Path("/sys/fs/cgroup/cpu.max")
# progress bars: rank 0's alone, and on a terminal (None) alone
HIDE_BAR = os.environ.get("RANK", "0") != "0" or None
BOM = "\ufeff"  # a byte order mark, which no compiler takes for white space
FUTURE_IMPORT = re.compile(r"^from __future__ .*$", re.M)


class Verdict(NamedTuple):
    """`reward` is 1.0 (right), 0.0 (wrong) or None (grading failed); `reason` is one of REASONS.

    That of a `--reward` may be any number, right above .5, with any reason.
    """

    reward: float | None
    reason: str


class NoVerdict(Verdict):
    """The verdict of a grading that failed, and the cause."""

    cause: str


def verdict(reason: str) -> Verdict:
    """The verdict of a reason; an unknown reason counts as a crash."""
    reason = reason if reason in REASONS else "crashed"
    return Verdict({"correct": 1.0, "infra_error": None}.get(reason, 0.0), reason)


def infra_error(cause: Exception | str) -> Verdict:
    """The verdict of a grading that failed; warns with the cause."""
    warnings.warn(f"no verdict: {cause}", RuntimeWarning, stacklevel=3)
    failed = NoVerdict(None, "infra_error")
    failed.cause = str(cause)
    return failed


def rewards_of(verdicts: list[Verdict]) -> np.ndarray:
    """The rewards as (B,) float64, NaN where there is no verdict."""
    return np.array([verdict.reward for verdict in verdicts], float)  # None becomes NaN


def grade_all(grade: Callable, responses: list[str], references: list) -> list[Verdict]:
    """`grade(response, reference)` for each pair, in order, with a progress bar on a terminal.

    As many at a time as there are cores: threads wait for the processes that do the work, each
    within its time limit.
    """
    pool = ThreadPoolExecutor(cores())
    # a reward of one's own may change the working directory, which must not move the run's paths
    with contextlib.chdir("."):
        try:
            verdicts = pool.map(lambda pair: grade(*pair), zip(responses, references, strict=True))
            return list(
                tqdm(verdicts, desc="grade", total=len(responses), leave=False, disable=HIDE_BAR)
            )
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C, gradings end at their time limit


def cores() -> int:
    """How many cores this process may use.

    Its container's quota counts, and torchrun's other processes have their share.
    """
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # macOS lacks it
        count = len(os.sched_getaffinity(0))
    # with more processes at a time than the quota allows, some would run out of time
    with contextlib.suppress(OSError, ValueError):
        quota, period = QUOTA.read_text().split()
        count = min(count, int(quota) // int(period))
    return max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


# ---- math ----------------------------------------------------------------------------------------


def grade_math(solution: str, gold: str, timeout_s: float = 5.0) -> Verdict:
    """Compare the last boxed answer of `solution` with `gold`, both LaTeX.

    The comparison has `timeout_s` seconds.
    """
    answer = last_box(solution)
    if answer is None or not answer.strip():
        return verdict("no_answer")
    answer, gold = without_dollars(answer), without_dollars(gold)
    if answer and answer == gold:
        return verdict("correct")
    answer_number, gold_number = plain_number(answer), plain_number(gold)
    if answer_number and gold_number:
        return verdict("correct" if answer_number == gold_number else "wrong")
    # 32 towers of brackets would stop a step for minutes
    if len(answer) > 2000 + 4 * len(gold):
        return verdict("wrong")
    try:
        return verdict(in_worker(answer, gold, timeout_s))
    except OSError as error:
        return infra_error(error)


def without_dollars(text: str) -> str:
    """The LaTeX without surrounding spaces, final full stops and a dollar sign on either side."""
    return re.sub(r"^\$|(?<!\\)\$$", "", text.strip().rstrip(".")).strip()


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{...}`; None without one, or if its brace is never closed."""
    place = box_place(text)
    return text[place[1] : place[2]] if place else None


def box_place(text: str) -> tuple[int, int, int] | None:
    """Where the last `\\boxed{...}` starts, and where its content starts and ends.

    None as in `last_box`.
    """
    boxes = list(re.finditer(r"\\boxed\s*\{", text))
    if not boxes:
        return None
    box = boxes[-1]
    depth = 1
    # \{ and \} are printed braces, not groups
    for brace in re.finditer(r"\\.|[{}]", text[box.end() :], re.S):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return box.start(), box.end(), box.end() + brace.start()
    return None


def plain_number(text: str) -> tuple[str, str, str] | None:
    """(sign, digits before the point, digits after it) of a written number, None for other text.

    Equal numbers give equal tuples: zeros that do not count are dropped, and so is the sign of
    zero.
    """
    match = NUMBER.fullmatch(text)
    if match is None:
        return None
    whole = match[2].lstrip("0")
    decimals = (match[3] or "").rstrip("0")
    sign = "-" if match[1] == "-" and (whole or decimals) else ""
    return sign, whole, decimals


# ---- code ----------------------------------------------------------------------------------------


def grade_code(response: str, tests: dict, timeout_s: float = 10.0, level: str = "auto") -> Verdict:
    """Run the program of `response` against `tests`, all of them within `timeout_s` seconds.

    Tests written as code run twice, and each run has this time. `level` is "auto" or one of
    `sandbox.LEVELS`. Raises SandboxError where programs cannot be run at that level.
    """
    level = sandbox.choose_level(level)
    try:
        style = style_of(tests)
        # without the keys of other kinds, whose values may be null
        tests = {key: tests[key] for key in KEYS[style] if key in tests}
        program = program_of(response, tests)
        if program is None:
            return verdict("no_answer")
        if style == "stdio":
            return verdict(run_stdio(program, tests, timeout_s, level))
        reason, cause = sandbox.run_tests(program, tests, timeout_s=timeout_s, level=level)
    except (SandboxError, ValueError) as error:
        return infra_error(error)  # ValueError: the tests decide nothing or cannot be handed over
    return infra_error(cause) if reason == "infra_error" else verdict(reason)


def style_of(tests: object) -> str:
    """Which of the four kinds of tests these are.

    Raises ValueError for tests that decide nothing.
    """
    if not isinstance(tests, dict):
        raise ValueError("tests must be an object")
    if all(_is_text(tests.get(key)) for key in KEYS["humaneval"]):
        return "humaneval"
    asserts = tests.get("asserts", [])
    if (
        _is_list_of(asserts, str)
        and all(map(_is_text, asserts))
        and isinstance(tests.get("setup") or "", str)
    ):
        return "asserts"
    is_call = "fn_name" in tests
    inputs = tests.get("inputs", [])
    outputs = tests.get("outputs", [])
    if is_call:
        fit = _is_text(tests["fn_name"]) and _is_list_of(inputs, list)
        fit = fit and _is_list_of(outputs, object)
    else:
        fit = _is_list_of(inputs, str) and _is_list_of(outputs, str)
    if not fit:
        raise ValueError(
            "tests need inputs and outputs, lists of text (of arguments and values with fn_name); "
            "or asserts; or prompt, test and entry_point"
        )
    if len(inputs) != len(outputs):
        raise ValueError(f"tests have {len(inputs)} inputs and {len(outputs)} outputs")
    return "fn_call" if is_call else "stdio"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_list_of(values: object, kind: type) -> bool:
    """Whether `values` is a list that is not empty, with items of this type only."""
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(value, kind) for value in values)
    )


def run_stdio(program: str, tests: dict, timeout_s: float, level: str) -> str:
    """The reason of the first input whose output is not the expected one, else "correct"."""
    outputs = sandbox.run_program(program, tests["inputs"], timeout_s=timeout_s, level=level)
    for expected, output in zip(tests["outputs"], outputs, strict=True):
        if output.reason != "ok":
            return output.reason
        if not same_output(output.text, expected):
            outputs.close()
            return "wrong"
    return "correct"


def same_output(text: str, expected: str) -> bool:
    """Whether all lines match; white space around the text and around each line does not count."""
    lines, expected_lines = text.strip().split("\n"), expected.strip().split("\n")
    return len(lines) == len(expected_lines) and all(map(_same_line, lines, expected_lines))


def _same_line(line: str, expected_line: str) -> bool:
    """Whether two lines are equal, as text or word by word as numbers.

    Numbers are compared if a decimal or only integers are expected.
    """
    if line.strip() == expected_line.strip():
        return True
    words, expected_words = line.split(), expected_line.split()
    is_decimal = [DECIMAL.fullmatch(word) and not DIGITS.fullmatch(word) for word in expected_words]
    numeric = any(is_decimal) or all(map(INTEGER.fullmatch, expected_words))
    return (
        numeric
        and len(words) == len(expected_words)
        and all(map(_same_word, words, expected_words))
    )


def _same_word(word: str, expected: str) -> bool:
    """Whether two words are equal, as text or as numbers.

    Numbers are compared to 1e-6 where a decimal is expected, exactly where an integer is.
    """
    if (
        word == expected
        or DIGITS.fullmatch(expected)
        or not (DECIMAL.fullmatch(word) or INTEGER.fullmatch(word))
    ):
        return word == expected
    if DECIMAL.fullmatch(expected):
        return math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    return bool(INTEGER.fullmatch(expected)) and Decimal(word) == Decimal(expected)


def program_of(response: str, tests: dict) -> str | None:
    """The program in a response: its last complete Python block; for HumanEval, prompt and block.

    Where the tests call names, it is the last block that defines one: an example of its use may
    follow. A block without a language is a program only where no block is labelled Python, and not
    if it is a console session or a sample of output.
    """
    found = [(language.lower(), text.removeprefix(BOM)) for language, text in code_blocks(response)]
    blocks = [
        text
        for language, text in found
        if language.startswith("py") and language != "pycon" and CODE.search(text)
    ]
    if not blocks:
        bare = [text for language, text in found if not language]
        blocks = [text for text in bare if STATEMENT.search(text) and not CONSOLE.search(text)]
    if not blocks:
        return None
    names = "|".join(map(re.escape, names_of(tests)))
    definition = re.compile(
        rf"^((async[ \t]+)?def|class)[ \t]+({names})\b|^({names})[ \t]*[:=]", re.M
    )
    defining_blocks = [text for text in blocks if definition.search(text)] if names else []
    block = (defining_blocks or blocks)[-1]
    if "entry_point" not in tests:
        return block
    # without a definition, or with a top-level return, the block is the function's body alone
    if not defining_blocks or "\nreturn" in "\n" + block:
        return f"{tests['prompt']}\n{as_body(block)}"
    future_imports = FUTURE_IMPORT.findall(block)  # they must come first
    return "\n".join([*future_imports, tests["prompt"], "    pass", FUTURE_IMPORT.sub("", block)])


def as_body(block: str) -> str:
    """A function's body, indented.

    Its first line may have lost its indentation, because the prompt may end with it.
    """
    first, _, rest = block.partition("\n")
    margins = re.findall(r"^[ \t]*+(?=\S)", rest, re.M)
    least = min(margins, key=len, default="")
    # unless the rest is the block that the first line opens
    if not (first.endswith(":") and margins[:1] == [least]):
        block = least + block
    return textwrap.indent(textwrap.dedent(block), "    ")


def names_of(tests: dict) -> list[str]:
    """The names that the tests may call in a program; none for a script."""
    if "entry_point" in tests:
        return [tests["entry_point"]]
    if tests.get("fn_name"):
        return [tests["fn_name"], "Solution"]
    asserts = "\n".join(tests.get("asserts", ()))
    return sorted(set(re.findall(r"\b([A-Za-z_]\w*)[ \t]*\(", asserts)) - set(dir(builtins)))


def code_blocks(text: str) -> list[tuple[str, str]]:
    """(language, text) of each closed fenced block.

    A labelled fence inside an open block restarts it.
    """
    blocks = []
    opening = None  # the match of the fence that opened the current block
    lines: list[str] = []
    for line in re.split(r"\r\n?|\n", text.removeprefix(BOM)):
        fence = FENCE.fullmatch(line)
        if opening and fence and len(fence["indent"]) > len(opening["indent"]) + 3:
            fence = None  # indented more deeply: part of the block
        if fence and (not opening or (fence["language"] and fence["marks"] == opening["marks"])):
            opening = fence
            lines = []
        elif opening is None:
            continue
        elif (
            fence
            and fence["marks"].startswith(opening["marks"])
            and re.fullmatch(TAGS, fence["language"] + fence["title"].strip())
        ):
            block = "\n".join(lines)
            indented = opening["indent"] or block[:1] in " \t"
            blocks.append((opening["language"], textwrap.dedent(block) if indented else block))
            opening = None
        else:
            lines.append(line)
    return blocks
