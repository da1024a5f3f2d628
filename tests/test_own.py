"""Problems of one's own: sizes, evaluation, samples."""

import pytest
from builders.commands import run_well, words_of
from builders.runs import config_from

import eval as evaluate
import train
from base.files import append_rows, read_lines

SIZES = "--task own --steps 1 --prompts-per-step 2 --prompts-per-update 2 --rollouts-per-prompt 4 "
SIZES += "--max-tokens 9 --heldout 4 --eval-groups 1"


@pytest.fixture
def flags(qwen_folder, tmp_path) -> list[str]:
    """Flags of a short run on ten problems."""
    append_rows(
        tmp_path / "rows.jsonl", [{"problem": f"{i}?", "answer": f"{i}"} for i in range(10)]
    )
    places = ["--model", qwen_folder, "--data", tmp_path / "rows.jsonl", "--out", tmp_path]
    return words_of(*places, SIZES)


def problems_of(rows: list[dict]) -> set[str]:
    """The problems of some rows."""
    return {row["problem"] for row in rows}


def test_own_problems_have_sizes_for_a_cpu(assert_refused):
    """Responses, spans and steps are short; a flag still decides."""
    own = config_from(words_of("--task own --model M --data F --lr 1e-4"))
    assert (own.max_tokens, own.window, own.lr) == (256, 12, 1e-4)
    assert own.template == "auto" and not own.warmup_steps
    assert_refused(train.main, words_of("--task own --model M"), "--task own: needs --data")


def test_a_run_is_evaluated_on_what_it_held_out(flags, tmp_path, monkeypatch, assert_refused):
    """Without --bench, template and limit are those of training, and a copied question is wrong.

    Problems that have changed since, and runs that hold out different ones, are refused.
    """
    monkeypatch.chdir(tmp_path)
    run_well(train, flags, "--name run --template plain")
    run_well(evaluate, "--model", tmp_path / "run", "--samples 2 --out", tmp_path / "out")
    rows = read_lines(tmp_path / "out" / "generations.jsonl")
    assert len(rows) == 2 * 4 and {row["set"] for row in rows} == {"heldout"}
    assert {row["settings"]["template"] for row in rows} == {"plain"}
    assert {row["limit"] for row in rows} == {9}
    trained_on = problems_of(read_lines(tmp_path / "run" / "samples.jsonl"))
    loaded = evaluate.heldout_set([str(tmp_path / "run" / "model")])
    assert len(loaded.problems) == 4 and not problems_of(loaded.problems) & trained_on
    assert loaded.task.refuse_copies
    run_well(train, flags, "--name other --seed 1")
    both = words_of("--model", tmp_path / "run", tmp_path / "other")
    assert_refused(evaluate.main, both, "--bench heldout", "one run")
    append_rows(tmp_path / "rows.jsonl", [{"problem": "new", "answer": "1"}])
    assert_refused(evaluate.main, both[:2], "--model", "other problems", "restore it")
