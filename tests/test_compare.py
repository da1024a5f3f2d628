"""studies/compare.py: a table from runs, each made once; what is wrong is said before a run starts.

Run: pytest tests/test_compare.py
"""

import re
import subprocess

import pytest

import train
from studies import compare

SIZES = "--toy-lines 1 --warmup-steps 2 --steps 1 --heldout 8 --eval-groups 2".split()
SIZES += "--prompts-per-step 2 --prompts-per-update 2".split()
SIZES += ["--threads", "1"]  # a run in a thread of its own does not hear conftest.py's


@pytest.fixture
def runs(monkeypatch):
    """train.py in this process instead of in one of its own; a list that gets every command."""
    commands = []

    def run(command, stdout, stderr):
        commands.append(command[2:])
        return subprocess.CompletedProcess(command, train.main(command[2:]))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(compare, "TIMED", 1)
    return commands


def test_a_table_of_two_rows_and_the_same_command_again(tmp_path, runs, capsys):
    """All rows of a seed start from the model of the first; finished runs are not repeated, a cut one is."""
    flags = ["--methods", "grpo", "arca-lora", "--seeds", "3", "--out", str(tmp_path), *SIZES]
    assert compare.main(flags) == 0
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["method", "---------", "grpo", "arca-lora"]
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells[:4] == ["grpo", "+0%", "1.00", cells[3]] and "±" in cells[-1]
    assert all(cells[6] == line.split("|")[7].strip() for line in lines[2:])  # the same policy before training
    assert len(runs) == 2 and all(f"{tmp_path}/grpo-3/start" in command for command in runs[1:])
    (tmp_path / "arca-lora-3" / "metrics.jsonl").unlink()
    for path in (tmp_path / "arca-lora-3" / "checkpoints").rglob("complete.json"):
        path.unlink()
    assert compare.main(flags) == 0 and len(runs) == 3 and "--name" in runs[2]  # cut before its first checkpoint
    capsys.readouterr()
    assert compare.main([*flags, "--rollouts-per-prompt", "4"]) == 2
    assert (
        "--rollouts-per-prompt 4" in (message := capsys.readouterr().err)
        and "grpo-3" in message
        and message.count("\n") == 1
    )
    assert len(runs) == 3


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_fails_ends_the_comparison(tmp_path, monkeypatch, capsys, jobs):
    """Status 1, the run and its log are named, nothing queued is started."""
    started = []

    def fail(command, stdout, stderr):
        started.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", fail)
    flags = ["--methods", "grpo", "shear", "--seeds", "0", "1", "2", "--jobs", str(jobs), "--out", str(tmp_path)]
    assert compare.main([*flags, *SIZES]) == 1
    message = capsys.readouterr().err
    assert re.search(rf"grpo-([0-{jobs - 1}]): .*status 3.*grpo-\1\.log", message)
    assert 1 <= len(started) <= jobs  # of two workers, one may fail before the other has begun


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--jobs 0", ["--jobs 0"]),
        ("--methods ppo", ["ppo"]),
        ("--seed 3", ["--seed", "compare"]),
        ("--name=x", ["--name=x", "compare"]),
        ("--stepz 3", ["--stepz"]),
        ("--rescale mean1", ["--rescale mean1", "pure"]),
        ("--methods grpo oracle --task math --model m", ["--method oracle"]),
    ],
)
def test_bad_input_is_one_sentence_before_any_run(flags, names, tmp_path, runs, capsys):
    """Status 2; also for what only the last of the rows would refuse."""
    assert compare.main(["--out", str(tmp_path / "new"), *flags.split()]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and all(name in message for name in names)
    assert not runs and not (tmp_path / "new").exists()
