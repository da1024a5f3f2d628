"""studies/bench.py: everyone solves the same problem, and the command prints what it measured."""

import re
from functools import partial

import pytest
import torch
from builders.commands import run_well

from credit.settings import Shear
from studies import bench
from studies.bench import synthetic
from tasks.errors import BadInput

CPU = torch.device("cpu")
FLAGS = bench.Bench(pairs=8, rounds=1)


@pytest.fixture
def small(monkeypatch):
    """A little group, and a truth that is soon found."""
    monkeypatch.setattr(bench, "TRUE_ITERS", 500)
    monkeypatch.setattr(bench, "TRUE_TOL", 1e-5)
    return synthetic(4, 8, 26, CPU)._replace(shear=Shear(6, 3))


def test_all_peers_solve_eq_10(small, monkeypatch):
    """They do to a percent, as some stop early and one anneals.

    The exact one has W1, which lies below by up to eps log w.
    """
    [(right, wrong)] = bench.both_sides(small)
    pairs = bench.full_pairs(right, wrong, 10**9)
    full_right, full_wrong = (int((side.spans.mass > 0).all(1).sum()) for side in (right, wrong))
    count = full_right * full_wrong
    assert pairs.costs.shape == (count, 6, 6)
    monkeypatch.setitem(bench.CHUNK_ENTRIES, "cpu", 300)  # batches of 8 pairs
    values = {name: bench.in_batches(solve, pairs) for name, solve in bench.PEERS.items()}
    exact = values.pop("POT `ot.emd2`, a loop, exact").float()
    ours = values["every pair, sinkhorn.py"]
    assert len(values) == 4
    for value in values.values():
        torch.testing.assert_close(value.float(), ours, rtol=1e-2, atol=0)
    assert (exact <= ours * 1.001).all() and (ours <= exact + bench.EPS * 1.8).all()  # log 6 = 1.79


def test_the_command_prints_tables(small, taught, capsys):
    """It prints a table of a model's groups, with the task's spans, and one of random walks.

    The error of ours is rounding.
    """
    flags = "--tokens 120 --width 8 --group 3 --pairs 8 --rounds 1 --device cpu --task embedded"
    flags += " --toy-lines 1 --heldout 16 --eval-groups 16 --prompts-per-step 8"
    run_well(bench, flags, "--model", taught)
    printed = capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("| ours")]
    assert len(rows) == 2 and all(float(row[3]) < 1e-3 for row in rows)
    assert printed.count("POT `ot.batch.solve_batch`") == 2
    assert re.search(f"{taught}, a training step, G 8, d [0-9]+, w 12, s 6: ", printed)
    assert "random walks, G 3, T 120, d 8, w 100, s 25: 8 pairs, mixed groups: 1" in printed


def test_a_pair_is_measured_however_wide_the_spans(small):
    """`--pairs` counts pairs of 100 x 100, of which wide ones have many."""
    states = synthetic(2, 4, 150, CPU)._replace(shear=Shear(120, 30))
    lines = bench.table(states, FLAGS)
    assert lines[0].endswith("peers solve 4 pairs")


def test_responses_without_a_whole_span_are_refused(small):
    """A wrong response of 5 tokens has no whole span of 6; its span would be filled up.

    With a second group that has whole spans, the groups are measured.
    """
    short = synthetic(2, 8, 6, CPU)
    [(hidden, mask, correct)] = short.groups
    mask[1, 5] = False
    with pytest.raises(BadInput, match="no span of 100 tokens is full on both sides"):
        bench.table(short, FLAGS)
    lines = bench.table(
        short._replace(groups=[*short.groups, (hidden, torch.ones_like(mask), correct)]), FLAGS
    )
    assert "2 pairs, mixed groups: 2" in lines[0]
    # ours: its first values are those of the first group
    assert float(lines[3].split("|")[-2]) < 1e-3


def test_loops_solve_few_pairs_and_batches_all(small, monkeypatch):
    """Seconds of both are scaled to all pairs."""
    [(right, wrong)] = bench.both_sides(small)
    full = len(bench.full_pairs(right, wrong, 10**9).costs)
    solved: dict[str, int] = {}

    def peer(name: str, pairs: bench.Pairs) -> torch.Tensor:
        solved[name] = len(pairs.costs)
        return pairs.costs.mean((1, 2))

    monkeypatch.setattr(bench, "LOOPED", 3)
    monkeypatch.setattr(bench, "PEERS", {name: partial(peer, name) for name in bench.PEERS})
    bench.table(small, bench.Bench(pairs=10**6, rounds=1))
    assert full > 3
    assert solved == {name: 3 if "a loop" in name else full for name in bench.PEERS}
