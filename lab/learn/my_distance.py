"""Another distance of two spans: the mean distance of their tokens, in place of Sinkhorn's.

python train.py --use lab.learn.my_distance --method my_distance
"""

from torch import Tensor

from credit.batch import Batch, Context
from credit.rules import rule, shear


def mean_distance(costs: Tensor, a: Tensor, b: Tensor, eps: float) -> Tensor:
    """Of P pairs of spans: costs (P, n, m), masses (P, n) and (P, m) -> their distances (P,)."""
    return (a[:, :, None] * costs * b[:, None, :]).sum((1, 2))


@rule("my_distance", "shear, but by the mean distance of two spans' tokens", needs_states=True)
def my_distance(batch: Batch, context: Context) -> Tensor:
    """A_t = A omega_t, with the distance above."""
    return shear(batch, context, measure=mean_distance)
