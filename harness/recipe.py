"""The paper's training recipe as command-line flags: every setting, its default, and what is wrong with a value.

    parse(argv) -> the flags with their defaults, which `harness/resolve.py` makes the configuration of a run

Defaults are the paper's recipe (Sec. 5.2 and App. J of arXiv 2604.23318; eps: App. B). `docs/recipe.md` has each one
beside the paper's words, and our reason where the paper is silent. `--task embedded`, the default without `--model`,
replaces those in EMBEDDED; `--smoke` those in SMOKE. `--resume` takes everything from the run's own config.json, but
what MAY_CHANGE names. Choices and defaults that belong to other files are stated here once more, as those files import
torch; tests/test_recipe.py compares them.
"""

import argparse
import sys
from pathlib import Path

from grading import sandbox
from harness.flags import (
    Parser,
    add_machine_flags,
    flag,
    fraction,
    natural,
    not_negative,
    number,
    positive,
    positive_int,
    random_seed,
    seconds,
    temperature,
)
from harness.track import check_installed
from tasks.rows import BadInput

METHODS = "grpo shear first kgae entropy hapo rsi delta oar-g oar-p arca prm pure rlsd sdpo hsd attention".split()
METHODS += "oracle oracle-value position random shuffle".split()
TEMPLATES = ("auto", "qwen-math", "chat", "plain")
KINDS = ("chain", "tree", "shortcut", "recoverable")  # of embedded problems
# The flags that `--help` shows.
COMMON = "task model data method steps lr prompts_per_step rollouts_per_prompt max_tokens eval_every bench "
COMMON += "smoke resume out device"
# App. B of the paper prints eps log n = 20.8 in raw units of distance; n is the window, 100 tokens.
PAPER_EPS = 4.52
# Without --save-every: steps between checkpoints, at least, and the share of a run's time that they may take.
SAVE_STEPS, SAVE_SHARE = 10, 0.03
# What the embedded task replaces in the paper's recipe: sizes for two CPU cores. A line of work is 12 tokens;
# the scoring forward takes micro-batches above a mini-batch. eps is in units of nbar, which is small here.
EMBEDDED = dict(
    **dict(prompts_per_step=16, prompts_per_update=4, steps=40, lr=1e-4, max_tokens=0, heldout=512),
    **dict(window=12, stride=6, eps=0.05, eps_unit="nbar", threads=1, recompute=False, save_every=SAVE_STEPS),
)
# What --smoke replaces: every size, to prove a set-up in some minutes. (Rewards in training are drawn then.)
SMOKE = dict(
    **dict(steps=4, prompts_per_step=8, rollouts_per_prompt=4, prompts_per_update=4, max_tokens=64),
    **dict(heldout=8, eval_groups=8, save_every=2),
)
SMOKE_EMBEDDED = {**SMOKE, "max_tokens": 0, "warmup_steps": 60}
# What a resumed run may be given anew: how long it goes on, what is saved and measured on the way, how fast it learns,
# and what the machine asks for. With another value of the last two it is no longer the same run to the bit.
MAY_CHANGE = set(
    "steps save_every keep lr max_grad_norm resume ranks device threads micro_tokens generate_batch decode "
    "eval_every bench bench_data track force".split()
)
# Flags that have another name since they say what they count; the old ones counted rollouts.
RENAMED = {"--batch": "--prompts-per-step", "--group": "--rollouts-per-prompt", "--minibatch": "--prompts-per-update"}


def make_parser() -> Parser:
    """Every flag with its default; those without one here are resolved later, or stated where they act."""
    replaced = []
    for by, values in (("--task embedded", EMBEDDED), ("--smoke", SMOKE)):
        settings = ", ".join(f"{flag(name)} {value}" for name, value in values.items())
        replaced.append(f"{by} replaces: {settings}.")
    about = "Train a causal LM with SHEAR, GRPO, or a neighbour. Defaults are the paper's recipe."
    parser = Parser(COMMON, prog="python train.py", description=about, epilog=" ".join(replaced))
    add = parser.add_argument_group("what").add_argument
    add("--task", choices=("embedded", "math", "code"), help="if not given: embedded without --model, math with it")
    add("--model", help="Hugging Face folder or hub id; embedded: if not given, a tiny one is made and warmed up")
    add("--data", help="local problems, a file or folder; if not given: the paper's training set, from the hub")
    add("--template", choices=TEMPLATES, default="auto", help="of prompts; auto: qwen-math, else chat, else plain")
    add("--seed", type=random_seed, default=0, help="problems, weights of a new model, sampling, shuffling")
    add("--out", default="runs", help="folder of the runs")
    add("--name", help="folder of this run in --out; if not given: task, method and the next free number")
    add("--track", choices=("wandb", "trackio", "tensorboard"), help="also log metrics there; install it first")
    add("--smoke", action="store_true", help="shrink every size and draw the rewards, to prove a set-up")
    add = parser.add_argument_group("credit").add_argument
    add("--method", choices=METHODS, default="shear", metavar="NAME", help="who gets credit: " + ", ".join(METHODS))
    add("--negative-scale", type=not_negative, default=1.0, help="factor on the advantages of wrong rollouts")
    add("--rescale", choices=("none", "mean1"), default="none", help="mean1: a group's mean weight becomes 1")
    add("--lora-rank", type=number(int, 0, 4096), default=0, help="train an adapter of this rank; 0: the whole model")
    add("--prm", help="process reward model of prm and pure; embedded: if not given, a tiny one is made and taught")
    add = parser.add_argument_group("SHEAR").add_argument
    add("--window", type=positive_int, default=100, help="span length w, tokens")
    add("--stride", type=positive_int, default=25, help="distance s between span starts, tokens")
    add("--eps", type=positive, default=PAPER_EPS, help="entropic regularisation, in the unit of --eps-unit")
    add("--eps-unit", choices=("nbar", "raw"), default="raw", help="nbar: the group's mean hidden-state norm")
    add("--reading", choices=("value", "cost"), default="value", help="Eq. (10), or its transport cost only")
    add("--distance", choices=("w1", "cosine", "chamfer", "mmd"), default="w1", help="distance of two spans")
    add("--normalize", choices=("group", "rollout"), default="group", help="whose mean weight is the unit")
    add("--pool", choices=("max", "mean"), default="max", help="how a token pools the spans that cover it")
    add("--max-iters", type=positive_int, default=100, help="Sinkhorn iterations at most")
    add("--tol", type=positive, default=1e-3, help="marginal error at which a pair of spans stops")
    add("--fused", action="store_true", help="one Triton kernel on a GPU, on none of which it was run yet")
    add = parser.add_argument_group("other credit methods").add_argument
    add("--first-threshold", type=positive, default=0.03, help="first: distance at which a rollout has gone wrong")
    add("--kgae-lambda", type=fraction, default=0.95, help="kgae: discount of later changes of value")
    add("--kgae-width", type=positive, default=0.05, help="kgae: distance at which a neighbour's weight is 1 / e")
    add("--entropy-alpha", type=positive, default=0.4, help="entropy: advantage a nat")
    add("--entropy-kappa", type=positive, default=2.0, help="entropy: at most |A| / this is added")
    add("--hapo-alpha", type=positive, default=0.2, help="hapo: advantage a standard deviation of entropy")
    add("--hapo-phi", type=positive, default=2.0, help="hapo: at most |A| / this many standard deviations count")
    add("--rsi-low", type=number(float, -1e30, 1e30), default=-6.0, help="rsi: tokens of a lower index get no credit")
    add("--rsi-high", type=number(float, -1e30, 1e30), default=0.8, help="rsi: tokens of a higher index get none")
    add("--delta-low", type=positive, default=0.8, help="delta: weight of a token that is like the other side's")
    add("--delta-high", type=positive, default=1.2, help="delta: weight of one that is like its own side's")
    add("--oar-quantile", type=fraction, default=0.25, help="oar-g, oar-p: share of tokens that are suppressed")
    add("--oar-beta", type=not_negative, default=1.0, help="oar-g, oar-p: boost of the most important token")
    add("--oar-probe", choices=("kl", "logp"), default="kl", help="oar-g, oar-p: how the answer's change is measured")
    add("--oar-noise", type=positive, default=1e-3, help="oar-g: standard deviation of the noise on embeddings")
    add("--arca-floor", type=positive, default=1e-6, help="arca: added to every token's salience")
    add("--pure-temperature", type=positive, default=0.1, help="pure: of the soft minimum over steps")
    add("--pure-outcome", type=not_negative, default=1.0, help="pure: what a right verdict adds")
    add("--rlsd-mix", type=fraction, default=0.5, help="rlsd: share of the teacher at the start")
    add("--rlsd-steps", type=positive_int, default=50, help="rlsd: steps until it is 0")
    add("--rlsd-bound", type=fraction, default=0.2, help="rlsd: weights lie within 1 +- this")
    add("--sdpo-mix", type=fraction, default=0.0, help="sdpo: share of A in its advantages; 0.9 for weak models")
    add("--attention-slope", type=positive, default=1.0, help="attention: c goes from - this to + this")
    add = parser.add_argument_group("rollouts").add_argument
    add("--prompts-per-step", type=number(int, 1, 10**5), default=512, help="problems of a sampling phase")
    add("--rollouts-per-prompt", type=number(int, 2, 4096), default=8, help="size of a group, G")
    add("--max-tokens", type=natural, default=3000, help="response limit, tokens; 0: a full response (embedded)")
    add("--temperature", type=temperature, default=1.0, help="of sampler and trainer alike")
    add("--dynamic-sampling", type=natural, default=0, help="times that groups of equal rewards give way to others")
    add = parser.add_argument_group("grading").add_argument
    add("--grade-timeout", type=seconds, help="for one response; if not given: 5 (math), 10 (code)")
    add("--sandbox", choices=("auto", *sandbox.LEVELS), default="auto", help="code: auto is the strongest that works")
    add = parser.add_argument_group("optimisation").add_argument
    add("--steps", type=positive_int, default=300, help="sampling phases")
    add("--lr", type=positive, default=1e-6, help="AdamW, constant, no weight decay")
    add("--prompts-per-update", type=positive_int, default=32, help="groups of a mini-batch, which is one update")
    add("--micro-tokens", type=positive_int, default=16_384, help="tokens a forward pass; changes memory only")
    add("--clip-low", type=positive, default=0.2, help="ratio bound below: 1 - this")
    add("--clip-high", type=positive, default=0.28, help="ratio bound above: 1 + this")
    add("--max-grad-norm", type=positive, default=1.0, help="gradient norm is cut to this")
    add = parser.add_argument_group("evaluation").add_argument
    add("--heldout", type=number(int, 1, 10**5), default=64, help="problems kept from training, each answered greedily")
    add("--eval-groups", type=positive_int, default=64, help="of these, sampled --rollouts-per-prompt times each")
    add("--eval-every", type=natural, default=0, help="steps between evaluations on --bench; 0: never")
    add("--bench", nargs="+", default=[], help="math, code, embedded, or names of benchmarks, see eval.py")
    add("--bench-data", nargs="+", default=[], metavar="NAME=FILE", help="local file of a benchmark, not the hub's")
    add = parser.add_argument_group("checkpoints").add_argument
    add("--save-every", type=positive_int, help="steps between checkpoints; if not given: 10, more if saving is slow")
    add("--keep", type=positive_int, default=2, help="checkpoints that stay")
    add("--resume", metavar="DIR", help="go on with the run in DIR, or from its checkpoint DIR")
    add = add_machine_flags(parser)
    add("--force", action="store_true", help="train although the memory at hand is known to be too small")
    add("--shard-over", type=natural, default=0, help="ranks that hold one set of weights; 0: all; nodes: GPUs a node")
    add("--recompute", action=argparse.BooleanOptionalAction, default=True, help="activations, in the backward pass")
    add = parser.add_argument_group("embedded task").add_argument
    add("--toy-kind", choices=KINDS, default="chain", help="shape of the little programs; recoverable: a walk")
    add("--toy-lines", type=number(int, 1, 64), default=5, help="definitions a problem, 1 to 8; recoverable: digits")
    add("--toy-width", type=number(int, 8, 4096), default=128, help="hidden size of the model that is made")
    add("--toy-repair", type=fraction, default=0.1, help="recoverable: chance a line of a demonstration's repair")
    add("--toy-luck", type=fraction, default=0.0, help="recoverable: chance a line of the environment's slip")
    add("--toy-tail", type=natural, default=0, help="recoverable: filler tokens after the lines, 8 a line at most")
    add("--warmup-steps", type=positive_int, default=600, help="supervised steps on careless demonstrations")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags with their defaults; those of --resume are not read yet. Raises BadInput."""
    argv = sys.argv[1:] if argv is None else argv
    for word in argv:
        name = word.split("=")[0]
        if name in RENAMED:
            raise BadInput(f"{name}: is now {RENAMED[name]}, and counts what it says; give that one")
    parser = make_parser()
    args = parser.parse_args(argv)
    task = args.task or ("math" if args.model else "embedded")
    if task == "embedded":
        parser.set_defaults(**EMBEDDED)
    if args.smoke:
        parser.set_defaults(**SMOKE_EMBEDDED if task == "embedded" else SMOKE)
    args = parser.parse_args(argv)
    parser.help_if_asked(args)
    if args.resume:
        return args
    args.task = task
    check(args)
    if args.name and (Path(args.out) / args.name).exists():
        raise BadInput(f"--name {args.name}: {Path(args.out) / args.name} exists already; choose another name")
    return args


def check(args: argparse.Namespace) -> None:
    """What is wrong with the flags alone; raises BadInput."""
    if args.prompts_per_step % args.prompts_per_update:
        sizes = f"--prompts-per-step {args.prompts_per_step} is not a multiple of --prompts-per-update"
        raise BadInput(f"{sizes} {args.prompts_per_update}; make it one")
    if args.stride > args.window:
        raise BadInput(f"--stride {args.stride} exceeds --window {args.window}: tokens go uncovered; lower it")
    if args.task != "embedded" and not args.model:
        raise BadInput(f"--task {args.task} needs --model; give a Hugging Face folder or hub id")
    if not args.max_tokens and args.task != "embedded":
        raise BadInput("--max-tokens 0: only the embedded task knows how long a full response is; raise it")
    if args.task == "embedded" and args.data:
        raise BadInput(f"--data {args.data}: the embedded task makes its own problems; add --task math or --model")
    if args.toy_kind != "recoverable":
        if args.toy_lines > 8:
            raise BadInput(f"--toy-lines {args.toy_lines}: a program has 8 at most; lower it")
        for name in ("toy_repair", "toy_luck", "toy_tail"):
            if getattr(args, name) != make_parser().get_default(name):
                raise BadInput(f"{flag(name)} {getattr(args, name)}: is of --toy-kind recoverable; add it")
    if args.toy_tail > 8 * args.toy_lines:
        raise BadInput(f"--toy-tail {args.toy_tail}: over 8 tokens a line have no room; lower it")
    if args.toy_luck and args.decode == "fast":
        raise BadInput(f"--toy-luck {args.toy_luck}: --decode fast knows no environment; leave one of them out")
    if args.eval_groups > args.heldout:
        raise BadInput(f"--eval-groups {args.eval_groups} exceeds --heldout {args.heldout}; lower it")
    if bool(args.eval_every) != bool(args.bench):
        raise BadInput(f"--eval-every {args.eval_every} needs --bench, and --bench needs --eval-every; give both")
    if args.track:
        check_installed(args.track)
