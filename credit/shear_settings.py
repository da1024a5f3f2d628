"""SHEAR as training calls it: `shear.weigh_group` with the hooks that its settings ask for."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from credit import ablations
from credit.batch import Batch
from credit.settings import Shear
from fast.distances import token_distances
from fast.race import race
from shear import (
    Closest,
    ClosestHook,
    Side,
    Weighed,
    closest_of,
    span_bounds,
    token_weights,
    weigh_group,
)


@dataclass(frozen=True)
class Settings(Shear):
    """The settings of SHEAR and its ablations, with the defaults of `shear_weights`."""

    reading: str = "value"  # of Eq. (10), with the distance "w1"
    distance: str = "w1"  # of two spans
    normalize: str = "group"  # "rollout": every rollout's mean weight becomes the group's
    pool: str = "max"  # over the spans that cover a token


def settings_of(shear: Shear, **options: str) -> Settings:
    """SHEAR's settings, from the flags and the options of the method `shear`."""
    return Settings(**vars(shear) | options)


def group_weights(hidden: Tensor, mask: Tensor, correct: Tensor, settings: Settings) -> Weighed:
    """Return what `shear.weigh_group` gives by these settings.

    Shapes and errors are the same.
    """
    weighed = weigh_group(
        hidden,
        mask,
        correct,
        window=settings.window,
        stride=settings.stride,
        eps=settings.eps,
        eps_unit=settings.eps_unit,
        distances=token_distances,
        closest=closest_hook(settings),
        pool=token_weights if settings.pool == "max" else ablations.mean_weights,
    )
    if settings.normalize == "rollout":
        return weighed._replace(omega=ablations.even_out(weighed.omega, mask.bool()))
    return weighed


def closest_hook(settings: Settings) -> ClosestHook:
    """The hook `closest` for the settings' distance of two spans.

    It is a race for the value of W_eps, which alone has bounds; otherwise every pair is measured.
    """
    if settings.distance == "w1":
        solve = race if settings.reading == "value" else ablations.closest_by_cost
        return partial(solve, max_iters=settings.max_iters, tol=settings.tol)

    def measure_all(costs: Tensor, right: Side, wrong: Side, eps: float) -> Closest:
        return closest_of(DISTANCES[settings.distance](costs, right, wrong))

    return measure_all


def in_nbar(closest: Closest, nbar: float) -> Closest:
    """Distances in units of nbar, as the weights have them, on the CPU."""
    return Closest(
        (closest.of_right / nbar).cpu(),
        closest.right_to.cpu(),
        (closest.of_wrong / nbar).cpu(),
        closest.wrong_to.cpu(),
    )


DISTANCES = {
    "chamfer": ablations.chamfer_distances,
    "cosine": ablations.cosine_distances,
    "mmd": ablations.mmd_distances,
}


class ClosestSpan(NamedTuple):
    """A span of a rollout, and the opposing span closest to it.

    Starts and ends are tokens; an end is the token after the last.
    """

    start: int
    end: int
    distance: float  # as the weights have it
    rollout: int  # of the group, the one that the opposing span belongs to
    other_start: int
    other_end: int


def closest_by_rollout(
    closest: Closest, mask: Tensor, correct: Tensor, window: int, stride: int
) -> list[list[ClosestSpan]]:
    """For each rollout of a group, its spans with the closest to each.

    mask is (G, T), correct (G,).
    """
    found: list[list[ClosestSpan]] = [[] for _ in mask]
    right, wrong = (spans_in(mask & side[:, None], window, stride) for side in (correct, ~correct))
    for own, opposing, distances, indices in (
        (right, wrong, closest.of_right, closest.right_to),
        (wrong, right, closest.of_wrong, closest.wrong_to),
    ):
        for (row, start, end), distance, index in zip(
            own, distances.tolist(), indices.tolist(), strict=True
        ):
            found[row].append(ClosestSpan(start, end, distance, *opposing[index]))
    return found


def closest_in(batch: Batch, shear: Shear) -> list[list[ClosestSpan]]:
    """Each span and its closest opposing span, for the first group with right and wrong rollouts.

    A list per rollout; [] without SHEAR or such a group.
    """
    if batch.first_mixed is None or batch.closest is None:
        return []
    first = batch.first_mixed * batch.group_size
    group = slice(first, first + batch.group_size)
    mask = batch.mask[group].cpu()
    correct = batch.correct[group].cpu()
    return closest_by_rollout(batch.closest, mask, correct, shear.window, shear.stride)


def spans_in(mask: Tensor, window: int, stride: int) -> list[tuple[int, int, int]]:
    """(row, start, end) of each span of `shear.spans_of`, in its order.

    `start` is its first token, `end` the token after its last.
    """
    lengths = enumerate(mask.sum(1).tolist())
    return [
        (row, *bounds) for row, length in lengths for bounds in span_bounds(length, window, stride)
    ]
