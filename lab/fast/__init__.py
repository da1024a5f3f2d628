"""The same numbers, sooner: `--use lab.fast`. Each of them has its plain twin in the core.

race         which of the opposing spans is closest, without solving every pair
distances    the costs by one matrix product
packing      micro-batches without padding
generate     sampling that drops rollouts that have ended, and reads a prompt once

`race` and `distances` do not see what is edited in shear.py and sinkhorn.py. So `use` compares them
with the plain functions first, on one small group.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from base.errors import BadInput
from lab.fast.distances import token_distances
from lab.fast.generate import fast_generate
from lab.fast.packing import packing_of
from lab.fast.race import race as race_for_closest
from shear import shear_weights
from sinkhorn import take_counts

if TYPE_CHECKING:
    from harness.run import Hooks

TOLERANCE = 1e-4  # of the weights of `refuse_other_weights`, which differ by 4e-6 and are about 1


def use(
    hooks: "Hooks",
    *,
    race: bool = True,
    distances: bool = True,
    packing: bool = True,
    generate: bool = True,
) -> None:
    """Replace the plain functions of a run by these, all of them or those that are not `no`.

    Raises BadInput if `race` or `distances` would change SHEAR's weights.
    """
    faster: dict[str, Callable] = {}
    if race:
        faster["closest"] = race_for_closest
    if distances:
        faster["cost"] = token_distances
    refuse_other_weights(faster)
    hooks.shear |= faster
    if packing:
        hooks.layout = packing_of
    if generate:
        hooks.generate = fast_generate


def refuse_other_weights(faster: dict[str, Any]) -> None:
    """Raise BadInput if these hooks give a small random group other weights than shear.py does."""
    hidden = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(0))  # (G, T, d)
    mask = torch.arange(16) < torch.tensor([[16], [9], [13], [5]])  # (G, T)
    correct = torch.tensor([True, True, False, False])  # (G,)
    plain = shear_weights(hidden, mask, correct, window=6, stride=3).omega  # (G, T)
    fast = shear_weights(hidden, mask, correct, window=6, stride=3, **faster).omega  # (G, T)
    take_counts()  # these pairs are none of the run's
    if not torch.allclose(fast, plain, rtol=0, atol=TOLERANCE):
        raise BadInput(
            "--use lab.fast: its weights are not those of shear.py and sinkhorn.py as they are now;"
            " leave it out, or edit lab/fast/ as well"
        )
