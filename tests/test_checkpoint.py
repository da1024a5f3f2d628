"""harness/checkpoint.py: a resumed run ends like an uninterrupted one.

Nothing half-written is ever chosen.
"""

import itertools
import os
import shutil
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from builders.commands import BRIEF_FLAGS, interrupt, run_well, words_of
from builders.processes import in_another_process
from builders.runs import ALONE, assert_same_run, config_from, recipe, recipe_with, run_of
from builders.stand_ins import generate_together
from safetensors.torch import load_file
from torch.testing import assert_close

import train
from base import files
from base.config import parse_train
from base.errors import BadInput
from harness import checkpoint, log
from harness.run import load_run, start_run

MODEL = "model/model.safetensors"
SIZES = f"{' '.join(BRIEF_FLAGS)} --save-every 1 --keep 9 --name run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, untaught):
    """A run of four steps that nothing cut, with a checkpoint of each step."""
    out = tmp_path_factory.mktemp("whole")
    run_well(train, SIZES, "--model", untaught, "--steps 4 --out", out)
    _, *steps, _ = files.read_lines(out / "run" / "metrics.jsonl")
    assert all(step["grad_norm"] > 0 for step in steps)
    return out / "run"


@pytest.fixture
def copied(whole, tmp_path):
    """The `whole` run in a folder that a test may harm."""
    return Path(shutil.copytree(whole, tmp_path / "copied"))


def resume(run: Path, flags: str = "") -> None:
    run_well(train, "--resume", run, flags)


def steps_in(run: Path) -> list[int]:
    """The steps of its checkpoints."""
    return [int(path.name.removeprefix("step-")) for path in files.checkpoints_of(run)]


def test_metrics_and_samples_are_cut_back(whole, copied, capsys):
    """A run resumed from an earlier checkpoint writes no row twice and loses none.

    A line half written stands at the end of each file.
    """
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (copied / name).open("a") as file:
            file.write('{"step": 5, "rew')
    resume(copied / "checkpoints" / "step-000003")
    assert_same_run(whole, copied)
    printed = capsys.readouterr().out
    assert "lacks" not in printed and "no gain is known" not in printed


def test_a_resumed_run_keeps_whether_its_warm_up_was_typed(tmp_path):
    """Typed again with the run's own value, the flag must not tell the run from its checkpoints."""
    config = recipe()
    saved = tmp_path / "checkpoints" / "step-000001"
    saved.mkdir(parents=True)
    about = {"step": 1, "ranks": 1, "checksum": 0, "settings": asdict(config)}
    files.write_json(saved / "complete.json", about)
    files.write_json(tmp_path / "config.json", asdict(config))
    for start, typed in (["--resume", str(tmp_path)], False), ([], True):
        assert parse_train([*start, "--warmup-steps", "600"]).warmup_given == typed


def test_a_resumed_run_generates_as_many_at_a_time_as_before(whole, monkeypatch):
    """The sampled tokens depend on the number, and another machine has another default."""
    generate_together(monkeypatch, 9)
    loaded = load_run(config_from(["--resume", str(whole)]), ALONE)
    about = files.read_json(whole / "config.json")
    assert loaded.config.generate_batch == about["generate_batch"] == 512


def test_lost_rows_stop_no_run(whole, copied, capsys):
    """Training needs none of them. What is lost, a whole file or a line, is told."""
    rows = files.read_lines(copied / "samples.jsonl")
    files.write_rows(copied / "samples.jsonl", [row for row in rows if row["step"] != 2])
    files.write_rows(copied / "metrics.jsonl", [])
    resume(copied / "checkpoints" / "step-000003")
    printed = capsys.readouterr().out
    assert "metrics.jsonl lacks 3 of 3 steps, from 1 on" in printed
    assert "samples.jsonl lacks 1 of 3" in printed and "no gain is known" in printed
    assert_close(*(load_file(run / MODEL) for run in (copied, whole)), atol=0, rtol=0)


def test_a_run_cut_in_its_last_evaluation_is_ended(whole, copied):
    """After the last step only the evaluation and the saving are left, and are done."""
    shutil.rmtree(copied / "model")
    resume(copied)
    assert_same_run(whole, copied)


def test_what_a_run_has_left_after_its_checkpoint_goes(copied):
    """Its last evaluation would stand beside other steps, and a kill may leave half a checkpoint.

    Copies beside checkpoints are not ours: they are neither counted nor removed.
    """
    folder = copied / "checkpoints"
    (copied / "after.jsonl").write_text("{}")
    shutil.copytree(folder / "step-000001" / "state", folder / "step-000007" / "state")
    for name in ("step-000002-good", "step-999999", "step-1000000"):  # by name in another order
        shutil.copytree(folder / "step-000002", folder / name)
    assert steps_in(copied) == [1, 2, 3, 4, 999_999, 1_000_000]
    checkpoint.discard_after(copied, 3)
    assert steps_in(copied) == [1, 2, 3] and not (copied / "after.jsonl").exists()
    assert len(list(folder.iterdir())) == 4 and (folder / "step-000002-good" / "state").exists()


def test_a_resumed_run_may_learn_more_slowly(copied):
    """A run that is resumed with --lr 1e-12 takes this rate, not the one that its optimizer saved."""
    folder = copied / "checkpoints" / "step-000003"
    resume(folder, "--lr 1e-12")
    assert_close(*(load_file(run / MODEL) for run in (copied, folder)), atol=1e-8, rtol=0)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--steps 3", "--steps 3: the checkpoint is of step 4 already"),
        ("--steps 6 --use builders.generating", "leave the flag out"),
        ("--steps 6 --method grpo", "has shear; leave the flag out"),
        ("--steps 6 --temperature .9", "leave the flag out"),
    ],
)
def test_a_resumed_run_is_the_same_run(flags, words, whole, assert_refused):
    """Flags that would make it another run are refused."""
    assert_refused(train.main, ["--resume", whole, *flags.split()], words)


class Fault(Exception):
    """A file operation that failed."""


class Faults:
    """Lets one of the changes of a folder fail: a file opened for writing, renamed or removed."""

    def __init__(self):
        self.folder = ""
        self.left = 0  # changes until the one that fails; 0: none does
        sys.addaudithook(self.hear)  # which nothing removes

    def hear(self, event: str, details: tuple) -> None:
        """Python calls it before each operation."""
        if not self.left or event not in CHANGES or not str(details[0]).startswith(self.folder):
            return
        if event == "open" and not details[2] & (os.O_WRONLY | os.O_RDWR):
            return
        self.left -= 1
        if not self.left:
            raise Fault(event)


CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


@pytest.fixture(scope="module")
def faults():
    return Faults()


def tensors_in(folder: Path) -> dict:
    """All weights and moments of a checkpoint, by file and name."""
    tensors = {}
    for path in folder.rglob("*.safetensors"):
        for name, tensor in load_file(path).items():
            tensors[path.relative_to(folder), name] = tensor
    return tensors


def test_a_save_that_fails_anywhere_leaves_a_whole_checkpoint(whole, copied, faults, tmp_path):
    """Whichever of its file operations fails, the checkpoint that is chosen next is whole.

    It is the one before, or the new one; with --keep 1 the one before is removed last.
    """
    loaded = load_run(config_from(["--resume", str(copied), "--keep", "1"]), ALONE)
    run = start_run(loaded, copied)
    checkpoint.restore(run)
    shutil.rmtree(copied / "checkpoints" / "step-000004")
    chosen = []
    for number in itertools.count(1):
        run.folder = Path(shutil.copytree(copied, tmp_path / str(number)))
        faults.folder = str(run.folder)
        faults.left = number
        try:
            checkpoint.save(run, 4)
            break
        except Fault:
            pass
        found, about = files.find_checkpoint(run.folder)
        expected = tensors_in(whole / "checkpoints" / found.name)
        assert_close(tensors_in(found), expected, atol=0, rtol=0)
        assert about["step"] == files.step_of(found)
        chosen.append(about["step"])
        checkpoint.discard_after(run.folder, about["step"])
        assert not list((run.folder / "checkpoints").glob(".*"))
    faults.left = 0
    assert len(chosen) > 8 and chosen == sorted(chosen) and set(chosen) == {3, 4}


def train_until_killed(argv: list[str]) -> int:
    """Train until kill -9, after the third step and before its checkpoint."""
    plain = checkpoint.save

    def save(run, step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(run, step)

    checkpoint.save = save
    return train.main(argv)


def test_a_killed_run_goes_on_exactly(whole, untaught, tmp_path, capsys):
    """A run that kill -9 ended resumes to the uninterrupted one, to the bit.

    Other random numbers were drawn in between, and --steps is another.
    """
    argv = words_of(SIZES, "--model", untaught, "--steps 3 --out", tmp_path)
    process = in_another_process(train_until_killed, argv)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    torch.manual_seed(123)
    resume(tmp_path / "run", "--steps 4")
    assert_same_run(whole, tmp_path / "run")
    assert "resumed after step 2" in capsys.readouterr().out


def test_a_run_killed_before_its_first_checkpoint_starts_again_under_its_name(
    untaught, tmp_path, monkeypatch, assert_refused
):
    """Nothing of the first try stays; a run with a checkpoint, or a model, keeps its name."""
    words = words_of(SIZES, "--model", untaught, "--steps 1 --out", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", interrupt)
        assert train.main(words) == 130
    assert len(files.read_lines(tmp_path / "run" / "metrics.jsonl")) == 2
    run_well(train, words)
    before, step, after = files.read_lines(tmp_path / "run" / "metrics.jsonl")
    assert before["before"] and step["step"] == 1 and after["after"]
    for left in "checkpoints", "model":
        assert_refused(train.main, words, "--name run: exists in")
        shutil.rmtree(tmp_path / "run" / left)


def test_a_run_that_another_process_finished_meanwhile_is_left_alone(whole, copied):
    """Its name was free when the flags were read."""
    config = recipe_with(out=str(copied.parent), name=copied.name)
    with (
        pytest.raises(BadInput, match=f"--name {copied.name}: exists in"),
        log.open_folder(run_of(config, None, None, None)),
    ):
        pass
    assert_same_run(whole, copied)
    assert steps_in(copied) == [1, 2, 3, 4]


def test_checkpoints_and_models_are_kept_as_asked(copied):
    """A checkpoint comes every so many steps and after the last, and --keep of them stay.

    `--keep-models 2` leaves the models of steps 2 and 4 without their states, as does a run that is
    resumed.
    """

    def left() -> dict[str, int]:
        return {path.name: len(list(path.iterdir())) for path in files.steps_of(copied)}

    resume(copied, "--steps 7 --save-every 2 --keep 2 --keep-models 2")
    models = {"step-000002": 1, "step-000004": 1}
    assert left() == models | {"step-000006": 3, "step-000007": 3}
    assert steps_in(copied) == [6, 7] and (files.steps_of(copied)[0] / "model").exists()
    resume(copied, "--steps 8 --keep 1 --keep-models 4")
    assert left() == models | {"step-000008": 3}
