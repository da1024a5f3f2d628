"""Time and error of SHEAR's distances beside those of its "peers": `sinkhorn.py` alone, and POT.

    python -m lab.studies.bench
    python -m lab.studies.bench --tokens 300 1000 3000 --width 896 3584 --group 8 16 --pairs 4096

Random walks stand for hidden states; the sizes of the second command are for a GPU.

Ours is what training with `--use lab.fast` calls, from hidden states to token weights; most of its
time goes into `lab.fast.race` and `lab.fast.distances`. Peers get pairs of full spans with
ready-made costs, in batches as large as ours. They solve at most `--pairs` pairs of 100 x 100
tokens, more if pairs are smaller, and loops at most `LOOPED`; their seconds are scaled to all
pairs. This favours peers, whose seconds include neither costs nor token weights.

Each round measures every solver, so a drift of the machine affects all alike. Ratios are taken
within a round; the table has their median (lowest-highest). Errors are the largest relative errors
of Eq. (10): ours of the spans' minima, peers' of single pairs. The reference is `sinkhorn.py` in
float64 to a marginal error of 1e-7, on the first `CHECKED` pairs.

Left out: the solvers' use of memory; exact transport, which is another problem.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.config import Machine, read_flags


@dataclass(frozen=True)
class Bench:
    """Time SHEAR's distances beside POT's; under a minute on a CPU."""

    tokens: tuple[int, ...] = (300,)
    """Tokens of a response."""
    width: tuple[int, ...] = (896,)
    """Width of the states."""
    group: tuple[int, ...] = (8,)
    """Rollouts of a group."""
    pairs: int = 256
    """Maximum number of pairs of 100 x 100 tokens that a peer solves; more if they are smaller."""
    rounds: int = 3
    """Number of times that each solver is measured."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: cuda if available."""


def parse_bench(argv: Sequence[str] | None = None) -> Bench:
    """This command's flags."""
    return read_flags(Bench, argv, prog="python -m lab.studies.bench")


if __name__ == "__main__":
    parse_bench()  # --help and wrong flags end here: the imports below take seconds

import datetime
import itertools
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import ot.batch
import pandas as pd
import torch
from torch import Tensor

from credit.settings import Shear
from harness import log
from harness.command import on_machine, run_command
from lab.fast.distances import CHUNK_ENTRIES, token_distances
from lab.fast.race import race
from shear import Side, Spans, closest_spans, mean_norm, shear_weights, two_sides
from sinkhorn import sinkhorn
from tasks.errors import BadInput

EPS = Shear.eps  # costs are in units of nbar
CHECKED = 128  # pairs whose errors are measured; ours: or all pairs of one right span, if more
LOOPED = 256  # pairs that a loop over pairs solves at most: each takes the same time
# Iterations and tolerance of the reference in float64.
TRUE_ITERS = 20_000
TRUE_TOL = 1e-7


@run_command
def main(argv: list[str] | None = None) -> None:
    """Print a table per group."""
    flags = parse_bench(argv)
    # POT warns that it has not converged, which the table's errors show
    warnings.simplefilter("ignore")
    device = torch.device(on_machine(Machine(flags.device)).device)
    hardware = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    print(f"{hardware}, float32, torch {torch.__version__}, {datetime.date.today()}")
    for group_size, width, tokens in itertools.product(flags.group, flags.width, flags.tokens):
        print_table(synthetic(group_size, width, tokens, device), flags)


# ---- groups --------------------------------------------------------------------------------------


class Group(NamedTuple):
    """A group of right and wrong rollouts."""

    name: str
    hidden: Tensor  # (G, T, d)
    mask: Tensor  # (G, T) bool
    correct: Tensor  # (G,) bool
    shear: Shear = Shear()  # window and stride of its spans


def synthetic(group_size: int, width: int, tokens: int, device: torch.device) -> Group:
    """A group of G random walks of T states, each scaled to norm sqrt(d); every other one is right.

    They are bfloat16 on a GPU, as a model's states are there.
    """
    generator = torch.Generator().manual_seed(0)
    shape = group_size, tokens, width  # (G, T, d)
    hidden = torch.randn(shape, generator=generator).mul_(0.3).cumsum_(1)  # (G, T, d)
    hidden += torch.randn(group_size, 1, width, generator=generator)  # where each walk starts
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.nn.functional.rms_norm(hidden, (width,)).to(device, dtype)
    mask = torch.ones(group_size, tokens, dtype=torch.bool, device=device)  # (G, T)
    correct = torch.arange(group_size, device=device) % 2 == 0  # (G,)
    name = f"random walks, G {group_size}, T {tokens:,}, d {width:,}"
    return Group(name, hidden, mask, correct)


# ---- peers: functions from Pairs to values (P,) of Eq. (10) --------------------------------------


class Pairs(NamedTuple):
    """P pairs of spans: costs in units of nbar, masses a and b."""

    costs: Tensor  # (P, n, m) float32
    a: Tensor  # (P, n)
    b: Tensor  # (P, m)

    def take(self, rows: slice) -> "Pairs":
        """Some of the pairs."""
        return Pairs._make(tensor[rows] for tensor in self)


def plain_sinkhorn(pairs: Pairs) -> Tensor:
    """`sinkhorn.py`: a batch, in which each pair stops when it has converged."""
    return sinkhorn(pairs.costs, pairs.a, pairs.b, eps=EPS).value


def pot_batch(pairs: Pairs) -> Tensor:
    """POT's batch solver, 50 iterations in the log domain."""
    return ot.batch.solve_batch(
        pairs.costs,
        a=pairs.a,
        b=pairs.b,
        reg=EPS,
        max_iter=50,
        tol=0.0,
        method="log_sinkhorn",
        reg_type="kl",
        grad="detach",
    ).value


def one_by_one(solve: Callable[[Tensor, Tensor, Tensor], Tensor], pairs: Pairs) -> Tensor:
    """Solve the pairs one after the other."""
    return torch.stack(list(map(solve, pairs.costs, pairs.a, pairs.b)))


def pot_solve(costs: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`ot.solve` with our number of iterations and tolerance."""
    return ot.solve(
        costs, a, b, reg=EPS, reg_type="kl", max_iter=Shear.max_iters, tol=Shear.tol
    ).value


def in_batches(solve: Callable[[Pairs], Tensor], pairs: Pairs) -> Tensor:
    """Solve the pairs in batches as large as ours.

    On a CPU such a batch stays in cache, which halves POT's time.
    """
    at_once = max(1, CHUNK_ENTRIES[pairs.costs.device.type] // pairs.costs[0].numel())
    values = []
    for start in range(0, len(pairs.costs), at_once):
        values.append(solve(pairs.take(slice(start, start + at_once))))
    return torch.cat(values)


PEERS: dict[str, Callable[[Pairs], Tensor]] = {
    "every pair, sinkhorn.py": plain_sinkhorn,
    "POT `ot.batch.solve_batch`, 50 iterations": pot_batch,
    "POT `ot.solve`, a loop": partial(one_by_one, pot_solve),
}


def full_pairs(right: Side, wrong: Side, count: int) -> Pairs:
    """The first pairs of spans without padding, at most `count`."""
    full = (right.spans.mass > 0).all(1)[:, None] & (wrong.spans.mass > 0).all(1)  # (K+, K-)
    k, l = full.nonzero()[:count].unbind(1)  # noqa: E741 - the paper's letters
    i = right.spans.tokens[k]  # (P, n)
    j = wrong.spans.tokens[l]  # (P, m)
    nbar = mean_norm(torch.cat([right.states, wrong.states]))
    costs = token_distances(right.states, wrong.states)[i[:, :, None], j[:, None]]  # (P, n, m)
    return Pairs(costs / nbar, right.spans.mass[k], wrong.spans.mass[l])


# ---- measuring -----------------------------------------------------------------------------------


def ours(group: Group) -> Tensor:
    """Weigh a group as training does; returns its right spans' minima (K+,), over nbar."""
    weighed = shear_weights(
        group.hidden,
        group.mask,
        group.correct,
        window=group.shear.window,
        stride=group.shear.stride,
        distances=token_distances,
        closest=race,
    )
    assert weighed.closest is not None  # the group is mixed
    return weighed.closest.of_right / weighed.nbar


def true_values(pairs: Pairs) -> Tensor:
    """The reference for peers: values (P,) float64."""
    costs = pairs.costs.double()
    a = pairs.a.double()
    b = pairs.b.double()
    return sinkhorn(costs, a, b, eps=EPS, max_iters=TRUE_ITERS, tol=TRUE_TOL).value


def true_minima(right: Side, wrong: Side) -> Tensor:
    """The reference for ours: the first right spans' distances to their closest, (K,) float64."""
    count = max(1, CHECKED // len(wrong.spans.tokens))  # K
    first = Spans(right.spans.tokens[:count], right.spans.mass[:count])
    nbar = mean_norm(torch.cat([right.states, wrong.states]))
    costs = token_distances(right.states, wrong.states).double() / nbar  # (N+, N-)
    return closest_spans(
        costs, right._replace(spans=first), wrong, EPS, max_iters=TRUE_ITERS, tol=TRUE_TOL
    ).of_right


def largest_error(values: Tensor, truth: Tensor) -> str:
    """The largest relative error of the first values against the truth."""
    return f"{(values[: len(truth)] / truth - 1).abs().max().item():.0e}"


def seconds_of(solve: Callable[[], Tensor]) -> float:
    """Seconds of a call, after a first call as a warm-up."""
    for _ in range(2):
        started = time.perf_counter()
        solve().sum().item()  # waits for a GPU
    return time.perf_counter() - started


def print_table(group: Group, flags: Bench) -> None:
    """Measure a group; print seconds, ratios to ours, and errors.

    Raises BadInput if no pair is of full spans.
    """
    window = group.shear.window
    sides = two_sides(group.hidden, group.mask, group.correct, window, group.shear.stride)
    assert sides is not None  # the group is mixed
    right, wrong = sides
    pairs = full_pairs(right, wrong, max(1, flags.pairs * 100**2 // window**2))
    if not len(pairs.costs):
        no_pair = f"no span of {window} tokens is full on both sides"
        raise BadInput(f"{group.name}: {no_pair}; leave it out")
    truth = true_values(pairs.take(slice(CHECKED)))
    total = len(right.spans.tokens) * len(wrong.spans.tokens)
    solvers: dict[str, Callable[[], Tensor]] = {"ours": partial(ours, group)}
    scale = {"ours": 1.0}  # from a peer's pairs to all of them
    errors = {"ours": largest_error(ours(group), true_minima(right, wrong))}
    for name, solve in PEERS.items():
        own = pairs.take(slice(LOOPED if "a loop" in name else None))
        solvers[name] = partial(in_batches, solve, own)
        scale[name] = total / len(own.costs)
        errors[name] = largest_error(in_batches(solve, own), truth)
    rounds = []
    for _ in range(flags.rounds):
        rounds.append({name: seconds_of(solver) for name, solver in solvers.items()})
    seconds = pd.DataFrame(rounds) * pd.Series(scale)
    ratios = seconds.div(seconds["ours"], axis=0)
    rows = []
    for name, ratio in ratios.items():
        row = {"": name, "s": f"{seconds[name].median():.3g}"}
        row["times ours"] = f"{ratio.median():.1f} ({ratio.min():.1f}-{ratio.max():.1f})"
        rows.append(row | {"largest error": errors[name]})
    spans = f"spans of {window} every {group.shear.stride}, {total:,} pairs"
    print(f"\n{group.name}: {spans}; peers solve {len(pairs.costs):,}")
    print("\n".join(log.markdown(rows)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
