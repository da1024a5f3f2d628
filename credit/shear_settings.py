"""SHEAR's settings, and the entry that training uses: `shear.shear_weights` with the hooks that the
settings ask for.

    Settings                                           the paper's own by default, and its ablations
    settings_of(shear)                                 from the flags
    group_weights(hidden, mask, correct, settings)     omega (G, T) of one group
    pair_distances(hidden, mask, correct, settings)    the function for the distance of every pair
                                                       of spans
    closest_by_rollout(closest, mask, correct, ...)    of each rollout's spans, which opposing ones
                                                       are closest

The paper's eps is in raw units of distance; `shear_weights` takes it in units of nbar, and so does
`Settings` unless `eps_unit` is "raw".
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from credit import ablations
from credit.settings import Shear
from fast.distances import token_distances
from fast.race import race_matrix
from shear import Spans, mean_norm, shear_weights, span_bounds, token_weights


@dataclass(frozen=True)
class Settings(Shear):
    """The settings of SHEAR and its ablations, with the defaults of `shear_weights`."""

    reading: str = "value"  # of Eq. (10), with the distance "w1"
    distance: str = "w1"  # of two spans
    normalize: str = "group"  # "rollout": every rollout's mean weight becomes the group's
    pool: str = "max"  # over the spans that cover a token

    @property
    def races(self) -> bool:
        """Whether the minima can be found by a race: only the value of W_eps has bounds."""
        return (self.distance, self.reading) == ("w1", "value")


def settings_of(shear: Shear, **options: str) -> Settings:
    """SHEAR's settings, from the flags and the options of the method `shear`."""
    return Settings(**asdict(shear), **options)


class ClosestSpans(NamedTuple):
    """Alg. 1 line 5 of a group: for each span of a side, the closest opposing one and its distance
    over nbar.
    """

    of_right: Tensor  # (K+,)
    right_to: Tensor  # (K+,) int64, which wrong span
    of_wrong: Tensor  # (K-,)
    wrong_to: Tensor  # (K-,) int64, which right span


@torch.no_grad()
def group_weights(
    hidden: Tensor,
    mask: Tensor,
    correct: Tensor,
    settings: Settings,
    stats: dict[str, list] | None = None,
) -> Tensor:
    """Token weights (G, T) float32 of one group; shapes and errors are those of
    `shear.shear_weights`.

    A `defaultdict(list)` given as `stats` receives tensors: "nbar" and "eps_over_nbar" (1,); of a
    group that is solved also "closest", a `ClosestSpans`, "sinkhorn_iterations" (pairs,) and
    "sinkhorn_error" (solved pairs,).
    """
    mask, correct = mask.bool(), correct.bool()
    if not mask.any():
        return mask.float()  # (G, T)
    nbar = mean_norm(hidden[mask])
    eps = settings.eps_over(nbar)
    if stats is not None:
        stats["nbar"].append(torch.tensor([nbar]))
        stats["eps_over_nbar"].append(torch.tensor([eps]))
    distances_of = pair_distances(hidden, mask, correct, settings, stats, race=settings.races)

    def closest(
        costs: Tensor, right_spans: Spans, wrong_spans: Spans, eps: float
    ) -> tuple[Tensor, Tensor]:
        matrix = distances_of(costs, right_spans, wrong_spans, eps)  # (K+, K-)
        of_right, right_to = matrix.min(1)
        of_wrong, wrong_to = matrix.min(0)
        if stats is not None:
            stats["closest"].append(
                ClosestSpans(of_right / nbar, right_to, of_wrong / nbar, wrong_to)
            )
        return of_right, of_wrong

    hooks = dict(distances=token_distances, closest=closest)
    hooks["pool"] = token_weights if settings.pool == "max" else ablations.mean_weights
    omega = shear_weights(
        hidden, mask, correct, window=settings.window, stride=settings.stride, eps=eps, **hooks
    )
    return ablations.evened_out(omega, mask) if settings.normalize == "rollout" else omega


def pair_distances(
    hidden: Tensor,
    mask: Tensor,
    correct: Tensor,
    settings: Settings,
    stats: dict[str, list] | None = None,
    race: bool = False,
) -> Callable[..., Tensor]:
    """The function (costs, right_spans, wrong_spans, eps) -> (K+, K-) of a setting: the distance of
    every pair.

    With `race`, pairs that are no minimum may be infinite.
    """
    limits = dict(max_iters=settings.max_iters, tol=settings.tol, stats=stats)
    if race:
        return partial(race_matrix, **limits)
    if settings.distance == "w1":
        return partial(ablations.sinkhorn_distances, reading=settings.reading, **limits)
    if settings.distance == "chamfer":
        return ablations.chamfer_distances
    of_states = {"cosine": ablations.cosine_distances, "mmd": ablations.mmd_distances}[
        settings.distance
    ]
    return partial(of_states, hidden[mask & correct[:, None]], hidden[mask & ~correct[:, None]])


class Closest(NamedTuple):
    """A span of a rollout, and the opposing span closest to it; places are tokens, the second after
    the last.
    """

    start: int
    end: int
    distance: float  # as the weights have it
    rollout: int  # of the group, the one that the opposing span belongs to
    other_start: int
    other_end: int


def closest_by_rollout(
    closest: ClosestSpans | None, mask: Tensor, correct: Tensor, window: int, stride: int
) -> list[list[Closest]]:
    """Of each rollout of a group, mask (G, T) and correct (G,), its spans; none where nothing was
    solved.
    """
    found = [[] for _ in mask]
    if closest is None:
        return found
    right, wrong = (spans_in(mask & side[:, None], window, stride) for side in (correct, ~correct))
    for own, opposing, distances, indices in (
        (right, wrong, closest.of_right, closest.right_to),
        (wrong, right, closest.of_wrong, closest.wrong_to),
    ):
        for (row, start, end), distance, index in zip(
            own, distances.tolist(), indices.tolist(), strict=True
        ):
            found[row].append(Closest(start, end, distance, *opposing[index]))
    return found


def spans_in(mask: Tensor, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Rollout, first token and token after the last of each span of `shear.spans_of`, in
    its order.
    """
    lengths = enumerate(mask.sum(1).tolist())
    return [
        (row, *bounds) for row, length in lengths for bounds in span_bounds(length, window, stride)
    ]
