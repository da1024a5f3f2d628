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
from pathlib import Path

import torch
from transformers.utils import logging

from grading import sandbox
from harness import evaluation, parallel, prepare, report, results, tables
from harness.command import GOES_ON, guarded, ranked
from harness.evaluation import Protocol
from harness.models import embedded, find_models, origin_of, run_of
from harness.parallel import Ranks
from harness.prepare import DECODERS
from harness.recipe import Parser
from harness.results import share_kept
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
    add("--temperature", type=float, default=PROTOCOL.temperature, help="of sampling")
    add("--greedy", action="store_true", help="temperature 0, one response a problem")
    add("--samples", type=int, default=0, help="responses a problem; 0: the paper's k")
    add("--max-tokens", type=int, default=PROTOCOL.max_tokens, help="response limit")
    add("--seeds", type=int, nargs="+", default=[0], help="several: mean and standard deviation over them, too")
    add("--template", choices=TEMPLATES, default=PROTOCOL.template, help="of prompts, as in train.py")
    add("--block", type=int, default=PROTOCOL.block, help="responses made, graded and saved together")
    add("--grade-timeout", type=float, help="seconds for one response; if not given: the benchmark's")
    add("--sandbox", choices=("auto", *sandbox.LEVELS), default="auto", help="for programs")
    add = parser.add_argument_group("table").add_argument
    add("--pass-at", type=int, nargs="+", default=[], metavar="K", help="pass@K besides, unbiased; K samples at least")
    add("--paper", choices=tuple(tables.PAPER), help="whose numbers to print beside; if not given: by the model's name")
    add("--select", choices=("last", "best"), help="every checkpoint of the runs; best is chosen on the test sets")
    add = parser.add_argument_group("embedded task, if not given: as the model's run has them").add_argument
    add("--toy-kind", choices=toy.KINDS, help="shape of the little programs")
    add("--toy-lines", type=int, help="definitions a problem")
    add("--heldout", type=int, help="problems")
    add("--toy-seed", type=int, help="the run's seed, which made the problems")
    add = parser.add_argument_group("machine").add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: bfloat16 on cuda")
    add("--ranks", type=int, default=0, help="processes to start, unless torchrun has; 0: one a GPU")
    add("--generate-batch", type=int, default=0, help="responses generated at a time; 0: what memory holds")
    add(
        "--decode",
        choices=tuple(DECODERS),
        default="generate",
        help="fast: CUDA graphs; no GPU has proved them yet",
    )
    add("--threads", type=int, default=0, help="CPU threads, 0: torch's default")


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
    for name in "temperature samples ranks generate_batch threads".split():
        if getattr(args, name) < 0:
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: must not be negative; raise it")
    for name in "max_tokens block toy_lines heldout grade_timeout".split():
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: must be positive; raise it")
    if min([*args.seeds, args.toy_seed or 0]) < 0 or len(set(args.seeds)) < len(args.seeds):
        raise BadInput(f"--seeds {' '.join(map(str, args.seeds))}: must be different and not negative; change them")
    try:
        first, last = map(datetime.date.fromisoformat, args.lcb_window)
    except ValueError as error:
        raise BadInput(f"--lcb-window {' '.join(args.lcb_window)}: {error}; give two days as 2025-02-01") from error
    if first > last:
        raise BadInput(f"--lcb-window {first} {last}: ends before it begins; swap them")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: torch sees no CUDA device; use --device cpu")
    if args.dtype == "auto":
        args.dtype = "bfloat16" if args.device == "cuda" else "float32"
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


# ---- what to evaluate -----------------------------------------------------------------------------------------


def load_sets(args: argparse.Namespace, models: dict[str, str]) -> list[Loaded]:
    """The benchmarks asked for; raises BadInput."""
    run = run_of(next(iter(models.values())))
    names = benchmarks.names_of(args.bench or (["embedded"] if (run or {}).get("task") == "embedded" else ["math"]))
    files = benchmarks.files_of(args.data, names)
    benchmarks.check_sandbox(names, args.sandbox)
    window = tuple(args.lcb_window)
    return [
        embedded(args, models) if name == "embedded" else benchmarks.load_benchmark(name, files.get(name, ()), window)
        for name in names
    ]


# ---- evaluating -----------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, ranks: Ranks) -> int:
    """Every model on every benchmark, into `--out`; then the table. Returns the exit status."""
    models = find_models(args)
    sets = load_sets(args, models)
    protocol = Protocol(**{each.name: getattr(args, each.name) for each in dataclasses.fields(Protocol)})
    for loaded in sets:
        if max(args.pass_at, default=0) > evaluation.samples_of(loaded, protocol) * len(args.seeds):
            raise BadInput(f"--pass-at {max(args.pass_at)}: {loaded.benchmark.name} has fewer samples; raise --samples")
    folder = Path(args.out or "evals/" + "-".join([*models, *(args.bench or ())]).replace("/", "_")[:120])
    settings = {
        "protocol": {**dataclasses.asdict(protocol), "dtype": args.dtype},
        "data": {each.benchmark.name: evaluation.about(each, protocol) for each in sets},
        "models": {},
    }
    for note in [note for each in sets for note in each.notes] if ranks.main else ():
        print(note)
    for label, path in models.items():
        model, tokenizer = prepare.load_model(path, ranks.device)
        for parameter in model.parameters():  # not model.to(dtype): that would round the rotary frequencies, too
            parameter.data = parameter.data.to(getattr(torch, args.dtype))
        model.eval()
        pieces = (parallel.checksum(weight, number) for number, weight in enumerate(model.parameters()))
        origin = origin_of(path)
        template = choose_template(args.template, origin, tokenizer)
        settings["models"][label] = {"path": path, "origin": origin, "template": template, "checksum": int(sum(pieces))}
        kept = share_kept(folder, settings, sets, protocol, ranks)
        for loaded in sets:
            name = loaded.benchmark.name
            mine = {"model": label, "benchmark": name}
            done = [row for row in kept if mine.items() <= row.items() and row["seed"] in args.seeds]

            def write(rows: list[dict], label=label) -> None:
                report.append(folder / "generations.jsonl", [{"model": label, **row} for row in rows])

            options = dict(name=origin, seeds=args.seeds, sampling=prepare.sampling_of(args, model))
            evaluation.evaluate(model, tokenizer, loaded, protocol, ranks, **options, done=done, write=write)
        del model
    if ranks.main:
        results.show(folder, args, list(models), [each.benchmark.name for each in sets])
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(main())
