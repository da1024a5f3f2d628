"""A run's metrics on a dashboard as well: `--track wandb`, `trackio` or `tensorboard`.

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

from tasks.rows import BadInput, cause

PROJECT = "shear"


@contextmanager
def tracker(args: argparse.Namespace, folder: Path, main: bool) -> Iterator[Callable[[dict], None]]:
    """The function that tracks a row of metrics.jsonl; closed at the end, as failed after an error."""
    if not (args.track and main):
        yield lambda metrics: None
        return
    with TRACKERS[args.track](args, folder) as log:

        def track(metrics: dict) -> None:
            values = numbers(metrics)
            log(values, step=values.pop("step"))

        yield track


def numbers(row: dict, prefix: str = "") -> dict[str, float]:
    """The numbers of a row by name, those of a dictionary in it after its own name and a slash."""
    flat = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[prefix + name] = value
    return flat


# ---- trackers: their packages are imported here, and nowhere else ----------------------------------------------


@contextmanager
def to_wandb(args: argparse.Namespace, folder: Path) -> Iterator[Callable]:
    """Files go to wandb/ in the run's folder; their names end in the id by which a resumed run is continued."""
    import wandb

    earlier = sorted(folder.glob("wandb/*run-*"))
    run_id = earlier[-1].name.rpartition("-")[2] if earlier else None
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    place = dict(project=project, name=folder.name, dir=folder, id=run_id, resume="allow")
    try:
        started = wandb.init(**place, config=vars(args), settings=wandb.Settings(quiet=True))
    except wandb.Error as error:
        raise BadInput(f"--track wandb: cannot start ({cause(error)}); log in, or set WANDB_MODE=offline") from error
    with started as run:
        yield run.log


@contextmanager
def to_trackio(args: argparse.Namespace, folder: Path) -> Iterator[Callable]:
    """Into trackio's own folder, where runs of one name are one only if --resume says so."""
    import trackio

    resume = "allow" if args.resume else "never"
    run = trackio.init(PROJECT, name=folder.name, resume=resume, config=vars(args))
    try:
        yield run.log
    finally:
        trackio.finish()


@contextmanager
def to_tensorboard(args: argparse.Namespace, folder: Path) -> Iterator[Callable]:
    """Into tensorboard/ in the run's folder."""
    from torch.utils.tensorboard import SummaryWriter

    from harness.checkpoint import find

    first = find(Path(args.resume))[1] + 1 if args.resume else None
    with SummaryWriter(folder / "tensorboard", purge_step=first) as writer:

        def log(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        yield log


TRACKERS = {"wandb": to_wandb, "trackio": to_trackio, "tensorboard": to_tensorboard}
