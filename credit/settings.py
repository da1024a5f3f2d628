"""The settings of credit, and the types of all flags, whose bounds are checked while parsing.

    Credit, Shear        two parts of a run's configuration (`harness/config.py`)
    number, several, ... what tyro makes of a flag's text

Defaults are the paper's (Sec. 5.2 of arXiv 2604.23318); `docs/recipe.md` has the reasons. This file
imports no torch, so that `--help` answers at once.
"""

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from credit.table import LARGE, METHODS, read_number
from tasks.rows import SURROGATE


def number(kind: type, low: float, high: float = LARGE) -> PrimitiveConstructorSpec:
    """The type of a flag that takes such a number."""
    return spec(kind.__name__.upper(), lambda text: read_number(kind, low, high, text))


def word(text: str) -> str:
    """A text that can name a file. An empty one is most often a shell's variable that is not
    set.
    """
    if not text:
        raise ValueError("is empty; give a value, or leave the flag out")
    if SURROGATE.search(text):
        raise ValueError("is not UTF-8, which files of a run hold; rename it")
    if re.search(rb"[^/]{256}", os.fsencode(text)):
        raise ValueError("is longer than a file's name may be; shorten it")
    return text


def one_of(choices: Collection[str]) -> Callable[[str], str]:
    """What reads one of some words."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return read


def spec(metavar: str, read: Callable[[str], object]) -> PrimitiveConstructorSpec:
    """The type of a flag whose one value `read` makes of its text; None where it is not given."""

    def instance_from_str(words: list[str]) -> object:
        try:
            return read(words[0])
        except ValueError as error:
            raise ValueError(f"{words[0][:40]!r} {error}") from error

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=instance_from_str,
        is_instance=lambda value: True,  # defaults are typed here, by mypy
        str_from_instance=lambda value: [str(value)],
    )


def several(one: PrimitiveConstructorSpec) -> PrimitiveConstructorSpec:
    """The type of a flag with at least one value, each of the type `one`."""

    def read(words: list[str]) -> tuple:
        if not words:
            raise ValueError("is empty; give a value, or leave the flag out")
        return tuple(one.instance_from_str([text]) for text in words)

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{one.metavar} [{one.metavar} ...]",
        instance_from_str=read,
        is_instance=lambda value: True,
        str_from_instance=lambda values: [str(value) for value in values],
    )


Count = Annotated[int, number(int, 1, 10**6)]
Natural = Annotated[int, number(int, 0, 10**6)]
Positive = Annotated[float, number(float, 1e-30)]
NotNegative = Annotated[float, number(float, 0)]
OptionalText = Annotated[str | None, spec("TEXT", word)]
MethodName = Annotated[str, spec("NAME", one_of(METHODS))]
METHODS_HELP = "\n".join(
    ["Credit-assignment method:", *(f"{name}: {entry.about}." for name, entry in METHODS.items())]
)


def options_help() -> str:
    """The options of all methods, a line each."""
    lines = ["NAME=VALUE, an option of the method; repeatable:"]
    for name, method in METHODS.items():
        for option, entry in method.options.items():
            lines.append(f"{name} {option}={entry.default}: {entry.about}.")
    return "\n".join(lines)


@dataclass(frozen=True)
class Credit:
    """How a rollout's advantage is spread over its tokens."""

    method: Annotated[MethodName, tyro.conf.arg(help=METHODS_HELP)] = "shear"
    method_option: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(help=options_help())
    ] = ()
    negative_scale: NotNegative = 1.0
    """Factor on the advantages of wrong rollouts."""
    rescale: Literal["none", "mean1"] = "none"
    """mean1: divide a group's weights by their mean."""
    lora_rank: Annotated[int, number(int, 0, 4096)] = 0
    """Rank of a LoRA adapter to train; 0: train the whole model."""
    prm: OptionalText = None
    """Process reward model of prm and pure; embedded: if not given, a tiny one is taught."""


@dataclass(frozen=True)
class Shear:
    """SHEAR's spans and their distances."""

    window: Count = 100
    """Span length w, tokens."""
    stride: Count = 25
    """Distance s between span starts, tokens."""
    eps: Positive = 0.05
    """Entropic regularisation, in the unit of --eps-unit."""
    eps_unit: Literal["nbar", "raw"] = "nbar"
    """nbar: the group's mean hidden-state norm. raw: the unit of the distances."""
    max_iters: Count = 100
    """Sinkhorn iterations at most."""
    tol: Positive = 1e-3
    """Marginal error at which a pair of spans stops."""

    def eps_over(self, nbar: float) -> float:
        """eps in units of nbar: W_eps(C) / nbar = W_{eps / nbar}(C / nbar)."""
        return self.eps if self.eps_unit == "nbar" else self.eps / nbar
