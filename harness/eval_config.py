"""Every setting of `eval.py`, as `harness/config.py` has those of `train.py`; without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import tyro

from harness.config import Machine, Seeds, Texts, read_flags
from tasks.errors import BadInput
from tasks.settings import (
    Count,
    Natural,
    OptionalText,
    Sandbox,
    Seconds,
    Template,
    number,
)

BENCH_HELP = (
    "heldout or embedded (what the model's run held out), math (aime24, aime25, amc23, math500, "
    "olympiadbench), code (humaneval, humaneval+, mbpp, mbpp+, livecodebench), or some of these by "
    "name; default: what the model's run held out, otherwise math."
)


@dataclass(frozen=True)
class Protocol:
    """Sampling and grading of responses; the defaults are the paper's."""

    temperature: Annotated[float, number(float, 0, 1e3)] = 0.1
    """Sampling temperature; 0: greedy."""
    max_tokens: Count = 3000
    """Maximum response length in tokens."""
    samples: Natural = 0
    """Responses per problem; 0: the paper's k for the benchmark."""
    template: Template = "auto"
    """Prompt template, as in train.py; auto: for a model of a run that of the run."""
    block: Count = 128
    """Number of responses that are sampled, graded and saved together."""
    grade_timeout: Seconds = None
    """Time limit per response in seconds; default: the benchmark's."""
    sandbox: Sandbox = "auto"
    """Sandbox for generated programs."""


@dataclass(frozen=True)
class Embedded:
    """Problems of the embedded task; default: those of the run that trained the model."""

    toy_lines: Annotated[int | None, number(int, 1, 26)] = None
    """Definitions per problem."""
    heldout: Annotated[int | None, number(int, 1, 10**5)] = None
    """Number of problems."""
    seed: Annotated[int | None, number(int, 0, 2**32 - 1), tyro.conf.arg(name="toy-seed")] = None
    """Seed that makes the problems."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluate models on the paper's benchmarks."""

    model: Texts = ()
    """Hugging Face folders, hub ids, or runs of train.py, whose last model is evaluated."""
    bench: Annotated[Texts, tyro.conf.arg(help=BENCH_HELP)] = ()
    data: Texts = ()
    """NAME=FILE: a local file for a benchmark; repeat the name for several files."""
    out: OptionalText = None
    """Folder for generations and tables; default: evals/, then models and benchmarks by name."""
    saved: Annotated[OptionalText, tyro.conf.arg(name="from")] = None
    """Instead of --model: print the tables of the generations in this folder."""
    use: Texts = ()
    """MODULE[:NAME=VALUE,...] whose `use` replaces how responses are generated."""
    greedy: bool = False
    """Use temperature 0 and one response per problem."""
    seeds: Seeds = (0,)
    """Seeds; with several, also print mean and standard deviation over them."""
    protocol: Protocol = Protocol()
    embedded: Embedded = Embedded()
    machine: Machine = field(default_factory=Machine)


def parse_eval(argv: Sequence[str] | None = None) -> EvalConfig:
    """The flags of an evaluation."""
    return read_flags(EvalConfig, argv, prog="python eval.py")


def check_eval(config: EvalConfig) -> EvalConfig:
    """The configuration with --greedy resolved.

    Raises BadInput for flags that exclude each other, and for a seed given twice.
    """
    if bool(config.model) == bool(config.saved):
        raise BadInput("give --model or --from")
    if len(set(config.seeds)) < len(config.seeds):
        seeds = " ".join(map(str, config.seeds))
        raise BadInput(f"--seeds {seeds}: must be different; change them")
    if not config.greedy:
        return config
    return replace(config, protocol=replace(config.protocol, temperature=0.0, samples=1))
