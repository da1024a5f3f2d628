"""Every flag of `train.py` and `eval.py`, its default and what is wrong with its value, by the
standard library alone.

    parse_train(argv), parse_eval(argv)   the flags of a command, checked; `harness/launch.py` adds
                                          the machine's
    answer(name, parse)                   the same before a command imports what takes seconds: help
                                          and mistakes
    Parser, number                        what the studies make their own flags of

Defaults are the paper's recipe (Sec. 5.2 and App. J of arXiv 2604.23318) and its
protocol. `docs/recipe.md` has each one beside the paper's words, and our reason where the paper is
silent. `--task embedded`, the default without `--model`, replaces those in EMBEDDED; `--smoke`
those in SMOKE. `--resume` restores all flags from the checkpoint; the flags in MAY_CHANGE can be
overridden. Methods and their options are those of `credit/table.py`.
"""

import argparse
import difflib
import itertools
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from credit.table import METHODS, NEEDS, options_of
from grading import sandbox
from harness.paper_tables import PAPER
from tasks.rows import SURROGATE, BadInput, printable

TEMPLATES = ("auto", "qwen-math", "chat", "plain")
# The flags that `--help` shows.
TRAIN = (
    "task model data method steps lr prompts_per_step rollouts_per_prompt max_tokens eval_every "
    "bench "
)
TRAIN += "smoke resume out device"
EVAL = "model bench data out saved runs greedy samples max_tokens seeds select device"
# What the embedded task replaces in the paper's recipe: sizes for two CPU cores. A line of work is
# 12 tokens; the scoring forward takes micro-batches above a mini-batch.
EMBEDDED = dict(
    **dict(prompts_per_step=16, prompts_per_update=4, steps=40, lr=1e-4, max_tokens=0, heldout=512),
    **dict(window=12, stride=6, threads=1, recompute=False),
)
# What the word problems replace: sizes for a model of 135 million parameters on two CPU cores.
# Responses have 30 to 80 tokens, a step about 16; spans of 12 in steps of 4 compare less than one.
# The prompt is plain text, which is shortest.
WORDS = dict(
    **dict(
        prompts_per_step=4,
        prompts_per_update=4,
        steps=16,
        lr=2e-5,
        max_tokens=128,
        heldout=64,
        eval_groups=16,
    ),
    **dict(
        window=12,
        stride=4,
        template="plain",
        warmup_steps=40,
        recompute=False,
    ),
    micro_tokens=4096,
)
TASKS = {
    "embedded": EMBEDDED,
    "words": WORDS,
}  # that make their own problems, and know the first error
# What --smoke replaces: every size, to prove a set-up in some minutes. (Rewards in training are
# drawn then.)
SMOKE = dict(
    **dict(steps=4, prompts_per_step=8, rollouts_per_prompt=4, prompts_per_update=4, max_tokens=64),
    **dict(heldout=8, eval_groups=8, save_every=2),
)
SMOKE_TASKS = {"embedded": {"max_tokens": 0, "warmup_steps": 60}, "words": {"warmup_steps": 4}}
# What a resumed run may be given anew: how long it goes on, what is saved and measured on the way,
# how fast it learns, and what the machine asks for. With another value of the last two it is no
# longer the same run to the bit.
MAY_CHANGE = set(
    "steps save_every keep lr max_grad_norm resume ranks device threads micro_tokens "
    "generate_batch "
    "eval_every bench bench_data track force".split()
)


# ---- a parser whose errors are one sentence, and types with bounds -------------------------------


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Omits empty defaults."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default in (None, []) or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence; if flags are `common`, `--help` shows these and
    `--help-all` all.
    """

    def __init__(self, common: str = "", **options):
        super().__init__(
            add_help=not common, usage="%(prog)s [flags]", formatter_class=Help, **options
        )
        self.common = common.split()
        self.tail = []  # lines below --help-all
        self.others = []  # flags that another parser has taken
        if common:
            add = self.add_argument_group("help").add_argument
            add(
                "-h",
                "--help",
                action="store_true",
                default=argparse.SUPPRESS,
                help="the usual flags",
            )
            add("--help-all", action="store_true", default=argparse.SUPPRESS, help="all flags")

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        for before, word in itertools.pairwise(["", *words]):
            if SURROGATE.search(word):
                raise BadInput(f"{word}: is not UTF-8, which files of a run hold; rename it")
            if not word or re.fullmatch(
                "--[a-z-]+=", word
            ):  # most often a shell's variable that is not set
                raise BadInput(
                    f"{(word or before).rstrip('=')}: is empty; give a value, or leave it out"
                )
            if re.search(rb"[^/]{256}", os.fsencode(word)):
                shown = f"{before} " * before.startswith("-") + word[:40]
                raise BadInput(f"{shown}...: is longer than a file's name may be; shorten it")
        return super().parse_known_args(args, namespace)

    def given(self, argv: list[str] | None) -> dict:
        """The flags that were given, by name; raises BadInput."""
        defaults = {action: action.default for action in self._actions}
        try:
            for action in defaults:
                action.default = argparse.SUPPRESS
            return vars(self.parse_args(argv))
        finally:
            for action, default in defaults.items():
                action.default = default

    def defaults(self) -> dict:
        """The default of each flag, by name."""
        return {a.dest: a.default for a in self._actions if a.default is not argparse.SUPPRESS}

    def help_if_asked(self, given: dict, defaults: dict) -> None:
        """Print the help, with these defaults, and end the process."""
        if not given.keys() & {"help", "help_all"}:
            return
        self.set_defaults(**defaults)
        if "help_all" not in given:
            self.epilog = None
            for action in self._actions:
                if action.dest not in (*self.common, "help", "help_all"):
                    action.help = argparse.SUPPRESS
        self.print_help()
        if "help_all" in given and self.tail:
            print("\nmethods and their options, --method-option NAME=VALUE:", *self.tail, sep="\n")
        sys.exit(0)

    def error(self, message: str):
        message = re.sub(
            r"^argument (\S+): (?=\S+: must be)", r"\1 ", message
        )  # --lr 0: must be ...
        message = message.removeprefix("argument ")
        wrong = re.search(r"invalid choice: '(.*?)'|unrecognized arguments: ([^ =]+)", message)
        if wrong:
            known = [*self._option_string_actions, *self.others, *METHODS]
            near = difflib.get_close_matches(wrong[1] or wrong[2], known, 1)
            message += "".join(f"; did you mean {word}?" for word in near)
        raise BadInput(f"{message}; see {self.prog} --help")

    def parse_with_others(
        self, argv: list[str] | None, refused: str, reason: str
    ) -> tuple[argparse.Namespace, list]:
        """This command's flags, and those of train.py as they are; raises BadInput for `refused`
        ones of these.
        """
        flags, others = self.parse_known_args(argv)
        for word in others:
            if word.split("=")[0] in refused.split():
                raise BadInput(f"{word}: {reason}; leave it out")
        return flags, others


def check_flags(parser: Parser) -> None:
    """Help, and what is wrong with a command's own flags or with those of train.py beside them;
    raises BadInput.
    """
    _, words = parser.parse_known_args()
    of_training = train_parser()
    of_training.prog, of_training.others = parser.prog, list(parser._option_string_actions)
    of_training.given(words)


def number(
    kind: type, low: float, high: float = math.inf, *, above: bool = False
) -> Callable[[str], float]:
    """The type of a flag: a finite number of this kind from `low` to `high`; it exceeds `low` if it
    must be `above`.
    """
    bounds = f"above {low}" if above else f"at least {low}"
    if high < math.inf:
        bounds += f" and at most {high}"

    def convert(text: str) -> float:
        value = kind(text)
        if (
            not (low < value if above else low <= value) or not value <= high or value == math.inf
        ):  # so is NaN
            raise argparse.ArgumentTypeError(f"{text}: must be {bounds}")
        return value

    convert.__name__ = kind.__name__  # argparse says "invalid int value: 'x'"
    return convert


positive_int = number(int, 1, 10**6)
natural = number(int, 0, 10**6)
random_seed = number(int, 0, 2**32 - 1)
positive = number(float, 0, 1e30, above=True)
not_negative = number(float, 0, 1e30)
temperature = number(float, 0.001, 1000)
seconds = number(float, 0, 86_400, above=True)  # a day at most


def flag(name: str) -> str:
    """The command-line spelling of an argument's name."""
    return "--" + name.replace("_", "-")


def spelled(name: str, value) -> list[str]:
    """A flag and its value as one would type them; nothing where the flag would not be given."""
    if isinstance(value, bool):
        return [flag(name)] if value else [f"--no-{name}"] * (name == "recompute")
    if value is None or value == []:
        return []
    return [flag(name), *map(str, value if isinstance(value, list) else [value])]


def refuse_other_settings(wanted: dict, had: dict, holder: str, remedy: str) -> None:
    """Raise BadInput where a setting that is `wanted` differs from what a folder's files were made
    with, `had`.
    """
    for name, value in wanted.items():
        if value != had.get(name):
            raise BadInput(f"{flag(name)} {value}: {holder} {had.get(name)}; {remedy}")


def answer(name: str, parse: Callable) -> None:
    """Answer --help and mistakes in the flags, before the command of this `__name__` imports what
    takes seconds.
    """
    if name != "__main__":
        return
    try:
        os.getcwd()
    except FileNotFoundError:
        print("error: the working directory is gone; change to another one", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head -1` ends without a word
    try:
        parse()
    except BadInput as error:
        if speaks():
            print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python has it


def speaks() -> bool:
    """Whether this process says what all ranks would say: rank 0 does, and one that is none of
    torchrun's, whatever its environment says.
    """
    return os.environ.get("RANK", "0") == "0" or "MASTER_ADDR" not in os.environ


def add_machine_flags(parser: Parser):
    """Flags that say where to compute and in which pieces; returns the function that adds others to
    their group.
    """
    add = parser.add_argument_group("machine").add_argument
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda where there is one",
    )
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of compute; auto: bfloat16 on cuda",
    )
    add(
        "--ranks",
        type=number(int, 0, 4096),
        default=0,
        help="processes to start, unless torchrun has; 0: one per GPU",
    )
    add("--threads", type=number(int, 0, 4096), default=0, help="CPU threads, 0: torch's default")
    add(
        "--generate-batch",
        type=natural,
        default=0,
        help="rollouts at a time; 0: what memory holds, 512 on CPU",
    )
    return add


# ---- train.py ------------------------------------------------------------------------------------


def train_parser() -> Parser:
    """Every flag of train.py with its default; those without one here are resolved later, or stated
    where they act.
    """
    replaced = []
    of_tasks = {f"--smoke --task {task}": own for task, own in SMOKE_TASKS.items()}
    for by, values in {"--task words": WORDS, "--smoke": SMOKE, **of_tasks}.items():
        settings = ", ".join(f"{flag(name)} {value}" for name, value in values.items())
        replaced.append(f"{by} replaces: {settings}.")
    about = (
        "Train a causal LM with SHEAR, GRPO, or a neighbour. Of two defaults, embedded task | "
        "paper."
    )
    parser = Parser(TRAIN, prog="python train.py", description=about, epilog=" ".join(replaced))
    for name, method in METHODS.items():
        for option, entry in method.options.items():
            parser.tail.append(f"  {name:9} {f'{option}={entry.default}':19} {entry.about}")
    add = parser.add_argument_group("what").add_argument
    add(
        "--task",
        choices=(*TASKS, "math", "code"),
        help="if not given: embedded without --model, else math",
    )
    model = (
        "Hugging Face folder or hub id, .gguf file, or smollm2; embedded: if not given, a tiny "
        "one is made"
    )
    add("--model", help=model)
    add(
        "--data",
        help="local problems, a file or folder; if not given: the paper's training set, from the "
        "hub",
    )
    add(
        "--template",
        choices=TEMPLATES,
        default="auto",
        help="of prompts; auto: qwen-math, else chat, else plain",
    )
    add(
        "--seed",
        type=random_seed,
        default=0,
        help="problems, weights of a new model, sampling, shuffling",
    )
    add("--out", default="runs", help="folder of the runs")
    add(
        "--name",
        help="folder of this run in --out; if not given: task, method and the next free number",
    )
    add(
        "--track",
        choices=("wandb", "trackio", "tensorboard"),
        help="also log metrics there; install it first",
    )
    add(
        "--smoke",
        action="store_true",
        help="shrink every size and draw the rewards, to check your setup",
    )
    add = parser.add_argument_group("credit").add_argument
    add(
        "--method",
        choices=METHODS,
        default="shear",
        metavar="NAME",
        help="who gets credit: " + ", ".join(METHODS),
    )
    options = "an option of the method, repeatable; --help-all lists them"
    add(
        "--method-option",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help=options,
    )
    add(
        "--negative-scale",
        type=not_negative,
        default=1.0,
        help="factor on the advantages of wrong rollouts",
    )
    add(
        "--rescale",
        choices=("none", "mean1"),
        default="none",
        help="mean1: a group's mean weight becomes 1",
    )
    add(
        "--lora-rank",
        type=number(int, 0, 4096),
        default=0,
        help="train an adapter of this rank; 0: the whole model",
    )
    add(
        "--prm",
        help="process reward model of prm and pure; embedded: if not given, a tiny one is made and "
        "taught",
    )
    add = parser.add_argument_group("SHEAR").add_argument
    add("--window", type=positive_int, default=100, help="span length w, tokens")
    add("--stride", type=positive_int, default=25, help="distance s between span starts, tokens")
    add(
        "--eps",
        type=positive,
        default=0.05,
        help="entropic regularisation, in the unit of --eps-unit",
    )
    add(
        "--eps-unit",
        choices=("nbar", "raw"),
        default="nbar",
        help="nbar: the group's mean hidden-state norm",
    )
    add("--max-iters", type=positive_int, default=100, help="Sinkhorn iterations at most")
    add("--tol", type=positive, default=1e-3, help="marginal error at which a pair of spans stops")
    add = parser.add_argument_group("rollouts").add_argument
    add(
        "--prompts-per-step",
        type=number(int, 1, 10**5),
        default=512,
        help="problems of a sampling phase",
    )
    add("--rollouts-per-prompt", type=number(int, 2, 4096), default=8, help="size of a group, G")
    add(
        "--max-tokens",
        type=natural,
        default=3000,
        help="response limit, tokens; 0: a full response (embedded)",
    )
    add("--temperature", type=temperature, default=1.0, help="of sampler and trainer alike")
    replace = "resample groups whose rewards are all equal, at most N times per step (DAPO)"
    add("--dynamic-sampling", type=natural, default=0, help=replace)
    add = parser.add_argument_group("grading").add_argument
    add("--grade-timeout", type=seconds, help="for one response; if not given: 5 (math), 10 (code)")
    add(
        "--sandbox",
        choices=("auto", *sandbox.LEVELS),
        default="auto",
        help="code: auto is the strongest that works",
    )
    add = parser.add_argument_group("optimisation").add_argument
    add("--steps", type=positive_int, default=300, help="sampling phases")
    add("--lr", type=positive, default=1e-6, help="AdamW, constant, no weight decay")
    add(
        "--prompts-per-update",
        type=positive_int,
        default=32,
        help="groups of a mini-batch, which is one update",
    )
    add(
        "--micro-tokens",
        type=positive_int,
        default=16_384,
        help="tokens per pass; changes memory and time alone",
    )
    add("--clip-low", type=positive, default=0.2, help="ratio bound below: 1 - this")
    add("--clip-high", type=positive, default=0.28, help="ratio bound above: 1 + this")
    add("--max-grad-norm", type=positive, default=1.0, help="gradient norm is cut to this")
    add = parser.add_argument_group("evaluation").add_argument
    add(
        "--heldout",
        type=number(int, 1, 10**5),
        default=64,
        help="problems kept from training, each answered greedily",
    )
    add(
        "--eval-groups",
        type=positive_int,
        default=64,
        help="of these at most, sampled --rollouts-per-prompt times",
    )
    add(
        "--eval-every",
        type=natural,
        default=0,
        help="steps between evaluations on --bench; 0: never",
    )
    add(
        "--bench",
        nargs="+",
        default=[],
        help="math, code, embedded, or names of benchmarks, see eval.py",
    )
    add(
        "--bench-data",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="local file of a benchmark, not the hub's",
    )
    add = parser.add_argument_group("checkpoints").add_argument
    add(
        "--save-every",
        type=positive_int,
        default=10,
        help="steps between checkpoints; the last step is always saved",
    )
    add("--keep", type=positive_int, default=2, help="checkpoints that stay")
    add(
        "--resume",
        metavar="DIR",
        help="resume the run in DIR (a run folder or one of its checkpoints)",
    )
    add = add_machine_flags(parser)
    add(
        "--force",
        action="store_true",
        help="train although the memory at hand is known to be too small",
    )
    add(
        "--shard-over",
        type=natural,
        default=0,
        help="ranks that hold one set of weights; 0: all; nodes: GPUs a node",
    )
    add(
        "--recompute",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="activations, in the backward pass",
    )
    add = parser.add_argument_group("tasks that make their problems").add_argument
    add(
        "--warmup-steps",
        type=natural,
        default=600,
        help="supervised steps on careless demonstrations; 0: none",
    )
    add("--toy-lines", type=number(int, 1, 8), default=5, help="embedded: definitions a problem")
    add(
        "--toy-width",
        type=number(int, 8, 4096),
        default=128,
        help="embedded: hidden size of the model that is made",
    )
    return parser


def parse_train(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of a run, checked; `launch.parse_args` says what they mean on this machine. Raises
    BadInput.
    """
    parser = train_parser()
    given = parser.given(argv)
    task = given.get("task") or ("math" if given.get("model") else "embedded")
    defaults = parser.defaults() | {"task": task} | TASKS.get(task, {})
    if given.get("smoke"):
        defaults |= SMOKE | SMOKE_TASKS.get(task, {})
    both = {name: f"{own} | {parser.get_default(name)}" for name, own in EMBEDDED.items()}
    parser.help_if_asked(given, both)
    if "resume" in given:
        return resumed(given, parser)
    args = argparse.Namespace(**defaults | given, given=list(given))
    if "prompts_per_update" not in given:
        args.prompts_per_update = min(args.prompts_per_update, args.prompts_per_step)
    check(args)
    if args.name and (Path(args.out) / args.name).exists():
        raise BadInput(
            f"--name {args.name}: {Path(args.out) / args.name} exists already; choose another name"
        )
    return args


def refuse_damaged(saved: dict, parser: Parser, place: str) -> None:
    """Raises BadInput where a saved setting is none that its flag takes."""
    for name, default in parser.defaults().items():
        value = saved.get(name, default)
        try:
            taken = parser.given(spelled(name, value)).get(name, default)
        except BadInput:
            taken = ...
        if value != taken:
            raise BadInput(f"{place}: {name} is {value}; restore it, or give another checkpoint")


def resumed(given: dict, parser: Parser) -> argparse.Namespace:
    """The run to resume, as its checkpoint has it; `resume` is then that checkpoint's folder.
    Raises BadInput.
    """
    from harness import checkpoint  # imports torch

    path, step = checkpoint.find(Path(given["resume"]))
    run = path.resolve().parent.parent
    if Path.cwd() in run.parents:
        run = run.relative_to(Path.cwd())  # as a person would type it
    settings = checkpoint.report_of(path)["settings"]
    refuse_damaged(settings, parser, f"{path}/complete.json")
    saved = {**settings, "out": str(run.parent), "name": run.name}
    fixed = {name: value for name, value in given.items() if name not in MAY_CHANGE}
    refuse_other_settings(
        fixed, saved, f"the run in --resume {given['resume']} has", "leave the flag out"
    )
    if "bench" in given or given.get("eval_every") == 0:  # other benchmarks, or none
        saved |= {"bench": [], "bench_data": []}
    args = argparse.Namespace(
        **{"given": []} | parser.defaults() | saved | given | {"resume": str(path)}
    )
    if args.steps < step:  # as many: the run was cut in its last evaluation
        raise BadInput(f"--steps {args.steps}: the checkpoint is of step {step} already; give more")
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """What is wrong with the flags alone; raises BadInput."""
    method, embedded = METHODS[args.method], args.task == "embedded"
    try:
        options_of(args.method, args.method_option)
    except ValueError as error:
        raise BadInput(f"--method-option {error}") from error
    refusals = [
        (
            "prompts_per_step",
            args.prompts_per_step % args.prompts_per_update,
            "no multiple of --prompts-per-update",
        ),
        ("stride", args.stride > args.window, "exceeds --window, so tokens go uncovered; lower it"),
        (
            "eps",
            args.eps > 1 and args.eps_unit == "nbar" and "eps_unit" not in args.given,
            "is large in units of nbar; add --eps-unit raw (the distances' unit) or nbar",
        ),
        (
            "task",
            not embedded and not args.model,
            "needs --model; give smollm2, a Hugging Face folder or hub id",
        ),
        (
            "max_tokens",
            not (embedded or args.max_tokens),
            "only --task embedded knows a full response; raise it",
        ),
        (
            "data",
            args.task in TASKS and args.data,
            "the task makes its own; give --task math and --model",
        ),
        (
            "eval_every",
            bool(args.eval_every) != bool(args.bench),
            "needs --bench, which needs it; give both",
        ),
        (
            "track",
            args.track and not find_spec(args.track),
            "this package is not installed; leave it out",
        ),
        (
            "prm",
            args.prm and "prm" not in method.needs,
            f"--method {args.method} uses none; leave it out",
        ),
        (
            "rescale",
            args.rescale != "none" and not method.weighs,
            "the method has no weights; leave it out",
        ),
    ]
    has = {
        "adapter": (args.lora_rank, "give --lora-rank"),
        "prm": (args.prm or embedded, "give --prm, e.g. Qwen/Qwen2.5-Math-PRM-7B"),
        "box": (args.task != "code", "programs have none; choose another method"),
        "first error": (
            args.task in TASKS,
            "only --task embedded and words know it; choose another method",
        ),
        "rephrase": (
            args.task in TASKS,
            "only --task embedded and words put them so; choose another method",
        ),
    }
    for need, (fulfilled, remedy) in has.items():
        refusals.append(
            ("method", need in method.needs and not fulfilled, f"needs {NEEDS[need]}; {remedy}")
        )
    for name, is_wrong, reason in refusals:
        if is_wrong:
            raise BadInput(f"{flag(name)} {vars(args)[name]}: {reason}")


# ---- eval.py -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Protocol:
    """How responses are sampled and graded; the defaults are the paper's."""

    temperature: float = 0.1  # 0: greedy
    max_tokens: int = 3000
    samples: int = 0  # a problem; 0: the benchmark's k
    template: str = "auto"
    block: int = 128  # responses that are sampled, graded and kept together
    grade_timeout: float | None = None  # None: the benchmark's
    sandbox: str = "auto"


def eval_parser() -> Parser:
    """Every flag of eval.py with its default."""
    parser = Parser(
        EVAL, prog="python eval.py", description="Evaluate models on the paper's benchmarks."
    )
    add = parser.add_argument_group("what").add_argument
    add(
        "--model",
        nargs="+",
        default=[],
        help="Hugging Face folders, hub ids, or runs of train.py (their last model)",
    )
    add(
        "--bench",
        nargs="+",
        help="math, code, embedded, or names of benchmarks; embedded for its models, else math",
    )
    add(
        "--data",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="local file of a benchmark; twice for two files",
    )
    add(
        "--out",
        help="folder for generations and tables; if not given: in evals/, named by models and "
        "benchmarks",
    )
    add("--from", dest="saved", metavar="DIR", help="no model: the table of the generations in DIR")
    add("--replay", metavar="FILE", help="no model: grade the responses in FILE")
    add(
        "--runs",
        nargs="+",
        default=[],
        help="no model: what train.py --eval-every wrote in these runs",
    )
    add = parser.add_argument_group("protocol").add_argument
    add(
        "--temperature",
        type=number(float, 0, 1000),
        default=Protocol.temperature,
        help="of sampling",
    )
    add("--greedy", action="store_true", help="temperature 0, one response a problem")
    add("--samples", type=natural, default=0, help="responses a problem; 0: the paper's k")
    add("--max-tokens", type=positive_int, default=Protocol.max_tokens, help="response limit")
    add(
        "--seeds",
        type=random_seed,
        nargs="+",
        default=[0],
        help="several: mean and standard deviation over them, too",
    )
    add(
        "--template",
        choices=TEMPLATES,
        default=Protocol.template,
        help="of prompts, as in train.py",
    )
    add(
        "--block",
        type=positive_int,
        default=Protocol.block,
        help="responses made, graded and saved together",
    )
    add("--grade-timeout", type=seconds, help="for one response; if not given: the benchmark's")
    add("--sandbox", choices=("auto", *sandbox.LEVELS), default="auto", help="for programs")
    add = parser.add_argument_group("table").add_argument
    unbiased = "also pass@K, unbiased; K samples at least"
    add("--pass-at", type=positive_int, nargs="+", default=[], metavar="K", help=unbiased)
    beside = "whose numbers to print beside; if not given: by the model's name"
    add("--paper", choices=PAPER, metavar="MODEL", help=beside)
    add(
        "--select",
        choices=("best",),
        help="every checkpoint of the runs, and the best, chosen on the test sets",
    )
    add = parser.add_argument_group(
        "embedded task, if not given: as the model's run has them"
    ).add_argument
    add("--toy-lines", type=number(int, 1, 8), help="definitions a problem")
    add("--heldout", type=number(int, 1, 10**5), help="problems")
    add("--toy-seed", type=random_seed, help="the run's seed, which made the problems")
    add_machine_flags(parser)
    return parser


def parse_eval(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of an evaluation, checked; raises BadInput."""
    parser = eval_parser()
    given = parser.given(argv)
    parser.help_if_asked(given, {})
    args = argparse.Namespace(**parser.defaults() | given)
    if sum(map(bool, (args.model, args.saved, args.replay, args.runs))) != 1:
        raise BadInput("give one of --model, --from, --replay and --runs")
    if args.greedy:
        args.temperature, args.samples = 0.0, 1
    if len(set(args.seeds)) < len(args.seeds):
        raise BadInput(f"--seeds {' '.join(map(str, args.seeds))}: must be different; change them")
    return args
