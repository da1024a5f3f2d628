"""Credit: the one door from rollout advantages A (B,) to token advantages (B, T).

    credit("grpo", batch)  ->  A_i on every token
    credit("shear", batch) ->  A_i * omega_t, Alg. 1 line 18

To add a method, write one function that takes a `Batch` and its options, returns token advantages (B, T), and
enter it in METHODS. `train.py` has no other line in which methods differ. What a method wants logged it puts
into `batch.stats`, a number a name.

Below the door are the measures of where credit went, the same for every method: `effective_weights`, and
`localisation`, which needs a task whose true first error is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from grpo import Rollouts, Scored
from shear import shear_advantages


@dataclass(frozen=True)
class Batch:
    """Everything a method may look at; rollouts of a group are adjacent."""

    advantages: Tensor  # (B,) float32, Eq. (1)
    rewards: Tensor  # (B,) float32, NaN where there is no verdict
    rollouts: Rollouts  # ids, mask (B, T); the mask is empty where there is no verdict
    scored: Scored  # logp, entropies (B, T), hidden (B, T, d) on the CPU
    group_size: int
    stats: dict[str, float] = field(default_factory=dict)

    @classmethod
    def cat(cls, parts: Sequence["Batch"]) -> "Batch":
        """The batches of several ranks as one; what they logged is averaged."""
        names = sorted({name for part in parts for name in part.stats})
        known = {name: [part.stats[name] for part in parts if name in part.stats] for name in names}
        return cls(
            torch.cat([part.advantages for part in parts]),
            torch.cat([part.rewards for part in parts]),
            Rollouts.cat([part.rollouts for part in parts]),
            Scored.cat([part.scored for part in parts]),
            parts[0].group_size,
            {name: sum(values) / len(values) for name, values in known.items()},
        )

    @property
    def correct(self) -> Tensor:
        """(B,) bool, the right rollouts."""
        return self.rewards > 0.5


def grpo(batch: Batch) -> Tensor:
    """Every token gets its rollout's advantage (Shao et al. 2024, arXiv 2402.03300)."""
    return batch.advantages[:, None].expand(batch.rollouts.mask.shape)


def shear(batch: Batch, **options) -> Tensor:
    """SHEAR, Algorithm 1 of arXiv 2604.23318; `options` are those of `shear.shear_weights`."""
    solved = []
    mask, hidden = batch.rollouts.mask, batch.scored.hidden
    token_advantages = shear_advantages(
        batch.advantages, hidden, mask, batch.correct, batch.group_size, stats=solved, **options
    )
    if solved:
        for name in ("iterations", "error"):
            batch.stats[f"sinkhorn_{name}"] = torch.cat([group[name] for group in solved]).float().mean().item()
    return token_advantages


METHODS = {"grpo": grpo, "shear": shear}
USES_HIDDEN = {"shear"}  # methods that read `scored.hidden`; for the others it is not kept


def credit(method: str, batch: Batch, options: dict[str, dict]) -> Tensor:
    """Token advantages (B, T) of a method; `options` holds each method's own, by name."""
    return METHODS[method](batch, **options.get(method, {}))


def effective_weights(token_advantages: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(B, T): what each token's advantage was multiplied by; 1 where A = 0, 0 where the mask is 0."""
    scale = advantages[:, None]
    return torch.where(scale != 0, token_advantages / scale, 1.0) * mask


def localisation(weights: Tensor, mask: Tensor, first_error: Tensor) -> dict[str, float] | None:
    """How well token weights (B, T) tell tokens before the true first error from those at or after it.

    first_error (B,) int64 is the first token of the wrong step, -1 for rollouts that do not count (SHEAR:
    right ones, and those of groups that are not mixed). AUC 0.5 is chance, 1 a perfect order. `auc` pools all
    tokens; `auc_rollout` is the mean over rollouts that have tokens on both sides; `auc_position` is what the
    token's position alone achieves, and any weight should be read beside it. None where no rollout has both.
    """
    position = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    counts = mask & (first_error >= 0)[:, None]  # (B, T)
    after = position >= first_error[:, None]  # (B, T)
    each = [_auc(weights[row][counts[row]], after[row][counts[row]]) for row in (first_error >= 0).nonzero().flatten()]
    known = [auc for auc in each if auc is not None]
    if not known:
        return None
    return {
        "auc": _auc(weights[counts], after[counts]),
        "auc_rollout": sum(known) / len(known),
        "auc_position": _auc(position[counts].float(), after[counts]),
        "weight_before": weights[counts & ~after].mean().item(),
        "weight_after": weights[counts & after].mean().item(),
        "rollouts": len(known),
    }


def _auc(values: Tensor, positive: Tensor) -> float | None:
    """Chance that a positive's value exceeds a negative's, ties counting half; None if a side is empty."""
    high, low = values[positive].cpu().numpy(), values[~positive].cpu().numpy()
    if not len(high) or not len(low):
        return None
    return float(mannwhitneyu(high, low, method="asymptotic").statistic / (len(high) * len(low)))
