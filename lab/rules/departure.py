"""Credit where a wrong rollout first departs from the right ones (ours)."""

from typing import Literal

import torch
from torch import Tensor

from credit.batch import Batch, Context
from credit.measures import closest_by_rollout
from credit.rules import rule, weigh
from lab.rules.ablations import transport_cost


@rule(
    "first",
    "shear's distances, but only where a wrong rollout first departs",
    needs_states=True,
)
def first(
    batch: Batch,
    context: Context,
    *,
    threshold: float = 0.03,
    place: Literal["onset", "random"] = "onset",
) -> Tensor:
    """A_t = A where a wrong rollout first departs from the right ones, 0 elsewhere; ours.

    The distance is W_eps in the reading "cost", which has no floor. Right rollouts keep A on every
    token. A wrong one keeps it only around the onset of its first span whose distance (in units of
    nbar) exceeds `threshold`: on the span's last `stride` tokens (which, but for a response's last
    span, no span before it covers), on `stride` tokens before these and on `stride` after. This
    takes most of the weight off wrong rollouts, so compare it with `scaled negative=.5`, which does
    the same without looking at tokens, and with `place` "random", which moves these tokens to a
    random place of their rollout.
    """
    settings = context.shear
    stride = settings.stride
    omega = batch.mask.float()  # (B, T)
    for group, hidden, mask, correct in batch.groups():
        weighed = weigh(context, hidden, mask, correct, measure=transport_cost)
        if not weighed.closest:
            continue
        spans = closest_by_rollout(weighed, mask, correct, settings)
        for row in (~correct).nonzero().flatten().tolist():
            omega[group][row] = 0.0
            far = [span for span in spans[row] if span.distance > threshold]
            if far:
                length = int(mask[row].sum())
                start = max(0, far[0].end - 2 * stride)
                end = min(length, far[0].end + stride)
                if place == "random":
                    moved = int(torch.randint(length - (end - start) + 1, ()))
                    start, end = moved, moved + end - start
                omega[group][row, start:end] = 1.0
    return batch.A * omega
