"""Does SHEAR help, where, and why: the trials of docs/study.md, run by the plan of docs/study-plan.md.

    python -m studies.study headroom    # before the plan: where would true advantages help at all?
    python -m studies.study advantages  # true token advantages at the start, and what each rule makes of them
    python -m studies.study tune        # learning rates, on seeds of their own
    python -m studies.study confirm     # the comparison, at the learning rates that `tune` chose

A trial is a cell (a task), a rule (a credit method), a learning rate and a seed (`studies/trials.py`). Its row in
docs/study.jsonl has the mean reward of every training step, each on fresh problems; of `confirm` also the accuracy on
256 held-out problems afterwards, 8 samples each and greedy, and where credit went. All trials of a cell and a seed go
from one warmed-up start and see the same problems. A trial that has a row is not run again: the same command goes on
where it was interrupted.

A row names the git blob of the plan and a digest of the code that trains. The runner refuses a plan or code that is not
committed, and to add to rows of other code. `studies/findings.py` computes what the rows say.

`run_stage` is the runner. `studies/compare.py` uses it, too, with one stage more: `cost`, the seconds of a step.

Left out: checkpoints and folders of the trials, which take half a minute each.
"""

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from harness.config import Parser, answer, positive_int, spelled
from studies.trials import CELLS, HEADROOM, RULES, SEEDS, Cell, Trial, lacking


def make_parser() -> Parser:
    """This command's flags."""
    about = "Run the trials of docs/study-plan.md that have no row yet, half a minute to a minute each."
    parser = Parser(prog="python -m studies.study", description=about)
    add = parser.add_argument
    add("stage", choices=("headroom", "advantages", "tune", "confirm"), help="which trials")
    names = list(CELLS | HEADROOM)
    add("--cells", nargs="+", choices=names, metavar="CELL", help=f"some of the stage's: {', '.join(names)}")
    add("--jobs", type=positive_int, default=2, help="starts at a time, a process each")
    add("--rows", type=Path, metavar="FILE", default=Path("docs/study.jsonl"), help="of finished trials")
    return parser


answer(__name__, lambda: make_parser().parse_args())  # before what takes seconds to import

import numpy as np
import torch
from tqdm import tqdm

import train
from credit.batch import Batch
from credit.table import needing
from harness import files, parallel, report
from harness.launch import parse_args, run_command
from harness.run import Run, prepared, seed_of
from rewards import rewards_of
from studies.advantages import measure
from tasks.problems import BadInput

ROOT = Path(__file__).resolve().parent.parent
PLAN = "docs/study-plan.md"
# What decides on a trial's numbers.
CODE = "sinkhorn.py shear.py grpo.py rewards.py train.py credit fast grading harness tasks".split()
HELDOUT = 256  # problems
GROUPS, CONTINUATIONS = 16, 16  # of true token advantages
TIMED = 3  # steps
ROW = {"stage": str, "code": str, "cell": str, "seed": int, "rule": str, "lr": float | int}  # of any trial
NOT_CREDIT = {"lora_rank", "dynamic_sampling"}  # flags of rules


@run_command(memory="lower --jobs")
def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    return study(make_parser().parse_args(argv))


def study(flags: argparse.Namespace) -> int:
    """Run what a stage lacks, or some of its cells; raises BadInput for cells of other stages."""
    planned = flags.stage != "headroom"
    cells = CELLS if planned else HEADROOM
    for name in flags.cells or ():
        if name not in cells:
            raise BadInput(f"--cells {name}: is no cell of {flags.stage}; give some of {', '.join(cells)}")
    cells = {name: cells[name] for name in flags.cells or cells}
    if flags.stage == "confirm" and lacking("tune", trial_rows(flags.rows), cells, SEEDS["tune"]):
        raise BadInput("confirm: learning rates are not chosen in these cells; run the stage tune first")
    run_stage(flags.stage, cells, SEEDS[flags.stage], flags.rows, flags.jobs, [PLAN] if planned else [])
    return 0


def run_stage(
    stage: str, cells: dict[str, Cell], seeds: Sequence[int], path: Path, jobs: int, plan: Sequence[str] = ()
) -> None:
    """Run what a stage lacks, `jobs` starts at a time, and add the rows to the file at `path`.

    Raises BadInput for a plan or code that is not committed, and for rows of other code.
    """
    while trials := lacking(stage, trial_rows(path), cells, seeds):
        origin = {"stage": stage, "plan": committed(plan) if plan else None, "code": committed(CODE)}
        refuse_other_code(path, origin)
        starts = groupby(trials, key=lambda trial: (trial.cell, trial.seed))
        units = [(origin, cells[name], list(group), path) for (name, _), group in starts]
        with (
            multiprocessing.get_context("spawn").Pool(jobs) as pool,
            tqdm(total=len(trials), desc=stage, disable=None) as bar,
        ):
            for count in pool.imap_unordered(run_from_one_start, units):
                bar.update(count)


def committed(paths: list[str]) -> str:
    """A digest of files and folders as git's HEAD has them; raises BadInput where the tree has others."""
    status = git("status", "--porcelain", "--", *paths)
    if status:
        raise BadInput(f"{status.split()[-1]}: is not as committed; a trial's row must name it, so commit it")
    blobs = git("rev-parse", *(f"HEAD:{path}" for path in paths)).split()
    return blobs[0] if len(blobs) == 1 else hashlib.sha1(" ".join(blobs).encode()).hexdigest()


def git(*words: str) -> str:
    """What git answers, in the project's folder; raises BadInput with its complaint."""
    found = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    if found.returncode:
        raise BadInput(f"git {words[0]}: {found.stderr.strip().splitlines()[0]}; run the study in its repository")
    return found.stdout


def trial_rows(path: Path) -> list[dict]:
    """The rows that are there; raises BadInput for a file of something else."""
    if not os.path.lexists(path):
        return []
    rows = files.rows(path, ROW)
    if not rows and path.stat().st_size:
        raise BadInput(f"--rows {path}: holds no trial; name another file")
    return rows


def refuse_other_code(path: Path, origin: dict) -> None:
    """Raises BadInput for rows of the same stage and other code."""
    for row in trial_rows(path):
        if row["stage"] == origin["stage"] and row["code"] != origin["code"]:
            raise BadInput(f"--rows {path}: holds {row['stage']} trials of other code; check that out, or move them")


def run_from_one_start(unit: tuple[dict, Cell, list[Trial], Path]) -> int:
    """The trials of a cell and a seed, one after the other; each adds its row. Returns how many there were."""
    origin, cell, trials, path = unit
    measure_trial = MEASURES[origin["stage"]]
    with tempfile.TemporaryDirectory() as out:
        start = []  # flags: the first trial makes the start, the others load it
        for number, trial in enumerate(trials):
            words = shlex.split(cell.flags)
            words += f"--seed {trial.seed} --lr {trial.lr} --heldout {HELDOUT} --name {number}".split()
            for name, value in RULES[trial.rule].items():
                words += spelled(name, value)
            args, began = parse_args([*words, *start, "--out", out]), time.perf_counter()
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                result = measure_trial(args, cell)
            result["seconds"] = round(time.perf_counter() - began, 1)
            if args.model is None:
                start = ["--task", "embedded", "--model", f"{out}/0/start"]
            files.append_rows(path, [{**origin, **trial._asdict(), **result}])
    return len(trials)


@contextlib.contextmanager
def started(args: argparse.Namespace) -> Iterator[Run]:
    """A run without checkpoints, ready for its first step."""
    torch.set_num_threads(args.threads or torch.get_num_threads())
    ranks = parallel.join(args.device, grouped=args.dtype != "float32")
    try:
        with prepared(args, ranks) as run:
            parallel.refresh(run.trained, run.frozen.model, ranks)
            yield run
    finally:
        parallel.leave()


def train_only(args: argparse.Namespace, cell: Cell) -> dict:
    """The rewards of every step, which choose a learning rate."""
    with started(args) as run:
        return {"rewards": [round(train.train_step(run, step)[0]["reward"], 6) for step in range(args.steps)]}


def run_trial(args: argparse.Namespace, cell: Cell) -> dict:
    """The rewards of every step, held-out accuracy afterwards, and where credit went."""
    with started(args) as run:
        before = located(run, 0)
        steps = [train.train_step(run, step)[0] for step in range(args.steps)]
        torch.manual_seed(seed_of(args.seed, "evaluation"))
        sampled = accuracy(run, args.rollouts_per_prompt, args.temperature)
        greedy = accuracy(run, 1, 0.0)
        after = located(run, args.steps)
    rewards = [round(step["reward"], 6) for step in steps]
    means = {name: round(float(np.nanmean([step[name] for step in steps])), 4) for name in ("weight_mean", "ess")}
    return {"rewards": rewards, "sampled": sampled, "greedy": greedy, **means, "before": before, "after": after}


def located(run: Run, step: int) -> dict | None:
    """`measures.localisation` of the method's weights in rollouts to held-out problems, where errors are known."""
    if not run.task.first_error:
        return None
    torch.manual_seed(seed_of(run.args.seed, "evaluation"))
    clock = report.Clock(run.ranks.device)
    problems, size = run.task.heldout[: run.args.eval_groups], run.args.rollouts_per_prompt
    rollouts, verdicts = train.sample_and_grade(run, problems, size, run.args.temperature, clock)
    batch = train.with_credit(run, Batch.of(rollouts, verdicts, problems), step, clock)
    return report.credit_vs_first_error(run.tokenizer, run.task, batch)["localisation"]


def advantages_of(args: argparse.Namespace, cell: Cell) -> dict:
    """`studies.advantages` of the start, for the cell's rules that differ in credit and need no other model for it."""
    rules, needing_models = {}, needing("adapter") | needing("prm")
    for rule in cell.rules:
        if not needing_models & {RULES[rule]["method"]} and not NOT_CREDIT & RULES[rule].keys():
            rules[rule] = RULES[rule]
    with started(args) as run:
        parts = args, run.task, run.frozen.model, run.tokenizer
        return {"advantages": measure(*parts, run.task.heldout[:GROUPS], rules, CONTINUATIONS)}


def cost_of(args: argparse.Namespace, cell: Cell) -> dict:
    """Median seconds of a step beside those of GRPO's, from the same start and by turns, so that drift hits both."""
    plain = dict(method="grpo", rescale="none", negative_scale=1.0, lora_rank=0, dynamic_sampling=0)
    other = argparse.Namespace(**vars(args) | plain | {"name": f"{args.name}-grpo"})
    with started(args) as ours, started(other) as theirs:
        seconds = [], []
        for step in range(1 + TIMED):
            for number, run in enumerate((ours, theirs)):
                began = time.perf_counter()
                train.train_step(run, step)
                seconds[number].append(time.perf_counter() - began)
    ours, theirs = (statistics.median(times[1:]) for times in seconds)  # the first step warms up
    return {"step": round(ours, 3), "of_grpo": round(theirs, 3)}  # seconds


# What a trial of each stage is.
MEASURES = {
    "headroom": train_only,
    "tune": train_only,
    "confirm": run_trial,
    "advantages": advantages_of,
    "cost": cost_of,
}


def accuracy(run: Run, count: int, temperature: float) -> float:
    """Share of right ones among `count` responses to each held-out problem."""
    clock = report.Clock(run.ranks.device)
    _, verdicts = train.sample_and_grade(run, run.task.heldout, count, temperature, clock)
    return float(np.nanmean(rewards_of(verdicts)))


if __name__ == "__main__":
    sys.exit(main())
