"""lab/studies/bench.py: everyone solves the same problem, and the command prints what it measured."""

import pytest
import torch
from builders.commands import run_well

from credit.settings import Shear
from lab.studies import bench
from lab.studies.bench import synthetic
from shear import two_sides

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """A little group, and a truth that is soon found."""
    monkeypatch.setattr(bench, "TRUE_ITERS", 500)
    monkeypatch.setattr(bench, "TRUE_TOL", 1e-5)
    return synthetic(4, 8, 26, CPU)._replace(shear=Shear(6, 3))


def test_all_peers_solve_eq_10(small, monkeypatch):
    """They do to a percent, as some stop early."""
    right, wrong = two_sides(small.hidden, small.mask, small.correct, 6, 3)
    pairs = bench.full_pairs(right, wrong, 10**9)
    full_right, full_wrong = (int((side.spans.mass > 0).all(1).sum()) for side in (right, wrong))
    assert pairs.costs.shape == (full_right * full_wrong, 6, 6)
    monkeypatch.setitem(bench.CHUNK_ENTRIES, "cpu", 300)  # batches of 8 pairs
    truth = bench.true_values(pairs)
    assert len(bench.PEERS) == 3
    for solve in bench.PEERS.values():
        values = bench.in_batches(solve, pairs)
        torch.testing.assert_close(values.double(), truth, rtol=1e-2, atol=0)


def test_the_command_prints_a_table_per_group(small, capsys):
    """The error of ours is rounding."""
    run_well(bench, "--tokens 120 --width 8 16 --group 3 --pairs 8 --rounds 1 --device cpu")
    printed = capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("| ours")]
    assert len(rows) == 2 and all(float(row[3]) < 1e-3 for row in rows)
    assert printed.count("POT `ot.batch.solve_batch`") == 2
    walks = "random walks, G 3, T 120, d 8: spans of 100 every 25, 8 pairs; peers solve 2"
    assert walks in printed
