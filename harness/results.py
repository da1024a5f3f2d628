"""From saved generations to tables, without a model: what `eval.py` prints.

    show(folder, args)   the tables of a folder's generations, printed and in its results.json
    replay(args)         a folder of generations from responses that were made elsewhere, graded here
    show_runs(args)      what `train.py --eval-every` wrote, and the choice of a checkpoint
    select(runs)         last and best checkpoint of each run
    prepare_folder(...)  what an interrupted evaluation has already

A file of `--replay` has a JSON object a line: "response" or "solution", and "answer" or "gold" (math) or "tests"
(code); "group" or "id" or "problem" tells problems apart; "benchmark", "seed" and "truncated" if there are such.
"""

import argparse
import contextlib
import json
import math
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import transformers

from harness import checkpoint, evaluation, folders, tables
from harness.config import Protocol, refuse_other_settings
from harness.models import origin_of
from harness.parallel import Ranks
from rewards import Verdict, grade_all
from tasks.benchmarks import Loaded
from tasks.problems import BadInput, grader
from tasks.rows import from_files

SETTINGS = {"protocol": dict, "data": dict, "models": dict}  # of settings.json
ABOUT = {"k": int, "problems": int, "revision": str}  # of a benchmark in "data"
OPTIONAL = {"model": str, "benchmark": str, "seed": int, "truncated": bool}  # of a row of --replay
ROW = dict(model=str, benchmark=str, seed=int, problem=str | int, score=int | float | None, reason=str)  # a generation


def show(
    folder: Path, args: argparse.Namespace, models: list[str] | None = None, names: list[str] | None = None
) -> None:
    """Tables of the generations in a folder, printed and in its results.json; raises BadInput.

    `models` and `names` of benchmarks choose and order what is shown; all of it if not given.
    """
    settings = folders.settings_in(folder / "settings.json", SETTINGS)
    if not all(folders.has(about, ABOUT) for about in settings["data"].values()):
        raise BadInput(f"{folder / 'settings.json'}: says too little of its data; restore it, or choose another folder")
    rows = folders.rows(folder / "generations.jsonl", ROW)
    data, generations = settings["data"], {}  # model -> benchmark -> rows
    for row in rows:
        if (args.saved or args.replay or row["seed"] in args.seeds) and row["benchmark"] in (names or data):
            generations.setdefault(row["model"], {}).setdefault(row["benchmark"], []).append(row)
    generations = {model: generations[model] for model in models or generations}
    if not generations:
        raise BadInput(f"--from {folder}: holds no generations yet; give another")
    first = next(iter(generations))
    results, differences = {}, {}
    for model, by_name in generations.items():
        results[model] = {}
        for name in data:  # one order for all models
            if name in by_name:
                results[model][name] = summary_of(model, name, by_name[name], data[name], args.pass_at)
        if model != first:
            shared = [name for name in by_name if name in generations[first]]
            differences[model] = {name: tables.compare(generations[first][name], by_name[name]) for name in shared}
    print_tables(folder, settings, results, differences, args.paper)
    chosen = None
    if args.select and same_benchmarks(results):
        runs = {}
        for model, result in results.items():
            runs.setdefault(model.rpartition("/")[0], {})[model] = result
        origin = settings["models"].get(first, {}).get("origin", first)
        chosen = select(runs, args.paper or tables.backbone_of(origin))
    whole = {**settings, "results": results, "differences": differences, "selection": chosen}
    checkpoint.write_json(folder / "results.json", whole)


def summary_of(model: str, name: str, rows: list[dict], about: dict, passes: list[int]) -> dict:
    """`tables.summarise` of a model on a benchmark, and how many samples are missing, which is printed, too."""
    result = tables.summarise(rows, passes)
    seeds = {row["seed"] for row in rows}
    result["missing"] = about["problems"] * about["k"] * len(seeds) - len(rows)
    short = {row["problem"] for row in rows if row.get("limit", math.inf) < about.get("limit", 0)}
    if short:
        print(f"NOTE: {model}, {name}: {len(short)} problems had a lower limit, to fit the model's context")
    if result["missing"]:
        print(f"WARNING: {model}, {name}: {result['missing']} samples are missing; finish it before reading on")
    return result


def same_benchmarks(results: dict[str, dict]) -> bool:
    """Whether all models have been asked the same sets."""
    return len({tuple(result) for result in results.values()}) == 1


def print_tables(folder: Path, settings: dict, results: dict, differences: dict, paper: str | None) -> None:
    """Protocol and data, a table a model, and several models side by side; `paper` names whose numbers stand beside."""
    protocol = " ".join(f"{name}={value}" for name, value in settings["protocol"].items() if value is not None)
    shown = {name: about for name, about in settings["data"].items() if any(name in each for each in results.values())}
    print("\n".join([f"{folder}/", protocol, "", *tables.data_table(shown)]))
    templates = set()
    for model, result in results.items():
        about = settings["models"].get(model, {})
        heading = model
        if about:
            templates.add(about["template"])
            if set(result) != {"embedded"}:
                heading += f" (template {about['template']})"
        backbone = paper or tables.backbone_of(about.get("origin", model))
        print("\n".join([heading, "", *tables.table(result, settings["data"], backbone)]))
    if len(templates) > 1:
        print("WARNING: models were asked in different templates; give --template to compare them")
    if differences and same_benchmarks(results):
        print("\n".join(["side by side", "", *tables.side_by_side(results, differences)]))


def select(runs: dict[str, dict[str, dict]], backbone: str | None) -> dict:
    """Print the last and the best benchmark average of each run's checkpoints, then Table 1's mean over the runs.

    `runs` holds each checkpoint's results by benchmark. A checkpoint whose average is NaN, as a set has no verdict, is
    left out; so is a run of none but such.
    """
    chosen, best_results = {}, []
    print("benchmark average of each run at its last checkpoint, and at the best, SELECTED ON THE TEST SETS")
    for run, checkpoints in runs.items():
        averages = {name: tables.average(results)[0] for name, results in checkpoints.items()}
        graded = {name: average for name, average in averages.items() if not math.isnan(average)}
        if not graded:
            print(f"  {run}: none of {len(averages)} has an average")
            continue
        last, best = list(graded)[-1], max(graded, key=graded.get)
        best_results.append(checkpoints[best])
        chosen[run] = {"last": last, "last_average": graded[last], "best": best, "best_average": graded[best]}
        both = [f"{tables.percent(graded[name])} ({name.removeprefix(run + '/')})" for name in (last, best)]
        without = f" ({len(averages) - len(graded)} without an average)" if len(graded) < len(averages) else ""
        print(f"  {run}: last {both[0]}; best {both[1]}, of {len(averages)}{without}")
    if len(chosen) > 1:
        last = tables.mean_and_std([choice["last_average"] for choice in chosen.values()])
        print(f"  last, mean ± standard deviation of {len(chosen)} runs: {last}")
        print("\n".join(["", *tables.best_checkpoints(best_results, backbone)]))
    return chosen


def show_runs(args: argparse.Namespace) -> None:
    """The benchmark averages that `train.py --eval-every` wrote, step by step, and the choice; raises BadInput."""
    runs = {}
    for name in args.runs:
        rows = [folders.with_nan(row) for row in folders.rows(Path(name) / "metrics.jsonl") if "bench" in row]
        if not rows:
            raise BadInput(f"--runs {name}: has no benchmarks in metrics.jsonl; train with --eval-every and --bench")
        runs[name] = {f"step {row['step']}": row["bench"] for row in rows}
    if not same_benchmarks({(name, step): runs[name][step] for name in runs for step in runs[name]}):
        raise BadInput(f"--runs {' '.join(runs)}: were asked different --bench; give those that were asked the same")
    for name, steps in runs.items():
        lines = []
        for step, results in steps.items():
            line = {"step": step.removeprefix("step ")}
            for benchmark, result in results.items():
                line[benchmark] = tables.percent(result["mean"], result["error"])
            lines.append({**line, "average": tables.percent(*tables.average(results))})
        print("\n".join([name, "", *tables.fitted(lines)]))
    select(runs, args.paper or tables.backbone_of(origin_of(str(Path(args.runs[0]) / "model"))))


def replay(args: argparse.Namespace) -> Path:
    """Grade the responses of a file as if they had been generated here; returns the folder. Raises BadInput."""
    blame = f"--replay {args.replay}"
    source, revision, given = from_files([args.replay], blame)
    rows, references = [], []
    for number, row in enumerate(given, 1):
        response, problem = first_of(row, "response", "solution"), first_of(row, "group", "id", "problem")
        reference = first_of(row, "tests", "answer", "gold")
        if not isinstance(response, str) or problem is None or not isinstance(reference, str | int | float | dict):
            raise BadInput(f'{blame}, row {number}: needs "response", "problem", and "answer" or "tests"')
        for name, form in OPTIONAL.items():
            if type(row.get(name, form())) is not form:
                raise BadInput(
                    f'{blame}, row {number}: "{name}" is {row[name]!r}; give {form.__name__}, or leave it out'
                )
        rows.append(
            {
                "model": row.get("model", "replay"),
                "benchmark": row.get("benchmark", "replay"),
                "seed": row.get("seed", 0),
                "problem": str(problem),
                "response": response,
                "truncated": row.get("truncated", False),
            }
        )
        references.append(reference)
    if not rows:
        raise BadInput(f"{blame}: holds no rows; give one object a line")
    verdicts = grade_all(partial(grade_either, args), [row["response"] for row in rows], references)
    for row, verdict in zip(rows, verdicts, strict=True):
        row["score"], row["reason"] = (0.0, "truncated") if row.pop("truncated") else verdict
    data = {}
    for name in dict.fromkeys(row["benchmark"] for row in rows):
        mine = [row for row in rows if row["benchmark"] == name]
        samples = Counter((row["model"], row["seed"], row["problem"]) for row in mine)
        asked = {"k": max(samples.values()), "problems": len({row["problem"] for row in mine})}
        data[name] = {**asked, "source": source, "revision": revision, "window": None}
    folder = Path(args.out or f"evals/replay-{Path(args.replay).stem}")
    settings = {"protocol": {"replayed": args.replay}, "data": data, "models": {}}
    with folders.made(folder, Ranks(0, 1, torch.device("cpu")), "settings.json"):
        if (folder / "settings.json").exists():  # only the same replay may stand there
            had = folders.settings_in(folder / "settings.json", SETTINGS)["protocol"]
            refuse_other_settings(settings["protocol"], had, f"the evaluation in {folder} has", "choose another --out")
        checkpoint.write_json(folder / "settings.json", settings)
        checkpoint.write_whole(folder / "generations.jsonl", "".join(map(checkpoint.as_json, rows)))
    return folder


def first_of(row: dict, *keys: str):
    """The value of the first of these keys that the row has, else None."""
    for key in keys:
        if key in row:
            return row[key]
    return None


def grade_either(args: argparse.Namespace, response: str, reference) -> Verdict:
    """The verdict on a program, where the reference is a dictionary of tests, or on a math answer."""
    if isinstance(reference, str) and reference.lstrip().startswith("{"):  # tests as JSON text
        with contextlib.suppress(ValueError, RecursionError):
            reference = json.loads(reference)
    if isinstance(reference, dict):
        return grader("code", args.grade_timeout, args.sandbox)(response, reference)
    return grader("math", args.grade_timeout, args.sandbox)(response, str(reference))


# ---- what is there already ----------------------------------------------------------------------------------


def prepare_folder(folder: Path, settings: dict, sets: list[Loaded], protocol: Protocol) -> list[dict]:
    """settings.json, and the whole blocks that are there already, without their texts; raises BadInput."""
    path, generations = folder / "settings.json", folder / "generations.jsonl"
    old = {"protocol": settings["protocol"], "data": {}, "models": {}}
    if path.exists() or generations.exists():  # rows without settings could be of any
        old = folders.settings_in(path, SETTINGS)
    holder = f"the generations in {folder} have"
    refuse_other_settings(settings["protocol"], old["protocol"], holder, "choose another --out")
    for flag, kind in (("data", "data"), ("model", "models")):
        for name in settings[kind].keys() & old[kind].keys():  # the folder may hold others besides
            wanted, had = {name: settings[kind][name]}, {name: old[kind][name]}
            refuse_other_settings({flag: wanted}, {flag: had}, holder, "choose another --out")
    merged = {kind: {**old[kind], **settings[kind]} for kind in ("protocol", "data", "models")}
    merged["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    checkpoint.write_json(path, merged)
    if not generations.exists():
        return []
    kept = whole_blocks(folders.rows(generations, {**ROW, "block": int, "response": str}), sets, protocol)
    checkpoint.write_whole(generations, "".join(map(checkpoint.as_json, kept)))
    for row in kept:
        del row["response"]
    return kept


def whole_blocks(rows: list[dict], sets: list[Loaded], protocol: Protocol) -> list[dict]:
    """The rows of the blocks that were finished; those of sets that are not asked for now count as finished."""
    sizes = {}  # rows of a whole block
    for loaded in sets:
        for number, block in enumerate(evaluation.blocks_of(loaded, protocol)):
            sizes[loaded.benchmark.name, number] = len(block) * evaluation.samples_of(loaded, protocol)
    blocks = {}
    for row in rows:
        key = row["model"], row["benchmark"], row["seed"], row["block"]
        blocks.setdefault(key, []).append(row)
    kept = []
    for (_, benchmark, _, number), block in blocks.items():
        if len(block) == sizes.get((benchmark, number), len(block)):
            kept += block
    return kept
