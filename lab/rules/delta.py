"""Credit by how well a token tells right from wrong rollouts."""

import torch
from torch import Tensor

from credit.batch import Batch, Context
from credit.measures import group_moments
from credit.rules import rule


@rule("delta", "more credit for tokens that tell right from wrong rollouts", needs_states=True)
def delta(batch: Batch, context: Context, *, low: float = 0.8, high: float = 1.2) -> Tensor:
    """A_t = A lambda_t / mean lambda, lambda_t in [low, high]: DelTA (arXiv 2605.21467).

    v_t = (1 - pi(y_t)) h_t, h_t the state that predicts y_t, stands for the gradient of log
    pi(y_t). lambda_t grows with how much closer v_t lies to the mean of its own side than to the
    other's (`nearer_own`). Deviates: a side is one of a group, theirs of all prompts of a shard; a
    response's first token, whose h is the prompt's, has the middle of [low, high].
    """
    own = torch.full_like(batch.log_probs, 0.5)  # (B, T)
    for group, hidden, mask, correct in batch.groups():
        later = mask.clone()  # (G, T) all n tokens but the first
        later[:, 0] = False
        states = hidden.roll(1, 1)[later].float()  # (n, d) of the tokens before them
        vectors = (1 - batch.log_probs[group][later].exp())[:, None] * states  # (n, d)
        right = correct[:, None].expand_as(later)[later]  # (n,)
        if right.any() and not right.all():
            own[group][later] = nearer_own(vectors, right)
    omega = low + (high - low) * own
    return batch.A * omega / group_moments(omega, batch.mask, batch.group_size)[0]


def nearer_own(vectors: Tensor, right: Tensor) -> Tensor:
    """sigmoid(margin / its std), (n,): how much closer a vector is to the mean of its own side.

    Vectors are (n, d), `right` (n,) their sides. The margins are computed once more with the
    vectors weighted by the result, but divided by the first margins' std, as in DelTA's code.
    """
    vectors = vectors.double()  # if the sides are alike, float32 rounding would decide the margins

    def margins(weights: Tensor) -> Tensor:
        """||v - of_wrong||^2 - ||v - of_right||^2, (n,); negated for vectors of wrong rollouts.

        `weights` (n,) are those of the vectors in their side's mean.
        """
        # (d,) each
        of_right, of_wrong = (
            side @ vectors / side.sum() for side in (weights * right, weights * ~right)
        )
        margin = 2 * (vectors - (of_right + of_wrong) / 2) @ (of_right - of_wrong)
        return torch.where(right, margin, -margin)

    first = margins(torch.ones_like(vectors[:, 0]))
    std = torch.where(right, first[right].std(correction=0), first[~right].std(correction=0))
    std = std.clamp_min(1e-4)
    return torch.sigmoid(margins(torch.sigmoid(first / std)) / std).float()
