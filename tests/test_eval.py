"""eval.py, run in process as a user would: its table, its file, resumption, and what is sampled anew."""

import json
import os
import shutil
import signal
from collections import Counter
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
from builders.stand_ins import generate_together, replace_sampler

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
    folders = []
    for width in WIDTHS:
        folder = parent / f"r{width}"
        save_model(folder / "model", toy.make_model(1, seed=0, width=width))
        folders.append(save_run(folder))
    return folders


@pytest.fixture
def sampler(monkeypatch) -> Mock:
    """What samples, which counts its calls."""
    counted = Mock(wraps=rollout)
    replace_sampler(monkeypatch, counted)
    return counted


def answer_three(model, tokenizer, prompts: list[str], count: int, **limits):
    """Rollouts that all answer 3, as \\boxed{3} if the model is that of the second run."""
    text = r"\boxed{3}" if model.config.hidden_size == WIDTHS[1] else "3"
    every_prompt = np.repeat(prompts, count).tolist()
    return rollouts_of(tokenizer, every_prompt, [text] * len(every_prompt))


def test_a_model_gets_a_row_and_every_generation_one(runs, tmp_path, monkeypatch, capsys):
    """The printed numbers are those of generations.jsonl; `--from` prints them without a model.

    Responses that are missing are told.
    """
    replace_sampler(monkeypatch, answer_three)
    out = tmp_path / "out"
    runs = [shutil.copytree(run, tmp_path / name) for run, name in zip(runs, "ab", strict=True)]
    twice = [*runs, runs[1] / "model"]
    run_well(command, "--model", twice, SMALL, "--out", out, "--seeds 0 3 0")
    path = out / "generations.jsonl"
    place, *printed = capsys.readouterr().out.splitlines()
    made = read_lines(path)
    assert place == f"{out}/" and len(made) == 2 * 2 * 20 * 2
    columns = "model weights set settings seed block of problem sample score reason tokens limit"
    assert made[0].keys() == {*columns.split(), "response"}
    assert printed[0].startswith("embedded: digest=")
    assert " problems=20 k=2 temperature=1.0 max_tokens=16 template=plain " in printed[0]
    first, second = (f"{run}/model" for run in runs)
    means = {}
    for model in (first, second):
        scores = [row["score"] for row in made if row["model"] == model]
        means[model] = 100 * sum(scores) / 80
        reasons = Counter(row["reason"] for row in made if row["model"] == model).most_common()
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons)
        assert f"  {model}: 80 responses: {counts}" in printed
    gain = means[second] - means[first]
    for line, words in zip(printed[-3:], (first, second, "gain"), strict=True):
        number = gain if words == "gain" else means[words]
        assert line.startswith(f"| {words} ") and f"| {number:.1f} ± " in line
    assert 0 == means[first] < means[second] and "WARNING" not in " ".join(printed)
    for run in runs:
        shutil.rmtree(run)
    run_well(command, "--from", out)
    assert capsys.readouterr().out.splitlines() == printed
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
    run_well(command, "--from", out)
    assert "WARNING: 3 responses are missing; the same" in capsys.readouterr().out


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


def test_a_killed_evaluation_goes_on_to_the_same_bytes(runs, tmp_path, monkeypatch, sampler):
    """A killed evaluation continues to the same bytes, also after a line that is cut off.

    Whole blocks are not made again; a third run makes nothing, and loads no model.
    """
    asked = words_of("--model", runs[0], SMALL, "--out")
    part = [*asked, str(tmp_path / "part")]
    path = tmp_path / "part" / "generations.jsonl"
    run_well(command, asked, tmp_path / "whole")
    whole = (tmp_path / "whole" / "generations.jsonl").read_text()
    process = in_another_process(evaluate_until_killed, part)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert whole.startswith(path.read_text()) and len(read_lines(path)) == 32
    path.write_text(path.read_text()[:-20])  # as a kill in the middle of a line would leave it
    sampler.reset_mock()
    run_well(command, part)
    assert path.read_text() == whole and sampler.call_count == 2
    monkeypatch.setattr("harness.models.load_model", None)
    run_well(command, part)
    assert path.read_text() == whole


def evaluate_as_rank(folder: Path, argv: list[str], status: int = 0) -> None:
    """A rank's evaluation, which ends with this status."""
    assert command.main(argv) == status


def test_two_ranks_write_the_bytes_of_one(runs, tmp_path):
    """They take blocks in turn; an odd number leaves the second idle."""
    asked = words_of("--model", runs[0], SMALL, "--out")
    run_well(command, asked, tmp_path / "one")
    on_two(evaluate_as_rank, tmp_path, [*asked, str(tmp_path / "two")], joins=True)
    one, two = (tmp_path / name / "generations.jsonl" for name in ("one", "two"))
    assert len(read_lines(one)) == 20 * 2 and one.read_bytes() == two.read_bytes()


def test_all_ranks_refuse_what_one_cannot_read(runs, tmp_path, capfd):
    """Rank 0 alone reads the file; the other would wait for it."""
    (tmp_path / "generations.jsonl").write_text("[]\n")
    asked = words_of("--model", runs[0], SMALL, "--out", tmp_path)
    on_two(evaluate_as_rank, tmp_path, asked, 2, joins=True)
    assert capfd.readouterr().err.count("generations.jsonl, line 1: cannot be read") == 1


# ---- what is sampled anew ------------------------------------------------------------------------


@pytest.fixture
def asked_rows(qwen_folder, tmp_path, sampler):
    """A function that evaluates a model on three rows, with more flags, and counts what it samples.

    The folder of the model and the file of the rows may be changed between its calls.
    """
    shutil.copytree(qwen_folder, tmp_path / "model")
    rows = [{"problem": f"{i}?", "answer": str(i)} for i in range(3)]
    write_rows(tmp_path / "rows.jsonl", rows)

    def count(*flags) -> int:
        sampler.reset_mock()
        words = ["--bench amc23 --max-tokens 4 --samples 2", "--out", tmp_path / "out", *flags]
        if not any("--data" in str(flag) for flag in flags):
            words += ["--data", f"amc23={tmp_path / 'rows.jsonl'}"]
        run_well(command, "--model", tmp_path / "model", words)
        return sampler.call_count

    return count


def touch(path: Path) -> None:
    """Gives a file another time, as whoever rewrites it does."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def test_what_decides_a_response_is_in_its_key(asked_rows, tmp_path, capsys):
    """A changed file of the model, flag, row of the data or seed: all of it is sampled anew.

    Rows of before stay in the file, but in no table; what is asked as before is not sampled.
    """
    assert (asked_rows(), asked_rows()) == (1, 0)
    flags = "--temperature .5", "--max-tokens 3", "--samples 1", "--template plain", "--block 5"
    flags += "--seeds 1", "--dtype bfloat16", "--grade-timeout 9", "--use builders.generating"
    for words in flags:
        assert asked_rows(*words.split()) > 0, words
    model = tmp_path / "model"
    changes = [model / name for name in ("model.safetensors", "tokenizer_config.json")]
    for path in changes:
        assert asked_rows() == 0
        touch(path)
        assert asked_rows() == 1
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    assert asked_rows() == 1
    data = tmp_path / "rows.jsonl"
    data.write_text(data.read_text().replace('"answer": "2"', '"answer": "3"'))
    capsys.readouterr()
    assert (asked_rows(), asked_rows()) == (1, 0)
    assert f"{model}: 6 responses" in capsys.readouterr().out
    assert len({command.key_of(row) for row in read_lines(tmp_path / "out/generations.jsonl")}) > 14


def test_what_decides_no_response_is_not(asked_rows, tmp_path, monkeypatch):
    """Threads, how many responses are generated at a time, and the place of the data."""
    asked_rows("--seeds", "0", "1")
    shutil.move(tmp_path / "rows.jsonl", tmp_path / "moved.jsonl")
    moved = ["--data", f"amc23={tmp_path / 'moved.jsonl'}"]
    for words in ("--threads 1", "--generate-batch 3", "--seeds 1", "--ranks 1"):
        assert asked_rows(*moved, *words.split()) == 0
    generate_together(monkeypatch, 7)
    assert asked_rows(*moved) == 0


def test_responses_are_generated_together_as_memory_or_a_flag_says(
    asked_rows, sampler, monkeypatch
):
    """The sampled tokens depend on the number."""
    generate_together(monkeypatch, 7)
    for flags, batch in (("--seeds 0", 7), ("--seeds 1 --generate-batch 5", 5)):
        assert asked_rows(*flags.split()) == 1
        assert sampler.call_args.kwargs["batch_size"] == batch


def test_a_rewritten_model_is_never_reported_by_its_old_samples(runs, tmp_path, capsys):
    """It is sampled anew; `--from` leaves it out, with a warning, until it is."""
    run = Path(shutil.copytree(runs[0], tmp_path / "run"))
    asked = words_of(SMALL, "--out", tmp_path / "out", "--model")
    run_well(command, asked, runs[1], run)
    save_model(run / "model", toy.make_model(1, seed=8))
    capsys.readouterr()
    run_well(command, "--from", tmp_path / "out")
    printed = capsys.readouterr().out
    assert f"WARNING: {run}/model was rewritten since: evaluate it again" in printed
    assert f"| {runs[1]}/model " in printed and f"| {run}/model " not in printed
    run_well(command, asked, run)
    rows = read_lines(tmp_path / "out" / "generations.jsonl")
    assert len(rows) == 3 * 40 and len({row["weights"] for row in rows}) == 3
    capsys.readouterr()
    run_well(command, "--from", tmp_path / "out")
    printed = capsys.readouterr().out
    assert "WARNING" not in printed and f"{run}/model: 40 responses" in printed
    shutil.rmtree(run / "model")
    save_model(run / "model", toy.make_model(1, seed=8))  # the same weights, made again
    run_well(command, "--from", tmp_path / "out")
    assert f"WARNING: {run}/model was rewritten" in capsys.readouterr().out


def test_an_average_of_sets_has_the_error_of_independent_sets():
    """Sets weigh alike, whatever their sizes: sqrt(.03^2 + .04^2) / 2."""
    assert command.average([(0.5, 0.03), (0.7, 0.04)]) == pytest.approx((0.6, 0.025))


def test_a_gain_is_paired_by_problem(capsys):
    """Problems that one model lacks do not count, and the order of rows does not matter."""
    settings = {"k": 1, "problems": 3, "max_tokens": 9}
    scores = {"base": {"a": 1.0, "b": 0.0, "c": 0.0}, "new": {"c": 1.0, "b": 0.0}}
    rows = []
    for model, of_model in scores.items():
        for problem, score in of_model.items():
            row = {"model": model, "set": "s", "settings": settings, "seed": 0, "limit": 9}
            rows.append(row | {"problem": problem, "score": score, "reason": "drawn"})
    command.print_table(rows)
    gain = capsys.readouterr().out.splitlines()[-1]
    assert gain.split("|")[2].split()[0] == "50.0"  # of b 0, of c 1


def test_a_model_of_the_hub_is_known_by_its_commit(tmp_path, monkeypatch):
    """It is that of the hub's cache, which loading has brought to the newest."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cache = tmp_path / "models--some--model"
    assert command.identity_of("some/model") == ""
    for commit in ("abc", "def"):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").touch()
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / "main").write_text(commit)
        assert command.identity_of("some/model") == commit


def test_models_that_were_asked_otherwise_are_told(asked_rows, tmp_path, capsys):
    """One template against another is no comparison."""
    asked_rows()
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    words = f"--bench amc23 --data amc23={tmp_path}/rows.jsonl --max-tokens 4 --samples 2"
    words += f" --template plain --model {tmp_path}/other --out {tmp_path}/out"
    run_well(command, words)
    capsys.readouterr()
    run_well(command, "--from", tmp_path / "out")
    printed = capsys.readouterr().out
    assert "template=chat" in printed and "template=plain" in printed
    assert "WARNING: it was asked otherwise than the model before" in printed


# ---- runs of train.py, and bad input -------------------------------------------------------------


def test_a_model_of_a_run_is_asked_in_the_run_s_template(tmp_path):
    """The name of its folder in runs/ does not tell it; a flag does."""
    files.write_json(tmp_path / "config.json", {"program": files.PROGRAM, "template": "qwen-math"})
    (tmp_path / "model").mkdir()
    path = str(tmp_path / "model")
    assert template_of("auto", path, turns_tokenizer()) == "qwen-math"
    assert template_of("plain", path, turns_tokenizer()) == "plain"
    assert template_of("auto", "some/model", turns_tokenizer()) == "chat"


@pytest.mark.parametrize(
    "settings, is_run",
    [
        ({"program": "shear train", "seed": 7}, True),
        ({"program": "another's", "seed": 7}, False),
        ({"model_type": "qwen2"}, False),
    ],
)
def test_a_run_is_told_by_a_field_of_its_own(settings, is_run, tmp_path):
    """A run is known by its own field, not by the name of a flag, which may change."""
    (tmp_path / "model").mkdir()
    files.write_json(tmp_path / "config.json", settings)
    assert (files.config_of(tmp_path) is not None) == is_run
    assert bool(files.run_of(str(tmp_path / "model"))) == is_run


def test_bad_input_is_one_sentence(runs, tmp_path, monkeypatch, assert_refused):
    """Each case of tests/cases/eval_refused.csv is refused.

    M is a model, R its run, and old/ an evaluation of an earlier version.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "R").symlink_to(runs[0])
    save_model(tmp_path / "M", toy.make_model(1, seed=0))
    (tmp_path / "old").mkdir()
    append_rows(tmp_path / "old/generations.jsonl", [{"model": "M", "benchmark": "amc23"}])
    for case in cases("eval_refused.csv"):
        assert_refused(command.main, case["flags"].split(), case["words"])
