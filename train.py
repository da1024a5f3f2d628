"""The training loop of SHEAR (arXiv 2604.23318), plain GRPO and related credit methods.

    python train.py                                              # the embedded task; needs no GPU
    python train.py --model Qwen/Qwen2.5-Math-7B --method shear  # the paper's run, on all GPUs
    python train.py --method grpo                                # without span weights
    python train.py --task own --model PATH --data FILE          # problems of your own, on a CPU
    python train.py --model PATH --task code                     # programs, graded in a sandbox
    python train.py --use lab.fast                               # the same numbers, sooner
    python train.py --resume runs/NAME                           # after a crash
    python train.py --resume runs/NAME --steps 80                # more steps than the run had
    torchrun --nproc_per_node 8 train.py ...                     # ranks started by torchrun

One step, top to bottom in `train_step`:
  1. Draw problems, sample G responses to each (rollouts), and grade them.
  2. Turn rewards into advantages (Eq. (1)).
  3. Score the responses once with the policy that sampled them: old log-probabilities and hidden
     states.
  4. Turn advantages into token advantages (`credit/`): here the methods differ.
  5. Take a clipped policy-gradient step for every `--prompts-per-update` problems.
Each rank does 1 to 4 for whole groups of its own. In 5 all ranks take each optimizer step together,
over the rollouts of all.

Flags and their defaults are in `base/config.py`. A run writes to `runs/NAME/`:
    config.json                  the resolved flags
    metrics.jsonl                a row per step, one before training and one after it
    samples.jsonl                a group per step, with token weights
    before.jsonl, after.jsonl    one held-out group, where the task knows first errors
    checkpoints/, model/         what --resume needs, and the trained model
    start/                       the model after its warm-up, where the task has one

Left out: sampling while the policy is updated, and schedules of the learning rate.
"""

import math
import statistics
import sys

from base.config import Config, end_on_mistakes, parse_train
from harness.command import check_inputs

if __name__ == "__main__":
    end_on_mistakes(check_inputs)  # the imports below take seconds

import torch
from torch import Tensor
from tqdm import tqdm

from base import files
from base.errors import RunFailed
from credit.batch import Batch
from credit.measures import credit_vs_first_error, reason_shares, sample_rows, step_metrics
from credit.rules import assign_credit
from grpo import HIDE_BAR, group_advantages, policy_loss
from harness import checkpoint, fsdp, log
from harness.command import interruptible, run_command
from harness.fsdp import Ranks
from harness.run import (
    Run,
    check_policy,
    check_verdicts,
    load_run,
    resolve,
    sample,
    seed_of,
    start_run,
    warm_up_policy,
)


@run_command
def main(argv: list[str] | None = None) -> int:
    """Train, or start one process per GPU that does.

    The exit status is 0; 1 for a run that cannot continue, such as one that diverged, 2 for bad
    input, 130 after Ctrl-C.
    """
    config = resolve(parse_train(argv))
    if fsdp.processes(config) > 1:
        return fsdp.launch(fsdp.processes(config), __file__, argv)
    train(config, fsdp.join(config.device, config.threads))
    return 0


def train(config: Config, ranks: Ranks) -> None:
    """Do a whole run, from loading to the last evaluation.

    After Ctrl-C the current step is finished and saved, and KeyboardInterrupt is raised.
    """
    loaded = load_run(config, ranks)
    with log.open_folder(loaded) as folder:
        warm_up_policy(loaded, folder)
        run = start_run(loaded, folder)  # FSDP: what is trained lies over all ranks
        before: dict | None
        if run.config.resume:
            before = checkpoint.restore(run)
        else:
            before = evaluate(run)
            log.log_evaluation(run, before=before)
        take_steps(run)
        after = evaluate(run)
        if ranks.main:
            with files.whole_folder(folder / "model") as draft:
                run.hooks.save_model(run.context.policy.model, run.context.tokenizer, draft)
        log.log_evaluation(run, before=before, after=after)
        log.print_end(run, before, after)


def take_steps(run: Run) -> None:
    """Take, log and save the steps that are left; raises KeyboardInterrupt after Ctrl-C's step."""
    steps = run.config.steps
    todo = range(run.context.step, steps)
    bar = tqdm(todo, "steps", initial=todo.start, total=steps, leave=False, disable=HIDE_BAR)
    with interruptible(run):
        for step in bar:
            metrics, samples = train_step(run, step)
            check_policy(run, step)
            log.log_step(run, metrics, samples)
            # all ranks end after the same step
            interrupted = any(fsdp.gather(run.interrupted, run.ranks))
            if interrupted or is_due(step, steps, run.config.save_every):
                checkpoint.save(run, step + 1)
            if interrupted:
                raise KeyboardInterrupt


def is_due(step: int, steps: int, every: int) -> bool:
    """Whether what happens every so many steps and after the last follows this step; 0: never."""
    return every > 0 and ((step + 1) % every == 0 or step + 1 == steps)


# ---- one step ------------------------------------------------------------------------------------


def train_step(run: Run, step: int) -> tuple[dict, list[dict]]:
    """One sampling phase and its updates; returns the step's metrics and samples.jsonl's rows.

    Only the main rank, which logs them, has the samples and the metrics of the whole batch. Raises
    RunFailed if no complete response has a verdict.
    """
    config = run.config
    context = run.context
    ranks = run.ranks
    clock = log.Clock(ranks.device)
    context.step = step
    torch.manual_seed(seed_of(config.seed, step, ranks.rank))

    # 1. problems, G responses to each of this rank's, and their verdicts
    drawn = context.task.draw(step, config.prompts_per_step, config.seed)
    problems = fsdp.share(drawn, ranks)
    rollouts = sample(run, problems, config.rollouts_per_prompt, config.temperature)  # ids (b, T)
    clock.lap("generate")
    verdicts = run.hooks.verdicts(context.task, problems, rollouts)
    clock.lap("grade")

    # 2. Eq. (1)
    batch = Batch.of(rollouts, verdicts, problems)  # rewards (b,)
    batch.advantages = group_advantages(batch.rewards, batch.group_size)  # (b,)

    # 3. and 4. old log-probabilities, hidden states, and token advantages (b, T) from them
    batch = score_and_credit(run, batch, clock)

    # 5. all ranks together, over the rollouts of all
    batch = gather_batch(batch, drawn, ranks)  # (B, T)
    clock.lap("wait")
    check_verdicts(batch, verdicts, step, ranks)
    updates = update(run, batch, step)
    checksum = fsdp.refresh(run.trained, context.policy, ranks)  # the new weights sample
    clock.lap("train")
    if ranks.device.type == "cuda":  # so far, of this rank
        updates["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        updates["reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)

    metrics: dict = {"step": step + 1}
    samples = []
    if ranks.main:
        metrics |= step_metrics(batch)
        samples = samples_of(run, batch, step)
    clock.lap("measure")
    context.step = step + 1  # steps done
    if checksum is not None:
        updates["checksum"] = checksum
    return metrics | updates | {"seconds": clock.laps}, samples


def score_and_credit(run: Run, batch: Batch, clock: log.Clock) -> Batch:
    """The batch with log-probabilities, entropies and token advantages, (b, T) each.

    A few whole groups are taken at a time, because the hidden states of the whole batch would not
    fit in memory.
    """
    blocks = []
    for block in batch.blocks():
        scores = run.context.score(block.rollouts, keep_hidden=run.rule.needs_states)
        block.log_probs = scores.log_probs  # (b, T)
        block.entropies = scores.entropies  # (b, T)
        block.hidden = scores.hidden  # (n, d)
        clock.lap("score")
        block.token_advantages = assign_credit(run.rule, block, run.context)  # <- methods differ
        block.hidden = None
        blocks.append(block)
        clock.lap("weights")
    return Batch.cat(blocks, batch.problems)


def gather_batch(batch: Batch, problems: list[dict], ranks: Ranks) -> Batch:
    """The batch of all ranks. Their `problems`, which may hold many tests, are not sent."""
    batch.problems = []
    return Batch.cat(fsdp.gather(batch, ranks), problems)


def samples_of(run: Run, batch: Batch, step: int) -> list[dict]:
    """The rows of a step for samples.jsonl: of the first mixed group, or of all groups."""
    groups = [batch.first_mixed or 0]
    if run.config.keep_samples:
        groups = list(range(len(batch.problems)))
    weights = {run.config.method: batch.weights}  # (B, T)
    rows = []
    for group in groups:
        for row in sample_rows(run.context, batch, weights, group):
            rows.append({"step": step + 1} | row)
    return rows


# ---- the updates of a step -----------------------------------------------------------------------


def update(run: Run, batch: Batch, step: int) -> dict[str, float]:
    """Take one batch's optimizer steps; returns the mean of their metrics.

    A step whose loss or gradient is not finite is skipped; raises RunFailed if all are.
    """
    config = run.config
    taken = []  # metrics of the optimizer steps that were taken
    skipped = 0  # how many were not
    for rows in batch.minibatches(config.prompts_per_update, config.seed, step):  # (m,)
        run.optimizer.zero_grad()
        metrics = backward(run, batch, rows)
        norm = torch.nn.utils.clip_grad_norm_(run.trained.parameters(), config.max_grad_norm)
        metrics["grad_norm"] = fsdp.full(norm).item()
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            run.optimizer.step()
            taken.append(metrics)
        else:
            skipped += 1
    run.optimizer.zero_grad()  # otherwise gradients would occupy memory during sampling
    if not taken:
        raise RunFailed(f"step {step + 1}: no update had a finite loss and gradient; lower --lr")
    mean = {name: statistics.fmean(metrics[name] for metrics in taken) for name in taken[0]}
    # The log-ratio is the first mini-batch's: there the policy still is the one that sampled, so it
    # must be 0, up to rounding.
    mean |= {"abs_log_ratio": taken[0]["abs_log_ratio"], "skipped": skipped}
    return mean


def backward(run: Run, batch: Batch, rows: Tensor) -> dict[str, float]:
    """The gradient of one mini-batch, rows (m,) of the batch; returns its loss and metrics.

    Every rank holds the whole batch, and computes its part in as many micro-batches as the other
    ranks.
    """
    # without rows whose token advantages are all 0, as in groups of equal rewards
    credited = rows[batch.token_advantages[rows].any(1).cpu()]
    n_tokens = max(1, int(batch.mask[rows].sum()))  # one count for the whole optimizer step
    sums = {"loss": 0.0, "clipped": 0.0, "abs_log_ratio": 0.0}
    micro_batches = fsdp.own_micro_batches(
        credited.tolist(),
        batch.rollouts.lengths,
        run.config.micro_tokens,
        run.ranks,
        run.trained.layout.pack,
    )
    for own_rows, is_filler in micro_batches:  # rows (b,)
        credit = batch.token_advantages[own_rows]  # (b, T)
        if is_filler:  # a rank without work runs in step with the others, for nothing
            credit = torch.zeros_like(credit)
        loss, metrics = micro_batch_loss(run, batch, own_rows, credit)
        # FSDP takes the mean over the ranks
        (loss * run.ranks.world / n_tokens).backward()
        if not is_filler:
            metrics["loss"] = loss.item()
            sums = {name: sums[name] + metrics[name] for name in sums}
    sums = fsdp.total(sums, run.ranks)
    return {
        "loss": sums["loss"] / n_tokens,
        "clip_share": sums["clipped"] / n_tokens,
        # the mean over the tokens that were computed
        "abs_log_ratio": sums["abs_log_ratio"] / max(1, int(batch.mask[credited].sum())),
    }


def micro_batch_loss(
    run: Run, batch: Batch, rows: Tensor, credit: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """`policy_loss` of rows (b,) of the batch, with token advantages (b, T), under the policy."""
    config = run.config
    rollouts = batch.rollouts.take(rows)
    width = rollouts.ids.shape[1]
    return policy_loss(
        run.trained(rollouts, run.context.temperature).log_probs,  # (b, t), with gradient
        batch.log_probs[rows, :width],
        credit[:, :width],
        rollouts.mask,
        config.clip_low,
        config.clip_high,
    )


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate(run: Run) -> dict:
    """Evaluate the policy: held-out accuracy, greedy and sampled, and where credit goes.

    Returns a row for metrics.jsonl: accuracies with standard errors clustered by problem, the
    median length and shares of reasons of the sampled responses, and, where the task knows first
    errors, `credit_vs_first_error`.
    """
    config = run.config
    ranks = run.ranks
    task = run.context.task
    torch.manual_seed(seed_of(config.seed, rank=ranks.rank))
    heldout = fsdp.share(task.heldout, ranks)
    greedy = task.verdicts(heldout, sample(run, heldout, count=1, temperature=0.0))
    chosen = task.heldout[: config.eval_groups]
    problems = fsdp.share(chosen, ranks)
    rollouts = sample(run, problems, config.rollouts_per_prompt, config.temperature)
    verdicts = task.verdicts(problems, rollouts)
    credit_report = {}
    if task.first_error:
        batch = Batch.of(rollouts, verdicts, problems)
        batch.advantages = group_advantages(batch.rewards, batch.group_size)
        batch = score_and_credit(run, batch, log.Clock(ranks.device))
        batch = gather_batch(batch, chosen, ranks)
        credit_report = credit_vs_first_error(run.context, batch, config.method)
    greedy = fsdp.gather_items(greedy, ranks)
    verdicts = fsdp.gather_items(verdicts, ranks)
    length = statistics.median(fsdp.gather_items(rollouts.mask.sum(1).tolist(), ranks))
    return (
        log.accuracies(greedy, verdicts, config.rollouts_per_prompt)
        | {"length": length}
        | reason_shares([verdict.reason for verdict in verdicts])
        | credit_report
    )


if __name__ == "__main__":
    sys.exit(main())
