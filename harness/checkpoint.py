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

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from base import files
from base.errors import bad_input_on_error
from harness.fsdp import checksum, full, gather, raise_together, refresh
from harness.log import HEADER_EVERY, print_header, write_config
from harness.run import Run

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
        run.hooks.save_model(run.context.policy.model, run.context.tokenizer, draft / "model")
    gather(None, run.ranks)  # until the draft is there
    state = state_of(run)
    file_of = {name: 1 + number // PER_FILE for number, name in enumerate(state)}
    with plain_errors():
        place = str(draft / "state")
        writer = dcp.HuggingFaceStorageWriter(place, file_of, save_distributed=True)
        dcp.save(state, storage_writer=writer)
    about = {"step": step, "ranks": run.ranks.world, "settings": asdict(run.config)}
    about["checksum"] = checksum_of(state)
    gather(None, run.ranks)  # until all have written
    if run.ranks.main:
        files.write_json(draft / "complete.json", about)
        remove(folder)
        draft.rename(folder)
        for old in files.checkpoints_of(run.folder)[: -run.config.keep]:
            remove(old, is_kept(old, run.config.keep_models))
    gather(None, run.ranks)  # until it has its name


def restore(run: Run) -> dict | None:
    """Restore everything as it was at the checkpoint of --resume, but for what may change.

    Returns the evaluation before training, None if its row is lost: training needs no row. Raises
    BadInput, on all ranks alike, before a file is changed.
    """
    path, about = files.find_checkpoint(Path(run.config.resume or ""))
    step = about["step"]
    with raise_together(run.ranks):
        metrics = rows_until(run.folder / "metrics.jsonl", step)
        samples = rows_until(run.folder / "samples.jsonl", step)
    before = next((row["before"] for row in metrics if "before" in row), None)
    load(path, run)
    refresh(run.trained, run.context.policy, run.ranks)
    run.context.step = step
    if run.ranks.main:
        print(f"resumed after step {step} from {path}, which {about['ranks']} rank(s) wrote")
        for name, rows in (("metrics", metrics), ("samples", samples)):
            lost = set(range(1, step + 1)) - {row.get("step") for row in rows}
            if lost:
                print(
                    f"WARNING: {name}.jsonl lacks {len(lost)} of {step} steps, from {min(lost)} on"
                )
        discard_after(run.folder, step)
        files.write_rows(run.folder / "metrics.jsonl", metrics)
        files.write_rows(run.folder / "samples.jsonl", samples)
        write_config(run.config, run.folder)
        if step % HEADER_EVERY:
            print_header()
    return before


def rows_until(path: Path, step: int) -> list[dict]:
    """The rows that a file had after `step` steps, null as NaN; raises BadInput.

    There are none where the file is lost.
    """
    if not path.exists():
        return []
    rows = [files.with_nan(row) for row in files.read_lines(path)]
    return [row for row in rows if row.get("step", 0) <= step and "after" not in row]


def load(path: Path, run: Run) -> None:
    """Load weights and moments as they were; --lr is as it is now.

    Every rank must call it. Raises BadInput.
    """
    about = files.read_json(path / "complete.json")
    with bad_input_on_error(f"--resume {path}", "give another checkpoint of this run"):
        with plain_errors():
            reader = dcp.HuggingFaceStorageReader(str(path / "state"))
            state = state_of(run)
            dcp.load(state, storage_reader=reader)
        if about["checksum"] != checksum_of(state):
            raise ValueError("state/ is another step's, or was changed")


@contextmanager
def plain_errors() -> Iterator[None]:
    """torch wraps the errors of all ranks in one that is no Exception: raise the first of them.

    It also logs a traceback for what is read otherwise or raised, which is not shown.
    """
    logging.disable(logging.WARNING)
    try:
        yield
    except dcp.api.CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise first from None
    finally:
        logging.disable(logging.NOTSET)


def is_kept(checkpoint: Path, keep_models: int) -> bool:
    """Whether `--keep-models` keeps the model of a checkpoint whose state is removed."""
    return keep_models > 0 and files.step_of(checkpoint) % keep_models == 0


def checksum_of(state: dict[str, Tensor]) -> int:
    """The checksum of weights and moments, on any number of ranks; every rank must call it."""
    return sum(int(checksum(full(tensor), 0)) for tensor in state.values())


def discard_after(run: Path, step: int) -> None:
    """Remove what a run has written after `step`, as it will write its own, and all drafts.

    Models that `--keep-models` has left stay.
    """
    (run / "after.jsonl").unlink(missing_ok=True)
    for path in files.steps_of(run):
        if files.step_of(path) > step:
            print(f"removing {path}, which comes after it")
            remove(path)
    for draft in (run / "checkpoints").glob(".writing-*"):
        shutil.rmtree(draft)


def remove(folder: Path, keep_model: bool = False) -> None:
    """Remove a checkpoint, or all of it but its model.

    What makes it one goes first, so that a half-removed one is never chosen. The rest goes under a
    draft's name: what a kill leaves of it is removed when the run is resumed.
    """
    (folder / "complete.json").unlink(missing_ok=True)
    unneeded = folder / "state" if keep_model else folder
    draft = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    if unneeded.exists():
        unneeded.rename(draft)
        shutil.rmtree(draft, ignore_errors=True)


def state_of(run: Run) -> dict[str, Tensor]:
    """Weights and moments by name, tied weights once; loading writes into these very tensors."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    moments = get_optimizer_state_dict(run.trained, run.optimizer, options=options)
    state = {name: parameter.detach() for name, parameter in run.trained.named_parameters()}
    for name, value in moments.items():
        if name.startswith("state.") and isinstance(value, Tensor):
            state[name] = value
    return state
