"""Every setting of `train.py`: one field per flag, with type, default, bounds, help.

    parse_train(argv)   the flags of train.py; tyro prints --help and errors
    flat(config), with_values(config, .)  settings by the names of their flags

Defaults are the paper's recipe (Sec. 5.2 and App. J of arXiv 2604.23318) and its protocol:
`docs/recipe.md` has each one beside the paper's words, and our reason where the paper is silent.
`--task embedded`, the default without `--model`, and `--task own` have sizes for two CPU cores.
`--resume` restores all settings; those in MAY_CHANGE can be
changed. This file imports no torch, so that `--help` answers at once.
"""

import dataclasses
import itertools
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from credit.settings import Credit, Shear
from tasks.errors import BadInput
from tasks.plug import look_up
from tasks.settings import (
    Count,
    Grading,
    Natural,
    OptionalText,
    Positive,
    Problems,
    SetSize,
    number,
    several,
    spec,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
Texts = Annotated[tuple[str, ...], several(spec("TEXT", str))]
Seed = Annotated[int, number(int, 0, 2**32 - 1)]
Seeds = Annotated[tuple[int, ...], several(number(int, 0, 2**32 - 1))]
Counts = Annotated[tuple[int, ...], several(number(int, 1, 10**6))]
GroupSizes = Annotated[tuple[int, ...], several(number(int, 2, 4096))]
SmallCount = Annotated[int, number(int, 0, 4096)]
PathFlag = Annotated[Path, spec("PATH", Path)]
# What a resumed run may change: its length, what it saves and measures on the way, how fast it
# learns, and the machine. A change of the last two makes a run that differs in its bits.
MAY_CHANGE = frozenset(
    "steps save_every keep keep_samples lr max_grad_norm resume ranks device threads micro_tokens "
    "generate_batch keep_models".split()
)
FLAT = (tyro.conf.OmitArgPrefixes,)  # flags are named by their fields alone


# ---- parts of a configuration, one for each group of flags ---------------------------------------


@dataclass(frozen=True)
class Sampling:
    """Rollouts."""

    prompts_per_step: SetSize = 512
    """Problems sampled per step."""
    rollouts_per_prompt: Annotated[int, number(int, 2, 4096)] = 8
    """Responses per problem: the group size G."""
    max_tokens: Natural = 3000
    """Maximum response length in tokens; 0: as long as an answer needs (embedded only)."""
    temperature: Annotated[float, number(float, 1e-3, 1e3)] = 1.0
    """Temperature, of sampling and of the trained log-probabilities alike."""


@dataclass(frozen=True)
class Optimisation:
    """Updates: AdamW without weight decay, at a constant rate."""

    steps: Count = 300
    """Training steps: sample, then update."""
    lr: Positive = 1e-6
    """Learning rate."""
    prompts_per_update: Count = 32
    """Problems per update (mini-batch)."""
    micro_tokens: Count = 16_384
    """Tokens per forward pass; affects only memory and time."""
    clip_low: Positive = 0.2
    """Lower clip bound of the policy ratio, as a distance from 1."""
    clip_high: Positive = 0.28
    """Upper clip bound of the policy ratio, as a distance from 1."""
    max_grad_norm: Positive = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it."""


@dataclass(frozen=True)
class Evaluation:
    """Evaluations before and after training."""

    eval_groups: Count = 64
    """Maximum number of held-out problems that are sampled --rollouts-per-prompt times."""


@dataclass(frozen=True)
class Checkpoints:
    """Saving and resuming runs."""

    save_every: Count = 10
    """Steps between checkpoints; the last step is always saved."""
    keep: Count = 2
    """Number of checkpoints to keep."""
    keep_models: Natural = 0
    """Of older checkpoints keep the model of every Nth step, for eval.py; 0: none."""
    keep_samples: bool = False
    """Write all groups of a step to samples.jsonl, not only one."""
    resume: OptionalText = None
    """Folder of the run to resume, or of one of its checkpoints."""


@dataclass(frozen=True)
class Machine:
    """Devices, number format, processes and batch sizes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: cuda if available."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the forward and backward pass; auto: bfloat16 on cuda."""
    ranks: SmallCount = 0
    """Number of processes, unless torchrun starts them; 0: one per GPU."""
    threads: SmallCount = 0
    """CPU threads per process; 0: torch's default."""
    generate_batch: Natural = 0
    """Responses generated at a time; 0: what a GPU of this size holds, 512 on a CPU."""


@dataclass(frozen=True)
class TrainMachine(Machine):
    """Devices, number format, processes and batch sizes."""

    shard_over: Natural = 0
    """Processes that share one copy of the weights; 0: all. On several nodes: GPUs per node."""
    recompute: bool = True
    """Recompute activations in the backward pass."""


# ---- train.py ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainConfig:
    """Train a causal language model with SHEAR, GRPO or a related method."""

    task: Annotated[str, spec("NAME", str)] = "math"
    """Problems to train on: embedded, math, code, own (math with sizes for a CPU), or a task of the
    lab (words); default: embedded without --model, otherwise math.
    """
    model: OptionalText = None
    """Hugging Face folder or hub id; by default embedded makes a model."""
    seed: Seed = 0
    """Random seed of problems, new weights, sampling and shuffling."""
    out: Annotated[str, spec("TEXT", str)] = "runs"
    """Folder for runs."""
    name: OptionalText = None
    """Name of this run's folder in --out; default: task, method and the next free number."""
    use: Texts = ()
    """MODULE[:NAME=VALUE,...], whose `use` replaces functions of the run (repeatable)."""
    problems: Problems = field(default_factory=Problems)
    credit: Credit = field(default_factory=Credit)
    shear: Shear = field(default_factory=Shear)
    sampling: Sampling = Sampling()
    grading: Grading = field(default_factory=Grading)
    optimisation: Optimisation = Optimisation()
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    machine: TrainMachine = TrainMachine()
    given: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Names of the settings on the command line; sizes among them do not shrink to the data."""
    digest: tyro.conf.Suppress[str | None] = None
    """Digest of the run's problems, which must be the same when it is resumed."""


PAPER_RECIPE = TrainConfig()
# Sizes for two CPU cores. A line of work is 12 tokens; the scoring forward takes micro-batches
# above a mini-batch.
EMBEDDED = replace(
    PAPER_RECIPE,
    task="embedded",
    problems=Problems(heldout=512, warmup_steps=600),
    shear=Shear(window=12, stride=6),
    sampling=Sampling(prompts_per_step=16, max_tokens=0),
    optimisation=Optimisation(steps=40, lr=1e-4, prompts_per_update=4),
    machine=TrainMachine(threads=1, recompute=False),
)
# Sizes for a model of 135 million parameters on two CPU cores; a step of a response has about 16
# tokens, and spans of 12 in steps of 4 compare less than one.
OWN = replace(
    PAPER_RECIPE,
    task="own",
    shear=Shear(window=12, stride=4),
    sampling=Sampling(prompts_per_step=4, max_tokens=256),
    optimisation=Optimisation(steps=16, lr=2e-5, prompts_per_update=4, micro_tokens=4096),
    evaluation=Evaluation(eval_groups=16),
    machine=TrainMachine(recompute=False),
)
PRESETS = {
    "embedded": EMBEDDED,
    "math": PAPER_RECIPE,
    "code": replace(PAPER_RECIPE, task="code"),
    "own": OWN,
}


@dataclass(frozen=True)
class Preset:
    """The flags that choose a preset; they are read before all others."""

    task: str | None = None
    model: str | None = None


def preset(argv: Sequence[str] | None) -> TrainConfig:
    """The defaults that --task and --model choose, with the names of all given flags."""
    chosen, _ = read_flags(Preset, argv, add_help=False, return_unknown_args=True)
    name = chosen.task or ("math" if chosen.model else "embedded")
    try:
        default = look_up(PRESETS, "tasks", "--task", name)
    except BadInput:  # which `harness.refusals.check` raises again
        default = PAPER_RECIPE
    return replace(default, given=given_flags(argv))


def given_flags(argv: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the settings that stand on a command line."""
    words = [word.partition("=")[0] for word in (sys.argv[1:] if argv is None else argv)]
    names = [word.removeprefix("--").replace("-", "_") for word in words if word[:2] == "--"]
    return tuple(sorted({name.removeprefix("no_") for name in names}))


def read_flags(kind: type, argv: Sequence[str] | None, **options: Any) -> Any:
    """The flags of a command as `tyro.cli` returns them with these options.

    A flag that takes several values appends where it is given again. tyro prints --help and
    mistakes, on rank 0 alone, and ends the process.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head -1` ends without a word
    config = tyro.cli(
        kind,
        args=merge_lists(sys.argv[1:] if argv is None else argv, list_flags(kind)),
        config=FLAT,
        console_outputs=not rank_of_torchrun(),
        **options,
    )
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python has it
    return config


def list_flags(kind: type) -> set[str]:
    """The flags of a configuration that take several values."""
    names = set()
    for setting in dataclasses.fields(kind):
        if isinstance(setting.type, type) and dataclasses.is_dataclass(setting.type):
            names |= list_flags(setting.type)
        elif isinstance(setting.default, tuple):
            names.add(flag(setting.name))
    return names


def merge_lists(words: Sequence[str], names: set[str]) -> list[str]:
    """A command line where each flag among `names` stands once, with all its values."""
    part: list[str] = []  # a flag and its values
    parts = [part]
    first: dict[str, list[str]] = {}  # the part of each of the flags
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in first:
            part = first[name]
            word = value
            if not equals:
                continue
        elif name.startswith("--"):
            part = []
            parts.append(part)
            if name in names:
                first[name] = part
        part.append(word)
    return list(itertools.chain.from_iterable(parts))


def parse_study(kind: type[Config], argv: Sequence[str] | None = None) -> tuple[Config, list[str]]:
    """A study's own flags, and the other words of the command line: flags of train.py."""
    prog = f"python -m lab.studies.{kind.__name__.lower()}"
    return read_flags(kind, argv, prog=prog, return_unknown_args=True)


def refuse_flags(given: Sequence[str], refused: str, reason: str) -> None:
    """Raise BadInput for given flags of train.py that a study has no use for."""
    for name in refused.split():
        if name in given:
            raise BadInput(f"{flag(name)}: {reason}; leave it out")


def rank_of_torchrun() -> int | None:
    """This process's rank, if torchrun or `harness.fsdp.launch` started it."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def parse_train(argv: Sequence[str] | None = None) -> TrainConfig:
    """The flags of a run; `harness.command.resolve` has what follows from them."""
    return read_flags(TrainConfig, argv, prog="python train.py", default=preset(argv))


def refuse_other_settings(
    asked: Mapping[str, object], saved: Mapping[str, object], whose: str, remedy: str
) -> None:
    """Raise BadInput if a setting that is asked for differs from the `saved` one of a folder.

    `whose` and `remedy` are parts of the message.
    """
    for name, value in asked.items():
        if value != saved.get(name):
            raise BadInput(f"{flag(name)} {value}: {whose} {saved.get(name)}; {remedy}")


# ---- settings by the names of their flags --------------------------------------------------------


def flag(name: str) -> str:
    """The command-line spelling of a setting's name."""
    return "--" + name.replace("_", "-")


def flat(config: "DataclassInstance") -> dict[str, Any]:
    """Every setting of a configuration by its name, without the parts."""
    values: dict[str, object] = {}
    for name, value in dataclasses.asdict(config).items():
        values.update(value if isinstance(value, dict) else {name: value})
    return values


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """The configuration with other values of some settings, whatever part they stand in."""
    changes: dict[str, object] = {}
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changes[name] = with_values(value, values)
        elif name in values:
            changes[name] = values[name]
    return replace(config, **changes)


def spell(name: str, value: object) -> list[str]:
    """A flag and its value as one would type them; nothing where the flag would not be given."""
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no_{name}")]
    if isinstance(value, tuple):
        return [flag(name), *map(str, value)] if value else []
    return [] if value is None else [flag(name), str(value)]
