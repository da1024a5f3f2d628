"""studies/bench.py: everyone solves the same problem, and the command prints what it measured."""

import argparse

import pytest
import torch
from safetensors.torch import save_file

from harness.launch import parse_args
from studies import bench
from studies.states import embedded_states, synthetic

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """A little group in the embedded model's place, and a truth that is soon found."""
    states = synthetic(4, 26, 8, CPU)._replace(window=6, stride=3)
    monkeypatch.setattr(bench, "embedded_states", lambda path, device: states._replace(name="embedded"))
    monkeypatch.setattr(bench, "TRUTH", dict(max_iters=500, tol=1e-5))
    monkeypatch.setattr(bench, "seconds_of", lambda call, device: 1.0)
    return states


def test_all_peers_solve_eq_10(small, monkeypatch):
    """To a percent, as some stop early and one anneals; the exact one has W1, which lies below by up to eps log w."""
    [(right, wrong)] = bench.two_sided(small)
    pairs = bench.full_pairs([(right, wrong)], 10**9)
    full_right, full_wrong = (int((side.spans.mass > 0).all(1).sum()) for side in (right, wrong))
    count = full_right * full_wrong
    assert pairs.costs.shape == (count, 6, 6)
    monkeypatch.setitem(bench.CHUNK_ENTRIES, "cpu", 300)  # batches of 8 pairs
    values = {name: bench.in_batches(solve, pairs, count) for name, (solve, _) in bench.PEERS.items()}
    exact = values.pop("POT `ot.emd2`, a loop, exact").float()
    ours = values["every pair, sinkhorn.py"]
    assert len(values) == 4
    for value in values.values():
        torch.testing.assert_close(value.float(), ours, rtol=1e-2, atol=0)
    assert (exact <= ours * 1.001).all() and (ours <= exact + bench.EPS * 1.8).all()  # log 6 = 1.79


def test_the_command_prints_tables(small, tmp_path, capsys):
    """A table a group; an error of ours that is rounding, and a floor."""
    sides = ("right", "wrong", "right")
    states = {f"group3.rollout{k}.{side}": torch.randn(120 + k, 8) for k, side in enumerate(sides)}
    save_file(states, tmp_path / "states.safetensors")
    flags = "--tokens 20 --width 8 --group 4 --pairs 8 --rounds 1 --device cpu"
    assert bench.main([*flags.split(), "--states", str(tmp_path / "states.safetensors")]) == 0
    printed = capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("| ours")]
    assert len(rows) == 3 and all(float(row[4]) < 1e-3 and row[5].strip() == "-" for row in rows)
    assert printed.count("POT `ot.batch.solve_batch`") == 3 and printed.count("floor: ") == 3
    assert "states.safetensors group3, 2 right, 1 wrong, T 122, w 100, s 25: 8 pairs, mixed groups: 1" in printed


def test_the_embedded_group_is_a_mixed_one_of_its_model(taught, monkeypatch):
    """With the task's own spans."""
    sizes = "--toy-lines 1 --heldout 16 --eval-groups 16".split()
    monkeypatch.setattr("studies.states.parse_args", lambda argv: parse_args([*argv, *sizes]))
    states = embedded_states(taught, CPU)
    assert states.correct.any() and not states.correct.all() and (states.window, states.stride) == (12, 6)
    assert states.hidden.shape[:2] == states.mask.shape


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--tokens 100000000", "--tokens 100000000: must be at least 1 and at most 16384"),
        ("--width 100000000", "--width 100000000: must be at least 1 and at most 16384"),
        ("--group 100000000", "--group 100000000: must be at least 2 and at most 256"),
        ("--pairs 100000000", "--pairs 100000000: must be at least 8 and at most 16384"),
        ("--rounds 100000000", "--rounds 100000000: must be at least 1 and at most 1000"),
        ("--tokens 9 16384 --group 2 256", "--group 256 --tokens 16384 --width"),
        ("--states nowhere.safetensors", "--states nowhere.safetensors"),
    ],
)
def test_bad_flags_are_one_sentence(argv, said, small, assert_refused):
    """Status 2, and the flag is named, before anything is measured."""
    assert "|" not in assert_refused(bench.main, argv.split(), said)


def test_a_pair_is_measured_however_wide_the_spans(small):
    """`--pairs` counts pairs of 100 x 100, of which wide ones have many."""
    flags = argparse.Namespace(pairs=8, rounds=1)
    states = synthetic(2, 150, 4, CPU)._replace(window=120, stride=30)
    lines = bench.table(states, flags, dict(matmul=1.0, exp=1.0, copy=1.0))
    assert sum("| 4 " in line or "| 1 " in line for line in lines) >= 4


@pytest.mark.parametrize(
    ("sides", "said"),
    [
        (("right", "right"), "group0 holds an empty rollout, or those of one side only"),
        (("right", "wrong"), "no span of 100 tokens is full on both sides"),
    ],
)
def test_states_that_cannot_be_measured_are_one_sentence(sides, said, small, tmp_path, assert_refused):
    """A group of one side, and responses without a whole span."""
    path = tmp_path / "states.safetensors"
    save_file({f"group0.rollout{k}.{side}": torch.randn(9 - 5 * k, 8) for k, side in enumerate(sides)}, path)
    assert_refused(bench.main, ["--states", path, *"--tokens --pairs 16 --rounds 1 --device cpu".split()], said)


def saved(path, right, wrong):
    """A file of one group, of a right and a wrong rollout."""
    save_file({"group0.rollout0.right": right, "group0.rollout1.wrong": wrong}, path)


RANDOM = torch.arange(960.0).sin().view(120, 8)
FAULTS = {  # what is wrong with --states: how the file is made, what is said
    "no safetensors": (lambda path: path.write_bytes(bytes(range(256)) * 9), "header"),
    "an empty file": (lambda path: path.write_bytes(b""), "header"),
    "no tensors": (lambda path: save_file({}, path), "holds no tensors"),
    "a name": (lambda path: save_file({"group0": RANDOM}, path), "name tensors groupN.rolloutK.right or .wrong"),
    "one number": (lambda path: saved(path, torch.tensor(1.0), torch.tensor(2.0)), "(T, d)"),
    "one dimension": (lambda path: saved(path, RANDOM[:, 0].clone(), RANDOM[:, 0].clone()), "(T, d)"),
    "three dimensions": (lambda path: saved(path, RANDOM.view(120, 2, 4), RANDOM.view(120, 2, 4).clone()), "(T, d)"),
    "two widths": (lambda path: saved(path, RANDOM, RANDOM[:, :7].clone()), "of one width"),
    "no width": (lambda path: saved(path, RANDOM[:, :0].clone(), RANDOM[:, :0].clone()), "of one width"),
    "integers": (lambda path: saved(path, RANDOM.long(), RANDOM.long()), "floats of 16 bits"),
    "8 bits": (lambda path: saved(path, RANDOM.to(torch.float8_e4m3fn), RANDOM), "floats of 16 bits"),
    "NaN": (lambda path: saved(path, RANDOM / 0 * 0, RANDOM), "finite"),
    "beyond float32": (lambda path: saved(path, RANDOM * 1e38, RANDOM), "finite"),
    "all equal": (lambda path: saved(path, torch.ones(120, 8), torch.ones(120, 8)), "not all equal"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_file_of_states_are_one_sentence(fault, small, tmp_path, assert_refused):
    """Status 2, file and fault are named, before anything is measured."""
    make, said = FAULTS[fault]
    make(path := tmp_path / "states.safetensors")
    words = ["--states", path, *"--tokens --pairs 16 --rounds 1 --device cpu".split()]
    assert "|" not in assert_refused(bench.main, words, f"error: --states {path}: ", said)


def test_states_of_two_precisions_are_measured(small, tmp_path, capsys):
    """Halves beside floats, as before."""
    saved(tmp_path / "states.safetensors", RANDOM.half(), RANDOM.flip(0).contiguous())
    flags = ["--states", str(tmp_path / "states.safetensors"), *"--tokens --pairs 8 --rounds 1 --device cpu".split()]
    assert bench.main(flags) == 0 and "1 right, 1 wrong" in capsys.readouterr().out
