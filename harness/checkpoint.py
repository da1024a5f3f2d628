"""Checkpoints: written whole or not at all, read back to the bit.

    runs/NAME/checkpoints/step-000010/
        model/           a plain Hugging Face folder: the weights that sample, and the tokenizer
        state/           each rank's float32 weights and AdamW moments, as safetensors
        complete.json    step, number of ranks, the run's settings, and a checksum of what is in
                         state/, by which another step's is refused; written last

Training resumes from `state/`. The step is the data cursor, as `Task.draw` is a function of it.

A checkpoint is written under a temporary name and renamed when it is complete, so a process that
dies while writing leaves none that could be chosen; the last `keep` stay. No random state is saved:
`train.py` seeds every step by the seed, the step and the rank.

A checkpoint can be resumed on another number of ranks; only the same number makes the same run to
the bit.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import Optimizer

from grpo import Policy
from harness import files
from harness.config import MAY_CHANGE, TrainConfig, flat, refuse_other_settings, with_values
from harness.folder import write_config
from harness.fsdp import checksum, full, gather, refresh, together
from harness.run import Ranks, Run
from tasks.errors import BadInput, cause

# tensors in a file of state/; torch makes a whole file in the host's memory before it writes it
PER_FILE = 64


def save(run: Run, step: int) -> None:
    """Write the checkpoint of `step` steps done.

    Every rank must call it, after the policy that samples has got the trained weights.
    """
    folder = run.folder / "checkpoints" / f"step-{step:06d}"
    draft = run.folder / "checkpoints" / f".writing-{step}"
    if run.ranks.main:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        run.parts.save_model(run.context.policy.model, run.context.tokenizer, draft / "model")
    gather(None, run.ranks)  # until the draft is there
    state = _state(run.trained, run.optimizer)
    file_of = {name: 1 + number // PER_FILE for number, name in enumerate(state)}
    with plain_errors():
        place = str(draft / "state")
        writer = dcp.HuggingFaceStorageWriter(place, file_of, save_distributed=True)
        dcp.save(state, storage_writer=writer)
    about = {"step": step, "ranks": run.ranks.world, "settings": flat(run.config)}
    about["checksum"] = checksum_of(state)
    gather(None, run.ranks)  # until all have written
    if run.ranks.main:
        files.write_json(draft / "complete.json", about)
        _remove(folder)
        draft.rename(folder)
        for old in files.checkpoints_of(run.folder)[: -run.config.checkpoints.keep]:
            _remove(old, is_kept(old, run.config.checkpoints.keep_models))
    gather(None, run.ranks)  # until it has its name


def resume(config: TrainConfig, folder: str) -> TrainConfig:
    """The settings of the run in `folder` as its checkpoint has them, but for those given anew.

    `resume` becomes the folder of that checkpoint. Raises BadInput.
    """
    path, report = files.find_checkpoint(Path(folder))
    run = path.resolve().parent.parent
    saved = files.read_config(report["settings"])
    saved = replace(saved, out=str(run.parent), name=run.name)
    given = {name: value for name, value in flat(config).items() if name in config.given}
    fixed = {name: value for name, value in given.items() if name not in MAY_CHANGE}
    whose = f"the run in --resume {folder} has"
    refuse_other_settings(fixed, flat(saved), whose, "leave the flag out")
    resumed = with_values(saved, given | {"resume": str(path)})
    steps = resumed.optimisation.steps
    if steps < report["step"]:  # equal if only the last evaluation was cut off
        raise BadInput(
            f"--steps {steps}: the checkpoint is of step {report['step']} already; give more"
        )
    return resumed


def restore(run: Run, path: Path) -> tuple[dict, list[dict]]:
    """Restore everything as it was at the checkpoint `path`.

    Returns the evaluation before training and the steps' metrics. Raises BadInput, on all ranks
    alike, before a file is changed.
    """
    step = files.read_settings(path / "complete.json")["step"]
    with together(run.ranks):
        metrics = rows_until(run.folder / "metrics.jsonl", step)
        samples = rows_until(run.folder / "samples.jsonl", step)
        first, *history = metrics or [{}]
        if len(history) != step or "before" not in first:
            raise BadInput(
                f"--resume {path}: metrics.jsonl lacks rows of its {step} steps; give an older "
                "checkpoint"
            )
    load(path, run.trained, run.optimizer, run.ranks)
    refresh(run)
    run.context.step = step
    if run.ranks.main:
        print(f"resumed after step {step} from {path}")
        for old in discard_after(run.folder, step):
            print(f"removed {old}, which comes after it")
        (run.folder / "after.jsonl").unlink(missing_ok=True)
        files.write_rows(run.folder / "metrics.jsonl", metrics)
        files.write_rows(run.folder / "samples.jsonl", samples)
        write_config(run.config, run.folder)
    return first["before"], history


def rows_until(path: Path, step: int) -> list[dict]:
    """The rows that a file had after `step` steps, null as NaN; raises BadInput."""
    rows = [files.with_nan(row) for row in files.read_lines(path)]
    return [row for row in rows if row.get("step", 0) <= step and "after" not in row]


def load(path: Path, policy: Policy, optimizer: Optimizer, ranks: Ranks) -> None:
    """Load weights and moments as they were; --lr is as it is now.

    Every rank must call it. Raises BadInput.
    """
    about = files.read_settings(path / "complete.json")
    ranks_then = about["ranks"]
    if ranks_then != ranks.world and ranks.main:
        print(
            f"checkpoint of {ranks_then} ranks, now {ranks.world}: other random numbers from here "
            "on"
        )
    try:
        with plain_errors():
            reader = dcp.HuggingFaceStorageReader(str(path / "state"))
            state = _state(policy, optimizer)
            dcp.load(state, storage_reader=reader)
        if about.get("checksum") not in (None, checksum_of(state)):  # earlier runs have none
            raise ValueError("state/ is another step's, or was changed")
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


def is_kept(checkpoint: Path, keep_models: int) -> bool:
    """Whether `--keep-models` keeps the model of a checkpoint whose state is removed."""
    return keep_models > 0 and files.step_of(checkpoint) % keep_models == 0


def checksum_of(state: dict[str, Tensor]) -> int:
    """The checksum of weights and moments, on any number of ranks; every rank must call it."""
    return sum(int(checksum(full(tensor), 0)) for tensor in state.values())


def discard_after(run: Path, step: int) -> list[Path]:
    """Remove and return checkpoints of later steps: a run that resumes from `step` writes its own.

    Drafts go, too, and what a kill has left of a checkpoint that was being removed. Models that
    `--keep-models` has left stay.
    """
    later = [path for path in files.checkpoints_of(run) if files.step_of(path) > step]
    for path in files.steps_of(run):
        if files.step_of(path) > step:
            _remove(path)
    for draft in (run / "checkpoints").glob(".writing-*"):
        shutil.rmtree(draft)
    return later


def _remove(folder: Path, keep_model: bool = False) -> None:
    """Remove a checkpoint, or all of it but its model; a half-removed one is never chosen."""
    (folder / "complete.json").unlink(missing_ok=True)
    if keep_model:
        shutil.rmtree(folder / "state", ignore_errors=True)
    elif folder.exists():  # under the name of a draft, which goes when the run is resumed
        gone = folder.with_name(f".writing-{folder.name}")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _state(policy: Policy, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights and moments by name, tied weights once; loading writes into these very tensors."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    moments = get_optimizer_state_dict(policy, optimizer, options=options)
    state = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    for name, value in moments.items():
        if name.startswith("state.") and isinstance(value, Tensor):
            state[name] = value
    return state
