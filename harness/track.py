"""A run's metrics on a dashboard as well, by accelerate's trackers: `--track wandb`, `trackio` or `tensorboard`.

    with tracker(args, folder, main) as track:     on the main rank; does nothing on others, or without --track
        track(metrics)                             the numbers of a step, the nested ones as `seconds/generate`

metrics.jsonl stays the source; what a tracker shows can be made again from it. The tracked run has the folder's name
in the project "shear", and `--resume` continues it. Steps that a resumed run repeats replace those of tensorboard;
wandb keeps the first ones and trackio both, which are equal unless a flag has changed.

wandb heeds its environment, such as WANDB_PROJECT and WANDB_MODE=offline, which needs no network; `wandb sync` sends
such runs later, with `--append` those that were resumed. `tensorboard --logdir runs` and `trackio show` draw curves.

Left out: the evaluations before and after training, samples, weights.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from harness.checkpoint import find
from tasks.rows import BadInput, cause

PROJECT = "shear"


@contextmanager
def tracker(args: argparse.Namespace, folder: Path, main: bool) -> Iterator[Callable[[dict], None]]:
    """The function that tracks a row of metrics.jsonl."""
    if not (args.track and main):
        yield lambda metrics: None
        return
    PartialState()  # the trackers raise without it; it takes a process group as it is
    run = LOGGER_TYPE_TO_CLASS[args.track](**options(args, folder))
    try:
        run.start()
    except Exception as error:  # of every kind; the cause stays attached
        remedy = "log in, set WANDB_MODE=offline, or leave it out"
        raise BadInput(f"--track {args.track}: cannot start ({cause(error)}); {remedy}") from error

    def track(metrics: dict) -> None:
        values = numbers(metrics)
        run.log(values, step=values.pop("step"))

    yield track
    run.finish()  # not after an error: wandb then ends with Python, and knows its exit status


def options(args: argparse.Namespace, folder: Path) -> dict:
    """What a tracker is made with; a resumed run goes on in it."""
    if args.track == "tensorboard":
        first = find(Path(args.resume))[1] + 1 if args.resume else None
        return dict(run_name="tensorboard", logging_dir=folder, purge_step=first)
    named = dict(run_name=PROJECT, name=folder.name, config=vars(args))  # accelerate's run_name is the project
    if args.track == "trackio":  # runs of one name are one only if --resume says so
        return dict(**named, resume="allow" if args.resume else "never")
    earlier = sorted(folder.glob("wandb/*run-*"))  # their names end in the run's id
    run_id = earlier[-1].name.rpartition("-")[2] if earlier else None
    named["run_name"] = os.environ.get("WANDB_PROJECT", PROJECT)
    return dict(**named, dir=folder, id=run_id, resume="allow", settings={"quiet": True})


def numbers(row: dict, prefix: str = "") -> dict[str, float]:
    """The numbers of a row by name, those of a dictionary in it after its own name and a slash."""
    flat = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[prefix + name] = value
    return flat
