"""Credit that only balances right and wrong rollouts."""

from torch import Tensor

from credit.batch import Batch, Context
from credit.rules import rule


@rule("signbalance", "1 in right rollouts, and in wrong ones what makes the group sum to 0")
def signbalance(batch: Batch, context: Context) -> Tensor:
    """A_t = 1 in right rollouts, -n+ / n- in wrong ones: SignBalance (arXiv 2609.04063).

    The group has n+ right and n- wrong rollouts. Meant for answers of few values, where a guess can
    be right. Computed as A / A+, where A+ is the right rollouts' A; for verdicts of 0 and 1 that is
    the same. So it rescales groups, not tokens. Inferred: a group of equal verdicts gets nothing.
    """
    advantages = batch.advantages.view(-1, batch.group_size)  # (groups, G)
    of_right = advantages.amax(1, keepdim=True).clamp_min(1e-8)
    return (advantages / of_right).view(-1, 1).expand(batch.mask.shape)
