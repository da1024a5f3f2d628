"""Train a language model with SHEAR, with plain GRPO, or with a neighbour: the loop.

    python train.py                                              # the embedded task, on a CPU
    python train.py --model Qwen/Qwen2.5-Math-7B --method shear  # the paper's run, on all GPUs
    python train.py --method grpo                                # without span weights
    python train.py --model PATH --data problems.jsonl           # problems of your own
    python train.py --model PATH --task code                     # programs, graded in a sandbox
    python train.py --resume runs/NAME                           # after a crash, or for more steps
    torchrun --nproc_per_node 8 train.py ...                     # the same, started by torchrun

One step, top to bottom in `train_step`: draw problems, sample G responses to each, grade them, turn
verdicts into advantages (Eq. (1)), score them once with the policy that sampled them (old
log-probabilities and the hidden states), turn advantages into token advantages (`credit/`, the only
line in which methods differ), and take a clipped policy-gradient step for every
`--prompts-per-update` of the prompts. Each rank does this with whole groups of its own until token
advantages are known; the steps are then taken by all ranks together, over the rollouts of all.

Flags and their defaults are in `harness/config.py`. Everything goes to `runs/NAME/`: config.json,
metrics.jsonl (a row per step), samples.jsonl (a group per step, with token weights; before.jsonl
and after.jsonl hold one held-out group), curve.png, credit.html (a page of the samples),
`checkpoints/` and `model/`; with --eval-every also `eval/` (every generation), its numbers in
metrics.jsonl; where a model is warmed up `start/`, and on the embedded task `prm/` (its reward
model, where a method needs one).
"""

import math
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from harness.config import TrainConfig, parse_train

if __name__ == "__main__":
    parse_train()  # --help and mistakes end here: what follows takes seconds to import

import torch
from torch import Tensor
from tqdm import tqdm

from credit.batch import Batch
from credit.measures import credit_vs_first_error, reason_shares, sample_rows, step_metrics
from credit.methods import assign_credit
from grpo import policy_loss
from harness import checkpoint, parallel, report
from harness.launch import RunFailed, launch, processes, resolve, run_command
from harness.parallel import Ranks
from harness.prepare import give_lessons, load_parts
from harness.run import (
    Run,
    build_run,
    check_policy,
    credit_context,
    finish,
    interruptible,
    on_benchmarks,
    open_folder,
    resample_equal,
    sample_and_grade,
    seed_of,
)


@run_command(
    memory="lower --micro-tokens, --generate-batch or --max-tokens, or use more GPUs",
    interrupted="interrupted",
)
def main(argv: list[str] | None = None) -> int:
    """Returns the exit status.

    It is 0, 1 for a run that diverged or ran out of memory, 2 for bad input, 130 after Ctrl-C.
    """
    config = resolve(parse_train(argv))
    if processes(config.machine) > 1:
        return launch(processes(config.machine), __file__, argv)
    return train(config, parallel.join(config.machine.device, config.machine.threads))


def train(config: TrainConfig, ranks: Ranks) -> int:
    """A run, from its parts to its last evaluation; returns the exit status."""
    parts = load_parts(config, ranks)
    with open_folder(parts, ranks) as folder:
        parts = give_lessons(parts, folder, ranks)
        run = build_run(parts, folder, ranks)
        if config.checkpoints.resume:
            before, history = checkpoint.restore(run, Path(config.checkpoints.resume))
        else:
            before, history = evaluate_before(run)
        with interruptible(run), report.step_log(run.config, run.folder, ranks) as log:
            take_steps(run, history, log)
        after = evaluate(run, config.optimisation.steps)
        finish(run, before, after, history)
    return 0


def evaluate_before(run: Run) -> tuple[dict, list[dict]]:
    """The evaluation before training, and no steps yet."""
    before = evaluate(run, 0)
    if run.ranks.main:
        report.print_before(run.config, run.folder, before)
    return before, []


def take_steps(run: Run, history: list[dict], log: Callable[[dict, list[dict]], None]) -> None:
    """Take the steps that are not in `history` yet, each with its rows.

    After Ctrl-C the last whole one is saved.
    """
    steps = run.config.optimisation.steps
    save_every = run.config.checkpoints.save_every
    eval_every = run.config.evaluation.eval_every
    todo = range(len(history), steps)
    for step in tqdm(
        todo, initial=len(history), total=steps, desc="steps", leave=False, disable=None
    ):
        is_last = step + 1 == steps
        metrics, samples = train_step(run, step)
        check_policy(run, step)
        if eval_every and ((step + 1) % eval_every == 0 or is_last):
            metrics["bench"] = on_benchmarks(run, step + 1)
        history.append(metrics)
        try:
            log(metrics, samples)
        except BrokenPipeError:  # whoever read the output is gone: this ends the run as Ctrl-C does
            run.interrupted = True
        # all ranks end after the same step
        interrupted = any(parallel.gather(run.interrupted, run.ranks))
        if interrupted or is_last or (step + 1) % save_every == 0:
            checkpoint.save(run, step + 1)
        if interrupted:
            raise KeyboardInterrupt


# ---- one step ------------------------------------------------------------------------------------


def train_step(run: Run, step: int) -> tuple[dict, list[dict]]:
    """One sampling phase and its updates, from problems to loss; returns metrics and samples."""
    config = run.config
    sampling = config.sampling
    group_size = sampling.rollouts_per_prompt
    clock = report.Clock(run.ranks.device)
    torch.manual_seed(seed_of(config.seed, step, run.ranks.rank))
    drawn = run.task.draw(step, sampling.prompts_per_step, config.seed)
    problems = parallel.share(drawn, run.ranks)  # this rank's
    rollouts, verdicts = sample_and_grade(run, problems, group_size, sampling.temperature, clock)
    replaced = 0
    if sampling.dynamic_sampling:
        problems, rollouts, verdicts, replaced = resample_equal(
            run, step, problems, rollouts, verdicts, clock
        )
    batch = Batch.of(rollouts, verdicts, problems)  # A (b,), Eq. (1)
    batch = with_credit(run, batch, step, clock)  # (b, T)
    batch = Batch.cat(parallel.gather(batch, run.ranks))  # from all ranks
    clock.lap("wait")
    updates = update(run, batch, step)
    checksum = parallel.refresh(run.trained, run.actor, run.ranks)
    clock.lap("train")
    if run.ranks.device.type == "cuda":
        updates["peak_gb"] = max(parallel.gather(report.peak_gb(), run.ranks))
    if checksum is not None:
        updates["checksum"] = checksum
    if sampling.dynamic_sampling:
        updates["replaced"] = sum(parallel.gather(replaced, run.ranks)) / len(batch.problems)
    weights = {config.credit.method: batch.weights}  # (B, T)
    samples = sample_rows(step, run.tokenizer, run.task, batch, weights)
    metrics = (
        {"step": step + 1}
        | step_metrics(batch, run.task, run.tokenizer)
        | updates
        | {"seconds": clock.laps}
    )
    return metrics, samples


def with_credit(run: Run, batch: Batch, step: int, clock: report.Clock) -> Batch:
    """The batch with log-probabilities, entropies and token advantages (B, T).

    Whole groups are taken, some at a time, as only a block's hidden states fit in memory.
    """
    credit = run.config.credit
    # methods may run passes of their own
    context = credit_context(run, run.actor, step)
    blocks = []
    for block in batch.blocks():
        block.log_probs, block.entropies, block.hidden = context.score(  # (b, T), (b, T), (n, d)
            block.rollouts, keep_hidden="states" in credit.entry.needs
        )
        clock.lap("score")
        block.token_advantages = assign_credit(block, context, credit)  # <- where methods differ
        block.hidden = None
        blocks.append(block)
        clock.lap("weights")
    return Batch.cat(blocks)


def update(run: Run, batch: Batch, step: int) -> dict[str, float]:
    """The optimizer steps of one batch; mini-batches are whole groups, shuffled by (seed, step)."""
    groups = list(torch.arange(len(batch.rewards)).split(batch.group_size))
    per_update = run.config.optimisation.prompts_per_update
    random.Random(f"minibatches {run.config.seed} {step}").shuffle(groups)
    taken, skipped = [], 0  # metrics of the optimizer steps that were taken; how many were not
    for first in range(0, len(groups), per_update):
        minibatch = torch.cat(groups[first : first + per_update])
        run.optimizer.zero_grad()
        metrics = backward(run, batch, minibatch)
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            run.optimizer.step()
            taken.append(metrics)
        else:
            skipped += 1
    run.optimizer.zero_grad()  # otherwise gradients would occupy memory during sampling
    if not taken:
        raise RunFailed(f"step {step + 1}: no update had a finite loss and gradient; lower --lr")
    mean = {name: sum(metrics[name] for metrics in taken) / len(taken) for name in taken[0]}
    # Before the first update the policy is the one that sampled: the ratio must be 1.
    return mean | {"abs_log_ratio": taken[0]["abs_log_ratio"], "skipped": skipped}


def backward(run: Run, batch: Batch, minibatch: Tensor) -> dict[str, float]:
    """The gradients of one mini-batch; returns its metrics.

    Every rank holds the whole batch and takes its part of the mini-batch, in equally many
    micro-batches.
    """
    optimisation = run.config.optimisation
    temperature = run.config.sampling.temperature
    rollouts = batch.rollouts
    lengths = rollouts.lengths
    # false in groups of equal rewards
    has_gradient = batch.token_advantages[minibatch].any(1).cpu()  # (b,)
    rows = minibatch[has_gradient]
    drops_uncredited = run.config.credit.entry.drops_uncredited
    counted = rows if drops_uncredited else minibatch
    n_tokens = max(1, int(rollouts.mask[counted].sum()))  # one count for the whole optimizer step
    shortest = min(minibatch.tolist(), key=lambda row: lengths[row])
    sums = dict(loss=0.0, clip_share=0.0, abs_log_ratio=0.0)
    dealt = parallel.deal(
        rows.tolist(),
        lengths,
        optimisation.micro_tokens,
        run.ranks,
        run.trained.layout.pack,
        filler=shortest,
    )
    for micro_batch, is_filler in dealt:
        part = rollouts.take(micro_batch)
        width = part.ids.shape[1]
        new_log_probs = run.trained(part, temperature).log_probs  # (b, t)
        old_log_probs = batch.log_probs[micro_batch, :width]  # (b, t)
        advantages = batch.token_advantages[micro_batch, :width]  # (b, t)
        if is_filler:  # this rank has no work left, and runs in step with the others
            advantages = torch.zeros_like(advantages)
        loss, metrics = policy_loss(
            new_log_probs,
            old_log_probs,
            advantages,
            part.mask,
            n_tokens,
            optimisation.clip_low,
            optimisation.clip_high,
        )
        (loss * run.ranks.world).backward()  # FSDP takes the mean over the ranks
        metrics["loss"] = loss.item()
        if not is_filler:
            sums = {name: sums[name] + metrics[name] for name in sums}
    parameters = run.trained.parameters()
    norm = torch.nn.utils.clip_grad_norm_(parameters, optimisation.max_grad_norm)
    sums = parallel.total(sums, run.ranks)
    sums["grad_norm"] = parallel.full(norm).item()
    # a mean over the tokens that it was taken of
    sums["abs_log_ratio"] *= n_tokens / max(1, int(rollouts.mask[rows].sum()))
    return sums


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate(run: Run, step: int) -> dict:
    """Held-out accuracy, greedy and sampled, and where credit goes, when `step` steps are done.

    Standard errors are clustered by problem.
    """
    config = run.config
    task = run.task
    ranks = run.ranks
    group_size = config.sampling.rollouts_per_prompt
    clock = report.Clock(ranks.device)
    torch.manual_seed(seed_of(config.seed, rank=ranks.rank))
    heldout = parallel.share(task.heldout, ranks)
    problems = parallel.share(task.heldout[: config.evaluation.eval_groups], ranks)
    temperature = config.sampling.temperature
    most = (len(heldout) + len(problems) * group_size) * config.sampling.max_tokens  # tokens
    with report.show_progress(run.actor.model, most, ranks.main):
        _, greedy = sample_and_grade(run, heldout, count=1, temperature=0.0, clock=clock)
        rollouts, verdicts = sample_and_grade(run, problems, group_size, temperature, clock)
    credited = {}
    if task.first_error:
        batch = Batch.of(rollouts, verdicts, problems)
        batch = with_credit(run, batch, step, clock)
        batch = Batch.cat(parallel.gather(batch, ranks))
        credited = credit_vs_first_error(run.tokenizer, task, batch, config.credit.method)
    greedy = parallel.gather_items(greedy, ranks)
    verdicts = parallel.gather_items(verdicts, ranks)
    length = statistics.median(parallel.gather_items(rollouts.mask.sum(1).tolist(), ranks))
    return (
        report.accuracies(greedy, verdicts, group_size)
        | {"length": length}
        | reason_shares([verdict.reason for verdict in verdicts])
        | credited
    )


if __name__ == "__main__":
    sys.exit(main())
