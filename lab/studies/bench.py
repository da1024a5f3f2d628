"""Seconds and error of SHEAR's distances, from states to weights: plain, by the race, and by POT.

    python -m lab.studies.bench
    python -m lab.studies.bench --tokens 3000 --width 3584 --pairs 4096 --device cuda

A group of random walks stands for hidden states. "plain" is shear.py, which solves every pair of
spans; "race" is `--use lab.fast`. POT gets ready-made costs of at most `--pairs` pairs, and the
loop those of one right span; their seconds are scaled to all pairs. This favours POT, as costs and
token weights are not in its seconds. Seconds are the fastest of three. Errors are the largest
relative ones of the distances from right spans to their closest, against `sinkhorn.py` in float64
to a marginal error of 1e-7.

Left out: memory; exact transport, which is another problem; spans with padding.
"""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from base.config import Machine, Shear
from base.errors import BadInput
from harness.fsdp import on_machine
from harness.log import markdown
from lab.fast.distances import CHUNK_ENTRIES
from lab.fast.distances import token_distances as by_product
from lab.fast.race import race
from lab.tools.command import command, packages
from shear import Spans, closest_spans, mean_norm, shear_weights, token_distances, two_sides
from sinkhorn import sinkhorn

EPS = Shear.eps  # costs are in units of nbar


def bench(
    tokens: int = 300,
    width: int = 896,
    group: int = 8,
    pairs: int = 256,
    window: int = Shear.window,
    stride: int = Shear.stride,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Time SHEAR's distances beside POT's; some minutes on a CPU."""
    if tokens < window or (tokens - window) % stride:
        raise BadInput(f"--tokens {tokens}: must be --window and a multiple of --stride")
    place = torch.device(on_machine(Machine(device)).device)
    rows = measure(walks(group, tokens, width, place), pairs, window, stride)
    print(f"{place.type}, torch {torch.__version__}: G {group}, T {tokens:,}, d {width:,}")
    print("\n".join(markdown(rows)))


def walks(size: int, tokens: int, width: int, device: torch.device) -> Tensor:
    """(G, T, d) random walks, each state scaled to norm sqrt(d); bfloat16 on a GPU."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((size, tokens, width), generator=generator).mul_(0.3).cumsum_(1)
    hidden += torch.randn(size, 1, width, generator=generator)  # where each walk starts
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.nn.functional.rms_norm(hidden, (width,)).to(device, dtype)


def measure(hidden: Tensor, pairs: int, window: int, stride: int) -> list[dict[str, str]]:
    """A row per solver of the group (G, T, d), every other rollout of which is right."""
    mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)  # (G, T)
    correct = torch.arange(len(mask), device=hidden.device) % 2 == 0  # (G,)
    sides = two_sides(hidden[mask], mask, correct, window, stride)
    assert sides is not None  # the group is mixed
    right, wrong = sides
    nbar = mean_norm(hidden[mask])
    costs = token_distances(right.states, wrong.states) / nbar  # (N+, N-)
    count = max(1, pairs // len(wrong.spans.tokens))
    spans = right.spans
    first = right._replace(spans=Spans(spans.tokens[:count], spans.mass[:count]))

    def exact(costs: Tensor, a: Tensor, b: Tensor, eps: float) -> Tensor:
        return sinkhorn(costs, a, b, eps=eps, max_iters=20_000, tol=1e-7).value

    truth = closest_spans(costs.double(), first, wrong, EPS, exact).of_right  # (count,)

    def ours(**hooks: Any) -> Tensor:
        weighed = shear_weights(hidden, mask, correct, window=window, stride=stride, **hooks)
        assert weighed.closest is not None
        return weighed.closest.of_right / weighed.nbar  # (K+,)

    def pot(solve: Callable[[Tensor, Tensor, Tensor], Tensor], k: int) -> Tensor:
        i = spans.tokens[:k]  # (k, n)
        j = wrong.spans.tokens  # (K-, m)
        blocks = costs[i[:, None, :, None], j[None, :, None, :]].flatten(0, 1)  # (k K-, n, m)
        a = spans.mass[:k].repeat_interleave(len(j), 0)  # (k K-, n)
        b = wrong.spans.mass.repeat(len(i), 1)  # (k K-, m)
        return solve(blocks, a, b).view(len(i), -1).amin(1)  # (k,)

    solvers: dict[str, Callable[[], Tensor]] = {
        "plain, every pair": ours,
        "race, `--use lab.fast`": partial(ours, cost=by_product, closest=race),
        "POT `ot.batch.solve_batch`, 50 iterations": partial(pot, in_batches, count),
        "POT `ot.solve`, a loop": partial(pot, one_by_one, 1),
    }
    rows = []
    for name, solve in solvers.items():
        values = solve()  # a warm-up, too
        seconds = min(seconds_of(solve) for _ in range(3))
        seconds *= len(right.spans.tokens) / len(values)  # from a peer's pairs to all of them
        known = min(len(values), len(truth))
        error = (values[:known] / truth[:known] - 1).abs().max().item()
        rows.append({"": name, "s": f"{seconds:.3g}", "largest error": f"{error:.0e}"})
    return rows


def seconds_of(solve: Callable[[], Tensor]) -> float:
    """Seconds of a call."""
    started = perf_counter()
    solve().sum().item()  # waits for a GPU
    return perf_counter() - started


def in_batches(costs: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """POT's batch solver in the log domain, in batches as large as the race's: (P,)."""
    with packages():
        import ot.batch
    at_once = max(1, CHUNK_ENTRIES[costs.device.type] // costs[0].numel())
    options = dict(reg=EPS, max_iter=50, tol=0.0, method="log_sinkhorn", reg_type="kl")
    values = []
    for start in range(0, len(costs), at_once):
        pairs = slice(start, start + at_once)
        solved = ot.batch.solve_batch(
            costs[pairs], a=a[pairs], b=b[pairs], grad="detach", **options
        )
        values.append(solved.value)
    return torch.cat(values)


def one_by_one(costs: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`ot.solve` with `sinkhorn`'s number of iterations and tolerance, pair by pair: (P,)."""
    with packages():
        import ot
    options = dict(reg=EPS, reg_type="kl", max_iter=100, tol=1e-3)
    values = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has not converged, which the errors show
        for C, own, other in zip(costs, a, b, strict=True):
            values.append(ot.solve(C, own, other, **options).value)
    return torch.stack(values)


main = command("lab.studies.bench", bench)

if __name__ == "__main__":
    sys.exit(main())
