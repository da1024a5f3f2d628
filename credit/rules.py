"""Credit rules: from advantages A (B,) to token advantages (B, T). Here the methods differ.

    assign_credit(batch, context, Credit("grpo"))   ->  A_i on every token
    assign_credit(batch, context, Credit("shear"))  ->  A_i omega_t, Alg. 1 line 18 of 2604.23318
    @rule(name, about)                              enters a function: `--method` takes its name

A rule is one function of a `credit.batch.Batch` and its `Context`. Its keyword arguments, each with
a default, are its options (`--method-option NAME=VALUE`). It may run further forward passes, and
logs metrics with `batch.log`. Token advantages are detached: weights are constants for autograd.

Left out: all other rules, which are in `lab/rules/`, one file a family.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credit.batch import Batch, Context
from credit.settings import Credit
from shear import Weighed, closest_spans, shear_advantages, shear_weights
from tasks.errors import BadInput
from tasks.plug import look_up, options_of


class Rule(NamedTuple):
    """A credit rule, and what a step has to know of it."""

    credit: Callable[..., Tensor]  # (batch, context, **options) -> token advantages (B, T)
    about: str
    needs_states: bool = False  # the last layer's hidden states are kept for it
    weighs: bool = True  # it multiplies A by weights; otherwise its advantages' signs may differ
    drops_uncredited: bool = False  # the loss is a mean over only the rollouts that get credit
    # (run, **options): before the first step; it may load something, or raise BadInput
    prepare: Callable[..., None] | None = None


RULES: dict[str, Rule] = {}


def rule(name: str, about: str, **facts: Any) -> Callable:
    """Enter a function in RULES under a name, with a sentence and the `facts` of `Rule`.

    `credit.settings.method_names` reads the name in the file's text, so it must be written out.
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


def assign_credit(batch: Batch, context: Context, credit: Credit) -> Tensor:
    """Token advantages (B, T) of a rule with its options, 0 outside of the mask."""
    credit_of = find(credit.method).credit
    options = options_of(credit_of, credit.method_option, f"--method {credit.method}")
    token_advantages = credit_of(batch, context, **options)  # (B, T)
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
    """A_t = A omega_t: SHEAR, Algorithm 1 of arXiv 2604.23318, or with other `hooks`."""
    omega = []
    for _, hidden, mask, correct in batch.groups():
        weighed = weigh(context, hidden, mask, correct, **hooks)  # Alg. 1 lines 1-16
        omega.append(weighed.omega)  # (G, T)
        log_distances(batch, context, weighed, mask)
    return shear_advantages(batch.advantages, torch.cat(omega))  # Alg. 1 line 18, Step 4


def weigh(
    context: Context, hidden: Tensor, mask: Tensor, correct: Tensor, **hooks: Callable
) -> Weighed:
    """`shear.shear_weights` of a group, with the run's settings, and its hooks or other `hooks`."""
    settings = context.shear
    others = context.hooks | hooks  # `distances` and `pool`, where they are not shear.py's
    closest = others.pop("closest", closest_spans)
    return shear_weights(
        hidden,
        mask,
        correct,
        window=settings.window,
        stride=settings.stride,
        eps=settings.eps,
        eps_unit=settings.eps_unit,
        closest=partial(closest, max_iters=settings.max_iters, tol=settings.tol),
        **others,
    )


def log_distances(batch: Batch, context: Context, weighed: Weighed, mask: Tensor) -> None:
    """Log nbar, eps in its units, and how well the distances of a group are solved."""
    if not mask.any():  # no rollout of the group has a verdict
        return
    batch.log("nbar", torch.tensor(weighed.nbar))
    batch.log("eps_over_nbar", torch.tensor(context.shear.eps_over(weighed.nbar)))
    closest = weighed.closest
    if closest and closest.iterations is not None and closest.error is not None:
        batch.log("sinkhorn_iterations", closest.iterations)
        batch.log("sinkhorn_error", closest.error)
