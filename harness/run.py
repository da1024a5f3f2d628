"""A training run: its parts, how they are put together, saved and restored, and how Ctrl-C ends it.

prepared(args, ranks)                    -> the run in its folder, which goes again after Ctrl-C before the first step
assemble(args, ranks, task, model, ...)  -> Run: policy, sampler, scorer, optimizer
explained(args, ...), interruptible(run) -> what Ctrl-C does, and what is said then
due(run, step)                           -> whether a checkpoint is to be saved now
save_checkpoint(run, step), restore(run) -> checkpoints, and everything as it was at one of them
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from credit import lora
from credit.table import METHODS
from fast.packing import packing_of
from grpo import Policy, Rollouts
from harness import checkpoint, evaluation, folders, memory, parallel, report
from harness.checkpoint import CheckpointError, whole_folder
from harness.command import FULL, INTERRUPTS, NOT_FINITE, RankFailed, RunFailed
from harness.config import MAY_CHANGE, SAVE_SHARE, SAVE_STEPS, flag
from harness.evaluation import Sampler
from harness.parallel import Ranks
from harness.prepare import load_outline, make_start, own_prm, protocol_of, sampling_of, set_up
from tasks.benchmarks import Loaded
from tasks.problems import BadInput, Task, digest_of

PURPOSES = {"evaluation": 2**31}  # stands for a step, before and after training alike
PATIENCE = 3  # updates in a row that may be skipped for a loss or gradient that is not finite


@dataclass
class Run:
    """What every step needs."""

    args: argparse.Namespace
    ranks: Ranks
    task: Task
    tokenizer: object
    trained: Policy  # float32 weights, sharded where there are several ranks
    frozen: Policy  # what samples and scores: a whole copy in the dtype of compute, or `trained` itself
    optimizer: torch.optim.Optimizer
    folder: Path
    prm: tuple | None = None  # process reward model and its tokenizer
    sets: list[Loaded] = field(default_factory=list)  # of --bench
    predicted_gb: float = 0.0  # memory of a GPU
    skipped: int = 0  # updates in a row that were not finite
    started: float = field(default_factory=time.perf_counter)  # seconds, when this process had all parts
    saving: float = 0.0  # seconds that this process has spent on checkpoints
    last_save: float = 0.0  # seconds of the last of them
    interrupted: bool = False  # by Ctrl-C: this step is the last


@contextmanager
def prepared(args: argparse.Namespace, ranks: Ranks) -> Iterator[Run]:
    """The run, in its folder: loaded or made, checked, its plan printed."""
    with parallel.together(ranks):
        check_out(args.out)
        if args.model:
            memory.refuse_what_cannot_fit(load_outline(args.model)[0].config, args, ranks)
        task, model, tokenizer, notes, reward_model, sets = set_up(args, ranks)
    predicted = memory.predict(model.config, args, ranks.world, memory.room_gb(ranks.device))
    args.digest = digest_of(task.train + task.heldout)
    if args.smoke:
        notes.append("smoke test: rewards in training are drawn, whatever a response says")
    if "pairs" in METHODS[args.method].needs and args.max_tokens <= args.window and not args.smoke:
        reason = f"--max-tokens {args.max_tokens} lies within one --window of {args.window}"
        notes.append(f"WARNING: {reason}: a rollout is one span, and all its weights are equal; lower --window")
    if args.smoke and not args.name:
        clear_smoke(args, ranks)
    folder = folders.make_folder(args, ranks)
    with folders.locked(folder, ranks, "--resume"), explained(args, folder, ranks):
        if args.resume:
            check_problems(args, folder)
        elif ranks.main:
            folders.write_config(args, folder)
        if ranks.main:
            if ranks.device.type == "cuda" or args.task != "embedded":
                notes += memory.notes(predicted, ranks.device, folder, args.keep)
            report.print_plan(args, folder, notes)
        if args.task == "embedded" and not args.model and not args.resume:
            make_start(model, tokenizer, task, args, folder, ranks)
        if "prm" in METHODS[args.method].needs and not args.prm:
            reward_model = own_prm(model, task, args, folder, ranks)
        if args.lora_rank:
            lora.add(model, args.lora_rank, args.seed)
        run = assemble(args, ranks, task, model, tokenizer, folder, reward_model)
        run.sets, run.predicted_gb = sets, predicted["total"]
        yield run


def check_out(out: str) -> None:
    """Refuse a folder in which no run can be made, before anything is loaded; raises BadInput."""
    place = Path(out)
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        reason = f"cannot be made ({place} is {'not writable' if place.is_dir() else 'no folder'})"
        raise BadInput(f"--out {out}: {reason}; choose another")


def clear_smoke(args: argparse.Namespace, ranks: Ranks) -> None:
    """A smoke test takes no run's name: its folder is `smoke`, without what the last one left; raises BadInput."""
    args.name = "smoke"
    folder = Path(args.out) / args.name
    with parallel.together(ranks):
        if ranks.main and folder.exists():
            if not folders.settings_in(folder / "config.json").get("smoke"):
                raise BadInput(f"--smoke: {folder} is the folder of another run; give a --name")
            shutil.rmtree(folder)


@contextmanager
def explained(args: argparse.Namespace, folder: Path, ranks: Ranks) -> Iterator[None]:
    """Says after Ctrl-C and on a full disk how to go on.

    A folder without a step's rows goes again, if this run made it: its name is free.
    """
    try:
        yield
    except KeyboardInterrupt:
        if ranks.main and not args.resume and not (folder / "samples.jsonl").exists():
            shutil.rmtree(folder)
        if ranks.main:
            print(way_on(args, folder), file=sys.stderr)
        raise
    except Exception as error:
        if ranks.main and any(mark in str(error) for mark in FULL):
            print(way_on(args, folder), file=sys.stderr)
        raise


@contextmanager
def interruptible(run: Run) -> Iterator[None]:
    """Ctrl-C or SIGTERM inside sets `run.interrupted`: the step is finished and saved. A second Ctrl-C ends it at once.

    A process that was started to ignore Ctrl-C goes on ignoring it, and only a main thread hears of it.
    """

    def finish_first(signum, frame) -> None:
        if run.interrupted and signum == signal.SIGINT:
            raise KeyboardInterrupt
        run.interrupted = True
        if run.ranks.main:
            print("\ninterrupted: this step is finished first; another Ctrl-C ends at once", file=sys.stderr)

    heard = []
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in INTERRUPTS if signal.getsignal(number) is signal.default_int_handler]
    for number in heard:
        signal.signal(number, finish_first)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.default_int_handler)


def way_on(args: argparse.Namespace, folder: Path) -> str:
    """What an interrupted run has left, and the command that goes on with it."""
    if not folder.exists():
        return "no step was done: nothing is left, the same command starts anew"
    checkpoints = checkpoint.complete(folder)
    if not checkpoints:
        return f"there is no checkpoint yet; what there is lies in {folder}/"
    steps = checkpoint.step_of(checkpoints[-1])
    command = f"python train.py --resume {shlex.quote(str(folder))}"
    return f"a checkpoint holds {steps} of {args.steps} steps; go on with: {command}"


def check_problems(args: argparse.Namespace, folder: Path) -> None:
    """Refuse to go on with other problems than those of the run in `folder`; raises BadInput."""
    had = folders.settings_in(folder / "config.json").get("digest", args.digest)  # a run may be older than that
    if had != args.digest:
        raise BadInput(f"--resume {folder}: --data {args.data} holds other problems now; restore the old ones")


def assemble(args: argparse.Namespace, ranks: Ranks, task: Task, model, tokenizer, folder: Path, prm=None) -> Run:
    """Policy, sampler and optimizer from a model."""
    dtype = getattr(torch, args.dtype)
    trained, sampler = parallel.shard(model, ranks, dtype, recompute=args.recompute, shard_over=args.shard_over)
    # Adam's step is lr whatever the gradient's size, so weights that shrink all advantages alike change little.
    fused = ranks.device.type == "cuda"
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.0, fused=fused)
    frozen = trained if sampler is trained.model else Policy(sampler, args.recompute, **packing_of(sampler))
    return Run(args, ranks, task, tokenizer, trained, frozen, optimizer, folder, prm)


def due(run: Run, step: int) -> bool:
    """Whether a checkpoint of `step` steps done is to be saved; all ranks follow rank 0's clock.

    The last step is always saved. Without --save-every a checkpoint waits until another one that takes as long as the
    last would leave saving below SAVE_SHARE of the time.
    """
    if step == run.args.steps:
        return True
    if run.args.save_every:
        return step % run.args.save_every == 0
    if step % SAVE_STEPS:
        return False
    elapsed = time.perf_counter() - run.started
    return parallel.from_main(run.saving + run.last_save <= SAVE_SHARE * elapsed, run.ranks)


def save_checkpoint(run: Run, step: int) -> None:
    """A checkpoint of `step` steps done."""
    started = time.perf_counter()
    parts = run.trained, run.frozen.model, run.optimizer, run.tokenizer
    settings = {name: value for name, value in vars(run.args).items() if name not in ("out", "name", "resume")}
    checkpoint.save(run.folder, step, *parts, run.ranks, run.args.keep, settings)
    run.last_save = time.perf_counter() - started
    run.saving += run.last_save


def on_benchmarks(run: Run, step: int) -> dict[str, dict]:
    """What the policy reaches on --bench after a step; its generations go to the run's eval/."""
    sampling = sampling_of(run.args, run.frozen.model)
    sampler = Sampler(run.frozen.model, run.tokenizer, run.args.model or "made here", sampling)
    path = run.folder / "eval" / f"step-{step:06d}.jsonl"
    return evaluation.evaluate_all(sampler, run.sets, protocol_of(run.args), run.ranks, seed=run.args.seed, path=path)


def finish(run: Run, before: dict, after: dict, history: list[dict]) -> None:
    """The trained model and the last words of a run."""
    if not run.ranks.main:
        return
    with whole_folder(run.folder / "model") as draft:
        lora.save_merged(run.frozen.model, run.tokenizer, draft)
    report.conclude(run.args, run.folder, before, after, history, run.predicted_gb)
    if run.args.smoke:
        print("smoke test passed: sample, grade, credit, update, checkpoint")


def restore(run: Run) -> tuple[dict, list[dict]]:
    """Everything as it was at the checkpoint --resume; returns the evaluation before training and the steps' metrics.

    Raises BadInput, on all ranks alike, before a file is changed.
    """
    path, step = checkpoint.find(Path(run.args.resume))
    made = checkpoint.report_of(path)
    with parallel.together(run.ranks):
        kept = folders.rows_until(run.folder, step)
        first, *history = kept.get("metrics.jsonl") or [{}]
        if len(history) != step or "before" not in first:
            raise BadInput(f"--resume {path}: metrics.jsonl lacks rows of its {step} steps; give an older checkpoint")
        if made["metrics"] and not checkpoint.begins_with(run.folder / "metrics.jsonl", *made["metrics"]):
            raise BadInput(f"--resume {path}: metrics.jsonl is not that of its {step} steps; restore the file")
    try:
        checkpoint.load(path, run.trained, run.optimizer, run.ranks)
    except CheckpointError as error:
        raise BadInput(f"--resume {path}: {error}; give another checkpoint of this run") from error
    parallel.refresh(run.trained, run.frozen.model, run.ranks)
    if run.ranks.main:
        print(f"resumed after step {step} from {path}")
        for name in sorted(MAY_CHANGE & made["settings"].keys()):
            if vars(run.args)[name] != made["settings"][name]:
                print(f"{flag(name)} is {vars(run.args)[name]} now; it was {made['settings'][name]}")
        for old in checkpoint.discard_after(run.folder, step):
            print(f"removed {old}, which comes after it")
        folders.cut_back(run.folder, kept)
        folders.write_config(run.args, run.folder)
    return first["before"], history


def seed_of(seed: int, step: int | str, rank: int = 0) -> int:
    """Random numbers depend on the seed, the step (or one of PURPOSES) and the rank alone: methods see the same."""
    step = PURPOSES.get(step, step)
    return int(np.random.SeedSequence([seed, step] + [rank] * (rank > 0)).generate_state(1)[0])


@contextmanager
def sampling_after(run: Run, steps: int) -> Iterator[None]:
    """Raises RankFailed if the policy, which `steps` steps have trained, meets probabilities that are not finite."""
    try:
        yield
    except RuntimeError as error:
        if NOT_FINITE not in str(error) or not steps:
            raise
        reason = "the policy's probabilities are not finite"
        raise RankFailed(f"after step {steps}: {reason}; {way_back(run)}") from error


def skip(run: Run, step: int, rollouts: Rollouts, suspects: list[int], sums: dict[str, float]) -> None:
    """Write down the rollouts of an update that was not finite; raises RunFailed after PATIENCE in a row."""
    run.skipped += 1
    path = folders.write_suspects(run.folder, run.ranks, step, rollouts, suspects, sums)
    if run.skipped == PATIENCE:
        diverged(run, step, f"{PATIENCE} updates in a row had a loss or gradient that is not finite, see {path}")


@torch.no_grad()
def check_policy(run: Run, step: int) -> None:
    """Raises RunFailed if the policy's logits are not finite after a step's updates: it could not sample any more."""
    prompt = run.tokenizer(run.task.prompt(run.task.train[0]), return_tensors="pt")["input_ids"]
    if not run.frozen.model(prompt.to(run.ranks.device)).logits.isfinite().all():
        diverged(run, step, "the policy's logits are not finite after its updates")


def diverged(run: Run, step: int, reason: str) -> NoReturn:
    """Raise RunFailed, which all ranks do alike."""
    raise RunFailed(f"step {step + 1}: {reason}; {way_back(run)}")


def way_back(run: Run) -> str:
    """What to do after a divergence: names the last checkpoint from which a whole step was finite, if there is one."""
    finite = {row["step"] for row in folders.rows(run.folder / "metrics.jsonl") if row.get("skipped") == 0}
    good = [path for path in checkpoint.complete(run.folder) if checkpoint.step_of(path) + 1 in finite]
    if not good:
        return f"start anew with an --lr below {run.args.lr}, as no checkpoint is known to be good"
    return f"go on with --resume {good[-1]} and an --lr below {run.args.lr}"
