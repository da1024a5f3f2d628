"""Every credit method under the same loop, as one table.

    python -m studies.compare --seeds 0 1                              # the embedded task, every row of ROWS
    python -m studies.compare --methods grpo shear first --jobs 2      # some of them, two runs at a time
    python -m studies.compare --methods grpo shear --model PATH ...    # any flags of train.py

Each row is a run of `train.py` a seed. On the embedded task the first one of a seed warms a model up, and all others
start from it; all see the same problems. Runs lie in `--out`, each with its log; finished ones are not repeated, so
the same command goes on where it was interrupted. Nothing is deleted: a run that was cut before its first checkpoint
is set aside as NAME.cut-1, and a folder of anything else is refused. Then, on the embedded task, a few steps of each
row are timed, one row after the other and again, in this process; the extra cost is the median step's beside that of
the first row.

The table has means over the seeds. Weight and effective share are of all training steps; the AUCs are of the policy
before training, the same for every row, and after. The error of an accuracy is clustered by problem and holds no
variation between seeds, which the single results behind it show. `--negative-scale` and `--rescale` rows are controls:
methods differ in how much they punish, and in the size of the step.

Left out: tuning. Every row has the defaults of its method and the same learning rate, but adapters, which need more.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.flags import answer
from studies.options import ROWS, check_flags, compare_parser

answer(__name__, lambda: check_flags(compare_parser()))  # before what takes seconds to import

import torch
from transformers.utils import logging

import train
from credit import lora
from credit.methods import USES_PRM
from harness import checkpoint, folders, tables
from harness.checkpoint import write_whole
from harness.command import GOES_ON, RunFailed, guarded
from harness.flags import refuse_other_settings
from harness.parallel import Ranks, end_with_the_launcher
from harness.prepare import set_up
from harness.recipe import MAY_CHANGE
from harness.resolve import parse_args, renamed
from harness.run import Run, assemble
from tasks.problems import BadInput, cause

OURS = "--method --seed --name --out --resume --prm"  # flags of train.py that are set here, row by row
TIMED = 3  # steps of each row
ALONE = Ranks(0, 1, torch.device("cpu"))  # this process, of which there is one
REMEDY = "move it away or choose another --out"


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 where a run failed, 2 for bad input, 130 after Ctrl-C."""
    logging.disable_progress_bar()
    return guarded(
        lambda: compare(parse(argv)), interrupted=GOES_ON, memory="lower --micro-tokens or --prompts-per-step"
    )


def compare(flags: argparse.Namespace) -> int:
    """The runs that are not there yet, the times of a step, the table; raises BadInput where `--out` is in use."""
    folders.make_out(flags.out, ALONE)
    with folders.locked(flags.out, ALONE, "--out"):
        train_all(flags)
        costs = time_steps(flags) if flags.made else {}
        table = make_table(flags, costs)
        write_whole(flags.out / "table.md", table + "\n")
    print(table)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """This command's flags; `rest` are train.py's. Every run's configuration is resolved once; raises BadInput."""
    parser = compare_parser()
    flags, flags.rest = parser.parse_with_others(argv, OURS, "compare sets it for every run")
    usual = [row for row in ROWS if row != "oracle-value"]  # which is for one kind of embedded problems only
    flags.methods = list(dict.fromkeys(flags.methods or usual))
    flags.seeds = list(dict.fromkeys(flags.seeds))
    flags.made = parse_args(flags_of(flags, flags.methods[0], flags.seeds[0])).model is None
    for method in flags.methods:
        for seed in flags.seeds:
            check_run(flags, method, seed)
    table = flags.out / "table.md"
    if table.is_file() and not table.read_bytes().startswith(b"| method"):
        raise BadInput(f"--out {flags.out}: {table} is not a table of this command; {REMEDY}")
    return flags


def flags_of(flags: argparse.Namespace, method: str, seed: int) -> list[str]:
    """train.py's flags of a row and a seed, without the model that it starts from."""
    row = ROWS[method].split()
    if flags.prm and row[1] in USES_PRM:
        row += ["--prm", flags.prm]
    return [*flags.rest, *row, "--seed", str(seed), "--out", str(flags.out)]


def started_flags(flags: argparse.Namespace, method: str, seed: int) -> list[str]:
    """The same with the model: on the embedded task, that of the first row's run."""
    if flags.made and method != flags.methods[0]:
        return flags_of(flags, method, seed) + start_flags(flags, seed)
    return flags_of(flags, method, seed)


def start_flags(flags: argparse.Namespace, seed: int) -> list[str]:
    """train.py's flags for the model that the first row's run of a seed has made and started from."""
    return ["--task", "embedded", "--model", str(flags.out / f"{flags.methods[0]}-{seed}" / "start")]


def check_run(flags: argparse.Namespace, method: str, seed: int) -> None:
    """Refuse flags that are wrong, and a folder that is not of a run with these flags; raises BadInput."""
    folder, wanted = flags.out / f"{method}-{seed}", vars(parse_args(started_flags(flags, method, seed)))
    if not folder.exists():
        return
    if set(os.listdir(folder)) <= {".config.json.writing"}:  # cut before it had a config
        return
    if not (folder / "config.json").exists():
        raise BadInput(f"--out {flags.out}: {folder} holds files and no config.json of train.py; {REMEDY}")
    had = renamed(folders.settings_in(folder / "config.json", ("task", "method", "seed")))
    free = (MAY_CHANGE - {"steps", "lr", "max_grad_norm"}) | {"name", "out", "model"}
    fixed = {name: value for name, value in wanted.items() if name not in free}
    refuse_other_settings(fixed, had, f"the run in {folder} has", REMEDY)
    results_of(folder)
    with folders.locked(folder, ALONE, "--out"):
        pass  # nobody writes there


def train_all(flags: argparse.Namespace) -> None:
    """The runs that are not there yet: of each seed the first row's, then the others; none starts after a failure."""
    failed = threading.Event()

    def train_unless_failed(job: tuple[str, int]) -> None:
        if failed.is_set():
            return
        try:
            train_one(flags, *job)
        except Exception:
            failed.set()  # here, as the worker takes its next job before the main thread wakes up
            raise

    pool = ThreadPoolExecutor(flags.jobs)
    try:
        for methods in (flags.methods[:1], flags.methods[1:]):
            jobs = [(method, seed) for seed in flags.seeds for method in methods]
            list(pool.map(train_unless_failed, jobs))
    finally:
        pool.shutdown(cancel_futures=True)


def train_one(flags: argparse.Namespace, method: str, seed: int) -> None:
    """One run of train.py, its lines in a log; raises RunFailed where it fails."""
    name = f"{method}-{seed}"
    folder, log = flags.out / name, flags.out / f"{name}.log"
    if finished(folder):
        return
    command = [*started_flags(flags, method, seed), "--name", name]
    if checkpoint.complete(folder):
        command = ["--resume", str(folder)]
    elif folder.exists():
        set_aside(folder)
    began = time.perf_counter()
    print(f"{name}: starts", flush=True)
    command = [sys.executable, train.__file__, *command]
    with log.open("a") as file:
        # Linux ends a child with the thread that started it: this one, which waits for it.
        status = subprocess.run(command, stdout=file, stderr=file, preexec_fn=end_with_the_launcher).returncode
    if status:
        raise RunFailed(f"{name}: train.py ends with status {status}; see {log}")
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


def finished(folder: Path) -> bool:
    """Whether a run has come to its end."""
    _, _, after = results_of(folder)
    return bool(after)


def set_aside(folder: Path) -> None:
    """Give the folder of a run that was cut before its first checkpoint the next free name."""
    number = 1
    while folder.with_name(f"{folder.name}.cut-{number}").exists():
        number += 1
    with folders.locked(folder, ALONE, "--out"):
        aside = folder.rename(folder.with_name(f"{folder.name}.cut-{number}"))
    print(f"{folder.name}: was cut before its first checkpoint; set aside as {aside}", flush=True)


def time_steps(flags: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step of each row, all from the first run's start; rows by turns, so that drift hits all."""
    runs, seconds = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for method in flags.methods:
            runs[method] = timed_run(flags, method, Path(folder))
            seconds[method] = []
        for step in range(1 + TIMED):
            for method, run in runs.items():
                began = time.perf_counter()
                train.train_step(run, step)
                seconds[method].append(time.perf_counter() - began)
    return {method: statistics.median(values[1:]) for method, values in seconds.items()}  # the first step warms up


def timed_run(flags: argparse.Namespace, method: str, folder: Path) -> Run:
    """A run of this process whose steps can be timed."""
    seed = flags.seeds[0]
    argv = flags_of(flags, method, seed) + start_flags(flags, seed)
    made = flags.out / f"{method}-{seed}" / "prm"
    if made.exists():
        argv += ["--prm", str(made)]
    args = parse_args(argv)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    ranks = Ranks(0, 1, torch.device(args.device))
    ready = set_up(args, ranks)
    if args.lora_rank:
        lora.add(ready.model, args.lora_rank, args.seed)
    return assemble(args, ranks, ready.task, ready.model, ready.tokenizer, folder, ready.prm)


def results_of(folder: Path) -> tuple[list[dict], list[dict], list[dict]]:
    """A run's steps, and its evaluations before and after training; raises BadInput where they are damaged."""
    path = folder / "metrics.jsonl"
    steps, before, after = [], [], []
    for row in folders.rows(path) if path.exists() else []:
        if "step" in row:
            steps.append(row)
        elif "before" in row:
            before.append(row["before"])
        elif "after" in row:
            after.append(row["after"])
    try:
        if [row["step"] for row in steps] != list(range(1, len(steps) + 1)) or max(len(before), len(after)) > 1:
            raise ValueError("its rows are of two runs")
        if after:
            cells_of(steps, before, after)  # raises where the table would
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {cause(error)}"
        raise BadInput(f"--out {folder.parent}: {path} is damaged ({reason}); move {folder} away") from error
    return steps, before, after


def make_table(flags: argparse.Namespace, costs: dict[str, float]) -> str:
    """Markdown; a row a method, means over the seeds."""
    rows = []
    for method in flags.methods:
        steps, before, after = [], [], []
        for seed in flags.seeds:
            results = results_of(flags.out / f"{method}-{seed}")
            steps += results[0]
            before += results[1]
            after += results[2]
        extra = f"{costs[method] / costs[flags.methods[0]] - 1:+.0%}" if costs else "-"
        rows.append({"method": method, "extra cost": extra} | cells_of(steps, before, after))
    return "\n".join(tables.markdown(rows))


def cells_of(steps: list[dict], before: list[dict], after: list[dict]) -> dict[str, str]:
    """A row's numbers."""
    return {
        "weight": mean_of(steps, "weight_mean"),
        "effective share": mean_of(steps, "ess"),
        "AUC": f"{mean_auc(before, 'auc')} / {mean_auc(after, 'auc')}",
        "AUC, wrong step": f"{mean_auc(before, 'auc_step')} / {mean_auc(after, 'auc_step')}",
        "greedy before": accuracy(before, "greedy"),
        "greedy after": accuracy(after, "greedy"),
        "sampled before": accuracy(before, "sampled"),
        "sampled after": accuracy(after, "sampled"),
    }


def mean_of(steps: list[dict], name: str) -> str:
    """A step's measure, over all steps that have it."""
    values = [row[name] for row in steps if not math.isnan(row[name])]
    return f"{statistics.mean(values):.2f}" if values else "-"


def mean_auc(results: list[dict], name: str) -> str:
    """A measure of `localisation`, over the evaluations that have it."""
    values = [result["localisation"][name] for result in results if result.get("localisation")]
    return f"{statistics.mean(values):.2f}" if values else "-"


def accuracy(results: list[dict], name: str) -> str:
    """Mean over the seeds with its standard error, and each seed's own."""
    means = [result[name][0] for result in results]
    errors = [result[name][1] for result in results]
    error = math.sqrt(sum(error**2 for error in errors)) / len(errors)
    return f"{statistics.mean(means):.3f} ± {error:.3f} ({' '.join(f'{mean:.2f}' for mean in means)})"


if __name__ == "__main__":
    sys.exit(main())
