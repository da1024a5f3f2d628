"""Measure, on this machine, what the parts of training cost against what they could cost at best.

    python -m studies.bench  # SHEAR's distances beside their peers, see peers.py
    python -m studies.bench --step  # a step of Qwen2.5-Math-7B's shape, SHEAR beside GRPO
    python -m studies.bench --step --size 1.5b  # the 1.5B's shape, with its optimizer
    python -m studies.bench --step --size tiny --tokens 32 --problems 4 --group 4  # seconds on a CPU

`--step` times the functions that `train.py` trains with, phase by phase, on one rank: `sample_and_credit` (generate,
score, weights), `update` and `parallel.refresh`. Any flag of `train.py` that is not fixed here can be added;
defaults are the paper's recipe. What is not as in a run, and is said beside the table where it changes a figure:

  - Weights are random, in the published architecture. So no stop token is looked for, and all responses have --tokens
    tokens: a run's vary, and a phase then waits for its longest.
  - Prompts are random ids, and verdicts are drawn: every group is mixed, the most that weights and update can cost.
  - Random states are alike at all distances, so Sinkhorn iterations are fewer than on text; the mean is printed.
  - `--no-optimizer` puts SGD of rate 0, which keeps nothing, where AdamW's two moments (8 bytes a parameter) would
    not fit beside weights, gradients and the copy that samples.

Ceilings are measured in the same run: a large matrix product in the dtype of compute, and a copy on the device.
"""

import argparse
import dataclasses
import math
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen2Config

import grpo
import train
from fast.decode import token_bytes
from harness import memory, parallel, report
from harness.command import guarded
from harness.recipe import Parser, parse_args
from harness.run import Run, assemble, seed_of
from rewards import Verdict
from studies.machine import copy_ceiling, hardware, matmul_ceiling
from tasks.problems import BadInput

# The published shapes of Qwen2.5-Math: hidden, layers, heads, key-value heads, intermediate, vocabulary, tied.
SIZES = {
    "7b": (3584, 28, 28, 4, 18_944, 152_064, False),
    "1.5b": (1536, 28, 12, 2, 8960, 151_936, True),
    "tiny": (64, 2, 4, 2, 128, 512, False),
}
SHAPE = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size "
    "tie_word_embeddings"
)
CONTEXT = 4096
METHODS = ("shear", "grpo")
RECIPE = dict(problems=64, group=8)  # of the paper's step
SHORTEST, LONGEST = 100, 200  # tokens of a prompt, which are about 150 on average
FIXED = "--method --model --task --resume --smoke --batch --max-tokens --data".split()  # train.py's, set here


class MemoryClock(report.Clock):
    """Seconds of each phase, and the largest memory that its tensors held."""

    def __init__(self, device: torch.device):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        super().__init__(device)
        self.peaks = {}

    def lap(self, name: str) -> None:
        super().lap(name)
        if self.device.type == "cuda":
            self.peaks[name] = report.peak_gb()


class Ids:
    """A tokenizer whose prompts are token ids already, and whose texts are empty; it has no stop token."""

    pad_token_id, eos_token_id, chat_template, added_tokens_encoder = 0, None, None, {}

    def __call__(self, prompts: list[list[int]], add_special_tokens: bool = False) -> dict:
        return {"input_ids": prompts}

    def decode(self, ids) -> str:
        return ""


class Drawn:
    """A task whose verdicts are drawn, every group mixed: `tasks.Task` would score what is cut off 0."""

    def prompt(self, problem: dict) -> list[int]:
        return problem["problem"]

    def verdicts(self, problems: list[dict], rollouts: grpo.Rollouts) -> list[Verdict]:
        rng, verdicts = random.Random("verdicts"), []
        group = len(rollouts.texts) // len(problems)
        for _ in problems:
            right = set(rng.sample(range(group), rng.randint(1, group - 1)))
            verdicts += [Verdict(float(row in right), "drawn") for row in range(group)]
        return verdicts


@dataclass
class Measured:
    """One step of one method: what was measured, and the counts that make rates of it."""

    seconds: dict[str, float]  # by phase, in order
    peaks: dict[str, float]  # GB by phase; empty on a CPU
    sampled: int  # response tokens
    seen: int  # prompt and response tokens
    bytes_read: float  # by generating, at the least
    iterations: float | None  # Sinkhorn, mean over the pairs of spans
    skipped: int  # updates that were not finite

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 where memory does not suffice, 2 for bad input, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if "--step" not in argv:
        from studies import peers  # here, as a step needs neither POT nor GeomLoss

        return peers.main(argv)
    transformers.utils.logging.disable_progress_bar()

    def work() -> int:
        flags, by_method = parse(argv)
        args = by_method[METHODS[0]]
        if args.threads:
            torch.set_num_threads(args.threads)
        step_table(flags, by_method, parallel.join(args.device, grouped=args.dtype != "float32"))
        return 0

    return guarded(work, interrupted="interrupted", memory="lower --problems, --micro-tokens or --generate-batch")


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, argparse.Namespace]]:
    """This command's flags, and the configuration of a run of each method; raises BadInput."""
    parser = Parser(
        prog="python -m studies.bench",
        description="Measure a step of training.",
        epilog="Flags of train.py that are not fixed here can be added.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--step", action="store_true", help="the table of a full training step, SHEAR beside GRPO")
    add("--size", choices=tuple(SIZES), default="7b", help="architecture, with random weights")
    add("--problems", type=int, default=RECIPE["problems"], help="of the step")
    add("--group", type=int, default=RECIPE["group"], help="rollouts a problem")
    add("--tokens", type=int, default=1000, help="of every response")
    add("--repeat", type=int, default=1, help="steps of each method; medians are reported")
    add("--no-optimizer", action="store_true", help="leave AdamW and its moments out")
    flags, others = parser.parse_known_args(argv)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise BadInput("--step measures one rank; start it without torchrun")
    for name in ("problems", "group", "tokens", "repeat"):
        if getattr(flags, name) < 1:
            raise BadInput(f"--{name} {getattr(flags, name)}: must be positive; raise it")
    if flags.tokens > CONTEXT - LONGEST:
        raise BadInput(f"--tokens {flags.tokens}: prompt and response exceed the context of {CONTEXT}; lower it")
    for other in others:
        if other.split("=")[0] in FIXED:
            raise BadInput(f"{other.split('=')[0]} is fixed here; leave it out")
    minibatch = flags.group * math.gcd(flags.problems, max(1, 32 // flags.group))  # the recipe's 32, or what divides
    sizes = dict(batch=flags.problems * flags.group, group=flags.group, max_tokens=flags.tokens, minibatch=minibatch)
    fixed = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    fixed += ["--task=math", f"--model={flags.size}"]
    return flags, {method: parse_args([*fixed, *others, f"--method={method}"]) for method in METHODS}


def step_table(flags: argparse.Namespace, by_method: dict, ranks: parallel.Ranks) -> None:
    """Measure and print; what is known is printed as soon as it is, since a step may take minutes."""
    args, device = by_method[METHODS[0]], ranks.device
    dtype = getattr(torch, args.dtype)
    print(hardware(device, args.dtype))
    ceilings = {"matmul": matmul_ceiling(device, dtype), "copy": copy_ceiling(device)}
    figures = f"{ceilings['matmul'] / 1e12:.3g} TFLOP/s, copy {ceilings['copy'] / 1e12:.3g} TB/s"
    print(f"ceilings: matrix product in {args.dtype} {figures}")
    config = architecture(flags.size)
    predicted = memory.predict(config, args, ranks.world, memory.size_gb(device))
    if flags.no_optimizer:
        moments = predicted["moments"]
        predicted |= {name: predicted[name] - moments for name in ("moments", "sampling", "training", "total")}
    print(memory.plan_line(predicted), flush=True)
    if predicted["training"] > memory.size_gb(device):
        print("training takes more than this GPU has: add --no-optimizer, or choose a smaller --size", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(flags, args, ranks, config, Path(folder))
        problems = draw(flags.problems, config.vocab_size)
        # A step of SHEAR at full length, or the first method measured would pay for every shape that is new.
        print(f"warm-up, not counted: {one_step(run, problems, 1).total:.1f} s", flush=True)
        steps = {method: [] for method in METHODS}
        for number in range(flags.repeat):
            for method in METHODS[:: 1 if number % 2 else -1]:  # GRPO first and then by turns: what drifts hits both
                run.args = by_method[method]
                steps[method].append(one_step(run, problems, number + 1))
                print(f"step {number + 1}, {method}: {steps[method][-1].total:.1f} s", flush=True)
        parameters = sum(parameter.numel() for parameter in run.sampler.parameters())
    medians = {method: middle(steps[method]) for method in METHODS}
    tables = table(medians, ceilings, parameters) + memory_table(medians, predicted)
    print("\n".join(["", *tables, "", *notes(flags, args, medians)]))


def architecture(size: str) -> Qwen2Config:
    """The model's configuration; Qwen2.5-Math's positions end at 4096."""
    shape = dict(zip(SHAPE.split(), SIZES[size], strict=True))
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return Qwen2Config(**shape, max_position_embeddings=CONTEXT, rope_parameters=rope)


def make_run(flags: argparse.Namespace, args: argparse.Namespace, ranks: parallel.Ranks, config, folder) -> Run:
    """What `train.py` assembles, of a model made here."""
    torch.manual_seed(args.seed)
    with torch.device(ranks.device):  # made where it is used, in the dtype of compute: 7.6B in float32 take 30 GB
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    model.eval()
    model.generation_config.eos_token_id = None
    run = assemble(args, ranks, Drawn(), model, Ids(), folder)
    if flags.no_optimizer:
        run.optimizer = torch.optim.SGD(run.policy.parameters(), lr=0.0, foreach=False)
    parallel.refresh(run.policy, run.sampler, ranks)
    return run


def draw(count: int, vocabulary: int) -> list[dict]:
    """Problems of ragged random prompts."""
    rng = random.Random("prompts")
    return [{"problem": rng.choices(range(1, vocabulary), k=rng.randint(SHORTEST, LONGEST))} for _ in range(count)]


def one_step(run: Run, problems: list[dict], number: int) -> Measured:
    """`train.train_step`, with a lap for the refresh and without its files."""
    torch.manual_seed(seed_of(run.args.seed, number))
    clock = MemoryClock(run.ranks.device)
    batch, token_advantages, _ = train.sample_and_credit(run, problems, clock, number)
    figures = train.update(run, batch.rollouts, batch.scored.logp, token_advantages, number)
    clock.lap("train")
    parallel.refresh(run.policy, run.sampler, run.ranks)
    clock.lap("refresh")
    prompts = batch.rollouts.prompt_mask.sum(1)  # (B,)
    sampled = int(batch.rollouts.mask.sum())
    if sampled != len(prompts) * run.args.max_tokens:
        raise RuntimeError(f"{sampled} tokens sampled, not {run.args.max_tokens} in each of {len(prompts)} responses")
    seen, iterations = sampled + int(prompts.sum()), batch.stats.get("sinkhorn_iterations")
    read = bytes_read(run, prompts.tolist())
    return Measured(clock.laps, clock.peaks, sampled, seen, read, iterations, figures["skipped"])


def bytes_read(run: Run, prompts: list[int]) -> float:
    """What generating must read: all weights once a token for the rollouts at a time, each one's keys and values."""
    tokens, config, number = run.args.max_tokens, run.sampler.config, run.sampler.dtype.itemsize
    at_a_time = run.args.generate_batch or len(prompts)
    weights = number * sum(parameter.numel() for parameter in run.sampler.parameters())
    one = token_bytes(config, number)
    contexts = sum(prompt * tokens + tokens * (tokens - 1) // 2 for prompt in prompts)  # summed over decoded tokens
    return math.ceil(len(prompts) / at_a_time) * tokens * weights + contexts * one


def middle(steps: list[Measured]) -> Measured:
    """Medians of seconds, maxima of memory."""
    seconds = {name: median(step.seconds[name] for step in steps) for name in steps[0].seconds}
    peaks = {name: max(step.peaks[name] for step in steps) for name in steps[0].peaks}
    skipped = sum(step.skipped for step in steps)
    return dataclasses.replace(steps[0], seconds=seconds, peaks=peaks, skipped=skipped)


def of_ceiling(name: str, step: Measured, ceilings: dict, parameters: int) -> str:
    """A phase's rate as a share of what the machine could do."""
    seconds = max(step.seconds[name], 1e-3)
    if name == "generate":
        return f"{step.bytes_read / seconds / ceilings['copy']:.1%} copy"
    if name in ("score", "train"):
        counted = {"score": 2, "train": 6}[name] * parameters * step.seen
        return f"{counted / seconds / ceilings['matmul']:.1%} matmul"
    return ""


def table(steps: dict[str, Measured], ceilings: dict, parameters: int) -> list[str]:
    """Time by phase, and what follows from it."""
    lines = [
        "| phase |" + "".join(f" {method}: s | share | tokens/s | of the ceiling |" for method in steps),
        "|---|" + "---|" * 4 * len(steps),
    ]
    for name in steps["shear"].seconds:
        row = f"| {name} |"
        for step in steps.values():
            seconds = step.seconds[name]
            tokens = {"generate": step.sampled, "score": step.seen, "train": step.seen, "weights": step.sampled}
            speed = f"{tokens[name] / max(seconds, 1e-3):,.0f}" if name in tokens else ""
            ceiling = of_ceiling(name, step, ceilings, parameters)
            row += f" {seconds:.2f} | {seconds / step.total:.1%} | {speed} | {ceiling} |"
        lines.append(row)
    totals = (f" {step.total:.2f} | 100% | {step.sampled / step.total:,.0f} | |" for step in steps.values())
    lines.append("| step |" + "".join(totals))
    more, less = steps["shear"], steps["grpo"]
    parts = {name: (more.seconds[name] - less.seconds[name]) / less.total for name in more.seconds}
    listed = ", ".join(f"{name} {part:+.1%}" for name, part in parts.items() if abs(part) >= 0.0005)
    largest = max(more.seconds, key=more.seconds.get)
    ceiling = of_ceiling(largest, more, ceilings, parameters).replace(" ", " of the ")
    return [
        *lines,
        "",
        f"SHEAR's overhead over GRPO: {(more.total - less.total) / less.total:+.1%} of the step ({listed}).",
        f"Next bottleneck: {largest}, {more.seconds[largest] / more.total:.0%} of SHEAR's step"
        + (f", at {ceiling} ceiling." if ceiling else "."),
    ]


def memory_table(steps: dict[str, Measured], predicted: dict) -> list[str]:
    """The largest memory of each phase, of both methods, beside what `memory.predict` said."""
    lines = ["", "| memory, GB | measured | predicted |", "|---|---|---|"]
    for phase, names in (("sampling", ("generate", "score", "weights")), ("training", ("train",))):
        peaks = {name: max(step.peaks.get(name, 0.0) for step in steps.values()) for name in names}
        listed = ", ".join(f"{name} {peak:.1f}" for name, peak in peaks.items())
        measured = f"{max(peaks.values()):.1f} ({listed})" if steps["shear"].peaks else "not on a CPU"
        lines.append(f"| {phase} | {measured} | {predicted[phase]:.1f} |")
    return lines


def notes(flags: argparse.Namespace, args: argparse.Namespace, steps: dict[str, Measured]) -> list[str]:
    """What has to be known to read the tables."""
    step = steps["shear"]
    prompt = (step.seen - step.sampled) / (flags.problems * flags.group)
    share = flags.problems * flags.group / math.prod(RECIPE.values())
    once = f"once a token for {args.generate_batch or 'all'} rollouts"
    lines = [
        f"{flags.problems} problems x {flags.group} responses of {flags.tokens} tokens, all forced to this length; "
        f"prompts of {prompt:.0f} on average; random weights; verdicts drawn, every group mixed; mini-batches of "
        f"{args.minibatch}, {args.micro_tokens} tokens a forward pass; median of {flags.repeat}.",
        f"Ceilings: generate reads all weights {once}, and keys and values, against the copy; against the matrix "
        "product, score counts 2 FLOP a parameter and token, train 6 (recomputation is not counted).",
        "tokens/s: responses; prompts, too, where they are computed with (score, train).",
    ]
    if step.iterations is not None:
        lines.append(f"Sinkhorn: {step.iterations:.0f} iterations a pair of spans, on random states; text differs.")
    if flags.no_optimizer:
        lines.append("AdamW is left out, its memory and its time (--no-optimizer).")
    if (flags.problems, flags.group) != tuple(RECIPE.values()):
        lines.append(f"A share, {share:.0%} of the recipe's 64 x 8 rollouts: its seconds are not a whole step's.")
    if flags.size == "tiny":
        lines.append("The tiny model proves that this command works; its figures mean nothing.")
    if any(each.skipped for each in steps.values()):
        lines.append("Some updates were not finite and were skipped: distrust the training time.")
    if torch.cuda.is_available():
        lines.append(f"torch holds {torch.cuda.memory_reserved() / 1e9:.1f} GB at the end, used or not.")
    return [f"- {line}" for line in lines]


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(main())
