"""Evaluate models on the paper's ten benchmarks, or on the embedded task: tables that one can trust.

    python eval.py --model Qwen/Qwen2.5-Math-7B --bench math         # AIME24, AIME25, AMC23, MATH500, OlympiadBench
    python eval.py --model BASE runs/NAME --bench code               # two models, side by side, with differences
    python eval.py --model runs/NAME/start runs/NAME --bench embedded    # the embedded task, before and after
    python eval.py --model runs/NAME --select best --bench math      # all kept checkpoints; best by the test sets
    python eval.py --runs runs/A runs/B runs/C                       # the same from `train.py --eval-every`, no model
    python eval.py --model PATH --bench math500 --data math500=FILE  # a local copy instead of the hub
    python eval.py --from evals/NAME                                 # the table again, from saved generations
    python eval.py --replay FILE                                     # grade responses that were made elsewhere

`harness/evaluation.py` has the protocol, which is the paper's, and what the numbers and their errors mean.

`--out` gets settings.json (what must not change), generations.jsonl (every response and verdict, written as they are
made) and results.json (the table). The same command continues where it was interrupted.

A file of `--replay` has a JSON object a line: "response" or "solution", and "answer" or "gold" (math) or "tests"
(code); "group" or "id" or "problem" tells problems apart; optional are "model", "benchmark", "seed" and "truncated".

**Selection.** The paper reports, for each run, the best benchmark average over its checkpoints: the highest of many
noisy numbers, chosen on the test sets, and so too high. `--select best` gives it beside the last checkpoint's.

Left out: serving engines (their responses can be replayed), tensor parallelism.
"""

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from harness.config import EMBEDDED, Protocol, answer, parse_eval, refuse_other_settings

ARGS = answer(__name__, parse_eval)  # --help and mistakes in the flags end here: what follows takes seconds to import

import numpy as np
import torch
import transformers

from harness import checkpoint, evaluation, folders, parallel, prepare
from harness.command import GOES_ON, guarded, ranked, resolve_machine
from harness.evaluation import ROW, Sampler, average, paired_difference, percent, samples_of, summarise
from harness.paper_tables import PAPER, backbone_of, suite_of
from harness.parallel import Ranks
from harness.report import fitted
from tasks import benchmarks
from tasks.benchmarks import Loaded
from tasks.problems import BadInput, choose_template

SURE = 1.96  # standard errors from which a difference is marked
SETTINGS = {"protocol": dict, "data": dict, "models": dict}  # of settings.json
DATA = {"k": int, "problems": int, "revision": str, "window": str | None}  # of a set in its "data"


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 2 for bad input, 130 after Ctrl-C."""

    def work() -> int:
        args = ARGS or parse_eval(argv)
        resolve_machine(args)
        if args.model:
            return ranked(args, __file__, argv, lambda ranks: measure(args, ranks), grouped=False)
        if args.runs:
            show_runs(args)
        else:
            show(replay(args) if args.replay else Path(args.saved), args)
        return 0

    return guarded(work, interrupted=GOES_ON, memory="lower --generate-batch or --max-tokens")


# ---- models ---------------------------------------------------------------------------------------------------


def find_models(args: argparse.Namespace) -> dict[str, str]:
    """A short name for each model, and where it is; a run stands for its last model, or for its checkpoints."""
    paths = []
    for name in args.model:
        run = folders.config_of(Path(name))
        if args.select:
            found = [str(folder / "model") for folder in checkpoint.complete(Path(name))] if run else []
            if not found:
                raise BadInput(f"--model {name}: is no run of train.py with checkpoints; leave --select out")
            paths += found
        else:
            paths.append(str(Path(name) / "model") if run else name)
    models = {label_of(path): path for path in paths}
    return models if len(models) == len(set(paths)) else {path: path for path in paths}


def label_of(path: str) -> str:
    """The last parts of a folder's name: run and step, or run and model; a hub id as it is."""
    parts = Path(path).resolve().parts if Path(path).exists() else Path(path).parts
    if len(parts) > 3 and parts[-3] == "checkpoints":
        return f"{parts[-4]}/{parts[-2]}"
    return "/".join(parts[-2:])


def run_of(path: str) -> dict:
    """The configuration of the run that a model's folder lies in; empty for any other."""
    folder = Path(path).resolve()
    return folders.config_of(folder.parent) or folders.config_of(folder.parent.parent.parent) or {}


def origin_of(path: str) -> str:
    """The model that a run's model was trained from, whose name tells its template; any other model itself."""
    for _ in range(10):  # runs that go on from each other's models
        path = run_of(path).get("model") or path
    return path


def heldout_set(args: argparse.Namespace, models: dict[str, str]) -> Loaded:
    """The held-out set of the models' runs, or of the flags; raises BadInput where runs have different ones."""
    usual = dict(toy_lines=5, toy_kind="chain", heldout=EMBEDDED["heldout"], seed=0)
    flags = dict(toy_lines=args.toy_lines, toy_kind=args.toy_kind, heldout=args.heldout, seed=args.toy_seed)
    given = {name: value for name, value in flags.items() if value is not None}
    chosen = set()
    for path in models.values():
        values = {**usual, **run_of(path), **given}
        chosen.add(tuple(values[name] for name in usual))
    if len(chosen) > 1:
        raise BadInput("--bench embedded: the models' runs hold out different problems; give --toy-seed and the like")
    return benchmarks.embedded(*chosen.pop())


# ---- generations ----------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, ranks: Ranks) -> int:
    """Every model on every benchmark, into `--out`; then the table. Returns the exit status."""
    models = find_models(args)
    usual = "embedded" if run_of(next(iter(models.values()))).get("task") == "embedded" else "math"
    window = tuple(args.lcb_window or benchmarks.WINDOW)
    make_embedded = partial(heldout_set, args, models)
    sets = benchmarks.load_sets(args.bench or [usual], args.data, args.sandbox, make_embedded, window)
    protocol = Protocol(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Protocol)})
    for loaded in sets:
        if max(args.pass_at, default=0) > samples_of(loaded, protocol) * len(args.seeds):
            raise BadInput(f"--pass-at {max(args.pass_at)}: {loaded.benchmark.name} has fewer samples; raise --samples")
    for path in models.values():  # before another one is evaluated: are they there, can they be asked?
        tokenizer = prepare.load_tokenizer("--model", path)
        for loaded in sets:
            evaluation.as_task(loaded, protocol, tokenizer, origin_of(path)).prompt(loaded.problems[0])
    folder = Path(args.out or "evals/" + "-".join([*models, *(args.bench or ())]).replace("/", "_")[:120])
    data = {loaded.benchmark.name: evaluation.about(loaded, protocol) for loaded in sets}
    settings = {"protocol": {**dataclasses.asdict(protocol), "dtype": args.dtype}, "data": data, "models": {}}
    for note in [note for loaded in sets for note in loaded.notes if ranks.main]:
        print(note)
    with folders.made(folder, ranks, "settings.json"):
        for label, path in models.items():
            model, tokenizer = prepare.load_model(path, ranks.device)
            prepare.round_weights(model, getattr(torch, args.dtype))
            sampler = Sampler(model.eval(), tokenizer, origin_of(path), prepare.sampling_of(args, model))
            template = choose_template(args.template, sampler.name, tokenizer)
            checksum = int(sum(parallel.checksum(weight, number) for number, weight in enumerate(model.parameters())))
            about = {"path": path, "origin": sampler.name, "template": template, "checksum": checksum}
            settings["models"][label] = about
            with parallel.together(ranks):
                kept = kept_rows(folder, settings, sets, protocol) if ranks.main else None
            kept = [row for row in parallel.from_main(kept, ranks) if row["model"] == label]
            for loaded in sets:
                done = [row for row in kept if row["benchmark"] == loaded.benchmark.name and row["seed"] in args.seeds]
                saved = dict(seeds=args.seeds, done=done, path=folder / "generations.jsonl", columns={"model": label})
                evaluation.evaluate_benchmark(sampler, loaded, protocol, ranks, **saved)
            del model, sampler  # or two models are in memory while the next one is loaded
        if ranks.main:
            show(folder, args, list(models), list(data))
    return 0


def saved_settings(folder: Path, protocol: dict) -> dict:
    """The folder's settings.json, empty for a new one; raises BadInput where its generations have another protocol."""
    path = folder / "settings.json"
    if not path.exists():
        return {"protocol": protocol, "data": {}, "models": {}}
    saved = folders.settings_in(path, SETTINGS)
    refuse_other_settings(protocol, saved["protocol"], f"the generations in {folder} have", "choose another --out")
    return saved


def kept_rows(folder: Path, settings: dict, sets: list[Loaded], protocol: Protocol) -> list[dict]:
    """Write settings.json; the whole blocks that are there already, without their texts. Raises BadInput."""
    saved = saved_settings(folder, settings["protocol"])
    for flag, kind in (("data", "data"), ("model", "models")):
        for name in settings[kind].keys() & saved[kind].keys():  # the folder may hold others
            new, old = {flag: {name: settings[kind][name]}}, {flag: {name: saved[kind][name]}}
            refuse_other_settings(new, old, f"the generations in {folder} have", "choose another --out")
    merged = {kind: {**saved[kind], **settings[kind]} for kind in SETTINGS}
    merged["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    checkpoint.write_json(folder / "settings.json", merged)
    path = folder / "generations.jsonl"
    if not path.exists():
        return []
    rows = folders.rows(path, {**ROW, "block": int, "response": str})
    kept = evaluation.whole_blocks(rows, sets, protocol)
    checkpoint.write_whole(path, "".join(map(checkpoint.as_json, kept)))
    return [{name: value for name, value in row.items() if name != "response"} for row in kept]


def replay(args: argparse.Namespace) -> Path:
    """Grade the responses of a file as if they had been generated here; returns the folder. Raises BadInput."""
    rows, data = evaluation.graded_responses(args.replay, args.grade_timeout, args.sandbox)
    settings = {"protocol": {"replayed": args.replay}, "data": data, "models": {}}
    folder = Path(args.out or f"evals/replay-{Path(args.replay).stem}")
    with folders.made(folder, Ranks(0, 1, torch.device("cpu")), "settings.json"):
        saved_settings(folder, settings["protocol"])  # only the same replay may be there
        checkpoint.write_json(folder / "settings.json", settings)
        checkpoint.write_whole(folder / "generations.jsonl", "".join(map(checkpoint.as_json, rows)))
    return folder


# ---- tables ---------------------------------------------------------------------------------------------------


def show(folder: Path, args: argparse.Namespace, models: Sequence[str] = (), names: Sequence[str] = ()) -> None:
    """Print the tables of the generations in a folder, and write its results.json; raises BadInput.

    `models` and `names` of benchmarks choose and order what is shown; all of it if not given.
    """
    settings = folders.settings_in(folder / "settings.json", SETTINGS)
    data = settings["data"]
    if not all(folders.has(about, DATA) for about in data.values()):
        raise BadInput(f"{folder / 'settings.json'}: says too little of its data; restore it, or choose another folder")
    generations = {}  # model -> benchmark -> rows
    for row in folders.rows(folder / "generations.jsonl", ROW):
        if row["benchmark"] in (names or data) and (not args.model or row["seed"] in args.seeds):
            generations.setdefault(row["model"], {}).setdefault(row["benchmark"], []).append(row)
    generations = {model: generations[model] for model in models or generations}
    if not generations:
        raise BadInput(f"--from {folder}: holds no generations yet; give another")
    first = next(iter(generations))
    results, differences = {}, {}
    for model, by_name in generations.items():
        results[model] = {}
        for name in [name for name in data if name in by_name]:  # one order for all models
            results[model][name] = summary_of(f"{model}, {name}", by_name[name], data[name], args.pass_at)
        if model != first:
            pairs = {name: (generations[first][name], by_name[name]) for name in by_name if name in generations[first]}
            differences[model] = {name: paired_difference(*pair) for name, pair in pairs.items()}
    comparable = len({tuple(result) for result in results.values()}) == 1  # all were asked the same sets
    protocol = " ".join(f"{name}={value}" for name, value in settings["protocol"].items() if value is not None)
    about = {name: data[name] for name in data if any(name in result for result in results.values())}
    print("\n".join([f"{folder}/", protocol, "", *data_table(about)]))
    templates = set()
    for model, result in results.items():
        about = settings["models"].get(model, {})
        templates |= {about["template"]} if about else set()
        heading = f"{model} (template {about['template']})" if about and set(result) != {"embedded"} else model
        backbone = args.paper or backbone_of(about.get("origin", model))
        print("\n".join([heading, "", *result_table(result, data, backbone)]))
    if len(templates) > 1:
        print("WARNING: models were asked in different templates; give --template to compare them")
    if differences and comparable:
        print("\n".join(["side by side", "", *side_by_side(results, differences)]))
    selection = None
    if args.select and comparable:
        runs = {}
        for model, result in results.items():
            runs.setdefault(model.rpartition("/")[0], {})[model] = result
        origin = settings["models"].get(first, {}).get("origin", first)
        selection = select_checkpoints(runs, args.paper or backbone_of(origin))
    whole = {**settings, "results": results, "differences": differences, "selection": selection}
    checkpoint.write_json(folder / "results.json", whole)


def summary_of(place: str, rows: list[dict], about: dict, passes: list[int]) -> dict:
    """`summarise`, and how many samples are missing; both this and lower limits are printed, after their `place`."""
    result = summarise(rows, passes)
    result["missing"] = about["problems"] * about["k"] * len({row["seed"] for row in rows}) - len(rows)
    short = {row["problem"] for row in rows if row.get("limit", math.inf) < about.get("limit", 0)}
    if short:
        print(f"NOTE: {place}: {len(short)} problems had a lower limit, to fit the model's context")
    if result["missing"]:
        print(f"WARNING: {place}: {result['missing']} samples are missing; finish it before reading on")
    return result


def show_runs(args: argparse.Namespace) -> None:
    """The benchmark averages that `train.py --eval-every` wrote, step by step, and the choice; raises BadInput."""
    runs = {}
    for run in args.runs:
        rows = [folders.with_nan(row) for row in folders.rows(Path(run) / "metrics.jsonl") if "bench" in row]
        if not rows:
            raise BadInput(f"--runs {run}: has no benchmarks in metrics.jsonl; train with --eval-every and --bench")
        runs[run] = {f"step {row['step']}": row["bench"] for row in rows}
    if len({tuple(results) for steps in runs.values() for results in steps.values()}) > 1:
        raise BadInput(f"--runs {' '.join(runs)}: were asked different --bench; give those that were asked the same")
    for run, steps in runs.items():
        lines = []
        for step, results in steps.items():
            means = {name: percent(result["mean"], result["error"]) for name, result in results.items()}
            lines.append({"step": step.removeprefix("step "), **means, "average": percent(*average(results))})
        print("\n".join([run, "", *fitted(lines)]))
    select_checkpoints(runs, args.paper or backbone_of(origin_of(str(Path(args.runs[0]) / "model"))))


def select_checkpoints(runs: dict[str, dict[str, dict]], backbone: str | None) -> dict:
    """Print the last and the best benchmark average of each run's checkpoints, then Table 1's mean over the runs.

    `runs` holds each checkpoint's results by benchmark. A checkpoint whose average is NaN, as a set has no verdict, is
    left out; so is a run of none but such.
    """
    selection, best_results = {}, []
    print("benchmark average of each run at its last checkpoint, and at the best, SELECTED ON THE TEST SETS")
    for run, checkpoints in runs.items():
        averages = {name: average(results)[0] for name, results in checkpoints.items()}
        graded = {name: value for name, value in averages.items() if not math.isnan(value)}
        if not graded:
            print(f"  {run}: none of {len(averages)} has an average")
            continue
        last, best = list(graded)[-1], max(graded, key=graded.get)
        best_results.append(checkpoints[best])
        selection[run] = {"last": last, "last_average": graded[last], "best": best, "best_average": graded[best]}
        both = [f"{percent(graded[name])} ({name.removeprefix(run + '/')})" for name in (last, best)]
        without = f" ({len(averages) - len(graded)} without an average)" if len(graded) < len(averages) else ""
        print(f"  {run}: last {both[0]}; best {both[1]}, of {len(averages)}{without}")
    if len(selection) > 1:
        last = mean_and_std([choice["last_average"] for choice in selection.values()])
        print(f"  last, mean ± standard deviation of {len(selection)} runs: {last}")
        print("\n".join(["", *best_checkpoints(best_results, backbone)]))
    return selection


def data_table(data: dict[str, dict]) -> list[str]:
    """What each benchmark is."""
    rows = []
    for name, about in data.items():
        row = {"benchmark": name, "problems": str(about["problems"]), "revision": about["revision"]}
        if any(other["window"] for other in data.values()):
            row["window"] = about["window"] or ""
        rows.append(row)
    return fitted(rows)


def result_table(results: dict[str, dict], data: dict[str, dict], backbone: str | None) -> list[str]:
    """One model: a line a benchmark. `data` says what each set is; `backbone` asks for the paper's columns."""
    passes = sorted({name for result in results.values() for name in result if re.fullmatch(r"pass@\d+", name)})
    has_seeds = any("seed_std" in result for result in results.values())
    has_infra = any(result["infra_errors"] for result in results.values())
    paper = {f"{method} †": PAPER[backbone][method] for method in ("GRPO", "SHEAR")} if backbone else {}
    rows = []
    for name, result in results.items():
        row = {"benchmark": name, "avg": f"@{data[name]['k']}"}
        row["percent ± SE"] = percent(result["mean"], result["error"])
        if has_seeds:
            row["seeds ± std"] = percent(result.get("seed_mean", math.nan), result.get("seed_std"))
        for method, printed in paper.items():
            row[method] = str(printed[name][0]) if name in printed else "-"
        for k in passes:
            row[k] = percent(result[k], result[f"{k} error"]) if k in result else "-"
        row["right"] = f"{result['right']:.0f} of {result['samples']}"
        row["truncated"] = percent(result["truncated"]) + "%"
        row["no-answer"] = percent(result["no_answer"]) + "%"
        if has_infra:
            row["infra"] = str(result["infra_errors"])
        rows.append(row)
    if len(results) > 1:
        last = dict.fromkeys(rows[0], "") | {"benchmark": "average", "percent ± SE": percent(*average(results))}
        for method, printed in paper.items():  # its own average, which is not always that of its row
            of_row = float(np.mean([printed.get(name, (math.nan,))[0] for name in results]))
            last[method] = percent(printed.get(suite_of(results), (of_row,))[0] / 100)
        rows.append(last)
    legend = [f"†: the paper's, {backbone}"] if backbone else []
    if has_infra:
        legend.append("infra: samples that could not be graded, which are in no mean")
    return fitted(rows, *legend)


def best_checkpoints(best: list[dict[str, dict]], backbone: str | None) -> list[str]:
    """As the paper's Table 1: mean ± standard deviation over runs, each at its best checkpoint; the paper's below."""
    names = list(best[0])
    means = {name: mean_and_std([results[name]["mean"] for results in best]) for name in names}
    rows = [{"": f"{len(best)} runs, best", **means, "average": mean_and_std([average(each)[0] for each in best])}]
    for method, printed in PAPER.get(backbone, {}).items():
        cells = {name: printed.get(name) for name in names} | {"average": printed.get(suite_of(names))}
        cells = {name: percent(cell[0] / 100, cell[1] / 100) if cell else "-" for name, cell in cells.items()}
        rows.append({"": f"{method} †", **cells})
    rows = [{name: cell.replace(" ± ", "±") for name, cell in row.items()} for row in rows]  # six columns fit
    return fitted(rows, *([f"†: the paper's, {backbone}"] if backbone else []))


def mean_and_std(values: list[float]) -> str:
    """Of runs, with ddof 1, in percent."""
    return percent(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan)


def side_by_side(models: dict[str, dict[str, dict]], differences: dict[str, dict[str, dict]]) -> list[str]:
    """Several models: their means, and how each differs from the first."""
    first, *others = models
    names = dict(zip(models, short_names(list(models)), strict=True))
    gains = {model: "gain" if len(others) == 1 else f"gain {number}" for number, model in enumerate(others, 1)}
    rows = []
    for name in models[first]:
        row = {"benchmark": name}
        row |= {
            names[model]: percent(results[name]["mean"], results[name]["error"]) for model, results in models.items()
        }
        for model, gain in gains.items():
            difference, error = differences[model][name]["difference"], differences[model][name]["error"]
            row[gain] = percent(difference, error) + " *" * (abs(difference) > SURE * error)  # False for NaN
        rows.append(row)
    if len(rows) > 1:
        row = {"benchmark": "average"}
        row |= {names[model]: percent(*average(results)) for model, results in models.items()}
        for model, gain in gains.items():
            row[gain] = percent(average(models[model])[0] - average(models[first])[0])
        rows.append(row)
    legend = [f"{gain}: {names[model]} minus {names[first]}, paired by problem" for model, gain in gains.items()]
    if any(row[gain].endswith("*") for row in rows for gain in gains.values()):
        legend.append(f"`*`: a gain of more than {SURE} standard errors")
    return fitted(rows, *legend)


def short_names(names: list[str]) -> list[str]:
    """Paths without the folders that all of them begin or end with, as long as a part of each is left."""
    paths = [name.split("/") for name in names]
    for place in (0, -1):
        while min(map(len, paths)) > 1 and len({path[place] for path in paths}) == 1:
            for path in paths:
                path.pop(place)
    return ["/".join(path) for path in paths]


if __name__ == "__main__":
    sys.exit(main())
