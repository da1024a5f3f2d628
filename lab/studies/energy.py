"""Where the energy of the policy gradient lies: around the first wrong step, or by quarters.

    python -m lab.studies.energy                    # the embedded task, before training
    python -m lab.studies.energy --model runs/NAME/model --arms shear position
    python -m lab.studies.energy --task words --model PATH --batches 8
    python -m lab.studies.energy --task math --model PATH --data problems.jsonl --max-tokens 384
    python -m lab.studies.energy --model PATH --rollouts solutions.jsonl

A token's energy is n_t = 1 - 2 p_t + sum_v p_v^2, the squared norm of the gradient of log pi in its
logits; with a weight w_t it is w_t^2 n_t. A task that knows first wrong steps has three parts,
before, at and after it, of the wrong rollouts of groups with right and wrong ones in which it is
known. Any other task has the quarters of all rollouts of such groups. A line of `--rollouts` is
{"problem", "solution", "label"}, as in `lab.studies.diagnose`, with the "error" of a wrong one:
[start, end], the characters of its first wrong step in "solution". The table has, for each part and
each arm:

    tokens      mean number of tokens
    energy      mean sum of n_t
    share       the part's share of all n_t, in percent
    weight      mean w_t
    w2 share    the part's share of all w_t^2 n_t, in percent

Energy before the first error is noise that credit can silence, if what comes before does not decide
the outcome. After it there is noise, too, and a rule that raises the weights there raises it. An
arm is written as in `lab.studies.compare`.

Left out: right rollouts around first wrong steps, the correlation of a rollout's tokens, the
embedding's and the layers' share of the gradient.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from harness.config import Config
from lab.studies.flags import parse_study

ARMS_HELP = 'Arms: a method, or "NAME: METHOD FLAGS".'


@dataclass(frozen=True)
class Energy:
    """Measure the policy gradient's energy around the first error, or by quarters.

    Flags of train.py can be added.
    """

    arms: Annotated[tuple[str, ...], tyro.conf.arg(help=ARMS_HELP)] = ("shear", "position")
    batches: int = 3
    """Batches of rollouts, each of a step's size, or groups of --rollouts."""
    rollouts: str | None = None
    """JSON lines of labelled solutions, which are read instead of samples."""
    rows: Path = Path("runs/energy.jsonl")
    """File that the rows are added to."""


if __name__ == "__main__":
    parse_study(Energy)  # --help and wrong flags end here: the imports below take seconds

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from credit.batch import Batch, effective_weights
from credit.measures import positions
from harness import files, fsdp, log
from harness.command import run_command
from harness.load import load_run
from harness.models import round_weights
from harness.run import Ranks, Run
from lab.studies.compare import name_of
from lab.studies.gradients import arms_of_credit, credit_by_arm, prepared, sample_batch
from lab.studies.needs import settings_of_run, teach
from lab.studies.prefixes import as_batch, context_at_start, load_with_solutions
from lab.tools.salience import logit_gradients
from lab.tools.words import step_in_tokens
from tasks.errors import BadInput
from tasks.rows import read_rows
from tasks.task import FirstError

AROUND_ERROR = "before", "at", "after"
QUARTERS = "first", "second", "third", "last"
NONE_COUNTS = {
    AROUND_ERROR: "no wrong rollout has a known first error",
    QUARTERS: "no group has right and wrong rollouts",
}
COLUMNS = {"tokens": ".1f", "energy": ".3f", "share": ".0f", "weight": ".2f", "w2 share": ".0f"}


@run_command
def main(argv: list[str] | None = None) -> None:
    """Sample batches, write a row for each arm and part, and print them as a table."""
    flags, others = parse_study(Energy, argv)
    if flags.rollouts:
        others = [*others, "--task", "math"]
    config = settings_of_run(others)
    settings = arms_of_credit(flags.arms, others, config)
    flags.rows.parent.mkdir(parents=True, exist_ok=True)
    ranks = fsdp.join(config.device, config.threads)
    run, batches = read(flags, config, ranks) if flags.rollouts else sample(flags, config, ranks)
    arms = prepared(run, settings)
    parts = AROUND_ERROR if run.context.task.first_error else QUARTERS
    tables = []
    for index, batch in enumerate(batches):
        credit = credit_by_arm(batch, arms.values())  # (arms, B, T)
        table = token_table(run, batch, parts, dict(zip(arms, credit, strict=True)))
        tables.append(table.assign(batch=index))
    tokens = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    if tokens.empty:
        remedy = "give others to --rollouts" if flags.rollouts else "raise --prompts-per-step"
        raise BadInput(f"{NONE_COUNTS[parts]}; {remedy}")
    rows = [row for arm in arms for row in part_rows(tokens, arm, parts)]
    about = {
        "task": config.task,
        "toy_lines": config.toy_lines,
        "model": config.model,
        "seed": config.seed,
    }
    files.append_rows(flags.rows, [about | row for row in rows])
    lines = [
        row | {name: format(row[name], form) for name, form in COLUMNS.items()} for row in rows
    ]
    print("\n".join(log.markdown(lines)))


def sample(flags: Energy, config: Config, ranks: Ranks) -> tuple[Run, Iterable[Batch]]:
    """The run before training, and batches of its rollouts."""
    run = load_run(config, ranks)
    teach(run)
    round_weights(run.context.policy.model, getattr(torch, config.dtype))
    run.context = context_at_start(run)
    numbers = tqdm(range(flags.batches), "batches", leave=False, disable=None)
    return run, (sample_batch(run, number) for number in numbers)


def read(flags: Energy, config: Config, ranks: Ranks) -> tuple[Run, Iterable[Batch]]:
    """A run with the model, and the mixed groups of `--rollouts`, whose errors its task knows."""
    assert flags.rollouts
    run, groups = load_with_solutions(flags.rollouts, config, ranks)
    errors = {}
    for row in read_rows(Path(flags.rollouts)):
        if row.get("error"):
            errors[row["problem"], row["solution"]] = row["error"]
    if errors:
        task = replace(run.context.task, first_error=partial(labelled_error, errors))
        run.context = replace(run.context, task=task)
    run.context = context_at_start(run)
    mixed = [group for group in groups if group.mixed]
    chosen = tqdm(mixed[: flags.batches], "groups", leave=False, disable=None)
    return run, (as_batch(group, ranks.device) for group in chosen)


def labelled_error(
    errors: dict[tuple[str, str], list[int]], problem: dict, tokens: Sequence[str]
) -> FirstError | None:
    """The first wrong step of a response, if `errors` has its problem and text."""
    place = errors.get((problem["problem"], "".join(tokens)))
    return step_in_tokens(tokens, "labelled", *place) if place else None


def token_table(
    run: Run, batch: Batch, parts: tuple[str, ...], credit: dict[str, Tensor]
) -> pd.DataFrame:
    """A row for each token of the rollouts that count: its part, energy, and weight by each arm."""
    if parts == AROUND_ERROR:
        start, end = batch.true_errors(run.context.task, run.context.tokenizer).split(1, dim=1)
        position = positions(batch.mask)  # (B, T)
        part = (position >= start).long() + (position >= end).long()  # (B, T), an index of `parts`
        counts = batch.mask & (start >= 0)  # (B, T)
    else:
        part = quarter_of(batch.mask)  # (B, T), an index of `parts`
        counts = batch.mask & (batch.advantages != 0)[:, None]  # (B, T)
    table = pd.DataFrame({"energy": logit_gradients(batch.rollouts, run.context)[counts].tolist()})
    table["part"] = [parts[number] for number in part[counts].tolist()]
    table["row"] = counts.nonzero()[:, 0].tolist()
    for arm, token_advantages in credit.items():
        weights = effective_weights(token_advantages, batch.advantages, batch.mask)  # (B, T)
        table[arm] = weights[counts].tolist()
    return table


def quarter_of(mask: Tensor) -> Tensor:
    """The quarter of its response, 0 to 3, that each token of a mask (B, T) is in."""
    lengths = mask.sum(1, keepdim=True).clamp_min(1)  # (B, 1)
    return 4 * positions(mask) // lengths  # (B, T)


def part_rows(tokens: pd.DataFrame, arm: str, parts: tuple[str, ...]) -> list[dict]:
    """An arm's rows, one for each part."""
    rollouts = len(tokens[["batch", "row"]].drop_duplicates())
    weighted = tokens[arm] ** 2 * tokens["energy"]
    rows = []
    for name in parts:
        is_own = tokens["part"] == name
        own = tokens[is_own]
        row = {
            "arm": name_of(arm),
            "part": name,
            "tokens": len(own) / rollouts,
            "energy": own["energy"].sum() / rollouts,
            "share": 100 * own["energy"].sum() / tokens["energy"].sum(),
            "weight": own[arm].mean(),
            "w2 share": 100 * weighted[is_own].sum() / weighted.sum(),
        }
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
