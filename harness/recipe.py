"""The paper's training recipe as command-line flags: every setting, its default, and what is wrong with a value.

    parse_args(argv) -> the resolved configuration, which `train.py` prints, saves and follows

Defaults are the paper's recipe (Sec. 5.2 and App. J of arXiv 2604.23318; eps: App. B). `docs/recipe.md` has each one
beside the paper's words, and our reason where the paper is silent. `--task embedded`, the default without `--model`,
replaces those in EMBEDDED; `--smoke` those in SMOKE. `--resume` takes everything from the run's own config.json, but
what MAY_CHANGE names.
"""

import argparse
import sys
from pathlib import Path

import grpo
from credit import salience
from credit.ablations import CHOICES, Settings
from credit.methods import METHODS, RESCALINGS, USES_ANSWER, USES_PRM
from fast import kernel as sinkhorn_triton
from grading import sandbox
from harness import checkpoint
from harness.command import (
    Parser,
    add_machine_flags,
    flag,
    natural,
    not_negative,
    number,
    positive,
    positive_int,
    random_seed,
    refuse_other_settings,
    resolve_machine,
    seconds,
    share,
    temperature,
)
from harness.report import settings_in
from tasks import toy
from tasks.benchmarks import check_sandbox
from tasks.problems import TEMPLATES, BadInput

# App. B of the paper prints eps log n = 20.8 in raw units of distance; n is the window, 100 tokens.
PAPER_EPS = 4.52
# Without --save-every: steps between checkpoints, at least, and the share of a run's time that they may take.
SAVE_STEPS, SAVE_SHARE = 10, 0.03
# What the embedded task replaces in the paper's recipe: sizes for two CPU cores. A line of work is 12 tokens;
# the scoring forward takes micro-batches above a mini-batch. eps is in units of nbar, which is small here.
EMBEDDED = dict(
    **dict(prompts_per_step=16, prompts_per_update=4, steps=40, lr=1e-4, max_tokens=0, heldout=512),
    **dict(window=12, stride=6, eps=Settings.eps, eps_unit="nbar", threads=1, recompute=False, save_every=SAVE_STEPS),
)
# What --smoke replaces: every size, to prove a set-up in about a minute. (Rewards in training are drawn then.)
SMOKE = dict(
    **dict(steps=4, prompts_per_step=8, rollouts_per_prompt=4, prompts_per_update=4, max_tokens=64),
    **dict(heldout=8, eval_groups=8, save_every=2),
)
SMOKE_EMBEDDED = {**SMOKE, "max_tokens": 0, "warmup_steps": 60}
# What a resumed run may be given anew: how long it goes on, what is saved and measured on the way, how fast it learns,
# and what the machine asks for. With another value of the last two it is no longer the same run to the bit.
MAY_CHANGE = set(
    "steps save_every keep lr max_grad_norm resume ranks device threads micro_tokens generate_batch decode "
    "eval_every bench bench_data".split()
)
# Flags that have another name since they say what they count; the old ones counted rollouts.
RENAMED = {"--batch": "--prompts-per-step", "--group": "--rollouts-per-prompt", "--minibatch": "--prompts-per-update"}


def add_flags(parser: Parser) -> None:
    """Every flag with its default; those without one here are resolved later, or stated where they act."""
    add = parser.add_argument_group("what").add_argument
    add("--task", choices=("embedded", "math", "code"), help="if not given: embedded without --model, math with it")
    add("--model", help="Hugging Face folder or hub id; embedded: if not given, a tiny one is made and warmed up")
    add("--data", help="local problems, a file or folder; if not given: the paper's training set, from the hub")
    add("--template", choices=TEMPLATES, default="auto", help="of prompts; auto: qwen-math, else chat, else plain")
    add("--seed", type=random_seed, default=0, help="problems, weights of a new model, sampling, shuffling")
    add("--out", default="runs", help="folder of the runs")
    add("--name", help="folder of this run in --out; if not given: task, method and the next free number")
    add("--smoke", action="store_true", help="shrink every size and draw the rewards, to prove a set-up in a minute")
    add = parser.add_argument_group("credit").add_argument
    add("--method", choices=tuple(METHODS), default="shear", help="who gets credit, see credit/methods.py")
    add("--negative-scale", type=not_negative, default=1.0, help="factor on the advantages of wrong rollouts")
    add("--rescale", choices=RESCALINGS, default="none", help="mean1: a group's mean weight becomes 1")
    add("--lora-rank", type=number(int, 0, 4096), default=0, help="train an adapter of this rank; 0: the whole model")
    add("--prm", help="process reward model of prm and pure; embedded: if not given, a tiny one is made and taught")
    add = parser.add_argument_group("SHEAR").add_argument
    add("--window", type=positive_int, default=Settings.window, help="span length w, tokens")
    add("--stride", type=positive_int, default=Settings.stride, help="distance s between span starts, tokens")
    add("--eps", type=positive, default=PAPER_EPS, help="entropic regularisation, in the unit of --eps-unit")
    add("--eps-unit", choices=CHOICES["eps_unit"], default="raw", help="nbar: the group's mean hidden-state norm")
    add("--reading", choices=CHOICES["reading"], default=Settings.reading, help="Eq. (10), or its transport cost only")
    add("--distance", choices=CHOICES["distance"], default=Settings.distance, help="distance of two spans")
    add("--normalize", choices=CHOICES["normalize"], default=Settings.normalize, help="whose mean weight is the unit")
    add("--pool", choices=CHOICES["pool"], default=Settings.pool, help="how a token pools the spans that cover it")
    add("--max-iters", type=positive_int, default=Settings.max_iters, help="Sinkhorn iterations at most")
    add("--tol", type=positive, default=Settings.tol, help="marginal error at which a pair of spans stops")
    add("--fused", action="store_true", help="one Triton kernel on a GPU, on none of which it was run yet")
    add = parser.add_argument_group("other credit methods").add_argument
    add("--first-threshold", type=positive, default=0.03, help="first: distance at which a rollout has gone wrong")
    add("--entropy-alpha", type=positive, default=0.4, help="entropy: advantage a nat")
    add("--entropy-kappa", type=positive, default=2.0, help="entropy: at most |A| / this is added")
    add("--hapo-alpha", type=positive, default=0.2, help="hapo: advantage a standard deviation of entropy")
    add("--hapo-phi", type=positive, default=2.0, help="hapo: at most |A| / this many standard deviations count")
    add("--oar-quantile", type=share, default=0.25, help="oar-g, oar-p: share of tokens that are suppressed")
    add("--oar-beta", type=not_negative, default=1.0, help="oar-g, oar-p: boost of the most important token")
    add("--oar-probe", choices=salience.PROBES, default="kl", help="oar-g, oar-p: how the answer's change is measured")
    add("--oar-noise", type=positive, default=1e-3, help="oar-g: standard deviation of the noise on embeddings")
    add("--arca-floor", type=positive, default=1e-6, help="arca: added to every token's salience")
    add("--pure-temperature", type=positive, default=0.1, help="pure: of the soft minimum over steps")
    add("--pure-outcome", type=not_negative, default=1.0, help="pure: what a right verdict adds")
    add("--rlsd-mix", type=share, default=0.5, help="rlsd: share of the teacher at the start")
    add("--rlsd-steps", type=positive_int, default=50, help="rlsd: steps until it is 0")
    add("--rlsd-bound", type=share, default=0.2, help="rlsd: weights lie within 1 +- this")
    add("--attention-slope", type=positive, default=1.0, help="attention: c goes from - this to + this")
    add = parser.add_argument_group("rollouts").add_argument
    add("--prompts-per-step", type=number(int, 1, 10**5), default=512, help="problems of a sampling phase")
    add("--rollouts-per-prompt", type=number(int, 2, 4096), default=8, help="size of a group, G")
    add("--max-tokens", type=natural, default=3000, help="response limit, tokens; 0: a full response (embedded)")
    add("--temperature", type=temperature, default=1.0, help="of sampler and trainer alike")
    add = parser.add_argument_group("grading").add_argument
    add("--grade-timeout", type=seconds, help="for one response; if not given: 5 (math), 10 (code)")
    add("--sandbox", choices=("auto", *sandbox.LEVELS), default="auto", help="code: auto is the strongest that works")
    add = parser.add_argument_group("optimisation").add_argument
    add("--steps", type=positive_int, default=300, help="sampling phases")
    add("--lr", type=positive, default=1e-6, help="AdamW, constant, no weight decay")
    add("--prompts-per-update", type=positive_int, default=32, help="groups of a mini-batch, which is one update")
    add("--micro-tokens", type=positive_int, default=16_384, help="tokens a forward pass; changes memory only")
    add("--clip-low", type=positive, default=grpo.CLIP_LOW, help="ratio bound below: 1 - this")
    add("--clip-high", type=positive, default=grpo.CLIP_HIGH, help="ratio bound above: 1 + this")
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
    add("--shard-over", type=natural, default=0, help="ranks that hold one set of weights; 0: all; nodes: GPUs a node")
    add("--recompute", action=argparse.BooleanOptionalAction, default=True, help="activations, in the backward pass")
    add = parser.add_argument_group("embedded task").add_argument
    add("--toy-kind", choices=toy.KINDS, default="chain", help="shape of the little programs")
    add("--toy-lines", type=number(int, 1, len(toy.LABELS)), default=5, help="definitions a problem, 1 to 8")
    add("--warmup-steps", type=positive_int, default=600, help="supervised steps on careless demonstrations")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The resolved configuration; raises BadInput."""
    for word in sys.argv[1:] if argv is None else argv:
        name = word.split("=")[0]
        if name in RENAMED:
            raise BadInput(f"{name}: is now {RENAMED[name]}, and counts what it says; give that one")
    replaced = {"--task embedded": EMBEDDED, "--smoke": SMOKE}
    parser = Parser(
        prog="python train.py",
        description="Train a causal LM with SHEAR, GRPO, or a neighbour. Defaults are the paper's recipe.",
        epilog=". ".join(
            f"{by} replaces: " + ", ".join(f"{flag(name)} {value}" for name, value in values.items())
            for by, values in replaced.items()
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_flags(parser)
    first = parser.parse_args(argv)
    for name, value in vars(first).items():
        if value == "":  # most often a shell's variable that is not set
            raise BadInput(f"{flag(name)}: is empty; give a value, or leave it out")
    if first.resume:
        return resumed(parser, first, argv)
    task = first.task or ("math" if first.model else "embedded")
    if task == "embedded":
        parser.set_defaults(**EMBEDDED)
    if first.smoke:
        parser.set_defaults(**SMOKE_EMBEDDED if task == "embedded" else SMOKE)
    args = parser.parse_args(argv)
    args.task = task
    if task == "embedded" and not args.max_tokens:
        args.max_tokens = toy.response_tokens(args.toy_lines)
    resolve_machine(args, half=args.task != "embedded")
    check(args)
    if args.name and (Path(args.out) / args.name).exists():
        raise BadInput(f"--name {args.name}: {Path(args.out) / args.name} exists already; choose another name")
    return args


def resumed(parser: Parser, first: argparse.Namespace, argv: list[str] | None) -> argparse.Namespace:
    """The configuration of the run to go on with; `resume` is then the checkpoint's own folder. Raises BadInput."""
    try:
        path, step = checkpoint.find(Path(first.resume))
        run = path.resolve().parent.parent
        saved = renamed(settings_in(run / "config.json", ("task", "method", "seed")))
    except ValueError as error:
        raise BadInput(f"--resume {first.resume}: {error}; give a run's folder, or another checkpoint") from error
    defaults = {name: parser.get_default(name) for name in vars(first)}
    saved = {name: value for name, value in saved.items() if name in vars(first)}
    as_flags = vars(parser.parse_args([word for name, value in saved.items() for word in spelled(name, value)]))
    for name, value in saved.items():
        if as_flags[name] != value:
            raise BadInput(f"--resume {first.resume}: {flag(name)} {value} in its config.json; restore the file")
    parser.set_defaults(**saved)
    args = parser.parse_args(argv)
    fixed = {name: value for name, value in vars(args).items() if name not in MAY_CHANGE}
    had = defaults | saved  # a run may be older than a flag
    refuse_other_settings(fixed, had, f"the run in --resume {first.resume} has", "leave the flag out")
    args.out, args.name, args.resume = str(run.parent), run.name, str(path)
    if args.steps < step:  # as many: the run was cut in its last evaluation
        raise BadInput(f"--steps {args.steps}: the checkpoint is of step {step} already; give more")
    resolve_machine(args, half=args.task != "embedded")
    check(args)
    return args


def spelled(name: str, value) -> list[str]:
    """A flag and its value as one would type them; nothing where the flag would not be given."""
    if isinstance(value, bool):
        return [flag(name)] if value else [f"--no-{name}"] * (name == "recompute")
    if value is None or value == []:
        return []
    return [flag(name), *map(str, value if isinstance(value, list) else [value])]


def renamed(config: dict) -> dict:
    """The config.json of a run, also of one that is older than RENAMED and --eps-unit, by today's names."""
    if not isinstance(config.get("group"), int) or config["group"] < 1:
        return config
    new = {"rollouts_per_prompt": config["group"], "eps_unit": "nbar"}
    for old in ("batch", "minibatch"):
        if old in config:
            name = RENAMED[f"--{old}"].removeprefix("--").replace("-", "_")
            new[name] = config[old] // config["group"]
    return {**config, **new}


def check(args: argparse.Namespace) -> None:
    """Everything that can be known to be wrong before a model is loaded; raises BadInput."""
    check_method(args)
    if args.prompts_per_step % args.prompts_per_update:
        sizes = f"--prompts-per-step {args.prompts_per_step} is not a multiple of --prompts-per-update"
        raise BadInput(f"{sizes} {args.prompts_per_update}; make it one")
    if args.stride > args.window:
        raise BadInput(f"--stride {args.stride} exceeds --window {args.window}: tokens go uncovered; lower it")
    if args.task != "embedded" and not args.model:
        raise BadInput(f"--task {args.task} needs --model; give a Hugging Face folder or hub id")
    if not args.max_tokens:
        raise BadInput("--max-tokens 0: only the embedded task knows how long a full response is; raise it")
    if args.task == "code":
        check_sandbox(args.sandbox)
    if args.task == "embedded" and args.data:
        raise BadInput(f"--data {args.data}: the embedded task makes its own problems; add --task math or --model")
    if args.eval_groups > args.heldout:
        raise BadInput(f"--eval-groups {args.eval_groups} exceeds --heldout {args.heldout}; lower it")
    if bool(args.eval_every) != bool(args.bench):
        raise BadInput(f"--eval-every {args.eval_every} needs --bench, and --bench needs --eval-every; give both")


def check_method(args: argparse.Namespace) -> None:
    """What the credit method needs and does not have; raises BadInput."""
    method, embedded = args.method, args.task == "embedded"
    if args.fused and not (args.device == "cuda" and sinkhorn_triton.available()):
        raise BadInput("--fused: needs a GPU and Triton; leave it out")
    if args.fused and (args.window > sinkhorn_triton.LONGEST or (args.distance, args.reading) != ("w1", "value")):
        raise BadInput(f"--fused: is for w1's value, and a --window up to {sinkhorn_triton.LONGEST}; leave it out")
    if method == "arca" and not args.lora_rank:
        raise BadInput(f"--method {method} compares the model with and without an adapter; give --lora-rank")
    if method in USES_PRM and not (args.prm or embedded or args.task == "code"):
        raise BadInput(f"--method {method} needs a process reward model; give --prm, e.g. Qwen/Qwen2.5-Math-PRM-7B")
    if args.prm and method not in USES_PRM:
        raise BadInput(f"--prm {args.prm}: --method {method} uses none; leave it out")
    if method in USES_ANSWER | USES_PRM and args.task == "code":
        raise BadInput(
            f"--method {method}: made for steps and answers in a box, not for programs; choose another method"
        )
    if method == "oracle" and not embedded:
        raise BadInput(f"--method {method}: the first error is known in --task embedded only; choose another method")
    if method == "pure" and args.rescale != "none":
        raise BadInput(f"--rescale {args.rescale}: pure has advantages of its own, and no weights; leave it out")
    if args.entropy_kappa <= 1 or args.hapo_alpha >= args.hapo_phi:
        raise BadInput(
            f"--entropy-kappa {args.entropy_kappa}, --hapo-alpha {args.hapo_alpha}, --hapo-phi {args.hapo_phi}: "
            "advantages would change their sign; kappa must exceed 1, and phi alpha"
        )
