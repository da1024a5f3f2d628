"""Evaluate models on the paper's ten benchmarks, or on the embedded task: tables that one can
trust.

    python eval.py --model Qwen/Qwen2.5-Math-7B --bench math         # AIME24, AIME25, AMC23,
                                                                     MATH500, OlympiadBench
    python eval.py --model BASE runs/NAME --bench code               # two models, side by side,
                                                                     with differences
    python eval.py --model runs/NAME/start runs/NAME --bench embedded    # the embedded task, before
                                                                         and after
    python eval.py --model runs/NAME --select best --bench math      # all kept checkpoints; best by
                                                                     the test sets
    python eval.py --runs runs/A runs/B runs/C                       # the same from `train.py
                                                                     --eval-every`, no model
    python eval.py --model PATH --bench math500 --data math500=FILE  # a local copy instead of the
                                                                     hub
    python eval.py --from evals/NAME                                 # the table again, from saved
                                                                     generations
    python eval.py --replay FILE                                     # grade responses that were
                                                                     made elsewhere

`harness/evaluation.py` has the protocol, which is the paper's, and what the numbers and their
errors mean. `--out` gets settings.json (what must not change), generations.jsonl (every response
and verdict, written as they are made) and results.json (the table). The same command continues
where it was interrupted.

Left out: serving engines (their responses can be replayed), tensor parallelism.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from harness.config import EMBEDDED, Protocol, answer, parse_eval

answer(
    __name__, parse_eval
)  # --help and mistakes in the flags end here: what follows takes seconds to import

import torch
import transformers

from harness import checkpoint, evaluation, files, parallel, tables
from harness.evaluation import Sampler, average, paired_difference, samples_of, summarise
from harness.launch import launch, processes, resolve_machine, run_command
from harness.models import load_model, load_tokenizer, round_weights, sampling_of
from harness.paper_tables import backbone_of
from harness.parallel import Ranks
from harness.tables import percent, same_benchmarks, select_checkpoints, with_legend
from tasks import benchmarks
from tasks.benchmarks import Loaded
from tasks.problems import BadInput, choose_template
from tasks.rows import printable

KINDS = "protocol", "data", "models"  # of settings.json


@run_command(memory="lower --generate-batch or --max-tokens")
def main(argv: list[str] | None = None) -> int | None:
    """Exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    args = parse_eval(argv)
    resolve_machine(args)
    if args.runs:
        show_runs(args)
    elif args.replay or args.saved:
        show(replay(args) if args.replay else Path(args.saved), args)
    elif processes(args) > 1:
        return launch(processes(args), __file__, argv)
    else:
        evaluate_models(args, parallel.join(args.device, args.threads))


def find_models(args: argparse.Namespace) -> dict[str, str]:
    """A short name for each model, and where it is; a run stands for its last model, or for its
    checkpoints.
    """
    paths = []
    for name in args.model:
        run = files.config_of(Path(name))
        if args.select:
            found = (
                [str(folder / "model") for folder in checkpoint.complete(Path(name))] if run else []
            )
            if not found:
                raise BadInput(
                    f"--model {name}: is no run of train.py with checkpoints; leave --select out"
                )
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


def heldout_set(args: argparse.Namespace, models: dict[str, str]) -> Loaded:
    """The held-out set of the models' runs, or of the flags; raises BadInput where runs have
    different ones.
    """
    usual = dict(toy_lines=5, heldout=EMBEDDED["heldout"], seed=0)
    flags = dict(toy_lines=args.toy_lines, heldout=args.heldout, seed=args.toy_seed)
    given = {name: value for name, value in flags.items() if value is not None}
    chosen = set()
    for path in models.values():
        values = {**usual, **files.run_of(path), **given}
        chosen.add(tuple(values[name] for name in usual))
    if len(chosen) > 1:
        raise BadInput(
            "--bench embedded: the models' runs hold out different problems; give --toy-seed and "
            "the like"
        )
    return benchmarks.embedded_set(*chosen.pop())


# ---- generations ---------------------------------------------------------------------------------


def evaluate_models(args: argparse.Namespace, ranks: Ranks) -> int:
    """Every model on every benchmark, into `--out`; then the table. Returns the exit status."""
    models = find_models(args)
    task = files.run_of(next(iter(models.values()))).get("task")
    names = args.bench or ["embedded" if task == "embedded" else "math"]
    tokenizers = {
        label: load_tokenizer("--model", path) for label, path in models.items()
    }  # are they there?
    sets = benchmarks.load_sets(names, args.data, args.sandbox, partial(heldout_set, args, models))
    protocol = Protocol(
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(Protocol)}
    )
    for loaded in sets:
        if max(args.pass_at, default=0) > samples_of(loaded, protocol) * len(args.seeds):
            raise BadInput(
                f"--pass-at {max(args.pass_at)}: {loaded.benchmark.name} has fewer samples; raise "
                "--samples"
            )
    for label, path in models.items():  # before another one is evaluated: can they be asked?
        for loaded in sets:
            evaluation.as_task(loaded, protocol, tokenizers[label], files.origin_of(path)).prompt(
                loaded.problems[0]
            )
    folder = Path(
        args.out or "evals/" + "-".join([*models, *(args.bench or ())]).replace("/", "_")[:120]
    )
    data = {loaded.benchmark.name: evaluation.about(loaded, protocol) for loaded in sets}
    settings = {
        "protocol": {**dataclasses.asdict(protocol), "dtype": args.dtype},
        "data": data,
        "models": {},
    }
    settings["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    for note in [note for loaded in sets for note in loaded.notes if ranks.main]:
        print(printable(note))
    generations = folder / "generations.jsonl"
    with files.made(folder, ranks, "settings.json"):
        for label, path in models.items():
            tokenizer = tokenizers[label]
            model = load_model(path, ranks.device, tokenizer)
            round_weights(model, getattr(torch, args.dtype))
            sampler = Sampler(
                model.eval(), tokenizer, files.origin_of(path), sampling_of(args, model)
            )
            template = choose_template(args.template, sampler.name, tokenizer)
            checksum = int(
                sum(
                    parallel.checksum(weight, number)
                    for number, weight in enumerate(model.parameters())
                )
            )
            settings["models"][label] = dict(
                path=path, origin=sampler.name, template=template, checksum=checksum
            )
            kept = []
            with parallel.together(ranks):
                if ranks.main:
                    add_settings(folder, settings)
                    kept = evaluation.kept_rows(generations, sets, protocol)
            kept = [row for row in parallel.from_main(kept, ranks) if row["model"] == label]
            for loaded in sets:
                done = [
                    row
                    for row in kept
                    if row["benchmark"] == loaded.benchmark.name and row["seed"] in args.seeds
                ]
                saved = dict(
                    seeds=args.seeds, done=done, path=generations, columns={"model": label}
                )
                evaluation.evaluate_benchmark(sampler, loaded, protocol, ranks, **saved)
            del model, sampler  # or two models are in memory while the next one is loaded
        if ranks.main:
            show(folder, args, list(models), list(data))
    return 0


def replay(args: argparse.Namespace) -> Path:
    """Grade the responses of a file as if they had been generated here; returns the folder. Raises
    BadInput.
    """
    rows, data = evaluation.graded_responses(args.replay, args.grade_timeout, args.sandbox)
    settings = {"protocol": {"replayed": args.replay}, "data": data, "models": {}}
    folder = Path(args.out or f"evals/replay-{Path(args.replay).stem}")
    with files.made(folder, Ranks(0, 1, torch.device("cpu")), "settings.json"):
        add_settings(folder, settings)
        files.write_whole(folder / "generations.jsonl", "".join(map(files.as_json, rows)))
    return folder


def add_settings(folder: Path, settings: dict) -> None:
    """settings.json with these `settings`, and what it has of other models and benchmarks.

    Raises BadInput where one differs from what the generations there were made with.
    """
    path = folder / "settings.json"
    saved = files.settings_in(path) if path.exists() else settings
    for kind in KINDS:
        for name, value in settings[kind].items():
            had = saved[kind].get(name, None if kind == "protocol" else value)
            if value != had:
                raise BadInput(
                    f"{kind}: {name} is {value}; {folder} has generations of {had}; choose another "
                    "--out"
                )
    merged = {kind: {**saved[kind], **settings[kind]} for kind in KINDS}
    files.write_json(path, {**settings, **merged})


# ---- tables --------------------------------------------------------------------------------------


def show(
    folder: Path, args: argparse.Namespace, models: Sequence[str] = (), names: Sequence[str] = ()
) -> None:
    """Print the tables of the generations in a folder, and write its results.json; raises BadInput.

    `models` and `names` of benchmarks choose and order what is shown; all of it if not given.
    """
    settings = files.settings_in(folder / "settings.json")
    data = settings["data"]
    generations = {}  # model -> benchmark -> rows
    for row in files.rows(folder / "generations.jsonl", apart=files.SAMPLE):
        if row["benchmark"] in (names or data) and (not args.model or row["seed"] in args.seeds):
            generations.setdefault(row["model"], {}).setdefault(row["benchmark"], []).append(row)
    generations = {model: generations[model] for model in models or generations}
    if not generations:
        raise BadInput(f"--from {folder}: holds no generations yet; give another")
    first, results, differences = next(iter(generations)), {}, {}
    for model, by_name in generations.items():
        results[model] = {}
        for name in [name for name in data if name in by_name]:  # one order for all models
            result, rows, about = summarise(by_name[name], args.pass_at), by_name[name], data[name]
            result["missing"] = about["problems"] * about["k"] * len(
                {row["seed"] for row in rows}
            ) - len(rows)
            short = {
                row["problem"] for row in rows if row.get("limit", math.inf) < about.get("limit", 0)
            }
            if short:
                print(
                    f"NOTE: {printable(f'{model}, {name}')}: {len(short)} problems had a lower "
                    "limit, to fit the model's context"
                )
            if result["missing"]:
                print(
                    f"WARNING: {printable(f'{model}, {name}')}: {result['missing']} samples are "
                    "missing; finish it before reading on"
                )
            results[model][name] = result
        if model != first:
            pairs = {
                name: (generations[first][name], by_name[name])
                for name in by_name
                if name in generations[first]
            }
            differences[model] = {name: paired_difference(*pair) for name, pair in pairs.items()}
    tables.print_tables(folder, settings, results, differences, args.paper)
    selection = None
    if args.select and same_benchmarks(results.values()):
        runs = {}
        for model, result in results.items():
            run = model.rpartition("/")[0].partition("/checkpoints/")[
                0
            ]  # of a label or, where two are alike, a path
            runs.setdefault(run, {})[model] = result
        origin = settings["models"].get(first, {}).get("origin", first)
        selection = select_checkpoints(runs, args.paper or backbone_of(origin))
    settings |= {"results": results, "differences": differences, "selection": selection}
    files.write_json(folder / "results.json", settings)


def show_runs(args: argparse.Namespace) -> None:
    """The benchmark averages that `train.py --eval-every` wrote, step by step, and the choice;
    raises BadInput.
    """
    runs = {}
    for run in args.runs:
        steps = files.rows(Path(run) / "metrics.jsonl", apart=["step"])
        rows = [files.with_nan(row) for row in steps if "bench" in row]
        if not rows:
            raise BadInput(
                f"--runs {run}: has no benchmarks in metrics.jsonl; train with --eval-every and "
                "--bench"
            )
        runs[run] = {f"step {row['step']}": row["bench"] for row in rows}
    if not same_benchmarks(results for steps in runs.values() for results in steps.values()):
        raise BadInput(
            f"--runs {' '.join(runs)}: were asked different --bench; give those that were asked "
            "the same"
        )
    for run, steps in runs.items():
        lines = []
        for step, results in steps.items():
            means = {
                name: percent(result["mean"], result["error"]) for name, result in results.items()
            }
            lines.append(
                {"step": step.removeprefix("step "), **means, "average": percent(*average(results))}
            )
        print("\n".join([printable(run), "", *with_legend(lines)]))
    select_checkpoints(
        runs, args.paper or backbone_of(files.origin_of(str(Path(args.runs[0]) / "model")))
    )


if __name__ == "__main__":
    sys.exit(main())
