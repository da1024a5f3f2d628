"""Grade responses that were made elsewhere, as if eval.py had generated them.

python -m lab.tools.replay FILE [FOLDER]     # evals/replay-FILE, and eval.py's tables
"""

import json
import sys
from pathlib import Path

import pandas as pd
import torch

from eval import add_settings, show
from grading.readings import read_answer
from harness import files
from harness.run import Ranks
from rewards import Verdict, grade_all, style_of
from tasks.errors import BadInput, bad_input_on_error
from tasks.problems import grader
from tasks.rows import from_files, lacks

# The types of what a row of --replay may have, besides "tests".
RESPONSE = {
    "problem": str | int,
    "response": str,
    "answer": str | int | float,
    "model": str,
    "benchmark": str,
    "seed": int,
    "truncated": bool,
}


def replay(file: str, out: str = "") -> Path:
    """Grade the responses of a file as if they had been generated here; return the folder.

    Raises BadInput.
    """
    rows, data = grade_file(file, None, "auto")
    models = {row["model"]: {"origin": row["model"], "template": "unknown"} for row in rows}
    settings = {"protocol": {"replayed": file}, "data": data, "models": models}
    folder = Path(out or f"evals/replay-{Path(file).stem}")
    with files.locked_folder(folder, Ranks(0, 1, torch.device("cpu")), "settings.json"):
        add_settings(folder, settings)
        files.write_rows(folder / "generations.jsonl", rows)
    return folder


def grade_file(path: str, timeout_s: float | None, level: str) -> tuple[list[dict], dict]:
    """The rows of a `--replay` file with their verdicts, and a description of each benchmark.

    A line has "problem", "response", and "answer" (math) or "tests" (code); "model", "benchmark",
    "seed" and "truncated" are optional. Raises BadInput.
    """
    source, revision, table = from_files([path], f"--replay {path}")
    needed = 'a row has "problem", "response", and "answer" or "tests": docs/evaluation.md'
    defaults = dict(model="replay", benchmark="replay", seed=0, truncated=False)
    lines = []
    for number, row in enumerate(table, 1):
        line = {name: value for name, value in row.items() if value is not None}
        with bad_input_on_error(f"--replay {path}, row {number}", needed):
            check_response(line)
        lines.append(defaults | line | {"problem": str(line["problem"])})
    if not lines:
        raise BadInput(f"--replay {path}: has no rows; give another file")

    kinds = {"code" if "tests" in line else "math" for line in lines}
    graders = {kind: grader(kind, timeout_s, level) for kind in kinds}

    def grade(response: str, line: dict) -> Verdict:
        if "tests" in line:
            return graders["code"](response, line["tests"])
        return graders["math"](response, str(read_answer(line["answer"])))

    verdicts = grade_all(grade, [line["response"] for line in lines], lines)
    rows = []
    for line, verdict in zip(lines, verdicts, strict=True):
        if line["truncated"]:
            verdict = Verdict(0.0, "truncated")
        row = {name: line[name] for name in ("model", "benchmark", "seed", "problem", "response")}
        rows.append(row | {"block": 0, "score": verdict.reward, "reason": verdict.reason})
    graded = pd.DataFrame(rows)
    # the number of each response among those to its problem
    graded["sample"] = graded.groupby(["model", "benchmark", "seed", "problem"]).cumcount()
    data = {}
    for name, of_set in graded.groupby("benchmark"):
        data[name] = {
            "k": int(of_set["sample"].max()) + 1,
            "problems": of_set["problem"].nunique(),
            "source": source,
            "revision": revision,
            "window": None,
        }
    return graded.to_dict("records"), data


def check_response(line: dict) -> None:
    """Raise ValueError for a row of --replay that lacks something, or has it of another type."""
    for name, kind in RESPONSE.items():
        if name in line and not isinstance(line[name], kind):
            raise ValueError(f'"{name}" is {json.dumps(line[name])[:60]}')
    if not {"problem", "response"} <= line.keys():
        raise lacks(line, '"problem" and "response"')
    if "tests" in line or "answer" not in line:
        style_of(line.get("tests"))


if __name__ == "__main__":
    show(replay(*sys.argv[1:3]))
