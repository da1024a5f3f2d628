"""Does SHEAR help, where, and why: the trials of docs/study.md, run by the plan of docs/study-plan.md.

    python -m studies.study headroom    # before the plan: where would true advantages help at all?
    python -m studies.study advantages  # true token advantages at the start, and what each rule makes of them
    python -m studies.study tune        # learning rates, on seeds of their own
    python -m studies.study confirm     # the comparison, at the learning rates that `tune` chose

A trial is a cell (a task), a rule (a credit method), a learning rate and a seed (`studies/trials.py`). Its row in
docs/study.jsonl has the mean reward of every training step, each on fresh problems, and the accuracy on 256 held-out
problems afterwards, 8 samples each and greedy. All trials of a cell and a seed go from one warmed-up start and see the
same problems. A trial that has a row is not run again: the same command goes on where it was interrupted.

A row names the git blob of the plan and a digest of the code that trains. The runner refuses a plan or code that is not
committed, and rows of other code. `studies/findings.py` computes what the rows say.

One headroom cell draws its 640 problems more than once.

Left out: checkpoints and folders of the trials, which take half a minute each.
"""

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path

from harness.flags import answer
from studies.options import study_parser

answer(__name__, lambda: study_parser().parse_args())  # before what takes seconds to import

import numpy as np
import torch
from tqdm import tqdm
from transformers.utils import logging

import train
from harness import folders, parallel
from harness.command import GOES_ON, guarded
from harness.parallel import Ranks
from harness.resolve import parse_args, spelled
from harness.run import Run, prepared, seed_of
from rewards import scores_of
from studies.advantages import measure
from studies.trials import CELLS, HEADROOM, RULES, Cell, Trial, lacking
from tasks.problems import BadInput

ROOT = Path(__file__).resolve().parent.parent
PLAN = "docs/study-plan.md"
# What decides on a trial's numbers.
CODE = "sinkhorn.py shear.py grpo.py rewards.py train.py credit fast grading harness tasks".split()
GROUPS, CONTINUATIONS = 16, 16  # of true token advantages
ALONE = Ranks(0, 1, torch.device("cpu"))  # this process, of which there is one


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    logging.disable_progress_bar()
    flags = study_parser().parse_args(argv)
    return guarded(lambda: study(flags), interrupted=GOES_ON, memory="lower --jobs")


def study(flags: argparse.Namespace) -> int:
    """Run what a stage lacks, `--jobs` starts at a time; raises BadInput for a plan or code that is not committed."""
    origin = {"stage": flags.stage, "plan": None, "code": committed(CODE)}
    if flags.stage != "headroom":
        origin["plan"] = committed([PLAN])
    with multiprocessing.get_context("spawn").Pool(flags.jobs) as pool:
        while trials := lacking(flags.stage, rows_of(flags.rows, origin), flags.cells):
            starts = groupby(trials, key=lambda trial: (trial.cell, trial.seed))
            units = [(origin, list(group), flags.rows) for _, group in starts]
            with tqdm(total=len(trials), desc=flags.stage, disable=None) as bar:
                for count in pool.imap_unordered(run_from_one_start, units):
                    bar.update(count)
    return 0


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


def rows_of(path: Path, origin: dict) -> list[dict]:
    """The rows that are there; raises BadInput for rows of the same stage and other code."""
    rows = folders.rows(path, ("stage", "cell", "seed", "rule", "lr")) if path.exists() else []
    for row in rows:
        if row["stage"] == origin["stage"] and row["code"] != origin["code"]:
            raise BadInput(f"--rows {path}: holds {row['stage']} trials of other code; check that out, or move them")
    return rows


def run_from_one_start(unit: tuple[dict, list[Trial], Path]) -> int:
    """The trials of a cell and a seed, one after the other; each adds its row. Returns how many there were."""
    origin, trials, path = unit
    with tempfile.TemporaryDirectory() as out:
        start = []  # flags: the first trial makes the start, the others load it
        for number, trial in enumerate(trials):
            cell = (HEADROOM if origin["stage"] == "headroom" else CELLS)[trial.cell]
            words = f"{cell.flags} --seed {trial.seed} --lr {trial.lr} --heldout 256 --name {number}".split()
            for name, value in RULES[trial.rule].items():
                words += spelled(name, value)
            args = parse_args([*words, *start, "--out", out])
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                result = advantages_of(args, cell) if origin["stage"] == "advantages" else run_trial(args)
            start = ["--task", "embedded", "--model", f"{out}/0/start"]
            folders.append(path, [{**origin, **trial._asdict(), **result}])
    return len(trials)


def run_trial(args: argparse.Namespace) -> dict:
    """Train without checkpoints; the rewards of every step, and held-out accuracy afterwards."""
    started = time.perf_counter()
    torch.set_num_threads(args.threads)
    with prepared(args, ALONE) as (run, _, _):
        parallel.refresh(run.policy, run.sampler, ALONE)
        steps = [train.train_step(run, step)[0] for step in range(args.steps)]
        torch.manual_seed(seed_of(args.seed, train.EVALUATION))
        sampled = accuracy(run, args.rollouts_per_prompt, args.temperature)
        greedy = accuracy(run, 1, 0.0)
    rewards = [round(step["reward"], 6) for step in steps]
    seconds = round(time.perf_counter() - started, 1)
    return {"rewards": rewards, "sampled": sampled, "greedy": greedy, "seconds": seconds}


def advantages_of(args: argparse.Namespace, cell: Cell) -> dict:
    """`studies.advantages` of the start, for the cell's rules."""
    torch.set_num_threads(args.threads)
    rules = {rule: RULES[rule] for rule in cell.rules}
    with prepared(args, ALONE) as (run, _, _):
        parts = args, run.task, run.sampler, run.tokenizer
        return {"advantages": measure(*parts, run.task.heldout[:GROUPS], rules, CONTINUATIONS)}


def accuracy(run: Run, count: int, temperature: float) -> float:
    """Share of right ones among `count` responses to each held-out problem."""
    return float(np.nanmean(scores_of(train.sample_and_grade(run, run.task.heldout, count, temperature))))


if __name__ == "__main__":
    sys.exit(main())
