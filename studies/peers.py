"""SHEAR's distances beside those who could compute them: one command, one run, ratios side by side.

    python -m studies.bench  # a step of the embedded model, and a synthetic group
    python -m studies.bench --states states.safetensors  # and groups of states: groupN.rolloutK.right or .wrong
    python -m studies.bench --states states.safetensors --stretch 3000  # the same, interpolated to long responses
    python -m studies.bench --tokens 300 1000 3000 --width 896 3584 --group 8 16  # a GPU's sizes by default

Ours is `ablations.span_distances`: from hidden states to each span's distance to the closest opposing span, everything
included, group after group as in training. The peers get the cost blocks of their pairs ready-made, of full spans only,
and of at most `--pairs` pairs of 100 x 100 tokens or as many entries; their seconds are then those of all pairs in
proportion. That favours them. Rounds go by turns, so that what drifts hits all; a ratio is
of one round, reported as median (lowest-highest). The error is the largest relative one of Eq. (10), of minima (ours)
or pairs (peers), against sinkhorn.py in float64 to a marginal error of 1e-7, on up to `CHECKED` pairs. `emd2` solves
another problem, exactly: no error.

The floor is what this machine cannot go below: states read, costs written and read once, at the rate of a copy; or the
products between states, an exponential an entry of each tile and two multiply-adds an entry and iteration, for the
iterations that our race took, at the rates of a matrix product and of `exp` in float32.
"""

import argparse
import itertools
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import geomloss
import ot
import ot.batch
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import interpolate
from tqdm import tqdm

from credit.ablations import Settings, span_distances
from credit.methods import Batch
from fast.distances import token_distances
from fast.kernel import available
from fast.race import CHUNK_ENTRIES
from grpo import Policy
from harness import tables
from harness.command import guarded
from harness.parallel import Ranks
from harness.prepare import set_up, warm_up
from harness.recipe import Parser, parse_args
from shear import Side, mean_norm, two_sides
from sinkhorn import sinkhorn
from studies import prefixes
from studies.machine import ceilings, hardware
from tasks.problems import BadInput

SEED = 0
SOLVER = dict(eps=Settings.eps, max_iters=Settings.max_iters, tol=Settings.tol)  # the recipe's
EPS = SOLVER["eps"]
CHECKED = 128  # pairs; at least one row of them
TRUTH = dict(max_iters=20_000, tol=1e-7)  # what they are checked against, in float64


class States(NamedTuple):
    """Groups to measure together."""

    name: str
    hidden: Tensor  # (B, T, d)
    mask: Tensor  # (B, T) bool
    correct: Tensor  # (B,) bool
    group: int  # G, rollouts that are adjacent
    window: int
    stride: int


class Pairs(NamedTuple):
    """Some pairs of spans, in units of nbar, costs ready-made; `x` and `y` are the states, for who computes costs."""

    costs: Tensor  # (P, n, m) float32
    a: Tensor  # (P, n)
    b: Tensor  # (P, m)
    x: Tensor  # (P, n, d)
    y: Tensor  # (P, m, d)


# ---- peers: Pairs -> Eq. (10) of each pair, (P,), or what they have in its place -----------------------------


def every_pair(blocks: Pairs) -> Tensor:
    """sinkhorn.py, each pair to its own stop."""
    return sinkhorn(blocks.costs, blocks.a, blocks.b, eps=EPS).value


def pot_batch(blocks: Pairs) -> Tensor:
    """POT's batch solver, 50 iterations in the log domain."""
    options = dict(reg=EPS, max_iter=50, tol=0.0, method="log_sinkhorn", reg_type="kl", grad="detach")
    return ot.batch.solve_batch(blocks.costs, a=blocks.a, b=blocks.b, **options).value


def pot_loop(blocks: Pairs) -> Tensor:
    """`ot.sinkhorn`, which is all of `ot.sinkhorn2`, pair by pair with our limits; Eq. (10) of its plan."""
    values = []
    for costs, a, b in zip(blocks.costs, blocks.a, blocks.b, strict=True):
        options = dict(method="sinkhorn_log", numItermax=SOLVER["max_iters"], stopThr=SOLVER["tol"])
        plan = ot.sinkhorn(a, b, costs, EPS, **options)
        density = plan / (a[:, None] * b)
        values.append((plan * costs).sum() + EPS * torch.xlogy(plan, density).sum())
    return torch.stack(values)


def geomloss_batch(blocks: Pairs) -> Tensor:
    """GeomLoss, annealed to the same eps; it computes the costs itself."""
    loss = geomloss.SamplesLoss("sinkhorn", p=1, blur=EPS, debias=False, backend="tensorized")
    return loss(blocks.a, blocks.x, blocks.b, blocks.y)


def exact_loop(blocks: Pairs) -> Tensor:
    """`ot.emd2` pair by pair, on a CPU: W1 itself."""
    cpu = [part.double().cpu().numpy() for part in (blocks.a, blocks.b, blocks.costs)]
    return torch.tensor([ot.emd2(*each) for each in zip(*cpu, strict=True)])


def in_batches(solve, blocks: Pairs) -> Tensor:
    """As large as ours are. On a CPU these stay in cache: all pairs at once take POT up to twice as long."""
    at_once = max(1, CHUNK_ENTRIES.get(blocks.costs.device.type, 2**19) // blocks.costs[0].numel())
    parts = zip(*(each.split(at_once) for each in blocks), strict=True)
    return torch.cat([solve(Pairs(*part)) for part in parts])


PEERS = {  # and of how many pairs, at most, as a share of --pairs: on a GPU loops take few, milliseconds for each
    "every pair, sinkhorn.py": (every_pair, dict(cpu=1.0, cuda=1.0)),
    "POT `ot.batch.solve_batch`, 50 iterations": (pot_batch, dict(cpu=1.0, cuda=1.0)),
    "POT `ot.sinkhorn`, a loop": (pot_loop, dict(cpu=1 / 8, cuda=1 / 128)),
    "GeomLoss `SamplesLoss`, tensorized": (geomloss_batch, dict(cpu=1 / 4, cuda=1 / 4)),
    "POT `ot.emd2`, a loop, exact": (exact_loop, dict(cpu=1 / 2, cuda=1 / 128)),
}


# ---- the command ----------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 where memory does not suffice, 2 for bad input, 130 after Ctrl-C."""
    transformers.utils.logging.disable_progress_bar()

    def work() -> int:
        flags = parse(argv)
        device = torch.device(flags.device)
        print(hardware(device, "float32"), flush=True)
        rates = ceilings(device)
        for states in groups(flags, device):
            print("\n" + "\n".join(table(states, flags, rates)), flush=True)
        return 0

    return guarded(work, interrupted="interrupted", memory="lower --tokens, --width or --group")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags; raises BadInput."""
    parser = Parser(
        prog="python -m studies.bench", description="SHEAR's distances beside POT, GeomLoss and exact transport."
    )
    parser.epilog = "--step measures a step of training instead: see python -m studies.bench --step --help"
    add, cuda = parser.add_argument, torch.cuda.is_available()
    add("--states", type=Path, help="safetensors file of groups of states, groupN.rolloutK.right or .wrong (T, d)")
    add("--stretch", type=int, default=0, help="tokens to which their responses are interpolated; 0: as they are")
    add("--model", help="a folder of the embedded task's model; if not given, one is made and warmed up")
    add("--tokens", type=int, nargs="*", default=[300, 1000, 3000] if cuda else [300], help="of synthetic responses")
    add("--width", type=int, nargs="*", default=[896, 3584] if cuda else [896], help="of synthetic states")
    add("--group", type=int, nargs="*", default=[8, 16] if cuda else [8], help="rollouts of a synthetic group")
    add("--window", type=int, default=Settings.window, help="tokens a span, in synthetic and --states groups")
    add("--stride", type=int, default=Settings.stride, help="tokens between the starts of these spans")
    add(
        "--pairs",
        type=int,
        default=4096 if cuda else 256,
        help="of 100 x 100 that a peer solves at most; more if small",
    )
    add("--rounds", type=int, default=3, help="times that each is measured")
    add("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    flags = parser.parse_args(argv)
    least = dict(window=1, stride=1, stretch=0, pairs=8, rounds=1, tokens=1, width=1, group=2)
    for name, bound in least.items():
        given = getattr(flags, name)
        for value in given if isinstance(given, list) else [given]:
            if value < bound:
                raise BadInput(f"--{name} {value}: must be at least {bound}; raise it")
    if flags.stride > flags.window:
        raise BadInput(f"--stride {flags.stride} exceeds --window {flags.window}: tokens go uncovered; lower it")
    if flags.device == "cuda" and not cuda:
        raise BadInput("--device cuda: torch sees no CUDA device; use --device cpu")
    return flags


# ---- states ---------------------------------------------------------------------------------------------------


def groups(flags: argparse.Namespace, device: torch.device):
    """The groups to measure, one after the other; those of a file are read before anything is measured."""
    given = list(real(flags.states, flags.stretch, flags.window, flags.stride, device)) if flags.states else []
    yield embedded(flags, device)
    for size, width, tokens in itertools.product(flags.group, flags.width, flags.tokens):
        yield synthetic(size, tokens, width, flags.window, flags.stride, device)
    yield from given


def synthetic(size: int, tokens: int, width: int, window: int, stride: int, device: torch.device) -> States:
    """Random walks of norm sqrt(d), half of them right; bfloat16 on a GPU, as a model's states are there."""
    generator = torch.Generator().manual_seed(SEED)
    hidden = torch.randn(size, tokens, width, generator=generator).mul_(0.3).cumsum_(1)
    hidden += torch.randn(size, 1, width, generator=generator)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.nn.functional.rms_norm(hidden, (width,)).to(device, dtype)
    mask = torch.ones(size, tokens, dtype=torch.bool, device=device)
    name = f"random walks, G {size}, T {tokens:,}, d {width:,}"
    return States(name, hidden, mask, torch.arange(size, device=device) % 2 == 0, size, window, stride)


def embedded(flags: argparse.Namespace, device: torch.device) -> States:
    """As many groups of the embedded model as a training step has, with the task's own spans."""
    args = parse_args(["--task", "embedded", *(["--model", flags.model] if flags.model else [])])
    args.device, ranks = device.type, Ranks(0, 1, device)
    task, model, tokenizer, *_ = set_up(args, ranks)
    if not flags.model:
        print(f"warming up the embedded model, {args.warmup_steps} steps", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            warm_up(model, tokenizer, task, args, Path(folder), ranks)
    model = model.eval().to(device)
    torch.manual_seed(SEED)
    sampled = [
        prefixes.sampled(args, task, model, tokenizer, problem) for problem in task.heldout[: args.batch // args.group]
    ]
    if not any(group.mixed for group in sampled):
        raise BadInput(f"--model {flags.model}: none of its groups holds right and wrong rollouts; give another")
    batch = Batch.cat([prefixes.scored(group, Policy(model), task, tokenizer, args) for group in sampled])
    hidden, mask = batch.scored.hidden, batch.rollouts.mask
    name = (
        f"the embedded model, a step of {len(mask)} rollouts, G {args.group}, T {mask.shape[1]}, d {hidden.shape[-1]}"
    )
    return States(name, hidden, mask, batch.correct, args.group, args.window, args.stride)


def real(path: Path, stretch: int, window: int, stride: int, device: torch.device):
    """The groups of --states, responses of `stretch` tokens if that is not 0; raises BadInput."""
    found = {}
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            for name in sorted(file.keys()):
                group, _, side = name.split(".")
                found.setdefault(group, []).append((file.get_tensor(name), {"right": True, "wrong": False}[side]))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        raise BadInput(f"--states {path}: {reason}; name tensors groupN.rolloutK.right or .wrong") from error
    for group, rollouts in found.items():
        parts, sides = zip(*rollouts, strict=True)
        if all(sides) or not any(sides) or not all(map(len, parts)):
            raise BadInput(f"--states {path}: {group} holds an empty rollout, or those of one side only; leave it out")
        if stretch:
            parts = [interpolate(part.T[None].float(), stretch, mode="linear")[0].T.to(part) for part in parts]
        lengths = torch.tensor([len(part) for part in parts], device=device)
        mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]  # (G, T)
        hidden = parts[0].new_zeros(*mask.shape, parts[0].shape[1])
        hidden[mask] = torch.cat(parts)
        correct = torch.tensor(sides, device=device)
        name = f"{path.name} {group}, {sum(sides)} right, {len(sides) - sum(sides)} wrong, T {mask.shape[1]:,}"
        yield States(name, hidden, mask, correct, len(mask), window, stride)


# ---- measuring ------------------------------------------------------------------------------------------------


def two_sided(states: States) -> list[tuple[Side, Side]]:
    """Right and wrong side of each group that has both."""
    pairs = []
    for start in range(0, len(states.mask), states.group):
        group = slice(start, start + states.group)
        parts = states.hidden[group], states.mask[group], states.correct[group]
        right, wrong = two_sides(*parts, states.window, states.stride)
        if right is not None:
            pairs.append((right, wrong))
    return pairs


class Found(NamedTuple):
    """What SHEAR asks for, of all groups."""

    of_right: list[Tensor]  # (K+,) a group, over nbar
    iterations: Tensor  # (P,) of all pairs
    error: Tensor  # (solved,)


def ours(states: States, fused: bool = False) -> Found:
    """Each span's distance to the closest opposing one, from hidden states on."""
    settings, stats = Settings(fused=fused), []
    of_right = [span_distances(right, wrong, settings, stats)[0] for right, wrong in two_sided(states)]
    iterations, error = (torch.cat([group[name] for group in stats]) for name in ("iterations", "error"))
    return Found(of_right, iterations, error)


def table(states: States, flags: argparse.Namespace, rates: dict[str, float]) -> list[str]:
    """Seconds of a group, ratios to ours, errors and memory."""
    groups, device = two_sided(states), states.mask.device
    total = sum(len(right.spans.tokens) * len(wrong.spans.tokens) for right, wrong in groups)
    tile = groups[0][0].spans.tokens.shape[1] ** 2
    pairs = flags.pairs * 100**2 / tile
    limits = {name: max(1, int(pairs * shares[device.type])) for name, (_, shares) in PEERS.items()}
    blocks = full_blocks(groups, max(limits.values()))
    if not len(blocks.costs):
        raise BadInput(f"--window {states.window}: {states.name} have no spans that long on both sides; lower it")
    parts = {name: Pairs(*(each[:limit] for each in blocks)) for name, limit in limits.items()}
    whole = {"ours": False, "ours, `--fused`": True} if device.type == "cuda" and available() else {"ours": False}
    calls = {name: partial(ours, states, fused) for name, fused in whole.items()}
    calls |= {name: partial(in_batches, PEERS[name][0], part) for name, part in parts.items()}
    solved = dict.fromkeys(whole, total) | {name: len(part.costs) for name, part in parts.items()}  # pairs
    seconds, peaks, found = {name: [] for name in calls}, dict.fromkeys(calls, 0.0), {}
    for _ in tqdm(range(flags.rounds), states.name, leave=False, disable=None):
        for name, call in calls.items():
            once, found[name] = timed(call, device, peaks, name)
            seconds[name].append(once * total / solved[name])
    errors = accuracy(groups[0], blocks, found)
    body = []
    for name, times in seconds.items():
        ratios = [each / own for each, own in zip(times, seconds["ours"], strict=True)]
        ratio = "" if name == "ours" else f"{median(ratios):.1f} ({min(ratios):.1f}-{max(ratios):.1f})"
        memory = f"{peaks[name]:.2f}" if device.type == "cuda" else "-"
        took = f"{median(times) / len(groups):.3g}"
        body.append([name, took, ratio, f"{solved[name]:,}", errors.get(name, "-"), memory])
    iterations, error = found["ours"].iterations, found["ours"].error
    least, bound = floor(groups, iterations, rates)
    share = f"{least / median(seconds['ours']):.3f}"
    body.append(["floor: " + bound, f"{least / len(groups):.2g}", share, "", "", ""])
    heads = ["", "s a group", "times ours", "pairs measured", "largest error", "GB"]
    return [
        f"{states.name}, w {states.window}, s {states.stride}: {total:,} pairs, mixed groups: {len(groups)}; "
        f"{len(error) / total:.1%} are solved to the end, {iterations.float().mean():.1f} iterations a pair",
        *tables.lay_out(heads, body),
    ]


def full_blocks(groups: list[tuple[Side, Side]], count: int) -> Pairs:
    """The first `count` pairs of spans without padding, group after group."""
    parts, missing = [], count
    for sides in groups:
        full = [(side.spans.mass > 0).all(1).nonzero().flatten() for side in sides]
        parts.append(blocks_of(sides, *full, missing))
        missing -= len(parts[-1].costs)
    return Pairs(*(torch.cat(each) for each in zip(*parts, strict=True)))


def blocks_of(sides: tuple[Side, Side], rows: Tensor, columns: Tensor, count: int) -> Pairs:
    """The first `count` pairs of these spans, row by row, with ready-made costs."""
    k, l = (part.flatten()[:count] for part in torch.meshgrid(rows, columns, indexing="ij"))  # noqa: E741
    right, wrong = sides
    nbar = mean_norm(torch.cat([right.states, wrong.states]))
    i, j = right.spans.tokens[k], wrong.spans.tokens[l]  # (P, n), (P, m)
    costs = token_distances(right.states, wrong.states)[i[:, :, None], j[:, None]] / nbar  # (P, n, m)
    x, y = right.states[i].float() / nbar, wrong.states[j].float() / nbar  # (P, n, d), (P, m, d)
    return Pairs(costs, right.spans.mass[k], wrong.spans.mass[l], x, y)


def timed(call, device: torch.device, peaks: dict[str, float], name: str) -> tuple[float, object]:
    """Seconds and result of a call, after one that does not count; the memory it takes on a GPU goes to `peaks`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # POT says that it has not converged, which the table does, too
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        held, started = torch.cuda.memory_allocated() if device.type == "cuda" else 0, time.perf_counter()
        result = call()
        if device.type == "cuda":
            torch.cuda.synchronize()
            peaks[name] = max(peaks[name], (torch.cuda.max_memory_allocated() - held) / 1e9)
    return time.perf_counter() - started, result


def accuracy(sides: tuple[Side, Side], part: Pairs, found: dict) -> dict[str, str]:
    """The largest relative error of Eq. (10) against float64: ours of the minima of whole rows, peers' of pairs."""

    def truth(blocks: Pairs, count: int) -> Tensor:
        return sinkhorn(*(each[:count].double() for each in blocks[:3]), eps=EPS, **TRUTH).value

    every = [torch.arange(len(side.spans.tokens), device=side.states.device) for side in sides]
    rows = every[0][: max(1, CHECKED // len(every[1]))]
    count = len(rows) * len(every[1])
    minima = truth(blocks_of(sides, rows, every[1], count), count).view(len(rows), -1).amin(1)
    pairs, errors = truth(part, CHECKED), {}
    for name, values in found.items():
        if name not in PEERS:
            errors[name] = values.of_right[0][rows] / minima - 1
        elif PEERS[name][0] is not exact_loop:
            known = values[:CHECKED].to(pairs)
            errors[name] = known / pairs[: len(known)] - 1
    return {name: f"{error.abs().max().item():.0e}" for name, error in errors.items()}


def floor(groups: list[tuple[Side, Side]], iterations: Tensor, rates: dict) -> tuple[float, str]:
    """Seconds for all pairs below which this machine cannot go, and what sets them."""
    moved = products = 0
    for right, wrong in groups:
        rows, columns, width = len(right.states), len(wrong.states), right.states.shape[1]
        moved += (rows + columns) * width * right.states.element_size() + 2 * 4 * rows * columns
        products += 2 * rows * columns * width
    entries = groups[0][0].spans.tokens.shape[1] * groups[0][1].spans.tokens.shape[1]
    compute = (products + 4 * entries * iterations.sum().item()) / rates["matmul"]
    seconds = {"copy": moved / rates["copy"], "compute": compute + entries * len(iterations) / rates["exp"]}
    largest = max(seconds, key=seconds.get)
    return seconds[largest], largest
