"""From saved generations to tables, without a model: what `eval.py` prints.

    show(folder, args)   the tables of a folder's generations, printed and in its results.json
    replay(args)         a folder of generations from responses that were made elsewhere, graded here
    show_runs(args)      what `train.py --eval-every` wrote, and the choice of a checkpoint
    select(runs)         last and best checkpoint of each run
    share_kept(...)      what an interrupted evaluation has already

A file of `--replay` has a JSON object a line: "response" or "solution", and "answer" or "gold" (math) or "tests"
(code); "group" or "id" or "problem" tells problems apart; "benchmark", "seed" and "truncated" if there are such.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import transformers

from harness import checkpoint, evaluation, parallel, report, tables
from harness.evaluation import Protocol
from harness.parallel import Ranks
from rewards import Verdict, grade_all, grade_code, grade_math
from tasks.benchmarks import Loaded
from tasks.problems import BadInput
from tasks.rows import from_files

RESPONSE = ("response", "solution"), ("group", "id", "problem")  # keys in a file of --replay


def show(
    folder: Path, args: argparse.Namespace, models: list[str] | None = None, names: list[str] | None = None
) -> None:
    """Tables of the generations in a folder, printed and in its results.json; raises BadInput."""
    try:
        settings = json.loads((folder / "settings.json").read_text())
        rows = report.rows(folder / "generations.jsonl")
    except (OSError, ValueError) as error:
        raise BadInput(f"--from {folder}: cannot be read ({error}); give a folder that eval.py made") from error
    data, grouped = settings["data"], {}
    for row in rows:
        if (args.saved or args.replay or row["seed"] in args.seeds) and row["benchmark"] in (names or data):
            grouped.setdefault(row["model"], {}).setdefault(row["benchmark"], []).append(row)
    grouped = {name: grouped[name] for name in models or grouped}
    if not grouped:
        raise BadInput(f"--from {folder}: holds no generations yet; give another")
    found, passes = {}, tuple(args.pass_at)
    for model, by_name in grouped.items():
        found[model] = {name: tables.summarise(by_name[name], passes) for name in data if name in by_name}
        for name, result in found[model].items():
            seeds = {row["seed"] for row in by_name[name]}
            result["missing"] = data[name]["problems"] * data[name]["k"] * len(seeds) - len(by_name[name])
            short = {row["problem"] for row in by_name[name] if row.get("limit", math.inf) < data[name].get("limit", 0)}
            if short:
                print(f"NOTE: {model}, {name}: {len(short)} problems had a lower limit, to fit the model's context")
            if result["missing"]:
                print(f"WARNING: {model}, {name}: {result['missing']} samples are missing; finish it before reading on")
    first = next(iter(grouped))
    differences = {
        model: {name: tables.compare(grouped[first][name], by_name[name]) for name in by_name if name in grouped[first]}
        for model, by_name in grouped.items()
        if model != first
    }
    words = " ".join(f"{name}={value}" for name, value in settings["protocol"].items())
    print(f"{folder}/ | {words}")
    for model, result in found.items():
        about = settings["models"].get(model, {})
        backbone = args.paper or tables.backbone_of(about.get("origin", model))
        template = f" (template {about['template']})" if set(result) - {"embedded"} and about else ""
        print("\n".join(["", model + template, *tables.table(result, data, backbone)]))
    if len({about["template"] for about in map(settings["models"].get, grouped) if about}) > 1:
        print("WARNING: models were asked in different templates; give --template to compare them")
    alike = all(list(result) == list(found[first]) for result in found.values())
    if differences and alike:
        print("\n".join(["", "side by side", *tables.side_by_side(found, differences)]))
    chosen = None
    if args.select and alike:
        runs = {}
        for model, result in found.items():
            runs.setdefault(model.rpartition("/")[0], {})[model] = tables.average(result)[0]
        chosen = select(runs)
    whole = {**settings, "results": found, "differences": differences, "selection": chosen}
    checkpoint.write_whole(folder / "results.json", json.dumps(whole, indent=1) + "\n")


def select(runs: dict[str, dict[str, float]]) -> dict:
    """Print the last and the best benchmark average of each run's checkpoints, and their mean over the runs.

    A checkpoint whose average is NaN, as a set has no verdict, is left out; so is a run of none but such.
    """
    chosen = {}
    print("\nbenchmark average of each run: its last checkpoint's, and the best, which is SELECTED ON THE TEST SETS")
    for run, averages in runs.items():
        known = {name: average for name, average in averages.items() if not math.isnan(average)}
        without = f" ({len(averages) - len(known)} without an average)" if len(known) < len(averages) else ""
        if not known:
            print(f"  {run}: none of {len(averages)} has an average")
            continue
        last, best = list(known)[-1], max(known, key=known.get)
        chosen[run] = {"last": last, "last_average": known[last], "best": best, "best_average": known[best]}
        parts = (f"{which} {tables.percent(known[name])} ({name})" for which, name in (("last", last), ("best", best)))
        print(f"  {run}: {'; '.join(parts)}, of {len(averages)}{without}")
    if len(chosen) > 1:
        for which in ("last", "best"):
            values = [each[f"{which}_average"] for each in chosen.values()]
            spread = tables.percent(float(np.mean(values)), float(np.std(values, ddof=1)))
            print(f"  {which}, mean ± standard deviation of {len(chosen)} runs: {spread}")
    return chosen


def show_runs(args: argparse.Namespace) -> None:
    """The benchmark averages that `train.py --eval-every` wrote, step by step, and the choice; raises BadInput."""
    runs = {}
    for name in args.runs:
        try:
            rows = [row for row in report.rows(Path(name) / "metrics.jsonl") if "bench" in row]
        except (OSError, ValueError) as error:
            raise BadInput(f"--runs {name}: cannot be read ({error}); give a run's folder") from error
        if not rows:
            raise BadInput(f"--runs {name}: has no benchmarks in metrics.jsonl; train with --eval-every and --bench")
        runs[name] = {f"step {row['step']}": tables.average(row["bench"])[0] for row in rows}
        head = ["step", *rows[0]["bench"], "average"]
        body = []
        for row in rows:
            pairs = [(each["mean"], each["error"]) for each in row["bench"].values()] + [tables.average(row["bench"])]
            body.append([str(row["step"]), *(tables.percent(*pair) for pair in pairs)])
        print("\n".join(["", name, *tables.lay_out(head, body)]))
    select(runs)


def replay(args: argparse.Namespace) -> Path:
    """Grade the responses of a file as if they had been generated here; returns the folder. Raises BadInput."""
    rows, references, data = [], [], {}
    given = from_files([args.replay], f"--replay {args.replay}")
    for number, row in enumerate(given[2], 1):
        row = row if isinstance(row, dict) else {}
        response, problem = (next((row[key] for key in keys if key in row), None) for keys in RESPONSE)
        reference = next((row[key] for key in ("tests", "answer", "gold") if key in row), None)
        if not isinstance(response, str) or problem is None or reference is None:
            raise BadInput(
                f'--replay {args.replay}, row {number}: needs "response", "problem", and "answer" or "tests"'
            )
        place = {
            "model": row.get("model", "replay"),
            "benchmark": row.get("benchmark", "replay"),
            "seed": row.get("seed", 0),
        }
        rows.append({**place, "problem": str(problem), "response": response, "truncated": bool(row.get("truncated"))})
        references.append(reference)
    options = {"timeout_s": args.grade_timeout} if args.grade_timeout else {}

    def grade(response: str, reference) -> Verdict:
        if isinstance(reference, dict):
            return grade_code(response, reference, level=args.sandbox, **options)
        return grade_math(response, str(reference), **options)

    verdicts = grade_all(grade, [row["response"] for row in rows], references)
    for row, verdict in zip(rows, verdicts, strict=True):
        row["score"], row["reason"] = (0.0, "truncated") if row.pop("truncated") else verdict
    for name in dict.fromkeys(row["benchmark"] for row in rows):
        mine = [row for row in rows if row["benchmark"] == name]
        problems, sources = ({row[key] for row in mine} for key in ("problem", "seed"))
        each = len(mine) // (len(problems) * len(sources) * len({row["model"] for row in mine}))
        data[name] = {"k": each, "problems": len(problems), "source": given[0], "revision": given[1], "window": None}
    folder = Path(args.out or f"evals/replay-{Path(args.replay).stem}")
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"protocol": {"replayed": args.replay}, "data": data, "models": {}}
    checkpoint.write_whole(folder / "settings.json", json.dumps(settings, indent=1) + "\n")
    checkpoint.write_whole(folder / "generations.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return folder


# ---- what is there already ----------------------------------------------------------------------------------


def share_kept(folder: Path, settings: dict, sets: list[Loaded], protocol: Protocol, ranks: Ranks) -> list[dict]:
    """`prepare_folder` on one rank for all; raises BadInput on all."""
    kept, problem = [], None
    if ranks.main:
        try:
            kept = prepare_folder(folder, settings, sets, protocol)
        except BadInput as error:
            problem = str(error)
    kept, problem = parallel.gather((kept, problem), ranks)[0]
    if problem:
        raise BadInput(problem)
    return kept


def prepare_folder(folder: Path, settings: dict, sets: list[Loaded], protocol: Protocol) -> list[dict]:
    """settings.json, and the whole blocks that are there already, without their texts; raises BadInput."""
    path = folder / "settings.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old = (
            json.loads(path.read_text())
            if path.exists()
            else {"protocol": settings["protocol"], "data": {}, "models": {}}
        )
    except (OSError, ValueError) as error:
        raise BadInput(f"--out {folder}: cannot be used ({error}); choose another") from error
    pairs = [
        (f"{part} {name}", value, old[part].get(name, value))
        for part in old
        if part != "versions"
        for name, value in settings[part].items()
    ]
    for what, new, before in pairs:
        if new != before:
            raise BadInput(f"--out {folder}: holds generations of {what} {before}, not {new}; choose another --out")
    merged = {part: {**old[part], **settings[part]} for part in ("protocol", "data", "models")}
    merged["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    checkpoint.write_whole(path, json.dumps(merged, indent=1) + "\n")
    generations = folder / "generations.jsonl"
    if not generations.exists():
        return []
    sizes = {}
    for loaded in sets:
        for number, block in enumerate(evaluation.blocks_of(loaded, protocol)):
            sizes[loaded.benchmark.name, number] = len(block) * evaluation.samples_of(loaded, protocol)
    rows, counts = report.rows(generations), {}
    for row in rows:
        key = row["model"], row["benchmark"], row["seed"], row["block"]
        counts[key] = counts.get(key, 0) + 1
    whole = {key for key, count in counts.items() if count == sizes.get((key[1], key[3]), count)}
    kept = [row for row in rows if (row["model"], row["benchmark"], row["seed"], row["block"]) in whole]
    checkpoint.write_whole(generations, "".join(json.dumps(row) + "\n" for row in kept))
    return [{name: value for name, value in row.items() if name not in ("response",)} for row in kept]
