"""Grade responses that were made elsewhere, as if eval.py had generated them.

    python -m lab.tools.replay FILE                # into evals/replay-FILE, and eval.py's table
    python -m lab.tools.replay FILE --out FOLDER   # a folder in which only such files are graded

A line of the file has "problem" (text or a whole number), "response" (text), and "answer" (text or
a number) or "tests" (an object or its JSON text). Optional are "model" and "benchmark" (text),
"seed" (a whole number) and "truncated" (true or false). In a CSV all of them are text. Values of
another type are refused. Grading the same file again changes nothing.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import tyro

from base import files
from base.config import Sandbox
from base.errors import BadInput, bad_input_on_error
from eval import print_table
from harness.generations import GENERATIONS, read_generations
from lab.tools.command import command
from rewards import Verdict, grade_all, style_of
from tasks.readings import read_answer
from tasks.rows import from_file, lacks
from tasks.task import grader

# The types of what a row may have, besides "tests".
RESPONSE = {
    "problem": str | int,
    "response": str,
    "answer": str | int | float,
    "model": str,
    "benchmark": str,
    "seed": int,
    "truncated": bool,
}
# What else a CSV's text may be.
CELLS: dict[str, Callable[[str], object]] = {
    "seed": int,
    "truncated": lambda text: json.loads(text.lower()),
    "tests": json.loads,
}


def replay(
    file: tyro.conf.Positional[Path],
    *,
    out: Path | None = None,
    grade_timeout: float | None = None,
    sandbox: Sandbox = "auto",
) -> None:
    """Grade the responses of a file, into the folder `out`, and print the table."""
    rows = grade_file(str(file), grade_timeout, sandbox)
    folder = out or Path("evals", f"replay-{file.stem}")
    with files.locked_folder(folder):
        there = read_generations(folder) if (folder / GENERATIONS).exists() else []
        if any(row["settings"].get("replayed") != str(file) for row in there):
            raise BadInput(f"--out {folder}: has generations of others; choose another")
        files.write_rows(folder / GENERATIONS, rows)
    print_table(rows)


def grade_file(path: str, timeout_s: float | None, level: str) -> list[dict]:
    """The rows of a file with their verdicts, as those of generations.jsonl; raises BadInput."""
    needed = 'a row has "problem", "response", and "answer" or "tests": lab/tools/README.md'
    defaults = dict(model="replay", benchmark="replay", seed=0, truncated=False)
    lines = []
    for number, row in enumerate(from_file(path, path), 1):
        with bad_input_on_error(f"{path}, row {number}", needed):
            line = with_types(row)
            check_response(line)
        lines.append(defaults | line | {"problem": str(line["problem"])})
    if not lines:
        raise BadInput(f"{path}: has no rows; give another file")

    kinds = {"code" if "tests" in line else "math" for line in lines}
    graders = {kind: grader(kind, timeout_s, level) for kind in kinds}

    def grade(response: str, line: dict) -> Verdict:
        if "tests" in line:
            return graders["code"](response, line["tests"])
        return graders["math"](response, str(read_answer(line["answer"])))

    verdicts = grade_all(grade, [line["response"] for line in lines], lines)
    for line, verdict in zip(lines, verdicts, strict=True):
        if line["truncated"]:
            verdict = Verdict(0.0, "truncated")
        line |= {"score": verdict.reward, "reason": verdict.reason}
    return list(as_generated(lines, path))


def as_generated(lines: list[dict], path: str) -> Iterator[dict]:
    """The rows of graded lines with what a row of generations.jsonl has."""
    problems = defaultdict(set)  # of each benchmark
    samples: dict[str, Counter] = defaultdict(Counter)  # benchmark -> model, seed, problem -> lines
    sizes: Counter[tuple] = Counter()  # lines of a model on a benchmark, by seed
    for line in lines:
        problems[line["benchmark"]].add(line["problem"])
        samples[line["benchmark"]][line["model"], line["seed"], line["problem"]] += 1
        sizes[line["benchmark"], line["model"], line["seed"]] += 1
    for line in lines:
        name = line["benchmark"]
        yield {
            "model": line["model"],
            "weights": "",
            "set": name,
            "settings": {
                "replayed": path,
                "problems": len(problems[name]),
                "k": max(samples[name].values()),
                "max_tokens": 0,
            },
            "seed": line["seed"],
            "block": 0,
            "of": sizes[name, line["model"], line["seed"]],
            "problem": line["problem"],
            "score": line["score"],
            "reason": line["reason"],
            "limit": 0,
            "response": line["response"],
        }


def with_types(row: dict) -> dict:
    """The cells of a row that are not empty; those of a CSV, which are text, have their types."""
    kept = {"response": row.get("response")} if row.get("response") == "" else {}
    line = kept | {name: value for name, value in row.items() if value not in (None, "")}
    for name, types in CELLS.items():
        if isinstance(line.get(name), str):
            line[name] = types(line[name])
    return line


def check_response(line: dict) -> None:
    """Raise ValueError for a row that lacks something, or has it of another type."""
    for name, kind in RESPONSE.items():
        if name in line and not isinstance(line[name], kind):
            raise ValueError(f'"{name}" is {json.dumps(line[name])[:60]}')
    if not {"problem", "response"} <= line.keys():
        raise lacks(line, '"problem" and "response"')
    if "tests" in line or "answer" not in line:
        style_of(line.get("tests"))
    else:
        read_answer(line["answer"])


main = command("lab.tools.replay", replay)

if __name__ == "__main__":
    sys.exit(main())
