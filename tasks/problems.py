r"""Problems from rows: a file of one's own, or the paper's sets on the hub.

    problems, notes = load_problems("math", "some.jsonl")  # None: from the hub

**From the hub** comes one parquet file per set, so no code of the set runs and no split is guessed.
  - math: the 8,523 problems of MATH levels 3 to 5 are a file of `hkust-nlp/SimpleRL-Zoo-Data`. From
    the 14 parts of `EleutherAI/hendrycks_math` one would have to take out MATH-500, and be left
    with another count.
  - code: the 25,276 problems of `PRIME-RL/Eurus-2-RL-Data` (`ability` "code"): a download of 1.7
    GB, and some GB of memory.
Another count is a warning, not an error. Rows without an answer, or with tests that decide nothing,
are dropped.

**A path** is a file of JSON lines, a JSON list or a table (`tasks/rows.py`), where a row may be
  - ours: "problem" or "question", with "answer" or "tests" (an object or its JSON text; see
    `rewards.py`);
  - MATH's: "answer" may be "gt_answer", "ground_truth_answer", or the last box of "solution";
  - GSM8K's: what follows "####" is the answer;
  - Eurus's and verl's: "prompt" (messages) and "reward_model" {"ground_truth"}, which decides
    whatever other columns say.
Capital letters in the names of columns do not matter.
MATH's rows of a "level" outside 3 to 5, and rows of another task's "ability", are left out. A row
that cannot be used is an error that names it; in published sets, which have "gt_answer", "solution"
or "reward_model", it is dropped, and a warning counts these rows and names the first.

This file imports no torch, so that a mistake in a file is named at once.

Left out: evaluation sets (`tasks/benchmarks.py`).
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeGuard

from base.errors import SURROGATE, BadInput
from rewards import style_of
from tasks.readings import boxed_answer, doubt_of, read_answer
from tasks.rows import from_file, from_hub, lacks

# The key under which a problem of a kind holds what a response is graded against.
REFERENCES = {"math": "answer", "code": "tests"}
# Name on the hub, file, and how many problems the paper trains on.
HUB = {
    "math": ("hkust-nlp/SimpleRL-Zoo-Data", "simplelr_qwen_level3to5/train.parquet", 8_523),
    "code": ("PRIME-RL/Eurus-2-RL-Data", "train.parquet", 25_276),
}
PROBLEM = "problem", "question"  # columns, of which the first that has text counts
ANSWER = "gt_answer", "ground_truth_answer", "answer"
OTHERS = (
    "solution",
    "tests",
    "prompt",
    "reward_model",
    "extra_info",
    "ability",
)  # columns that count
PUBLISHED = {"gt_answer", "reward_model", "solution"}  # columns of sets from the hub
FILTERS = {"math": " of levels 3 to 5, or of none", "code": ' of ability "code", or of none'}
NAMED = 5  # rows, at most, that a warning names
# Rows of MATH have these columns; those of levels 1 and 2 are left out.
MATH_COLUMNS = {"gt_answer", "level"}, {"solution", "level", "type"}, {"level", "unique_id"}
OTHER_LEVEL = re.compile(r"(Level )?[12?](\.0)?")  # 1, "2", "Level 1", "Level ?"
# What a chat template writes: <|im_start|>, DeepSeek's, Gemma's, Mistral's and Llama's.
TEMPLATE_MARK = re.compile(
    r"<\|(?:im_|start|end|eot|begin|user|assistant|system)\w*\|>|<\uff5c[^<>]+>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>"
)


def load_problems(kind: str, data: str | None) -> tuple[list[dict], list[str]]:
    """The problems of a file, or of the hub if `data` is None, and notes for the user.

    The notes say where the problems come from, how many rows were left out or dropped, and why. Of
    a file, they name rows that would train wrongly. Raises BadInput.
    """
    repo, file, expected = HUB[kind]
    if data is None:
        blame = f"--task {kind} without --data: {repo}"
        rows = from_hub(repo, file, f"{blame}/{file}", "give a local file with --data")
    else:
        blame = f"--data {data}"
        rows = from_file(data, blame)
    names: set[str] = set()
    problems, dropped, count = numbered(noting(rows, names), kind, blame)
    wanted = len(problems) + len(dropped)
    notes = [f"data {data or f'{repo} (hub)'}: {wanted:,} of {count:,} rows"]
    if wanted < count:
        notes[0] += FILTERS[kind]
    if data is None and wanted != expected:
        notes.append(f"WARNING: {expected:,} problems were expected: not the paper's training set")
    if dropped:
        notes.append(f"WARNING: {len(dropped):,} rows cannot be used (the first: {dropped[0]})")
    if not problems:
        raise BadInput(f"{blame}: no problem is left ({notes[-1]}); give others with --data")
    if data is not None:
        notes += doubts_of(problems) + unread_of(names)
    return list(problems.values()), notes


def noting(rows: Iterable[dict], names: set[str]) -> Iterator[dict]:
    """The rows; the names of their columns, without capitals, are added to `names`."""
    for row in rows:
        names.update(map(str.lower, row))
        yield row


def unread_of(names: set[str]) -> list[str]:
    """A note on the columns of these names, without capitals, that nothing reads."""
    of_math = [columns for columns in MATH_COLUMNS if columns <= names]
    unread = sorted(names.difference(PROBLEM, ANSWER, OTHERS, *of_math))
    return [f"columns that nothing reads: {', '.join(unread)[:200]}"] if unread else []


def numbered(rows: Iterable[dict], kind: str, blame: str) -> tuple[dict[int, dict], list[str], int]:
    """The problems by the numbers of their rows, what was dropped and why, and how many rows are.

    Raises BadInput, which begins with `blame`, for a row of no published set that cannot be used.
    """
    problems = {}
    dropped = []
    count = 0
    for count, row in enumerate(rows, 1):
        if _is_wanted(row, kind):
            try:
                problems[count] = as_problem(row, kind)
            except (ValueError, TypeError, RecursionError) as error:
                if not PUBLISHED & set(map(str.lower, row)):
                    raise BadInput(f"{blame}, row {count}: {error}") from error
                dropped.append(f"row {count}: {error}")
    return problems, dropped, count


def doubts_of(problems: dict[int, dict]) -> list[str]:
    """Warnings of answers that no number equals, and of problems that occur twice.

    The keys are the numbers of the problems' rows.
    """
    doubtful = defaultdict(list)  # remedy -> rows
    for row, problem in problems.items():
        remedy = doubt_of(problem.get("answer", ""))
        if remedy:
            doubtful[remedy].append(f"row {row}")
    notes = [f"WARNING: {_first(rows)}: {remedy}" for remedy, rows in doubtful.items()]
    seen: dict[str, int] = {}  # the words of a problem -> its first row
    doubles = []
    for row, problem in problems.items():
        before = seen.setdefault(" ".join(problem["problem"].split()), row)
        if before != row:
            doubles.append(f"rows {before} and {row}")
    if doubles:
        notes.append(f"WARNING: {_first(doubles)} are the same problem; keep one of them")
    return notes


def _first(rows: list[str]) -> str:
    """The first names of rows, with dots for the others."""
    return ", ".join(rows[:NAMED] + ["..."] * (len(rows) > NAMED))


def _is_wanted(row: dict, kind: str) -> bool:
    """Whether a row is none of MATH's of another level, and has no other task's ability."""
    columns = _columns(row)
    is_math = kind == "math" and any(names <= columns.keys() for names in MATH_COLUMNS)
    if is_math and OTHER_LEVEL.fullmatch(str(columns["level"])):
        return False
    ability = str(row.get("ability"))
    return ability == kind or ability not in REFERENCES


def as_problem(row: dict, kind: str) -> dict:
    """The problem in a row: {"problem", "answer"} or {"problem", "tests"}.

    One with an answer keeps a "solution". Raises ValueError, which says what the row lacks.
    """
    columns = _columns(row)
    # The prompt last: SimpleRL-Zoo's holds a template, its question does not.
    problem = _first_text([*map(columns.get, PROBLEM), _user_message(row.get("prompt"))])
    if problem is None:
        raise lacks(
            row, '"problem" or "question", non-empty text, or "prompt" with a user\'s message'
        )
    mark = TEMPLATE_MARK.search(problem)
    if mark:
        raise ValueError(f"holds a template already ({mark[0]}); give the bare problem")
    reward_model = columns.get("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if kind == "code":
        if reward_model is None:
            tests = _own_tests(columns.get("tests"))
        else:
            tests = _published_tests(truth)
        style_of(tests)
        return {"problem": problem, "tests": tests}
    solution = columns.get("solution")
    answers = [truth, *map(columns.get, ANSWER), boxed_answer(solution)]
    answer = _first_text(map(read_answer, answers))  # one after another
    if answer is None:
        raise lacks(row, '"answer", non-empty text, or "solution" with a \\boxed{}')
    found = {"problem": problem, "answer": answer}
    return found | {"solution": solution} if is_text(solution) else found


def _columns(row: dict) -> dict:
    """A row's columns, also without capitals, and what some sets keep in "extra_info"."""
    columns = {name.lower(): value for name, value in row.items()} | row
    extra = columns.get("extra_info")
    return extra | columns if isinstance(extra, dict) else columns


def _user_message(prompt: object) -> str | None:
    """The last message of the user; None if there is none, or the prompt is no list."""
    for message in reversed(prompt) if isinstance(prompt, list) else []:
        if isinstance(message, dict) and message.get("role") == "user":
            return message.get("content")
    return None


def _first_text(values: Iterable) -> str | None:
    """The first value that is non-empty text; None if there is none."""
    return next(filter(is_text, values), None)


def is_text(value: object) -> TypeGuard[str]:
    """Whether a value is non-empty text.

    Raises ValueError for text that no tokenizer reads.
    """
    if not isinstance(value, str):
        return False
    if SURROGATE.search(value):
        raise ValueError("holds half of a surrogate pair (\\ud800 to \\udfff); write both halves")
    return bool(value.strip())


# ---- tests ---------------------------------------------------------------------------------------


def _own_tests(tests: object) -> object:
    """Tests in our form, from an object or its JSON text.

    Keys with None are left out: parquet gives each row the keys that other rows have.
    """
    if isinstance(tests, str):
        tests = json.loads(tests)
    if isinstance(tests, dict):
        return {key: value for key, value in tests.items() if value is not None}
    return tests


def _published_tests(published: object) -> object:
    """Tests of Eurus or LiveCodeBench in our form.

    Scripts read and write text or lists of lines. Calls are lists of arguments, and the value of
    each may stand in a list of one; or both are JSON texts, with one argument per line.
    """
    tests = _own_tests(published)
    if not isinstance(tests, dict) or not {"inputs", "outputs"} <= tests.keys():
        return tests  # `style_of` says what is wrong
    inputs = tests["inputs"]
    outputs = tests["outputs"]
    if "fn_name" not in tests:
        return {
            "inputs": list(map(_joined, inputs)),
            "outputs": list(map(_joined, outputs)),
        }
    if all(isinstance(text, str) for text in inputs):
        inputs = list(map(_json_values, inputs))
        outputs = [json.loads(value) if isinstance(value, str) else value for value in outputs]
    elif all(isinstance(value, list) and len(value) == 1 for value in outputs):
        outputs = [value[0] for value in outputs]
    return {"fn_name": tests["fn_name"], "inputs": inputs, "outputs": outputs}


def _json_values(text: str) -> list:
    """The values of a text with one JSON value per line: the arguments of a call."""
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _joined(lines: object) -> object:
    """A list of lines as one text; everything else as it is."""
    return "\n".join(lines) if isinstance(lines, list) else lines
