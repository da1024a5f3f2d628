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
from builders.runs import ALONE, assert_same_run, config_from, recipe_with, run_of
from safetensors.torch import load_file
from torch.testing import assert_close

import train
from base import files
from base.config import parse_train
from base.errors import BadInput
from harness import checkpoint, log
from harness.run import load_run, start_run

SIZES = f"{' '.join(BRIEF_FLAGS)} --save-every 1 --keep 9 --name run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, untaught):
    """A run of four steps that nothing cut, with a checkpoint of each step."""
    out = tmp_path_factory.mktemp("whole")
    run_well(train, SIZES, "--model", untaught, "--steps 4 --out", out)
    _, *steps, _ = files.read_lines(out / "run" / "metrics.jsonl")
    assert all(step["grad_norm"] > 0 for step in steps)
    return out / "run"


def train_until_killed(argv: list[str]) -> int:
    """Train until kill -9, after the third step and before its checkpoint."""
    plain = checkpoint.save

    def save(run, step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(run, step)

    checkpoint.save = save
    return train.main(argv)


@pytest.fixture
def copied(whole, tmp_path):
    """The `whole` run in a folder that a test may harm."""
    return Path(shutil.copytree(whole, tmp_path / "copied"))


def resume(run: Path, flags: str = "") -> None:
    run_well(train, "--resume", run, flags)


def steps_in(run: Path) -> list[int]:
    """The steps of its checkpoints."""
    return [int(path.name.removeprefix("step-")) for path in files.checkpoints_of(run)]


def test_two_steps_and_two_more_are_four(whole, untaught, tmp_path, capsys):
    """Two steps and two more equal four to the bit.

    They do so in a new process's state: other random numbers drawn in between, another --steps.
    """
    run_well(train, SIZES, "--model", untaught, "--steps 2 --out", tmp_path)
    torch.manual_seed(123)
    resume(tmp_path / "run", "--steps 4")
    assert_same_run(whole, tmp_path / "run")
    assert "resumed after step 2" in capsys.readouterr().out


def test_metrics_and_samples_are_cut_back(whole, copied):
    """A run resumed from an earlier checkpoint writes no row twice and loses none.

    A line half written stands at the end of each file.
    """
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (copied / name).open("a") as file:
            file.write('{"step": 5, "rew')
    resume(copied / "checkpoints" / "step-000003")
    assert_same_run(whole, copied)
    assert steps_in(copied) == [1, 2, 3, 4]


def test_a_resumed_run_takes_the_tokenizer_of_its_checkpoint(qwen_folder, tmp_path, assert_refused):
    """With its chat template and stop tokens; the folder of --model may have changed, or be gone.

    A saved tokenizer that encodes the prompts otherwise is refused.
    """
    base = shutil.copytree(qwen_folder, tmp_path / "base")
    (tmp_path / "data.jsonl").write_text('{"problem": "1", "answer": "1"}\n' * 20)
    flags = "--prompts-per-step 2 --rollouts-per-prompt 2 --prompts-per-update 2 --max-tokens 8 "
    flags += "--heldout 2 --eval-groups 2 --use builders.alternating --save-every 1 --steps 2"
    places = "--model", base, "--data", tmp_path / "data.jsonl", "--out", tmp_path
    run_well(train, places, flags, "--name whole")
    cut = shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(cut / "checkpoints" / "step-000002")
    template = cut / "checkpoints" / "step-000001" / "model" / "chat_template.jinja"
    text = template.read_text()
    template.write_text("x" + text)
    assert_refused(train.main, ["--resume", cut], "encodes the prompts otherwise", "restore it")
    template.write_text(text)
    shutil.rmtree(base)
    resume(cut)
    assert_same_run(tmp_path / "whole", cut)


def test_a_resumed_run_keeps_whether_its_warm_up_was_typed(tmp_path):
    """Typed again with the run's own value, the flag must not tell the run from its checkpoints."""
    settings = asdict(config_from([]))
    about = {"step": 1, "ranks": 1, "checksum": 0, "settings": settings}
    saved = tmp_path / "checkpoints" / "step-000001"
    saved.mkdir(parents=True)
    files.write_json(saved / "complete.json", about)
    files.write_json(tmp_path / "config.json", settings)
    config = parse_train(["--resume", str(tmp_path), "--warmup-steps", "600"])
    assert not config.warmup_given and parse_train(["--warmup-steps", "600"]).warmup_given


@pytest.mark.parametrize("name", ["metrics", "samples"])
def test_lost_rows_stop_no_run(name, whole, copied, capsys):
    """Training needs none of them. What is lost, a whole file or a line, is told."""
    rows = files.read_lines(copied / f"{name}.jsonl")
    others = [row for row in rows if row.get("step") != 2]
    for kept, words in (([], "lacks 3 of 3 steps, from 1 on"), (others, "lacks 1 of 3")):
        files.write_rows(copied / f"{name}.jsonl", kept)
        resume(copied / "checkpoints" / "step-000003")
        printed = capsys.readouterr().out
        assert f"{name}.jsonl {words}" in printed
        assert ("no gain is known" in printed) == (name == "metrics" and not kept)
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (copied, whole))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_run_cut_in_its_last_evaluation_is_ended(whole, copied):
    """After the last step only the evaluation and the saving are left, and are done."""
    shutil.rmtree(copied / "model")
    resume(copied)
    assert_same_run(whole, copied)


def test_checkpoints_come_as_often_as_asked(copied):
    """One also comes after the last step; --keep of them stay."""
    resume(copied, "--steps 7 --save-every 2 --keep 2")
    assert steps_in(copied) == [6, 7]


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    """A seventh digit does not change it."""
    for step in (1_000_000, 999_999, 10):
        saved = tmp_path / "checkpoints" / f"step-{step:06d}"
        saved.mkdir(parents=True)
        (saved / "complete.json").touch()
    assert steps_in(tmp_path) == [10, 999_999, 1_000_000]


def test_the_last_evaluation_of_an_earlier_end_goes(copied):
    """Its rollouts would stand beside others until the resumed run ends."""
    (copied / "after.jsonl").write_text("{}")
    checkpoint.discard_after(copied, 3)
    assert not (copied / "after.jsonl").exists() and steps_in(copied) == [1, 2, 3]


def test_a_resumed_run_may_learn_more_slowly(copied):
    """A run that is resumed with --lr 1e-12 takes this rate, not the one that its optimizer saved."""
    folder = copied / "checkpoints" / "step-000003"
    resume(folder, "--lr 1e-12")
    before, after = (load_file(run / "model" / "model.safetensors") for run in (folder, copied))
    assert all((after[name] - before[name]).abs().max() < 1e-8 for name in after)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--steps 3", "--steps 3: the checkpoint is of step 4 already"),
        ("--steps 6 --use builders.generating", "leave the flag out"),
        ("--steps 6 --method grpo", "has shear; leave the flag out"),
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


def test_a_killed_run_goes_on_exactly(whole, untaught, tmp_path):
    """A run that kill -9 ended resumes to the uninterrupted one."""
    argv = words_of(SIZES, "--model", untaught, "--steps 4 --out", tmp_path)
    process = in_another_process(train_until_killed, argv)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    resume(tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


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


def test_models_of_some_steps_are_kept_after_their_checkpoints(copied):
    """`--keep-models 2` leaves the models of steps 2 and 4 without their states.

    A run that is resumed leaves them, too.
    """

    def left() -> dict[str, int]:
        return {path.name: len(list(path.iterdir())) for path in files.steps_of(copied)}

    resume(copied, "--steps 5 --keep 1 --keep-models 2")
    assert left() == {"step-000002": 1, "step-000004": 1, "step-000005": 3}
    assert steps_in(copied) == [5] and (files.steps_of(copied)[0] / "model").exists()
    resume(copied, "--steps 6 --keep-models 4")
    assert left() == {"step-000002": 1, "step-000004": 1, "step-000006": 3}
