"""Files and folders: written whole or not at all, locked; an error names the line that is wrong.

write_whole, write_json, whole_folder      a file or folder is never half there
append_rows(path, rows), read_lines(path)  JSON lines; BadInput names file and line
read_settings(path)                        a JSON object
locked_folder(folder, ranks, settings)     a command's own folder, made and locked
config_of(folder), run_of(path)            the run that a folder is, or that holds a model
origin_of(path)                            what such a model was trained from
checkpoints_of(run), find_checkpoint(path) a run's complete ones, and the one to resume from
"""

import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from harness.config import PAPER_RECIPE, TrainConfig, with_values
from harness.fsdp import together
from harness.run import Ranks
from tasks.errors import BadInput, bad_input_on_error
from tasks.rows import check_is_file, text_of

STEP = re.compile(r"step-\d{6,}")  # a folder of ours; a copy beside it has another name
RESTORE = "restore it, or choose another folder"
PROGRAM = "shear train"  # the value of "program" in the config.json of a run


@contextmanager
def without_leftovers(folder: Path) -> Iterator[None]:
    """Remove the folder and its parents at the end where they are new and empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        for path in new:
            with suppress(OSError):  # not empty
                path.rmdir()


@contextmanager
def locked_folder(folder: Path, ranks: Ranks, settings: str) -> Iterator[None]:
    """The folder of --out, made and locked by rank 0 for all, `without_leftovers`.

    Raises BadInput where it cannot be made, or another process writes there, or it holds files of
    others: the command's `settings` are not among them.
    """
    with ExitStack() as at_end:
        with together(ranks):
            if ranks.main:
                try:
                    at_end.enter_context(without_leftovers(folder))
                    folder.mkdir(parents=True, exist_ok=True)
                    handle = os.open(folder, os.O_RDONLY)
                    at_end.callback(os.close, handle)
                    # a pipe would wait for its reader
                    entries = [check_is_file(path) for path in folder.iterdir()]
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    reason = f"cannot be made ({error})"
                    if isinstance(error, BlockingIOError):
                        reason = "another process is writing there"
                    raise BadInput(f"--out {folder}: {reason}; choose another") from error
                if entries and not (folder / settings).exists():
                    raise BadInput(
                        f"--out {folder}: holds other files, and no {settings}; choose another"
                    )
        yield


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A draft to write into, which takes the place of `folder` when all is written."""
    draft = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    yield draft
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


def write_whole(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it, so that it is never half there."""
    draft = path.with_name(f".{path.name}.writing")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file whole."""
    write_whole(path, as_json(value, indent=1))


def append_rows(path: Path, rows: list[dict]) -> None:
    """Add rows to a JSON-lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(map(as_json, rows))


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write a JSON-lines file whole."""
    write_whole(path, "".join(map(as_json, rows)))


def as_json(value: object, indent: int | None = None) -> str:
    """A value as JSON text that ends its line; NaN and infinity, which JSON lacks, are null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent) + "\n"


def with_nan(value: Any) -> Any:
    """The opposite of `as_json`: numbers that are not known, also in objects within, are NaN."""
    if isinstance(value, list):
        return [with_nan(item) for item in value]
    if isinstance(value, dict):
        return {name: with_nan(item) for name, item in value.items()}
    return math.nan if value is None else value


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON-lines file, without a last line that is cut off.

    Raises BadInput, naming the line.
    """
    rows = []
    with bad_input_on_error(str(path), RESTORE):
        lines = text_of(path).split("\n")
    for number, line in enumerate(lines[:-1], 1):
        with bad_input_on_error(f"{path}, line {number}", "restore or remove the file"):
            rows.append(_object_of(line))
    return rows


def read_settings(path: Path) -> dict:
    """The object in a JSON file; raises BadInput."""
    with bad_input_on_error(str(path), RESTORE):
        return _object_of(text_of(path))


def _object_of(text: str) -> dict:
    """The object in a JSON text; raises ValueError."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def config_of(folder: Path) -> dict | None:
    """The settings in the config.json of a run of train.py; None for any other folder."""
    try:
        settings = read_settings(folder / "config.json")
    except BadInput:  # no folder, or one whose loading will say what is wrong with it
        return None
    # earlier runs have no "program"
    is_run = settings.get("program") == PROGRAM or "toy_lines" in settings
    return settings if is_run else None


def run_of(path: str) -> dict:
    """The configuration of the run that a model's folder lies in; empty for any other."""
    folder = Path(path).resolve()
    return config_of(folder.parent) or config_of(folder.parent.parent.parent) or {}


def origin_of(path: str) -> str:
    """The model that a run's model was trained from; any other model itself.

    Its name tells the template.
    """
    for _ in range(10):  # runs that start from each other's models
        path = run_of(path).get("model") or path
    return path


# ---- checkpoints ---------------------------------------------------------------------------------


def checkpoints_of(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return [folder for folder in steps_of(run) if (folder / "complete.json").is_file()]


def steps_of(run: Path) -> list[Path]:
    """The checkpoints of a run, complete or not, oldest first."""
    folders = [path for path in (run / "checkpoints").glob("step-*") if STEP.fullmatch(path.name)]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """How many steps were done at a checkpoint."""
    return int(folder.name.removeprefix("step-"))


def find_checkpoint(path: Path) -> tuple[Path, dict]:
    """The checkpoint at `path`, or the last complete one of the run there, and its complete.json.

    Raises BadInput where there is none.
    """
    if not (path / "complete.json").is_file():
        complete = checkpoints_of(path)
        if not complete:
            raise BadInput(
                f"--resume {path}: has no complete checkpoint in checkpoints/; give a run's folder"
            )
        path = complete[-1]
    return path, read_settings(path / "complete.json")


def read_config(settings: Mapping[str, object]) -> TrainConfig:
    """The configuration of a run from its settings in JSON; a setting that is missing is usual."""
    values = {}
    for name, value in settings.items():
        values[name] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
    return with_values(PAPER_RECIPE, values)
