"""A run's metrics on a dashboard as well, by accelerate's trackers: `--track wandb`, `trackio` or
`tensorboard`.

    with tracker(config, folder, ranks) as track:    on the main rank; does nothing on others, or
                                                   without --track
        track(metrics)                             the numbers of a step, the nested ones as
                                                   `seconds/generate`

metrics.jsonl stays the source; what a tracker shows can be made again from it. The tracked run has
the folder's name in the project "shear". wandb heeds its environment, such as WANDB_MODE=offline,
which needs no network.

Left out: the evaluations before and after training, samples, weights; a resumed run is a new one of
the same name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from harness.config import TrainConfig, flat
from harness.parallel import Ranks, together
from tasks.rows import BadInput, cause


def started_tracker(config: TrainConfig, folder: Path):
    """The tracker of `--track`; raises BadInput where it cannot start."""
    PartialState()  # the trackers raise without it; it takes a process group as it is
    named = dict(
        run_name="shear", name=folder.name, config=flat(config)
    )  # accelerate's run_name is the project
    options = {
        "wandb": {**named, "dir": folder},
        "trackio": named,
        "tensorboard": dict(run_name="tensorboard", logging_dir=folder),
    }
    run = LOGGER_TYPE_TO_CLASS[config.track](**options[config.track])
    try:
        run.start()
    except Exception as error:  # of every kind; the cause stays attached
        remedy = "log in, set WANDB_MODE=offline, or leave it out"
        raise BadInput(
            f"--track {config.track}: cannot start ({cause(error)}); {remedy}"
        ) from error
    return run


@contextmanager
def tracker(config: TrainConfig, folder: Path, ranks: Ranks) -> Iterator[Callable[[dict], None]]:
    """The function that tracks a row of metrics.jsonl."""
    with together(ranks):
        run = started_tracker(config, folder) if config.track and ranks.main else None

    def track(metrics: dict) -> None:
        if run:
            values = numbers(metrics)
            run.log(values, step=values.pop("step"))

    yield track
    if run:
        run.finish()  # not after an error: wandb then ends with Python, and knows its exit status


def numbers(row: dict, prefix: str = "") -> dict[str, float]:
    """The numbers of a row by name, those of a dictionary in it after its own name and a slash."""
    flat = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[prefix + name] = value
    return flat
