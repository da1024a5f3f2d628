"""Damaged folders, hostile folders and bad values: one sentence, its status, and nothing lost.

The status is 2, or 1 for a full disk.
"""

import errno
import fcntl
import hashlib
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders.case_files import cases
from builders.commands import (
    BRIEF_FLAGS,
    MakesAFolder,
    change_json,
    interrupt,
    raising,
    run_well,
    words_of,
)
from safetensors import SafetensorError

import eval as evaluation
import train
from base import files
from grpo import rollout
from harness import checkpoint
from harness.command import run_command

SIZES = f"{' '.join(BRIEF_FLAGS)} --save-every 1 --keep 9 --steps 2"
ASK = "--samples 1 --temperature 1 --threads 1"


@pytest.fixture(scope="module")
def run(tmp_path_factory, untaught):
    """A run of two steps, and its evaluation."""
    out = tmp_path_factory.mktemp("faults")
    run_well(train, SIZES, "--model", untaught, "--name run --out", out)
    run_well(evaluation, ASK, "--model", out / "run", "--out", out / "evaluation")
    return out


@pytest.fixture
def copied(run, tmp_path):
    """A copy of both that may be damaged."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, str]:
    """Every file of a folder, by its digest."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture
def assert_says(assert_refused):
    """Asserts status 2 and one sentence that has these words, and a folder that is as it was."""

    def check(command, argv, words: str, folder: Path) -> None:
        before = contents(folder)
        assert_refused(command.main, argv, words)
        assert contents(folder) == before

    return check


@pytest.fixture
def asked_again(copied, run) -> list:
    """Flags that go on with the evaluation of the copy."""
    return words_of("--model", run / "run", ASK, "--out", copied / "evaluation")


@pytest.fixture
def resumed(copied) -> list:
    """Flags that resume the run of the copy."""
    return ["--resume", copied / "run", "--steps", "3"]


@pytest.mark.parametrize("case", cases("damages.jsonl"))
def test_damaged_files_are_named(case, copied, assert_says, resumed, asked_again):
    """They are named before a file is changed.

    That holds where a run is resumed, by `--from`, and by the same evaluation again. A damage
    replaces an expression, takes the file of this name from another folder, or removes a file.
    """
    paths = list(copied.glob(case["file"]))
    assert paths
    for path in paths:
        if "from" in case:
            shutil.copy(copied / case["from"] / path.name, path)
        elif "old" in case:
            text = re.sub(case["old"], case["new"], path.read_bytes().decode("latin-1"))
            path.write_bytes(text.encode("latin-1"))
        else:
            path.unlink()
    if case["file"].startswith("run"):
        assert_says(train, resumed, case["words"], copied)
    else:
        assert_says(evaluation, ["--from", copied / "evaluation"], case["words"], copied)
        assert_says(evaluation, asked_again, case["words"], copied)


def test_a_folder_that_another_process_writes_is_refused(copied, asked_again, assert_says, resumed):
    """A run and an evaluation refuse it alike."""
    for name, command, argv in (
        ("run", train, resumed),
        ("evaluation", evaluation, asked_again),
    ):
        handle = os.open(copied / name, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_SH)
        assert_says(command, argv, "another process is writing there", copied)
        os.close(handle)


def test_a_run_is_not_asked_other_problems(copied, assert_says):
    """An evaluation on what its config.json was changed to would be another one."""
    change_json(copied / "run" / "config.json", toy_lines=2)
    argv = words_of("--bench heldout --model", copied / "run", "--out", copied / "new")
    assert_says(evaluation, argv, "config.json of its run", copied)


def test_weights_that_cannot_be_loaded_are_refused(copied, assert_says):
    """No file is written, although the folder is made before."""
    os.truncate(copied / "run" / "model" / "model.safetensors", 5000)
    argv = words_of(ASK, "--model", copied / "run", "--out", copied / "new" / "evaluation")
    assert_says(evaluation, argv, "cannot be loaded", copied)


def test_a_checkpoint_runs_no_code(copied, tmp_path, assert_says, resumed):
    """Nothing but the policy's tensors is loaded."""
    path = next((copied / "run" / "checkpoints" / "step-000002" / "state").iterdir())
    path.write_bytes(pickle.dumps(MakesAFolder(tmp_path / "made")))
    assert_says(train, resumed, "cannot be read", copied)
    assert not (tmp_path / "made").exists()


def test_a_model_folder_runs_no_code(untaught, tmp_path, assert_says):
    """No one is asked on a terminal whether it may, which a piped "y" would answer."""
    folder = Path(shutil.copytree(untaught, tmp_path / "model"))
    made = tmp_path / "made"
    (folder / "modeling.py").write_text(f"import os\nos.mkdir({str(made)!r})\n")
    of_model = {"AutoModelForCausalLM": "modeling.X", "AutoConfig": "modeling.Y"}
    change_json(folder / "config.json", auto_map=of_model, model_type="unknown")
    change_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling.X", None]})
    argv = words_of(SIZES, "--model", folder, "--out", tmp_path / "out")
    assert_says(train, argv, f"--model {folder}", tmp_path)
    assert not made.exists()


def test_a_run_that_diverges_names_the_last_checkpoint(copied, monkeypatch, capsys):
    """It ends before its next checkpoint, and says how to go on and what may help."""

    def ruin(run, step):
        next(run.trained.parameters()).data.fill_(math.nan)
        return {}, []

    monkeypatch.setattr(train, "train_step", ruin)
    run = copied / "run"
    assert train.main(["--resume", str(run), "--steps", "9"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"resume with: python train.py --resume {run}"
    assert second.startswith("error: step 3: the policy's logits are not finite")
    assert len(files.checkpoints_of(run)) == 2


def test_an_error_is_a_traceback_after_how_to_go_on(copied, resumed, monkeypatch, capsys):
    """A broken disk is one; the line before it names --resume."""
    monkeypatch.setattr(checkpoint, "save", raising(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        run_well(train, resumed)
    assert capsys.readouterr().err == f"resume with: python train.py --resume {copied / 'run'}\n"


def test_a_full_disk_is_one_sentence(capsys):
    """The status is 1, also of safetensors' error. Others of the system keep their traceback.

    That of too little memory names what to lower.
    """
    full = OSError(errno.ENOSPC, "No space left on device")
    of_safetensors = SafetensorError("I/O error: No space left on device (os error 28)")
    for error in full, of_safetensors:
        assert run_command(raising(error))([]) == 1
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and message.endswith("free some disk, then go on\n")
    for error in PermissionError("denied"), torch.OutOfMemoryError("CUDA out of memory"):
        with pytest.raises(type(error)):
            run_command(raising(error))([])
    assert "lower --micro-tokens" in capsys.readouterr().err


def test_numbers_that_are_not_known_are_null(tmp_path):
    """NaN is no JSON; a resumed run has it again."""
    path = tmp_path / "rows.jsonl"
    rows = [{"before": {}}, {"step": 1, "loss": math.nan}, {"step": 2}, {"after": {}}]
    files.append_rows(path, rows)
    assert '"loss": null' in path.read_text()
    before, row = checkpoint.rows_until(path, 1)
    assert before == {"before": {}} and math.isnan(row["loss"])


def test_greedy_decoding_of_a_model_that_is_not_finite_is_an_error(tiny):
    """Sampling is one, too; argmax would take NaN for a token."""
    model, tokenizer = tiny
    next(model.parameters()).data[:] = torch.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            rollout(model, tokenizer, ["a=1;a?\n"], 1, max_tokens=2, temperature=temperature)


def test_a_reader_of_the_help_may_leave():
    """`--help | true` prints no error."""
    words = ["sh", "-c", "$0 $1 --help | true", sys.executable, train.__file__]
    assert subprocess.run(words, stderr=subprocess.PIPE, text=True).stderr == ""


def test_a_taught_start_outlives_ctrl_c(tmp_path, monkeypatch):
    """Interrupted before the first step, the run keeps its taught model, which can be taken."""
    monkeypatch.setattr(train, "evaluate", interrupt)
    argv = words_of(SIZES, "--warmup-steps 2 --toy-width 16 --out", tmp_path)
    assert train.main(argv) == 130
    start = tmp_path / "embedded-shear-1" / "start"
    monkeypatch.undo()
    run_well(train, SIZES, "--steps 1 --out", tmp_path, "--model", start)
    assert (tmp_path / "embedded-shear-2" / "model").exists()
