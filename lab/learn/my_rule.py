"""Another rule of credit: more on tokens that the policy itself finds unlikely.

python train.py --use lab.learn.my_rule --method my_rule --method-option floor=0.1
"""

from torch import Tensor

from credit.batch import Batch, Context
from credit.rules import rule


@rule("my_rule", "more on tokens that the policy finds unlikely")
def my_rule(batch: Batch, context: Context, *, floor: float = 0.01) -> Tensor:
    """A_t = A w_t; w_t is in proportion to -log pi(y_t) + floor, with mean 1 in each rollout."""
    salience = (floor - batch.log_probs) * batch.mask  # (B, T)
    return batch.A * salience * batch.lengths / salience.sum(1, keepdim=True)
