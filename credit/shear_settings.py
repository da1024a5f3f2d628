"""SHEAR as training calls it: the arguments of `shear.shear_weights` that its settings ask for.

    shear_options       window, stride, eps and hooks, by the paper's method or an ablation of it
    closest_by_rollout  for each rollout, its spans and the opposing span closest to each

The method (Alg. 1 of arXiv 2604.23318) is in shear.py, its ablations (Sec. 5.4.1) in ablations.py.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from credit import ablations
from credit.settings import Shear
from shear import ClosestHook, Weighed, closest_spans, span_bounds, token_distances, token_weights

if TYPE_CHECKING:
    from credit.batch import Context


def shear_options(
    context: "Context", *, reading: str = "value", distance: str = "w1", pool: str = "max"
) -> dict[str, Any]:
    """The arguments of `shear.shear_weights` that training passes, or those of an ablation.

    `distance` is between two spans; for "w1" alone, `reading` says how Eq. (10) is read. `pool` is
    over the spans that cover a token.
    """
    settings = context.shear
    return {
        "window": settings.window,
        "stride": settings.stride,
        "eps": settings.eps,
        "eps_unit": settings.eps_unit,
        "distances": context.hooks.get("distances", token_distances),
        "closest": closest_hook(context, reading, distance),
        "pool": token_weights if pool == "max" else ablations.mean_weights,
    }


def closest_hook(context: "Context", reading: str, distance: str) -> ClosestHook:
    """The hook `closest` for a distance of two spans.

    The value of W_eps is found by a race, as it alone has bounds; by others every pair is measured.
    """
    if distance != "w1":
        return ablations.CLOSEST[distance]
    solve = context.hooks.get("closest", closest_spans)
    if reading != "value":
        solve = ablations.closest_by_cost
    return partial(solve, max_iters=context.shear.max_iters, tol=context.shear.tol)


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
