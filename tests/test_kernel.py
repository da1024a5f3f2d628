"""fast/kernel.py against sinkhorn.py, pair by pair: in Triton's interpreter, or on a GPU where there is one."""

import dataclasses
import importlib.util
import os
import sys

import pytest
import torch

from credit.shear_settings import Settings, group_weights
from sinkhorn import Transport, sinkhorn

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # heard only before the first import of Triton

from fast import kernel as module  # noqa: E402

if module.triton is None:
    WHY_NOT = "Triton is not installed"
elif not ON_GPU and isinstance(module.tl.sum, module.triton.JITFunction):
    WHY_NOT = "no GPU, and Triton was imported before TRITON_INTERPRET=1 was set"
else:
    WHY_NOT = ""
runs = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
on_gpu = pytest.mark.skipif(bool(WHY_NOT) or not ON_GPU, reason=WHY_NOT or "no GPU")

DEVICE, WINDOW = ("cuda", 100) if ON_GPU else ("cpu", 12)
STARTS = torch.arange(3) * (WINDOW // 2)  # spans overlap by half
FULL = torch.full((3,), WINDOW)
RAGGED = torch.tensor([WINDOW - 1, 1, WINDOW // 2])


def states(seed: int, clusters: float = 0.0) -> torch.Tensor:
    """(2 WINDOW, 6) float32 states; those of a half window share a random centre of size `clusters`."""
    generator = torch.Generator().manual_seed(seed)
    centres = clusters * torch.randn(4, 6, generator=generator)
    return torch.randn(2 * WINDOW, 6, generator=generator) + centres.repeat_interleave(WINDOW // 2, 0)


CASES = {  # states of both sides, lengths of both sides, eps in units of the mean distance
    "random": (states(0), states(1), FULL, FULL, 0.2),
    "clustered": (states(2, clusters=4.0), states(3, clusters=4.0), FULL, FULL, 0.1),
    "identical sides": (states(4), states(4), FULL, FULL, 0.2),
    "equal tokens": (torch.ones(2 * WINDOW, 6), torch.ones(2 * WINDOW, 6), FULL, FULL, 1.0),
    "tiny": (1e-20 * states(5), 1e-20 * states(6), FULL, FULL, 0.2),
    "huge": (1e15 * states(7), 1e15 * states(8), FULL, FULL, 0.2),
    "ragged": (states(9), states(10), RAGGED, RAGGED.flip(0), 0.2),
}


def problem(name: str):
    """The distances of a case, its spans, and its absolute eps."""
    x, y, x_lengths, y_lengths, eps = CASES[name]
    distances = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").to(DEVICE)
    return distances, (STARTS, x_lengths, STARTS, y_lengths), eps * (distances.mean().item() or 1.0)


def solve_all(distances, x_starts, x_lengths, y_starts, y_lengths, **options) -> list[list[Transport]]:
    """Every pair by `sinkhorn`, one by one, on the CPU."""
    rows = [slice(a, a + n) for a, n in zip(x_starts.tolist(), x_lengths.tolist(), strict=True)]
    columns = [slice(a, a + n) for a, n in zip(y_starts.tolist(), y_lengths.tolist(), strict=True)]
    return [[sinkhorn(distances.cpu()[k, l], **options) for l in columns] for k in rows]  # noqa: E741


def check(found: module.Race, solved: list[list[Transport]], eps: float):
    """Asserts what is promised of the minima, and what every pair that stopped and every pair that left promises."""
    value, iterations, error = (
        torch.tensor([[getattr(pair, name).item() for pair in row] for row in solved])
        for name in ("value", "iterations", "error")
    )
    bound, stopped, value = found.bound.cpu(), found.stopped.cpu(), value.clamp_min(0)
    close = dict(rtol=1e-4, atol=1e-5 * eps)
    for dim in (0, 1):
        torch.testing.assert_close(bound.amin(dim), value.amin(dim), **close)
        assert ((bound <= bound.amin(dim, keepdim=True)) <= stopped).all()  # the minima are solved, not bounds
    torch.testing.assert_close(bound[stopped], value[stopped], **close)
    assert (bound <= value * (1 + 1e-4) + 1e-5 * eps).all()
    assert ((found.iterations.cpu() - iterations)[stopped].abs() <= 1).all()
    same = stopped & (found.iterations.cpu() == iterations) & (eps > 1e-5 * value)  # else the error is rounding
    torch.testing.assert_close(found.error.cpu()[same], error[same], rtol=1e-2, atol=1e-5)


@runs
@pytest.mark.parametrize("name", CASES)
def test_minima_are_those_of_every_pair_solved(name):
    """Row and column minima of Eq. (10) to 1e-4, whatever the states look like."""
    distances, spans, eps = problem(name)
    found = module.race_pairs(distances, *spans, eps=eps, max_iters=40)
    check(found, solve_all(distances, *spans, eps=eps, max_iters=40), eps)
    if name == "clustered":
        assert not found.stopped.all()  # the race leaves pairs behind, else it tests nothing


@runs
@pytest.mark.parametrize("eps, limit", [(0.1, 2.0), (1e-2, 1e9), (1e-2, 2.0), (1e-7, 1e9)])
def test_the_shifts_are_made_anew(eps, limit, monkeypatch):
    """Three quarters of one side must move far: the factors grow by 9 an iteration, from a K that is mostly 0."""
    monkeypatch.setattr(module, "RANGE", limit)  # 1e9 is left once here at eps = 1e-2, 2.0 nearly at every iteration
    x, y = 0.1 * states(11)[:WINDOW], 0.1 * states(12)[:WINDOW]
    x[: WINDOW // 4] += 1.0
    y[WINDOW // 4 :] += 1.0
    spans = (torch.tensor([0]), torch.tensor([WINDOW])) * 2
    distances = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").to(DEVICE)
    found = module.race_pairs(distances, *spans, eps=eps, max_iters=20)
    check(found, solve_all(distances, *spans, eps=eps, max_iters=20), eps)


@runs
def test_minima_do_not_depend_on_the_order():
    """Spans in another order race in another order; a lone span, a single iteration and no tolerance work too."""
    distances, (starts, lengths, *_), eps = problem("clustered")
    found = module.race_pairs(distances, starts, lengths, starts, lengths, eps=eps, max_iters=15).bound
    order = torch.tensor([2, 0, 1])
    again = module.race_pairs(distances, starts[order], lengths, starts[order], lengths, eps=eps, max_iters=15).bound
    for dim in (0, 1):
        assert (again.amin(dim) == found.amin(dim)[order.to(DEVICE)]).all()
    alone = starts[:1], lengths[:1], starts[:1], lengths[:1]
    for max_iters in (1, 7):
        one = module.race_pairs(distances, *alone, eps=eps, max_iters=max_iters, tol=0.0)
        assert one.iterations.item() == max_iters
        check(one, solve_all(distances, *alone, eps=eps, max_iters=max_iters, tol=0.0), eps)


@runs
def test_weights_are_those_of_torch():
    """The door that SHEAR takes; on a ragged group."""
    hidden, mask = torch.randn(4, 30, 5).to(DEVICE), torch.arange(30) < torch.tensor([30, 25, 13, 28])[:, None]
    group = hidden, mask.to(DEVICE), torch.tensor([True, False, True, False]).to(DEVICE)
    settings = Settings(window=12, stride=5, max_iters=20)
    fused = dataclasses.replace(settings, fused=True)
    torch.testing.assert_close(group_weights(*group, fused), group_weights(*group, settings))


@on_gpu
def test_thousands_of_pairs_on_a_gpu():
    """60 x 70 spans of up to 100 tokens of clustered states, and the same numbers a second time."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 16, generator=generator) for n in (1600, 1850))
    x += torch.randn(16, 16, generator=generator).repeat_interleave(100, 0)
    distances = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").cuda()
    eps = 0.05 * distances.mean().item()
    x_starts, y_starts = 25 * torch.arange(60), 25 * torch.arange(70)
    x_lengths, y_lengths = torch.randint(60, 101, (60,)), torch.randint(60, 101, (70,))
    runs = [module.race_pairs(distances, x_starts, x_lengths, y_starts, y_lengths, eps=eps) for _ in range(2)]
    blocks = [distances[a : a + n] for a, n in zip(x_starts.tolist(), x_lengths.tolist(), strict=True)]
    mass = (torch.arange(100) < y_lengths[:, None]).cuda() / y_lengths[:, None].cuda()  # (70, 100)
    columns = (y_starts[:, None] + torch.arange(100)).clamp(max=len(y) - 1).cuda()
    value = torch.stack([sinkhorn(b[:, columns].transpose(0, 1), None, mass, eps=eps).value for b in blocks])
    for dim in (0, 1):
        torch.testing.assert_close(runs[0].bound.amin(dim), value.amin(dim), rtol=1e-4, atol=0)
        assert (runs[0].bound.amin(dim) == runs[1].bound.amin(dim)).all()
    assert not runs[0].stopped.all()


@runs
def test_bad_arguments_are_named():
    """ValueError for what the kernel cannot hold."""
    one = torch.tensor([0]), torch.tensor([129])
    for lengths, options in ((129, dict(eps=1.0)), (5, dict(eps=0.0)), (5, dict(eps=1.0, max_iters=0))):
        with pytest.raises(ValueError, match=r"128 tokens|eps must"):
            module.race_pairs(torch.zeros(129, 129), one[0], one[1].clamp(max=lengths), *one, **options)


def test_the_module_imports_without_triton(monkeypatch):
    """And says that it cannot be used."""
    for name in ("triton", "triton.language"):
        monkeypatch.setitem(sys.modules, name, None)  # import raises ImportError
    spec = importlib.util.spec_from_file_location("without_triton", module.__file__)
    without = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "without_triton", without)
    spec.loader.exec_module(without)
    assert without.triton is None and not without.available()
