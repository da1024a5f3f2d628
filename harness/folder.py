"""A run's folder: its name, its config.json, and the command that goes on from what is there."""

import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from harness import files, fsdp, log
from harness.config import MAY_CHANGE, TrainConfig, flat, spell
from harness.load import LESSONS
from harness.run import Ranks, Run
from tasks.errors import BadInput


@contextmanager
def open_folder(run: Run) -> Iterator[None]:
    """Make the run's folder and its config.json, and print the plan.

    If the run ends early, the last message says how to go on from what is there.
    """
    config = run.config
    folder = Path(config.out) / fsdp.from_main(config.name or free_name(config), run.ranks)
    run.folder = folder
    with (
        files.locked_folder(folder, run.ranks, "config.json"),
        say_how_to_go_on(config, folder, run.ranks),
    ):
        if run.ranks.main:
            if not config.checkpoints.resume:
                write_config(config, folder)
            log.print_plan(config, folder, run.notes)
        yield


def free_name(config: TrainConfig) -> str:
    """Task and method, and the next free number."""
    name = f"{config.task}-{config.credit.method}"
    number = 1
    while (Path(config.out) / f"{name}-{number}").exists():
        number += 1
    return f"{name}-{number}"


def write_config(config: TrainConfig, folder: Path) -> None:
    """Write config.json: the resolved flags, a digest of the problems, and versions of packages."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    settings = flat(config) | {"name": folder.name, "resume": None, "versions": versions}
    settings["program"] = files.PROGRAM
    files.write_json(folder / "config.json", settings)


@contextmanager
def say_how_to_go_on(config: TrainConfig, folder: Path, ranks: Ranks) -> Iterator[None]:
    """Whatever ends the run, say how to resume it, or that the taught model is kept.

    Ctrl-C before the first step removes the folder, unless it has a taught model.
    """
    try:
        yield
    except BaseException as error:
        checkpoints = files.checkpoints_of(folder)
        if not ranks.main or isinstance(error, BadInput):
            raise
        if checkpoints:
            steps = f"{files.step_of(checkpoints[-1])} of {config.optimisation.steps} steps"
            command = resume_command(config, folder, checkpoints[-1])
            print(f"a checkpoint holds {steps}; resume with: {command}", file=sys.stderr)
        elif (folder / "start").exists():
            is_whole = (folder / "start" / LESSONS).exists()
            taught = "the taught model" if is_whole else "the model as far as it was taught"
            print(f"{taught} is kept; take it by --model {folder}/start", file=sys.stderr)
        elif (
            isinstance(error, KeyboardInterrupt | BrokenPipeError)
            and not (folder / "samples.jsonl").exists()
        ):
            shutil.rmtree(folder)
            print("no step was done: nothing is left; run the same command again", file=sys.stderr)
        raise


def resume_command(config: TrainConfig, folder: Path, last: Path) -> str:
    """The command that resumes the run from its `last` checkpoint.

    It has the flags that were given anew since that checkpoint was saved.
    """
    checkpoint = files.read_settings(last / "complete.json")
    saved = flat(files.read_config(checkpoint["settings"]))
    words = ["python", "train.py", "--resume", str(folder)]
    for name, value in sorted(flat(config).items()):
        if name in MAY_CHANGE and name != "resume" and value != saved[name]:
            words += spell(name, value)
    return shlex.join(words)
