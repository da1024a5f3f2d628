"""Which spans a rollout has, and the opposing span that is closest to each.

closest_by_rollout(weighed, mask, correct, settings)   of a group that SHEAR has weighed
closest_in(batch, context)                             of a batch's first mixed group
"""

from typing import NamedTuple

from torch import Tensor

from base.config import Shear
from credit.batch import Batch, Context
from credit.rules import weigh
from shear import Weighed, span_bounds


class ClosestSpan(NamedTuple):
    """A span of a rollout, and the opposing span closest to it.

    Starts and ends are tokens; an end is the token after the last.
    """

    start: int
    end: int
    distance: float  # in units of nbar, as in the weights
    rollout: int  # of the group, the one that the opposing span belongs to
    other_start: int
    other_end: int


def closest_by_rollout(
    weighed: Weighed, mask: Tensor, correct: Tensor, settings: Shear
) -> list[list[ClosestSpan]]:
    """For each rollout of a group with both sides, its spans with the closest to each.

    mask is (G, T), correct (G,).
    """
    closest = weighed.closest
    assert closest  # of a group with both sides
    found: list[list[ClosestSpan]] = [[] for _ in mask]
    right, wrong = (spans_in(mask & side[:, None], settings) for side in (correct, ~correct))
    for own, opposing, distances, indices in (
        (right, wrong, closest.of_right, closest.right_to),
        (wrong, right, closest.of_wrong, closest.wrong_to),
    ):
        for (row, start, end), distance, index in zip(
            own, (distances / weighed.nbar).tolist(), indices.tolist(), strict=True
        ):
            found[row].append(ClosestSpan(start, end, distance, *opposing[index]))
    return found


def spans_in(mask: Tensor, settings: Shear) -> list[tuple[int, int, int]]:
    """(row, start, end) of each span of `shear.spans_of`, in its order.

    `start` is its first token, `end` the token after its last.
    """
    spans = []
    for row, length in enumerate(mask.sum(1).tolist()):
        for start, end in span_bounds(length, settings.window, settings.stride):
            spans.append((row, start, end))
    return spans


def closest_in(batch: Batch, context: Context) -> list[list[ClosestSpan]]:
    """The closest spans of the first group with both sides, by the run's settings; [] without."""
    for _, hidden, mask, correct in batch.groups():
        weighed = weigh(context, hidden, mask, correct)
        if weighed.closest:
            return closest_by_rollout(weighed, mask, correct, context.shear)
    return []
