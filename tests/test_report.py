"""harness/report.py: the numbers of a step, which group is shown, and the lines that a user
reads.
"""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from made import ALONE, configured, made_batch
from transformers.modeling_outputs import CausalLMOutput

from credit.batch import Mean
from credit.settings import Shear
from credit.table import METHODS
from grpo import Rollouts, group_advantages
from harness import files, report
from rewards import grade_math
from tasks import toy
from tasks.problems import Task

RIGHT = "a=1+2=1+2=3\n\\boxed{3}"
WRONG = "a=1+2=1+2=4\n\\boxed{4}"
BEFORE = {"greedy": (0.344, 0.021, 512), "sampled": (0.379, math.nan, 512)}
BEFORE |= {"localisation": None, "length": 13.5}


@pytest.fixture
def step():
    """Two groups of two: the first all wrong, the second mixed; all texts 16 tokens and the end."""
    tokenizer = toy.make_tokenizer()
    texts = [WRONG, WRONG, RIGHT, WRONG]
    ids = torch.tensor([[*tokenizer(text)["input_ids"], 1, 0] for text in texts])  # padded
    mask = ids > 0
    rewards = torch.tensor([0.0, 0, 1, 0])
    rollouts = Rollouts(ids, mask, ids, mask, torch.tensor([False, False, False, True]), texts)
    problems = [{"problem": "a=1+2;a?\n", "answer": "3"}] * 2
    parts = dict(problems=problems, reasons=["wrong", "wrong", "correct", "truncated"])
    parts |= dict(entropies=0.25 * mask, stats={"sinkhorn_error": Mean(1.0, 2)})
    batch = made_batch(rewards, rollouts, 2, **parts)
    task = Task("embedded", [], [], None, grade_math, first_error=toy.first_error)
    weights = torch.ones(ids.shape)
    weights[2], weights[3, :12], weights[3, 12:] = 0.5, 0.1, 0.9
    batch.token_advantages = weights * batch.advantages[:, None]
    return tokenizer, task, batch, weights


def test_step_metrics_are_those_of_the_batch(step):
    """Weights count where A is not 0; a problem is solved by one right rollout; a method's own
    numbers pass; sides of the first error are the mixed group's alone, and none where the task does
    not know it.
    """
    tokenizer, task, batch, weights = step
    error = toy.FirstError(12, "final", 16)
    knowing = dataclasses.replace(task, first_error=lambda problem, text: error)
    metrics = report.step_metrics(batch, knowing, tokenizer)
    mixed = weights[2:, :16]
    expected = dict(reward=0.25, solved=0.5, equal_groups=0.5, length=16, truncated=0.25)
    expected |= dict(entropy=0.25, sign_changes=0, sinkhorn_error=0.5, weight_before=0.1)
    expected |= dict(weight_mean=mixed.mean().item(), weight_std=mixed.std().item())
    expected |= dict(weight_after=0.9)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert 0.5 < metrics["ess"] < 1
    unknown = report.step_metrics(batch, dataclasses.replace(task, first_error=None), tokenizer)
    assert metrics.keys() - unknown.keys() == {"weight_before", "weight_after"}
    rewards = torch.tensor([math.nan, 0, 1, 0])  # one group, whose first rollout has no verdict
    parts = dict(rewards=rewards, advantages=group_advantages(rewards, 4), group_size=4)
    one = dataclasses.replace(batch, **parts, problems=batch.problems[:1])
    of_one = report.step_metrics(one, knowing, tokenizer)
    expected = dict(reward=1 / 3, equal_groups=0, infra_errors=1, solved=1)
    assert {name: of_one[name] for name in expected} == pytest.approx(expected)


def test_samples_are_of_the_first_mixed_group(step, monkeypatch):
    """With verdicts, the true first error, one weight per token, and its spans."""
    monkeypatch.setattr(report, "closest_in", lambda *inputs: [[]] * 2)
    tokenizer, task, batch, weights = step
    parts = 6, tokenizer, task, batch, "shear", Shear()
    right, wrong = report.sample_rows(*parts, {"shear": weights})
    assert report.sample_rows(*parts) == [right, wrong]
    expected = {"response": RIGHT, "reason": "correct", "first_error": None}
    assert expected.items() <= right.items()
    expected = {"response": WRONG, "score": 0.0, "first_error": (0, "arith", 12), "step": 7}
    expected |= {"spans": [], "weights": {"shear": pytest.approx([0.1] * 12 + [0.9] * 4)}}
    assert {name: wrong[name] for name in expected} == expected and wrong["advantage"] < 0
    assert "".join(wrong["tokens"]) == WRONG + "<eos>"
    first = report.sample_rows(*parts, group=0)
    assert [(row["response"], "spans" in row) for row in first] == [(WRONG, False)] * 2
    assert len(report.credit_vs_first_error(*parts[1:])["samples"]) == 2


def test_example_marks_the_line_of_the_first_error(step):
    """Mean weight of each line; a rollout whose error is its first token has no "before" and is not
    shown.
    """
    tokenizer, _, batch, weights = step
    lines = report.worked_example(tokenizer, batch.rollouts, weights, torch.tensor([-1, 0, -1, 12]))
    assert lines == ["  0.10  a=1+2=1+2=4", "  0.90  \\boxed{4}<eos>  <- first error"]
    assert (
        report.worked_example(tokenizer, batch.rollouts, weights, torch.tensor([-1, 0, -1, -1]))
        == []
    )


METRICS = dict(step=1, reward=0.43, solved=1.0, equal_groups=0.0625, length=64.2, truncated=0.018)


METRICS |= dict(skipped=0, infra_errors=0, entropy=0.0361, weight_mean=0.264, weight_std=0.17)
METRICS |= dict(ess=0.75, sign_changes=0.0, grad_norm=0.0512)
METRICS |= dict(seconds={"generate": 1.2, "train": 0.9})


def test_a_row_a_step_under_a_header_that_repeats(monkeypatch):
    """Numbers written out; what is rare has a row of its own where it is not 0, and so have
    benchmarks. Seconds of a phase add up.
    """
    times = SimpleNamespace(perf_counter=Mock(side_effect=[0, 1, 3, 7.5]))
    monkeypatch.setattr(report, "time", times)
    clock = report.Clock(torch.device("cpu"))
    for phase in ("score", "weights", "score"):
        clock.lap(phase)
    assert clock.laps == {"score": 5.5, "weights": 2}
    rows = report.StepTable(40)
    legend, *first = rows.row(METRICS).split("\n\n")
    assert " ".join(legend.split()) == report.LEGEND
    assert "\n".join(first).split("\n") == [
        " step reward  solved  no-signal  length  trunc  entropy     weight   ess  gnorm  s/step",
        " 1/40  0.430    1.00       0.06      64   0.02    0.036  0.26±0.17  0.75  0.051     2.1",
    ]
    below = rows.row(METRICS | dict(infra_errors=1234, skipped=1, sign_changes=1.0, step=2))
    assert below.split("\n")[1:] == ["       infra 1234  skipped 1  flip 1"]
    texts = [rows.row(METRICS | {"step": step}) for step in range(3, 22)]
    assert ["reward" in text for text in texts] == [False] * 18 + [True]
    assert "solved:" not in "".join(texts)
    bench = {"embedded": {"mean": 0.5, "error": 0.125}}
    assert rows.row(METRICS | {"bench": bench}).endswith("\n  on benchmarks: embedded 50.0 ± 12.5")


def test_the_curve_shows_weights_beside_the_first_error_where_rows_have_them(tmp_path, monkeypatch):
    """Steps logged without them leave a gap; where no step has them, the mean of all weights is
    drawn; from 0 up.

    The floor is there if eps is known; what is of another unit has axes of its own.
    """
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **options: drawn.append(figure.axes)
    )
    known = METRICS | dict(step=2, weight_before=0.1, weight_after=0.3, eps_over_nbar=0.05)
    unknown = METRICS | dict(step=2, weight_before=math.nan, weight_after=math.nan)
    after = BEFORE | {"greedy": (0.5, 0.1, 512)}
    for history in ([METRICS], [METRICS, known], [unknown]):
        report.plot(history, BEFORE, after, configured([]), tmp_path / "curve.png")
    (_, mean, _), (accuracies, sides, no_signal), _ = drawn
    greedy = [bars.lines[0].get_xydata().tolist() for bars in accuracies.containers]
    assert greedy[:2] == [[[0, 0.344]], [[2, 0.5]]]
    assert [line.get_ydata().tolist() for line in mean.lines] == [[0.264]]
    expected = [[math.nan, 0.1], [math.nan, 0.3], [0.05 * math.log(12)] * 2]
    for line, values in zip(sides.lines, expected, strict=True):
        assert line.get_ydata() == pytest.approx(values, nan_ok=True)
    assert no_signal.lines[0].get_ydata().tolist() == [0.0625] * 2
    for axes in (axes for figure in drawn for axes in figure):
        assert axes.get_ylim()[0] == 0
        assert axes.get_title() and axes.get_xlabel() and axes.get_ylabel()


def test_plan_and_end_are_short_lines_of_plain_text(tmp_path, monkeypatch, capsys):
    """The plan wraps its notes and leaves the settings to config.json; the end compares, and names
    the next command.
    """
    monkeypatch.chdir(tmp_path)
    config, folder = configured([]), Path("runs/embedded-shear-1")
    folder.mkdir(parents=True)
    report.print_plan(config, folder, ["a note of many words " * 6, "a key \x1b[31m\u202e"])
    example = ["  0.10  a=1+2=1+2=4", "  0.90  \\boxed{4}<eos>  <- first error"]
    after = BEFORE | {"greedy": (0.893, 0.014, 512), "sampled": (0.666, 0.029, 512)}
    after |= {"localisation": {"auc": 0.984, "auc_position": 0.855}, "example": example}
    row = {"step": 1, "problem": "1+1?", "tokens": ["2"], "weights": {"shear": [1]}}
    rows = [row | {"advantage": 1.0}]
    files.append_rows(folder / "samples.jsonl", rows)
    report.print_before(config, folder, BEFORE | {"samples": rows})
    history = [METRICS | {"peak_gb": 10.0}]
    report.print_after(config, folder, BEFORE, after | {"samples": rows}, history)
    printed = capsys.readouterr().out
    lines = printed.split("\n")
    assert max(map(len, lines)) <= 88 and printed.replace("\n", "").isprintable()
    for line in (
        "shear on the embedded task; everything goes to runs/embedded-shear-1/",
        r"  a key \x1b[31m\u202e",  # which would colour the terminal and turn its lines
        f"  40 steps x 16 prompts x 8 rollouts of up to {config.sampling.max_tokens} tokens; 4 "
        "update(s) per step",
        "  settings: config.json; all metrics: metrics.jsonl",
        "held-out accuracy before: greedy 34.4 ± 2.1%, sampled 37.9 ± -%",
        "held out                           before         after",
        "greedy accuracy, %             34.4 ± 2.1    89.3 ± 1.4",
        "AUC to the true first error           nan         0.984",
        "AUC of position alone                 nan         0.855",
        *example,
        "  median response 14 tokens, 2 span(s) of 12",
        "peak memory per GPU: 10.0 GB",
        "a page of all token weights: runs/embedded-shear-1/credit.html (0.0 MB)",
        "and in runs/embedded-shear-1/: curve.png, model/",
        "next: python eval.py --model runs/embedded-shear-1",
        "      the same command with --method grpo, then python -m studies.compare RUN RUN",
    ):
        assert line in lines
    assert list(METHODS)[:2] == ["grpo", "shear"]  # each names the other as the next command
    for eps, is_blurred in ((0.05, False), (0.5, True)):
        found = {"nbar": 13.0, "eps_over_nbar": eps, "weight_mean": 0.9}
        assert ("weigh alike; lower --eps" in report.floor_note(found, config)) == is_blurred
    first, last = files.read_lines(folder / "metrics.jsonl")
    assert (
        first.keys() == {"before"} and last.keys() == {"after"} and "samples" not in last["after"]
    )
    assert (
        files.read_lines(folder / "before.jsonl")
        == files.read_lines(folder / "after.jsonl")
        == rows
    )
    assert (folder / "curve.png").exists() and "nothing was learned" not in printed
    report.print_before(configured(["--window", "14"]), folder, BEFORE)
    report.print_after(config, folder, BEFORE, after, [METRICS | {"grad_norm": 0.0}] * 2)
    printed = " ".join(capsys.readouterr().out.split())
    assert "nothing was learned: no mixed groups; change --warmup-steps or --model" in printed
    assert "WARNING: median response 14 tokens, 1 span(s) of 14: all tokens of a" in printed


def test_a_log_has_a_line_every_half_minute_of_an_evaluation(monkeypatch, capsys):
    """Of the main rank; on a terminal there is a bar in its place."""
    monkeypatch.setattr(report, "SILENCE", 0)
    model = torch.nn.Identity()
    rollouts = CausalLMOutput(logits=torch.zeros(3, 1, 2))
    for main in (True, False):
        with report.show_progress(model, 3000, main):
            model(rollouts)
        model(rollouts)
    assert capsys.readouterr().out == "  evaluating: 3 of at most 3,000 tokens\n"


@pytest.mark.parametrize(
    "reward, truncated, no_answer, words",
    [
        (0.0, 0.9, 0.1, "learned: 90% of responses are cut off, 10% have no answer; raise --max"),
        (0.0, 0.1, 0.8, "80% have no answer; change --template"),
        (0.0, 0.0, 0.0, "give easier problems with --data"),
        (1.0, 0.0, 0.0, "give harder problems with --data"),
        (0.5, 0.9, 0.1, ""),
    ],
)
def test_equal_rewards_are_explained(reward, truncated, no_answer, words, tmp_path, capsys):
    """By what most responses are, with the flag to change; after two steps that are alike."""
    found = METRICS | dict(reward=reward, truncated=truncated, no_answer=no_answer)
    config = configured(["--model", "M", "--method", "grpo"])
    for first in (reward, 0.25):
        with report.step_log(config, tmp_path, ALONE) as log:
            log(found | {"reward": first}, [])
            log(found | {"step": 2}, [])
        printed = " ".join(capsys.readouterr().out.split())
        assert words in printed or first != reward
        assert ("learned" in printed) == bool(words and first == reward)
