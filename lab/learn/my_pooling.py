"""Another pooling: a token takes the smallest distance of the spans that cover it, not the largest.

python train.py --use lab.learn.my_pooling --method my_pooling
"""

from torch import Tensor

from credit.batch import Batch, Context
from credit.rules import rule, shear
from shear import Spans, token_weights


def smallest(distances: Tensor, spans: Spans) -> Tensor:
    """From spans to tokens, (K,) -> (N,), in place of `shear.token_weights`, the largest."""
    return -token_weights(-distances, spans)


@rule("my_pooling", "shear, but with the smallest distance of a token's spans", needs_states=True)
def my_pooling(batch: Batch, context: Context) -> Tensor:
    """A_t = A omega_t, with the pooling above."""
    return shear(batch, context, pool=smallest)
