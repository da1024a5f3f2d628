"""eval.py, run in process as a user would: tables, files, resumption, and the runs of train.py."""

import json
import shutil
from dataclasses import replace
from unittest.mock import Mock

import pytest
from builders.case_files import cases
from builders.commands import interrupt, run_well, words_of
from builders.small_models import save_model
from builders.stand_ins import generate_together, replace_sampler

import eval as command
from grpo import rollout
from harness import files
from harness.eval_config import Embedded
from harness.files import read_lines
from tasks import toy

SMALL = (
    "--bench embedded --toy-lines 1 --heldout 20 --block 16 --samples 2 --temperature 1 --threads 1"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of two untrained models of the embedded task."""
    return [
        save_model(tmp_path_factory.mktemp("models") / f"m{seed}", toy.make_model(1, seed=seed))
        for seed in (0, 1)
    ]


def results_of(out) -> dict:
    return json.loads((out / "results.json").read_text())


def test_a_model_gets_a_table_and_every_generation_a_row(models, tmp_path, capsys):
    """The printed numbers are those of generations.jsonl and of results.json.

    `--from` prints them again without a model.
    """
    out = tmp_path / "out"
    models = [
        shutil.copytree(folder, tmp_path / name) for folder, name in zip(models, "ab", strict=True)
    ]
    run_well(command, "--model", models, SMALL, "--out", out, "--seeds 0 3")
    path = out / "generations.jsonl"
    printed = capsys.readouterr().out
    made = read_lines(path)
    results = results_of(out)
    assert len(made) == 2 * 2 * 20 * 2
    columns = "model benchmark seed block problem sample score reason tokens limit response"
    assert made[0].keys() == set(columns.split())
    written = (out / "results.json").read_text()
    first, second = map(str, models)
    found = results["results"][first]["embedded"]
    mean = sum(row["score"] for row in made if row["model"] == first) / 80
    assert found["mean"] == pytest.approx(mean)
    assert (found["samples"], found["missing"], {*found["seeds"]}) == (80, 0, {"0", "3"})
    assert results["differences"].keys() == {second}
    assert results["differences"][second]["embedded"]["problems"] == 20
    for words in (
        f"{out}/\nprotocol: temperature=1.0 ",
        f" revision=chain-1-0\n\n{first} (template plain, 512 responses at a time)\n\n|",
        f"| embedded  | @2  | {100 * found['mean']:.1f} ± ",
        "side by side",
    ):
        assert words in printed
    assert "NOTE" not in printed
    for folder in models:
        shutil.rmtree(folder)
    run_well(command, "--from", out)
    assert (out / "results.json").read_text() == written and capsys.readouterr().out == printed
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
    run_well(command, "--from", out)
    assert "embedded: 3 samples are missing" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_to_the_same_rows(models, tmp_path, monkeypatch):
    """An interrupted evaluation continues to the same rows, also after a line that is cut off.

    Whole blocks are not made again; a third run makes nothing.
    """
    asked = words_of("--model", models[0], SMALL, "--out")
    part = [*asked, str(tmp_path / "part")]
    path = tmp_path / "part" / "generations.jsonl"
    run_well(command, asked, tmp_path / "whole")
    whole = (tmp_path / "whole" / "generations.jsonl").read_text()
    calls = [rollout, rollout, interrupt]
    replace_sampler(monkeypatch, lambda *parts, **options: calls.pop(0)(*parts, **options))
    assert command.main(part) == 130
    assert whole.startswith(path.read_text()) and len(read_lines(path)) == 32
    path.write_text(path.read_text()[:-20])  # as a kill in the middle of a line would leave it
    sampler = Mock(wraps=rollout)
    replace_sampler(monkeypatch, sampler)
    for _ in range(2):
        run_well(command, part)
        assert path.read_text() == whole and sampler.call_count == 2


def test_how_many_responses_are_generated_together_is_decided_once(models, tmp_path, monkeypatch):
    """settings.json keeps the number by model; whoever goes on takes it, unless a flag says another.

    The sampled tokens depend on it, and the default depends on the machine.
    """
    asked = words_of("--model", models[0], SMALL, "--out", tmp_path / "out", "--seeds")
    generate_together(monkeypatch, 7)
    sampler = Mock(wraps=rollout)
    replace_sampler(monkeypatch, sampler)
    run_well(command, asked, "0")
    generate_together(monkeypatch, 9)
    for flags, batch in (("1", 7), ("2 --generate-batch 5", 5), ("3", 5)):
        sampler.reset_mock()
        run_well(command, asked, flags)
        assert {call.kwargs["batch_size"] for call in sampler.call_args_list} == {batch}
        settings = json.loads((tmp_path / "out" / "settings.json").read_text())
        assert settings["generate_batch"] == {models[0]: batch}
    run_well(command, "--model", models[1], SMALL, "--out", tmp_path / "out")
    assert list(results_of(tmp_path / "out")["generate_batch"].values()) == [5, 9]


def test_other_settings_do_not_mix_with_what_is_there(tmp_path, assert_refused):
    """Another temperature, other problems or other weights of the same name are refused."""
    model = save_model(tmp_path / "model", toy.make_model(1, seed=8))
    asked = words_of(SMALL, "--out", tmp_path / "out", "--model", model)
    run_well(command, asked)
    for flags, words in (
        ("--temperature 0", "protocol: temperature is 0.0; "),
        ("--toy-seed 5", "data: embedded is {'k'"),
    ):
        assert_refused(command.main, [*asked, *flags.split()], words)
    save_model(tmp_path / "model", toy.make_model(1, seed=9))
    assert_refused(command.main, asked, f"models: {model} is {{'origin'")


def test_a_trained_models_template_is_that_of_what_it_was_trained_from(tmp_path):
    """A trained model is asked in its base model's template, on its run's held-out problems.

    The name of a folder in runs/ does not tell the template: base and trained would be asked
    differently. A flag changes the held-out problems, even if its value is 0.
    """
    for name, origin in (("a", "Qwen/Qwen2.5-Math-7B"), ("b", str(tmp_path / "a" / "model"))):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(
            json.dumps({"toy_lines": 5, "seed": 7, "model": origin})
        )
    path = str(tmp_path / "b" / "model")
    assert files.origin_of(path) == "Qwen/Qwen2.5-Math-7B"
    assert command.heldout_set(replace(Embedded(), seed=0), [path]).revision == "chain-5-0"
    assert files.origin_of("some/model") == "some/model"


@pytest.mark.parametrize(
    "settings, is_run",
    [
        ({"program": "shear train", "seed": 7}, True),
        ({"toy_lines": 5}, True),  # as before there was a "program"
        ({"program": "another's", "seed": 7}, False),
        ({"model_type": "qwen2"}, False),
    ],
)
def test_a_run_is_told_by_a_field_of_its_own(settings, is_run, tmp_path):
    """A run is known by its own field, not by the name of a flag, which may change."""
    (tmp_path / "model").mkdir()
    files.write_json(tmp_path / "config.json", settings | {"model": "some/model"})
    assert (files.config_of(tmp_path) is not None) == is_run
    path = str(tmp_path / "model")
    assert files.origin_of(path) == ("some/model" if is_run else path)


def test_bad_input_is_one_sentence(models, tmp_path, monkeypatch, assert_refused):
    """Each case of tests/cases/eval_refused.csv is refused.

    M is a model, `run` a run without --bench, r.jsonl a row without an answer, and 0.jsonl empty.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "M").symlink_to(models[0])
    (tmp_path / "run").mkdir()
    (tmp_path / "0.jsonl").touch()
    files.append_rows(tmp_path / "r.jsonl", [{"problem": "p", "response": "r", "answer": None}])
    files.append_rows(
        tmp_path / "run/metrics.jsonl",
        [{"step": 1, "reward": 1, "equal_groups": 0, "grad_norm": 0}],
    )
    for case in cases("eval_refused.csv"):
        assert_refused(command.main, case["flags"].split(), case["words"])
