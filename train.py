"""Train a language model with SHEAR, with plain GRPO, or with a neighbour: the loop.

    python train.py                                              # the embedded task, minutes on two CPU cores
    python train.py --model Qwen/Qwen2.5-Math-7B --method shear  # the paper's run, on every GPU of the node
    python train.py --method grpo                                # the same without span weights
    python train.py --model PATH --data problems.jsonl           # problems of your own
    python train.py --model PATH --task code                     # programs, graded in a sandbox
    python train.py --resume runs/NAME                           # go on after a crash, or for more --steps
    torchrun --nproc_per_node 8 train.py ...                     # the same, started by torchrun

One step, top to bottom in `train_step`: draw problems, sample G responses to each, grade them, score them once
with the policy that sampled them (old log-probabilities and the hidden states), turn verdicts into advantages
(Eq. (1)), advantages into token advantages (`credit.py`, the only line in which methods differ), and take
`--batch / --minibatch` clipped policy-gradient steps. Each rank does this with whole groups of its own until
advantages are known; the steps are then taken by all ranks together, over the rollouts of all.

Flags and their defaults are in `recipe.py`. Everything goes to `runs/NAME/`: config.json, metrics.jsonl (a row a
step), samples.jsonl (a group a step, with token weights), curve.png, `start/` (the embedded task's warmed-up model),
`checkpoints/` and `model/`; with --eval-every also `eval/` (every generation), its numbers in metrics.jsonl.
"""

import argparse
import dataclasses
import math
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers.utils import logging

import grpo
from credit import lora, prm
from credit.measures import effective_weights, localisation
from credit.methods import USES_HIDDEN, USES_PRM, Batch, Source, credit, true_errors
from grpo import BARS, Policy, Rollouts, Scored, group_advantages, pack, policy_loss, rollout, score
from harness import benchmarks, checkpoint, memory, parallel, report
from harness.benchmarks import Loaded
from harness.checkpoint import CheckpointError
from harness.parallel import Ranks
from harness.prepare import own_prm, protocol_of, sampling_of, set_up, warm_up
from harness.recipe import method_options, parse_args
from rewards import Verdict, scores_of
from tasks.problems import BadInput, Task

EVALUATION = 2**31  # stands for a step in the seeds of evaluations, before and after alike
PATIENCE = 3  # updates in a row that may be skipped for a loss or gradient that is not finite


class Diverged(RuntimeError):
    """PATIENCE updates in a row had a loss or gradient that is not finite."""


@dataclass
class Run:
    """What every step needs."""

    args: argparse.Namespace
    ranks: Ranks
    task: Task
    tokenizer: object
    policy: Policy  # trained: float32 weights, sharded where there are several ranks
    sampler: object  # samples and scores: a whole copy in the dtype of compute, or the policy's own model
    scorer: Policy  # `sampler` as a policy, for scores and for what a credit method asks
    optimizer: torch.optim.Optimizer
    folder: Path
    prm: tuple | None = None  # process reward model and its tokenizer
    skipped: int = 0  # updates in a row that were not finite


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 for a run that diverged or ran out of memory, 2 for bad input, 130 after Ctrl-C."""
    speaks = os.environ.get("RANK", "0") == "0"
    if not (speaks and sys.stderr.isatty()):
        logging.disable_progress_bar()
    try:
        args = parse_args(argv)
        count = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 1)
        if count > 1 and "RANK" not in os.environ:
            print(f"starting {count} processes on this machine, one a rank", flush=True)
            return parallel.launch(count, __file__, sys.argv[1:] if argv is None else argv)
        if args.threads:
            torch.set_num_threads(args.threads)
        ranks = parallel.join(args.device, grouped=args.dtype != "float32")
        status = train(args, ranks)
    except (BadInput, Diverged) as error:
        if speaks:
            print(f"error: {error}", file=sys.stderr)
        status = 2 if isinstance(error, BadInput) else 1
    except torch.OutOfMemoryError as error:
        print(
            f"error: rank {os.environ.get('RANK', '0')}: {str(error).split('. ')[0]}; lower --micro-tokens, "
            "--generate-batch or --max-tokens, or use more GPUs",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        if speaks:
            print("interrupted: no complete model; --resume goes on if there is a checkpoint", file=sys.stderr)
        status = 130
    except Exception as error:
        print(f"rank {os.environ.get('RANK', '0')} fails: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise
    parallel.leave()
    return status


def train(args: argparse.Namespace, ranks: Ranks) -> int:
    """Plan, warm-up, and the loop; everything goes to the run's folder."""
    task, model, tokenizer, notes, judge, sets = set_up(args, ranks)
    predicted = memory.predict(model.config, args, ranks.world, memory.size_gb(ranks.device), prm.size_gb(judge))
    folder = report.make_folder(args, ranks)
    with report.locked(folder, ranks):
        if ranks.main:
            if ranks.device.type == "cuda" or args.task != "embedded":
                notes += memory.notes(predicted, ranks.device, model, folder, args)
            report.print_plan(args, folder, notes)
        if args.task == "embedded" and not args.model and not args.resume:
            warm_up(model, tokenizer, task, args, folder, ranks)
        if args.method in USES_PRM and not args.prm:
            judge = own_prm(model, task, args, folder, ranks)
        if args.lora_rank:
            lora.add(model, args.lora_rank, args.seed)
        return loop(assemble(args, ranks, task, model, tokenizer, folder, judge), sets, predicted["total"])


def loop(run: Run, sets: list[Loaded], predicted_gb: float) -> int:
    """Evaluation, the steps, evaluation; returns the exit status."""
    args, ranks, folder = run.args, run.ranks, run.folder
    before, history = begin(run)
    after, status = None, 0
    try:
        for step in tqdm(range(len(history), args.steps), desc="steps", leave=False, disable=BARS):
            metrics, samples = train_step(run, step)
            if args.eval_every and ((step + 1) % args.eval_every == 0 or step + 1 == args.steps):
                metrics["bench"] = on_benchmarks(run, sets, step + 1)
            history.append(metrics)
            if ranks.main:
                report.append(folder / "metrics.jsonl", [metrics])
                report.append(folder / "samples.jsonl", samples)
                tqdm.write(report.step_line(metrics, args.steps))
            if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                save(run, step + 1)
        after = evaluate(run, args.steps)
    except KeyboardInterrupt:
        if ranks.world > 1:  # the others may be anywhere: no step can be ended together
            raise
        print(f"interrupted after {len(history)} of {args.steps} steps", file=sys.stderr)
        status = 130
    if ranks.main:
        report.finish(args, folder, before, after, history, predicted_gb)
        lora.save(run.sampler, run.tokenizer, folder / "model")
        print(f"saved to {folder}/")
    return status


def assemble(args: argparse.Namespace, ranks: Ranks, task: Task, model, tokenizer, folder: Path, judge=None) -> Run:
    """Policy, sampler and optimizer from a model."""
    dtype = getattr(torch, args.dtype)
    policy, sampler = parallel.shard(model, ranks, dtype, recompute=args.recompute, shard_over=args.shard_over)
    # Adam's step is lr whatever the gradient's size, so weights that shrink all advantages alike change little.
    fused = ranks.device.type == "cuda"
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0, fused=fused)
    scorer = policy if sampler is policy.model else Policy(sampler, args.recompute)
    return Run(args, ranks, task, tokenizer, policy, sampler, scorer, optimizer, folder, judge)


def begin(run: Run) -> tuple[dict, list[dict]]:
    """The evaluation before training and the steps done so far: of a new run, or as a resumed run's files tell."""
    if run.args.resume:
        return go_on(run)
    parallel.refresh(run.policy, run.sampler, run.ranks)
    before = evaluate(run, 0)
    if run.ranks.main:
        report.append(run.folder / "metrics.jsonl", [{"before": report.summary(before)}])
        report.print_accuracy("before", before)
    return before, []


def go_on(run: Run) -> tuple[dict, list[dict]]:
    """Everything as it was at the checkpoint; raises BadInput, on all ranks alike, before a file is changed."""
    path, step = checkpoint.find(Path(run.args.resume))
    rows = parallel.gather(report.rows(run.folder / "metrics.jsonl") if run.ranks.main else None, run.ranks)[0]
    history = [row for row in rows if row.get("step", step + 1) <= step]
    if len(history) != step or "before" not in rows[0]:
        raise BadInput(f"--resume {path}: metrics.jsonl lacks rows of its {step} steps; give an older checkpoint")
    try:
        checkpoint.load(path, run.policy, run.optimizer, run.ranks)
    except CheckpointError as error:
        raise BadInput(f"--resume {path}: {error}; give another checkpoint of this run") from error
    for group in run.optimizer.param_groups:
        group["lr"] = run.args.lr  # a flag that a resumed run may change
    parallel.refresh(run.policy, run.sampler, run.ranks)
    if run.ranks.main:
        print(f"resumed after step {step} from {path}")
        for old in checkpoint.discard_after(run.folder, step):
            print(f"removed {old}, which comes after it")
        report.cut_back(run.folder, step)
    return rows[0]["before"], history


def save(run: Run, step: int) -> None:
    """A checkpoint of `step` steps done."""
    parts = run.policy, run.sampler, run.optimizer, run.tokenizer
    checkpoint.save(run.folder, step, *parts, run.ranks, run.args.keep)


def train_step(run: Run, step: int) -> tuple[dict, list[dict]]:
    """One sampling phase and its updates: the line from problems to loss. Returns metrics and samples."""
    args = run.args
    torch.manual_seed(seed_of(args.seed, step, run.ranks.rank))
    problems = run.task.draw(step, args.batch // args.group, args.seed)  # on every rank the same
    clock = report.Clock(run.ranks.device)
    batch, token_advantages, verdicts = experience(run, problems, clock, step, drawn=args.smoke)
    updates = update(run, batch.rollouts, batch.scored.logp, token_advantages, step)
    checksum = parallel.refresh(run.policy, run.sampler, run.ranks)
    clock.lap("train")
    weights = effective_weights(token_advantages, batch.advantages, batch.rollouts.mask)  # (B, T)
    metrics = {"step": step + 1, **report.step_metrics(batch, token_advantages), **updates, "seconds": clock.laps}
    if run.ranks.device.type == "cuda":
        metrics["peak_gb"] = max(parallel.gather(report.peak_gb(), run.ranks))
    if checksum is not None:
        metrics["checksum"] = checksum
    return metrics, report.sample_rows(step, run.tokenizer, run.task, problems, batch, verdicts, weights)


def experience(
    run: Run, problems: list[dict], clock, step: int, drawn: bool = False
) -> tuple[Batch, Tensor, list[Verdict]]:
    """G rollouts to each problem with their verdicts and token advantages (B, T), the same on every rank.

    `step` steps are done. `drawn` verdicts alternate whatever was said, for --smoke: responses cut off so early are
    never right, and groups of equal rewards would prove neither weights nor updates.
    """
    args = run.args
    mine = parallel.share(problems, run.ranks)  # whole groups
    rollouts = sample(run, mine, args.group, args.temperature)
    clock.lap("generate")
    verdicts = run.task.verdicts(mine, rollouts)
    if drawn:
        verdicts = [Verdict(float(row % 2), "drawn") for row in range(len(verdicts))]
    clock.lap("grade")
    scored = score_all(run, rollouts)
    clock.lap("score")
    limits = dict(temperature=args.temperature, micro_tokens=args.micro_tokens)
    source = Source(run.scorer, run.tokenizer, run.task, mine, step, args.steps, **limits, prm=run.prm)
    batch = as_batch(rollouts, verdicts, scored, args.group, source)
    controls = dict(negative_scale=args.negative_scale, rescale=args.rescale)
    token_advantages = credit(args.method, batch, method_options(args), **controls)  # the one line where methods differ
    clock.lap("weights")
    parts = parallel.gather((light(batch), token_advantages, verdicts), run.ranks)
    clock.lap("wait")
    batches, advantages, verdicts = zip(*parts, strict=True)
    return Batch.cat(batches), grpo.cat_padded(advantages), [verdict for part in verdicts for verdict in part]


def seed_of(seed: int, step: int, rank: int = 0) -> int:
    """Random numbers depend on the seed, the step and the rank alone, so methods see the same draws."""
    return int(np.random.SeedSequence([seed, step] + [rank] * (rank > 0)).generate_state(1)[0])


def sample(run: Run, problems: list[dict], count: int, temperature: float) -> Rollouts:
    """`count` responses to each problem."""
    prompts = [run.task.prompt(problem) for problem in problems]
    limits = dict(max_tokens=run.args.max_tokens, **sampling_of(run.args, run.sampler))
    return rollout(run.sampler, run.tokenizer, prompts, count, temperature=temperature, **limits)


def score_all(run: Run, rollouts: Rollouts) -> Scored:
    """What the sampler says of its rollouts; hidden states only for methods that read them."""
    keep = run.args.method in USES_HIDDEN
    limits = dict(temperature=run.args.temperature, micro_tokens=run.args.micro_tokens)
    return score(run.scorer, rollouts, **limits, keep_hidden=keep)


def as_batch(
    rollouts: Rollouts, verdicts: list, scored: Scored, group_size: int, source: Source | None = None
) -> Batch:
    """Verdicts become advantages, Eq. (1), and everything goes into the one thing that methods see.

    A rollout without a verdict (score None) loses its mask: it is in no set and in no loss.
    """
    rewards = torch.tensor(scores_of(verdicts), device=rollouts.ids.device).float()  # (B,) float32
    rollouts = dataclasses.replace(rollouts, mask=rollouts.mask & ~rewards.isnan()[:, None])
    return Batch(group_advantages(rewards, group_size), rewards, rollouts, scored, group_size, source)


def light(batch: Batch) -> Batch:
    """A batch that can be sent around. (Not hidden[..., :0]: a view is sent with all that it views.)"""
    nothing = batch.scored.hidden.new_empty(*batch.scored.logp.shape, 0)
    return dataclasses.replace(batch, source=None, scored=dataclasses.replace(batch.scored, hidden=nothing))


def update(run: Run, rollouts: Rollouts, old_logp: Tensor, token_advantages: Tensor, step: int) -> dict[str, float]:
    """The optimizer steps of one batch; mini-batches are whole groups, shuffled by (seed, step).

    Every rank holds the whole batch and takes its part of each mini-batch, in equally many micro-batches.
    """
    args, ranks, lengths = run.args, run.ranks, rollouts.lengths
    groups = list(torch.arange(len(rollouts.texts)).split(args.group))
    random.Random(f"minibatches {args.seed} {step}").shuffle(groups)
    counts = token_advantages.any(1).cpu()  # (B,) the others, in groups of equal rewards, have gradient 0
    totals, skipped = [], 0
    for minibatch in torch.cat(groups).split(args.minibatch):
        n_tokens = max(1, int(rollouts.mask[minibatch].sum()))  # one count for the whole optimizer step
        rows = minibatch[counts[minibatch]]
        shortest = torch.tensor([min(minibatch.tolist(), key=lambda row: lengths[row])])
        sums, suspects = dict(loss=0.0, clip_share=0.0, abs_log_ratio=0.0), []
        run.optimizer.zero_grad()
        for micro in pack(rows.tolist(), lengths, args.micro_tokens, ranks.world)[ranks.rank]:
            idle = not len(micro)  # nothing left to do, but sharded weights need this rank: a pass that counts nothing
            micro = shortest if idle else micro
            part = rollouts.take(micro)
            width = part.ids.shape[1]
            logp = run.policy(part, args.temperature)
            loss, metrics = policy_loss(
                logp,
                old_logp[micro, :width],
                token_advantages[micro, :width] * (not idle),
                part.mask,
                n_tokens,
                args.clip_low,
                args.clip_high,
            )
            (loss * ranks.world).backward()  # FSDP takes the mean over the ranks
            suspects += micro[~logp.isfinite().all(1).cpu()].tolist()
            for name, value in {} if idle else {"loss": loss.item(), **metrics}.items():
                sums[name] += value
        norm = torch.nn.utils.clip_grad_norm_(run.policy.parameters(), args.max_grad_norm)
        sums = dict(zip(sums, parallel.total(list(sums.values()), ranks), strict=True))
        sums["grad_norm"] = parallel.full(norm).item()
        sums["abs_log_ratio"] *= n_tokens / max(1, int(rollouts.mask[rows].sum()))  # over the tokens it was taken of
        if math.isfinite(sums["loss"]) and math.isfinite(sums["grad_norm"]):
            run.optimizer.step()
            run.skipped = 0
            totals.append(sums)
        else:
            run.optimizer.zero_grad()
            skipped += 1
            skip(run, step, rollouts, suspects or minibatch.tolist(), sums)
    run.optimizer.zero_grad()  # or gradients take the room of the next step's rollouts
    names = ("loss", "clip_share", "abs_log_ratio", "grad_norm")
    mean = {name: sum(total[name] for total in totals) / len(totals) if totals else math.nan for name in names}
    # The policy that sampled is the one being updated, so before the first update the ratio must be 1.
    return {**mean, "abs_log_ratio": totals[0]["abs_log_ratio"] if totals else math.nan, "skipped": skipped}


def skip(run: Run, step: int, rollouts: Rollouts, suspects: list[int], sums: dict[str, float]) -> None:
    """Write down the rollouts of an update that was not finite; raises Diverged after PATIENCE in a row."""
    run.skipped += 1
    suspects = sorted({row for part in parallel.gather(suspects, run.ranks) for row in part})
    path = run.folder / "nonfinite.jsonl"
    if run.ranks.main:
        report.append(path, [{"step": step + 1, "row": row, **sums, **report.raw(rollouts, row)} for row in suspects])
    if run.skipped == PATIENCE:
        raise Diverged(
            f"step {step + 1}: {PATIENCE} updates in a row had a loss or gradient that is not finite; their rollouts "
            f"are in {path}; go on with --resume {run.folder} and an --lr below {run.args.lr}"
        )


def evaluate(run: Run, step: int) -> dict:
    """Held-out accuracy, greedy and sampled, with standard errors (clustered by problem), and credit's place.

    `step` steps are done.
    """
    args, task, ranks = run.args, run.task, run.ranks
    torch.manual_seed(seed_of(args.seed, EVALUATION, ranks.rank))
    right = scores_of(attempt(run, task.heldout, 1, 0.0))
    problems = task.heldout[: args.eval_groups]
    if task.first_error:
        batch, token_advantages, verdicts = experience(run, problems, report.Clock(ranks.device), step)
    else:
        verdicts = attempt(run, problems, args.group, args.temperature)
    scores = scores_of(verdicts)
    groups = scores.reshape(-1, args.group)
    by_problem = np.nanmean(groups[np.isfinite(groups).any(1)], 1)
    result = {
        "greedy": (*mean_and_error(right), int(np.isfinite(right).sum())),
        "sampled": (*mean_and_error(by_problem), int(np.isfinite(scores).sum())),
    }
    return {**result, **locate(run, problems, batch, token_advantages)} if task.first_error else result


def on_benchmarks(run: Run, sets: list[Loaded], step: int) -> dict[str, dict]:
    """What the policy reaches on --bench after a step; its generations go to the run's eval/."""
    options = dict(name=run.args.model or "made here", seed=run.args.seed, sampling=sampling_of(run.args, run.sampler))
    parts = run.sampler, run.tokenizer, sets, protocol_of(run.args), run.ranks
    return benchmarks.evaluate_all(*parts, **options, path=run.folder / "eval" / f"step-{step:06d}.jsonl")


def attempt(run: Run, problems: list[dict], count: int, temperature: float) -> list[Verdict]:
    """Verdicts on `count` responses to each problem, from all ranks."""
    mine = parallel.share(problems, run.ranks)
    verdicts = run.task.verdicts(mine, sample(run, mine, count, temperature))
    return [verdict for part in parallel.gather(verdicts, run.ranks) for verdict in part]


def mean_and_error(scores: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error over independent problems, those without a verdict left out."""
    known = scores[np.isfinite(scores)]
    return float(known.mean()), float(known.std(ddof=1) / math.sqrt(len(known))) if len(known) > 1 else math.nan


def locate(run: Run, problems: list[dict], batch: Batch, token_advantages: Tensor) -> dict:
    """Where the method puts credit, against the true first errors of the wrong rollouts of mixed groups."""
    weights = effective_weights(token_advantages, batch.advantages, batch.rollouts.mask)  # (B, T)
    wrong_step = true_errors(batch, run.task.first_error, problems)  # (B, 2)
    return {
        "localisation": localisation(weights, batch.rollouts.mask, wrong_step),
        "example": report.example(run.tokenizer, batch.rollouts, weights, wrong_step[:, 0]),
    }


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # so that a log file shows each step when it is done
    sys.exit(main())
