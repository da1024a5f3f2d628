"""A run's metrics.jsonl to a dashboard, while it grows or after the fact.

    python -m lab.tools.track wandb runs/NAME             # the steps that are there
    python -m lab.tools.track trackio runs/NAME --follow  # and those that come, until the run ends
    tensorboard --logdir runs                             # shows what `track tensorboard` wrote

It is a process of its own, so a dashboard that fails never hurts the run, and metrics.jsonl stays
the source. A dashboard that cannot start is refused at once. A step that it does not take is a
warning, and is sent again with the next one. `--follow` ends with the run: when the row after
training is there, or no process holds the run's folder any more.

Left out: the evaluations before and after training, samples, continuing an earlier dashboard's run.
"""

import fcntl
import importlib
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro

from base import files
from base.errors import BadInput, RunFailed, cause
from lab.tools.command import command, packages

SECONDS = 10.0  # between two looks at metrics.jsonl
GIVE_UP = 2  # steps that fail before the others wait for the next time
Log = Callable[[dict[str, float], int], object]  # metrics by name, and their step


def track(
    tracker: tyro.conf.Positional[Literal["wandb", "trackio", "tensorboard"]],
    run: tyro.conf.Positional[Path],
    *,
    follow: bool = False,
) -> None:
    """Log each step of the run in a folder; with `follow` also those that come."""
    settings = files.config_of(run)
    if settings is None:
        raise BadInput(f"{run}: is no run of train.py, which has a config.json; give its folder")
    with packages(f"pip install {tracker}"):
        log, finish = start(tracker, settings, run)
    waiting: list[dict] = []
    last = 0  # the last step that was read
    while True:
        goes_on = follow and is_held(run)  # asked first, so that no later row is missed
        path = run / "metrics.jsonl"
        rows = files.read_lines(path) if path.exists() else []
        for row in rows:
            if row.get("step", 0) > last:
                last = row["step"]
                waiting = send([*waiting, row], log)
        if not goes_on or (rows and "after" in rows[-1]):
            break
        time.sleep(SECONDS)
    waiting = send(waiting, log)
    finish()
    if waiting:
        raise RunFailed(f"{tracker}: {len(waiting)} of {last} steps were not logged; try again")


def start(tracker: str, settings: dict, run: Path) -> tuple[Log, Callable[[], object]]:
    """How to log to a tracker, and how to end it; raises BadInput where it cannot start."""
    if tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(run)
        return partial(write_scalars, writer), writer.close
    package = importlib.import_module(tracker)
    place = {"dir": run} if tracker == "wandb" else {}
    try:
        board = package.init(project="shear", name=run.resolve().name, config=settings, **place)
    except Exception as error:  # of any class; the cause stays attached
        raise BadInput(
            f"{tracker}: cannot start ({cause(error)}); log in, set WANDB_MODE=offline, or take "
            "tensorboard"
        ) from error
    return lambda metrics, step: board.log(metrics, step=step), board.finish


def write_scalars(writer: Any, metrics: dict[str, float], step: int) -> None:
    """Write a step's metrics for TensorBoard."""
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)


def send(rows: list[dict], log: Log) -> list[dict]:
    """Log the rows, the oldest first; return those that failed, with a warning for each."""
    failed: list[dict] = []
    for number, row in enumerate(rows):
        if len(failed) == GIVE_UP:
            return [*failed, *rows[number:]]
        try:
            log(flatten_numbers(row), row["step"])
        except Exception as error:  # dashboards raise errors of any class
            print(f"WARNING: step {row['step']} was not logged ({cause(error)})", file=sys.stderr)
            failed.append(row)
    return failed


def is_held(run: Path) -> bool:
    """Whether a process has locked the run's folder, as `base.files.locked_folder` does."""
    handle = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


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


main = command("lab.tools.track", track)

if __name__ == "__main__":
    sys.exit(main())
