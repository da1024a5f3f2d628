"""Commands of lab/tools that read a run's files, a model's shapes or other files."""

import math
import shutil
from pathlib import Path

import pytest
from builders.case_files import cases
from builders.commands import run_well, words_of

import eval as evaluation
from base import files
from lab.tools import answers, curve, replay, smoke, tables
from tasks.benchmarks import SUITES

CASES = Path(__file__).with_name("cases")
(METRICS,) = cases("step.jsonl")
BEFORE = {"greedy": (0.344, 0.021, 512), "sampled": (0.379, math.nan, 512)}
GENERATION = dict(weights="", set="amc23", settings={}, seed=0, block=0, problem="1")
RUN = {"program": files.PROGRAM, "task": "embedded", "method": "shear", "window": 12}


# ---- curve ---------------------------------------------------------------------------------------


def test_the_curve_is_drawn_from_what_a_run_has_written(tmp_path, monkeypatch):
    """A run that goes on has no `after`. Steps without weights leave a gap.

    So does the mean weight where no group is mixed. The floor is there where eps is known.
    """
    drawn = []
    save = "matplotlib.figure.Figure.savefig"
    monkeypatch.setattr(save, lambda figure, *_, **options: drawn.extend(figure.axes))
    known = METRICS | dict(step=2, eps_over_nbar=0.05)
    equal = known | dict(step=3, equal_groups=1.0, weight_mean=1.0)
    rows = [{"before": BEFORE}, METRICS | {"step": 1}, known, equal]
    files.write_json(tmp_path / "config.json", RUN)
    files.append_rows(tmp_path / "metrics.jsonl", rows)
    wrong = {"step": 2, "score": 0, "advantage": -1, "first_error": [1, "copy", 2]}
    known_errors = [
        wrong | {"weights": {"shear": weights}} for weights in ([0.1, 0.4], [0.1, 0.2, 0.1])
    ]
    unknown = known_errors[0] | {"step": 3, "first_error": None}
    files.append_rows(tmp_path / "samples.jsonl", [*known_errors, unknown])
    run_well(curve, tmp_path)
    rewards, weights = drawn
    assert rewards.containers[0].lines[0].get_xydata().tolist() == [[0, 0.344]]
    mean, before, after, floor, zero = (line.get_ydata() for line in weights.lines)
    assert mean == pytest.approx([0.264, 0.264, math.nan], nan_ok=True)
    assert before == pytest.approx([math.nan, 0.1, math.nan], nan_ok=True)
    assert after == pytest.approx([math.nan, 0.7 / 3, math.nan], nan_ok=True)
    assert floor == pytest.approx([0.05 * math.log(12)] * 2) and not any(zero)


# ---- answers -------------------------------------------------------------------------------------


def test_a_file_s_answers_are_graded_in_their_other_forms(tmp_path, capsys, assert_refused):
    """What is read otherwise than meant is printed with its row, and train.py's warnings follow."""
    path = tmp_path / "own.jsonl"
    shutil.copy(CASES / "own_answers.jsonl", path)
    run_well(answers, path)
    printed = capsys.readouterr().out
    says = [row["says"] for row in files.read_lines(path)]
    assert all(words in printed for words in says) and printed.endswith("10 answers\n")
    assert "row 1:" not in printed  # which says nothing
    files.append_rows(path, [{"answer": None}])
    assert_refused(answers.main, [path], f'{path}, row 11: needs "answer"')


# ---- replay, tables ------------------------------------------------------------------------------


def test_responses_from_elsewhere_are_graded(tmp_path, capsys, assert_refused):
    """The responses of a file are graded: right, wrong, cut off, and a program.

    Problem means are 1/2, 0 and 1, so 1/2 ± 0.289. Grading the same file again changes nothing.
    Another model is right where this one is right half of the time; k is a seed's. A folder with
    generations of others is left alone.
    """
    out = tmp_path / "out"
    for _ in range(2):
        run_well(replay, CASES / "responses.jsonl", "--out", out)
    rows = files.read_lines(out / "generations.jsonl")
    printed = capsys.readouterr().out
    assert "| replay        | 50.0 ± 28.9 |" in printed and "| gain          | 50.0 ± -" in printed
    assert "  replay: 5 responses: 2 correct, 1 wrong, 1 truncated, 1 no_answer" in printed
    run_well(evaluation, "--from", out)
    assert capsys.readouterr().out in printed
    run_well(tables, out, "--pass-at 1 2 --paper Qwen2.5-Math-7B")
    assert "pass@2" in capsys.readouterr().out
    assert_refused(tables.main, words_of(out, "--pass-at 3"), "has 2 samples per problem")
    other = tmp_path / "other.jsonl"
    files.append_rows(other, [{"problem": "p", "response": "r", "answer": "1"}])
    assert_refused(replay.main, words_of(other, "--out", out), "has generations of others")
    assert len(rows) == 8 and files.read_lines(out / "generations.jsonl") == rows


def test_a_csv_from_elsewhere_is_graded(tmp_path, capsys):
    """Its cells are text: a seed, whether a response was cut off, tests as JSON; and boxed answers."""
    path = tmp_path / "x.csv"
    path.write_text(
        "problem,response,answer,tests,seed,truncated\n"
        "a,\\boxed{7},\\boxed{7},,0,False\nb,\\boxed{7},7,,1,TRUE\n"
        'c,"```python\nprint(1)\n```",,"{""inputs"": [""""], ""outputs"": [""1""]}",0,\n'
    )
    run_well(replay, path, "--out", tmp_path / "out")
    assert "3 responses: 2 correct, 1 truncated" in capsys.readouterr().out


def test_pass_at_k_is_the_written_out_number():
    """It is 1 - C(n-c, k) / C(n, k), the mean over all draws of k without putting back.

    A problem with fewer samples does not count, and what could not be graded is no sample.
    """
    scores = [1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 1, None]
    rows = [dict(problem=i // 4, seed=0, score=score) for i, score in enumerate(scores)]
    found = tables.summarise(rows, passes=(2, 4, 5))
    passes = [found[f"pass@{k}"] for k in (2, 4, 5)]
    assert passes == pytest.approx([(1 + (1 - 1 / 6) + 0) / 3, 2 / 3, math.nan], nan_ok=True)
    found = tables.summarise(rows[:12], passes=())
    assert (found["mean"], found["error"]) == pytest.approx((0.5, 0.5 / math.sqrt(3)))


def test_the_paper_s_average_of_a_suite_is_the_one_that_it_prints():
    """It stands beside the average of exactly these benchmarks, and nothing beside others."""
    assert tables.suite_of(reversed(SUITES["math"])) == "math"
    assert tables.suite_of([*SUITES["math"], "math", "x"]) == ""
    cells = tables.paper_means("Qwen2.5-Math-7B", "math")
    assert cells == {"GRPO †": "49.6", "SHEAR †": "51.2"}
    assert tables.paper_means("Qwen2.5-Math-7B", "") == {"GRPO †": "-", "SHEAR †": "-"}


def test_runs_are_selected_by_saved_evaluations(tmp_path, monkeypatch, capsys, assert_refused):
    """Those of all folders in evals/ that are of checkpoints of the runs, in the order of steps."""
    monkeypatch.chdir(tmp_path)
    scores = {"a": (0.5, 1, 0), "b": (0, 0.5, 1)}  # of checkpoints as they were given to eval.py
    for run, of_run in scores.items():
        rows = []
        for step, score in zip((3, 2, 1), of_run, strict=True):
            model = f"{run}/checkpoints/step-{step:06d}/model"
            rows.append(GENERATION | {"model": model, "score": score})
        (tmp_path / "evals" / run).mkdir(parents=True)
        files.append_rows(tmp_path / "evals" / run / "generations.jsonl", rows)
    run_well(tables, "evals/a evals/b")
    printed = capsys.readouterr().out
    assert "  a: last 50.0 (step-000003); best 100.0 (step-000002), of 3 with an" in printed
    assert "  b: last 0.0 (step-000003); best 100.0 (step-000001), of 3 with an" in printed
    assert "best of all: a/checkpoints/step-000002/model" in printed
    shutil.copytree("evals/a", "evals/c")
    assert_refused(tables.main, ["evals/a", "evals/c"], "amc23 is in several folders")


# ---- smoke ---------------------------------------------------------------------------------------


def test_a_smoke_test_takes_the_whole_path_of_two_steps(tmp_path, capsys, assert_refused):
    """Rewards that alternate give an untrained model weights, a gradient and a saved model.

    It never takes the name of the run that it tests.
    """
    flags = words_of("--toy-lines 1 --toy-width 16 --window 6 --stride 3 --steps 300 --name real")
    (tmp_path / "smoke-1").mkdir()
    run_well(smoke, flags, "--out", tmp_path)
    run = tmp_path / "smoke-2"
    assert f"smoke test passed: {run}" in capsys.readouterr().out
    steps = files.read_lines(run / "metrics.jsonl")[1:-1]
    assert len(steps) == 2
    assert all(step["reward"] == 0.5 and step["grad_norm"] > 0 for step in steps)
    assert (run / "model" / "model.safetensors").exists()
    assert_refused(smoke.main, ["--resume", run], "leave --resume out")
