"""Checkpoints: written whole or not at all, read back to the bit.

    runs/NAME/checkpoints/step-000010/
        model/           an ordinary Hugging Face folder, for any tool: the weights that sample, and the tokenizer
        state/           what training goes on from, as safetensors, each rank its own part: float32 weights and
                         AdamW's moments
        complete.json    the step (which is the data cursor, as `Task.draw` is a function of it), the number of
                         ranks, the run's settings, every file with its size and SHA-256, and the same of the rows of
                         metrics.jsonl that lead to it

A checkpoint is written under a temporary name and renamed when it is complete, so a process that dies while writing
leaves none that could be chosen; the last `keep` stay. The digests are made by reading the files back, and loading
checks them first; ranks share that work. No random state is saved: `train.py` seeds every step anew, by the seed, the
step and the rank.

A checkpoint can be resumed on another number of ranks; only the same number makes the same run to the bit.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from credit import lora
from grpo import Policy
from harness import files
from harness.parallel import Ranks, gather, gather_items
from tasks.problems import cause

# One process saves and loads as it should; torch warns each time that it is alone.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
# Of a file that it cannot read it logs a traceback, and then raises an error that says the same.
logging.getLogger().addFilter(lambda record: "metadata is not found" not in record.getMessage())

STEP = re.compile(r"step-(\d{6,})")  # a folder of ours; a copy beside it has another name
PER_FILE = 64  # tensors in a file of state/; torch makes a whole file in the host's memory before it writes it


class CheckpointError(ValueError):
    """A checkpoint that is missing or damaged."""


def save(
    run: Path, step: int, policy: Policy, sampler, optimizer, tokenizer, ranks: Ranks, keep: int, settings: dict
) -> None:
    """Write the checkpoint of `step` steps done; every rank must call it, with `sampler` refreshed."""
    folder, draft = run / "checkpoints" / f"step-{step:06d}", run / "checkpoints" / f".writing-{step}"
    if ranks.main:
        for name in ("metrics.jsonl", "samples.jsonl"):  # a checkpoint must not outlive the rows that lead to it
            with (run / name).open("ab") as file:
                os.fsync(file.fileno())
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        lora.save_merged(sampler, tokenizer, draft / "model")
    gather(None, ranks)  # until the draft is there
    state = _state(policy, optimizer)
    file_of = {name: 1 + place // PER_FILE for place, name in enumerate(state)}
    with plain_errors():
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(draft / "state", file_of, save_distributed=True))
    seen = [str(path.relative_to(draft)) for path in draft.rglob("*") if path.is_file()]
    names = sorted(set(gather_items(seen, ranks)))  # one list for all: shared file systems show others' files late
    digests = gather_items([(name, _digest(draft / name)) for name in names[ranks.rank :: ranks.world]], ranks)
    if ranks.main:
        report = {"step": step, "ranks": ranks.world, "settings": settings, "files": dict(sorted(digests))}
        files.write_json(draft / "complete.json", {**report, "metrics": _digest(run / "metrics.jsonl")})
        _remove(folder)
        draft.rename(folder)
        for old in complete(run)[:-keep]:
            _remove(old)
    gather(None, ranks)  # until it has its name


def complete(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return [folder for folder in _steps(run) if (folder / "complete.json").is_file()]


def _steps(run: Path) -> list[Path]:
    """The checkpoints of a run, complete or not, oldest first."""
    folders = [path for path in (run / "checkpoints").glob("step-*") if STEP.fullmatch(path.name)]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """The steps that were done at a checkpoint."""
    return int(STEP.fullmatch(folder.name)[1])


def find(path: Path) -> tuple[Path, int]:
    """The checkpoint at `path`, or the last complete one of the run at `path`, and its step; raises CheckpointError.

    Checks that every file is there with the size it should have; `load` checks what is in them.
    """
    if not (path / "complete.json").is_file():
        found = complete(path)
        if not found:
            raise CheckpointError(f"{path} has no complete checkpoint in checkpoints/")
        path = found[-1]
    report = report_of(path)
    named = STEP.match(path.name)  # also a copy, step-000010-good
    if named and int(named[1]) != report["step"]:
        raise CheckpointError(f"{path / 'complete.json'} is of step {report['step']}, not of its folder's")
    for name, (size, _) in report["files"].items():
        if not (path / name).is_file() or (path / name).stat().st_size != size:
            raise CheckpointError(f"{path} is damaged: {name} is missing or not {size} bytes long")
    return path, report["step"]


def report_of(path: Path) -> dict:
    """What complete.json says of a checkpoint; raises CheckpointError."""
    try:
        report = json.loads((path / "complete.json").read_text(encoding="utf-8"))
        digests = [report["metrics"], *report["files"].values()]
        numbers = [report["step"], report["ranks"], *(size for size, _ in digests)]
        if not all(type(number) is int for number in numbers) or not isinstance(report["settings"], dict):
            raise TypeError("values of other types")
        return report
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path / 'complete.json'} cannot be read ({cause(error)})") from error


def load(path: Path, policy: Policy, optimizer, ranks: Ranks) -> None:
    """Weights and moments as they were, --lr as it is now; every rank must call it. Raises CheckpointError."""
    report = report_of(path)
    names = sorted(report["files"])[ranks.rank :: ranks.world]
    damaged = [name for name in names if list(_digest(path / name)) != report["files"][name]]
    damaged = gather_items(damaged, ranks)
    if damaged:
        raise CheckpointError(f"{path} is damaged: {damaged[0]} does not hold what was written")
    if report["ranks"] != ranks.world and ranks.main:
        print(f"checkpoint of {report['ranks']} ranks, now {ranks.world}: other random numbers from here on")
    try:
        with plain_errors():
            dcp.load(_state(policy, optimizer), storage_reader=dcp.HuggingFaceStorageReader(path / "state"))
    except Exception as error:  # torch raises of every kind; the cause stays attached
        raise CheckpointError(f"{path} cannot be loaded ({cause(error)})") from error


@contextmanager
def plain_errors() -> Iterator[None]:
    """torch wraps the errors of all ranks in one that is no Exception: raise the first of them."""
    try:
        yield
    except dcp.api.CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise first from None


def discard_after(run: Path, step: int) -> list[Path]:
    """Remove and return checkpoints of later steps: a run that goes on from `step` writes its own.

    Drafts go, too, and what a kill has left of a checkpoint that was being removed.
    """
    later = [path for path in complete(run) if step_of(path) > step]
    for path in _steps(run):
        if path in later or not (path / "complete.json").exists():
            _remove(path)
    for draft in (run / "checkpoints").glob(".writing-*"):
        shutil.rmtree(draft)
    return later


def _remove(folder: Path) -> None:
    """Remove a checkpoint, first what makes it one, so that a half-removed one is never chosen."""
    (folder / "complete.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _state(policy: Policy, optimizer) -> dict[str, Tensor]:
    """Weights and moments by name, tied weights once; loading writes into these very tensors."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    moments = get_optimizer_state_dict(policy, optimizer, options=flat)
    weights = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    return weights | {name: value for name, value in moments.items() if name.startswith("state.")}


def begins_with(path: Path, size: int, sha256: str) -> bool:
    """Whether the first `size` bytes of a file have this digest."""
    return hashlib.sha256(path.read_bytes()[:size]).hexdigest() == sha256


def _digest(path: Path) -> tuple[int, str]:
    """Size in bytes, and SHA-256."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
