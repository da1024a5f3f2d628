"""Credit by how far a LoRA adapter (`--use lab.tools.lora`) moves the policy."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from credit.batch import Batch, Context
from credit.rules import rule
from lab.tools import salience
from tasks.errors import BadInput

if TYPE_CHECKING:
    from harness.run import Run


def needs_adapter(run: "Run", **options: object) -> None:
    """Raise BadInput without `--use lab.tools.lora`."""
    if not any(text.startswith("lab.tools.lora") for text in run.config.use):
        raise BadInput(
            f"--method {run.config.method}: needs a LoRA adapter; add --use lab.tools.lora:rank=16"
        )


@rule(
    "arca",
    "how far a LoRA adapter moves the token's state",
    needs_states=True,
    prepare=needs_adapter,
)
def arca(batch: Batch, context: Context, *, floor: float = 1e-06) -> Tensor:
    """A_t = A T w_t, w_t in proportion to a_t + floor, a_t = ||h_adapted - h_base||: ARCA.

    Eqs. (8) and (15) of arXiv 2606.00257; w_t sums to 1 over the rollout's T tokens, so T w_t has
    mean 1. h is the last layer's state with the LoRA adapter and without it; an untrained adapter
    (B = 0) gives weight 1. Inferred: the floor, of which the source only says that it is small.
    """
    change = salience.adapter_residual(batch.rollouts, context, batch.states)
    change = (change + floor) * batch.mask  # (B, T)
    total = change.sum(1, keepdim=True).clamp_min(floor)  # (B, 1)
    return batch.A * change * batch.lengths / total


@rule(
    "dgpo",
    "how far a LoRA adapter moves the next token's distribution, gated by entropy",
    prepare=needs_adapter,
)
def dgpo(batch: Batch, context: Context, *, tau: float = 0.5, kappa: float = 1.0) -> Tensor:
    """A_t = A w_t, w_t = T softmax_t(d_t (H_t / log V)^kappa / tau): DGPO (arXiv 2605.03327).

    The softmax is over the rollout's T tokens, so the mean weight is 1. d_t is the squared
    Hellinger distance of the policy's next-token distribution from that of the start, which is the
    model without its LoRA adapter, and V is the size of the vocabulary. At the default tau the
    weights hardly differ until the policy has moved far: read `weight_std` in metrics.jsonl beside
    any result. Formula and defaults are those of two implementations, as the paper's text was not
    found. Inferred: distributions are those of the temperature of sampling. Deviates: weights are
    computed once per step; in the implementations, in each update.
    """
    drift = salience.drift_from_start(batch.rollouts, context)  # (B, T)
    vocabulary = context.policy.model.config.get_text_config().vocab_size
    scores = drift * (batch.entropies / math.log(vocabulary)) ** kappa
    shares = torch.where(batch.mask, scores / tau, -torch.inf).softmax(1)  # (B, T)
    return batch.A * batch.lengths * shares
