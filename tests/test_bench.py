"""studies/bench.py run in process as a user would run it."""

import argparse
from dataclasses import replace

import pytest

from harness import memory
from studies import bench


def test_a_step_prints_its_table(capsys):
    """Every phase of both methods, shares that sum to 1, memory, overhead, bottleneck, and what was left out."""
    small = "--step --size tiny --tokens 12 --problems 2 --group 4 --threads 1 --window 6 --stride 3".split()
    assert bench.main([*small, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]
    table = {row[0]: row[1:] for row in rows}
    phases = ("generate", "grade", "score", "weights", "wait", "train", "refresh")
    for column in (1, 5):
        assert sum(float(table[phase][column].rstrip("%")) for phase in phases) == pytest.approx(100, abs=0.5)
    assert table["generate"][3].endswith("copy") and table["train"][3].endswith("matmul")
    assert table["sampling"][0] == "not on a CPU" and float(table["training"][1]) >= 0
    for said in ("torch", "ceilings", "overhead", "Next bottleneck", "every group mixed", "A share", "Sinkhorn"):
        assert said in printed


def test_a_step_in_bfloat16_is_the_sharded_one(capsys, monkeypatch):
    """FSDP over a mesh of one, a whole copy that samples, no optimizer: the path of a GPU, and its notes."""
    small = "--step --size tiny --tokens 6 --problems 1 --group 2 --threads 1 --window 6 --stride 3".split()
    one_step, measured = bench.one_step, []

    def recorded(run, problems):
        measured.append((run.args.method, run.args.max_tokens))
        return one_step(run, problems)

    monkeypatch.setattr(bench, "one_step", recorded)
    assert bench.main([*small, "--device", "cpu", "--dtype", "bfloat16", "--no-optimizer"]) == 0
    printed = capsys.readouterr().out
    # The warm-up is at full length, too: no method pays for shapes that are new.
    assert measured == [("shear", 6), ("grpo", 6), ("shear", 6)]
    assert "AdamW is left out" in printed and "step 1, shear" in printed


def test_rates_are_shares_of_the_ceilings():
    """Of each phase's work, by hand; and what follows from seconds."""
    seconds = dict(generate=2.0, score=1.0, train=3.0, refresh=0.5)
    work = {"generate": (4e9, "copy"), "score": (3e10, "matmul"), "train": (9e10, "matmul")}
    step = bench.Measured(seconds, {}, dict(generate=100, score=150, train=150), work, {})
    rates = {"matmul": 1e12, "copy": 8e9}
    assert step.share("generate", rates) == "25.0% copy"
    assert step.share("score", rates) == step.share("train", rates) == "3.0% matmul"
    assert step.share("refresh", rates) == ""
    slower = replace(step, seconds={**seconds, "score": 4.0})
    lines = "\n".join(bench.table({"shear": slower, "grpo": step}, rates))
    assert "overhead over GRPO: +46.2% of the step (score +46.2%)" in lines
    assert "Next bottleneck: score, 42% of SHEAR's step, at 0.8% of the matmul ceiling." in lines


@pytest.mark.parametrize(("at_a_time", "batches"), [(0, 1), (2, 1), (1, 2)])
def test_the_work_of_a_step_is_counted_by_hand(at_a_time, batches):
    """Two rollouts of three tokens after prompts of 5 and 7: contexts 5, 6, 7 and 7, 8, 9; weights once a batch."""
    config = bench.architecture("tiny")
    model = bench.AutoModelForCausalLM.from_config(config)
    parameters = memory.parameters(config)[0]
    run = argparse.Namespace(sampler=model, args=argparse.Namespace(max_tokens=3, generate_batch=at_a_time))
    work = bench.work_of(run, [5, 7])
    keys_and_values = 4 * 2 * 2 * 2 * 16
    assert work["generate"] == (batches * 3 * 4 * parameters + (5 + 6 + 7 + 7 + 8 + 9) * keys_and_values, "copy")
    assert work["score"] == (2 * parameters * (5 + 7 + 6), "matmul")  # 2 and 6 FLOP a parameter and token
    assert work["train"] == (6 * parameters * (5 + 7 + 6), "matmul")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--step --size huge", "--size"),
        ("--step --problems 0", "--problems 0"),
        ("--step --problems 1000000000", "--problems 1000000000: must be at least 1 and at most 4096"),
        ("--step --tokens 5000", "--tokens 5000"),
        ("--step --group 1", "--group 1"),
        ("--step --group 1000000000", "--group 1000000000: must be at least 2 and at most 256"),
        ("--step --method grpo", "--method: is fixed"),
        ("--step --stride 200", "--stride 200"),
        ("--step --bogus 3", "--bogus"),
    ],
)
def test_bad_flags_are_one_sentence(argv, said, assert_refused):
    """Status 2, and the flag is named."""
    assert_refused(bench.main, argv.split(), said)


def test_torchrun_is_refused(monkeypatch, assert_refused):
    """The table is of one rank."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_refused(bench.main, ["--step", "--size", "tiny"], "torchrun")


@pytest.mark.parametrize("name", ["attention", "passes", "race"])
def test_probes_of_a_gpu_are_rehearsed(name, monkeypatch, capsys):
    """With tiny shapes: what fails here would fail there, where time is short."""
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.setattr("torch.backends.cuda.enable_cudnn_sdp", lambda enabled: None)
    from studies import gpu_probe

    assert gpu_probe.main(name) == 0 and name in capsys.readouterr().out
