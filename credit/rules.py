"""Credit rules: from advantages A (B,) to token advantages (B, T). Here the methods differ.

    with_options(Credit("shear"))        -> the Rule of --method and --method-option
    assign_credit(rule, batch, context)  -> A_i on every token (grpo), or A_i omega_t (shear,
                                            Alg. 1 line 18 of 2604.23318)
    @rule(name, about)                   enters a function: `--method` takes its name

A rule is one function of a `credit.batch.Batch` and its `Context`. Its keyword arguments, each with
a default, are its options (`--method-option NAME=VALUE`). It may run further forward passes, and
logs metrics with `batch.log`. Token advantages are detached: weights are constants for autograd.

Left out: all other rules, which are in `lab/rules/`, one file a family.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from base.config import Credit
from base.errors import BadInput
from base.options import look_up, options_of
from credit.batch import NOT_SCORED, Batch, Context
from shear import Weighed, shear_advantages, shear_weights
from sinkhorn import take_counts


class Rule(NamedTuple):
    """A credit rule, and what a step has to know of it."""

    credit: Callable[..., Tensor]  # (batch, context, **options) -> token advantages (B, T)
    about: str
    needs_states: bool = False  # the last layer's hidden states are kept for it
    weighs: bool = True  # it multiplies A by weights >= 0, so signs stay
    # (loaded, folder, **options): before the first step; it may load something, make it in the
    # run's folder, or raise BadInput
    prepare: Callable[..., None] | None = None


RULES: dict[str, Rule] = {}


def rule(name: str, about: str, **facts: Any) -> Callable:
    """Enter a function in RULES under a name, with a sentence and the `facts` of `Rule`.

    Raises BadInput for a name that another rule has.
    """

    def enter(credit: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if name in RULES:
            raise BadInput(f'rule("{name}"): another rule has this name; change it')
        RULES[name] = Rule(credit, about, **facts)
        return credit

    return enter


def find(name: str, modules: Sequence[str] = ()) -> Rule:
    """The rule of a name, here, in these modules of --use or in the lab; raises BadInput."""
    return look_up(RULES, "rules", "--method", name, modules)


def with_options(credit: Credit, modules: Sequence[str] = ()) -> Rule:
    """The rule of --method, its functions bound to the options given; raises BadInput."""
    rule = find(credit.method, modules)
    options = options_of(rule.credit, credit.method_option, f"--method {credit.method}")
    prepare = partial(rule.prepare, **options) if rule.prepare else None
    return rule._replace(credit=partial(rule.credit, **options), prepare=prepare)


def assign_credit(rule: Rule, batch: Batch, context: Context) -> Tensor:
    """Token advantages (B, T) of a rule, 0 outside of the mask."""
    token_advantages = rule.credit(batch, context)  # (B, T)
    return torch.where(batch.mask, token_advantages.detach(), 0.0)


@rule("grpo", "every token gets its rollout's advantage")
def grpo(batch: Batch, context: Context) -> Tensor:
    """A_t = A, the rollout's advantage on every token (Shao et al. 2024, arXiv 2402.03300)."""
    return batch.A.expand(batch.mask.shape)


@rule(
    "shear",
    "weights are distances to the closest span of the opposite outcome",
    needs_states=True,
)
def shear(batch: Batch, context: Context, **hooks: Callable) -> Tensor:
    """A_t = A omega_t: SHEAR, Algorithm 1 of arXiv 2604.23318.

    `hooks` are those of `shear.shear_weights`: another `measure`, `pool`, `cost` or `closest`.
    """
    omega = []
    for _, states, mask, correct in batch.groups():
        weighed = weigh(context, states, mask, correct, **hooks)  # Alg. 1 lines 1-16
        omega.append(weighed.omega)  # (G, T)
        batch.weighed.append(weighed._replace(omega=NOT_SCORED))  # for samples.jsonl
        log_distances(batch, context, weighed, mask)
    return shear_advantages(batch.advantages, torch.cat(omega))  # Alg. 1 line 18, Step 4


def weigh(
    context: Context, states: Tensor, mask: Tensor, correct: Tensor, **hooks: Callable
) -> Weighed:
    """`shear.shear_weights` of a group, with the run's settings, and its hooks or other `hooks`."""
    settings = context.shear
    own: dict[str, Any] = context.hooks | hooks
    return shear_weights(
        states,
        mask,
        correct,
        window=settings.window,
        stride=settings.stride,
        eps=settings.eps,
        eps_unit=settings.eps_unit,
        **own,
    )


def log_distances(batch: Batch, context: Context, weighed: Weighed, mask: Tensor) -> None:
    """Log nbar, eps in its units, and the share of pairs that the solver left above tolerance."""
    if not mask.any():  # no rollout of the group has a verdict
        return
    batch.log("nbar", torch.tensor(weighed.nbar))
    batch.log("eps_over_nbar", torch.tensor(context.shear.eps_over(weighed.nbar)))
    unconverged, solved = take_counts()
    if solved:
        batch.add("unconverged", np.array([unconverged, solved]))
