"""studies/compare.py: a table from runs, each made once; what is wrong is said before a run starts.

Run: pytest tests/test_compare.py
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from studies import compare

SIZES = "--toy-lines 1 --warmup-steps 2 --steps 1 --heldout 8 --eval-groups 2".split()
SIZES += "--prompts-per-step 2 --prompts-per-update 2".split()
SIZES += ["--threads", "1"]  # a run in a thread of its own does not hear conftest.py's
pytestmark = pytest.mark.usefixtures("no_curve")


@pytest.fixture
def runs(monkeypatch):
    """train.py in this process instead of in one of its own; a list that gets every command."""
    commands = []

    def run(command, **options):
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
    (tmp_path / "arca-lora-3" / "thesis.txt").write_text("mine")
    assert compare.main(flags) == 0 and len(runs) == 3 and "--name" in runs[2]  # cut before its first checkpoint
    assert (tmp_path / "arca-lora-3.cut-1" / "thesis.txt").read_text() == "mine"  # nothing of it is lost
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

    def fail(command, **options):
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
        ("--rescale mean1", ["--rescale mean1", "kgae"]),
        ("--methods grpo oracle --task math --model m", ["--method oracle"]),
        ("--methods grpo oracle-value", ["--method oracle-value", "--toy-kind recoverable"]),
    ],
)
def test_bad_input_is_one_sentence_before_any_run(flags, names, tmp_path, runs, capsys):
    """Status 2; also for what only the last of the rows would refuse."""
    assert compare.main(["--out", str(tmp_path / "new"), *flags.split()]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and all(name in message for name in names)
    assert not runs and not (tmp_path / "new").exists()


# ---- what lies in --out, and is not ours ------------------------------------------------------------------------

MEAN = [0.5, 0.1, 8]
METRICS = [
    {"before": {"greedy": MEAN, "sampled": MEAN, "localisation": None}},
    {"step": 1, "weight_mean": 0.5, "ess": 1.0},
    {"after": {"greedy": MEAN, "sampled": MEAN, "localisation": {"auc": 0.5, "auc_step": 0.5}}},
]
HALF = ["--methods", "grpo", "--seeds", "0", *SIZES]


def finished_run(folder, rows=METRICS, **changed):
    """The files of a run that has come to its end; `changed` settings are those of other flags."""
    args = compare.parse([*HALF, "--out", str(folder)])
    config = vars(compare.parse_args(compare.flags_of(args, "grpo", 0))) | changed
    write(folder / "grpo-0" / "config.json", json.dumps(config))
    write(folder / "grpo-0" / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def write(path, text):
    """A file, and the folders it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def rows_with(number, **changed):
    """METRICS with one row changed."""
    rows = [dict(row) for row in METRICS]
    rows[number] |= changed
    return rows


FAULTS = {  # what lies in --out: how it comes there, what is said
    "a stranger's folder": (lambda out: write(out / "grpo-0" / "thesis.txt", "mine"), ["grpo-0", "config.json"]),
    "a stranger's file": (lambda out: write(out / "grpo-0", "mine"), ["grpo-0"]),
    "a stranger's table": (lambda out: write(out / "table.md", "# Mine"), ["table.md", "move it away"]),
    "a model's config": (lambda out: write(out / "grpo-0" / "config.json", '{"model_type": "qwen2"}'), ["config.json"]),
    "no folder": (lambda out: (out / "grpo-0").symlink_to("/dev/null"), ["grpo-0"]),
    "a list as config": (lambda out: write(out / "grpo-0" / "config.json", "[1]"), ["config.json"]),
    "half a config": (lambda out: write(out / "grpo-0" / "config.json", '{"task": "emb'), ["config.json"]),
    "a deep config": (lambda out: write(out / "grpo-0" / "config.json", "[" * 100_000), ["config.json"]),
    "other flags": (lambda out: finished_run(out, toy_lines=3), ["--toy-lines 1", "grpo-0 has 3", "move it away"]),
    "metrics of two runs": (lambda out: finished_run(out, METRICS * 2), ["metrics.jsonl", "two runs"]),
    "a step twice": (lambda out: finished_run(out, METRICS[:2] + METRICS[1:]), ["metrics.jsonl", "two runs"]),
    "a list as row": (lambda out: finished_run(out, [[1], *METRICS]), ["metrics.jsonl"]),
    "a row without a measure": (lambda out: finished_run(out, rows_with(1, weight_mean=None)), ["metrics.jsonl"]),
    "a number as evaluation": (lambda out: finished_run(out, rows_with(2, after=3)), ["metrics.jsonl", "damaged"]),
    "no evaluation before": (lambda out: finished_run(out, METRICS[1:]), ["metrics.jsonl", "damaged"]),
    "a text as row": (lambda out: finished_run(out, ["\ud800"]), ["metrics.jsonl"]),
}  # fmt: skip


def contents(folder):
    """Every file's bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_ours_is_refused_and_left_as_it_is(fault, tmp_path, runs, capsys):
    """One sentence, no run, every byte where it was."""
    make, names = FAULTS[fault]
    make(tmp_path)
    before = contents(tmp_path)
    assert compare.main([*HALF, "--out", str(tmp_path)]) in (1, 2)
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and all(name in message for name in names)
    assert not runs and contents(tmp_path) == before


@pytest.mark.parametrize("name", [".", "grpo-0"])
def test_a_folder_in_which_somebody_writes_is_refused(name, tmp_path, runs, capsys):
    """By another comparison, or by a training run."""
    finished_run(tmp_path)
    before = contents(tmp_path)
    handle = os.open(tmp_path / name, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert compare.main([*HALF, "--out", str(tmp_path)]) == 2
    finally:
        os.close(handle)
    message = capsys.readouterr().err
    assert str(tmp_path) in message and "another process is writing there" in message and message.count("\n") == 1
    assert not runs and contents(tmp_path) == before


def test_a_run_cut_before_its_config_is_made_anew(tmp_path, monkeypatch):
    """An empty folder is set aside without a question."""
    (tmp_path / "grpo-0").mkdir()
    monkeypatch.setattr(subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 3))
    assert compare.main([*HALF, "--out", str(tmp_path)]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grpo-0.cut-1", "grpo-0.log"]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends children with their parent")
def test_a_training_run_ends_with_the_comparison(tmp_path, monkeypatch):
    """Also when this is killed, and its children were started by threads: nobody goes on writing."""
    script = tmp_path / "train.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)\n")
    monkeypatch.setattr(train, "__file__", str(script))
    flags = compare.parse([*HALF, "--out", str(tmp_path)])
    comparison = os.fork()
    if not comparison:
        try:
            compare.train_all(flags)
        finally:
            os._exit(1)
    log = tmp_path / "grpo-0.log"
    until(lambda: log.exists() and log.read_text().endswith("\n"))
    child = Path(f"/proc/{int(log.read_text())}/stat")
    assert child.exists()
    os.kill(comparison, signal.SIGKILL)
    os.waitpid(comparison, 0)
    until(lambda: not child.exists() or child.read_text().rsplit(")")[1].split()[0] == "Z")  # Z: nobody asked for it


def until(condition):
    """Wait for it."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never comes")


@pytest.mark.parametrize("out", ["/dev/null", "/dev/null/x", "/proc/x"])
def test_an_out_that_cannot_be_made_is_one_sentence(out, runs, capsys):
    """Before a run."""
    assert compare.main([*HALF, "--out", out]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: --out {out}: ") and message.count("\n") == 1 and not runs
