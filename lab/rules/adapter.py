"""Credit by how far a LoRA adapter (`--use lab.tools.lora`) moves the policy."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from base.errors import BadInput
from credit.batch import Batch, Context
from credit.rules import rule
from lab.tools import salience

if TYPE_CHECKING:
    from harness.run import Loaded


def needs_adapter(run: "Loaded", folder: Path, **options: object) -> None:
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
