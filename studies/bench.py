"""SHEAR's distances beside other solvers of the same problem, in one run, as ratios.

    python -m studies.bench                                          # random walks
    python -m studies.bench --task embedded --model runs/NAME/start  # and the states of a model
    python -m studies.bench --model PATH --data problems.jsonl       # on other problems
    python -m studies.bench --tokens 300 1000 3000 --width 896 3584 --group 8 16 --pairs 4096

Random walks stand for hidden states; the last command has the sizes of a GPU. Other flags are those
of train.py, such as --prompts-per-step.

Ours is `fast.race`, from hidden states to each span's distance to the closest opposing span, group
after group as in training. A peer gets the ready-made cost blocks of full spans, in batches as
large as ours. It solves at most `--pairs` pairs of 100 x 100 tokens, or as many entries; its
seconds are scaled to all pairs. This favours peers.

A round measures each solver once, so that a drift of the machine affects all. Ratios are of one
round, reported as median (lowest-highest). The error is the largest relative one of Eq. (10), of
minima (ours) or of pairs (peers), against `sinkhorn.py` in float64 to a marginal error of 1e-7, on
up to `CHECKED` pairs.

Left out: the memory that each takes.
"""

import sys
from dataclasses import dataclass

from harness.config import Counts, GroupSizes, parse_study
from tasks.settings import Count


@dataclass(frozen=True)
class Bench:
    """SHEAR's distances beside POT, GeomLoss and exact transport: about a minute on two CPU cores.

    With --model and other flags of train.py, the states of a training step of this model, too.
    """

    tokens: Counts = (300,)
    """Tokens of synthetic responses."""
    width: Counts = (896,)
    """Width of synthetic states."""
    group: GroupSizes = (8,)
    """Rollouts of a synthetic group."""
    pairs: Count = 256
    """Pairs of 100 x 100 tokens that a peer solves at most; more if they are small."""
    rounds: Count = 3
    """Times that each solver is measured."""


if __name__ == "__main__":
    parse_study(Bench)  # --help and mistakes end here: what follows takes seconds to import

import datetime
import itertools
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import geomloss
import numpy as np
import ot.batch
import torch
from torch import Tensor
from tqdm import tqdm

from credit.settings import Shear
from fast.distances import token_distances
from fast.race import CHUNK_ENTRIES, race
from grpo import to_padded
from harness import tables
from harness.config import TrainConfig, parse_train
from harness.launch import resolve, run_command
from harness.parallel import Ranks
from harness.prepare import load_parts
from shear import Closest, Side, mean_norm, two_sides
from sinkhorn import sinkhorn
from studies import prefixes
from tasks.rows import BadInput

EPS = Shear.eps  # costs are in units of nbar
CHECKED = 128  # pairs whose errors are measured; at least all pairs of one right span
# iterations and tolerance of the float64 solutions that serve as reference
TRUE_ITERS = 20_000
TRUE_TOL = 1e-7


@run_command(memory="lower --tokens, --width or --group", interrupted="interrupted")
def main(argv: list[str] | None = None) -> None:
    """Measure all groups and print a table of each."""
    flags, others = parse_study(Bench, argv)
    config = resolve(parse_train(others))
    # POT warns that it has not converged, which the table's errors show
    warnings.simplefilter("ignore")
    device = torch.device(config.machine.device)
    name = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    print(f"{name}, float32, torch {torch.__version__}, {datetime.date.today()}", flush=True)
    if config.model:
        print_table(states_of_step(config, device), flags)
    for size, width, tokens in itertools.product(flags.group, flags.width, flags.tokens):
        print_table(synthetic(size, width, tokens, device), flags)


def print_table(states: "States", flags: Bench) -> None:
    """Measure, which may take minutes, and say so first."""
    print(f"\nmeasuring {states.name}", flush=True)
    print("\n".join(table(states, flags)), flush=True)


# ---- states --------------------------------------------------------------------------------------


class States(NamedTuple):
    """Rollout groups that are measured together."""

    name: str
    # of each the states (G, T, d), mask (G, T) bool and correct (G,) bool
    groups: list[tuple[Tensor, Tensor, Tensor]]
    window: int = Shear.window
    stride: int = Shear.stride


def synthetic(size: int, width: int, tokens: int, device: torch.device) -> States:
    """A group of random walks of norm sqrt(d), half of them right.

    They are bfloat16 on a GPU, as a model's states are there.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size, tokens, width, generator=generator).mul_(0.3).cumsum_(1)  # (G, T, d)
    hidden += torch.randn(size, 1, width, generator=generator)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.nn.functional.rms_norm(hidden, (width,)).to(device, dtype)
    mask = torch.ones(size, tokens, dtype=torch.bool, device=device)  # (G, T)
    correct = torch.arange(size, device=device) % 2 == 0  # (G,)
    return States(f"random walks, G {size}, T {tokens:,}, d {width:,}", [(hidden, mask, correct)])


def states_of_step(config: TrainConfig, device: torch.device) -> States:
    """As many groups of a model's rollouts as a training step has, with its spans.

    Raises BadInput if no group is mixed.
    """
    parts = load_parts(config, Ranks(0, 1, device))
    context = prefixes.context_at_start(parts)
    groups = []
    torch.manual_seed(config.seed)
    for problem in parts.task.heldout[: config.sampling.prompts_per_step]:
        group = prefixes.sample_group(parts, problem)
        if group.mixed:
            batch = prefixes.score_group(group, context)
            assert batch.hidden is not None  # `score_group` keeps them
            mask = batch.rollouts.mask
            groups.append((to_padded(batch.hidden, mask), mask, batch.correct))
    if not groups:
        none_mixed = "none of its groups holds right and wrong rollouts"
        raise BadInput(f"--model {config.model}: {none_mixed}; give another")
    size, _, width = groups[0][0].shape
    name = f"{config.model}, a training step, G {size}, d {width}"
    return States(name, groups, config.shear.window, config.shear.stride)


# ---- peers: Pairs -> Eq. (10) of each pair, (P,), or what the solver computes in its place -------


class Pairs(NamedTuple):
    """Some pairs of spans, in units of nbar.

    `x` and `y` are their states, for a solver that computes the costs itself.
    """

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
    """Each pair by a solver of one pair."""
    return torch.stack(list(map(solve, pairs.costs, pairs.a, pairs.b)))


def pot_solve(costs: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`ot.solve` with our limits."""
    return ot.solve(
        costs, a, b, reg=EPS, reg_type="kl", max_iter=Shear.max_iters, tol=Shear.tol
    ).value


def exact(costs: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`ot.emd2`, on a CPU: W1 itself."""
    return ot.emd2(a.double(), b.double(), costs.double())


def geomloss_batch(pairs: Pairs) -> Tensor:
    """GeomLoss, annealed to the same eps. It computes the costs itself."""
    loss = geomloss.SamplesLoss("sinkhorn", p=1, blur=EPS, debias=False, backend="tensorized")
    return loss(pairs.a, pairs.x, pairs.b, pairs.y)


def in_batches(solve: Callable[[Pairs], Tensor], pairs: Pairs) -> Tensor:
    """Solve the pairs in batches as large as ours.

    On a CPU such a batch stays in cache, which halves POT's time.
    """
    at_once = max(1, CHUNK_ENTRIES.get(pairs.costs.device.type, 2**19) // pairs.costs[0].numel())
    values = []
    for start in range(0, len(pairs.costs), at_once):
        batch = slice(start, start + at_once)
        values.append(solve(Pairs._make(tensor[batch] for tensor in pairs)))
    return torch.cat(values)


PEERS: dict[str, Callable[[Pairs], Tensor]] = {
    "every pair, sinkhorn.py": plain_sinkhorn,
    "POT `ot.batch.solve_batch`, 50 iterations": pot_batch,
    "POT `ot.solve`, a loop": partial(one_by_one, pot_solve),
    "GeomLoss `SamplesLoss`, tensorized": geomloss_batch,
    "POT `ot.emd2`, a loop, exact": partial(one_by_one, exact),
}


def two_sided(states: States) -> list[tuple[Side, Side]]:
    """The right and the wrong side of each group."""
    sides = []
    for hidden, mask, correct in states.groups:
        both = two_sides(hidden, mask, correct, states.window, states.stride)
        assert both is not None  # every group is mixed
        sides.append(both)
    return sides


def full_pairs(right: Side, wrong: Side, count: int) -> Pairs:
    """The first `count` pairs of spans without padding."""
    full = (right.spans.mass > 0).all(1)[:, None] & (wrong.spans.mass > 0).all(1)  # (K+, K-)
    places = full.nonzero()[:count]  # (count, 2)
    return pairs_of(right, wrong, places[:, 0], places[:, 1])


def pairs_of(right: Side, wrong: Side, k: Tensor, l: Tensor) -> Pairs:  # noqa: E741
    """The pairs of the right spans `k` (P,) and the wrong spans `l` (P,), with ready-made costs."""
    nbar = mean_norm(torch.cat([right.states, wrong.states]))
    i = right.spans.tokens[k]  # (P, n)
    j = wrong.spans.tokens[l]  # (P, m)
    costs = (
        token_distances(right.states, wrong.states)[i[:, :, None], j[:, None]] / nbar
    )  # (P, n, m)
    x = right.states[i].float() / nbar  # (P, n, d)
    y = wrong.states[j].float() / nbar  # (P, m, d)
    return Pairs(costs, right.spans.mass[k], wrong.spans.mass[l], x, y)


# ---- measuring -----------------------------------------------------------------------------------


def ours(states: States) -> Tensor:
    """Each right span's distance to the closest wrong one over nbar, (K+ of all groups,).

    The computation starts from the hidden states.
    """
    return torch.cat([closest.of_right for closest in race_groups(states)])


def race_groups(states: States) -> list[Closest]:
    """What the race finds in each group, `of_right` over nbar."""
    found = []
    for right, wrong in two_sided(states):
        nbar = mean_norm(torch.cat([right.states, wrong.states]))
        costs = token_distances(right.states, wrong.states)  # (N+, N-)
        closest = race(costs, right, wrong, EPS * nbar, max_iters=Shear.max_iters, tol=Shear.tol)
        found.append(closest._replace(of_right=closest.of_right / nbar))
    return found


def true_values(pairs: Pairs) -> Tensor:
    """(P,) float64, Eq. (10)."""
    costs, a, b = pairs.costs.double(), pairs.a.double(), pairs.b.double()
    return sinkhorn(costs, a, b, eps=EPS, max_iters=TRUE_ITERS, tol=TRUE_TOL).value


def relative_error(values: Tensor, truth: Tensor) -> str:
    """The largest one, of the first values (P,), whose truth (checked,) is given."""
    count = min(len(values), len(truth))
    return f"{(values[:count].to(truth) / truth[:count] - 1).abs().max().item():.0e}"


def true_minima(right: Side, wrong: Side) -> Tensor:
    """The least value of each of the first right spans, (rows,): of some whole rows of pairs."""
    columns = len(wrong.spans.tokens)  # K-
    rows = min(len(right.spans.tokens), max(1, CHECKED // columns))
    index = torch.arange(rows * columns, device=right.states.device)
    values = true_values(pairs_of(right, wrong, index // columns, index % columns))
    return values.view(rows, columns).amin(1)


def seconds_of(solve: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of a call, after one that does not count."""
    for _ in range(2):
        started = time.perf_counter()
        solve()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - started


def table(states: States, flags: Bench) -> list[str]:
    """Seconds per group, ratios to ours, and errors, as a table.

    Peers get pairs of one group alone. Raises BadInput if no group has full spans on both sides.
    """
    sides = two_sided(states)
    device = states.groups[0][0].device
    solved = 0
    iterations: list[float] = []  # of all pairs
    for closest in race_groups(states):
        assert closest.iterations is not None and closest.error is not None  # the race counts
        iterations += closest.iterations.tolist()
        solved += len(closest.error)
    total = len(iterations)
    for right, wrong in sides:
        most = max(1, flags.pairs * 100**2 // right.spans.tokens.shape[1] ** 2)
        pairs = full_pairs(right, wrong, most)
        if len(pairs.costs):
            break
    else:
        raise BadInput(
            f"{states.name}: no span of {states.window} tokens is full on both sides; leave it out"
        )
    right, wrong = sides[0]
    checked = Pairs._make(tensor[:CHECKED] for tensor in pairs)
    truth = in_batches(true_values, checked)
    minima = true_minima(right, wrong)
    solvers: dict[str, Callable[[], Tensor]] = {"ours": partial(ours, states)}
    for name, function in PEERS.items():
        solvers[name] = partial(in_batches, function, pairs)
    seconds = np.zeros((flags.rounds, len(solvers)))
    for turn in tqdm(range(flags.rounds), states.name, leave=False, disable=None):
        for column, solve in enumerate(solvers.values()):
            seconds[turn, column] = seconds_of(solve, device)
    seconds[:, 1:] *= total / len(pairs.costs)  # of all pairs
    medians = np.median(seconds, 0)
    ratios = seconds / seconds[:, :1]
    rows = []
    for column, (name, solve) in enumerate(solvers.items()):
        times = ratios[:, column]
        row = {"": name, "s per group": f"{medians[column] / len(sides):.3g}"}
        row["times ours"] = f"{np.median(times):.1f} ({times.min():.1f}-{times.max():.1f})"
        expected = minima if name == "ours" else truth  # the first values
        error = "-" if "exact" in name else relative_error(solve(), expected)
        rows.append(row | {"largest error": error})
    about = (
        f"{states.name}, w {states.window}, s {states.stride}: {total:,} pairs, mixed groups: "
        f"{len(sides)}; {solved / total:.1%} are solved to the end, {np.mean(iterations):.1f} "
        f"iterations a pair; peers solve {len(pairs.costs):,} pairs"
    )
    return [about, *tables.markdown(rows)]


if __name__ == "__main__":
    sys.exit(main())
