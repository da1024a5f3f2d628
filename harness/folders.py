"""A run's folder, and its JSON files: made, locked, written, read, and cut back to a checkpoint."""

import argparse
import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import transformers

from grpo import Rollouts
from harness.checkpoint import as_json, write_json, write_whole
from harness.parallel import Ranks, from_main, gather_items, together
from tasks.problems import BadInput
from tasks.rows import reading, regular

SETTINGS = {"protocol": dict, "data": dict, "models": dict}  # of an evaluation's settings.json


@contextmanager
def made(folder: Path, ranks: Ranks, settings: str) -> Iterator[None]:
    """The folder of --out, made and locked on rank 0 for all; nothing stays of it where nothing was written.

    Raises BadInput where it cannot be made, or holds files of others: the command's `settings` are not among them.
    """
    with together(ranks):
        if ranks.main:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                foreign = any(folder.iterdir()) and not (folder / settings).exists()
            except OSError as error:
                raise BadInput(f"--out {folder}: cannot be made ({error}); choose another") from error
            if foreign:
                raise BadInput(f"--out {folder}: holds other files, and no {settings}; choose another")
    with locked(folder, ranks, "--out"):
        try:
            yield
        finally:
            if ranks.main:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()


def make_folder(args: argparse.Namespace, ranks: Ranks) -> Path:
    """runs/NAME, new unless a run is resumed; raises BadInput where it cannot be made."""
    with together(ranks):
        if ranks.main:
            args.name = args.name or free_name(args)
            folder = Path(args.out) / args.name
            try:
                folder.mkdir(parents=True, exist_ok=bool(args.resume))
            except OSError as error:
                reason = f"{folder} cannot be made ({error})"
                raise BadInput(f"--out {args.out}: {reason}; choose another --out or --name") from error
    args.name = from_main(args.name, ranks)
    return Path(args.out) / args.name


@contextmanager
def locked(folder: Path, ranks: Ranks, option: str):
    """The folder that an option names for this process alone; raises BadInput if another one writes there."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with together(ranks):
            if ranks.main:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise BadInput(f"{option} {folder}: another process is writing there; end it first") from error
        yield
    finally:
        os.close(handle)


def free_name(args: argparse.Namespace) -> str:
    """Task, method and the next free number."""
    number = 1
    while (Path(args.out) / f"{args.task}-{args.method}-{number}").exists():
        number += 1
    return f"{args.task}-{args.method}-{number}"


def write_config(args: argparse.Namespace, folder: Path) -> None:
    """config.json: the resolved flags, and a digest of the problems."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    write_json(folder / "config.json", {**vars(args), "resume": None, "versions": versions})


def has(value, forms: dict[str, type]) -> bool:
    """Whether JSON is an object with values of these types."""
    return isinstance(value, dict) and all(name in value and isinstance(value[name], forms[name]) for name in forms)


def rows(path: Path, forms: dict[str, type] | None = None) -> list[dict]:
    """The objects of a JSON-lines file, without a last line that is cut off; raises BadInput, naming the line.

    Every object must have values of these `forms`.
    """
    found = []
    with reading(str(path), "restore it, or choose another folder"):
        lines = regular(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        with reading(f"{path}, line {number}", "restore or remove the file"):
            row = json.loads(line)
        if not has(row, forms or {}):
            needed = f" with {', '.join(forms)} of their types" if forms else ""
            raise BadInput(f"{path}, line {number}: not an object{needed}; restore or remove the file")
        found.append(row)
    return found


def settings_in(path: Path, forms: dict[str, type] | None = None) -> dict:
    """The object in a JSON file, which must have values of these `forms`; raises BadInput."""
    with reading(str(path), "restore it, or choose another folder"):
        settings = json.loads(regular(path).read_text(encoding="utf-8"))
    if not has(settings, forms or {}):
        needed = ", ".join(forms or ["settings"])
        raise BadInput(f"{path}: not an object with {needed} of their types; restore it, or choose another folder")
    return settings


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
    """The model that a run's model was trained from, whose name tells its template; any other model itself."""
    for _ in range(10):  # runs that go on from each other's models
        path = run_of(path).get("model") or path
    return path


def add_settings(folder: Path, settings: dict, fixed: Iterable[str] = SETTINGS) -> None:
    """settings.json with these `settings`, and what it has of other models and benchmarks.

    Raises BadInput where one of the kinds that are `fixed` differs from what the generations there were made with.
    """
    path = folder / "settings.json"
    saved = settings_in(path, SETTINGS) if path.exists() else settings
    for kind in fixed:
        for name, value in settings[kind].items():
            had = saved[kind].get(name, None if kind == "protocol" else value)
            if value != had:
                remedy = f"the generations in {folder} have {had}; choose another --out"
                raise BadInput(f"{kind}: {name} is {value}; {remedy}")
    merged = {kind: {**saved[kind], **settings[kind]} for kind in fixed}
    write_json(path, {**settings, **merged})


def rows_until(folder: Path, step: int) -> dict[str, list[dict]]:
    """What metrics, samples and skipped rollouts were after `step` steps, by file, null as NaN; raises BadInput."""
    kept = {}
    for name in ("metrics.jsonl", "samples.jsonl", "nonfinite.jsonl"):
        if (folder / name).exists():
            kept[name] = []
            for row in rows(folder / name):
                done = row.get("step", 0)
                if isinstance(done, int) and done <= step and "after" not in row:
                    kept[name].append(with_nan(row))
    return kept


def with_nan(value):
    """The opposite of `as_json`: numbers that are not known are NaN again."""
    if isinstance(value, dict):
        return {name: with_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [with_nan(item) for item in value]
    return math.nan if value is None else value


def cut_back(folder: Path, kept: dict[str, list[dict]]) -> None:
    """Write what `rows_until` returned."""
    for name, kept_rows in kept.items():
        write_whole(folder / name, "".join(map(as_json, kept_rows)))


def write_suspects(
    folder: Path, ranks: Ranks, step: int, rollouts: Rollouts, suspects: list[int], metrics: dict[str, float]
) -> Path:
    """nonfinite.jsonl: the rollouts, of all ranks, of an update that was not finite."""
    path = folder / "nonfinite.jsonl"
    rows = []
    for row in sorted(set(gather_items(suspects, ranks))):
        prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]].tolist()
        ids = rollouts.ids[row][rollouts.mask[row]].tolist()
        said = {"prompt_ids": prompt, "ids": ids, "response": rollouts.texts[row]}
        rows.append({"step": step + 1, "row": row, **metrics, **said})
    if ranks.main:
        append(path, rows)
    return path


def append(path: Path, rows: list[dict]) -> None:
    """Add rows to a JSON-lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(map(as_json, rows))
