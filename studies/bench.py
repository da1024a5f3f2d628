"""Time and error of SHEAR's distances beside its "peers": POT, GeomLoss and exact transport.

    python -m studies.bench                                          # random walks
    python -m studies.bench --task embedded --model runs/NAME/start  # and the states of a model
    python -m studies.bench --model PATH --data problems.jsonl       # the same on other problems
    python -m studies.bench --tokens 300 1000 3000 --width 896 3584 --group 8 16 --pairs 4096

Random walks stand for hidden states; the sizes of the last command are for a GPU. Other flags are
those of train.py, such as --prompts-per-step.

Ours is what training calls, from hidden states to token weights, group by group; most of its time
goes into `fast.race` and `fast.distances`. Peers get pairs of full spans with ready-made costs
(GeomLoss gets states), in batches as large as ours. They solve at most `--pairs` pairs of 100 x 100
tokens, more if pairs are smaller, and loops at most `LOOPED`; their seconds are scaled to all
pairs. This favours peers, whose seconds include no token weights and, except for GeomLoss, no
costs.

Each round measures every solver, so a drift of the machine affects all alike. Ratios are taken
within a round; the table has their median (lowest-highest). Errors are the largest relative errors
of Eq. (10): ours of the spans' minima, peers' of single pairs. The reference is `sinkhorn.py` in
float64 to a marginal error of 1e-7, on the first `CHECKED` pairs.

Left out: the solvers' use of memory.
"""

import sys
from dataclasses import dataclass

from harness.config import Counts, GroupSizes, parse_study
from tasks.settings import Count


@dataclass(frozen=True)
class Bench:
    """Time SHEAR's distances beside POT, GeomLoss and exact transport; under a minute on a CPU.

    With --model and other flags of train.py, also on the states of a training step of this model.
    """

    tokens: Counts = (300,)
    """Tokens of synthetic responses."""
    width: Counts = (896,)
    """Width of synthetic states."""
    group: GroupSizes = (8,)
    """Rollouts of a synthetic group."""
    pairs: Count = 256
    """Maximum number of pairs of 100 x 100 tokens that a peer solves; more if they are smaller."""
    rounds: Count = 3
    """Number of times that each solver is measured."""


if __name__ == "__main__":
    parse_study(Bench)  # --help and wrong flags end here: the imports below take seconds

import datetime
import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import geomloss
import ot.batch
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from credit.settings import Shear
from credit.shear_settings import shear_options
from fast.distances import CHUNK_ENTRIES, token_distances
from grpo import to_padded
from harness import tables
from harness.command import resolve, run_command
from harness.config import TrainConfig, parse_train
from harness.load import load_parts
from harness.run import Ranks
from shear import Closest, Side, Spans, closest_spans, mean_norm, shear_weights, two_sides
from sinkhorn import sinkhorn
from studies import prefixes
from tasks.errors import BadInput

EPS = Shear.eps  # costs are in units of nbar
CHECKED = 128  # pairs whose errors are measured; ours: or all pairs of one right span, if more
LOOPED = 256  # pairs that a loop over pairs solves at most: each takes the same time
# Iterations and tolerance of the reference in float64.
TRUE_ITERS = 20_000
TRUE_TOL = 1e-7


@run_command(memory="lower --tokens, --width or --group", interrupted="interrupted")
def main(argv: list[str] | None = None) -> None:
    """Print a table for the model's groups, if there is a model, and one per synthetic group."""
    flags, others = parse_study(Bench, argv)
    config = resolve(parse_train(others))
    # POT warns that it has not converged, which the table's errors show
    warnings.simplefilter("ignore")
    device = torch.device(config.machine.device)
    hardware = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    print(f"{hardware}, float32, torch {torch.__version__}, {datetime.date.today()}", flush=True)
    if config.model:
        print_table(states_of_step(config, device), flags)
    for group_size, width, tokens in itertools.product(flags.group, flags.width, flags.tokens):
        print_table(synthetic(group_size, width, tokens, device), flags)


def print_table(states: "States", flags: Bench) -> None:
    """Announce a measurement, which may take minutes, and print its table."""
    print(f"\nmeasuring {states.name}", flush=True)
    print("\n".join(table(states, flags)), flush=True)


# ---- states --------------------------------------------------------------------------------------


class States(NamedTuple):
    """Mixed rollout groups that are measured together."""

    name: str
    # each group's states (G, T, d), mask (G, T) bool and correct (G,) bool
    groups: list[tuple[Tensor, Tensor, Tensor]]
    shear: Shear = Shear()  # window and stride of their spans


def synthetic(group_size: int, width: int, tokens: int, device: torch.device) -> States:
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
    return States(name, [(hidden, mask, correct)])


def states_of_step(config: TrainConfig, device: torch.device) -> States:
    """The mixed groups of rollouts to as many held-out problems as a training step has.

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
            groups.append((to_padded(batch.states, batch.mask), batch.mask, batch.correct))
    if not groups:
        none_mixed = "none of its groups holds right and wrong rollouts"
        raise BadInput(f"--model {config.model}: {none_mixed}; give another")
    size, _, width = groups[0][0].shape
    name = f"{config.model}, a training step, G {size}, d {width}"
    return States(name, groups, Shear(config.shear.window, config.shear.stride))


# ---- peers: functions from Pairs to values (P,), of Eq. (10) or of the solver's own problem ------


class Pairs(NamedTuple):
    """P pairs of spans: costs, masses a and b, and states; costs and states are in units of nbar.

    The states are for GeomLoss, which computes costs itself.
    """

    costs: Tensor  # (P, n, m) float32
    a: Tensor  # (P, n)
    b: Tensor  # (P, m)
    x: Tensor  # (P, n, d)
    y: Tensor  # (P, m, d)


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


def exact(costs: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`ot.emd2`, which computes on a CPU: W1 itself, without the entropy of Eq. (10)."""
    return ot.emd2(a.double(), b.double(), costs.double())


def geomloss_batch(pairs: Pairs) -> Tensor:
    """GeomLoss on the pairs' states, annealed to the same eps."""
    loss = geomloss.SamplesLoss("sinkhorn", p=1, blur=EPS, debias=False, backend="tensorized")
    return loss(pairs.a, pairs.x, pairs.b, pairs.y)


def in_batches(solve: Callable[[Pairs], Tensor], pairs: Pairs) -> Tensor:
    """Solve the pairs in batches as large as ours.

    On a CPU such a batch stays in cache, which halves POT's time.
    """
    at_once = max(1, CHUNK_ENTRIES[pairs.costs.device.type] // pairs.costs[0].numel())
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


def both_sides(states: States) -> list[tuple[Side, Side]]:
    """The right and the wrong side of each group."""
    sides = []
    for hidden, mask, correct in states.groups:
        both = two_sides(hidden, mask, correct, states.shear.window, states.shear.stride)
        assert both is not None  # every group is mixed
        sides.append(both)
    return sides


def full_pairs(right: Side, wrong: Side, count: int) -> Pairs:
    """The first pairs of spans without padding, at most `count`."""
    full = (right.spans.mass > 0).all(1)[:, None] & (wrong.spans.mass > 0).all(1)  # (K+, K-)
    k, l = full.nonzero()[:count].unbind(1)  # noqa: E741 - the paper's letters
    i = right.spans.tokens[k]  # (P, n)
    j = wrong.spans.tokens[l]  # (P, m)
    nbar = mean_norm(torch.cat([right.states, wrong.states]))
    costs = token_distances(right.states, wrong.states)[i[:, :, None], j[:, None]]  # (P, n, m)
    x = right.states[i].float() / nbar  # (P, n, d)
    y = wrong.states[j].float() / nbar  # (P, m, d)
    return Pairs(costs / nbar, right.spans.mass[k], wrong.spans.mass[l], x, y)


# ---- measuring -----------------------------------------------------------------------------------


def ours(states: States) -> list[Closest]:
    """Weigh each group as training does; returns the closest spans, with `of_right` over nbar."""
    closest = []
    for hidden, mask, correct in states.groups:
        weighed = shear_weights(hidden, mask, correct, **shear_options(states.shear))
        assert weighed.closest is not None  # every group is mixed
        closest.append(weighed.closest._replace(of_right=weighed.closest.of_right / weighed.nbar))
    return closest


def true_values(pairs: Pairs) -> Tensor:
    """The reference for peers: Eq. (10) of each pair, (P,) float64."""
    costs = pairs.costs.double()
    a = pairs.a.double()
    b = pairs.b.double()
    return sinkhorn(costs, a, b, eps=EPS, max_iters=TRUE_ITERS, tol=TRUE_TOL).value


def relative_error(values: Tensor, truth: Tensor) -> str:
    """The largest relative error, as text, of those first values (P,) whose truth is known."""
    count = min(len(values), len(truth))
    errors = values[:count].to(truth) / truth[:count] - 1
    return f"{errors.abs().max().item():.0e}"


def true_minima(sides: tuple[Side, Side]) -> Tensor:
    """The reference for ours: the first right spans' distances to their closest, (K,) float64."""
    right, wrong = sides
    count = max(1, CHECKED // len(wrong.spans.tokens))  # K
    first = Spans(right.spans.tokens[:count], right.spans.mass[:count])
    nbar = mean_norm(torch.cat([right.states, wrong.states]))
    costs = token_distances(right.states, wrong.states).double() / nbar  # (N+, N-)
    return closest_spans(
        costs, right._replace(spans=first), wrong, EPS, max_iters=TRUE_ITERS, tol=TRUE_TOL
    ).of_right


def seconds_of(solve: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, after a first call as a warm-up."""
    for _ in range(2):
        started = time.perf_counter()
        solve()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - started


def table(states: States, flags: Bench) -> list[str]:
    """Lines of a table: seconds per group, ratios to ours, and errors.

    Peers get pairs of one group, the first that has full spans on both sides. Raises BadInput if
    none has.
    """
    sides = both_sides(states)
    device = states.groups[0][0].device
    for right, wrong in sides:
        count = max(1, flags.pairs * 100**2 // right.spans.tokens.shape[1] ** 2)
        pairs = full_pairs(right, wrong, count)
        if len(pairs.costs):
            break
    else:
        spans = f"span of {states.shear.window} tokens"
        raise BadInput(f"{states.name}: no {spans} is full on both sides; leave it out")
    truth = in_batches(true_values, full_pairs(right, wrong, CHECKED))
    closest = ours(states)
    solved = 0  # pairs that ours solves to the end
    iterations: list[float] = []  # of ours, per pair
    for of_group in closest:
        assert of_group.iterations is not None and of_group.error is not None  # the race counts
        iterations += of_group.iterations.tolist()
        solved += len(of_group.error)
    total = len(iterations)
    errors = {"ours": relative_error(closest[0].of_right, true_minima(sides[0]))}
    solvers: dict[str, Callable[[], object]] = {"ours": partial(ours, states)}
    scale = {}  # from a peer's pairs to all of them
    for name, function in PEERS.items():
        count = LOOPED if "a loop" in name else len(pairs.costs)
        peers_pairs = Pairs._make(tensor[:count] for tensor in pairs)
        scale[name] = total / len(peers_pairs.costs)
        solvers[name] = partial(in_batches, function, peers_pairs)
        if "exact" not in name:  # exact transport is another problem
            errors[name] = relative_error(in_batches(function, peers_pairs), truth)
    rounds = []
    for _ in tqdm(range(flags.rounds), states.name, leave=False, disable=None):
        rounds.append({name: seconds_of(solve, device) for name, solve in solvers.items()})
    seconds = pd.DataFrame(rounds)
    for name in PEERS:
        seconds[name] *= scale[name]
    ratios = seconds.div(seconds["ours"], axis=0)
    rows = []
    for name, ratio in ratios.items():
        row = {"": name, "s per group": f"{seconds[name].median() / len(sides):.3g}"}
        row["times ours"] = f"{ratio.median():.1f} ({ratio.min():.1f}-{ratio.max():.1f})"
        rows.append(row | {"largest error": errors.get(name, "-")})
    about = (
        f"{states.name}, w {states.shear.window}, s {states.shear.stride}: {total:,} pairs, "
        f"mixed groups: {len(sides)}; {solved / total:.1%} are solved to the end, "
        f"{statistics.mean(iterations):.1f} iterations per pair; peers solve {len(pairs.costs):,} "
        "pairs"
    )
    return [about, *tables.markdown(rows)]


if __name__ == "__main__":
    sys.exit(main())
