"""Credit by the entropy of the policy or the likelihood of the token: no further pass."""

import torch
from torch import Tensor

from credit.batch import Batch, Context
from credit.rules import rule
from lab.tools.moments import standardise


@rule("entropy", "more credit where the policy was unsure")
def entropy_credit(
    batch: Batch, context: Context, *, alpha: float = 0.4, kappa: float = 2.0
) -> Tensor:
    """A_t = A + min(alpha H_t, |A| / kappa), H_t in nats (Cheng et al. 2025, arXiv 2506.14758).

    Rewards grow and penalties shrink where the policy was unsure. The default alpha is the source's
    for GRPO. Deviates: the source takes H_t from the forward pass of each update; here it is
    computed once for all updates, from the distribution that the rollout was sampled from.
    """
    return batch.A + torch.minimum(alpha * batch.entropies, batch.A.abs() / kappa)


@rule("hapo", "more credit where the policy was unsure, by standardised entropy")
def hapo(batch: Batch, context: Context, *, alpha: float = 0.2, phi: float = 2.0) -> Tensor:
    """A_t = A + alpha sign(A) clip((H_t - mu) / sigma, -|A| / phi, |A| / phi): HAPO (2604.11056).

    mu and sigma are the mean and standard deviation of the entropies of the group's tokens. These
    are Eqs. (6) and (7) of version 1, which calls the method EAPO; version 2, HAPO, may differ.
    """
    bound = batch.A.abs() / phi  # (B, 1)
    z = standardise(batch.entropies, batch.mask, batch.group_size)  # (B, T)
    return batch.A + alpha * batch.A.sign() * z.clamp(-bound, bound)
