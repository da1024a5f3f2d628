"""Checkpoints: written whole or not at all, read back to the bit.

    runs/NAME/checkpoints/step-000010/
        model/           a plain Hugging Face folder: the weights that sample, and the tokenizer
        state/           each rank's float32 weights and AdamW moments, as safetensors
        complete.json    step, number of ranks, and the run's settings; written last

Training resumes from `state/`. The step is the data cursor, as `Task.draw` is a function of it.

A checkpoint is written under a temporary name and renamed when it is complete, so a process that
dies while writing leaves none that could be chosen; the last `keep` stay. No random state is saved:
`train.py` seeds every step by the seed, the step and the rank.

A checkpoint can be resumed on another number of ranks; only the same number makes the same run to
the bit.
"""

import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from credit import lora
from grpo import Policy
from harness import files
from harness.parallel import Ranks, gather
from tasks.rows import BadInput, cause

# One process saves and loads as it should; torch warns each time that it is alone.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)

STEP = re.compile(r"step-\d{6,}")  # a folder of ours; a copy beside it has another name
# tensors in a file of state/; torch makes a whole file in the host's memory before it writes it
PER_FILE = 64


def save(
    run: Path,
    step: int,
    policy: Policy,
    sampler: PreTrainedModel,
    optimizer: Optimizer,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
    keep: int,
    settings: dict,
) -> None:
    """Write the checkpoint of `step` steps done.

    Every rank must call it, with `sampler` refreshed.
    """
    folder = run / "checkpoints" / f"step-{step:06d}"
    draft = run / "checkpoints" / f".writing-{step}"
    if ranks.main:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        lora.save_merged(sampler, tokenizer, draft / "model")
    gather(None, ranks)  # until the draft is there
    state = _state(policy, optimizer)
    file_of = {name: 1 + number // PER_FILE for number, name in enumerate(state)}
    with plain_errors():
        place = str(draft / "state")
        writer = dcp.HuggingFaceStorageWriter(place, file_of, save_distributed=True)
        dcp.save(state, storage_writer=writer)
    gather(None, ranks)  # until all have written
    if ranks.main:
        report = {"step": step, "ranks": ranks.world, "settings": settings}
        files.write_json(draft / "complete.json", report)
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
    return int(folder.name.removeprefix("step-"))


def find(path: Path) -> tuple[Path, int]:
    """The checkpoint at `path`, or the last complete one of the run at `path`, and its step.

    Raises BadInput where there is none.
    """
    if not (path / "complete.json").is_file():
        found = complete(path)
        if not found:
            raise BadInput(
                f"--resume {path}: has no complete checkpoint in checkpoints/; give a run's folder"
            )
        path = found[-1]
    return path, report_of(path)["step"]


def report_of(path: Path) -> dict:
    """The contents of complete.json; raises BadInput."""
    return files.read_settings(path / "complete.json")


def load(path: Path, policy: Policy, optimizer: Optimizer, ranks: Ranks) -> None:
    """Load weights and moments as they were; --lr is as it is now.

    Every rank must call it. Raises BadInput.
    """
    made_by = report_of(path)["ranks"]
    if made_by != ranks.world and ranks.main:
        print(
            f"checkpoint of {made_by} ranks, now {ranks.world}: other random numbers from here on"
        )
    try:
        with plain_errors():
            reader = dcp.HuggingFaceStorageReader(str(path / "state"))
            dcp.load(_state(policy, optimizer), storage_reader=reader)
    except Exception as error:  # torch raises of every kind; the cause stays attached
        reason = f"cannot be loaded ({cause(error)})"
        raise BadInput(f"--resume {path}: {reason}; give another checkpoint of this run") from error


@contextmanager
def plain_errors() -> Iterator[None]:
    """torch wraps the errors of all ranks in one that is no Exception: raise the first of them."""
    try:
        yield
    except dcp.api.CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise first from None


def discard_after(run: Path, step: int) -> list[Path]:
    """Remove and return checkpoints of later steps: a run that resumes from `step` writes its own.

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


def _state(policy: Policy, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights and moments by name, tied weights once; loading writes into these very tensors."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    moments = get_optimizer_state_dict(policy, optimizer, options=flat)
    state = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    for name, value in moments.items():
        if name.startswith("state.") and isinstance(value, Tensor):
            state[name] = value
    return state
