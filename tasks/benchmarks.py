r"""The paper's ten benchmarks, and the embedded task's held-out set: what they are, and how they are loaded.

    load_benchmark("math500", ["file.jsonl"]) -> Loaded: problems and where they are from; without files: from the hub
    embedded(lines, kind, heldout, seed)
    names_of, files_of               -> what --bench and --bench-data name

Where each set comes from, how many problems it should have and its k (avg@k, Sec. 5.2) is in BENCHMARKS.
A file may be the hub's own, or another's with the same columns: JSON lines (.jsonl, also .gz), .json, .csv or
.parquet. A row without what its set must have is an error that names it; another number of problems is said aloud
(`Loaded.notes`), as it is then another benchmark.
  - AIME24: the hub's file holds three years; the 30 whose url says 2024 are kept.
  - MBPP and MBPP+ are one file, EvalPlus's 378 tasks: the paper cites EvalPlus for both. MBPP's tests are the
    `test_list`, which the prompt shows; MBPP+'s are the `test`, which it does not.
  - LiveCodeBench: `test6.jsonl` holds what version 6 added; WINDOW, the paper's, keeps contests from Feb to May 2025.
    Where a problem's tests cannot be decoded, its generations have no verdict (`infra_error`): never a pass or a zero.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from grading import sandbox
from tasks import toy
from tasks.problems import BadInput
from tasks.rows import (
    aime24_row,
    from_files,
    from_hub,
    humaneval_row,
    livecodebench_row,
    math_row,
    mbpp_row,
    olympiad_row,
)

WINDOW = ("2025-02-01", "2025-05-31")  # of LiveCodeBench's contests, both days included


@dataclass(frozen=True)
class Benchmark:
    """One of the sets: what it is, and how a row of its file becomes a problem."""

    name: str
    kind: str  # "math", "code" or "embedded"
    k: int  # samples a problem, the paper's
    counts: tuple[int, ...]  # numbers of rows that its published files have
    repo: str
    files: tuple[str, ...]  # patterns of file names on the hub; the first that some file fits is taken
    # {"problem", and "answer" or "tests"}; None: a row of another set. Raises ValueError, which says what is missing.
    read: Callable[[dict], dict | None]
    timeout_s: float = 5.0  # for one response


@dataclass(frozen=True)
class Loaded:
    """A benchmark's problems, {"id", "problem", and "answer" or "tests"}, and where they are from."""

    benchmark: Benchmark
    problems: list[dict]
    source: str
    revision: str  # the hub's commit, or the file's SHA-256, shortened
    window: str | None = None
    notes: list[str] = field(default_factory=list)
    max_tokens: float = math.inf  # a response that is longer cannot be right


PARQUET = ("*test*.parquet", "*test*.jsonl")
BENCHMARKS = {
    each.name: each
    for each in (
        Benchmark("aime24", "math", 32, (30,), "AI-MO/aimo-validation-aime", ("*.parquet",), aime24_row),
        Benchmark("aime25", "math", 32, (30,), "opencompass/AIME2025", ("*.jsonl",), math_row),
        Benchmark("amc23", "math", 8, (40,), "math-ai/amc23", PARQUET, math_row),
        Benchmark("math500", "math", 1, (500,), "HuggingFaceH4/MATH-500", ("test.jsonl",), math_row),
        # the hub's has 674, the copies that other projects evaluate on 675
        Benchmark(
            "olympiadbench",
            "math",
            1,
            (674, 675),
            "Hothan/OlympiadBench",
            ("*OE_TO_maths_en_COMP*.parquet",),
            olympiad_row,
        ),
        Benchmark("humaneval", "code", 4, (164,), "openai/openai_humaneval", PARQUET, humaneval_row, 10.0),
        Benchmark("humaneval+", "code", 4, (164,), "evalplus/humanevalplus", PARQUET, humaneval_row, 30.0),
        Benchmark("mbpp", "code", 4, (378,), "evalplus/mbppplus", PARQUET, partial(mbpp_row, plus=False), 10.0),
        Benchmark("mbpp+", "code", 4, (378,), "evalplus/mbppplus", PARQUET, partial(mbpp_row, plus=True), 30.0),
        # 175 rows before the window
        Benchmark(
            "livecodebench",
            "code",
            4,
            (175,),
            "livecodebench/code_generation_lite",
            ("test6.jsonl",),
            livecodebench_row,
            60.0,
        ),
        Benchmark("embedded", "embedded", 4, (), "toy.py", (), math_row),
    )
}
SUITES = {
    kind: [name for name, each in BENCHMARKS.items() if each.kind == kind] for kind in ("math", "code", "embedded")
}


def names_of(wanted: list[str]) -> list[str]:
    """Names of benchmarks from names and suites; raises BadInput."""
    names = []
    for name in map(str.lower, wanted):
        if name not in BENCHMARKS and name not in SUITES:
            raise BadInput(f"--bench {name}: no such benchmark; give {', '.join([*SUITES, *BENCHMARKS])}")
        names += SUITES.get(name, [name])
    return list(dict.fromkeys(names))


def check_sandbox(names: list[str], level: str) -> None:
    """Refuse to ask for programs that could not be run; raises BadInput."""
    if any(BENCHMARKS[name].kind == "code" for name in names):
        try:
            sandbox.choose_level(level)
        except sandbox.SandboxError as error:
            raise BadInput(f"--sandbox {level}: {error}; choose another level or another machine") from error


def files_of(given: list[str], names: list[str], flag: str = "--data") -> dict[str, list[str]]:
    """The files of each benchmark in a list of NAME=FILE; raises BadInput."""
    files = {}
    for text in given:
        name, _, file = text.partition("=")
        if name.lower() not in names or name.lower() == "embedded" or not file:
            raise BadInput(f"{flag} {text}: give NAME=FILE, with a NAME of --bench: {', '.join(names)}")
        files.setdefault(name.lower(), []).append(file)
    return files


def load_benchmark(name: str, paths: Sequence[str] = (), window: tuple[str, str] = WINDOW) -> Loaded:
    """A benchmark from files, or without any from the hub; raises BadInput."""
    benchmark = BENCHMARKS[name]
    blame = f"--data {name}={' '.join(paths)}" if paths else f"--bench {name}"
    source, revision, rows = from_files(paths, blame) if paths else from_hub(benchmark.repo, benchmark.files, blame)
    dated = name == "livecodebench"
    problems, number = [], 0
    for number, row in enumerate(rows, 1):
        if dated and isinstance(row, dict) and not window[0] <= str(row.get("contest_date"))[:10] <= window[1]:
            continue
        try:
            problem = benchmark.read(row if isinstance(row, dict) else {})
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{blame}, row {number}: {error}; give the file of {benchmark.repo}") from error
        if problem:
            given = next(
                (row[key] for key in ("task_id", "question_id", "unique_id", "id") if row.get(key) is not None), ""
            )
            problems.append({"id": f"{number} {given}".strip(), **problem})
    if not problems:
        raise BadInput(f"{blame}: none of {number} rows is a problem of it; give the file of {benchmark.repo}")
    notes, found = [], number if dated else len(problems)
    if found not in benchmark.counts:
        expected = " or ".join(map(str, benchmark.counts))
        notes.append(f"WARNING: {name} has {found} {'rows' if dated else 'problems'}, {expected} expected ({source})")
    faults = [problem for problem in problems if "fault" in problem]
    if faults:
        notes.append(f"WARNING: {name}: {len(faults)} problems without a verdict (the first: {faults[0]['fault']})")
    return Loaded(benchmark, problems, source, revision, f"{window[0]} to {window[1]}" if dated else None, notes)


def embedded(lines: int, kind: str, heldout: int, seed: int) -> Loaded:
    """The held-out problems that `train.py` makes with these settings."""
    _, problems = toy.make_problems(0, heldout, lines, kind, seed)
    problems = [{"id": str(number), **problem} for number, problem in enumerate(problems, 1)]
    source, limit = f"toy.py: {kind}, {lines} lines, seed {seed}", toy.response_tokens(lines)
    return Loaded(BENCHMARKS["embedded"], problems, source, f"{kind}-{lines}-{seed}", max_tokens=limit)
