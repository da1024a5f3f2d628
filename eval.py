"""Evaluate models on the paper's ten benchmarks, or on the embedded task: tables that one can trust.

    python eval.py --model Qwen/Qwen2.5-Math-7B --bench math         # AIME24, AIME25, AMC23, MATH500, OlympiadBench
    python eval.py --model BASE runs/NAME --bench code               # two models, side by side, with differences
    python eval.py --model runs/NAME/start runs/NAME --bench embedded    # the embedded task, before and after
    python eval.py --model runs/NAME --select best --bench math      # every checkpoint; the best, for what it is
    python eval.py --runs runs/A runs/B runs/C --select best         # the same from `train.py --eval-every`, no model
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
import datetime
import sys
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

from grading import sandbox
from harness import evaluation, parallel, prepare, report, results, tables
from harness.command import (
    GOES_ON,
    Parser,
    add_machine_flags,
    guarded,
    natural,
    number,
    positive_int,
    random_seed,
    ranked,
    resolve_machine,
    seconds,
)
from harness.evaluation import Protocol, Sampler
from harness.models import embedded, find_models, origin_of, run_of
from harness.parallel import Ranks
from tasks import benchmarks, toy
from tasks.benchmarks import Loaded
from tasks.problems import TEMPLATES, BadInput, choose_template

PROTOCOL = Protocol()


def add_flags(parser: Parser) -> None:
    """Every flag with its default."""
    add = parser.add_argument_group("what").add_argument
    add("--model", nargs="+", default=[], help="Hugging Face folders, hub ids, or runs of train.py (their last model)")
    add("--bench", nargs="+", help="math, code, embedded, or names of benchmarks; embedded for its models, else math")
    add("--data", nargs="+", default=[], metavar="NAME=FILE", help="local file of a benchmark; twice for two files")
    add("--lcb-window", nargs=2, default=list(benchmarks.WINDOW), metavar="DATE", help="LiveCodeBench: first, last day")
    add("--out", help="folder for generations and tables; if not given: in evals/, named by models and benchmarks")
    add("--from", dest="saved", metavar="DIR", help="no model: the table of the generations in DIR")
    add("--replay", metavar="FILE", help="no model: grade the responses in FILE")
    add("--runs", nargs="+", default=[], help="no model: what train.py --eval-every wrote in these runs")
    add = parser.add_argument_group("protocol").add_argument
    add("--temperature", type=number(float, 0, 1000), default=PROTOCOL.temperature, help="of sampling")
    add("--greedy", action="store_true", help="temperature 0, one response a problem")
    add("--samples", type=natural, default=0, help="responses a problem; 0: the paper's k")
    add("--max-tokens", type=positive_int, default=PROTOCOL.max_tokens, help="response limit")
    add("--seeds", type=random_seed, nargs="+", default=[0], help="several: mean and standard deviation over them, too")
    add("--template", choices=TEMPLATES, default=PROTOCOL.template, help="of prompts, as in train.py")
    add("--block", type=positive_int, default=PROTOCOL.block, help="responses made, graded and saved together")
    add("--grade-timeout", type=seconds, help="for one response; if not given: the benchmark's")
    add("--sandbox", choices=("auto", *sandbox.LEVELS), default="auto", help="for programs")
    add = parser.add_argument_group("table").add_argument
    add(
        "--pass-at",
        type=positive_int,
        nargs="+",
        default=[],
        metavar="K",
        help="pass@K besides, unbiased; K samples at least",
    )
    add("--paper", choices=tuple(tables.PAPER), help="whose numbers to print beside; if not given: by the model's name")
    add("--select", choices=("last", "best"), help="every checkpoint of the runs; best is chosen on the test sets")
    add = parser.add_argument_group("embedded task, if not given: as the model's run has them").add_argument
    add("--toy-kind", choices=toy.KINDS, help="shape of the little programs")
    add("--toy-lines", type=number(int, 1, len(toy.LABELS)), help="definitions a problem")
    add("--heldout", type=number(int, 1, 10**5), help="problems")
    add("--toy-seed", type=random_seed, help="the run's seed, which made the problems")
    add_machine_flags(parser)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The resolved flags; raises BadInput."""
    parser = Parser(
        prog="python eval.py", description="Evaluate models.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    if sum(map(bool, (args.model, args.saved, args.replay, args.runs))) != 1:
        raise BadInput("give one of --model, --from, --replay and --runs")
    if args.greedy:
        args.temperature, args.samples = 0.0, 1
    if len(set(args.seeds)) < len(args.seeds):
        raise BadInput(f"--seeds {' '.join(map(str, args.seeds))}: must be different; change them")
    try:
        first, last = map(datetime.date.fromisoformat, args.lcb_window)
    except ValueError as error:
        raise BadInput(f"--lcb-window {' '.join(args.lcb_window)}: {error}; give two days as 2025-02-01") from error
    if first > last:
        raise BadInput(f"--lcb-window {first} {last}: ends before it begins; swap them")
    resolve_machine(args)
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    logging.disable_progress_bar()

    def work() -> int:
        args = parse_args(argv)
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
    folder = Path(args.out or "evals/" + "-".join([*models, *(args.bench or ())]).replace("/", "_")[:120])
    settings = {
        "protocol": {**dataclasses.asdict(protocol), "dtype": args.dtype},
        "data": {loaded.benchmark.name: evaluation.about(loaded, protocol) for loaded in sets},
        "models": {},
    }
    for note in [note for loaded in sets for note in loaded.notes] if ranks.main else ():
        print(note)
    report.make_out(folder, ranks)
    with report.locked(folder, ranks, "--out"):
        for label, path in models.items():
            sampler = load_sampler(args, path, ranks)
            settings["models"][label] = about_model(args, path, sampler)
            kept = results.share_kept(folder, settings, sets, protocol, ranks)
            for loaded in sets:
                place = {"model": label, "benchmark": loaded.benchmark.name}
                done = [row for row in kept if place.items() <= row.items() and row["seed"] in args.seeds]

                def write(rows: list[dict], label=label) -> None:
                    report.append(folder / "generations.jsonl", [{"model": label, **row} for row in rows])

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
    return benchmarks.load_sets(names, args.data, args.sandbox, make_embedded, tuple(args.lcb_window))


def check_samples(args: argparse.Namespace, sets: list[Loaded], protocol: Protocol) -> None:
    """Refuse a --pass-at of more samples than a problem gets; raises BadInput."""
    most = max(args.pass_at, default=0)
    for loaded in sets:
        if most > evaluation.samples_of(loaded, protocol) * len(args.seeds):
            raise BadInput(f"--pass-at {most}: {loaded.benchmark.name} has fewer samples; raise --samples")


def load_sampler(args: argparse.Namespace, path: str, ranks: Ranks) -> Sampler:
    """A model in the dtype of --dtype, ready to answer; raises BadInput."""
    model, tokenizer = prepare.load_model(path, ranks.device)
    for parameter in model.parameters():  # not model.to(dtype): that would round the rotary frequencies, too
        parameter.data = parameter.data.to(getattr(torch, args.dtype))
    return Sampler(model.eval(), tokenizer, origin_of(path), prepare.sampling_of(args, model))


def about_model(args: argparse.Namespace, path: str, sampler: Sampler) -> dict:
    """What settings.json says of a model; the checksum tells its weights from others."""
    template = choose_template(args.template, sampler.name, sampler.tokenizer)
    weights = sum(parallel.checksum(weight, number) for number, weight in enumerate(sampler.model.parameters()))
    return {"path": path, "origin": sampler.name, "template": template, "checksum": int(weights)}


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(main())
