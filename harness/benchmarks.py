r"""The paper's ten benchmarks, and the embedded task's held-out set: loading them, and evaluating a model on them.

    loaded = load("math500", ["file.jsonl"])                             # without files: from the hub
    evaluate(model, tokenizer, loaded, Protocol(), ranks, name="..")    # a row a generation, with its verdict

**Sets.** Where each comes from, how many problems it should have and its k (avg@k, Sec. 5.2) is in BENCHMARKS.
A file may be the hub's own, or another's with the same columns: JSON lines (.jsonl, also .gz), .json, .csv or
.parquet. A row without what its set must have is an error that names it; another number of problems is said aloud
(`Loaded.notes`), as it is then another benchmark.
  - AIME24: the hub's file holds three years; the 30 whose url says 2024 are kept.
  - MBPP and MBPP+ are one file, EvalPlus's 378 tasks: the paper cites EvalPlus for both. MBPP's tests are the
    `test_list`, which the prompt shows; MBPP+'s are the `test`, which it does not.
  - LiveCodeBench: `test6.jsonl` holds what version 6 added; WINDOW, the paper's, keeps contests from Feb to May 2025.
    Where a problem's tests cannot be decoded, its generations have no verdict (`infra_error`): never a pass or a zero.

**Protocol** (Sec. 5.2, App. J): temperature 0.1, no top-p, 3,000 tokens, templates and instruction as in training.
A response that is cut off scores 0, as in training. Where prompt and limit exceed the model's context, the limit of
that problem is lower (each row says its own); it is not left out.

**Order.** Problems go in blocks, and random numbers depend on (seed, benchmark, block) alone: not on what ran
before, and not on the number of processes, which take the blocks in turn. So whole blocks are what is kept.

Left out: few-shot prompts, majority votes, OlympiadBench's tolerance (one row has one), half-finished blocks.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from grading import sandbox
from grpo import rollout
from harness import parallel, tables
from harness.parallel import Ranks
from rewards import Verdict, grade_code, grade_math
from tasks import toy
from tasks.problems import INSTRUCTIONS, BadInput, Task, choose_template, render
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

    def about(self, protocol: "Protocol") -> dict:
        """For tables and files."""
        text = json.dumps([[p["id"], p["problem"], p.get("answer", p.get("tests"))] for p in self.problems])
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        about = dict(k=samples_of(self, protocol), limit=min(protocol.max_tokens, self.max_tokens))
        about |= dict(problems=len(self.problems), source=self.source, digest=digest)
        return {**about, "revision": self.revision, "window": self.window}


@dataclass(frozen=True)
class Protocol:
    """How responses are sampled and graded; the defaults are the paper's."""

    temperature: float = 0.1  # 0: greedy
    max_tokens: int = 3000
    samples: int = 0  # a problem; 0: the benchmark's k
    template: str = "auto"
    block: int = 128  # responses that are sampled, graded and kept together
    grade_timeout: float | None = None  # None: the benchmark's
    sandbox: str = "auto"


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


# ---- loading --------------------------------------------------------------------------------------------------


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


def load(name: str, paths: Sequence[str] = (), window: tuple[str, str] = WINDOW) -> Loaded:
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


# ---- evaluating -----------------------------------------------------------------------------------------------


def evaluate(
    model,
    tokenizer,
    loaded: Loaded,
    protocol: Protocol,
    ranks: Ranks,
    *,
    name: str,
    seeds: Sequence[int] = (0,),
    sampling: dict | None = None,
    done: Iterable[dict] = (),
    write: Callable[[list[dict]], None] | None = None,
) -> list[dict]:
    """Generations with their verdicts, on every rank: those of the blocks in `done`, and the others, made now.

    `name` is the model's, for its template; `sampling` is what `prepare.sampling_of` returns. `write` gets the rows
    of some blocks as soon as they are made, on rank 0.
    """
    task, context = as_task(loaded, protocol, tokenizer, name), context_of(model)
    samples = samples_of(loaded, protocol)
    blocks, rows = blocks_of(loaded, protocol), list(done)
    have = {(row["seed"], row["block"]) for row in rows}
    todo = [(seed, number) for seed in seeds for number in range(len(blocks)) if (seed, number) not in have]
    total = len(loaded.problems) * samples * len(seeds)
    with tqdm(
        total=total, initial=len(rows), desc=loaded.benchmark.name, unit="response", leave=False, disable=None
    ) as bar:
        for start in range(0, len(todo), ranks.world):
            made = []
            if start + ranks.rank < len(todo):
                seed, number = todo[start + ranks.rank]
                torch.manual_seed(seed_of(seed, loaded.benchmark.name, number))
                limits = dict(samples=samples, context=context, sampling=sampling or {})
                made = attempt(model, tokenizer, task, blocks[number], protocol, loaded.max_tokens, **limits)
                made = [{"benchmark": loaded.benchmark.name, "seed": seed, "block": number, **row} for row in made]
            made = [row for part in parallel.gather(made, ranks) for row in part]
            if write and ranks.main:
                write(made)
            rows += made
            bar.update(len(made))
            bar.set_postfix_str("score " + tables.percent(*tables.avg_at_k(rows)))
    return rows


def evaluate_all(
    model,
    tokenizer,
    sets: list[Loaded],
    protocol: Protocol,
    ranks: Ranks,
    *,
    name: str,
    seed: int,
    sampling: dict,
    path: Path,
) -> dict[str, dict]:
    """The numbers of a table on each of several sets; generations go to the file `path`, which is begun anew."""
    if ranks.main:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)

    def write(rows: list[dict]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    results = {}
    for loaded in sets:
        options = dict(name=name, seeds=[seed], sampling=sampling, write=write)
        rows = evaluate(model, tokenizer, loaded, protocol, ranks, **options)
        about = {"revision": loaded.revision, "window": loaded.window}
        results[loaded.benchmark.name] = {**tables.summarise(rows), **about}
    return results


def blocks_of(loaded: Loaded, protocol: Protocol) -> list[list[dict]]:
    """The problems, as many together as make about `block` responses."""
    size = max(1, protocol.block // samples_of(loaded, protocol))
    return [loaded.problems[start : start + size] for start in range(0, len(loaded.problems), size)]


def samples_of(loaded: Loaded, protocol: Protocol) -> int:
    """Responses to a problem."""
    return protocol.samples or loaded.benchmark.k


def seed_of(seed: int, name: str, block: int) -> int:
    """Of a block's random numbers."""
    return int(np.random.SeedSequence([seed, block, *name.encode()]).generate_state(1)[0])


def as_task(loaded: Loaded, protocol: Protocol, tokenizer, name: str) -> Task:
    """The benchmark as training sees problems: prompts, and verdicts by the same graders."""
    kind, options = loaded.benchmark.kind, {"timeout_s": protocol.grade_timeout or loaded.benchmark.timeout_s}
    if kind == "code":
        grade, reference = partial(grade_code, level=protocol.sandbox, **options), "tests"
    else:
        grade, reference = partial(grade_math, **options), "answer"
    if kind == "embedded":
        if len(tokenizer) != len(toy.SYMBOLS):
            raise BadInput(f"--bench embedded: {name} is not a model of the embedded task; give other benchmarks")
        return Task(kind, [], loaded.problems, lambda problem: problem["problem"], grade)
    template = choose_template(protocol.template, name, tokenizer)
    prompt = lambda problem: render(template, problem["problem"], INSTRUCTIONS[kind], tokenizer)  # noqa: E731
    return Task(kind, [], loaded.problems, prompt, grade, reference)


def context_of(model) -> float:
    """Tokens of prompt and response that the model was made for."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf


def attempt(
    model, tokenizer, task: Task, problems: list[dict], protocol: Protocol, most: float, *, samples, context, sampling
) -> list[dict]:
    """`samples` graded responses to each problem of a block."""
    lengths = [len(ids) for ids in tokenizer(list(map(task.prompt, problems)), add_special_tokens=False)["input_ids"]]
    limits = [int(min(protocol.max_tokens, most, context - length)) for length in lengths]
    rows = []
    for limit, group in itertools.groupby(sorted(zip(limits, problems, strict=True), key=itemgetter(0)), itemgetter(0)):
        group = [problem for _, problem in group]
        if limit < 1:  # the prompt alone fills the context
            full = Verdict(0.0, "truncated")
            rows += [row_of(problem, s, "", full, 0, 0) for problem in group for s in range(samples)]
            continue
        prompts = [task.prompt(problem) for problem in group]
        options = dict(max_tokens=limit, temperature=protocol.temperature, **sampling)
        rollouts = rollout(model, tokenizer, prompts, samples, **options)
        verdicts, tokens = task.verdicts(group, rollouts), rollouts.mask.sum(1).tolist()
        for place, text in enumerate(rollouts.texts):
            rows.append(row_of(group[place // samples], place % samples, text, verdicts[place], tokens[place], limit))
    order = {problem["id"]: place for place, problem in enumerate(problems)}
    return sorted(rows, key=lambda row: order[row["problem"]])


def row_of(problem: dict, sample: int, text: str, verdict: Verdict, tokens: int, limit: int) -> dict:
    """A generation, for a file; without a verdict where the problem has no tests, even if it was cut off."""
    verdict = Verdict(None, "infra_error") if problem.get("fault") else verdict
    return {
        "problem": problem["id"],
        "sample": sample,
        "score": verdict.score,
        "reason": verdict.reason,
        "tokens": tokens,
        "limit": limit,
        "response": text,
    }
