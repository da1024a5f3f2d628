"""A training run: its parts, how they are put together, saved and restored, and how it ends early.

prepared(args, ranks)            -> Run, in its folder, its plan printed; the folder goes if no step was done
set_up(args, ranks)              -> Ready: task, model, tokenizer, ..., checked, small things before large ones
assemble(args, ranks, ready, ..) -> Run: what is trained, what samples, the optimizer
interruptible(run)               Ctrl-C ends the run after the step that is being taken
save_checkpoint, restore(run)    everything as it was at a checkpoint
skip, check_policy, way_back     what is not finite, and what to do then
"""

import argparse
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import transformers

from credit import lora
from credit.table import METHODS
from fast.packing import packing_of
from grpo import Policy, Rollouts, rollout
from harness import checkpoint, files, memory, parallel, report
from harness.checkpoint import CheckpointError
from harness.config import MAY_CHANGE, flag
from harness.evaluation import Sampler, evaluate_all, protocol_of
from harness.launch import FULL, INTERRUPTS, NOT_FINITE, RankFailed, RunFailed
from harness.models import sampling_of
from harness.parallel import Ranks
from harness.prepare import make_start, needs_start, own_prm, set_up
from rewards import Verdict
from tasks.benchmarks import Loaded
from tasks.problems import BadInput, Task, digest_of

EVALUATION = 2**31  # stands for a step, before and after training alike
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
    interrupted: bool = False  # by Ctrl-C: this step is the last


@contextmanager
def prepared(args: argparse.Namespace, ranks: Ranks) -> Iterator[Run]:
    """The run, in its folder: loaded or made, checked, its plan printed."""
    name = args.name or ("smoke" if args.smoke else free_name(args))
    folder = Path(args.out) / parallel.from_main(name, ranks)
    with files.made(folder, ranks, "config.json"), explained(args, folder, ranks):
        with parallel.together(ranks):
            if args.smoke and not args.name and ranks.main:
                clear_smoke(folder)
            task, model, tokenizer, notes, prm, sets, predicted = set_up(args, ranks)
            args.name, args.digest = folder.name, digest_of(task.train + task.heldout)
            check_problems(args, folder)
        if ranks.main:
            if not args.resume:
                write_config(args, folder)
            if ranks.device.type == "cuda" or args.task != "embedded":
                notes += memory.notes(predicted, ranks.device, folder, args.keep)
            report.print_plan(args, folder, notes)
        if needs_start(args):
            make_start(model, tokenizer, task, args, folder, ranks)
        if "prm" in METHODS[args.method].needs and not args.prm:
            prm = own_prm(model, task, args, folder, ranks)
        if args.lora_rank:
            lora.add(model, args.lora_rank, args.seed)
        run = assemble(args, ranks, task, model, tokenizer, folder, prm)
        run.sets, run.predicted_gb = sets, predicted["total"]
        yield run


def free_name(args: argparse.Namespace) -> str:
    """Task, method and the next free number."""
    number = 1
    while (Path(args.out) / f"{args.task}-{args.method}-{number}").exists():
        number += 1
    return f"{args.task}-{args.method}-{number}"


def clear_smoke(folder: Path) -> None:
    """A smoke test takes no run's name: its folder is `smoke`, without what the last one left; raises BadInput."""
    if (folder / "config.json").exists() and not files.settings_in(folder / "config.json").get("smoke"):
        raise BadInput(f"--smoke: {folder} is the folder of another run; give a --name")
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_config(args: argparse.Namespace, folder: Path) -> None:
    """config.json: the resolved flags, and a digest of the problems."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    files.write_json(folder / "config.json", {**vars(args), "resume": None, "versions": versions})


def check_problems(args: argparse.Namespace, folder: Path) -> None:
    """Refuse to resume the run in `folder` with other problems than it had; raises BadInput."""
    if args.resume and files.settings_in(folder / "config.json").get("digest", args.digest) != args.digest:
        raise BadInput(f"--resume {folder}: --data {args.data} holds other problems now; restore the old ones")


@contextmanager
def explained(args: argparse.Namespace, folder: Path, ranks: Ranks) -> Iterator[None]:
    """Says after Ctrl-C and on a full disk how to continue; after Ctrl-C a new run without a step leaves nothing."""
    try:
        yield
    except KeyboardInterrupt:
        if ranks.main and not args.resume and not (folder / "samples.jsonl").exists():
            shutil.rmtree(folder)
        if ranks.main:
            print(way_on(args, folder), file=sys.stderr)
        raise
    except Exception as error:
        if ranks.main and FULL in str(error):
            print(way_on(args, folder), file=sys.stderr)
        raise


def way_on(args: argparse.Namespace, folder: Path) -> str:
    """What an interrupted run has left, and the command that continues it."""
    if not folder.exists():
        return "no step was done: nothing is left, the same command starts anew"
    checkpoints = checkpoint.complete(folder)
    if not checkpoints:
        return f"there is no checkpoint yet; what there is lies in {folder}/"
    steps = checkpoint.step_of(checkpoints[-1])
    command = f"python train.py --resume {shlex.quote(str(folder))}"
    return f"a checkpoint holds {steps} of {args.steps} steps; go on with: {command}"


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


# ---- its steps ------------------------------------------------------------------------------------------------


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


def seed_of(seed: int, step: int | str, rank: int = 0) -> int:
    """Random numbers depend on the seed, the step (or "evaluation") and the rank alone: methods see the same."""
    step = EVALUATION if step == "evaluation" else step
    return int(np.random.SeedSequence([seed, step] + [rank] * (rank > 0)).generate_state(1)[0])


def on_benchmarks(run: Run, step: int) -> dict[str, dict]:
    """What the policy reaches on --bench after a step; its generations go to the run's eval/."""
    sampling = sampling_of(run.args, run.frozen.model)
    sampler = Sampler(run.frozen.model, run.tokenizer, run.args.model or "made here", sampling)
    path = run.folder / "eval" / f"step-{step:06d}.jsonl"
    return evaluate_all(sampler, run.sets, protocol_of(run.args), run.ranks, seed=run.args.seed, path=path)


def finish(run: Run, before: dict, after: dict, history: list[dict]) -> None:
    """The trained model and the last words of a run."""
    if not run.ranks.main:
        return
    with files.whole_folder(run.folder / "model") as draft:
        lora.save_merged(run.frozen.model, run.tokenizer, draft)
    report.conclude(run.args, run.folder, before, after, history, run.predicted_gb)
    if run.args.smoke:
        print("smoke test passed: sample, grade, credit, update, checkpoint")


def skip(run: Run, step: int, rollouts: Rollouts, suspects: list[int], sums: dict[str, float]) -> None:
    """Write down the rollouts of an update that was not finite; raises RunFailed after PATIENCE in a row."""
    run.skipped += 1
    path = write_suspects(run.folder, run.ranks, step, rollouts, suspects, sums)
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
    finite = {row["step"] for row in files.rows(run.folder / "metrics.jsonl") if row.get("skipped") == 0}
    good = [path for path in checkpoint.complete(run.folder) if checkpoint.step_of(path) + 1 in finite]
    if not good:
        return f"start anew with an --lr below {run.args.lr}, as no checkpoint is known to be good"
    return f"go on with --resume {good[-1]} and an --lr below {run.args.lr}"


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


# ---- from problems to graded rollouts -------------------------------------------------------------------------


def sample_and_grade(
    run: Run, problems: list[dict], count: int, temperature: float, clock: report.Clock
) -> tuple[Rollouts, list[Verdict]]:
    """`count` rollouts of each problem, and their verdicts."""
    rollouts = sample(run, problems, count, temperature)
    clock.lap("generate")
    verdicts = run.task.verdicts(problems, rollouts)
    clock.lap("grade")
    return rollouts, verdicts


def sample(run: Run, problems: list[dict], count: int, temperature: float) -> Rollouts:
    """`count` rollouts of each problem."""
    prompts = [run.task.prompt(problem) for problem in problems]
    limits = dict(max_tokens=run.args.max_tokens, **sampling_of(run.args, run.frozen.model))
    return rollout(run.frozen.model, run.tokenizer, prompts, count, temperature=temperature, **limits)


def resample_equal(
    run: Run, step: int, problems: list[dict], rollouts: Rollouts, verdicts: list[Verdict], clock: report.Clock
) -> tuple[list[dict], Rollouts, list[Verdict], int]:
    """Resample groups whose rewards are all equal, up to N times; returns all of them and how many were replaced.

    DAPO's dynamic sampling (Sec. 3.2 of arXiv 2503.14476); deviates: those that are left stay, so batches keep their
    size. The other problems depend on the step and the round alone, so that a resumed run draws the same.
    """
    args, problems, verdicts, replaced = run.args, list(problems), list(verdicts), 0
    size = args.rollouts_per_prompt
    for round in range(1, 1 + args.dynamic_sampling):
        equal = []
        for group in range(len(problems)):
            rewards = {verdict.reward for verdict in verdicts[group * size : (group + 1) * size]}
            if len(rewards - {None}) < 2:
                equal.append(group)
        if not equal:
            break
        drawn = run.task.draw(step, args.prompts_per_step, args.seed, round)
        others = parallel.share(drawn, run.ranks)[: len(equal)]
        new_rollouts, new_verdicts = sample_and_grade(run, others, size, args.temperature, clock)
        for place, group in enumerate(equal):
            problems[group] = others[place]
            verdicts[group * size : (group + 1) * size] = new_verdicts[place * size : (place + 1) * size]
        rows = [row for group in equal for row in range(group * size, (group + 1) * size)]
        rollouts = rollouts.replaced(rows, new_rollouts)
        replaced += len(equal)
    return problems, rollouts, verdicts, replaced


# ---- saved and restored ---------------------------------------------------------------------------------------


def save_checkpoint(run: Run, step: int) -> None:
    """A checkpoint of `step` steps done."""
    parts = run.trained, run.frozen.model, run.optimizer, run.tokenizer
    settings = {name: value for name, value in vars(run.args).items() if name not in ("out", "name", "resume")}
    checkpoint.save(run.folder, step, *parts, run.ranks, run.args.keep, settings)


def restore(run: Run) -> tuple[dict, list[dict]]:
    """Everything as it was at the checkpoint --resume; returns the evaluation before training and the steps' metrics.

    Raises BadInput, on all ranks alike, before a file is changed.
    """
    path, step = checkpoint.find(Path(run.args.resume))
    made = checkpoint.report_of(path)
    with parallel.together(run.ranks):
        kept = rows_until(run.folder, step)
        first, *history = kept.get("metrics.jsonl") or [{}]
        if len(history) != step or "before" not in first:
            raise BadInput(f"--resume {path}: metrics.jsonl lacks rows of its {step} steps; give an older checkpoint")
        if not checkpoint.begins_with(run.folder / "metrics.jsonl", *made["metrics"]):
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
        cut_back(run.folder, kept)
        write_config(run.args, run.folder)
    return first["before"], history


def rows_until(folder: Path, step: int) -> dict[str, list[dict]]:
    """What metrics, samples and skipped rollouts were after `step` steps, by file, null as NaN; raises BadInput."""
    kept = {}
    for name in ("metrics.jsonl", "samples.jsonl", "nonfinite.jsonl"):
        if (folder / name).exists():
            kept[name] = []
            for row in files.rows(folder / name):
                done = row.get("step", 0)
                if isinstance(done, int) and done <= step and "after" not in row:
                    kept[name].append(files.with_nan(row))
    return kept


def cut_back(folder: Path, kept: dict[str, list[dict]]) -> None:
    """Write what `rows_until` returned."""
    for name, kept_rows in kept.items():
        files.write_whole(folder / name, "".join(map(files.as_json, kept_rows)))


def write_suspects(
    folder: Path, ranks: Ranks, step: int, rollouts: Rollouts, suspects: list[int], metrics: dict[str, float]
) -> Path:
    """nonfinite.jsonl: the rollouts, of all ranks, of an update that was not finite."""
    path = folder / "nonfinite.jsonl"
    rows = []
    for row in sorted(set(parallel.gather_items(suspects, ranks))):
        prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]].tolist()
        ids = rollouts.ids[row][rollouts.mask[row]].tolist()
        said = {"prompt_ids": prompt, "ids": ids, "response": rollouts.texts[row]}
        rows.append({"step": step + 1, "row": row, **metrics, **said})
    if ranks.main:
        files.append_rows(path, rows)
    return path
