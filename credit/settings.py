"""The settings of credit: two parts of a run's configuration (`harness/config.py`).

Defaults are the paper's (Sec. 5.2 of arXiv 2604.23318); `docs/recipe.md` has the reasons. This file
imports no torch, so that `--help` answers at once.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from tasks.settings import Count, Positive, several, spec


@dataclass(frozen=True)
class Credit:
    """How a response's advantage is distributed over its tokens."""

    method: Annotated[str, spec("NAME", str)] = "shear"
    """Credit rule: shear, grpo, or one that `python -m lab.rules` lists."""
    method_option: Annotated[tuple[str, ...], several(spec("NAME=VALUE", str))] = ()
    """NAME=VALUE, an option of the rule (repeatable)."""


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
