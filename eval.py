"""Evaluate models on the paper's ten benchmarks, or on the embedded task: tables that one can trust.

    python eval.py --model Qwen/Qwen2.5-Math-7B --bench math         # AIME24, AIME25, AMC23, MATH500, OlympiadBench
    python eval.py --model BASE runs/NAME --bench code               # two models, side by side, with differences
    python eval.py --model runs/NAME/start runs/NAME --bench embedded    # the embedded task, before and after
    python eval.py --model runs/NAME --select best --bench math      # all kept checkpoints; best by the test sets
    python eval.py --runs runs/A runs/B runs/C                       # the same from `train.py --eval-every`, no model
    python eval.py --model PATH --bench math500 --data math500=FILE  # a local copy instead of the hub
    python eval.py --from evals/NAME                                 # the table again, from saved generations
    python eval.py --replay FILE                                     # grade responses that were made elsewhere

The protocol is the paper's (`harness/evaluation.py`): temperature 0.1, no top-p, 3,000 tokens, avg@32 on AIME, avg@8
on AMC23, avg@1 on MATH500 and OlympiadBench, avg@4 on code. `harness/tables.py` says what the numbers and their errors
mean.

Everything goes to `--out`: settings.json (what must not change), generations.jsonl (every response and verdict,
written as they are made) and results.json (the table). The same command goes on where it was interrupted.

**Selection.** The paper reports, for each run, the best benchmark average over its checkpoints: the highest of many
noisy numbers, chosen on the test sets, and so too high. `--select best` gives it beside the last checkpoint's.

Left out: serving engines (their responses can be replayed), tensor parallelism.
"""

import argparse
import dataclasses
import sys
from functools import partial
from pathlib import Path

from harness.config import Protocol, answer, parse_eval

ARGS = answer(__name__, parse_eval)  # --help and mistakes in the flags end here: what follows takes seconds to import

import torch

from harness import evaluation, folders, parallel, prepare, results, tables
from harness.command import GOES_ON, guarded, ranked, resolve_machine
from harness.evaluation import Sampler
from harness.models import embedded, find_models, origin_of, run_of
from harness.parallel import Ranks
from tasks import benchmarks
from tasks.benchmarks import Loaded
from tasks.problems import BadInput, choose_template


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 2 for bad input, 130 after Ctrl-C."""

    def work() -> int:
        args = ARGS or parse_eval(argv)
        if args.paper and args.paper not in tables.PAPER:
            raise BadInput(f"--paper {args.paper}: has no numbers there; give one of {', '.join(tables.PAPER)}")
        resolve_machine(args)
        if args.model:
            return ranked(args, __file__, argv, lambda ranks: measure(args, ranks), grouped=False)
        if args.runs:
            results.show_runs(args)
        else:
            results.show(results.replay(args) if args.replay else Path(args.saved), args)
        return 0

    return guarded(work, interrupted=GOES_ON, memory="lower --generate-batch or --max-tokens")


def measure(args: argparse.Namespace, ranks: Ranks) -> int:
    """Every model on every benchmark, into `--out`; then the table. Returns the exit status."""
    models = find_models(args)
    sets = load_sets(args, models)
    protocol = Protocol(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Protocol)})
    check_samples(args, sets, protocol)
    check_models(models, sets, protocol)
    folder = Path(args.out or "evals/" + "-".join([*models, *(args.bench or ())]).replace("/", "_")[:120])
    settings = {
        "protocol": {**dataclasses.asdict(protocol), "dtype": args.dtype},
        "data": {loaded.benchmark.name: evaluation.about(loaded, protocol) for loaded in sets},
        "models": {},
    }
    if ranks.main:
        for loaded in sets:
            for note in loaded.notes:
                print(note)
    with folders.made(folder, ranks, "settings.json"):
        for label, path in models.items():
            sampler = load_sampler(args, path, ranks)
            settings["models"][label] = about_model(args, path, sampler)
            with parallel.together(ranks):
                kept = results.prepare_folder(folder, settings, sets, protocol) if ranks.main else None
            kept = parallel.from_main(kept, ranks)
            for loaded in sets:
                place = {"model": label, "benchmark": loaded.benchmark.name}
                done = [row for row in kept if place.items() <= row.items() and row["seed"] in args.seeds]

                def write(rows: list[dict], label=label) -> None:
                    folders.append(folder / "generations.jsonl", [{"model": label, **row} for row in rows])

                evaluation.evaluate(sampler, loaded, protocol, ranks, seeds=args.seeds, done=done, write=write)
            del sampler  # or two models are in memory while the next one is loaded
        if ranks.main:
            results.show(folder, args, list(models), [loaded.benchmark.name for loaded in sets])
    return 0


def load_sets(args: argparse.Namespace, models: dict[str, str]) -> list[Loaded]:
    """The benchmarks asked for; raises BadInput."""
    run = run_of(next(iter(models.values()))) or {}
    usual = ["embedded"] if run.get("task") == "embedded" else ["math"]
    make_embedded = partial(embedded, args, models)
    names = args.bench or usual
    return benchmarks.load_sets(
        names, args.data, args.sandbox, make_embedded, tuple(args.lcb_window or benchmarks.WINDOW)
    )


def check_samples(args: argparse.Namespace, sets: list[Loaded], protocol: Protocol) -> None:
    """Refuse a --pass-at of more samples than a problem gets; raises BadInput."""
    most = max(args.pass_at, default=0)
    for loaded in sets:
        if most > evaluation.samples_of(loaded, protocol) * len(args.seeds):
            raise BadInput(f"--pass-at {most}: {loaded.benchmark.name} has fewer samples; raise --samples")


def check_models(models: dict[str, str], sets: list[Loaded], protocol: Protocol) -> None:
    """Refuse a model that is not there or cannot be asked, before another one is evaluated; raises BadInput."""
    for path in models.values():
        tokenizer = prepare.load_tokenizer("--model", path)
        for loaded in sets:
            evaluation.as_task(loaded, protocol, tokenizer, origin_of(path)).prompt(loaded.problems[0])


def load_sampler(args: argparse.Namespace, path: str, ranks: Ranks) -> Sampler:
    """A model in the dtype of --dtype, ready to answer; raises BadInput."""
    model, tokenizer = prepare.load_model(path, ranks.device)
    prepare.round_weights(model, getattr(torch, args.dtype))
    return Sampler(model.eval(), tokenizer, origin_of(path), prepare.sampling_of(args, model))


def about_model(args: argparse.Namespace, path: str, sampler: Sampler) -> dict:
    """What settings.json says of a model; the checksum tells its weights from others."""
    template = choose_template(args.template, sampler.name, sampler.tokenizer)
    weights = sum(parallel.checksum(weight, number) for number, weight in enumerate(sampler.model.parameters()))
    return {"path": path, "origin": sampler.name, "template": template, "checksum": int(weights)}


if __name__ == "__main__":
    sys.exit(main())
