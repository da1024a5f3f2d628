"""Files and folders: written whole or not at all, locked; an error names the line that is wrong.

    write_whole, write_json, whole_folder      a file or folder is never half there
    append_rows(path, rows), read_lines(path)  JSON lines; BadInput names file and line
    read_json(path)                            a JSON object
    locked_folder(folder)                      a command's own folder, made and locked
    config_of(folder), run_of(path)            the run that a folder is, or that holds a model
    checkpoints_of(run), find_checkpoint(path) a run's complete ones, and the one to resume from

This file imports no torch: `base/config.py` reads a run's settings by it.
"""

import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from base.errors import BadInput, bad_input_on_error

STEP = re.compile(r"step-\d{6,}")  # a folder of ours; a copy beside it has another name
RESTORE = "restore it, or choose another folder"
PROGRAM = "shear train"  # the value of "program" in the config.json of a run


_locks: set[int] = set()  # the open folders that this process has locked


def _forget_locks() -> None:
    """Close the locked folders in a process that was forked, and would hold the locks, too."""
    for handle in _locks:
        os.close(handle)
    _locks.clear()


os.register_at_fork(after_in_child=_forget_locks)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """The folder of --out, made, and locked against other processes; raises BadInput."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        reason = f"cannot be made ({error})"
        if isinstance(error, BlockingIOError):
            reason = "another process is writing there"
        raise BadInput(f"--out {folder}: {reason}; choose another") from error
    _locks.add(handle)
    try:
        yield
    finally:
        if handle in _locks:  # not in a process that was forked inside
            _locks.remove(handle)
            os.close(handle)


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
        lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        with bad_input_on_error(f"{path}, line {number}", RESTORE):
            rows.append(object_of(line))
    return rows


def read_json(path: Path) -> dict:
    """The object in a JSON file; raises BadInput."""
    with bad_input_on_error(str(path), RESTORE):
        return object_of(path.read_text(encoding="utf-8"))


def object_of(text: str) -> dict:
    """The object in a JSON text; raises ValueError."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


# ---- runs and their checkpoints ------------------------------------------------------------------


def config_of(folder: Path) -> dict | None:
    """The settings in the config.json of a run of train.py; None for any other folder."""
    path = folder / "config.json"
    settings = read_json(path) if path.is_file() else {}
    return settings if settings.get("program") == PROGRAM else None


def is_taken(folder: Path) -> bool:
    """Whether there is more in a folder than a run that was killed before its first checkpoint."""
    is_begun = config_of(folder) is not None and not (folder / "model").exists()
    return folder.exists() and not (is_begun and not checkpoints_of(folder))


def run_of(path: str) -> dict:
    """The configuration of the run that a model's folder lies in; empty for any other."""
    folder = Path(path).resolve()
    return config_of(folder.parent) or config_of(folder.parent.parent.parent) or {}


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
    about = read_json(path / "complete.json")
    kinds = {"step": int, "ranks": int, "checksum": int, "settings": dict}
    for name, kind in kinds.items():
        if type(about.get(name)) is not kind:
            raise BadInput(
                f"{path / 'complete.json'}: {name} cannot be {about.get(name)!r}; {RESTORE}"
            )
    if STEP.fullmatch(path.name) and step_of(path) != about["step"]:
        raise BadInput(f"{path / 'complete.json'}: is of step {about['step']}; {RESTORE}")
    return path, about
