"""SHEAR's distances beside other solvers of the same problem: one command, one run, ratios side by side.

    python -m studies.bench  # a step of the embedded model, and synthetic groups
    python -m studies.bench --states states.safetensors  # and groups of states: groupN.rolloutK.right or .wrong
    python -m studies.bench --tokens 300 1000 3000 --width 896 3584 --group 8 16  # the sizes of a GPU

Ours is `fast.race`, from hidden states to each span's distance to the closest opposing span, group after
group as in training. A peer gets the ready-made cost blocks of full spans, in batches as large as ours. It solves at
most `--pairs` pairs of 100 x 100 tokens, or as many entries; its seconds are scaled to all pairs. This favours peers.

A round measures each solver once, so that a drift of the machine affects all. Ratios are of one round, reported as
median (lowest-highest). The error is the largest relative one of Eq. (10), of minima (ours) or of pairs (peers),
against `sinkhorn.py` in float64 to a marginal error of 1e-7, on up to `CHECKED` pairs.

The floor is the larger of two times that this machine cannot go below. One is to read the states, and to write and read
the costs once, at the rate of a copy. The other is to compute the products between states, one exponential an entry of
each tile, and two multiply-adds an entry and iteration of our race, at the float32 rates of a matrix product and `exp`.
"""

import argparse
import sys
from pathlib import Path

from harness.config import Parser, answer, number


def bench_parser() -> Parser:
    """Of `studies.bench`."""
    about = (
        "SHEAR's distances beside POT, GeomLoss and exact transport: about a minute on two CPU cores, and two to three "
        "more to make the embedded model without --model."
    )
    parser = Parser(prog="python -m studies.bench", description=about)
    add = parser.add_argument
    add("--states", type=Path, help="safetensors file of groups of states, groupN.rolloutK.right or .wrong (T, d)")
    add("--model", help="a folder of the embedded task's model; if not given, one is made and warmed up")
    tokens, states = "of synthetic responses; if not given: 300", "of synthetic states; if not given: 896"
    add("--tokens", type=number(int, 1, 16_384), nargs="*", help=f"{tokens}, on a GPU 1000 and 3000, too")
    add("--width", type=number(int, 1, 16_384), nargs="*", help=f"{states}, on a GPU 3584, too")
    add("--group", type=number(int, 2, 256), nargs="*", help="rollouts of a group; if not given: 8, on a GPU 16, too")
    pairs = "of 100 x 100 that a peer solves at most, more if small; if not given: 256, on a GPU 4096"
    add("--pairs", type=number(int, 8, 16_384), help=pairs)
    add("--rounds", type=number(int, 1, 1000), default=3, help="times that each is measured")
    add("--device", choices=("cpu", "cuda"), help="if not given: cuda where there is one")
    return parser


answer(__name__, lambda: bench_parser().parse_args())  # before what takes seconds to import

import datetime
import itertools
import os
import platform
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

import geomloss
import numpy as np
import ot.batch
import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from credit.shear_settings import Settings
from fast.distances import token_distances
from fast.race import CHUNK_ENTRIES, race
from harness import tables
from harness.launch import run_command
from shear import Side, mean_norm, two_sides
from sinkhorn import sinkhorn
from studies.states import States, embedded_states, real, synthetic
from tasks.problems import BadInput

LARGEST = 2**31  # entries of a synthetic group's states, and of its costs between tokens: 8 GB each
EPS = Settings.eps  # costs are in units of nbar
CHECKED = 128  # pairs whose errors are measured; at least all pairs of one right span
TRUTH = dict(max_iters=20_000, tol=1e-7)  # of the float64 solutions that they are checked against


@run_command(memory="lower --tokens, --width or --group", interrupted="interrupted")
def main(argv: list[str] | None = None) -> None:
    """Measure all groups and print a table of each.

    Exit status: 0, 1 where memory does not suffice, 2 for bad input, 130 after Ctrl-C.
    """
    flags = parse_bench(argv)
    warnings.simplefilter("ignore")  # POT warns that it has not converged, which the table's errors show
    device = torch.device(flags.device)
    print(hardware(device), flush=True)
    rates = ceilings(device)
    for states in groups(flags, device):
        print(f"\nmeasuring {states.name}", flush=True)  # which may take minutes
        print("\n".join(table(states, flags, rates)), flush=True)
    return 0


def parse_bench(argv: list[str] | None) -> argparse.Namespace:
    """The flags; raises BadInput."""
    parser = bench_parser()
    on_gpu = dict(tokens=[300, 1000, 3000], width=[896, 3584], group=[8, 16], pairs=4096, device="cuda")
    on_cpu = dict(tokens=[300], width=[896], group=[8], pairs=256, device="cpu")
    device = parser.parse_args(argv).device or ("cuda" if torch.cuda.is_available() else "cpu")
    parser.set_defaults(**on_gpu if device == "cuda" else on_cpu)
    flags = parser.parse_args(argv)
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: torch sees no CUDA device; use --device cpu")
    for size, tokens, width in itertools.product(flags.group, flags.tokens, flags.width):
        entries = max(size * tokens * width, (size * tokens // 2) ** 2)
        if entries > LARGEST:
            sizes = f"--group {size} --tokens {tokens} --width {width}"
            raise BadInput(f"{sizes}: a group takes {entries * 4 / 1e9:.0f} GB; lower one of them")
    return flags


def groups(flags: argparse.Namespace, device: torch.device) -> Iterator[States]:
    """The groups to measure, one after the other. Those of a file are read before anything is measured."""
    from_file = list(real(flags.states, device)) if flags.states else []
    yield embedded_states(flags.model, device)
    for size, width, tokens in itertools.product(flags.group, flags.width, flags.tokens):
        yield synthetic(size, tokens, width, device)
    yield from from_file


# ---- peers: Pairs -> Eq. (10) of each pair, (P,), or what the solver computes in its place --------------------


class Pairs(NamedTuple):
    """Some pairs of spans, in units of nbar. `x` and `y` are their states, for a solver that computes costs itself."""

    costs: Tensor  # (P, n, m) float32
    a: Tensor  # (P, n)
    b: Tensor  # (P, m)
    x: Tensor  # (P, n, d)
    y: Tensor  # (P, m, d)


def plain_sinkhorn(pairs: Pairs) -> Tensor:
    """`sinkhorn.py`; each pair has its own stop."""
    return sinkhorn(pairs.costs, pairs.a, pairs.b, eps=EPS).value


def pot_batch(pairs: Pairs) -> Tensor:
    """POT's batch solver, 50 iterations in the log domain."""
    options = dict(reg=EPS, max_iter=50, tol=0.0, method="log_sinkhorn", reg_type="kl", grad="detach")
    return ot.batch.solve_batch(pairs.costs, a=pairs.a, b=pairs.b, **options).value


def pot_loop(pairs: Pairs) -> Tensor:
    """`ot.sinkhorn`, which `ot.sinkhorn2` calls, pair by pair with our limits; Eq. (10) of its plan."""
    options = dict(method="sinkhorn_log", numItermax=Settings.max_iters, stopThr=Settings.tol)
    values = []
    for costs, a, b in zip(pairs.costs, pairs.a, pairs.b, strict=True):
        plan = ot.sinkhorn(a, b, costs, EPS, **options)
        density = plan / (a[:, None] * b)
        values.append((plan * costs).sum() + EPS * torch.xlogy(plan, density).sum())
    return torch.stack(values)


def geomloss_batch(pairs: Pairs) -> Tensor:
    """GeomLoss, annealed to the same eps. It computes the costs itself."""
    loss = geomloss.SamplesLoss("sinkhorn", p=1, blur=EPS, debias=False, backend="tensorized")
    return loss(pairs.a, pairs.x, pairs.b, pairs.y)


def exact_loop(pairs: Pairs) -> Tensor:
    """`ot.emd2` pair by pair, on a CPU: W1 itself."""
    a = pairs.a.double().cpu().numpy()
    b = pairs.b.double().cpu().numpy()
    costs = pairs.costs.double().cpu().numpy()
    return torch.tensor([ot.emd2(a[p], b[p], costs[p]) for p in range(len(costs))])


def in_batches(solve: Callable[[Pairs], Tensor], pairs: Pairs, count: int) -> Tensor:
    """The first `count` pairs, in batches as large as ours. On a CPU these stay in cache, which halves POT's time."""
    at_once = max(1, CHUNK_ENTRIES.get(pairs.costs.device.type, 2**19) // pairs.costs[0].numel())
    values = []
    for start in range(0, count, at_once):
        end = min(start + at_once, count)
        values.append(solve(Pairs(*[tensor[start:end] for tensor in pairs])))
    return torch.cat(values)


PEERS = {  # and which share of --pairs each solves; on a GPU loops solve few, as each pair takes milliseconds
    "every pair, sinkhorn.py": (plain_sinkhorn, dict(cpu=1.0, cuda=1.0)),
    "POT `ot.batch.solve_batch`, 50 iterations": (pot_batch, dict(cpu=1.0, cuda=1.0)),
    "POT `ot.sinkhorn`, a loop": (pot_loop, dict(cpu=1 / 8, cuda=1 / 128)),
    "GeomLoss `SamplesLoss`, tensorized": (geomloss_batch, dict(cpu=1 / 4, cuda=1 / 4)),
    "POT `ot.emd2`, a loop, exact": (exact_loop, dict(cpu=1 / 2, cuda=1 / 128)),
}


def two_sided(states: States) -> list[tuple[Side, Side]]:
    """The right and the wrong side of each group that has both."""
    sides = []
    for start in range(0, len(states.mask), states.group_size):
        group = slice(start, start + states.group_size)
        hidden, mask, correct = states.hidden[group], states.mask[group], states.correct[group]
        right, wrong = two_sides(hidden, mask, correct, states.window, states.stride)
        if right is not None:
            sides.append((right, wrong))
    return sides


def full_pairs(sides: list[tuple[Side, Side]], count: int) -> Pairs:
    """The first `count` pairs of spans without padding, group after group."""
    of_groups = []
    for right, wrong in sides:
        full = (right.spans.mass > 0).all(1)[:, None] & (wrong.spans.mass > 0).all(1)  # (K+, K-)
        k, l = full.nonzero()[:count].T  # noqa: E741 - the paper's letters
        of_groups.append(pairs_of(right, wrong, k, l))
        count -= len(k)
    tensors = []
    for name in Pairs._fields:
        tensors.append(torch.cat([getattr(pairs, name) for pairs in of_groups]))
    return Pairs(*tensors)


def pairs_of(right: Side, wrong: Side, k: Tensor, l: Tensor) -> Pairs:  # noqa: E741
    """The pairs of the right spans `k` (P,) and the wrong spans `l` (P,), with ready-made costs."""
    nbar = mean_norm(torch.cat([right.states, wrong.states]))
    i = right.spans.tokens[k]  # (P, n)
    j = wrong.spans.tokens[l]  # (P, m)
    costs = token_distances(right.states, wrong.states)[i[:, :, None], j[:, None]] / nbar  # (P, n, m)
    x = right.states[i].float() / nbar  # (P, n, d)
    y = wrong.states[j].float() / nbar  # (P, m, d)
    return Pairs(costs, right.spans.mass[k], wrong.spans.mass[l], x, y)


# ---- measuring ------------------------------------------------------------------------------------------------


class Solver(NamedTuple):
    """A row of the table."""

    name: str
    solve: Callable[[], Tensor]
    pairs: int  # of spans, that it solves
    error: str


def ours(states: States, stats: dict[str, list] | None = None) -> Tensor:
    """Each right span's distance over nbar to the closest wrong one, from hidden states on: (K+ of all groups,)."""
    limits = dict(max_iters=Settings.max_iters, tol=Settings.tol, stats=stats)
    distances = []
    for right, wrong in two_sided(states):
        nbar = mean_norm(torch.cat([right.states, wrong.states]))
        costs = token_distances(right.states, wrong.states)  # (N+, N-)
        distances.append(race(costs, right.spans, wrong.spans, EPS * nbar, **limits)[0] / nbar)
    return torch.cat(distances)


def true_values(pairs: Pairs) -> Tensor:
    """(P,) float64, Eq. (10)."""
    return sinkhorn(pairs.costs.double(), pairs.a.double(), pairs.b.double(), eps=EPS, **TRUTH).value


def relative_error(values: Tensor, truth: Tensor) -> str:
    """The largest one, of the first values (P,), whose truth (checked,) is given."""
    count = min(len(values), len(truth))
    return f"{(values[:count].to(truth) / truth[:count] - 1).abs().max().item():.0e}"


def solvers_of(states: States, most: float, total: int) -> list[Solver]:
    """Ours, which solves all `total` pairs, then the peers, which solve `most` pairs at most; raises BadInput."""
    sides, device = two_sided(states), states.mask.device
    pairs = full_pairs(sides, int(most))
    if not len(pairs.costs):
        raise BadInput(f"{states.name}: no span of {states.window} tokens is full on both sides; leave it out")
    right, wrong = sides[0]
    columns = len(wrong.spans.tokens)  # K-
    rows = min(len(right.spans.tokens), max(1, CHECKED // columns))
    index = torch.arange(rows * columns, device=device)  # whole rows of pairs, whose minima are known
    minima = true_values(pairs_of(right, wrong, index // columns, index % columns)).view(rows, columns).amin(1)
    solve = partial(ours, states)
    solvers = [Solver("ours", solve, total, relative_error(solve(), minima))]
    truth = in_batches(true_values, pairs, min(CHECKED, len(pairs.costs)))
    for name, (function, shares) in PEERS.items():
        count = min(len(pairs.costs), max(1, int(most * shares[device.type])))
        solve = partial(in_batches, function, pairs, count)
        error = "-" if function is exact_loop else relative_error(solve(), truth)
        solvers.append(Solver(name, solve, count, error))
    return solvers


def seconds_and_gb(solve: Callable[[], Tensor], device: torch.device) -> tuple[float, float]:
    """Seconds of a call and the GB it takes on a GPU, after a call that does not count."""
    timed(solve, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()  # 0 without a GPU
    seconds = timed(solve, device)
    return seconds, (torch.cuda.max_memory_allocated() - held) / 1e9


def table(states: States, flags: argparse.Namespace, rates: dict[str, float]) -> list[str]:
    """Seconds of a group, ratios to ours, errors and memory."""
    sides, device, stats = two_sided(states), states.mask.device, defaultdict(list)
    ours(states, stats)
    iterations = torch.cat(stats["sinkhorn_iterations"])  # (pairs,)
    solved = len(torch.cat(stats["sinkhorn_error"]))
    total = len(iterations)
    tile = sides[0][0].spans.tokens.shape[1] ** 2
    solvers = solvers_of(states, flags.pairs * 100**2 / tile, total)
    seconds = np.zeros((flags.rounds, len(solvers)))
    gb = np.zeros((flags.rounds, len(solvers)))
    for turn in tqdm(range(flags.rounds), states.name, leave=False, disable=None):
        for column, solver in enumerate(solvers):
            once, gb[turn, column] = seconds_and_gb(solver.solve, device)
            seconds[turn, column] = once * total / solver.pairs  # of all pairs
    medians = np.median(seconds, 0)
    ratios = seconds / seconds[:, :1]
    rows = []
    for column, solver in enumerate(solvers):
        times = ratios[:, column]
        rows.append(
            {
                "": solver.name,
                "s a group": f"{medians[column] / len(sides):.3g}",
                "times ours": f"{np.median(times):.1f} ({times.min():.1f}-{times.max():.1f})" if column else "",
                "pairs measured": f"{solver.pairs:,}",
                "largest error": solver.error,
                "GB": f"{gb[:, column].max():.2f}" if device.type == "cuda" else "-",
            }
        )
    least, bound = floor(sides, iterations, rates)
    share = {"s a group": f"{least / len(sides):.2g}", "times ours": f"{least / medians[0]:.3f}"}
    rows.append(dict.fromkeys(rows[0], "") | {"": f"floor: {bound}"} | share)
    about = (
        f"{states.name}, w {states.window}, s {states.stride}: {total:,} pairs, mixed groups: {len(sides)}; "
        f"{solved / total:.1%} are solved to the end, {iterations.float().mean():.1f} iterations a pair"
    )
    return [about, *tables.markdown(rows)]


def floor(sides: list[tuple[Side, Side]], iterations: Tensor, rates: dict[str, float]) -> tuple[float, str]:
    """The least seconds for all pairs on this machine, and which bound sets them; iterations (pairs,)."""
    moved = products = 0
    for right, wrong in sides:
        rows, columns, width = len(right.states), len(wrong.states), right.states.shape[1]
        moved += (rows + columns) * width * right.states.element_size() + 2 * 4 * rows * columns
        products += 2 * rows * columns * width
    tile = sides[0][0].spans.tokens.shape[1] ** 2
    multiply_adds = products + 4 * tile * iterations.sum().item()
    compute = multiply_adds / rates["matmul"] + tile * len(iterations) / rates["exp"]
    copy = moved / rates["copy"]
    return (copy, "copy") if copy > compute else (compute, "compute")


# ---- the machine ----------------------------------------------------------------------------------------------


def hardware(device: torch.device) -> str:
    """What it was measured on, with what, and when."""
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}, {torch.cuda.mem_get_info(device)[1] / 1e9:.0f} GB"
    else:
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} of {os.cpu_count()} cores"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, python {platform.python_version()}"
    return f"{name}; float32; {versions}; {datetime.date.today()}"


def ceilings(device: torch.device) -> dict[str, float]:
    """FLOP/s of a large matrix product, exponentials/s, bytes/s of a copy, read and written; in float32."""
    cuda = device.type == "cuda"
    size = 8192 if cuda else 512
    a, b = torch.randn(2, size, size, device=device)
    numbers = torch.randn(2**22, device=device)
    source = torch.zeros(2**31 if cuda else 2**26, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "matmul": 2 * size**3 / seconds_of(lambda: a @ b, device),
        "exp": len(numbers) / seconds_of(lambda: numbers.exp(), device),
        "copy": 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device),
    }


def seconds_of(call, device: torch.device) -> float:
    """Median seconds of a call, after those that do not count; fewer on a CPU, where nothing is claimed."""
    aside, counted = (3, 10) if device.type == "cuda" else (1, 3)
    seconds = [timed(call, device) for _ in range(aside + counted)]
    return median(seconds[aside:])


def timed(call, device: torch.device) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
