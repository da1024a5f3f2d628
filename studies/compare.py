"""Credit methods under the same loop, each at its own learning rate, as one table.

    python -m studies.compare --steps 20                       # the embedded task, all rows that it
                                                               allows
    python -m studies.compare --methods grpo shear first       # some of them
    python -m studies.compare --methods grpo shear --model PATH --data problems.jsonl   # any flags
                                                                                        of train.py
    python -m studies.compare runs/A runs/B                    # nothing is trained: these runs in
                                                               one picture

A row is a method, and what is changed of it, in any order: `-mean1` (a group's mean weight is 1),
`-wrong-X` (wrong rollouts' advantages times X), `-dynamic` (dynamic sampling), `-lora` (an adapter
of rank 16). `shear-mean1` and `grpo-wrong-.12` are controls: methods differ in the size of their
steps, and in how much they punish.

A trial is a row, a learning rate and a seed. Four stages run one after the other: `tune` tries
half, one and two times the task's `--lr` (adapters: ten times that) on two seeds, and further while
the best lies at an end, or only `--rates`; `confirm` takes each row's best rate on `--seeds`. On
the embedded task `cost` times a step of each row, and of GRPO by turns; `advantages` measures true
token advantages at the start. Rows of a seed go from one start, or from starts made alike, and see
the same problems. Finished trials are lines of `--rows`, which is only added to: the same command
goes on where it was interrupted, and prints the table where nothing lacks. Other flags of train.py
are another task, whose trials may go to the same file; trials of other code are not added to.

The table has means over the seeds, D the mean of the differences from GRPO, paired by seed, with
its 90% interval by Student's t, and on how many seeds it is positive:
    curve            mean reward of all training steps
    held out         accuracy on `--heldout` (256) problems after training, as many samples as
                     rollouts
    AUC              of the weights against the true first error, before / after training; and of
                     the wrong step alone
    correlation      of credit with true token advantages at the start, corrected for their noise
    extra cost       a step's time beside GRPO's, median of three
    weight, share    mean weight of tokens, and the share of them that it is spread over

Left out: several GPUs, and the process reward model of a real one: run train.py for these.
"""

import contextlib
import hashlib
import multiprocessing
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, NotRequired, TypedDict

import tyro

from credit.settings import Credit, number, several
from credit.table import METHODS, needing
from harness.config import Count, PathFlag, Seeds, Texts, parse_study, spelled
from tasks.rows import BadInput

OPTIONS = {"sdpo": {"method_option": ("mix=0.9",)}}  # for a weak model
CHANGES = {
    "mean1": {"rescale": "mean1"},
    "dynamic": {"dynamic_sampling": 4},
    "lora": {"lora_rank": 16},
}
TUNING = (100, 101)  # seeds
SUFFIXES = "-mean1, -dynamic, -lora and -wrong-X"
ROWS = "grpo shear shear-mean1 position shuffle kgae first grpo-wrong-.12".split()
ROWS += [name for name in METHODS if name not in ROWS and name not in needing("adapter")]
ROWS += "grpo-dynamic shear-dynamic grpo-lora arca-lora".split()
ROWS_HELP = (
    f"Rows: a method, then any of {SUFFIXES}; if not given, all that the task allows of "
    + ", ".join(ROWS)
)


def flags_of(row: str) -> dict:
    """The flags of train.py that a row sets; raises BadInput for the name of none."""
    method, *changes = re.split("-(?=mean1|dynamic|lora|wrong-)", row)
    flags = {"method": method} | OPTIONS.get(method, {})
    try:
        METHODS[method]
        for change in changes:
            scale = change.removeprefix("wrong-")
            flags |= CHANGES[change] if scale == change else {"negative_scale": float(scale)}
    except (KeyError, ValueError) as error:
        raise BadInput(
            f"--methods {row}: is no method of train.py with any of {SUFFIXES}; change it"
        ) from error
    return flags


@dataclass(frozen=True)
class Compare:
    """Train with every credit method, each at its own learning rate; one table.

    Flags of train.py that are not set here can be added. Without any, all rows take some hours.
    """

    runs: tyro.conf.Positional[tuple[str, ...]] = ()
    """Only folders of runs: nothing is trained, their curves go into one picture."""
    methods: Annotated[Texts, tyro.conf.arg(help=ROWS_HELP)] = ()
    seeds: Seeds = (0, 1, 2, 3, 4)
    """Seeds of the table."""
    tuning_seeds: Seeds = TUNING
    """Seeds that choose the learning rates."""
    rates: Annotated[tuple[float, ...], several(number(float, 1e-30))] = ()
    """Learning rates to tune each row on, instead of half, one and two times the task's --lr and
    further.
    """
    jobs: Count = 2
    """Processes; a seed's trials each, if there are enough seeds."""
    rows: PathFlag = Path("runs/compare.jsonl")
    """File of finished trials."""


def parse_compare(argv: Sequence[str] | None = None) -> tuple[Compare, list[str]]:
    """This command's flags, and those of train.py as they are."""
    return parse_study(Compare, argv, "python -m studies.compare")


if __name__ == "__main__":
    parse_compare()  # --help and mistakes end here: what follows takes seconds to import

import numpy as np
import torch
from scipy import stats
from tqdm import tqdm

import train
from credit.batch import Batch
from harness import files, parallel, report, tables
from harness.config import TrainConfig, parse_train, refuse_flags
from harness.launch import resolve, run_command
from harness.run import Run, prepared, sample_and_grade, seed_of
from rewards import rewards_of
from studies import figures
from studies.advantages import measure

# flags of train.py that trials set themselves
OURS = "method seed lr name out resume prm"
LOWEST, HIGHEST = 1 / 8, 8  # of the grid's middle: no grid goes further
LEVEL = 0.90  # of intervals
HELDOUT = 256  # problems, if not given
TRAINING = "", "credit", "fast", "grading", "harness", "tasks"  # folders of the code that trains
GROUPS, CONTINUATIONS = 16, 16  # of true token advantages
TIMED = 3  # steps
CREDIT = {"method", "method_option", "rescale", "negative_scale"}  # flags that change credit alone


class Row(TypedDict):
    """A trial's line in --rows."""

    cell: str
    seed: int
    rule: str
    lr: float
    code: NotRequired[str | None]
    seconds: NotRequired[float]


class Tuned(Row):
    """Of the stage `tune`."""

    stage: Literal["tune"]
    rewards: list[files.Share | None]


class Located(TypedDict):
    """Where credit went."""

    auc: NotRequired[float | None]
    auc_step: NotRequired[float | None]


class Confirmed(Row):
    """Of the stage `confirm`."""

    stage: Literal["confirm"]
    rewards: list[files.Share | None]
    sampled: files.Share | None
    weight_mean: float | None
    ess: float | None
    before: Located | None
    after: Located | None


class Timed(Row):
    """Of the stage `cost`."""

    stage: Literal["cost"]
    step: float
    of_grpo: float


class Advantages(TypedDict):
    """What `studies.advantages` measures."""

    methods: dict[str, dict]


class Continued(Row):
    """Of the stage `advantages`."""

    stage: Literal["advantages"]
    advantages: Advantages


class Cell(NamedTuple):
    """A task by its flags of train.py, the learning rate in the middle of its grid, and the rows
    that are tried.
    """

    flags: str
    lr: float
    rules: list[str]
    tuning: Sequence[int] = TUNING  # seeds
    rates: Sequence[float] = ()  # in place of the grid's


class Trial(NamedTuple):
    """What tells a trial of a stage from the others; `cell` is a task's flags, `rule` a row of the
    table.
    """

    cell: str
    seed: int
    rule: str
    lr: float


@run_command(memory="lower --jobs or --micro-tokens")
def main(argv: list[str] | None = None) -> None:
    """The trials that are not there yet, and the table."""
    flags, others = parse_compare(argv)
    if flags.runs:
        return draw(flags.runs)
    config = parse_train(others)
    refuse_flags(config, OURS, "the trials set it")
    config = resolve(config)
    rules = []
    for rule in flags.methods or ROWS:
        try:
            settings_of_trial(rule, others)
            rules.append(rule)
        except BadInput:  # what the row needs and the task does not have
            if flags.methods:
                raise
    tuning = sorted(set(flags.tuning_seeds))
    cell = Cell(shlex.join(others), config.optimisation.lr, rules, tuning, sorted(set(flags.rates)))
    if len(set(flags.seeds)) < 2 or set(flags.seeds) & set(tuning):
        given, choose = (" ".join(map(str, seeds)) for seeds in (flags.seeds, tuning))
        raise BadInput(
            f"--seeds {given}: --tuning-seeds {choose} choose the rates, an interval needs two "
            "others; give these"
        )
    if "grpo" not in cell.rules:
        raise BadInput(f"--methods {' '.join(cell.rules)}: all are compared with grpo; add it")
    stages = {"tune": tuning, "confirm": sorted(set(flags.seeds))}
    if config.task == "embedded":
        stages |= {"cost": tuning[:1], "advantages": tuning}
    with files.without_leftovers(flags.rows.parent):
        flags.rows.parent.mkdir(parents=True, exist_ok=True)
        for stage, seeds in stages.items():
            while trials := lacking(stage, rows_in(flags.rows), cell, seeds):
                refuse_other_code(cell, flags.rows, trials)
                units = [(stage, cell, part, flags.rows) for part in parts_of(trials, flags.jobs)]
                with multiprocessing.get_context("spawn").Pool(flags.jobs) as pool:
                    trained = pool.imap_unordered(run_from_one_start, units)
                    list(tqdm(trained, stage, len(units), disable=None))
    rows = [
        row
        for row in rows_in(flags.rows)
        if row["stage"] != "confirm" or row["seed"] in flags.seeds
    ]
    print("\n".join(tables.markdown(table_of(rows, cell))))


def draw(runs: Sequence[str]) -> None:
    """The training rewards of these runs, step by step; raises BadInput."""
    path, curves = Path(runs[0]).parent / "compare.png", {}
    for run in runs:
        rows = files.rows(Path(run) / "metrics.jsonl", apart=["step"])
        rewards = [row["reward"] for row in rows if "step" in row]
        curves[run] = np.array([rewards], dtype=float)  # (1, steps), null as NaN
    figures.reward_curves(curves, path)
    print(f"wrote {path}")


def rows_in(path: Path) -> list[dict]:
    """The trials that have run; raises BadInput for a file of something else."""
    apart = ["stage", "seconds", *Trial._fields]  # a trial may have been measured twice
    forms = Confirmed, Tuned, Timed, Continued
    return files.rows(path, forms, apart) if os.path.lexists(path) else []


def code_of_training() -> str:
    """A digest of the code that trains, which every trial's line has."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for folder in TRAINING for path in (root / folder).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def refuse_other_code(cell: Cell, path: Path, missing: list[Trial]) -> None:
    """Raises BadInput if the task has trials of other code; rows before there were digests are not
    told apart.
    """
    others = {row.get("code") for row in rows_in(path) if row["cell"] == cell.flags} - {
        None,
        code_of_training(),
    }
    if others:
        lacks = f"lacks {missing[0].rule} at seed {missing[0].seed}"
        reason = f"{lacks}, and its trials are of other code ({', '.join(sorted(others))})"
        raise BadInput(f"--rows {path}: {reason}; take that code, or give another file")


def settings_of_trial(rule: str, others: list[str]) -> TrainConfig:
    """train.py's settings of a row; raises BadInput."""
    words = [word for name, value in flags_of(rule).items() for word in spelled(name, value)]
    return resolve(parse_train([*others, *words]))


# ---- which trials --------------------------------------------------------------------------------


def lacking(stage: str, rows: list[dict], cell: Cell, seeds: list[int]) -> list[Trial]:
    """The trials of a stage that have not run."""
    trials = []
    for rule in (
        ["grpo"] if stage == "advantages" else cell.rules
    ):  # at the start one trial has the credit of all rows
        rates = [chosen_rate(cell, rule, rows) if stage == "confirm" else cell.lr]
        if stage == "tune":  # adapters need ten times the rate of the whole model
            middle = 10 * cell.lr if "lora_rank" in flags_of(rule) else cell.lr
            rates = cell.rates or grid(middle, mean_curves(cell, rule, rows))
        trials += [Trial(cell.flags, seed, rule, lr) for lr in rates for seed in seeds]
    ran = {Trial(*[row[name] for name in Trial._fields]) for row in rows if row["stage"] == stage}
    return [trial for trial in trials if trial not in ran]


def grid(middle: float, curves: dict[float, float]) -> list[float]:
    """Half the middle rate, itself and its double; beyond, by factors of 2, as long as the best
    lies at an end.
    """
    rates = [middle / 2, middle, middle * 2]
    while set(rates) <= set(curves):
        best = max(rates, key=curves.get)
        if best == rates[0] and best > LOWEST * middle:
            rates.insert(0, best / 2)
        elif best == rates[-1] and best < HIGHEST * middle:
            rates.append(best * 2)
        else:
            break
    return rates


def trials_of(rows: list[dict], stage: str, cell: str, rule: str) -> list[dict]:
    """The rows of a stage, a task and a row of the table."""
    return [row for row in rows if (row["stage"], row["cell"], row["rule"]) == (stage, cell, rule)]


def mean_curves(cell: Cell, rule: str, rows: list[dict]) -> dict[float, float]:
    """Learning rate -> mean training reward over steps and seeds of `tune`, for the rates that all
    seeds have run.
    """
    curves = {}
    for row in trials_of(rows, "tune", cell.flags, rule):
        if row["seed"] in cell.tuning and row["lr"] in (cell.rates or [row["lr"]]):
            curves.setdefault(row["lr"], []).append(mean_reward(row))
    return {
        lr: statistics.mean(of_seeds)
        for lr, of_seeds in curves.items()
        if len(of_seeds) == len(cell.tuning)
    }


def mean_reward(trial: dict) -> float:
    """The mean over a trial's steps, without those in which nothing could be graded."""
    return float(np.nanmean(np.array(trial["rewards"], dtype=float)))


def chosen_rate(cell: Cell, rule: str, rows: list[dict]) -> float:
    """The rate of the highest mean curve in the stage `tune`."""
    curves = mean_curves(cell, rule, rows)
    return max(curves, key=curves.get)


def parts_of(trials: list[Trial], jobs: int) -> list[list[Trial]]:
    """Each seed's trials, in as many parts as keep `jobs` processes busy; each part has the seed's
    start of its own.
    """
    seeds = sorted({trial.seed for trial in trials})
    count = -(-jobs // len(seeds))  # of each seed
    of_seeds = [[trial for trial in trials if trial.seed == seed] for seed in seeds]
    return [part for own in of_seeds for first in range(count) if (part := own[first::count])]


# ---- running them --------------------------------------------------------------------------------


def run_from_one_start(unit: tuple[str, Cell, list[Trial], Path]) -> None:
    """Trials of one seed, one after the other; each adds its line to the file."""
    stage, cell, trials, path = unit
    with tempfile.TemporaryDirectory() as out:
        start = []  # flags: the first trial makes the start, the others load it
        for number, trial in enumerate(trials):
            words = ["--heldout", str(HELDOUT), *shlex.split(cell.flags), *start]
            words += ["--seed", str(trial.seed), "--lr", str(trial.lr)]
            words += ["--name", str(number), "--out", out]
            config = settings_of_trial(trial.rule, words)
            began = time.perf_counter()
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                result = MEASURES[stage](config, cell)
            result["seconds"] = round(time.perf_counter() - began, 1)
            if Path(out, "0", "start").exists():
                start = ["--task", config.task, "--model", f"{out}/0/start"]
            files.append_rows(
                path, [{"stage": stage, "code": code_of_training(), **trial._asdict(), **result}]
            )


@contextlib.contextmanager
def started(config: TrainConfig) -> Iterator[Run]:
    """A run without checkpoints, ready for its first step."""
    ranks = parallel.join(config.machine.device, config.machine.threads)
    try:
        with prepared(config, ranks) as run:
            parallel.refresh(run.trained, run.actor.model, ranks)
            yield run
    finally:
        parallel.leave()


def train_only(config: TrainConfig, cell: Cell) -> dict:
    """The rewards of every step, which choose a learning rate."""
    with started(config) as run:
        rewards = []
        for step in range(config.optimisation.steps):
            metrics, _ = train.train_step(run, step)
            rewards.append(round(metrics["reward"], 6))
        return {"rewards": rewards}


def run_trial(config: TrainConfig, cell: Cell) -> dict:
    """The rewards of every step, held-out accuracy afterwards, and where credit went."""
    with started(config) as run:
        before = located(run, 0)
        count = config.optimisation.steps
        steps = [train.train_step(run, step)[0] for step in range(count)]
        torch.manual_seed(seed_of(config.seed, "evaluation"))
        sampled = accuracy(run)
        after = located(run, count)
    rewards = [round(step["reward"], 6) for step in steps]
    means = {
        name: round(float(np.nanmean([step[name] for step in steps])), 4)
        for name in ("weight_mean", "ess")
    }
    return {"rewards": rewards, "sampled": sampled, **means, "before": before, "after": after}


def accuracy(run: Run) -> float:
    """Share of right ones among responses to the held-out problems, to each as many as in
    training.
    """
    sampling = run.config.sampling
    clock = report.Clock(run.ranks.device)
    _, verdicts = sample_and_grade(
        run, run.task.heldout, sampling.rollouts_per_prompt, sampling.temperature, clock
    )
    return float(np.nanmean(rewards_of(verdicts)))


def located(run: Run, step: int) -> dict | None:
    """`measures.localisation` of the method's weights in rollouts to held-out problems, where
    errors are known.
    """
    if not run.task.first_error:
        return None
    config = run.config
    sampling = config.sampling
    torch.manual_seed(seed_of(config.seed, "evaluation"))
    clock = report.Clock(run.ranks.device)
    problems = run.task.heldout[: config.evaluation.eval_groups]
    rollouts, verdicts = sample_and_grade(
        run, problems, sampling.rollouts_per_prompt, sampling.temperature, clock
    )
    batch = Batch.of(rollouts, verdicts, problems)
    train.add_credit(run, batch, step, clock)
    credited = report.credit_vs_first_error(
        run.tokenizer, run.task, batch, config.credit.method, config.shear
    )
    return credited["localisation"]


def advantages_of(config: TrainConfig, cell: Cell) -> dict:
    """`studies.advantages` of the start, for the rows that differ in credit and need no other model
    for it.
    """
    rules = {}
    for rule in cell.rules:
        flags = flags_of(rule)
        needs = METHODS[flags["method"]].needs
        if flags.keys() <= CREDIT and "prm" not in needs and "adapter" not in needs:
            rules[rule] = Credit(**flags)
    with started(config) as run:
        parts = run.config, run.task, run.actor.model, run.tokenizer
        return {"advantages": measure(*parts, run.task.heldout[:GROUPS], rules, CONTINUATIONS)}


def cost_of(config: TrainConfig, cell: Cell) -> dict:
    """Median seconds of a step beside those of GRPO's, from the same start and by turns, so that
    drift hits both.
    """
    other = replace(
        config,
        name=f"{config.name}-grpo",
        credit=Credit("grpo", prm=config.credit.prm),
        sampling=replace(config.sampling, dynamic_sampling=0),
    )
    with started(config) as ours, started(other) as theirs:
        seconds = [], []
        for step in range(1 + TIMED):
            for number, run in enumerate((ours, theirs)):
                began = time.perf_counter()
                train.train_step(run, step)
                seconds[number].append(time.perf_counter() - began)
    ours, theirs = (statistics.median(times[1:]) for times in seconds)  # the first step warms up
    return {"step": round(ours, 3), "of_grpo": round(theirs, 3)}  # seconds


MEASURES = {"tune": train_only, "confirm": run_trial, "cost": cost_of, "advantages": advantages_of}


# ---- the table -----------------------------------------------------------------------------------


def outcome_by_seed(rows: list[dict], cell: str, rule: str, outcome: str) -> dict[int, float]:
    """Seed -> the `curve` or another outcome of the trials that are compared."""
    trials = trials_of(rows, "confirm", cell, rule)
    return {
        row["seed"]: mean_reward(row) if outcome == "curve" else files.with_nan(row)[outcome]
        for row in trials
    }


def differences(
    rows: list[dict], cell: str, rule: str, other: str, outcome: str = "curve"
) -> np.ndarray:
    """Of the seeds that both have run, (n,)."""
    ours, theirs = (outcome_by_seed(rows, cell, name, outcome) for name in (rule, other))
    return np.array([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def with_interval(values: np.ndarray) -> str:
    """+.012 (+.004 to +.020), 8/10: the mean, the ends of its interval, how many are positive."""
    mean = values.mean()
    half = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * stats.sem(values)
    mean, low, high = (
        f"{value:+.3f}".replace("0.", ".") for value in (mean, mean - half, mean + half)
    )
    return f"{mean} ({low} to {high}), {(values > 0).sum()}/{len(values)}"


def table_of(rows: list[dict], cell: Cell) -> list[dict[str, str]]:
    """A line for each row of the table, of trials whose seeds are those of the table."""
    rates = {rule: chosen_rate(cell, rule, rows) for rule in cell.rules}
    rows = [row for row in rows if row["stage"] != "confirm" or row["lr"] == rates.get(row["rule"])]
    at_start = [
        row["advantages"]["methods"] for row in trials_of(rows, "advantages", cell.flags, "grpo")
    ]
    table = []
    for rule in cell.rules:
        trials = trials_of(rows, "confirm", cell.flags, rule)
        costs = [
            row["step"] / row["of_grpo"] - 1 for row in trials_of(rows, "cost", cell.flags, rule)
        ]
        line = {"method": rule, "lr": f"{rates[rule]:g}"}
        for outcome, title in (("curve", "curve"), ("sampled", "held out")):
            line[title] = (
                f"{statistics.mean(outcome_by_seed(rows, cell.flags, rule, outcome).values()):.3f}"
            )
            of_grpo = differences(rows, cell.flags, rule, "grpo", outcome)
            line[f"D, {title}"] = "" if rule == "grpo" else with_interval(of_grpo)
        for title, name in (("AUC", "auc"), ("wrong step", "auc_step")):
            both = [
                [row[when][name] for row in trials if row[when]] for when in ("before", "after")
            ]
            line[title] = " / ".join(mean_of(values) for values in both)
        if at_start:  # which only the embedded task has
            line["correlation"] = mean_of(
                [methods.get(rule, {}).get("corrected") for methods in at_start]
            )
            line["extra cost"] = " ".join(f"{cost:+.0%}" for cost in costs)
        line["weight"] = mean_of([row["weight_mean"] for row in trials])
        line["share"] = mean_of([row["ess"] for row in trials])
        table.append(line)
    return table


def mean_of(values: list[float | None]) -> str:
    """The mean of those that are known; a dash for none."""
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.2f}" if known else "-"


if __name__ == "__main__":
    sys.exit(main())
