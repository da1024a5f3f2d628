"""Every setting, one field a flag; a comment beside or above a field is its help.

    parse_train(argv)           the configuration of a run, checked; tyro prints --help and mistakes
    read_config(saved, blame)   the configuration of a run on disk
    TASKS                       by the name that --task takes: who makes the task, its defaults

Defaults are the paper's recipe (Secs. 5.2 and 5.5 and App. J of arXiv 2604.23318; eps is this
project's; `docs/recipe.md` has each one beside the paper's words), or the task's in place of them
(TASKS), or, with --resume, what the run had. This file imports no torch, so that
`--help` answers at once.

A flag that is given has an effect, or is refused. The flags of SHEAR's spans and distances are
accepted with every method, because comparisons share a command line. What depends on the model, the
data or the number of ranks is checked in `harness/run.py`.
"""

import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro

from base import files
from base.errors import SURROGATE, BadInput, printable
from base.options import look_up

Texts = tyro.conf.UseAppendAction[tuple[str, ...]]
Template = Literal["auto", "qwen-math", "chat", "plain"]
Sandbox = Literal["auto", "strict", "process"]  # `grading.sandbox.LEVELS`
COLDEST = 1e-4  # of temperatures: a lower one is greedy decoding, or not finite
REPEATABLE = "--use", "--method-option"
MAY_BE_ZERO = "seed warmup_steps max_tokens ranks threads generate_batch keep_models".split()
# What a resumed run may change: its length, what it saves and measures on the way, how fast it
# learns, and the machine. A change of the last two makes a run that differs in its bits.
MAY_CHANGE = (
    "steps save_every keep keep_samples keep_models lr max_grad_norm ranks device threads "
    "micro_tokens generate_batch"
).split()


# ---- settings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problems:
    """Problems for training, held-out problems, prompts, and how responses are graded."""

    # Problems to train on: embedded, math, code, own (math with sizes for a CPU), a task of the lab
    # (words) or one of your own (--use); default: embedded without --model, otherwise math.
    task: str = "math"
    model: str | None = None  # Hugging Face folder or hub id; by default embedded makes a model.
    data: str | None = None  # Your own problems, a file; default: the paper's set, from the hub.
    # Prompt template; auto: that of the run that made the model, qwen-math for Qwen2.5-Math,
    # otherwise the tokenizer's chat template, otherwise plain.
    template: Template = "auto"
    seed: int = 0  # Random seed of problems, new weights, sampling and shuffling.
    heldout: int = 64  # Number of problems held out of training; each is answered greedily.
    # Embedded: definitions per problem, at most 26. Above 8, with rarer mistakes and a larger
    # vocabulary.
    toy_lines: int = 5
    toy_width: int = 128  # Embedded: hidden size of the model that is made.
    # Supervised steps before training, on error-prone demonstrations (embedded), or those of
    # `--use lab.tools.warm_up`; 0: none.
    warmup_steps: int = 0
    # Whether --warmup-steps was typed: then no file takes the place of the warm-up.
    warmup_given: tyro.conf.Suppress[bool] = False
    # Time limit per response in seconds; default: 5 (math), 10 (code).
    grade_timeout: float | None = None
    sandbox: Sandbox = "auto"  # Of generated programs; auto: the strongest that works here.
    # Your own reward, FILE.py:FUNCTION or MODULE:FUNCTION; benchmarks keep their graders.
    reward: str | None = None


@dataclass(frozen=True)
class Credit:
    """How a response's advantage is distributed over its tokens."""

    # Credit rule: shear, grpo, one that `python -m lab.rules` lists, or one of your own (--use).
    method: str = "shear"
    method_option: Texts = ()  # NAME=VALUE, an option of the rule.


@dataclass(frozen=True)
class Shear:
    """SHEAR's spans and their distances."""

    window: int = 100  # Span length w in tokens; much shorter than a response.
    stride: int = 25  # Tokens between the starts of neighbouring spans, s.
    eps: float = 0.05  # Entropic regularisation, in the unit of --eps-unit.
    # Unit of --eps: nbar, the group's mean hidden-state norm; raw, the distances' unit.
    eps_unit: Literal["nbar", "raw"] = "nbar"

    def eps_over(self, nbar: float) -> float:
        """eps in units of nbar: W_eps(C) / nbar = W_{eps / nbar}(C / nbar)."""
        return self.eps if self.eps_unit == "nbar" else self.eps / nbar


@dataclass(frozen=True)
class Machine:
    """Devices, number format, processes and batch sizes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # Device; auto: cuda if available.
    # Number format of the forward and backward pass; auto: bfloat16 on cuda.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    ranks: int = 0  # Number of processes, unless torchrun starts them; 0: one per GPU.
    # CPU threads per process; 0: torch's default, at most 4 where the embedded task is trained.
    threads: int = 0
    # Responses to the longest prompt generated at a time, and more to shorter ones; 0: what a GPU
    # of this size holds, 512 on a CPU.
    generate_batch: int = 0


@dataclass(frozen=True)
class Config(Machine, Shear, Credit, Problems):
    """Train a causal language model with SHEAR, GRPO or a related method."""

    # MODULE[:NAME=VALUE,...], whose `use` replaces functions of the run; FILE.py or MODULE with
    # rules or tasks of your own (repeatable).
    use: Texts = ()
    prompts_per_step: int = 512  # Problems sampled per step.
    rollouts_per_prompt: int = 8  # Responses per problem: the group size G.
    # Maximum response length in tokens; 0: as long as an answer needs (embedded only).
    max_tokens: int = 3000
    temperature: float = 1.0  # Of sampling and of the trained log-probabilities alike.
    steps: int = 300  # Training steps: sample, then update.
    lr: float = 1e-6  # Learning rate of AdamW, constant and without weight decay.
    prompts_per_update: int = 32  # Problems per update (mini-batch).
    micro_tokens: int = 16_384  # Tokens per forward pass; affects only memory and time.
    clip_low: float = 0.2  # Lower clip bound of the policy ratio, as a distance from 1.
    clip_high: float = 0.28  # Upper clip bound of the policy ratio, as a distance from 1.
    max_grad_norm: float = 1.0  # Maximum gradient norm; larger gradients are scaled down to it.
    recompute: bool = True  # Recompute activations in the backward pass.
    eval_groups: int = 64  # Held-out problems that are sampled in groups, at most.
    out: str = "runs"  # Folder for runs.
    # Name of this run's folder in --out; default: task, method and the next free number.
    name: str | None = None
    save_every: int = 10  # Steps between checkpoints; the last step is always saved.
    keep: int = 2  # Number of checkpoints to keep.
    # Of older checkpoints keep the model of every Nth step, for eval.py; 0: none.
    keep_models: int = 0
    keep_samples: bool = False  # Write all groups of a step to samples.jsonl, not only one.
    resume: str | None = None  # Folder of the run to resume, or of one of its checkpoints.
    # Digest of the run's problems, which must be the same when it is resumed.
    digest: tyro.conf.Suppress[str | None] = None
    # Digests of the file of --reward and of the prompts' token ids, which must be the same, too.
    reward_digest: tyro.conf.Suppress[str | None] = None
    token_digest: tyro.conf.Suppress[str | None] = None


# ---- tasks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskSpec:
    """A task, which --task names."""

    # MODULE:FUNCTION of (Problems, tokenizer, name of the model) -> the task and notes for the user
    make: str = "tasks.task:math_task"
    defaults: Mapping[str, Any] = field(default_factory=dict)  # in place of the paper's
    ignores: str = "toy_lines toy_width sandbox"  # settings that have no effect
    makes_model: bool = False  # unless --model is given; full responses have a known length
    makes_problems: bool = False
    about: str = ""  # a sentence for a run's page


TASKS: dict[str, TaskSpec] = {
    # Sizes for two CPU cores. A line of work is 12 tokens; the scoring forward takes micro-batches
    # above a mini-batch.
    "embedded": TaskSpec(
        make="tasks.toy:task",
        defaults=dict(
            heldout=512,
            warmup_steps=600,
            window=12,
            stride=6,
            prompts_per_step=16,
            max_tokens=0,
            steps=40,
            lr=1e-4,
            prompts_per_update=4,
            recompute=False,
        ),
        ignores="data template sandbox",
        makes_model=True,
        makes_problems=True,
        about="The task: little programs, worked out line by line; all arithmetic is mod 10, so "
        "7*4=8.",
    ),
    "math": TaskSpec(),
    "code": TaskSpec(make="tasks.task:code_task", ignores="toy_lines toy_width"),
    # Math, with sizes for a model of 135 million parameters on two CPU cores. A step of a response
    # has about 16 tokens; spans of 12 in steps of 4 compare less than one.
    "own": TaskSpec(
        defaults=dict(
            window=12,
            stride=4,
            prompts_per_step=4,
            max_tokens=256,
            steps=16,
            lr=2e-5,
            prompts_per_update=4,
            micro_tokens=4096,
            eval_groups=16,
            save_every=2,
            recompute=False,
        ),
    ),
}


# ---- reading flags -------------------------------------------------------------------------------


@dataclass(frozen=True)
class First:
    """The flags that choose the defaults of the others."""

    task: str | None = None
    model: str | None = None
    resume: str | None = None
    use: Texts = ()


def parse_train(argv: Sequence[str] | None = None) -> Config:
    """The flags of a run; raises BadInput."""
    words = sys.argv[1:] if argv is None else argv
    if argv is None:  # studies append flags to others, of which the last counts
        refuse_twice(words)
    first, _ = read_flags(First, words, add_help=False, return_unknown_args=True)
    if first.resume:
        default = saved_config(first.resume)
    else:
        default = defaults_of(first.task or ("math" if first.model else "embedded"), first.use)
    config = read_flags(Config, words, prog="python train.py", default=default)
    if config.prompts_per_update == default.prompts_per_update:  # not given: it may be smaller
        groups = min(config.prompts_per_update, config.prompts_per_step)
        config = replace(config, prompts_per_update=groups)
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    check(config, default, given)
    if not config.resume:
        config = replace(config, warmup_given="--warmup-steps" in given)
    return config


def refuse_twice(words: Sequence[str]) -> None:
    """Raise BadInput for a flag that is typed twice, of which the last would count alone."""
    seen = set()
    for word in words:
        name = word.partition("=")[0].replace("_", "-").replace("--no-", "--", 1)
        if name.startswith("--") and name in seen and name not in REPEATABLE:
            raise BadInput(f"{name}: is given twice; give it once, with all its values")
        seen.add(name)


def rank_of_torchrun() -> int | None:
    """This process's rank, if torchrun or `harness.fsdp.launch` started it."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def read_flags(kind: type, argv: Sequence[str] | None, **options: Any) -> Any:
    """The flags of a command as `tyro.cli` returns them with these options.

    tyro prints --help and mistakes, on rank 0 alone, and ends the process.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head -1` ends without a word
    config = tyro.cli(kind, args=argv, console_outputs=not rank_of_torchrun(), **options)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python has it
    return config


def end_on_mistakes(parse: Callable[[], object]) -> None:
    """Parse the flags of a command before its heavy imports; --help and mistakes end it here."""
    try:
        parse()
    except BadInput as error:
        if not rank_of_torchrun():
            print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)


# ---- defaults ------------------------------------------------------------------------------------


def defaults_of(task: str, modules: Sequence[str] = ()) -> Config:
    """The configuration of a run with a task, which modules of --use may enter; raises BadInput."""
    spec = look_up(TASKS, "tasks", "--task", task, modules)
    return Config(task=task, **spec.defaults)


def saved_config(resume: str) -> Config:
    """The configuration of the run to resume, as its checkpoint has it.

    Raises BadInput, also for a checkpoint of another run than the one that it lies in.
    """
    checkpoint, about = files.find_checkpoint(Path(resume))
    run = checkpoint.resolve().parent.parent
    config = read_config(about["settings"], f"--resume {resume}")
    of_run = read_config(files.read_json(run / "config.json"), f"--resume {resume}")
    for name, value in asdict(config).items():
        other = getattr(of_run, name)
        if name not in (*MAY_CHANGE, "name", "out", "resume") and value != other:
            raise BadInput(
                f"--resume {resume}: {checkpoint.name} has {flag(name)} {value} and the run's "
                f"config.json {other}; give a checkpoint of this run, or restore config.json"
            )
    return replace(config, out=str(run.parent), name=run.name, resume=resume)


def read_config(saved: Mapping[str, Any], blame: str) -> Config:
    """The configuration in a run's config.json or complete.json; raises BadInput."""
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(Config).items():
        if name not in saved:
            raise BadInput(f"{blame}: {name} is missing; {files.RESTORE}")
        value = saved[name]
        values[name] = tuple(value) if isinstance(value, list) else value
        if not is_of(values[name], hint):
            raise BadInput(f"{blame}: {name} cannot be {value!r}; {files.RESTORE}")
    return Config(**values)


def is_of(value: object, hint: Any) -> bool:
    """Whether a value is of the type of a setting; a number without a point may be a float."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(isinstance(text, str) for text in value)
    if get_origin(hint) is UnionType:
        return any(is_of(value, part) for part in get_args(hint))
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


# ---- checks --------------------------------------------------------------------------------------


def check(config: Config, default: Config, given: set[str]) -> None:
    """Raise BadInput for settings out of bounds, without effect, or that contradict each other.

    `given` are the flags that stand on the command line.
    """
    spec = look_up(TASKS, "tasks", "--task", config.task, config.use)
    check_bounds(config, MAY_BE_ZERO)
    for name in ignored_by(spec, config):
        if flag(name) in given:
            raise refusal(config, name, f"has no effect with --task {config.task}; leave it out")
    for name, value in asdict(config).items():
        saved = getattr(default, name)
        if config.resume and name not in MAY_CHANGE and value != saved:
            raise refusal(config, name, f"the run in --resume has {saved}; leave the flag out")
    if config.resume:
        done = files.find_checkpoint(Path(config.resume))[1]["step"]
        if config.steps < done:  # equal if only the last evaluation was cut off
            raise refusal(config, "steps", f"the checkpoint is of step {done} already; give more")
    elif config.name and files.is_taken(Path(config.out) / config.name):
        raise refusal(config, "name", f"exists in {config.out}/ already; choose another name")
    if config.rollouts_per_prompt < 2:
        raise refusal(config, "rollouts_per_prompt", "a group needs 2 or more; raise it")
    if config.seed >= 2**63:
        raise refusal(config, "seed", "exceeds 63 bits; lower it")
    if config.name and Path(config.name).name != config.name:
        raise refusal(config, "name", "is no name of a folder; give --out for the folder around it")
    if config.toy_lines > 26:
        raise refusal(config, "toy_lines", "a letter names each, so 26 at most; lower it")
    if config.prompts_per_step % config.prompts_per_update:
        raise refusal(config, "prompts_per_step", "must be a multiple of --prompts-per-update")
    if config.stride > config.window:
        raise refusal(config, "stride", "exceeds --window, which leaves tokens uncovered; lower it")
    if config.keep_models % config.save_every:
        raise refusal(config, "keep_models", "must be a multiple of --save-every")
    if config.eps > 1 and config.eps_unit == "nbar" and "--eps-unit" not in given:
        raise refusal(
            config,
            "eps",
            "is large in units of nbar; add --eps-unit raw (the distances' unit) or nbar",
        )
    if spec.makes_model:
        return
    if not config.model:
        raise refusal(config, "task", "needs --model; give a Hugging Face folder or hub id")
    if config.task == "own" and not config.data:
        raise refusal(config, "task", "needs --data; give a file of problems")
    if not config.max_tokens:
        raise refusal(config, "max_tokens", "only --task embedded has a fixed length; raise it")


def ignored_by(spec: TaskSpec, config: Config) -> list[str]:
    """The settings that have no effect on a run."""
    names = spec.ignores.split()
    if spec.makes_model and config.model:
        names += ["toy_width", "warmup_steps"]
    return names


def check_bounds(config: Any, may_be_zero: Sequence[str]) -> None:
    """Raise BadInput for numbers that are not finite and positive, and for empty texts."""
    for name, value in asdict(config).items():
        if value == "":
            raise refusal(config, name, "is empty; give a value, or leave the flag out")
        if isinstance(value, str) and SURROGATE.search(value):  # what Python could not decode
            raise refusal(config, name, "has characters that the locale lacks; give other ones")
        if isinstance(value, int | float) and not isinstance(value, bool):
            is_zero = value == 0 and name in may_be_zero
            lowest = COLDEST if name == "temperature" else 0.0
            if not (is_zero or lowest < value < math.inf):  # no comparison with NaN holds
                raise refusal(config, name, "is out of bounds; give another number")


def refusal(config: Any, name: str, reason: str) -> BadInput:
    """The error for a flag of a configuration."""
    return BadInput(f"{flag(name)} {getattr(config, name)}: {reason}")


def flag(name: str) -> str:
    """The command-line spelling of a setting's name."""
    return "--" + name.replace("_", "-")
