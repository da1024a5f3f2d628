"""Train a language model with SHEAR, or with plain GRPO: the command line and the loop.

    python train.py                                          # the embedded task, minutes on two CPU cores
    python train.py --method grpo                            # the same without span weights
    python train.py --model PATH --data problems.jsonl       # real problems, any Hugging Face causal LM folder
    python train.py --model PATH --task code --data problems.jsonl       # programs, graded in a sandbox

One step, top to bottom in `train_step`: draw problems, sample G responses to each, grade them, score them once
with the policy that sampled them (old log-probabilities and the hidden states), turn verdicts into advantages
(Eq. (1)), advantages into token advantages (`credit.py`, the only line in which methods differ), and take
`--batch / --minibatch` clipped policy-gradient steps.

Defaults are the paper's recipe; `--task embedded`, the default without `--model`, replaces those in EMBEDDED.
Everything goes to `runs/NAME/`: config.json, metrics.jsonl (a row a step), samples.jsonl (a group a step, with
token weights), curve.png, `start/` (the embedded task's warmed-up model) and `model/`.

Left out so far: several GPUs, bf16 compute with float32 master weights, checkpoints to resume from.
"""

import argparse
import dataclasses
import inspect
import math
import random
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import grpo
import report
import sandbox
import shear
import toy
from credit import METHODS, USES_HIDDEN, Batch, credit, effective_weights, localisation
from grpo import Rollouts, Scored, forward, group_advantages, policy_loss, rollout, score, token_logp
from rewards import grade_code, grade_math, scores_of
from sandbox import SandboxError
from tasks import REFERENCES, BadInput, Task, file_task

# What the embedded task replaces in the paper's recipe: sizes for two CPU cores. A line of work is 12 tokens;
# the scoring forward takes micro-batches above a mini-batch.
EMBEDDED = dict(batch=128, microbatch=128, steps=40, lr=1e-4, window=12, stride=6, heldout=512, max_tokens=0, threads=1)
# SHEAR's flags: the options of `shear_weights`, which states their defaults, but the list that receives statistics.
SHEAR = {
    name: option.default
    for name, option in inspect.signature(shear.shear_weights).parameters.items()
    if option.kind == option.KEYWORD_ONLY and name != "stats"
}
EVALUATION = 2**31  # stands for a step in the seeds of evaluations, before and after alike


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence."""

    def error(self, message: str):
        raise BadInput(f"{message}; see python train.py --help")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The resolved configuration; raises BadInput."""
    parser = Parser(
        description="Train a causal LM with SHEAR or GRPO. Defaults are the paper's recipe.",
        epilog="--task embedded replaces: " + ", ".join(f"{flag(name)} {value}" for name, value in EMBEDDED.items()),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument_group("what").add_argument
    add("--task", choices=("embedded", "math", "code"), help="if not given: embedded without --model, math with it")
    add("--model", help="Hugging Face folder or hub id; embedded: if not given, a tiny one is made and warmed up")
    add("--data", help='JSON-lines file with "problem" and "answer" (math) or "tests" (code)')
    add("--method", choices=tuple(METHODS), default="shear", help="credit method")
    add("--seed", type=int, default=0, help="problems, weights of a new model, sampling, shuffling")
    add("--out", default="runs", help="folder of the runs")
    add("--name", help="folder of this run in --out; if not given: task, method and the next free number")
    add = parser.add_argument_group("SHEAR").add_argument
    add("--window", type=int, help="span length w, tokens")
    add("--stride", type=int, help="distance s between span starts, tokens")
    add("--eps", type=float, help="entropic regularisation, in units of the mean hidden norm")
    add("--reading", choices=shear.READINGS, help="Eq. (10) itself, or the transport cost only")
    add("--distance", choices=shear.DISTANCES, help="distance of two spans")
    add("--normalize", choices=shear.NORMALIZATIONS, help="weights in group or rollout units")
    add("--pool", choices=shear.POOLINGS, help="how a token pools the spans that cover it")
    add("--max-iters", type=int, help="Sinkhorn iterations at most")
    add("--tol", type=float, help="marginal error at which a pair of spans stops")
    parser.set_defaults(**SHEAR)
    add = parser.add_argument_group("rollouts").add_argument
    add("--batch", type=int, default=512, help="rollouts a step")
    add("--group", type=int, default=8, help="rollouts a problem, G")
    add("--max-tokens", type=int, default=3000, help="response limit, tokens; 0: a full response (embedded)")
    add("--temperature", type=float, default=1.0, help="of sampler and trainer alike")
    add("--generate-batch", type=int, default=512, help="rollouts generated at a time")
    add = parser.add_argument_group("grading").add_argument
    add("--grade-timeout", type=float, help="seconds for one response; if not given: 5 (math), 10 (code)")
    add("--sandbox", choices=("auto", *sandbox.LEVELS), default="auto", help="code: auto is the strongest that works")
    add = parser.add_argument_group("optimisation").add_argument
    add("--steps", type=int, default=300, help="sampling phases")
    add("--lr", type=float, default=1e-6, help="AdamW, constant, no weight decay")
    add("--minibatch", type=int, default=32, help="rollouts an update; whole groups")
    add("--microbatch", type=int, default=4, help="rollouts a forward pass; changes memory only")
    add("--clip-low", type=float, default=grpo.CLIP_LOW, help="ratio bound below: 1 - this")
    add("--clip-high", type=float, default=grpo.CLIP_HIGH, help="ratio bound above: 1 + this")
    add("--max-grad-norm", type=float, default=1.0, help="gradient norm is cut to this")
    add = parser.add_argument_group("evaluation").add_argument
    add("--heldout", type=int, default=64, help="problems kept from training; greedy accuracy is over all of them")
    add("--eval-groups", type=int, default=64, help="of these, sampled --group times each")
    add = parser.add_argument_group("machine").add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights, states and optimizer")
    add("--threads", type=int, default=0, help="CPU threads, 0: torch's default")
    add = parser.add_argument_group("embedded task").add_argument
    add("--toy-kind", choices=toy.KINDS, default="chain", help="shape of the little programs")
    add("--toy-lines", type=int, default=5, help="definitions a problem, 1 to 8")
    add("--warmup-steps", type=int, default=600, help="supervised steps on careless demonstrations")

    first = parser.parse_args(argv)
    task = first.task or ("math" if first.model else "embedded")
    if task == "embedded":
        parser.set_defaults(**EMBEDDED)
    args = parser.parse_args(argv)
    args.task = task
    if not 1 <= args.toy_lines <= len(toy.LABELS):
        raise BadInput(f"--toy-lines {args.toy_lines}: give 1 to {len(toy.LABELS)}, as there are labels")
    if task == "embedded" and not args.max_tokens:
        args.max_tokens = toy.response_tokens(args.toy_lines)
    check(args)
    return args


def flag(name: str) -> str:
    """The command-line spelling of an argument's name."""
    return "--" + name.replace("_", "-")


def check(args: argparse.Namespace) -> None:
    """Everything that can be known to be wrong before a model is loaded; raises BadInput."""
    positive = (
        "batch max_tokens temperature generate_batch steps lr minibatch microbatch max_grad_norm eps max_iters tol "
        "heldout eval_groups warmup_steps window stride clip_low clip_high"
    )
    for name in positive.split():
        if not getattr(args, name) > 0:
            raise BadInput(f"{flag(name)} {getattr(args, name)}: must be positive; raise it")
    for name in ("seed", "threads"):
        if getattr(args, name) < 0:
            raise BadInput(f"--{name} {getattr(args, name)}: must not be negative; raise it")
    if args.group < 2:
        raise BadInput(f"--group {args.group}: advantages compare the rollouts of a group; give 2 or more")
    for name, whole in (("batch", "minibatch"), ("minibatch", "group")):
        if getattr(args, name) % getattr(args, whole):
            raise BadInput(
                f"--{name} {getattr(args, name)} is not a multiple of --{whole} {getattr(args, whole)}; make it one"
            )
    if args.stride > args.window:
        raise BadInput(f"--stride {args.stride} exceeds --window {args.window}: tokens go uncovered; lower it")
    if args.task != "embedded" and not args.model:
        raise BadInput(f"--task {args.task} needs --model; give a Hugging Face folder or hub id")
    if args.task != "embedded" and not args.data:
        key = REFERENCES[args.task]
        raise BadInput(f'--task {args.task} needs --data; give a JSON-lines file with "problem" and "{key}"')
    if args.grade_timeout is not None and not 0 < args.grade_timeout <= 86_400:
        raise BadInput(f"--grade-timeout {args.grade_timeout}: must be positive and a day at most; change it")
    if args.task == "code":
        try:
            sandbox.choose_level(args.sandbox)
        except SandboxError as error:
            raise BadInput(f"--sandbox {args.sandbox}: {error}; choose another level or another machine") from error
    if args.task == "embedded" and args.data:
        raise BadInput(f"--data {args.data}: the embedded task makes its own problems; add --task math or --model")
    if args.eval_groups > args.heldout:
        raise BadInput(f"--eval-groups {args.eval_groups} exceeds --heldout {args.heldout}; lower it")
    if args.task == "embedded" and args.dtype != "float32" and not args.model:
        raise BadInput(f"--dtype {args.dtype}: the warm-up is made in float32; leave it out or give --model")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: torch sees no CUDA device; use --device cpu")
    if args.name and (Path(args.out) / args.name).exists():
        raise BadInput(f"--name {args.name}: {Path(args.out) / args.name} exists already; choose another name")


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    logging.disable_progress_bar()
    try:
        args = parse_args(argv)
        if args.threads:
            torch.set_num_threads(args.threads)
        task, policy, tokenizer, notes = set_up(args)
        return run(args, task, policy, tokenizer, notes)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted outside the training steps: this run has no complete model", file=sys.stderr)
        return 130


def set_up(args: argparse.Namespace) -> tuple[Task, torch.nn.Module, object, list[str]]:
    """Task, policy and tokenizer, and what to tell the user about them; raises BadInput."""
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    why = "asked for" if args.device != "auto" else "found" if device == "cuda" else "no CUDA device found"
    precision = {
        "float32": "keeps updates of 1e-6",
        "bfloat16": "asked for; it rounds away updates much smaller than 1/256 of a weight",
    }[args.dtype]
    notes = [f"device {device} ({why}), {args.dtype} ({precision}), {torch.get_num_threads()} CPU threads"]
    if args.model:
        policy, tokenizer = load(args)
    else:
        policy, tokenizer = toy.make_model(args.toy_lines, args.seed), toy.make_tokenizer()
    policy.to(device).eval()  # eval throughout: dropout would make sampler and trainer disagree
    context = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or math.inf
    room = context - args.max_tokens  # for the prompt
    if room < 1:
        raise BadInput(f"--max-tokens {args.max_tokens}: the model's context is {context} tokens; lower it")
    if args.task == "embedded":
        if room < toy.prompt_tokens(args.toy_lines):
            raise BadInput(
                f"--max-tokens {args.max_tokens}: with a prompt of {toy.prompt_tokens(args.toy_lines)} tokens it "
                f"exceeds the model's context of {context}; lower it"
            )
        task = embedded_task(args, tokenizer)
    else:
        sizes = dict(heldout=args.heldout, seed=args.seed, max_prompt_tokens=room)
        task, dropped = file_task(args.task, args.data, tokenizer, grader(args), **sizes)
        if dropped:
            notes.append(f"{dropped} problems dropped: their prompts leave no room for {args.max_tokens} tokens")
    size = sum(p.numel() for p in policy.parameters())
    notes.append(f"model {args.model or 'made here'}: {type(policy).__name__}, {size:,} parameters, context {context}")
    notes.append(f"{len(task.train)} problems to train on, {len(task.heldout)} held out")
    return task, policy, tokenizer, notes


def load(args: argparse.Namespace) -> tuple[torch.nn.Module, object]:
    """Model and tokenizer of `--model`; raises BadInput for a folder that is broken, incomplete or of another kind."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        policy, loading = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype), output_loading_info=True
        )
    except Exception as error:  # loaders raise of every kind; the cause stays attached
        reason = str(error).strip().split("\n")[0]
        raise BadInput(f"--model {args.model}: cannot be loaded ({reason}); give a Hugging Face folder") from error
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])[0]
        raise BadInput(f"--model {args.model}: lacks weights ({missing} and perhaps others); give a complete folder")
    ids = tokenizer("1 + 1 =", return_tensors="pt")["input_ids"]
    if not ids.numel() or len(tokenizer) > policy.get_input_embeddings().num_embeddings:
        raise BadInput(f"--model {args.model}: its tokenizer is missing or another model's; save it in the folder")
    with torch.no_grad():
        plain = policy(ids).logits
        ours = policy.get_output_embeddings()(policy.base_model(ids).last_hidden_state)
    if not torch.allclose(plain, ours, atol=1e-3):  # soft caps, scales: `grpo.forward` would train another model
        raise BadInput(f"--model {args.model}: its logits are not head(last hidden state); give another architecture")
    return policy, tokenizer


def grader(args: argparse.Namespace):
    """`grade(response, reference)` of the task, with the flags' limits."""
    options = {"timeout_s": args.grade_timeout} if args.grade_timeout else {}
    return partial(grade_code, level=args.sandbox, **options) if args.task == "code" else partial(grade_math, **options)


def embedded_task(args: argparse.Namespace, tokenizer) -> Task:
    """The embedded task as a `Task`; raises BadInput where there are too few problems, or for another model."""
    if len(tokenizer) != len(toy.SYMBOLS):
        raise BadInput(f"--model {args.model}: not a model of the embedded task; add --task math and --data")
    count = args.steps * args.batch // args.group
    train, heldout = toy.make_problems(count, args.heldout, args.toy_lines, args.toy_kind, args.seed)
    if len(heldout) < args.heldout or len(train) < count:
        raise BadInput(
            f"--toy-lines {args.toy_lines}: too few different problems for --heldout {args.heldout}; raise it"
        )
    return Task(
        "embedded", train, heldout, lambda problem: problem["problem"], grader(args), first_error=toy.first_error
    )


def run(args: argparse.Namespace, task: Task, policy, tokenizer, notes: list[str]) -> int:
    """Plan, warm-up, evaluation, the steps, evaluation; everything goes to the run's folder."""
    folder = report.make_folder(args)
    report.print_plan(args, folder, notes)
    if args.task == "embedded" and not args.model:
        forbidden = {problem["problem"] for problem in task.heldout}
        started = time.perf_counter()
        loss = toy.warm_up(policy, args.toy_lines, args.toy_kind, forbidden, steps=args.warmup_steps, seed=args.seed)
        print(f"warm-up: {args.warmup_steps} steps, loss {loss:.3f}, {time.perf_counter() - started:.0f} s")
        save_model(policy, tokenizer, folder / "start")
    before = evaluate(policy, tokenizer, task, args)
    report.append(folder / "metrics.jsonl", [{"before": report.summary(before)}])
    report.print_accuracy("before", before)
    # Adam's step is lr whatever the gradient's size, so weights that shrink all advantages alike change little.
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0)
    history, status = [], 0
    try:
        for step in tqdm(range(args.steps), desc="steps", leave=False, disable=None):
            metrics, samples = train_step(policy, tokenizer, optimizer, task, step, args)
            history.append(metrics)
            report.append(folder / "metrics.jsonl", [metrics])
            report.append(folder / "samples.jsonl", samples)
            tqdm.write(report.step_line(metrics, args.steps))
        after = evaluate(policy, tokenizer, task, args)
        report.append(folder / "metrics.jsonl", [{"after": report.summary(after)}])
        report.print_accuracy("before", before)
        report.print_accuracy("after", after)
        report.print_localisation(before, after, args)
    except KeyboardInterrupt:
        print(f"interrupted after {len(history)} of {args.steps} steps", file=sys.stderr)
        after, status = None, 130
    save_model(policy, tokenizer, folder / "model")
    report.plot(history, before, after, args, folder / "curve.png")
    print(f"saved to {folder}/")
    return status


def train_step(
    policy, tokenizer, optimizer, task: Task, step: int, args: argparse.Namespace
) -> tuple[dict, list[dict]]:
    """One sampling phase and its updates: the line from problems to loss. Returns metrics and samples."""
    torch.manual_seed(seed_of(args.seed, step))
    clock = report.Clock()
    problems = task.draw(step, args.batch // args.group, args.seed)
    rollouts = sample(policy, tokenizer, task, problems, args.group, args.temperature, args)
    clock.lap("generate")
    verdicts = task.verdicts(problems, rollouts)
    clock.lap("grade")
    scored = score_all(policy, rollouts, args)
    clock.lap("score")
    batch = as_batch(rollouts, verdicts, scored, args.group)
    token_advantages = credit(args.method, batch, method_options(args))  # the one line in which methods differ
    clock.lap("weights")
    updates = update(policy, optimizer, batch.rollouts, scored, token_advantages, step, args)
    clock.lap("train")
    weights = effective_weights(token_advantages, batch.advantages, batch.rollouts.mask)  # (B, T)
    metrics = {"step": step + 1, **report.step_metrics(batch, weights), **updates, "seconds": clock.laps}
    return metrics, report.sample_rows(step, tokenizer, task, problems, batch, verdicts, weights)


def seed_of(seed: int, step: int) -> int:
    """Random numbers of a step depend on the seed and the step alone, so methods see the same draws."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


def sample(policy, tokenizer, task: Task, problems: list[dict], count: int, temperature: float, args) -> Rollouts:
    """`count` responses to each problem."""
    prompts = [task.prompt(problem) for problem in problems]
    limits = dict(max_tokens=args.max_tokens, batch_size=args.generate_batch)
    return rollout(policy, tokenizer, prompts, count, temperature=temperature, **limits)


def score_all(policy, rollouts: Rollouts, args: argparse.Namespace) -> Scored:
    """What the policy says of the rollouts; hidden states only for methods that read them."""
    keep = args.method in USES_HIDDEN
    return score(policy, rollouts, temperature=args.temperature, micro_batch=args.microbatch, keep_hidden=keep)


def as_batch(rollouts: Rollouts, verdicts: list, scored: Scored, group_size: int) -> Batch:
    """Verdicts become advantages, Eq. (1), and everything goes into the one thing that methods see.

    A rollout without a verdict (score None) loses its mask: it is in no set and in no loss.
    """
    rewards = torch.tensor(scores_of(verdicts), device=rollouts.ids.device).float()  # (B,) float32
    rollouts = dataclasses.replace(rollouts, mask=rollouts.mask & ~rewards.isnan()[:, None])
    return Batch(group_advantages(rewards, group_size), rewards, rollouts, scored, group_size)


def method_options(args: argparse.Namespace) -> dict[str, dict]:
    """Every method's own flags."""
    return {"shear": {name: getattr(args, name) for name in SHEAR}}


def update(
    policy, optimizer, rollouts: Rollouts, scored: Scored, token_advantages: Tensor, step: int, args: argparse.Namespace
) -> dict[str, float]:
    """The optimizer steps of one batch; mini-batches are whole groups, shuffled by (seed, step)."""
    groups = list(torch.arange(len(rollouts.texts)).split(args.group))
    random.Random(f"minibatches {args.seed} {step}").shuffle(groups)
    totals = []
    for rows in torch.cat(groups).split(args.minibatch):
        n_tokens = max(1, int(rollouts.mask[rows].sum()))  # one count for the whole optimizer step
        total = dict(loss=0.0, clip_share=0.0, abs_log_ratio=0.0)
        optimizer.zero_grad()
        for micro in rows.split(args.microbatch):
            part = rollouts.take(micro)
            width = part.ids.shape[1]
            log_probs, _ = forward(policy, part, args.temperature)
            loss, metrics = policy_loss(
                token_logp(log_probs, part.ids),
                scored.logp[micro, :width],
                token_advantages[micro, :width],
                part.mask,
                n_tokens,
                args.clip_low,
                args.clip_high,
            )
            loss.backward()
            for name, value in {"loss": loss.item(), **metrics}.items():
                total[name] += value
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm, error_if_nonfinite=True)
        optimizer.step()
        totals.append({**total, "grad_norm": norm.item()})
    mean = {name: sum(total[name] for total in totals) / len(totals) for name in totals[0]}
    # The policy that sampled is the one being updated, so before the first update the ratio must be 1.
    return {**mean, "abs_log_ratio": totals[0]["abs_log_ratio"]}


def evaluate(policy, tokenizer, task: Task, args: argparse.Namespace) -> dict:
    """Held-out accuracy, greedy and sampled, with standard errors (clustered by problem), and credit's place."""
    torch.manual_seed(seed_of(args.seed, EVALUATION))
    greedy = sample(policy, tokenizer, task, task.heldout, 1, 0.0, args)
    right = scores_of(task.verdicts(task.heldout, greedy))
    problems = task.heldout[: args.eval_groups]
    rollouts = sample(policy, tokenizer, task, problems, args.group, args.temperature, args)
    verdicts = task.verdicts(problems, rollouts)
    scores = scores_of(verdicts)
    groups = scores.reshape(-1, args.group)
    by_problem = np.nanmean(groups[np.isfinite(groups).any(1)], 1)
    result = {
        "greedy": (*mean_and_error(right), int(np.isfinite(right).sum())),
        "sampled": (*mean_and_error(by_problem), int(np.isfinite(scores).sum())),
    }
    if task.first_error:
        result.update(locate(policy, tokenizer, task, problems, rollouts, verdicts, args))
    return result


def mean_and_error(scores: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error over independent problems, those without a verdict left out."""
    known = scores[np.isfinite(scores)]
    return float(known.mean()), float(known.std(ddof=1) / math.sqrt(len(known))) if len(known) > 1 else math.nan


def locate(policy, tokenizer, task: Task, problems, rollouts: Rollouts, verdicts, args: argparse.Namespace) -> dict:
    """Where the method puts credit, against the true first errors of the wrong rollouts of mixed groups."""
    scored = score_all(policy, rollouts, args)
    batch = as_batch(rollouts, verdicts, scored, args.group)
    token_advantages = credit(args.method, batch, method_options(args))
    weights = effective_weights(token_advantages, batch.advantages, batch.rollouts.mask)  # (B, T)
    first = torch.full_like(batch.correct, -1, dtype=torch.long)  # (B,) first wrong token, -1: does not count
    for row in ((batch.advantages != 0) & ~batch.correct).nonzero().flatten().tolist():
        error = task.first_error(problems[row // args.group], rollouts.texts[row])
        first[row] = error[0] if error else -1
    return {
        "localisation": localisation(weights, batch.rollouts.mask, first),
        "example": report.example(tokenizer, rollouts, weights, first),
    }


def save_model(policy, tokenizer, folder: Path) -> None:
    """An ordinary Hugging Face folder."""
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # so that a log file shows each step when it is done
    sys.exit(main())
