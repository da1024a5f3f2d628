"""Credit by the entropy of the policy or the likelihood of the token: no further pass."""

import math

import torch
from torch import Tensor

from credit.batch import Batch, Context
from credit.measures import standardise
from credit.rules import rule


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


@rule("rsi", "credit only for tokens with a relative surprisal within bounds")
def rsi(batch: Batch, context: Context, *, low: float = -6.0, high: float = 0.8) -> Tensor:
    """A_t = A T / (tokens kept) where RSI_t lies in [low, high], 0 elsewhere.

    The relative surprisal index RSI_t = 1 + log pi(y_t) / H_t (arXiv 2606.31575, Eq. (1)) is 1
    where the policy was certain, so such tokens get no credit. The default bounds are the source's
    for 7B; its `high` is .9 for 3B, .95 for 1.5B. H_t is in nats.
    """
    index = 1 + batch.log_probs / batch.entropies  # (B, T), NaN or -inf where H_t is 0
    kept = (index >= low) & (index <= high) & batch.mask  # (B, T)
    return batch.A * kept * batch.lengths / kept.sum(1, keepdim=True).clamp_min(1)


@rule("taco", "less credit for tokens of right rollouts that entropy did not predict")
def taco(batch: Batch, context: Context, *, alpha: float = 0.01, strength: float = 0.9) -> Tensor:
    """A_t = A (1 - strength (1 - exp(-r_t))) where A and r_t are positive, A elsewhere: TACO.

    r_t = -log pi(y_t) - H_t + log alpha (arXiv 2607.07976): tokens of right rollouts that were far
    less likely than entropy expects earn less, down to (1 - strength) A. H_t is in nats. Here log
    pi and H_t are computed once for all updates, by the policy that sampled.
    """
    excess = (math.log(alpha) - batch.log_probs - batch.entropies).clamp_min(0.0)  # r, (B, T)
    earned = 1 - strength * (1 - (-excess).exp())  # (B, T)
    return batch.A * torch.where(batch.A > 0, earned, 1.0)


@rule("gmts", "credit only for tokens of large |A| times entropy")
def gmts(batch: Batch, context: Context, *, kept: float = 0.2) -> Tensor:
    """A_t = A on the share `kept` of the group's tokens whose H_t |A| is largest, 0 elsewhere.

    GMTS (arXiv 2608.30632), which approximates a token's gradient by |E_t omega_t|, omega_t the
    ratio of policies times A. Here the ratio is 1, as at the first update. Inferred: E_t is the
    entropy, and the tokens are ranked within a group.
    """
    size = batch.A.abs() * batch.entropies  # (B, T)
    size = torch.where(batch.mask, size, torch.nan)
    of_groups = size.view(-1, batch.group_size * size.shape[1])  # (groups, G T)
    least = of_groups.nanquantile(1 - kept, dim=1).repeat_interleave(batch.group_size)  # (B,)
    return batch.A * (size >= least[:, None])
