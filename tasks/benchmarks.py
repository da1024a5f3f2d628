r"""The paper's ten benchmarks: what they are, and loading.

    load_benchmark("math500", "file.jsonl")  -> EvalSet: problems, and how they are graded
    load_sets(names, data, heldout)          -> those that --bench and --data of eval.py name

Without a file a benchmark comes from the hub.

BENCHMARKS says where each set comes from, how many rows its files should have and its k (avg@k,
Sec. 5.2). A file may be the hub's own, or another with the same columns: JSON lines (.jsonl, also
.gz), .json, .csv or .parquet. A row that lacks what its set must have is an error that names it.
Another number of rows means another benchmark: a warning in `EvalSet.notes`.
  - AIME24: the hub's file holds three years; the 30 whose url says 2024 are kept.
  - MBPP and MBPP+ are one file, EvalPlus's 378 tasks: the paper cites EvalPlus for both. MBPP's
    tests are the `test_list`, which the prompt shows; MBPP+'s are the `test`, which it does not.
  - LiveCodeBench: `test6.jsonl` holds what version 6 added; LCB_WINDOW, the paper's, keeps contests
    from February to May 2025. Its private tests are plain JSON, or JSON that is pickled, compressed
    and written in base64. A pickle may name any function to be called while it is read: `TextOnly`
    admits no name, so that only plain values come out. Where a problem's tests cannot be decoded,
    its generations have no verdict (`infra_error`): never a pass or a zero.
"""

import base64
import io
import json
import math
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from base.errors import BadInput, bad_input_on_error
from tasks.problems import as_problem
from tasks.rows import from_file, from_hub, lacks
from tasks.task import Task

LCB_WINDOW = ("2025-02-01", "2025-05-31")  # of LiveCodeBench's contests, both days included


@dataclass(frozen=True)
class Benchmark:
    """One of the sets: what it is, and how a row of its file becomes a problem."""

    name: str
    kind: str  # "math" or "code"
    k: int  # samples per problem, as in the paper
    counts: tuple[int, ...]  # numbers of rows that its published files have
    repo: str
    files: str  # a pattern of its files' names on the hub
    # Returns {"problem", and "answer" or "tests"}, or None for a row of another set.
    # Raises KeyError for a column that the row lacks, ValueError for one that is wrong.
    read: Callable[[dict], dict | None]
    timeout_s: float = 5.0  # for one response


@dataclass(frozen=True)
class EvalSet:
    """A set to evaluate on. A problem is {"id", "problem", and "answer" or "tests"}."""

    name: str
    kind: str  # "math" or "code"
    k: int  # samples per problem
    problems: list[dict]
    timeout_s: float = 5.0  # for one response
    notes: list[str] = field(default_factory=list)
    max_tokens: float = math.inf  # a response that is longer cannot be right
    task: Task | None = None  # with graders of its own, of a run's held-out problems
    reward: str | None = None  # the run's --reward, and the digest of its file


# ---- published rows ------------------------------------------------------------------------------


math_row = partial(as_problem, kind="math")  # from the usual columns, as for training


def aime24_row(row: dict) -> dict | None:
    """A problem of 2024, or None for one of another year.

    The year is in the url; a file without urls holds one year.
    """
    return math_row(row) if "2024" in str(row.get("url") or "2024") else None


def olympiad_row(row: dict) -> dict:
    """A problem whose answer is a list of texts, most often of one."""
    answer = ", ".join(row["final_answer"])
    return as_problem({"problem": row["question"], "answer": answer}, "math")


def humaneval_row(row: dict) -> dict:
    """A function's beginning, to be completed, and tests as `check(candidate)`."""
    tests = {name: row[name] for name in ("prompt", "test", "entry_point")}
    problem = f"Complete this function:\n```python\n{tests['prompt']}\n```"
    return as_problem({"problem": problem, "tests": tests}, "code")


def mbpp_row(row: dict, plus: bool) -> dict:
    """A task in words, with its base tests shown.

    With `plus` the added tests decide.
    """
    shown = row["test_list"]
    asserts = [row["test"]] if plus else shown
    tests = {"asserts": asserts, "setup": "\n".join(row["test_imports"])}
    listed = "\n".join(shown)
    problem = f"{row['prompt']}\nThe program must pass these tests:\n```python\n{listed}\n```"
    return as_problem({"problem": problem, "tests": tests}, "code")


def livecodebench_row(row: dict) -> dict | None:
    """A contest's problem, or None for contests outside LCB_WINDOW.

    Where its tests cannot be read, "tests" is None and "fault" says why.
    """
    first_day, last_day = LCB_WINDOW
    if not first_day <= row["contest_date"][:10] <= last_day:
        return None
    text = row["question_content"]
    if row["starter_code"]:
        text += f"\nComplete this program:\n```python\n{row['starter_code']}\n```"
    else:
        text += "\nThe program reads from standard input and writes to standard output."
    private = row["private_test_cases"]
    try:
        tests = livecodebench_tests(row, private_tests(private))
        # the columns of Eurus's rows, whose tests have this form
        return as_problem({"problem": text, "reward_model": {"ground_truth": tests}}, "code")
    except Exception as error:  # json, base64, zlib and pickle raise errors of many classes
        fault = f"tests cannot be read: {type(error).__name__}: {error}"
        return {"problem": text, "tests": None, "fault": fault}


def livecodebench_tests(row: dict, private: list[dict]) -> dict:
    """Public and private tests together, with calls in JSON as they are published.

    Raises an error of any class for tests that do not decode.
    """
    cases = json.loads(row["public_test_cases"]) + private
    tests = {
        "inputs": [case["input"] for case in cases],
        "outputs": [case["output"] for case in cases],
    }
    kinds = {case["testtype"] for case in cases}
    if kinds == {"functional"}:
        tests["fn_name"] = json.loads(row["metadata"])["func_name"]
    elif kinds != {"stdin"}:
        raise ValueError(f"kinds of tests {kinds}")
    return tests


class TextOnly(pickle.Unpickler):
    """An unpickler that looks nothing up."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse every name."""
        raise pickle.UnpicklingError(f"names {module}.{name}")


def private_tests(text: str) -> list[dict]:
    """The list of private tests, from either of two encodings.

    They are plain JSON, or JSON that is pickled, compressed and written in base64.
    """
    try:
        cases = json.loads(text)
    except ValueError:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
        cases = json.loads(TextOnly(io.BytesIO(packed)).load())
    if not cases:
        raise ValueError("no tests")
    return cases


# ---- the sets ------------------------------------------------------------------------------------

TEST = "*test*.parquet"
SETS = [
    Benchmark("aime24", "math", 32, (90, 30), "AI-MO/aimo-validation-aime", "*.parquet",
              aime24_row),
    Benchmark("aime25", "math", 32, (30,), "opencompass/AIME2025", "*.jsonl", math_row),
    Benchmark("amc23", "math", 8, (40,), "math-ai/amc23", TEST, math_row),
    Benchmark("math500", "math", 1, (500,), "HuggingFaceH4/MATH-500", "test.jsonl", math_row),
    # The hub's file has 674 rows, the copies that other projects evaluate on have 675.
    Benchmark("olympiadbench", "math", 1, (674, 675), "Hothan/OlympiadBench",
              "*OE_TO_maths_en_COMP*.parquet", olympiad_row),
    Benchmark("humaneval", "code", 4, (164,), "openai/openai_humaneval", TEST, humaneval_row, 10.0),
    Benchmark("humaneval+", "code", 4, (164,), "evalplus/humanevalplus", TEST, humaneval_row, 30.0),
    Benchmark("mbpp", "code", 4, (378,), "evalplus/mbppplus", TEST,
              partial(mbpp_row, plus=False), 10.0),
    Benchmark("mbpp+", "code", 4, (378,), "evalplus/mbppplus", TEST,
              partial(mbpp_row, plus=True), 30.0),
    Benchmark("livecodebench", "code", 4, (175,), "livecodebench/code_generation_lite",
              "test6.jsonl", livecodebench_row, 60.0),
]  # fmt: skip
BENCHMARKS = {benchmark.name: benchmark for benchmark in SETS}
SUITES: dict[str, list[str]] = {"math": [], "code": []}
for benchmark in SETS:
    SUITES[benchmark.kind].append(benchmark.name)
ID_COLUMNS = ("task_id", "question_id", "unique_id", "id")  # what sets name a problem by


def load_sets(
    names: Sequence[str], data: Sequence[str], heldout: Callable[[], EvalSet]
) -> list[EvalSet]:
    """The benchmarks of these names and suites, from files or else from the hub.

    `data` is a list of NAME=FILE; `heldout` makes the set of that name, what a run held out. Raises
    BadInput.
    """
    known = ["heldout", *SUITES, *BENCHMARKS]
    files: dict[str, str | None] = {}
    for name in map(str.lower, names):
        if name not in known:
            raise BadInput(f"--bench {name}: no such benchmark; give {', '.join(known)}")
        for benchmark in SUITES.get(name, [name]):
            files[benchmark] = None
    for text in data:
        name, _, file = text.partition("=")
        if files.get(name, file) or name == "heldout" or not file:
            raise BadInput(
                f"--data {text}: give NAME=FILE, once for a NAME of --bench: {', '.join(files)}"
            )
        files[name] = file
    return [
        heldout() if name == "heldout" else load_benchmark(name, path)
        for name, path in files.items()
    ]


def load_benchmark(name: str, path: str | None = None) -> EvalSet:
    """A benchmark from a file, or from the hub without one; raises BadInput."""
    benchmark = BENCHMARKS[name]
    repo = benchmark.repo
    if path:
        blame = f"--data {name}={path}"
        rows = from_file(path, blame)
    else:
        blame = f"--bench {name}"
        remedy = f"give a local file with --data {name}=FILE"
        rows = from_hub(repo, benchmark.files, f"{blame}: {repo}", remedy)
    problems = []
    count = 0
    for count, row in enumerate(rows, 1):
        with bad_input_on_error(f"{blame}, row {count}", f"give the file of {repo}"):
            try:
                problem = benchmark.read(row)
            except KeyError as error:
                raise lacks(row, f'"{error.args[0]}"') from None
        if problem:
            ids = [str(row[column]) for column in ID_COLUMNS if column in row]
            problems.append({"id": " ".join([str(count), *ids])} | problem)
    if not problems:
        raise BadInput(f"{blame}: none of {count} rows is a problem of it; give the file of {repo}")
    notes = []
    if count not in benchmark.counts:
        expected = " or ".join(map(str, benchmark.counts))
        notes.append(f"WARNING: {name} has {count} rows, {expected} expected")
    faults = [problem["fault"] for problem in problems if "fault" in problem]
    if faults:
        notes.append(
            f"WARNING: {name}: {len(faults)} problems without a verdict (the first: {faults[0]})"
        )
    return EvalSet(name, benchmark.kind, benchmark.k, problems, benchmark.timeout_s, notes)
