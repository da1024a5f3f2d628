"""The settings of credit, two parts of `harness.config.Config`.

Defaults are the paper's (Sec. 5.2 of arXiv 2604.23318); `docs/recipe.md` has the reasons. A comment
beside or above a field is its flag's help. This file imports no torch, so that `--help` answers at
once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import UseAppendAction

from tasks.plug import entries_in, source_of


@dataclass(frozen=True)
class Credit:
    """How a response's advantage is distributed over its tokens."""

    # Credit rule: shear, grpo, one that `python -m lab.rules` lists, or one of your own (--use).
    method: str = "shear"
    method_option: UseAppendAction[tuple[str, ...]] = ()  # NAME=VALUE, an option of the rule.


def method_names(modules: Sequence[str] = ()) -> list[str]:
    """The names of the rules of core and lab, and of these modules of --use; raises BadInput."""
    root = Path(__file__).parent.parent
    paths = [root / "credit/rules.py", *sorted((root / "lab/rules").glob("*.py"))]
    paths += map(source_of, modules)
    names = []
    for path in paths:
        names += entries_in(path)
    return names


@dataclass(frozen=True)
class Shear:
    """SHEAR's spans and their distances."""

    window: int = 100  # Span length w in tokens; much shorter than a response.
    stride: int = 25  # Tokens between the starts of neighbouring spans, s.
    eps: float = 0.05  # Entropic regularisation, in the unit of --eps-unit.
    # Unit of --eps: nbar, the group's mean hidden-state norm; raw, the distances' unit.
    eps_unit: Literal["nbar", "raw"] = "nbar"
    max_iters: int = 100  # Maximum number of Sinkhorn iterations.
    tol: float = 1e-3  # Marginal error at which Sinkhorn stops for a pair of spans.

    def eps_over(self, nbar: float) -> float:
        """eps in units of nbar: W_eps(C) / nbar = W_{eps / nbar}(C / nbar)."""
        return self.eps if self.eps_unit == "nbar" else self.eps / nbar
