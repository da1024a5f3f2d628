"""Credit by how widely a token attends."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from credit.batch import Batch, Context
from credit.measures import group_moments, standardise
from credit.rules import rule
from harness.fsdp import layers_of
from lab.tools import salience
from tasks.errors import BadInput

if TYPE_CHECKING:
    from harness.run import Run


def needs_attention(run: "Run", **options: object) -> None:
    """Raise BadInput for a model whose layers have no `self_attn`."""
    layers = layers_of(run.context.policy.model)
    if not all(hasattr(layer, "self_attn") for layer in layers):
        raise BadInput("--method attention: needs layers with self_attn, which the model lacks")


@rule(
    "attention",
    "weights grow from focused tokens to those that attend widely",
    prepare=needs_attention,
)
def attention(batch: Batch, context: Context, *, slope: float = 1.0) -> Tensor:
    """A_t = A omega_t, omega_t moving from focused tokens to wide ones: attention entropy.

    The source (arXiv 2605.07660) names the signal, the middle layer's attention entropy over the
    log of the context's length, and the direction of the shift during training. Inferred, as
    neither weights nor schedule are public: omega is 2 sigmoid(c z), z standardised in the group, c
    rising from -slope to slope over the run, scaled to mean 1 over the group's tokens.
    """
    values = salience.attention_entropy(batch.rollouts, context)  # (B, T)
    pull = slope * (2 * context.step / context.steps - 1)
    omega = 2 * torch.sigmoid(pull * standardise(values, batch.mask, batch.group_size))  # (B, T)
    return batch.A * omega / group_moments(omega, batch.mask, batch.group_size)[0]
