"""A run's metrics.jsonl to a tracker, while it grows or after the fact.

    python -m lab.tools.track wandb runs/NAME     # or trackio, tensorboard, which must be installed

metrics.jsonl stays the source. Left out: the evaluations before and after training, samples.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from harness import files
from harness.config import TrainConfig, flat
from tasks.errors import BadInput, cause

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


def follow(name: str, folder: Path, every: float = 10.0) -> None:
    """Log each step's row as it comes, until the row after training is there."""
    config = files.read_config(files.read_settings(folder / "config.json"))
    tracker = start_tracker(name, config, folder)
    logged = 0
    while True:
        rows = files.read_lines(folder / "metrics.jsonl")
        for row in rows[logged:]:
            if "step" in row:
                tracker.log(flatten_numbers(row), step=row["step"])
        logged = len(rows)
        if rows and "after" in rows[-1]:
            break
        time.sleep(every)
    tracker.finish()


def start_tracker(name: str, config: TrainConfig, folder: Path) -> "GeneralTracker":
    """The tracker of a name; raises BadInput where it cannot start."""
    from accelerate import tracking  # here, as few runs ask for it
    from accelerate.state import PartialState

    PartialState()  # the trackers raise without it; it takes a process group as it is
    kind = tracking.LOGGER_TYPE_TO_CLASS[name]
    if name == "tensorboard":
        run = kind(name, logging_dir=folder)
    else:
        place = {"dir": folder} if name == "wandb" else {}
        run = kind("shear", name=folder.name, config=flat(config), **place)
    try:
        run.start()
    except Exception as error:  # of every kind; the cause stays attached
        remedy = "log in, set WANDB_MODE=offline, or leave it out"
        raise BadInput(f"{name}: cannot start ({cause(error)}); {remedy}") from error
    return run


def flatten_numbers(row: dict) -> dict[str, float]:
    """The numbers of a row by name; those of a dictionary in it are named `dictionary/name`."""
    numbers = {}
    for name, value in row.items():
        if isinstance(value, dict):
            for inner, number in flatten_numbers(value).items():
                numbers[f"{name}/{inner}"] = number
        elif isinstance(value, int | float):
            numbers[name] = value
    return numbers


if __name__ == "__main__":
    follow(sys.argv[1], Path(sys.argv[2]))
