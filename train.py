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
  1. Draw problems, sample G responses to each, and grade them.
  2. Turn verdicts into advantages (Eq. (1)).
  3. Score the responses once with the policy that sampled them: old log-probabilities and hidden
     states.
  4. Turn advantages into token advantages (`credit/`): here the methods differ.
  5. Take a clipped policy-gradient step for every `--prompts-per-update` problems.
Each rank does 1 to 4 for whole groups of its own. In 5 all ranks take each optimizer step together,
over the rollouts of all.

Flags and their defaults are in `harness/config.py`. A run writes to `runs/NAME/`:
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

from harness.config import Config, check_inputs, end_on_mistakes, parse_train

if __name__ == "__main__":
    end_on_mistakes(check_inputs)  # the imports below take seconds

import torch
from tqdm import tqdm

from credit.batch import Batch
from credit.measures import credit_vs_first_error, reason_shares, sample_rows, step_metrics
from credit.rules import assign_credit, find
from grpo import policy_loss
from harness import checkpoint, files, fsdp, log
from harness.command import interruptible, run_command
from harness.load import give_lessons, load_run, resolve
from harness.run import Ranks, Run, seed_of
from harness.sampling import check_policy, check_verdicts, sample_and_grade
from tasks.errors import RunFailed
from tasks.plug import options_of


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
    run = load_run(config, ranks)
    with log.open_folder(run):
        give_lessons(run)
        prepare_rule(run)
        fsdp.shard(run)  # FSDP: what is trained lies over all ranks, a whole copy samples
        if config.resume:
            before = checkpoint.restore(run)
        else:
            before = evaluate(run)
            if ranks.main:
                log.write_evaluation(run, "before", before)
                log.print_results(before=before)
        steps = run.config.steps
        todo = range(run.context.step, steps)
        bar = tqdm(todo, initial=todo.start, total=steps, desc="steps", leave=False, disable=None)
        with interruptible(run):
            for step in bar:
                metrics, samples = train_step(run, step)
                check_policy(run, step)
                log.log_step(run, metrics, samples)
                # all ranks end after the same step
                interrupted = any(fsdp.gather(run.interrupted, ranks))
                if interrupted or is_due(step, steps, run.config.save_every):
                    checkpoint.save(run, step + 1)
                if interrupted:
                    raise KeyboardInterrupt
        after = evaluate(run)
        if ranks.main:
            with files.whole_folder(run.folder / "model") as draft:
                run.parts.save_model(run.context.policy.model, run.context.tokenizer, draft)
            log.write_evaluation(run, "after", after)
            log.print_results(before=before, after=after)
            log.print_end(run, before, after)


def prepare_rule(run: Run) -> None:
    """Let the credit rule load what it needs, or refuse the run; raises BadInput, on all ranks."""
    config = run.config
    rule = find(config.method)
    if rule.prepare:
        with fsdp.together(run.ranks):
            options = options_of(rule.credit, config.method_option, f"--method {config.method}")
            rule.prepare(run, **options)


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
    clock = log.Clock(run.ranks.device)
    context.step = step
    torch.manual_seed(seed_of(config.seed, step, run.ranks.rank))
    problems, rollouts, verdicts = run.parts.sample(run, step, clock)  # this rank's
    batch = Batch.of(rollouts, verdicts, problems)  # A (b,), Eq. (1)
    batch = score_and_credit(run, batch, clock)  # with token advantages (b, T)
    batch = Batch.cat(fsdp.gather(batch, run.ranks))  # of all ranks
    clock.lap("wait")
    check_verdicts(run, step, batch, verdicts)
    updates = update(run, batch, step)
    checksum = fsdp.refresh(run)  # new weights to the policy that samples
    clock.lap("train")
    if run.ranks.device.type == "cuda":
        updates["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)  # so far, of rank 0
    if checksum is not None:
        updates["checksum"] = checksum
    of_batch = {}
    samples = []
    if run.ranks.main:
        of_batch = step_metrics(batch)
        weights = {config.method: batch.weights}  # (B, T)
        groups = [batch.first_mixed or 0]  # those whose rollouts are written
        if config.keep_samples:
            groups = list(range(len(batch.problems)))
        for group in groups:
            samples += sample_rows(step, context.tokenizer, context.task, batch, weights, group)
    clock.lap("measure")
    context.step = step + 1  # steps done
    return {"step": step + 1} | of_batch | updates | run.extra | {"seconds": clock.laps}, samples


def score_and_credit(run: Run, batch: Batch, clock: log.Clock) -> Batch:
    """The batch with log-probabilities, entropies and token advantages, (b, T) each.

    A few whole groups are taken at a time, because the hidden states of the whole batch would not
    fit in memory.
    """
    config = run.config
    blocks = []
    for block in batch.blocks():
        scores = run.context.score(block.rollouts, keep_hidden=find(config.method).needs_states)
        block.log_probs = scores.log_probs  # (b, T)
        block.entropies = scores.entropies  # (b, T)
        block.hidden = scores.hidden  # (n, d)
        clock.lap("score")
        block.token_advantages = assign_credit(block, run.context, config)  # <- methods differ here
        block.hidden = None
        blocks.append(block)
        clock.lap("weights")
    return Batch.cat(blocks)


def update(run: Run, batch: Batch, step: int) -> dict[str, float]:
    """Take one batch's optimizer steps; returns the mean of their metrics.

    Every rank holds the whole batch, and computes its part of a mini-batch in as many micro-batches
    as the other ranks. Raises RunFailed if no step has a finite loss and gradient.
    """
    config = run.config
    drops_uncredited = find(config.method).drops_uncredited
    taken = []  # metrics of the optimizer steps that were taken
    skipped = 0  # how many were not
    for minibatch in batch.minibatches(config.prompts_per_update, config.seed, step):  # (m,)
        # without rows whose token advantages are all 0, as in groups of equal rewards
        rows = minibatch[batch.token_advantages[minibatch].any(1).cpu()]
        counted = rows if drops_uncredited else minibatch  # rows whose tokens divide the loss
        n_tokens = max(1, int(batch.mask[counted].sum()))  # one count for the whole optimizer step
        sums = dict(loss=0.0, clip_share=0.0, abs_log_ratio=0.0)
        run.optimizer.zero_grad()
        dealt = fsdp.deal(
            rows.tolist(),
            batch.rollouts.lengths,
            config.micro_tokens,
            run.ranks,
            run.trained.layout.pack,
        )
        for own_rows, is_filler in dealt:
            micro_batch = batch.rollouts.take(own_rows)
            width = micro_batch.ids.shape[1]
            new_log_probs = run.trained(micro_batch, run.context.temperature).log_probs  # (b, t)
            old_log_probs = batch.log_probs[own_rows, :width]  # (b, t)
            advantages = batch.token_advantages[own_rows, :width]  # (b, t)
            if is_filler:  # this rank has no work left, and runs in step with the others
                advantages = torch.zeros_like(advantages)
            loss, metrics = policy_loss(
                new_log_probs,
                old_log_probs,
                advantages,
                micro_batch.mask,
                n_tokens,
                config.clip_low,
                config.clip_high,
            )
            (loss * run.ranks.world).backward()  # FSDP takes the mean over the ranks
            metrics["loss"] = loss.item()
            if not is_filler:
                sums = {name: sums[name] + metrics[name] for name in sums}
        sums = fsdp.total(sums, run.ranks)
        # its mean is over the tokens that were computed; `n_tokens` may count others
        sums["abs_log_ratio"] *= n_tokens / max(1, int(batch.mask[rows].sum()))
        norm = torch.nn.utils.clip_grad_norm_(run.trained.parameters(), config.max_grad_norm)
        sums["grad_norm"] = fsdp.full(norm).item()
        if math.isfinite(sums["loss"]) and math.isfinite(sums["grad_norm"]):
            run.optimizer.step()
            taken.append(sums)
        else:
            skipped += 1
    run.optimizer.zero_grad()  # otherwise gradients would occupy memory during sampling
    if not taken:
        raise RunFailed(f"step {step + 1}: no update had a finite loss and gradient; lower --lr")
    mean = {}
    for name in taken[0]:
        mean[name] = sum(metrics[name] for metrics in taken) / len(taken)
    # The log-ratio is the first mini-batch's: there the policy still is the one that sampled, so it
    # must be 0, up to rounding.
    return mean | {"abs_log_ratio": taken[0]["abs_log_ratio"], "skipped": skipped}


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate(run: Run) -> dict:
    """Evaluate the policy: held-out accuracy, greedy and sampled, and where credit goes.

    Returns a row for metrics.jsonl: accuracies with standard errors clustered by problem, the
    median length and shares of reasons of the sampled responses, and, where the task knows first
    errors, `credit_vs_first_error`.
    """
    config = run.config
    ranks = run.ranks
    tokenizer = run.context.tokenizer
    task = run.context.task
    group_size = config.rollouts_per_prompt
    clock = log.Clock(ranks.device)
    torch.manual_seed(seed_of(config.seed, rank=ranks.rank))
    heldout = fsdp.share(task.heldout, ranks)
    problems = fsdp.share(task.heldout[: config.eval_groups], ranks)
    _, greedy = sample_and_grade(run, heldout, count=1, temperature=0.0, clock=clock)
    rollouts, verdicts = sample_and_grade(run, problems, group_size, config.temperature, clock)
    credit_report = {}
    if task.first_error:
        batch = Batch.of(rollouts, verdicts, problems)
        batch = score_and_credit(run, batch, clock)
        batch = Batch.cat(fsdp.gather(batch, ranks))
        credit_report = credit_vs_first_error(tokenizer, task, batch, config.method)
    greedy = fsdp.gather_items(greedy, ranks)
    verdicts = fsdp.gather_items(verdicts, ranks)
    length = statistics.median(fsdp.gather_items(rollouts.mask.sum(1).tolist(), ranks))
    return (
        log.accuracies(greedy, verdicts, group_size)
        | {"length": length}
        | reason_shares([verdict.reason for verdict in verdicts])
        | credit_report
    )


if __name__ == "__main__":
    sys.exit(main())
