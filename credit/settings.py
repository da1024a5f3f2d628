"""The settings of credit: two parts of a run's configuration (`harness/config.py`).

Defaults are the paper's (Sec. 5.2 of arXiv 2604.23318); `docs/recipe.md` has the reasons. This file
imports no torch, so that `--help` answers at once.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from credit.table import METHODS, Method, options_of
from tasks.settings import Count, OptionalText, Positive, number, one_of, several, spec

MethodName = Annotated[str, spec("NAME", one_of(METHODS))]
METHODS_HELP = "\n".join(
    ["Credit-assignment method:", *(f"{name}: {entry.about}." for name, entry in METHODS.items())]
)


def options_help() -> str:
    """The options of all methods, a line each."""
    lines = ["NAME=VALUE, an option of the method (repeatable), here with its default:"]
    for name, method in METHODS.items():
        for option, entry in method.options.items():
            values = f" ({', '.join(entry.choices)})" if entry.choices else ""
            lines.append(f"{name} {option}={entry.default}: {entry.about}{values}.")
    return "\n".join(lines)


@dataclass(frozen=True)
class Credit:
    """How a response's advantage is distributed over its tokens."""

    method: Annotated[MethodName, tyro.conf.arg(help=METHODS_HELP)] = "shear"
    method_option: Annotated[
        tuple[str, ...], several(spec("NAME=VALUE", str)), tyro.conf.arg(help=options_help())
    ] = ()
    negative_scale: Annotated[float, number(float, 0)] = 1.0
    """Factor on the advantages of wrong responses."""
    rescale: Literal["none", "mean1"] = "none"
    """Rescaling of the weights; mean1: divide each group's weights by their mean."""
    lora_rank: Annotated[int, number(int, 0, 4096)] = 0
    """Rank of a LoRA adapter to train; 0: train all weights."""
    prm: OptionalText = None
    """Process reward model, if the method needs one; by default embedded trains a tiny one."""

    @property
    def entry(self) -> Method:
        """The method's entry in the table of methods."""
        return METHODS[self.method]

    @property
    def options(self) -> dict[str, float | str]:
        """The method's options: those that are given, and the defaults of the others.

        Raises ValueError for an unknown option or a bad value.
        """
        return options_of(self.method, self.method_option)

    @property
    def has_floor(self) -> bool:
        """Whether the weights are values of Eq. (10), at least eps ln(window) or about it."""
        options = self.options
        return (options.get("reading"), options.get("distance")) == ("value", "w1")


@dataclass(frozen=True)
class Shear:
    """SHEAR's spans and their distances."""

    window: Count = 100
    """Span length w in tokens; much shorter than a response."""
    stride: Count = 25
    """Tokens between the starts of neighbouring spans, s."""
    eps: Positive = 0.05
    """Entropic regularisation, in the unit of --eps-unit."""
    eps_unit: Literal["nbar", "raw"] = "nbar"
    """Unit of --eps: nbar, the group's mean hidden-state norm; raw, the distances' unit."""
    max_iters: Count = 100
    """Maximum number of Sinkhorn iterations."""
    tol: Positive = 1e-3
    """Marginal error at which Sinkhorn stops for a pair of spans."""

    def eps_over(self, nbar: float) -> float:
        """eps in units of nbar: W_eps(C) / nbar = W_{eps / nbar}(C / nbar)."""
        return self.eps if self.eps_unit == "nbar" else self.eps / nbar
