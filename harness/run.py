"""A training run: its folder, how its parts are put together, and how it ends early.

open_folder(parts, ranks)          the run's folder, its plan printed
build_run(parts, folder, ranks)    -> Run: what is trained, what samples, the optimizer
credit_context(run, policy, step)  what a credit method may use besides its batch
interruptible(run)                 Ctrl-C ends the run after the step that is being taken
on_benchmarks(run, step)           the policy's results on the --bench sets
finish(run, ...)                   the trained model, and the run's last lines
check_policy(run, step)            ends a run whose logits are not finite
check_verdicts(run, step, ...)     ends a run in which no rollout could be graded
sample_and_grade(run, ...)         rollouts and their verdicts
resample_equal(run, ...)           other groups for those of equal rewards: dynamic sampling
"""

import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import transformers
from transformers import PreTrainedTokenizerBase

from credit import lora
from credit.batch import Batch, Context
from credit.reward_model import RewardModel
from fast.generate import fast_generate
from grpo import Policy, Rollouts, rollout
from harness import files, parallel, report
from harness.config import MAY_CHANGE, TrainConfig, flat, read_config, spell
from harness.evaluation import Sampler, evaluate_benchmark, protocol_of, summarise
from harness.launch import INTERRUPTS, RunFailed
from harness.parallel import Ranks
from harness.prepare import Parts
from rewards import NoVerdict, Verdict, rewards_of
from tasks.benchmarks import Loaded
from tasks.errors import BadInput
from tasks.problems import Task

EVALUATION = 2**31  # instead of a step, before and after training alike


@dataclass
class Run:
    """What every step needs."""

    config: TrainConfig
    ranks: Ranks
    task: Task
    tokenizer: PreTrainedTokenizerBase
    trained: Policy  # float32 weights, sharded where there are several ranks
    # What samples and scores: a whole copy in the dtype of compute, or `trained` itself.
    actor: Policy
    optimizer: torch.optim.Optimizer
    folder: Path
    prm: RewardModel | None = None
    sets: Sequence[Loaded] = ()  # the --bench sets
    interrupted: bool = False  # by Ctrl-C: this step is the last


@contextmanager
def open_folder(parts: Parts, ranks: Ranks) -> Iterator[Path]:
    """Make the run's folder and its config.json, and print the plan.

    If the run ends early, the last message says how to go on from what is there.
    """
    config = parts.config
    folder = Path(config.out) / parallel.from_main(config.name or free_name(config), ranks)
    with files.locked_folder(folder, ranks, "config.json"), say_how_to_go_on(config, folder, ranks):
        if ranks.main:
            if not config.checkpoints.resume:
                write_config(config, folder)
            report.print_plan(config, folder, parts.notes)
        yield folder


def free_name(config: TrainConfig) -> str:
    """Task and method, or `smoke`, and the next free number."""
    name = "smoke" if config.smoke else f"{config.task}-{config.credit.method}"
    number = 1
    while (Path(config.out) / f"{name}-{number}").exists():
        number += 1
    return f"{name}-{number}"


def write_config(config: TrainConfig, folder: Path) -> None:
    """Write config.json: the resolved flags, a digest of the problems, and versions of packages."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    settings = flat(config) | {"name": folder.name, "resume": None, "versions": versions}
    settings["program"] = files.PROGRAM
    files.write_json(folder / "config.json", settings)


@contextmanager
def say_how_to_go_on(config: TrainConfig, folder: Path, ranks: Ranks) -> Iterator[None]:
    """Whatever ends the run, say how to resume it, or how to start from the taught model.

    Ctrl-C before the first step removes the folder, unless it has a taught model.
    """
    try:
        yield
    except BaseException as error:
        checkpoints = files.checkpoints_of(folder)
        if not ranks.main or isinstance(error, BadInput):
            raise
        if checkpoints:
            steps = f"{files.step_of(checkpoints[-1])} of {config.optimisation.steps} steps"
            command = resume_command(config, folder, checkpoints[-1])
            print(f"a checkpoint holds {steps}; resume with: {command}", file=sys.stderr)
        elif (folder / "start").exists():
            start = ["--task", config.task, "--model", str(folder / "start")]
            words = shlex.join([*start, "--name", free_name(config)])  # that of `folder` is taken
            print(f"the taught model is kept; to start from it, add: {words}", file=sys.stderr)
        elif (
            isinstance(error, KeyboardInterrupt | BrokenPipeError)
            and not (folder / "samples.jsonl").exists()
        ):
            shutil.rmtree(folder)
            print("no step was done: nothing is left; run the same command again", file=sys.stderr)
        raise


def resume_command(config: TrainConfig, folder: Path, last: Path) -> str:
    """The command that resumes the run from its `last` checkpoint.

    It has the flags that were given anew since that checkpoint was saved.
    """
    checkpoint = files.read_settings(last / "complete.json")
    saved = flat(read_config(checkpoint["settings"], str(last)))
    words = ["python", "train.py", "--resume", str(folder)]
    for name, value in sorted(flat(config).items()):
        if name in MAY_CHANGE and name != "resume" and value != saved[name]:
            words += spell(name, value)
    return shlex.join(words)


def build_run(parts: Parts, folder: Path, ranks: Ranks) -> Run:
    """Policy, sampler and optimizer; raises BadInput if the model takes no adapter."""
    config = parts.config
    machine = config.machine
    if config.credit.lora_rank:
        lora.add(parts.model, config.credit.lora_rank, config.seed)
    trained, actor = parallel.shard(
        parts.model,
        ranks,
        getattr(torch, machine.dtype),
        recompute=machine.recompute,
        shard_over=machine.shard_over,
    )
    # Adam's step is lr whatever the gradient's size, so token weights that shrink all advantages
    # alike change little.
    fused = ranks.device.type == "cuda"
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    lr = config.optimisation.lr
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=fused)
    return Run(
        config=config,
        ranks=ranks,
        task=parts.task,
        tokenizer=parts.tokenizer,
        trained=trained,
        actor=actor,
        optimizer=optimizer,
        folder=folder,
        prm=parts.prm,
        sets=parts.sets,
    )


def credit_context(run: Run | Parts, policy: Policy, step: int) -> Context:
    """What a credit method may use besides its batch, when `step` steps are done."""
    config = run.config
    return Context(
        policy=policy,
        tokenizer=run.tokenizer,
        task=run.task,
        shear=config.shear,
        step=step,
        steps=config.optimisation.steps,
        seed=config.seed,
        temperature=config.sampling.temperature,
        micro_tokens=config.optimisation.micro_tokens,
        prm=run.prm,
    )


# ---- its steps -----------------------------------------------------------------------------------


@contextmanager
def interruptible(run: Run) -> Iterator[None]:
    """Inside, Ctrl-C or SIGTERM sets `run.interrupted`: the step is finished and saved.

    A second Ctrl-C ends the step at once. A process that was started to ignore Ctrl-C keeps
    ignoring it.
    """

    def finish_first(signum: int, frame: object) -> None:
        if run.interrupted and signum == signal.SIGINT:
            raise KeyboardInterrupt
        run.interrupted = True
        if run.ranks.main:
            print(
                "\ninterrupted: this step is finished first; another Ctrl-C ends at once",
                file=sys.stderr,
            )

    heard = [
        number for number in INTERRUPTS if signal.getsignal(number) is signal.default_int_handler
    ]
    for number in heard:
        signal.signal(number, finish_first)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.default_int_handler)


def seed_of(seed: int, step: int = EVALUATION, rank: int = 0) -> int:
    """A seed that depends on seed, step and rank alone: methods see the same random numbers."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])


def on_benchmarks(run: Run, step: int) -> dict[str, dict]:
    """The policy's results on the --bench sets after `step` steps, by benchmark.

    Its generations go to the run's eval/.
    """
    name = str(run.folder / "model")
    sampler = Sampler(run.actor.model, run.tokenizer, name, run.config.machine.generate_batch)
    path = run.folder / "eval" / f"step-{step:06d}.jsonl"
    results = {}
    if run.ranks.main:
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
    for loaded in run.sets:
        rows = evaluate_benchmark(
            sampler,
            loaded,
            protocol_of(run.config),
            run.ranks,
            path,
            [run.config.seed],
        )
        results[loaded.benchmark.name] = summarise(rows) | {
            "revision": loaded.revision,
            "window": loaded.benchmark.window,
        }
    return results


def finish(run: Run, before: dict, after: dict, history: list[dict]) -> None:
    """Save the trained model, and print the run's last lines."""
    if not run.ranks.main:
        return
    with files.whole_folder(run.folder / "model") as draft:
        lora.save_merged(run.actor.model, run.tokenizer, draft)
    report.print_after(run.config, run.folder, before, after, history)
    if run.config.smoke:
        print("smoke test passed: sample, grade, credit, update, checkpoint")


@torch.no_grad()
def check_policy(run: Run, step: int) -> None:
    """Raise RunFailed if the policy's logits are not finite after a step's updates.

    Such a policy could not sample any more.
    """
    prompt = run.tokenizer(run.task.prompt(run.task.train[0]), return_tensors="pt")["input_ids"]
    if not run.actor.model(prompt.to(run.ranks.device)).logits.isfinite().all():
        raise RunFailed(
            f"step {step + 1}: the policy's logits are not finite after its updates; lower --lr"
        )


def check_verdicts(run: Run, step: int, batch: Batch, verdicts: list[Verdict]) -> None:
    """Raise RunFailed, on all ranks, if no complete response of a step has a verdict.

    `batch` holds the rollouts of all ranks, `verdicts` are this rank's. The message has the first
    cause.
    """
    rewards = batch.rewards[~batch.rollouts.truncated]  # (n,); those that are cut off are wrong
    if len(rewards) and rewards.isnan().all():
        own = [verdict.cause for verdict in verdicts if isinstance(verdict, NoVerdict)]
        causes = [*parallel.gather_items(own, run.ranks), "the reward gave no verdict"]
        raise RunFailed(f"step {step + 1}: no response could be graded: {causes[0]}")


# ---- from problems to graded rollouts ------------------------------------------------------------


def sample_and_grade(
    run: Run, problems: list[dict], count: int, temperature: float, clock: report.Clock
) -> tuple[Rollouts, list[Verdict]]:
    """`count` rollouts of each problem, and their verdicts."""
    rollouts = rollout(
        run.actor.model,
        run.tokenizer,
        [run.task.prompt(problem) for problem in problems],
        count,
        max_tokens=run.config.sampling.max_tokens,
        temperature=temperature,
        batch_size=run.config.machine.generate_batch,
        generate=fast_generate,
    )
    clock.lap("generate")
    verdicts = run.task.verdicts(problems, rollouts)
    clock.lap("grade")
    return rollouts, verdicts


def resample_equal(
    run: Run,
    step: int,
    problems: list[dict],
    rollouts: Rollouts,
    verdicts: list[Verdict],
    clock: report.Clock,
) -> tuple[list[dict], Rollouts, list[Verdict], int]:
    """Replace groups whose rewards are all equal, in at most --dynamic-sampling rounds.

    Returns all groups' problems, rollouts and verdicts, and how many groups were replaced.

    DAPO's dynamic sampling (Sec. 3.2 of arXiv 2503.14476); deviates: groups that are still equal
    stay, so batches keep their size. The other problems depend on the step and the round alone, so
    that a resumed run draws the same.
    """
    sampling = run.config.sampling
    problems = list(problems)
    verdicts = list(verdicts)
    replaced = 0
    size = sampling.rollouts_per_prompt
    for round in range(1, 1 + sampling.dynamic_sampling):
        groups = pd.DataFrame(rewards_of(verdicts).reshape(-1, size))  # NaN: no verdict
        equal = np.flatnonzero(groups.nunique(axis=1) < 2)  # NaN does not count
        if not equal.size:
            break
        drawn = run.task.draw(step, sampling.prompts_per_step, run.config.seed, round)
        others = parallel.share(drawn, run.ranks)[: len(equal)]
        new_rollouts, new_verdicts = sample_and_grade(
            run, others, size, sampling.temperature, clock
        )
        for group, problem in zip(equal, others, strict=True):
            problems[group] = problem
        # the rollouts of these groups
        rows = np.arange(len(verdicts)).reshape(-1, size)[equal].flatten().tolist()
        for row, verdict in zip(rows, new_verdicts, strict=True):
            verdicts[row] = verdict
        rollouts = rollouts.with_rows(rows, new_rollouts)
        replaced += len(equal)
    return problems, rollouts, verdicts, replaced
