"""Files and folders: written whole or not at all, locked; an error names the line that is wrong.

write_whole, write_json, whole_folder      a file or folder is never half there
append_rows(path, rows), read_lines(path)  JSON lines; BadInput names file and line
read_settings(path)                        a JSON object
locked_folder(folder, ranks, settings)     a command's own folder, made and locked
config_of(folder), run_of(path)            the run that a folder is, or that holds a model
origin_of(path)                            what such a model was trained from
checkpoints_of(run), find_checkpoint(path) a run's complete ones, and the one to resume from
"""

import dataclasses
import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # which pydantic needs before Python 3.12

from harness.config import PAPER, TrainConfig, with_values
from harness.fsdp import together
from harness.run import Ranks
from tasks.errors import BadInput, bad_input_on_error
from tasks.rows import check_is_file, text_of

STEP = re.compile(r"step-\d{6,}")  # a folder of ours; a copy beside it has another name
RESTORE = "restore it, or choose another folder"
PROGRAM = "shear train"  # the value of "program" in the config.json of a run
Share = Annotated[float, Field(ge=0, le=1)]


class RunSettings(TypedDict):
    """What is read again of the config.json of a run."""

    toy_lines: NotRequired[Literal[1, 2, 3, 4, 5, 6, 7, 8]]
    heldout: NotRequired[int]
    seed: NotRequired[int]
    task: NotRequired[str]
    model: NotRequired[str | None]
    method: NotRequired[str]
    method_option: NotRequired[list[str]]
    rescale: NotRequired[str]
    window: NotRequired[int]
    eps: NotRequired[FiniteFloat]
    eps_unit: NotRequired[str]


class Checkpoint(TypedDict):
    """complete.json: steps done, ranks, and the run's settings."""

    step: int
    ranks: int
    settings: dict


class SetSettings(TypedDict):
    """A benchmark in settings.json."""

    k: int
    problems: int
    limit: NotRequired[int]
    revision: str | None
    window: str | None


class ModelSettings(TypedDict):
    """A model in settings.json."""

    origin: str
    template: str


class EvalSettings(TypedDict):
    """settings.json of an evaluation."""

    protocol: dict
    data: dict[str, SetSettings]
    models: dict[str, ModelSettings]
    generate_batch: NotRequired[dict[str, Annotated[int, Field(ge=1)]]]  # by model


class Generation(TypedDict):
    """A row of generations.jsonl."""

    model: str
    benchmark: str
    seed: int
    block: int
    problem: str
    sample: int
    score: Share | None
    reason: str
    limit: NotRequired[int]


class Result(TypedDict):
    """What the row of a step has of a benchmark."""

    mean: Share | None
    error: FiniteFloat | None


class Step(TypedDict):
    """The row of a step in metrics.jsonl; null is NaN."""

    step: int
    reward: FiniteFloat | None
    equal_groups: Share | None
    grad_norm: FiniteFloat | None
    weight_mean: NotRequired[FiniteFloat | None]
    weight_before: NotRequired[FiniteFloat | None]
    weight_after: NotRequired[FiniteFloat | None]
    eps_over_nbar: NotRequired[FiniteFloat | None]
    peak_gb: NotRequired[FiniteFloat | None]
    bench: NotRequired[dict[str, Result]]


class HeldOut(TypedDict):
    """Mean, standard error and number of verdicts, each."""

    greedy: tuple[FiniteFloat | None, FiniteFloat | None, int]
    sampled: tuple[FiniteFloat | None, FiniteFloat | None, int]
    localisation: NotRequired[dict | None]


class Before(TypedDict):
    """The row before training in metrics.jsonl."""

    before: HeldOut


class After(TypedDict):
    """The row after training in metrics.jsonl."""

    after: HeldOut


class Rollout(TypedDict):
    """A row of samples.jsonl, before.jsonl and after.jsonl."""

    problem: str
    tokens: list[str]
    weights: dict[str, list[FiniteFloat | None]]
    step: NotRequired[int]
    score: NotRequired[FiniteFloat | None]
    advantage: NotRequired[FiniteFloat | None]
    first_error: NotRequired[tuple[int, str, int] | None]
    spans: NotRequired[list[tuple[int, int, FiniteFloat, int, int, int]]]


# What is read again, by the names of files: the forms that it may have.
FORMS: dict[str, list[object]] = {
    "settings.json": [EvalSettings],
    "complete.json": [Checkpoint],
    "generations.jsonl": [Generation],
    "metrics.jsonl": [Step, Before, After],
    "samples.jsonl": [Rollout],
    "before.jsonl": [Rollout],
    "after.jsonl": [Rollout],
}
SAMPLE = "model", "benchmark", "seed", "problem", "sample"  # what tells generations apart


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


def read_lines(path: Path, forms: Sequence[object] = (), apart: Sequence[str] = ()) -> list[dict]:
    """The objects of a JSON-lines file, without a last line that is cut off.

    Every object has one of the `forms`, if not given those of the file's name, and no two have the
    same values of `apart` (those that have none of them are not compared). Raises BadInput, naming
    the line.
    """
    found = []
    line_of: dict[tuple, int] = {}
    with bad_input_on_error(str(path), RESTORE):
        lines = text_of(path).split("\n")
    for number, line in enumerate(lines[:-1], 1):
        with bad_input_on_error(f"{path}, line {number}", "restore or remove the file"):
            row = object_of(line, forms or FORMS.get(path.name, ()))
            key = tuple(row.get(name) for name in apart)
            if any(key) and line_of.setdefault(key, number) != number:
                raise ValueError(f"it repeats line {line_of[key]}")
        found.append(row)
    return found


def read_settings(path: Path, forms: Sequence[object] = ()) -> dict:
    """The object in a JSON file.

    It has one of the `forms`, if not given those of the file's name. Raises BadInput.
    """
    with bad_input_on_error(str(path), RESTORE):
        return object_of(text_of(path), forms or FORMS.get(path.name, ()))


def object_of(text: str, forms: Sequence[object]) -> dict:
    """The object in a JSON text.

    Raises ValueError unless it has one of the `forms`; the message is about the one that fits best.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    wrong = min((misfits(text, form) for form in forms), key=len, default=set())
    if wrong:
        name = min(wrong)
        raise ValueError(f'"{name}" is {json.dumps(value.get(name))[:60]}')
    return value


def misfits(text: str, form: object) -> set:
    """The names that keep the object in a JSON text from having a form, a TypedDict.

    The object may have other names, too.
    """
    try:
        validator_of(form).validate_json(text, strict=True)
    except ValidationError as error:
        return {problem["loc"][0] for problem in error.errors()}
    return set()


validator_of = cache(TypeAdapter)


def config_of(folder: Path) -> dict | None:
    """The configuration of a run of train.py; None for any other folder.

    Raises BadInput for a run's configuration that is damaged.
    """
    path = folder / "config.json"
    try:
        settings = read_settings(path)
    except BadInput:  # no folder, or one whose loading will say what is wrong with it
        return None
    # earlier runs have no "program"
    is_run = settings.get("program") == PROGRAM or "toy_lines" in settings
    return read_settings(path, [RunSettings]) if is_run else None


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


def read_config(settings: Mapping[str, object], place: str) -> TrainConfig:
    """The configuration of a run from its settings in JSON; a setting that is missing is usual.

    Raises BadInput, naming `place`, for a value of another type.
    """
    config = with_values(PAPER, settings)
    try:
        return TypeAdapter(TrainConfig).validate_python(dataclasses.asdict(config))
    except ValidationError as error:
        wrong = error.errors()[0]
        reason = f"{wrong['loc'][-1]} is {wrong['input']}"
        raise BadInput(f"{place}: {reason}; restore it, or give another checkpoint") from error
