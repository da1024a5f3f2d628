"""Train a language model with SHEAR, with plain GRPO, or with a neighbour: the loop.

    python train.py                                              # the embedded task, minutes on two CPU cores
    python train.py --model Qwen/Qwen2.5-Math-7B --method shear  # the paper's run, on every GPU of the node
    python train.py --method grpo                                # the same without span weights
    python train.py --model PATH --data problems.jsonl           # problems of your own
    python train.py --model PATH --task code                     # programs, graded in a sandbox
    python train.py --resume runs/NAME                           # go on after a crash, or for more --steps
    torchrun --nproc_per_node 8 train.py ...                     # the same, started by torchrun

One step, top to bottom in `train_step`: draw problems, sample G responses to each, grade them, turn verdicts into
advantages (Eq. (1)), score them once with the policy that sampled them (old log-probabilities and the hidden states),
turn advantages into token advantages (`credit/`, the only line in which methods differ), and take a clipped
policy-gradient step for every `--prompts-per-update` of the prompts. Each rank does this with whole groups of its own
until token advantages are known; the steps are then taken by all ranks together, over the rollouts of all.

Flags and their defaults are in `harness/config.py`. Everything goes to `runs/NAME/`: config.json, metrics.jsonl (a row
a step), samples.jsonl (a group a step, with token weights), curve.png, `start/` (the embedded task's warmed-up model),
`checkpoints/` and `model/`; with --eval-every also `eval/` (every generation), its numbers in metrics.jsonl; where they
arise, `prm/` (the embedded task's reward model) and nonfinite.jsonl (rollouts of skipped updates).
"""

import argparse
import math
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.config import answer, parse_train

ARGS = answer(__name__, parse_train)  # --help and mistakes in the flags end here: what follows takes seconds to import

import numpy as np
import torch
from huggingface_hub.utils import enable_progress_bars
from torch import Tensor
from tqdm import tqdm
from transformers.utils import logging

from credit import lora
from credit.batch import Batch, Source
from credit.measures import effective_weights
from credit.methods import assign_credit
from credit.table import METHODS
from grpo import Rollouts, Scored, cat_padded, group_advantages, policy_loss, rollout, score
from harness import evaluation, folders, parallel, report
from harness.checkpoint import whole_folder
from harness.command import guarded, ranked, resolve
from harness.evaluation import Sampler
from harness.parallel import Ranks
from harness.prepare import protocol_of, sampling_of
from harness.run import (
    Run,
    check_policy,
    due,
    interruptible,
    prepared,
    restore,
    sampling_after,
    save,
    seed_of,
    skip,
)
from harness.tables import mean_and_error
from harness.track import tracker
from rewards import Verdict, scores_of
from tasks.benchmarks import Loaded

LATER = 2**20  # steps, which no run takes
EVALUATION = 2**31  # stands for a step in the seeds of evaluations, before and after alike


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 for a run that diverged or ran out of memory, 2 for bad input, 130 after Ctrl-C."""
    logging.disable_progress_bar()
    if os.environ.get("RANK", "0") == "0" and sys.stderr.isatty():
        enable_progress_bars()  # of downloads alone, which may take an hour

    def work() -> int:
        args = resolve(ARGS or parse_train(argv))
        return ranked(args, __file__, argv, lambda ranks: train(args, ranks), grouped=args.dtype != "float32")

    remedy = "lower --micro-tokens, --generate-batch or --max-tokens, or use more GPUs"
    return guarded(work, interrupted="interrupted", memory=remedy)


def train(args: argparse.Namespace, ranks: Ranks) -> int:
    """A run, from its plan to its last evaluation; returns the exit status."""
    with prepared(args, ranks) as (run, sets, predicted_gb):
        before, history = restore(run) if args.resume else begin(run)
        with interruptible(run), tracker(args, run.folder, ranks.main) as track:
            take_steps(run, sets, history, track)
        with sampling_after(run, args.steps):
            after = evaluate(run, args.steps)
        if ranks.main:
            with whole_folder(run.folder / "model") as draft:
                lora.save(run.sampler, run.tokenizer, draft)
            report.finish(args, run.folder, before, after, history, predicted_gb)
            if args.smoke:
                print("smoke test passed: sample, grade, credit, update, checkpoint")
    return 0


def take_steps(run: Run, sets: list[Loaded], history: list[dict], track: Callable[[dict], None]) -> None:
    """The steps that are not in `history` yet, each with its rows; after Ctrl-C the last whole one is saved."""
    args, ranks, folder = run.args, run.ranks, run.folder
    table = report.StepTable(args.steps)
    todo = range(len(history), args.steps)
    for step in tqdm(todo, initial=len(history), total=args.steps, desc="steps", leave=False, disable=None):
        with sampling_after(run, step):
            metrics, samples = train_step(run, step)
        check_policy(run, step)
        if args.eval_every and ((step + 1) % args.eval_every == 0 or step + 1 == args.steps):
            with sampling_after(run, step + 1):
                metrics["bench"] = on_benchmarks(run, sets, step + 1)
        history.append(metrics)
        if ranks.main:
            folders.append(folder / "metrics.jsonl", [metrics])
            folders.append(folder / "samples.jsonl", samples)
            tqdm.write(table.row(metrics))
            if step == 1 and metrics["reward"] == history[0]["reward"]:
                report.print_no_signal(metrics["reward"], metrics, args)
            track(metrics)
        interrupted = any(parallel.gather(run.interrupted, ranks))  # all ranks end after the same step
        if interrupted or due(run, step + 1):
            save(run, step + 1)
        if interrupted:
            raise KeyboardInterrupt


def begin(run: Run) -> tuple[dict, list[dict]]:
    """The evaluation before training, and no steps yet."""
    parallel.refresh(run.policy, run.sampler, run.ranks)
    before = evaluate(run, 0)
    if run.ranks.main:
        folders.append(run.folder / "metrics.jsonl", [{"before": report.summary(before)}])
        report.print_accuracy(before)
        report.print_no_signal(before["sampled"][0], before, run.args)
    return before, []


# ---- one step -------------------------------------------------------------------------------------------------


def train_step(run: Run, step: int) -> tuple[dict, list[dict]]:
    """One sampling phase and its updates: the line from problems to loss. Returns metrics and samples."""
    args = run.args
    torch.manual_seed(seed_of(args.seed, step, run.ranks.rank))
    clock = report.Clock(run.ranks.device)
    groups, replaced = draw_groups(run, step, clock)  # this rank's
    batch, token_advantages, problems, verdicts = credit_groups(run, groups, step, clock)  # of all ranks
    updates = update(run, batch.rollouts, batch.scored.logp, token_advantages, step)
    checksum = parallel.refresh(run.policy, run.sampler, run.ranks)
    clock.lap("train")
    credited = report.step_metrics(batch, token_advantages, run.task, problems)
    metrics = {"step": step + 1, **report.shares(verdicts), **credited, **updates, "seconds": clock.laps}
    if run.ranks.device.type == "cuda":
        metrics["peak_gb"] = max(parallel.gather(report.peak_gb(), run.ranks))
    if checksum is not None:
        metrics["checksum"] = checksum
    if args.dynamic_sampling:
        metrics["replaced"] = parallel.total({"groups": replaced}, run.ranks)["groups"] / len(problems)
    weights = {args.method: effective_weights(token_advantages, batch.advantages, batch.rollouts.mask)}  # (B, T)
    return metrics, report.sample_rows(step, run.tokenizer, run.task, problems, batch, verdicts, weights)


@dataclass(frozen=True)
class Group:
    """A problem with its rollouts and their verdicts."""

    problem: dict
    rollouts: Rollouts  # ids, mask (G, T), texts
    verdicts: list[Verdict]  # G with score, reason

    @property
    def equal(self) -> bool:
        """Whether no rewards differ, so that all advantages are 0."""
        return len({verdict.score for verdict in self.verdicts if verdict.score is not None}) < 2


def draw_groups(run: Run, step: int, clock: report.Clock) -> tuple[list[Group], int]:
    """This rank's groups of a step; how many gave way to others.

    With --dynamic-sampling N, groups of equal rewards give way to those of other problems, at most N times (DAPO,
    Sec. 3.2 of arXiv 2503.14476; deviates: those that are left stay, so batches keep their size). The other problems
    are of later epochs, by the step alone, so that a resumed run draws the same.
    """
    args = run.args

    def problems_of(step: int) -> list[dict]:
        return parallel.share(run.task.draw(step, args.prompts_per_step, args.seed), run.ranks)

    groups, replaced = sample_groups(run, problems_of(step), clock, drawn=args.smoke), 0
    for replacement in range(1, 1 + args.dynamic_sampling):
        equal = [place for place, group in enumerate(groups) if group.equal]
        if not equal:
            break
        others = problems_of(step + replacement * LATER)[: len(equal)]
        for place, group in zip(equal, sample_groups(run, others, clock), strict=True):
            groups[place] = group
        replaced += len(equal)
    return groups, replaced


def sample_groups(run: Run, problems: list[dict], clock: report.Clock, drawn: bool = False) -> list[Group]:
    """G rollouts to each problem with their verdicts.

    `drawn` verdicts alternate whatever was said, for --smoke: responses cut off so early are never right, and groups
    of equal rewards would prove neither weights nor updates.
    """
    rollouts = sample(run, problems, run.args.rollouts_per_prompt, run.args.temperature)
    clock.lap("generate")
    verdicts = run.task.verdicts(problems, rollouts)
    if drawn:
        verdicts = [Verdict(float(row % 2), "drawn") for row in range(len(verdicts))]
    clock.lap("grade")
    groups = []
    for problem, rows in zip(problems, torch.arange(len(verdicts)).view(len(problems), -1), strict=True):
        groups.append(Group(problem, rollouts.take(rows), [verdicts[row] for row in rows.tolist()]))
    return groups


def credit_groups(
    run: Run, groups: list[Group], step: int, clock: report.Clock
) -> tuple[Batch, Tensor, list[dict], list[Verdict]]:
    """Token advantages (B, T) of the groups of all ranks, with their problems and verdicts, the same on every rank.

    `step` steps are done.
    """
    args = run.args
    problems = [group.problem for group in groups]
    rollouts = Rollouts.cat([group.rollouts for group in groups])  # ids, mask (b, T)
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    source = Source(run.scorer, run.tokenizer, run.task, problems, step, run.prm)
    blocks, token_advantages = [], []
    for block in as_batch(rollouts, verdicts, args.rollouts_per_prompt, source).split():  # A (b,), Eq. (1)
        block = replace(block, scored=score_block(run, block.rollouts))  # states (n, d), of a block only
        clock.lap("score")
        token_advantages.append(assign_credit(args.method, block, args))  # (b, T) <- where methods differ
        if not any(earlier.closest for earlier in blocks):
            block = replace(block, closest=report.closest_in(block, args))
        clock.lap("weights")
        blocks.append(block.without_states())
    of_ranks = parallel.gather((Batch.cat(blocks), cat_padded(token_advantages)), run.ranks)
    clock.lap("wait")
    return (
        Batch.cat([batch for batch, _ in of_ranks]),
        cat_padded([advantages for _, advantages in of_ranks]),  # (B, T)
        parallel.gather_items(problems, run.ranks),
        parallel.gather_items(verdicts, run.ranks),
    )


def sample(run: Run, problems: list[dict], count: int, temperature: float) -> Rollouts:
    """`count` responses to each problem."""
    prompts = [run.task.prompt(problem) for problem in problems]
    limits = dict(max_tokens=run.args.max_tokens, **sampling_of(run.args, run.sampler, run.task))
    return rollout(run.sampler, run.tokenizer, prompts, count, temperature=temperature, **limits)


def as_batch(rollouts: Rollouts, verdicts: list[Verdict], group_size: int, source: Source | None = None) -> Batch:
    """Verdicts become advantages, Eq. (1), and everything goes into the one thing that methods see.

    A rollout without a verdict (score None) loses its mask: it is in no set and in no loss.
    """
    rewards = torch.tensor(scores_of(verdicts), device=rollouts.ids.device).float()  # (B,) float32
    rollouts = replace(rollouts, mask=rollouts.mask & ~rewards.isnan()[:, None])
    return Batch(group_advantages(rewards, group_size), rewards, rollouts, None, group_size, source)


def score_block(run: Run, rollouts: Rollouts) -> Scored:
    """What the sampler says of its rollouts; hidden states only for methods that read them."""
    limits = dict(temperature=run.args.temperature, micro_tokens=run.args.micro_tokens)
    return score(run.scorer, rollouts, **limits, keep_hidden="states" in METHODS[run.args.method].needs)


def update(run: Run, rollouts: Rollouts, old_logp: Tensor, token_advantages: Tensor, step: int) -> dict[str, float]:
    """The optimizer steps of one batch; mini-batches are whole groups, shuffled by (seed, step)."""
    groups = list(torch.arange(len(rollouts.texts)).split(run.args.rollouts_per_prompt))
    random.Random(f"minibatches {run.args.seed} {step}").shuffle(groups)
    taken, skipped = [], 0  # metrics of the optimizer steps that were taken; how many were not
    for first in range(0, len(groups), run.args.prompts_per_update):
        minibatch = torch.cat(groups[first : first + run.args.prompts_per_update])
        run.optimizer.zero_grad()
        metrics, suspects = backward(run, rollouts, old_logp, token_advantages, minibatch)
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            run.optimizer.step()
            run.skipped = 0
            taken.append(metrics)
        else:
            skipped += 1
            skip(run, step, rollouts, suspects or minibatch.tolist(), metrics)
    run.optimizer.zero_grad()  # or gradients take the room of the next step's rollouts
    if not taken:
        return dict.fromkeys(("loss", "clip_share", "abs_log_ratio", "grad_norm"), math.nan) | {"skipped": skipped}
    mean = {name: sum(metrics[name] for metrics in taken) / len(taken) for name in taken[0]}
    # The policy that sampled is the one being updated, so before the first update the ratio must be 1.
    return {**mean, "abs_log_ratio": taken[0]["abs_log_ratio"], "skipped": skipped}


def backward(
    run: Run, rollouts: Rollouts, old_logp: Tensor, token_advantages: Tensor, minibatch: Tensor
) -> tuple[dict[str, float], list[int]]:
    """The gradients of one mini-batch; returns its metrics, and this rank's rollouts that are not finite.

    Every rank holds the whole batch and takes its part of the mini-batch, in equally many micro-batches.
    """
    args, ranks, lengths = run.args, run.ranks, rollouts.lengths
    n_tokens = max(1, int(rollouts.mask[minibatch].sum()))  # one count for the whole optimizer step
    has_gradient = token_advantages[minibatch].any(1).cpu()  # (b,) false in groups of equal rewards
    rows = minibatch[has_gradient]
    shortest = torch.tensor([min(minibatch.tolist(), key=lambda row: lengths[row])])
    sums = dict(loss=0.0, clip_share=0.0, abs_log_ratio=0.0)
    suspects = []
    for micro_batch in parallel.deal(rows.tolist(), lengths, args.micro_tokens, ranks, run.policy.pack):
        idle = not len(micro_batch)  # no work left, but sharded weights need this rank: a pass that counts nothing
        micro_batch = shortest if idle else micro_batch
        dealt = rollouts.take(micro_batch)
        width = dealt.ids.shape[1]
        logp = run.policy(dealt, args.temperature)  # (b, t)
        advantages = token_advantages[micro_batch, :width] * (not idle)  # (b, t)
        clips = args.clip_low, args.clip_high
        loss, metrics = policy_loss(logp, old_logp[micro_batch, :width], advantages, dealt.mask, n_tokens, *clips)
        (loss * ranks.world).backward()  # FSDP takes the mean over the ranks
        suspects += micro_batch[~logp.isfinite().all(1).cpu()].tolist()
        metrics["loss"] = loss.item()
        if not idle:
            sums = {name: sums[name] + metrics[name] for name in sums}
    norm = torch.nn.utils.clip_grad_norm_(run.policy.parameters(), args.max_grad_norm)
    sums = parallel.total(sums, ranks)
    sums["grad_norm"] = parallel.full(norm).item()
    sums["abs_log_ratio"] *= n_tokens / max(1, int(rollouts.mask[rows].sum()))  # over the tokens it was taken of
    return sums, suspects


# ---- evaluation -----------------------------------------------------------------------------------------------


def evaluate(run: Run, step: int) -> dict:
    """Held-out accuracy, greedy and sampled, with standard errors (clustered by problem), and credit's place.

    `step` steps are done.
    """
    args, task, ranks = run.args, run.task, run.ranks
    torch.manual_seed(seed_of(args.seed, EVALUATION, ranks.rank))
    right = scores_of(sample_and_grade(run, task.heldout, 1, 0.0))
    problems = task.heldout[: args.eval_groups]
    credited = {}
    if task.first_error:
        clock = report.Clock(ranks.device)
        groups = sample_groups(run, parallel.share(problems, ranks), clock)
        batch, token_advantages, _, verdicts = credit_groups(run, groups, step, clock)
        credited = report.credit_vs_first_error(run.tokenizer, task, problems, batch, token_advantages)
    else:
        verdicts = sample_and_grade(run, problems, args.rollouts_per_prompt, args.temperature)
    scores = scores_of(verdicts)
    groups = scores.reshape(-1, args.rollouts_per_prompt)
    by_problem = np.nanmean(groups[np.isfinite(groups).any(1)], 1)
    return {
        "greedy": (*mean_and_error(right[np.isfinite(right)]), int(np.isfinite(right).sum())),
        "sampled": (*mean_and_error(by_problem), int(np.isfinite(scores).sum())),
        **report.shares(verdicts),
        **credited,
    }


def sample_and_grade(run: Run, problems: list[dict], count: int, temperature: float) -> list[Verdict]:
    """Verdicts on `count` responses to each problem, from all ranks."""
    mine = parallel.share(problems, run.ranks)
    verdicts = run.task.verdicts(mine, sample(run, mine, count, temperature))
    return parallel.gather_items(verdicts, run.ranks)


def on_benchmarks(run: Run, sets: list[Loaded], step: int) -> dict[str, dict]:
    """What the policy reaches on --bench after a step; its generations go to the run's eval/."""
    sampling = sampling_of(run.args, run.sampler)
    sampler = Sampler(run.sampler, run.tokenizer, run.args.model or "made here", sampling)
    path = run.folder / "eval" / f"step-{step:06d}.jsonl"
    return evaluation.evaluate_all(sampler, sets, protocol_of(run.args), run.ranks, seed=run.args.seed, path=path)


if __name__ == "__main__":
    sys.exit(main())
