"""Measure, on this machine, what the parts of training cost against what they could cost at best.

    python -m studies.bench  # SHEAR's distances beside their peers, see peers.py
    python -m studies.bench --step  # a step of Qwen2.5-Math-7B's shape, SHEAR beside GRPO
    python -m studies.bench --step --size 1.5b  # the 1.5B's shape, with its optimizer
    python -m studies.bench --step --size tiny --tokens 32 --problems 4 --group 4  # seconds on a CPU

`--step` times the functions that `train.py` trains with, phase by phase, on one rank: `sample_groups` (generate),
`credit_groups` (score, weights), `update` and `parallel.refresh`. Any flag of `train.py` that is not fixed
here can be added; the defaults are the paper's recipe. The step differs from one of a run in four ways:

  - Weights are random, in the published architecture. No stop token is looked for, and all responses have --tokens
    tokens. In a run lengths vary, and a phase waits for the longest response.
  - Prompts are random ids. Verdicts are drawn, half of each group right: the most that weights and update can cost.
  - Random states are alike at all distances, so Sinkhorn takes fewer iterations than on text. The mean is printed.
  - `--no-optimizer` replaces AdamW, whose two moments take 8 bytes a parameter, by SGD of rate 0, which keeps nothing.

Ceilings are measured in the same run: a large matrix product in the dtype of compute, and a copy on the device.
Generating reads all weights once a token, and keys and values, which is held against the copy. Scoring counts 2 FLOP a
parameter and token, training 6 (recomputation is not counted); both are held against the matrix product.
"""

import argparse
import math
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from harness.config import Parser, answer, check_flags, number


def bench_parser() -> Parser:
    """Of `studies.bench`, as it was called."""
    return step_parser() if "--step" in sys.argv else peers_parser()


def step_parser() -> Parser:
    """Of `studies.bench --step`."""
    about = (
        "Measure a step of training, SHEAR beside GRPO. --size tiny --tokens 32 --problems 4 --group 4 takes seconds "
        "on two CPU cores; the other sizes are for a GPU, where a step may take minutes."
    )
    epilog = "Flags of train.py that are not fixed here can be added."
    parser = Parser(prog="python -m studies.bench --step", description=about, epilog=epilog, allow_abbrev=False)
    add = parser.add_argument
    add("--step", action="store_true", help="the table of a full training step, SHEAR beside GRPO")
    add("--size", choices=("7b", "1.5b", "tiny"), default="7b", help="architecture, with random weights")
    add("--problems", type=number(int, 1, 4096), default=64, help="of the step; the recipe has 512")
    add("--group", type=number(int, 2, 256), default=8, help="rollouts a problem")
    add("--tokens", type=number(int, 1, 3896), default=1000, help="of every response")
    add("--no-optimizer", action="store_true", help="leave AdamW and its moments out")
    return parser


def peers_parser() -> Parser:
    """Of `studies.bench`."""
    about = (
        "SHEAR's distances beside POT, GeomLoss and exact transport: about a minute on two CPU cores, and two to three "
        "more to make the embedded model without --model."
    )
    epilog = "--step measures a step of training instead: see python -m studies.bench --step --help"
    parser = Parser(prog="python -m studies.bench", description=about, epilog=epilog)
    add = parser.add_argument
    add("--states", type=Path, help="safetensors file of groups of states, groupN.rolloutK.right or .wrong (T, d)")
    add("--model", help="a folder of the embedded task's model; if not given, one is made and warmed up")
    tokens, states = "of synthetic responses; if not given: 300", "of synthetic states; if not given: 896"
    add("--tokens", type=number(int, 1, 16_384), nargs="*", help=f"{tokens}, on a GPU 1000 and 3000, too")
    add("--width", type=number(int, 1, 16_384), nargs="*", help=f"{states}, on a GPU 3584, too")
    add("--group", type=number(int, 2, 256), nargs="*", help="rollouts of a group; if not given: 8, on a GPU 16, too")
    pairs = "of 100 x 100 that a peer solves at most, more if small; if not given: 256, on a GPU 4096"
    add("--pairs", type=number(int, 8, 16_384), help=pairs)
    add("--rounds", type=number(int, 1, 1000), default=3, help="times that each is measured")
    add("--device", choices=("cpu", "cuda"), help="if not given: cuda where there is one")
    return parser


answer(__name__, lambda: check_flags(bench_parser()))  # before what takes seconds to import

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen2Config

import train
from fast.decode import token_bytes
from harness import memory, parallel, report
from harness.command import guarded, parse_args
from harness.run import Run, assemble, seed_of
from studies.machine import ceilings, hardware
from tasks.problems import BadInput, Task

CONTEXT = 4096  # positions of Qwen2.5-Math
SIZES = {  # its published shapes, and a small one
    "7b": dict(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
               intermediate_size=18_944, vocab_size=152_064, tie_word_embeddings=False),
    "1.5b": dict(hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
                 intermediate_size=8960, vocab_size=151_936, tie_word_embeddings=True),
    "tiny": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 intermediate_size=128, vocab_size=512, tie_word_embeddings=False),
}  # fmt: skip
METHODS = ("shear", "grpo")
STEP = 1  # whose random numbers all measured steps draw
RECIPE = dict(problems=512, group=8, per_update=32)  # of the paper's step: prompts, rollouts a prompt, prompts
SHORTEST, LONGEST = 100, 200  # tokens of a prompt, which are about 150 on average
FIXED = "--method --model --task --resume --smoke --prompts-per-step --max-tokens --data"  # flags of train.py


class MemoryClock(report.Clock):
    """Seconds of each phase, and the largest memory that its tensors held."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.peaks = {}
        if device.type == "cuda":
            report.peak_gb()  # forgets what came before

    def lap(self, name: str) -> None:
        super().lap(name)
        if self.device.type == "cuda":
            self.peaks[name] = report.peak_gb()


class Ids:
    """A tokenizer whose prompts are token ids already, and whose texts are empty. It has no stop token."""

    pad_token_id = 0
    eos_token_id = chat_template = None
    added_tokens_encoder: ClassVar[dict] = {}

    def decode(self, ids) -> str:
        return ""


@dataclass
class Measured:
    """One step of one method."""

    seconds: dict[str, float]  # by phase, in order
    peaks: dict[str, float]  # GB by phase; empty on a CPU
    tokens: dict[str, int]  # that a phase computes with
    work: dict[str, tuple[float, str]]  # the least bytes or FLOP of a phase, and the rate that bounds it
    metrics: dict[str, float]  # of the update, and Sinkhorn's mean iterations

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def share(self, phase: str, rates: dict[str, float]) -> str:
        """A phase's rate as a share of its ceiling; empty where it has none."""
        if phase not in self.work:
            return ""
        amount, ceiling = self.work[phase]
        return f"{amount / max(self.seconds[phase], 1e-3) / rates[ceiling]:.1%} {ceiling}"

    def cells(self, phase: str, rates: dict[str, float]) -> str:
        """A phase's cells: seconds, share of the step, tokens a second, share of the ceiling."""
        seconds = self.seconds[phase]
        speed = f"{self.tokens[phase] / max(seconds, 1e-3):,.0f}" if phase in self.tokens else ""
        return f" {seconds:.2f} | {seconds / self.total:.1%} | {speed} | {self.share(phase, rates)} |"


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 where memory does not suffice, 2 for bad input, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    transformers.utils.logging.disable_progress_bar()
    if "--step" in argv:
        work, remedy = measure_step, "lower --problems, --micro-tokens or --generate-batch"
    else:
        from studies import peers  # here, as a step needs neither POT nor GeomLoss

        work, remedy = partial(peers.measure_peers, peers_parser()), "lower --tokens, --width or --group"
    return guarded(partial(work, argv), interrupted="interrupted", memory=remedy)


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, argparse.Namespace]]:
    """This command's flags, and the configuration of a run of each method; raises BadInput."""
    parser = step_parser()
    flags, others = parser.parse_with_others(argv, FIXED, "is fixed here")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise BadInput("--step measures one rank; start it without torchrun")
    per_update = math.gcd(flags.problems, RECIPE["per_update"])  # it divides the step
    sizes = f"--prompts-per-step={flags.problems} --prompts-per-update={per_update} --rollouts-per-prompt={flags.group}"
    argv = f"--task=math --model={flags.size} --max-tokens={flags.tokens} {sizes}".split() + others
    return flags, {method: parse_args([*argv, f"--method={method}"]) for method in METHODS}


def measure_step(argv: list[str]) -> int:
    """Measure and print; each result is printed as soon as it is there, since a step may take minutes."""
    flags, by_method = parse(argv)
    args = by_method["shear"]
    if args.threads:
        torch.set_num_threads(args.threads)
    ranks = parallel.join(args.device, grouped=args.dtype != "float32")
    print(hardware(ranks.device, args.dtype))
    rates = ceilings(ranks.device, getattr(torch, args.dtype))
    figures = f"{rates['matmul'] / 1e12:.3g} TFLOP/s, copy {rates['copy'] / 1e12:.3g} TB/s"
    print(f"ceilings: matrix product in {args.dtype} {figures}")
    config, room = architecture(flags.size), memory.size_gb(ranks.device)
    predicted = memory.predict(config, args, ranks.world, room)
    if flags.no_optimizer:
        moments = predicted["moments"]
        for name in ("moments", "sampling", "training", "total"):
            predicted[name] -= moments
    print(memory.plan_line(predicted), flush=True)
    if predicted["training"] > room:
        print("training takes more than this GPU has: add --no-optimizer, or choose a smaller --size", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(flags, args, ranks, config, Path(folder))
        problems = draw(flags.problems, config.vocab_size)
        # A step of SHEAR at full length, or the first method measured would pay for every shape that is new.
        print(f"warm-up, not counted: {one_step(run, problems).total:.1f} s", flush=True)
        steps = {}
        for method in reversed(METHODS):
            run.args = by_method[method]
            steps[method] = one_step(run, problems)
            print(f"step 1, {method}: {steps[method].total:.1f} s", flush=True)
    lines = table(steps, rates) + memory_table(steps, predicted) + notes(flags, args, steps)
    print("\n".join(lines))
    return 0


def architecture(size: str) -> Qwen2Config:
    """The model's configuration."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return Qwen2Config(**SIZES[size], max_position_embeddings=CONTEXT, rope_parameters=rope)


def make_run(flags: argparse.Namespace, args: argparse.Namespace, ranks: parallel.Ranks, config, folder: Path) -> Run:
    """What `train.py` assembles, of a model made here."""
    torch.manual_seed(args.seed)
    with torch.device(ranks.device):  # made where it is used, in the dtype of compute: 7.6B in float32 take 30 GB
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    model.eval()
    model.generation_config.eos_token_id = None
    task = Task("math", [], [], lambda problem: problem["problem"], None)  # grades nothing: verdicts are drawn
    run = assemble(args, ranks, task, model, Ids(), folder)
    if flags.no_optimizer:
        run.optimizer = torch.optim.SGD(run.policy.parameters(), lr=0.0, foreach=False)
    parallel.refresh(run.policy, run.sampler, ranks)
    return run


def draw(count: int, vocabulary: int) -> list[dict]:
    """Problems of ragged random prompts."""
    rng = random.Random("prompts")
    return [{"problem": rng.choices(range(1, vocabulary), k=rng.randint(SHORTEST, LONGEST))} for _ in range(count)]


def one_step(run: Run, problems: list[dict]) -> Measured:
    """`train.train_step`, with a lap for the refresh and without its files."""
    torch.manual_seed(seed_of(run.args.seed, STEP))
    clock = MemoryClock(run.ranks.device)
    groups = train.sample_groups(run, problems, clock, drawn=True)
    batch, token_advantages, *_ = train.credit_groups(run, groups, STEP, clock)
    metrics = train.update(run, batch.rollouts, batch.scored.logp, token_advantages, STEP)
    clock.lap("train")
    parallel.refresh(run.policy, run.sampler, run.ranks)
    clock.lap("refresh")
    prompts = batch.rollouts.prompt_mask.sum(1).tolist()  # tokens
    sampled = int(batch.rollouts.mask.sum())
    assert sampled == len(prompts) * run.args.max_tokens, "a response has stopped early"
    seen = sampled + sum(prompts)
    tokens = {"generate": sampled, "score": seen, "weights": sampled, "train": seen}
    return Measured(clock.laps, clock.peaks, tokens, work_of(run, prompts), metrics | batch.stats)


def work_of(run: Run, prompts: list[int]) -> dict[str, tuple[float, str]]:
    """The least bytes or FLOP of a phase, and the rate that bounds it; `prompts` are lengths in tokens.

    Generating reads all weights once a token for each --generate-batch, if not given once for all rollouts, and each
    rollout's keys and values.
    """
    tokens = run.args.max_tokens
    itemsize = run.sampler.dtype.itemsize
    parameters = run.sampler.num_parameters()
    batches = math.ceil(len(prompts) / (run.args.generate_batch or len(prompts)))
    contexts = sum(prompt * tokens + tokens * (tokens - 1) // 2 for prompt in prompts)  # summed over decoded tokens
    bytes_read = batches * tokens * itemsize * parameters + contexts * token_bytes(run.sampler.config, itemsize)
    seen = sum(prompts) + len(prompts) * tokens
    return {
        "generate": (bytes_read, "copy"),
        "score": (2 * parameters * seen, "matmul"),
        "train": (6 * parameters * seen, "matmul"),
    }


def table(steps: dict[str, Measured], rates: dict[str, float]) -> list[str]:
    """Time by phase, and what follows from it."""
    shear, grpo = steps["shear"], steps["grpo"]
    heads = "".join(f" {method}: s | share | tokens/s | of the ceiling |" for method in METHODS)
    lines = ["", f"| phase |{heads}", "|---|" + "---|" * 4 * len(METHODS)]
    changes = []
    for phase in shear.seconds:
        lines.append(f"| {phase} |" + shear.cells(phase, rates) + grpo.cells(phase, rates))
        change = (shear.seconds[phase] - grpo.seconds[phase]) / grpo.total
        if abs(change) >= 0.0005:
            changes.append(f"{phase} {change:+.1%}")
    totals = ""
    for step in (shear, grpo):
        totals += f" {step.total:.2f} | 100% | {step.tokens['generate'] / step.total:,.0f} | |"
    overhead = (shear.total - grpo.total) / grpo.total
    largest = max(shear.seconds, key=shear.seconds.get)
    bottleneck = f"{largest}, {shear.seconds[largest] / shear.total:.0%} of SHEAR's step"
    if largest in shear.work:
        bottleneck += f", at {shear.share(largest, rates).replace(' ', ' of the ')} ceiling"
    return [
        *lines,
        f"| step |{totals}",
        "",
        f"SHEAR's overhead over GRPO: {overhead:+.1%} of the step ({', '.join(changes)}).",
        f"Next bottleneck: {bottleneck}.",
    ]


def memory_table(steps: dict[str, Measured], predicted: dict[str, float]) -> list[str]:
    """The largest memory of each phase, of both methods, beside what `memory.predict` said."""
    lines = ["", "| memory, GB | measured | predicted |", "|---|---|---|"]
    for phase, names in (("sampling", ("generate", "score", "weights")), ("training", ("train",))):
        measured = "not on a CPU"
        if steps["shear"].peaks:
            peaks = {name: max(step.peaks[name] for step in steps.values()) for name in names}
            listed = ", ".join(f"{name} {peak:.1f}" for name, peak in peaks.items())
            measured = f"{max(peaks.values()):.1f} ({listed})"
        lines.append(f"| {phase} | {measured} | {predicted[phase]:.1f} |")
    return lines


def notes(flags: argparse.Namespace, args: argparse.Namespace, steps: dict[str, Measured]) -> list[str]:
    """What a reader of the tables has to know."""
    tokens, iterations = steps["shear"].tokens, steps["shear"].metrics.get("sinkhorn_iterations")
    rollouts = flags.problems * flags.group
    lines = [
        "",
        f"- {flags.problems} problems x {flags.group} responses of {flags.tokens} tokens, all forced to this length; "
        f"prompts of {(tokens['score'] - tokens['generate']) / rollouts:.0f} on average; random weights; verdicts "
        f"drawn, every group mixed; {args.prompts_per_update} prompts an update; {args.micro_tokens} tokens a forward "
        "pass.",
        "- tokens/s: responses; prompts, too, where they are computed with (score, train).",
    ]
    if iterations is not None:
        lines.append(f"- Sinkhorn: {iterations:.0f} iterations a pair of spans, on random states; text differs.")
    if flags.no_optimizer:
        lines.append("- AdamW is left out, its memory and its time (--no-optimizer).")
    share = rollouts / (RECIPE["problems"] * RECIPE["group"])
    if share != 1:
        lines.append(f"- A share, {share:.1%} of the recipe's 512 x 8 rollouts: its seconds are not a whole step's.")
    if any(step.metrics["skipped"] for step in steps.values()):
        lines.append("- Some updates were not finite and were skipped: distrust the training time.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
