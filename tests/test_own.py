"""Problems of one's own: sizes, lessons from solutions, evaluation, samples, and the plan."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from builders.commands import run_well, words_of
from builders.runs import config_from
from safetensors.torch import load_file
from transformers import AutoTokenizer

import eval as evaluate
import train
from harness import log
from harness.files import append_rows, read_lines
from harness.load import make_task
from tasks import lessons

SIZES = "--task own --steps 1 --prompts-per-step 2 --prompts-per-update 2 --rollouts-per-prompt 4 "
SIZES += "--max-tokens 9 --heldout 4 --eval-groups 1"
pytestmark = pytest.mark.usefixtures("no_curve")


@pytest.fixture
def flags(qwen_folder, tmp_path) -> list[str]:
    """Flags of a short run on ten problems, of which all but one have a solution."""
    rows = [{"problem": f"{i}?", "answer": str(i), "solution": f"so {i}"} for i in range(10)]
    rows[0].pop("solution")
    append_rows(tmp_path / "rows.jsonl", rows)
    places = ["--model", qwen_folder, "--data", tmp_path / "rows.jsonl", "--out", tmp_path]
    return words_of(*places, SIZES)


def problems_of(rows: list[dict]) -> set[str]:
    """The problems of some rows."""
    return {row["problem"] for row in rows}


def test_own_problems_have_sizes_for_a_cpu(tmp_path, assert_refused):
    """Those of the word problems, but for the template and the length; a flag still decides."""
    words = config_from(words_of("--model M --task words"))
    own = config_from(words_of("--task own --model M --data F --lr 1e-4"))
    assert own.shear == words.shear and own.optimisation == replace(words.optimisation, lr=1e-4)
    assert own.sampling == replace(words.sampling, max_tokens=256)
    assert own.problems.template == "auto" and not own.problems.warmup_steps
    assert_refused(train.main, words_of("--task own --model M"), "--task own: needs --data")


def test_the_time_of_a_run_is_told_after_the_first_evaluation(flags, tmp_path, capsys):
    """An evaluation of 4 + 1 x 4 responses in 16 s: 2 s each, 16 s a step of 8, 80 s for five."""
    run_well(train, flags, "--name run")
    assert "sampling takes 0:00:0" in " ".join(capsys.readouterr().out.split())
    task = SimpleNamespace(heldout=range(4))
    config = config_from([*flags, "--steps", "5"])
    log.print_time(SimpleNamespace(config=config, context=SimpleNamespace(task=task)), 16.0)
    assert "takes 0:00:16 a step and 0:01:20 in all" in " ".join(capsys.readouterr().out.split())


def test_lessons_show_solutions_of_what_is_trained_on(flags, qwen_folder):
    """Each is shown with its answer in a box; held-out problems and those without never are."""
    _, task, _ = make_task(config_from(flags), AutoTokenizer.from_pretrained(qwen_folder), 512)
    lesson = task.lessons.keywords  # of `imitate`
    pairs = lessons.demonstrate_batch(200, lesson["make"], lesson["show"], forbidden=set())
    shown = [(problem["problem"], solution) for problem, solution in pairs]
    due = {f"{i}?": f"so {i}\n\\boxed{{{i}}}" for i in range(1, 10)}
    assert len(due) > len(set(shown)) and dict(shown).items() <= due.items()
    assert dict(shown).keys() == problems_of(task.train) - {"0?"}


def test_lessons_without_solutions_are_refused(flags, tmp_path, assert_refused):
    """Asked for by --warmup-steps, they would be left out in silence."""
    append_rows(tmp_path / "bare.jsonl", [{"problem": f"{i}?", "answer": "1"} for i in range(9)])
    words = [*flags, "--warmup-steps", "3", "--data", str(tmp_path / "bare.jsonl")]
    assert_refused(train.main, words, "--warmup-steps 3", '"solution"', "leave it out")


def test_an_interrupted_warm_up_is_kept(flags, tmp_path, monkeypatch, capsys):
    """The model as far as it was taught is a folder to go on from, which no other run takes."""

    def begin(model, *parts, **options):
        with torch.no_grad():
            model.model.norm.weight.fill_(7)
        raise KeyboardInterrupt

    teach = lessons.teach
    monkeypatch.setattr(lessons, "teach", begin)
    assert train.main([*flags, *words_of("--warmup-steps 2 --name half")]) == 130
    start = tmp_path / "half" / "start"
    assert f"take it by --model {start}" in " ".join(capsys.readouterr().err.split())
    assert (load_file(start / "model.safetensors")["model.norm.weight"] == 7).all()
    monkeypatch.setattr(lessons, "teach", teach)
    run_well(train, flags, "--warmup-steps 2 --name whole")
    assert "warm-up: as in" not in capsys.readouterr().out
    run_well(train, flags, "--name on --model", start)


def test_a_run_is_evaluated_on_what_it_held_out(flags, tmp_path, monkeypatch, assert_refused):
    """Without --bench, template and limit are those of training, and a copied question is wrong.

    Problems that have changed since, and runs that hold out different ones, are refused.
    """
    monkeypatch.chdir(tmp_path)
    run_well(train, flags, "--name run --template plain")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    run_well(evaluate, "--model", tmp_path / "run", "--samples 2 --out", tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    rows = read_lines(tmp_path / "out" / "generations.jsonl")
    assert len(rows) == 2 * config["heldout"] and {row["benchmark"] for row in rows} == {"heldout"}
    assert {model["template"] for model in settings["models"].values()} == {"plain"}
    assert settings["data"]["heldout"]["limit"] == 9
    trained_on = problems_of(read_lines(tmp_path / "run" / "samples.jsonl"))
    loaded = evaluate.own_problems([str(tmp_path / "run" / "model")])
    assert len(loaded.problems) == 4 and not problems_of(loaded.problems) & trained_on
    assert loaded.task.refuse_copies
    run_well(train, flags, "--name other --seed 1")
    both = words_of("--model", tmp_path / "run", tmp_path / "other")
    assert_refused(evaluate.main, both, "--bench heldout", "one run")
    append_rows(tmp_path / "rows.jsonl", [{"problem": "new", "answer": "1"}])
    assert_refused(evaluate.main, both[:2], "--model", "other problems", "restore it")


def test_all_groups_of_a_step_can_be_kept(flags, tmp_path):
    """Both groups of four are, each with its problem."""
    run_well(train, flags, "--name all --keep-samples")
    kept = read_lines(tmp_path / "all" / "samples.jsonl")
    assert len(kept) == 8 and len(problems_of(kept[:4])) == 1 and len(problems_of(kept)) == 2
