"""Grade responses that were made elsewhere, as if eval.py had generated them.

    python -m lab.tools.replay FILE                # into evals/replay-FILE, and eval.py's tables
    python -m lab.tools.replay FILE --out FOLDER   # a folder in which only such files are graded

A line of the file has "problem" (text or a whole number), "response" (text), and "answer" (text or
a number) or "tests" (an object). Optional are "model" and "benchmark" (text), "seed" (a whole
number) and "truncated" (true or false). Values of another type are refused. Grading the same file
again changes nothing.
"""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import torch
import tyro

from eval import add_settings, show
from grading.readings import read_answer
from harness import files
from harness.config import PathFlag
from harness.run import Ranks
from lab.tools.command import command
from rewards import Verdict, grade_all, style_of
from tasks.errors import BadInput, bad_input_on_error
from tasks.problems import grader
from tasks.rows import from_file, lacks
from tasks.settings import Sandbox, Seconds

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


def replay(
    file: tyro.conf.Positional[PathFlag],
    *,
    out: PathFlag | None = None,
    grade_timeout: Seconds = None,
    sandbox: Sandbox = "auto",
) -> None:
    """Grade the responses of a file, into the folder `out`, and print the tables."""
    rows, data = grade_file(str(file), grade_timeout, sandbox)
    models = {row["model"]: {"origin": row["model"], "template": "unknown"} for row in rows}
    settings = {"protocol": {"replayed": str(file)}, "data": data, "models": models}
    folder = out or Path("evals", f"replay-{file.stem}")
    with files.locked_folder(folder, Ranks(0, 1, torch.device("cpu")), "settings.json"):
        add_settings(folder, settings)
        files.write_rows(folder / "generations.jsonl", rows)
    show(folder)


def grade_file(path: str, timeout_s: float | None, level: str) -> tuple[list[dict], dict]:
    """The rows of a file with their verdicts, and a description of each benchmark.

    Raises BadInput.
    """
    needed = 'a row has "problem", "response", and "answer" or "tests": docs/evaluation.md'
    defaults = dict(model="replay", benchmark="replay", seed=0, truncated=False)
    lines = []
    for number, row in enumerate(from_file(path, path), 1):
        line = {name: value for name, value in row.items() if value is not None}
        with bad_input_on_error(f"{path}, row {number}", needed):
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
    rows = []
    answered: Counter[tuple] = Counter()  # responses of a model to a problem, by seed
    problems = defaultdict(set)  # of each benchmark
    for line, verdict in zip(lines, verdicts, strict=True):
        if line["truncated"]:
            verdict = Verdict(0.0, "truncated")
        row = {name: line[name] for name in ("model", "benchmark", "seed", "problem")}
        key = tuple(row.values())
        row |= {"response": line["response"], "block": 0, "sample": answered[key]}
        rows.append(row | {"score": verdict.reward, "reason": verdict.reason})
        answered[key] += 1
        problems[line["benchmark"]].add(line["problem"])
    data = {}
    for name, of_set in problems.items():
        data[name] = {
            "k": max(count for key, count in answered.items() if key[1] == name),
            "problems": len(of_set),
            "source": path,
            "revision": "",
            "window": None,
        }
    return rows, data


def check_response(line: dict) -> None:
    """Raise ValueError for a row that lacks something, or has it of another type."""
    for name, kind in RESPONSE.items():
        if name in line and not isinstance(line[name], kind):
            raise ValueError(f'"{name}" is {json.dumps(line[name])[:60]}')
    if not {"problem", "response"} <= line.keys():
        raise lacks(line, '"problem" and "response"')
    if "tests" in line or "answer" not in line:
        style_of(line.get("tests"))


main = command("lab.tools.replay", replay)

if __name__ == "__main__":
    sys.exit(main())
