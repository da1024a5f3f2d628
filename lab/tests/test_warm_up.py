"""lab/tools/warm_up.py: a warm-up on the solutions of one's own problems."""

import pytest
from builders.commands import words_of
from builders.runs import ALONE, config_from

import train
from base.files import append_rows
from harness.run import load_run

SIZES = "--task own --steps 1 --prompts-per-step 2 --prompts-per-update 2 --rollouts-per-prompt 4 "
SIZES += "--max-tokens 9 --heldout 4 --eval-groups 1 --use lab.tools.warm_up --warmup-steps 2"


@pytest.fixture
def flags(qwen_folder, tmp_path) -> list[str]:
    """Flags of a short run on ten problems, of which all but one have a solution."""
    rows = [{"problem": f"{i}?", "answer": str(i), "solution": f"so {i}"} for i in range(10)]
    rows[0].pop("solution")
    append_rows(tmp_path / "rows.jsonl", rows)
    places = ["--model", qwen_folder, "--data", tmp_path / "rows.jsonl", "--out", tmp_path]
    return words_of(*places, SIZES)


def test_a_warm_up_shows_solutions_of_what_is_trained_on(flags):
    """Each is shown with its answer in a box; held-out problems and those without never are."""
    run = load_run(config_from(flags), ALONE)
    options = run.hooks.warm_up(run.context).keywords  # of `imitate`
    shown = {}
    for _ in range(200):
        problem = options["make"]()
        shown[problem["problem"]] = options["show"](problem)
    assert shown == {
        row["problem"]: f"so {row['answer']}\n\\boxed{{{row['answer']}}}"
        for row in run.context.task.train
        if "solution" in row
    }
    assert not shown.keys() & {row["problem"] for row in run.context.task.heldout}


def test_a_warm_up_without_solutions_or_steps_is_refused(flags, tmp_path, assert_refused):
    """Asked for, they would be left out in silence."""
    words = [*flags, "--warmup-steps", "0"]
    assert_refused(train.main, words, "lab.tools.warm_up: gives a warm-up; add --warmup-steps")
    append_rows(tmp_path / "bare.jsonl", [{"problem": f"{i}?", "answer": "1"} for i in range(9)])
    words = [*flags, "--data", str(tmp_path / "bare.jsonl")]
    assert_refused(train.main, words, "lab.tools.warm_up", '"solution"')
