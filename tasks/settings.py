"""The settings of tasks, and the types of all flags, which check their bounds while parsing.

    TASKS                the properties of each task, as far as flags depend on them
    Problems, Grading    two parts of a run's configuration (`harness/config.py`)
    number, several, ... specifications from which tyro reads a flag's text

This file imports no torch, so that `--help` answers at once.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, TypeVar

from tyro.constructors import PrimitiveConstructorSpec

Number = TypeVar("Number", bound=float)
LARGE = 1e30


@dataclass(frozen=True)
class Kind:
    """The properties of a task, which --task names."""

    about: str = ""  # a sentence for a run's page
    makes_model: bool = False  # unless --model is given; full responses have a known length
    makes_problems: bool = False
    # MODULE:FUNCTION of (settings, grading, seed, tokenizer, model's name) -> the task and notes
    make: str = "tasks.problems:math"


TASKS = {
    "embedded": Kind(
        "The task: little programs, worked out line by line; all arithmetic is mod 10, so 7*4=8.",
        makes_model=True,
        makes_problems=True,
        make="tasks.toy:task",
    ),
    "math": Kind(),
    "code": Kind(make="tasks.problems:code"),
    "own": Kind(),  # math, with sizes for a small model on a CPU
}


def read_number(kind: type[Number], low: float, high: float, text: str) -> Number:
    """The number in a text.

    Raises ValueError with the type or the bounds that it must have.
    """
    try:
        value = kind(text)
    except ValueError as error:
        raise ValueError(f"must be of type {kind.__name__}") from error
    if not low <= value <= high:  # no comparison with NaN holds
        raise ValueError(f"must be from {low} to {high}")
    return value


def number(kind: type, low: float, high: float = LARGE) -> PrimitiveConstructorSpec:
    """The type of a flag that takes a number within bounds."""
    return spec(kind.__name__.upper(), partial(read_number, kind, low, high))


def one_of(choices: Collection[str]) -> Callable[[str], str]:
    """A function that returns its text if it is one of the choices, else raises ValueError."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return read


def spec(metavar: str, read: Callable[[str], object]) -> PrimitiveConstructorSpec:
    """The type of a flag with one value, which `read` converts from its text.

    An empty text is refused: it mostly comes from an unset shell variable.
    """

    def instance_from_str(words: list[str]) -> object:
        if not any(words):
            raise ValueError("'' is empty; give a value, or leave the flag out")
        try:
            words[0].encode()  # raises for what is not UTF-8, which files of a run hold
            return read(words[0])
        except ValueError as error:
            raise ValueError(f"{words[0][:40]!r} {error}") from error

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=instance_from_str,
        is_instance=lambda value: True,  # mypy checks the defaults
        str_from_instance=lambda value: [str(value)],
    )


def several(one: PrimitiveConstructorSpec) -> PrimitiveConstructorSpec:
    """The type of a flag with at least one value, each of the type `one`."""

    def read(words: list[str]) -> tuple:
        one.instance_from_str(words)  # raises where there is none
        return tuple(one.instance_from_str([text]) for text in words)

    return replace(
        one,
        nargs="*",
        metavar=f"{one.metavar} [{one.metavar} ...]",
        instance_from_str=read,
        str_from_instance=lambda values: [str(value) for value in values],
    )


Count = Annotated[int, number(int, 1, 10**6)]
Natural = Annotated[int, number(int, 0, 10**6)]
Positive = Annotated[float, number(float, 1e-30)]
OptionalText = Annotated[str | None, spec("TEXT", str)]
SetSize = Annotated[int, number(int, 1, 10**5)]
Seconds = Annotated[float | None, number(float, 1e-3, 86_400)]  # a day at most
Template = Literal["auto", "qwen-math", "chat", "plain"]
Sandbox = Literal["auto", "strict", "process"]  # `grading.sandbox.LEVELS`


@dataclass(frozen=True)
class Problems:
    """Problems for training, and held-out problems."""

    data: OptionalText = None
    """Your own problems, a file or folder; default: the paper's training set, from the hub."""
    template: Template = "auto"
    """Prompt template; auto: qwen-math for Qwen2.5-Math, otherwise the tokenizer's chat template,
    otherwise plain.
    """
    heldout: SetSize = 64
    """Number of problems held out of training; each is answered greedily."""
    toy_lines: Annotated[int, number(int, 1, 26)] = 5
    """Toy task: definitions per problem. Above 8, with rarer mistakes and a larger vocabulary."""
    toy_width: Annotated[int, number(int, 8, 4096)] = 128
    """Toy task: hidden size of the model that is made."""
    warmup_steps: Natural = 0
    """Supervised steps before training, on error-prone demonstrations (embedded), or those of
    `--use lab.tools.warm_up`; 0: none.
    """


@dataclass(frozen=True)
class Grading:
    """Grading of responses."""

    grade_timeout: Seconds = None
    """Time limit per response in seconds; default: 5 (math), 10 (code)."""
    sandbox: Sandbox = "auto"
    """Sandbox for generated programs; auto: the strongest that works here."""
    reward: OptionalText = None
    """Your own reward, FILE.py:FUNCTION or MODULE:FUNCTION; benchmarks keep their graders."""
