"""Credit methods under the same loop, each at its own learning rate, as one table.

    python -m lab.studies.compare --steps 20               # shear, beside grpo
    python -m lab.studies.compare --arms entropy oracle --steps 20
    python -m lab.studies.compare --arms shear "wrong: scaled --method-option negative=.5"
    python -m lab.studies.compare --arms grpo shear --model PATH --data problems.jsonl

Other flags are those of train.py.

An arm is a method, or a name, a colon and a method with flags of train.py. These are controls,
because methods differ in the size of their steps and in how much they punish:
    shear-mean1: scaled --method-option of=shear --method-option mean1=yes
    grpo-wrong-.12: scaled --method-option negative=.12
All arms are compared with `grpo`. `--use lab.fast` gives all of them the same numbers sooner.

A trial is an arm, a learning rate and a seed. Two stages run one after the other. `tune` tries
half, one and two times the task's `--lr` (adapters: ten times that) on two seeds, and further rates
while the best lies at an end, or only `--rates`. `confirm` trains each arm at its best rate on
`--seeds`. All arms of a seed start from the same model and see the same problems. Finished trials
are appended to `--rows`. So the same command continues where it was interrupted, and prints the
table when no trial is missing. Other flags of train.py make another task, whose trials may go to
the same file. A file with an arm's trials by other code or flags is refused, a finished one, too.

The table has means over all seeds of the file. D is the mean difference from GRPO, paired by seed,
with its 90% interval (Student's t) and the number of seeds on which it is positive:
    curve            mean reward of all training steps
    held out         accuracy on `--heldout` (256) problems after training, sampled as in training
    AUC              of the weights against the true first error, before / after training
    weight, share    mean weight of tokens, and the share of them that it is spread over

Left out: several GPUs, and process reward models outside the embedded task: run train.py for these;
what a method costs: a run's metrics.jsonl has the seconds of each phase.
"""

import contextlib
import hashlib
import io
import itertools
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from base.errors import BadInput
from lab.studies.flags import parse_study, refuse_flags

TUNING = (100, 101)  # seeds that choose the learning rates
ARMS_HELP = 'Arms beside grpo: a method, or "NAME: METHOD FLAGS".'


@dataclass(frozen=True)
class Compare:
    """Train with credit methods, each at its own learning rate; one table.

    Flags of train.py that are not set here can be added.
    """

    arms: Annotated[tuple[str, ...], tyro.conf.arg(help=ARMS_HELP)] = ("shear",)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds that each arm is confirmed on."""
    rates: tuple[float, ...] = ()
    """Learning rates to tune each arm on; if not given, a grid around the task's --lr."""
    jobs: int = 2
    """Processes; a seed's trials each."""
    rows: Path = Path("runs/compare.jsonl")
    """File of finished trials."""


if __name__ == "__main__":
    parse_study(Compare)  # --help and wrong flags end here: the imports below take seconds

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

import train
from base import files
from base.config import Config, parse_train
from base.options import module_of
from harness import fsdp, log
from harness.command import run_command
from harness.run import Run, load_run, sample, seed_of, start_run, warm_up_policy
from lab.studies.needs import settings_of_run
from lab.studies.stats import half_width
from rewards import rewards_of

# Flags of train.py that trials set themselves, and those that all arms of a task share.
OURS = "seed lr name out resume"
SHARED = "task model data template toy_lines toy_width warmup_steps heldout"
LOWEST, HIGHEST = 1 / 8, 8  # bounds of a grid's rates, as multiples of its middle
HELDOUT = 256  # problems, if --heldout is not given
ROOT = Path(__file__).parents[2]
ROOMS = "base credit grading harness lab/fast lab/rules lab/tools tasks".split()
CODE = "*.py", "lab/*.py", *(f"{room}/**/*.py" for room in ROOMS)


class Cell(NamedTuple):
    """A task by its flags of train.py, and the arms that it is trained with."""

    flags: str
    arms: Sequence[str]
    rates: Sequence[float] = ()  # if given, these instead of a grid


class Trial(NamedTuple):
    """The values that identify a trial, in its row; `cell` is a task's flags, `rule` an arm's name.

    A row then has what its stage measures.
    """

    stage: str
    cell: str
    seed: int
    rule: str
    lr: float


# The numbers of a trial that are compared; "before.auc" is "auc" in the dictionary "before".
OUTCOMES = "curve sampled weight_mean ess before.auc after.auc".split()
# Settings that decide the model after its warm-up.
DECIDE_START = "task model data seed toy_lines toy_width warmup_steps use".split()
COLUMNS = [*Trial._fields, *OUTCOMES, "code", "rewards"]


@run_command
def main(argv: list[str] | None = None) -> None:
    """Run the trials that are missing, then print the table."""
    flags, others = parse_study(Compare, argv)
    parse_train(others)  # which refuses what it does not know
    refuse_flags(others, f"method {OURS}", "the trials set it")
    stages = {"tune": TUNING, "confirm": sorted(set(flags.seeds))}
    if len(stages["confirm"]) < 2 or set(flags.seeds) & set(TUNING):
        given = " ".join(map(str, flags.seeds))
        tuning = ", ".join(map(str, TUNING))
        raise BadInput(f"--seeds {given}: give two or more, without {tuning}, which tune")
    arms = allowed_arms(flags.arms, others)
    cell = Cell(shlex.join(others), arms, sorted(set(flags.rates)))
    flags.rows.parent.mkdir(parents=True, exist_ok=True)
    for stage, seeds in stages.items():
        run_stage(stage, cell, seeds, flags.rows, flags.jobs)
    print("\n".join(log.markdown(table_of(trials_in(flags.rows), cell))))


def allowed_arms(given: Sequence[str], others: list[str]) -> list[str]:
    """`grpo` and the given arms; raises BadInput for one that train.py would refuse."""
    arms = ["grpo"]
    names = {"grpo"}
    for arm in given:
        if arm == "grpo":
            continue
        if name_of(arm) in names:
            raise BadInput(f"--arms {arm}: another arm has this name; change it")
        settings_of(arm, others)
        arms.append(arm)
        names.add(name_of(arm))
    return arms


def name_of(arm: str) -> str:
    """An arm's name in rows and tables."""
    return arm.partition(":")[0]


def words_of(arm: str) -> list[str]:
    """An arm's flags of train.py."""
    name, _, command = arm.partition(":")
    return ["--method", *(command or name).split()]


def settings_of(arm: str, others: list[str]) -> Config:
    """train.py's settings of an arm, after the `others`; raises BadInput."""
    words = words_of(arm)
    refuse_flags(words, f"{OURS} {SHARED}", "no flag of an arm")
    return settings_of_run([*others, *words])


def run_stage(stage: str, cell: Cell, seeds: Sequence[int], path: Path, jobs: int) -> None:
    """Run the trials of a stage until none is missing: a grid grows with its results."""
    while True:
        refuse_other_code(cell, path)  # of a finished file, too
        by_seed = defaultdict(list)
        for trial in missing_trials(stage, trials_in(path), cell, seeds):
            by_seed[trial.seed].append(trial)
        if not by_seed:
            break
        count = sum(map(len, by_seed.values()))
        print(f"{stage}: {count} trials, each a run of train.py, {jobs} at a time", flush=True)
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            run = partial(run_from_one_start, cell, path)
            trained = pool.imap_unordered(run, by_seed.values())
            list(tqdm(trained, stage, len(by_seed), disable=None))


def trials_in(path: Path) -> pd.DataFrame:
    """A row per finished trial, with COLUMNS; NaN is what its stage does not measure."""
    lines = files.read_lines(path) if os.path.lexists(path) else []
    trials = pd.json_normalize(lines, max_level=1).reindex(columns=COLUMNS)
    # the mean over the steps; one in which nothing could be graded, null, does not count
    trials["curve"] = [pd.Series(rewards, dtype=float).mean() for rewards in trials["rewards"]]
    return trials


def code_of(arm: str, root: Path = ROOT, flags: str = "") -> str:
    """A digest of the code that trains and of the arm's flags, which every trial's row has.

    Files that `--use` and `--reward` name count, in the arm's flags or in the task's `flags`.
    """
    digest = hashlib.sha256(shlex.join(words_of(arm)).encode())
    config = settings_of(arm, shlex.split(flags))
    for text in (*config.use, *filter(None, [config.reward])):
        digest.update(Path(module_of(text).__file__ or "").read_bytes())
    for path in sorted(itertools.chain.from_iterable(map(root.glob, CODE))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def refuse_other_code(cell: Cell, path: Path) -> None:
    """Raise BadInput if an arm has trials of other code or flags; those without a digest pass."""
    trials = trials_in(path)
    trials = trials[trials["cell"] == cell.flags].dropna(subset="code")
    for arm in cell.arms:
        code = code_of(arm, flags=cell.flags)
        if not trials["code"][trials["rule"] == name_of(arm)].isin([code]).all():
            reason = f"has trials of {name_of(arm)} by other code or flags"
            raise BadInput(f"--rows {path}: {reason}; give another file")


# ---- which trials --------------------------------------------------------------------------------


def missing_trials(
    stage: str, trials: pd.DataFrame, cell: Cell, seeds: Sequence[int]
) -> list[Trial]:
    """The trials of a stage that have not run; `trials` has those that have."""
    ran = set(trials[list(Trial._fields)].itertuples(index=False, name=None))
    wanted = []
    for arm in cell.arms:
        for lr in rates_of(stage, cell, arm, trials):
            wanted += [Trial(stage, cell.flags, seed, name_of(arm), lr) for seed in seeds]
    return [trial for trial in wanted if trial not in ran]


def rates_of(stage: str, cell: Cell, arm: str, trials: pd.DataFrame) -> Sequence[float]:
    """The learning rates of a stage's trials, which depend on the trials that have run."""
    curves = mean_curves(cell, arm, trials)
    if stage == "confirm":
        return [curves.idxmax()]
    config = settings_of(arm, shlex.split(cell.flags))
    middle = config.lr
    if "lab.tools.lora" in " ".join(config.use):
        middle *= 10  # adapters need ten times the rate of the whole model
    return cell.rates or grid(middle, curves)


def grid(middle: float, curves: pd.Series) -> list[float]:
    """Half the middle rate, itself and its double, and further rates while an end is the best.

    Each further rate is half or twice the best one.
    """
    rates = [middle / 2, middle, middle * 2]
    while set(rates) <= set(curves.index):
        best = curves[rates].idxmax()
        if best == rates[0] and best > LOWEST * middle:
            rates.insert(0, best / 2)
        elif best == rates[-1] and best < HIGHEST * middle:
            rates.append(best * 2)
        else:
            break
    return rates


def trials_of(trials: pd.DataFrame, stage: str, cell: str, arm: str) -> pd.DataFrame:
    """The rows of a stage, a task and an arm."""
    own = trials[(trials["stage"] == stage) & (trials["cell"] == cell)]
    return own[own["rule"] == name_of(arm)]


def mean_curves(cell: Cell, arm: str, trials: pd.DataFrame) -> pd.Series:
    """Learning rate -> mean training reward over the steps and seeds of `tune`.

    It has the rates that all seeds have run.
    """
    own = trials_of(trials, "tune", cell.flags, arm)
    # a row per rate, a column per seed; NaN where that trial has not run
    curves = own.pivot_table("curve", "lr", "seed").reindex(columns=TUNING)
    if cell.rates:
        curves = curves.reindex(cell.rates)
    return curves.dropna().mean(axis=1)


# ---- running them --------------------------------------------------------------------------------


def run_from_one_start(cell: Cell, path: Path, trials: list[Trial]) -> None:
    """Run trials of one seed, one after the other; each adds its line to the file."""
    arms = {name_of(arm): arm for arm in cell.arms}
    with tempfile.TemporaryDirectory() as out:
        taught: dict[tuple, Path] = {}  # what decides the warm-up -> the model after it
        for number, trial in enumerate(trials):
            words = ["--heldout", str(HELDOUT), *shlex.split(cell.flags)]
            words += ["--seed", str(trial.seed), "--lr", str(trial.lr)]
            words += ["--name", str(number), "--out", out]
            config = settings_of(arms[trial.rule], words)
            decided = tuple(getattr(config, name) for name in DECIDE_START)
            start = taught.setdefault(decided, Path(out, str(number), "start"))
            if start.exists():
                config = replace(config, model=str(start))
            with contextlib.redirect_stdout(io.StringIO()):
                result = run_trial(config, trial.stage)
            code = code_of(arms[trial.rule], flags=cell.flags)
            files.append_rows(path, [trial._asdict() | {"code": code} | result])


def run_trial(config: Config, stage: str) -> dict:
    """What a stage measures in a run without checkpoints."""
    ranks = fsdp.join(config.device, config.threads)
    try:
        loaded = load_run(config, ranks)
        with log.open_folder(loaded) as folder:
            warm_up_policy(loaded, folder)
            run = start_run(loaded, folder)
            return train_only(run) if stage == "tune" else confirm(run)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def train_only(run: Run) -> dict:
    """Train; return each step's reward, and what weight tokens had on average."""
    steps = range(run.config.steps)
    metrics = pd.DataFrame([train.train_step(run, step)[0] for step in steps])
    means = metrics[["weight_mean", "ess"]].mean().round(4)
    return {"rewards": metrics["reward"].round(6).tolist()} | means.to_dict()


def confirm(run: Run) -> dict:
    """Train, and measure held-out accuracy afterwards and credit's AUCs before and afterwards.

    The accuracy is the share of right responses to the held-out problems, sampled as in training.
    """
    config = run.config
    before = train.evaluate(run)
    result = train_only(run)
    torch.manual_seed(seed_of(config.seed))
    heldout = run.context.task.heldout
    rollouts = sample(run, heldout, config.rollouts_per_prompt, config.temperature)
    verdicts = run.context.task.verdicts(heldout, rollouts)
    after = train.evaluate(run)
    return result | {
        "sampled": float(np.nanmean(rewards_of(verdicts))),
        "before": before.get("localisation"),  # None on a task that does not know errors
        "after": after.get("localisation"),
    }


# ---- the table -----------------------------------------------------------------------------------


def outcomes_of(trials: pd.DataFrame, cell: str, arm: str) -> pd.DataFrame:
    """A row per seed, from the arm's trials of `confirm`, with the columns OUTCOMES."""
    return trials_of(trials, "confirm", cell, arm).set_index("seed")[OUTCOMES].astype(float)


def with_interval(values: pd.Series, level: float = 0.9) -> str:
    """Write the mean, the ends of its interval and how many values are positive.

    An example is +0.012 (+0.004 to +0.020), 8/10. NaN does not count.
    """
    values = values.dropna()
    mean = values.mean()
    half = half_width(values, level)
    text = f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"
    return f"{text}, {(values > 0).sum()}/{len(values)}"


def table_of(trials: pd.DataFrame, cell: Cell) -> list[dict[str, str]]:
    """A line per arm."""
    # each arm's best rate
    rates = {name_of(arm): mean_curves(cell, arm, trials).idxmax() for arm in cell.arms}
    at_own_rate = trials[trials["lr"] == trials["rule"].map(rates)]
    of_grpo = outcomes_of(at_own_rate, cell.flags, "grpo")
    table = []
    for name, lr in rates.items():
        own = outcomes_of(at_own_rate, cell.flags, name)
        more = own - of_grpo  # by seed; NaN where one of them has not run
        line = {"method": name, "lr": f"{lr:g}"}
        for outcome, title in (("curve", "curve"), ("sampled", "held out")):
            line[title] = f"{own[outcome].mean():.3f}"
            line[f"D, {title}"] = "" if name == "grpo" else with_interval(more[outcome])
        line["AUC"] = f"{mean_of(own['before.auc'])} / {mean_of(own['after.auc'])}"
        line["weight"] = mean_of(own["weight_mean"])
        line["share"] = mean_of(own["ess"])
        table.append(line)
    return table


def mean_of(values: pd.Series) -> str:
    """The mean of the known values; a dash for none. Its sum is exact, which pandas' is not."""
    known = values.dropna()
    return f"{statistics.mean(known):.2f}" if len(known) else "-"


if __name__ == "__main__":
    sys.exit(main())
