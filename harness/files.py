"""Files and folders: written whole or not at all, locked, read back with the line that is wrong in
the error.

write_whole, write_json, whole_folder           a file or folder is never half there
append_rows(path, rows), rows(path)             JSON lines; BadInput names file and line
settings_in(path)                               a JSON object
made(folder, ranks, settings)                   a command's own folder, made and locked
config_of(folder), run_of(path), origin_of(..)  the run that a folder is, or that a model's folder
                                                lies in
"""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.parallel import Ranks, together
from tasks.problems import BadInput
from tasks.rows import reading, regular


@contextmanager
def made(folder: Path, ranks: Ranks, settings: str) -> Iterator[None]:
    """The folder of --out, made and locked by rank 0 for all; it goes again if it stays empty, and
    so do its new parents.

    Raises BadInput where it cannot be made, or another process writes there, or it holds files of
    others: the command's `settings` are not among them.
    """
    handle = None
    new_parents = [parent for parent in folder.parents if not os.path.lexists(parent)]
    with together(ranks):
        if ranks.main:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                handle = os.open(folder, os.O_RDONLY)
                if any(folder.iterdir()) and not (folder / settings).exists():
                    raise BadInput(
                        f"--out {folder}: holds other files, and no {settings}; choose another"
                    )
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BadInput(
                    f"--out {folder}: another process is writing there; end it first"
                ) from error
            except OSError as error:
                raise BadInput(
                    f"--out {folder}: cannot be made ({error}); choose another"
                ) from error
    try:
        yield
    finally:
        if ranks.main:
            os.close(handle)
            for path in (folder, *new_parents):
                with suppress(OSError):  # not empty
                    path.rmdir()


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


def write_json(path: Path, value) -> None:
    """Write a JSON file whole."""
    write_whole(path, as_json(value, indent=1))


def append_rows(path: Path, rows: list[dict]) -> None:
    """Add rows to a JSON-lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(map(as_json, rows))


def as_json(value, indent: int | None = None) -> str:
    """A value as JSON text that ends its line; NaN and infinity, which JSON lacks, are null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent) + "\n"


def with_nan(value):
    """The opposite of `as_json`: numbers that are not known are NaN again."""
    if isinstance(value, dict):
        return {name: with_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [with_nan(item) for item in value]
    return math.nan if value is None else value


def rows(path: Path, forms: dict[str, type] | None = None) -> list[dict]:
    """The objects of a JSON-lines file, without a last line that is cut off; raises BadInput,
    naming the line.

    Every object must have values of these `forms`.
    """
    found = []
    with reading(str(path), "restore it, or choose another folder"):
        lines = regular(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        with reading(f"{path}, line {number}", "restore or remove the file"):
            found.append(object_of(line, forms or {}))
    return found


def settings_in(path: Path, forms: dict[str, type] | None = None) -> dict:
    """The object in a JSON file, which must have values of these `forms`; raises BadInput."""
    with reading(str(path), "restore it, or choose another folder"):
        return object_of(regular(path).read_text(encoding="utf-8"), forms or {})


def object_of(text: str, forms: dict[str, type]) -> dict:
    """The object in a JSON text; raises ValueError unless it has values of these `forms`."""
    value = json.loads(text)
    if not isinstance(value, dict) or not all(
        isinstance(value.get(name, ...), forms[name]) for name in forms
    ):
        raise ValueError(f"not an object with {', '.join(forms) or 'keys'}")
    return value


def config_of(folder: Path) -> dict | None:
    """The configuration of a run of train.py; None for any other folder."""
    try:
        return settings_in(folder / "config.json", {"toy_lines": int})
    except BadInput:  # no folder, or one whose loading will say what is wrong with it
        return None


def run_of(path: str) -> dict:
    """The configuration of the run that a model's folder lies in; empty for any other."""
    folder = Path(path).resolve()
    return config_of(folder.parent) or config_of(folder.parent.parent.parent) or {}


def origin_of(path: str) -> str:
    """The model that a run's model was trained from, whose name tells its template; any other model
    itself.
    """
    for _ in range(10):  # runs that start from each other's models
        path = run_of(path).get("model") or path
    return path
