"""eval.py, run in process as a user would: its table, its file, resumption, and what is sampled anew."""

import os
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
from builders.case_files import cases
from builders.commands import run_well, words_of
from builders.processes import in_another_process, on_two
from builders.rollouts import rollouts_of
from builders.runs import save_run
from builders.small_models import save_model, turns_tokenizer
from builders.stand_ins import replace_sampler

import eval as command
from base import files
from base.files import append_rows, read_lines, write_rows
from grpo import rollout
from harness.run import template_of
from tasks import toy

SMALL = "--block 16 --samples 2 --temperature 1 --threads 1"  # three blocks of a seed

WIDTHS = 16, 32  # of the models of two runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of two runs, which hold out the same problems; their models are untrained."""
    parent = tmp_path_factory.mktemp("runs")
    for width in WIDTHS:
        save_model(parent / f"r{width}" / "model", toy.make_model(1, seed=0, width=width))
    return [save_run(parent / f"r{width}") for width in WIDTHS]


def answer_three(model, tokenizer, prompts: list[str], count: int, **limits):
    """Rollouts that all answer 3, as \\boxed{3} if the model is that of the second run."""
    text = r"\boxed{3}" if model.config.hidden_size == WIDTHS[1] else "3"
    every_prompt = np.repeat(prompts, count).tolist()
    return rollouts_of(tokenizer, every_prompt, [text] * len(every_prompt))


def test_a_model_gets_a_row_and_every_generation_one(runs, tmp_path, monkeypatch, capsys):
    """The printed numbers are those of generations.jsonl; `--from` prints them without a model.

    Responses that are missing are told. What was asked otherwise stays in the file, but is in no
    table.
    """
    replace_sampler(monkeypatch, answer_three)
    out = tmp_path / "out"
    first, second = (shutil.copytree(run, tmp_path / Path(run).name) for run in runs)
    asked = words_of(SMALL, "--out", out, "--model")
    run_well(command, asked, first, second, second / "model", "--seeds 0 3 0")
    place, *printed = capsys.readouterr().out.splitlines()
    rows = read_lines(out / "generations.jsonl")
    assert place == f"{out}/" and len(rows) == 2 * 2 * 20 * 2
    columns = "model weights set settings seed block of problem sample score reason tokens limit"
    assert rows[0].keys() == {*columns.split(), "response"}
    assert f"  {first}/model: 80 responses: 80 no_answer" in printed
    right = 100 * np.mean([row["score"] for row in rows if row["model"] == f"{second}/model"])
    assert right > 0 and "WARNING" not in " ".join(printed)
    for line, number in zip(printed[-3:], (0, right, right), strict=True):
        assert f"| {number:.1f} ± " in line
    run_well(command, asked, second, "--samples 1")
    assert f"{second}/model: 20 responses" in capsys.readouterr().out
    assert len(read_lines(out / "generations.jsonl")) == len(rows) + 20
    shutil.rmtree(first)
    shutil.rmtree(second)
    for kept, told in (rows, ""), (rows[:-3], "WARNING: 3 responses are missing; the same"):
        write_rows(out / "generations.jsonl", kept)
        run_well(command, "--from", out)
        lines = capsys.readouterr().out.splitlines()
        assert (told in " ".join(lines)) and (lines == printed) == (kept == rows)


# ---- resumption ----------------------------------------------------------------------------------


def evaluate_until_killed(argv: list[str]) -> int:
    """Evaluate until kill -9, which comes when the third block is sampled."""
    calls = []

    def sample(*inputs, **options):
        calls.append(inputs)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return rollout(*inputs, **options)

    replace_sampler(pytest.MonkeyPatch(), sample)
    return command.main(argv)


def evaluate_as_rank(folder: Path, argv: list[str], status: int = 0) -> None:
    """A rank's evaluation, which ends with this status."""
    assert command.main(argv) == status


def test_a_killed_evaluation_and_two_ranks_make_the_same_bytes(runs, tmp_path, monkeypatch):
    """A killed evaluation continues to the same bytes, also after a line that is cut off.

    Whole blocks are not made again; a third run makes nothing, and loads no model. Ranks take
    blocks in turn; an odd number leaves the second idle.
    """

    def asked(name: str) -> list[str]:
        return words_of("--model", runs[0], SMALL, "--out", tmp_path / name)

    run_well(command, asked("whole"))
    whole = (tmp_path / "whole" / "generations.jsonl").read_text()
    on_two(evaluate_as_rank, tmp_path, asked("two"), joins=True)
    assert (tmp_path / "two" / "generations.jsonl").read_text() == whole
    process = in_another_process(evaluate_until_killed, asked("part"))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    path = tmp_path / "part" / "generations.jsonl"
    assert whole.startswith(path.read_text()) and len(read_lines(path)) == 32
    path.write_text(path.read_text()[:-20])  # as a kill in the middle of a line would leave it
    sampler = Mock(wraps=rollout)
    replace_sampler(monkeypatch, sampler)
    run_well(command, asked("part"))
    assert path.read_text() == whole and sampler.call_count == 2
    monkeypatch.setattr("harness.models.load_model", None)
    run_well(command, asked("part"))
    assert path.read_text() == whole


def test_all_ranks_refuse_what_one_cannot_read(runs, tmp_path, capfd):
    """Rank 0 alone reads the file; the other would wait for it."""
    (tmp_path / "generations.jsonl").write_text("[]\n")
    asked = words_of("--model", runs[0], SMALL, "--out", tmp_path)
    on_two(evaluate_as_rank, tmp_path, asked, 2, joins=True)
    assert capfd.readouterr().err.count("generations.jsonl, line 1: cannot be read") == 1


# ---- what is sampled anew ------------------------------------------------------------------------


def test_a_rewritten_model_is_never_reported_by_its_old_samples(tmp_path, capsys):
    """`--from` leaves it out, with a warning. Of a model that was asked twice, it shows the last."""
    model = save_model(tmp_path / "model", toy.make_model(1, seed=0, width=16))
    row = dict.fromkeys("weights set seed block problem".split(), "")
    row |= dict(settings=dict(problems=1, k=1, max_tokens=9), limit=9, score=1, reason="correct")
    own = row | dict(model=model, weights=command.identity_of(model))
    other = row | dict(model="other")
    before = own | {"settings": own["settings"] | {"max_tokens": 8}}
    append_rows(tmp_path / "generations.jsonl", [before, own, other])
    run_well(command, "--from", tmp_path)
    assert f"  {model}: 1 responses" in capsys.readouterr().out
    os.utime(tmp_path / "model" / "config.json", (0, 0))  # as whoever rewrites it leaves
    run_well(command, "--from", tmp_path)
    printed = capsys.readouterr().out
    assert f"WARNING: {model} was rewritten since: evaluate it again" in printed
    assert "| other " in printed and f"| {model} " not in printed


def test_a_model_of_the_hub_is_known_by_its_commit(tmp_path, monkeypatch):
    """It is that of the hub's cache, which loading has brought to the newest."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cache = tmp_path / "models--some--model"
    assert command.identity_of("some/model") == ""
    (cache / "refs").mkdir(parents=True)
    for commit in ("abc", "def"):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").touch()
        (cache / "refs" / "main").write_text(commit)
        assert command.identity_of("some/model") == commit


# ---- runs of train.py, and bad input -------------------------------------------------------------


def test_a_model_of_a_run_is_asked_in_the_run_s_template(tmp_path):
    """A run is told by a field of its own, not by its folder's name; a flag goes before it."""
    path = str(tmp_path / "model")
    os.mkdir(path)
    for program, template in (files.PROGRAM, "qwen-math"), ("another's", "chat"):
        config = {"program": program, "template": "qwen-math"}
        files.write_json(tmp_path / "config.json", config)
        assert template_of("auto", path, turns_tokenizer()) == template
        assert template_of("plain", path, turns_tokenizer()) == "plain"


def test_bad_input_is_one_sentence(runs, tmp_path, monkeypatch, assert_refused):
    """Each case of tests/cases/eval_refused.csv is refused.

    M is a model, R its run, S a run of another seed, and old/ an evaluation of an earlier version.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "R").symlink_to(runs[0])
    save_run(tmp_path / "S", seed=1)
    save_model(tmp_path / "M", toy.make_model(1, seed=0))
    (tmp_path / "old").mkdir()
    append_rows(tmp_path / "old/generations.jsonl", [{"model": "M", "benchmark": "amc23"}])
    for case in cases("eval_refused.csv"):
        assert_refused(command.main, case["flags"].split(), case["words"])
