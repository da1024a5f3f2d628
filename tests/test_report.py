"""harness/log.py: a step's numbers, the group that is shown, and the lines that a user reads."""

import dataclasses
import math
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from builders.case_files import cases, text_of
from builders.rollouts import batch_of
from builders.runs import config_from, run_of
from transformers.modeling_outputs import CausalLMOutput

from credit.measures import credit_vs_first_error, sample_rows, step_metrics, worked_example
from grpo import Rollouts, group_advantages
from harness import files, log
from rewards import grade_math
from tasks import toy
from tasks.problems import Task

(METRICS,) = cases("step.jsonl")
RIGHT = "a=1+2=1+2=3\n\\boxed{3}"
WRONG = "a=1+2=1+2=4\n\\boxed{4}"
BEFORE = {"greedy": (0.344, 0.021, 512), "sampled": (0.379, math.nan, 512)}
BEFORE |= {"localisation": {}, "length": 13.5, "truncated": 0, "no_answer": 0}


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
    parts |= dict(entropies=0.25 * mask, stats={"sinkhorn_error": np.array([1.0, 2])})
    batch = batch_of(rewards, rollouts, 2, **parts)
    task = Task("embedded", [], [], None, grade_math, first_error=toy.first_error)
    weights = torch.ones(ids.shape)
    weights[2] = 0.5
    weights[3, :12] = 0.1
    weights[3, 12:] = 0.9
    batch.token_advantages = weights * batch.advantages[:, None]
    return tokenizer, task, batch, weights


def test_step_metrics_are_those_of_the_batch(step):
    """The metrics of a step are those computed by hand.

    Weights count where A is not 0; a problem is solved by one right rollout; a method's own numbers
    are passed on.
    """
    _, _, batch, weights = step
    metrics = step_metrics(batch)
    mixed = weights[2:, :16]
    expected = dict(reward=0.25, solved=0.5, equal_groups=0.5, length=16, truncated=0.25)
    expected |= dict(entropy=0.25, sinkhorn_error=0.5)
    expected |= dict(weight_mean=mixed.mean().item(), weight_std=mixed.std().item())
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert 0.5 < metrics["ess"] < 1
    rewards = torch.tensor([math.nan, 0, 1, 0])  # one group, whose first rollout has no verdict
    one = dataclasses.replace(
        batch,
        rewards=rewards,
        advantages=group_advantages(rewards, 4),
        group_size=4,
        problems=batch.problems[:1],
    )
    of_one = step_metrics(one)
    expected = dict(reward=1 / 3, equal_groups=0, infra_errors=1, solved=1)
    assert {name: of_one[name] for name in expected} == pytest.approx(expected)


def test_samples_are_of_the_first_mixed_group(step):
    """Rows have verdicts, the true first error and one weight per token."""
    tokenizer, task, batch, weights = step
    right, wrong = sample_rows(6, tokenizer, task, batch, {"shear": weights}, batch.first_mixed)
    expected = {"response": RIGHT, "reason": "correct", "first_error": None}
    assert expected.items() <= right.items()
    expected = {"response": WRONG, "score": 0.0, "first_error": (0, "arith", 12), "step": 7}
    expected |= {"weights": {"shear": pytest.approx([0.1] * 12 + [0.9] * 4)}}
    assert {name: wrong[name] for name in expected} == expected and wrong["advantage"] < 0
    assert "".join(wrong["tokens"]) == WRONG + "<eos>"
    first = sample_rows(6, tokenizer, task, batch, {"shear": weights}, group=0)
    assert [row["response"] for row in first] == [WRONG] * 2
    of_one = credit_vs_first_error(tokenizer, task, batch, "shear")
    assert of_one["samples"] == [row | {"step": 0} for row in first]


def test_example_marks_the_line_of_the_first_error(step):
    """Each line is shown with its mean weight.

    A rollout whose error is its first token has no "before" and is not shown.
    """
    tokenizer, _, batch, weights = step
    marked = ["  0.10  a=1+2=1+2=4", "  0.90  \\boxed{4}<eos>  <- first error"]
    for last, lines in ((12, marked), (-1, [])):
        errors = torch.tensor([-1, 0, -1, last])
        assert worked_example(tokenizer, batch.rollouts, weights, errors) == lines


def test_a_row_a_step_under_a_header_that_repeats(monkeypatch):
    """The printed rows are the ones written here.

    Rare counts have a row of their own where they are not 0, and so have benchmarks. Seconds of a
    phase add up.
    """
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", Mock(side_effect=[0, 1, 3, 7.5]))
        clock = log.Clock(torch.device("cpu"))
        for phase in ("score", "weights", "score"):
            clock.lap(phase)
    assert clock.laps == {"score": 5.5, "weights": 2}
    legend, *first = log.step_lines(METRICS, 40, 0)
    assert " ".join(legend.split()) == log.LEGEND
    assert first == [
        "",
        " step reward  solved  no-signal  length  trunc  entropy     weight   ess  gnorm  s/step",
        " 1/40  0.430    1.00       0.06      64   0.02    0.036  0.26±0.17  0.75  0.051     2.1",
    ]
    rare = METRICS | dict(infra_errors=1234, skipped=1, replaced=1 / 3, step=2)
    assert log.step_lines(rare, 40, 1)[1:] == ["       infra 1234  skipped 1  replaced 0.3333"]
    assert [len(log.step_lines(METRICS, 40, shown)) for shown in (1, 19, 20, 21)] == [1, 1, 3, 1]


def test_plan_and_end_are_short_lines_of_plain_text(tmp_path, monkeypatch, capsys):
    """The plan wraps its notes; the end compares, and names the next command.

    The settings are left to config.json.
    """
    monkeypatch.chdir(tmp_path)
    config = config_from(["--generate-batch", "512"])
    folder = Path("runs/embedded-shear-1")
    folder.mkdir(parents=True)
    monkeypatch.setattr(log, "has_lab", lambda: True)  # also where it was removed
    log.print_plan(config, folder, ["a note of many words " * 6, "a key \x1b[31m\u202e"])
    example = ["  0.10  a=1+2=1+2=4", "  0.90  \\boxed{4}<eos>  <- first error"]
    after = BEFORE | {"greedy": (0.893, 0.014, 512), "sampled": (0.666, 0.029, 512)}
    after |= {"localisation": {"auc": 0.984, "auc_position": 0.855}, "example": example}
    row = {"step": 1, "problem": "1+1?", "tokens": ["2"], "weights": {"shear": [1]}}
    rows = [row | {"advantage": 1.0}]
    files.append_rows(folder / "samples.jsonl", rows)
    log.print_before(config, folder, BEFORE | {"samples": rows})
    history = [METRICS | {"peak_gb": 10.0}]
    log.print_after(config, folder, BEFORE, after | {"samples": rows}, history)
    printed = capsys.readouterr().out
    assert max(map(len, printed.split("\n"))) <= 88
    assert printed == text_of("plan_and_end.txt")
    first, last = files.read_lines(folder / "metrics.jsonl")
    assert first.keys() == {"before"} and last.keys() == {"after"}
    assert "samples" not in last["after"]
    for when in ("before", "after"):
        assert files.read_lines(folder / f"{when}.jsonl") == rows
    used = config_from(["--use", "lab.fast", "lab.tools.page"])
    for other, line in (
        (config_from(["--model", "M"]), "  --use lab.fast gives the same numbers sooner\n"),
        (used, "  functions of lab.fast, lab.tools.page in place of the core's\n"),
    ):
        log.print_plan(other, folder, [])
        assert line in capsys.readouterr().out
    log.print_before(config_from(["--window", "14"]), folder, BEFORE)
    log.print_after(config, folder, BEFORE, after, [METRICS | {"grad_norm": 0.0}] * 2)
    printed = " ".join(capsys.readouterr().out.split())
    assert "nothing was learned: no mixed groups; docs/faq.md says what to change" in printed
    assert "WARNING: median response 14 tokens, 1 span(s) of 14: all tokens of a" in printed
    for eps, is_blurred in ((0.05, False), (0.5, True)):
        found = {"nbar": 13.0, "eps_over_nbar": eps, "weight_mean": 0.9}
        assert ("weigh alike: lower --eps" in log.floor_note(found, config)) == is_blurred


def test_a_log_has_a_line_every_half_minute_of_an_evaluation(monkeypatch, capsys):
    """Only the main rank prints it, and it tears no bar of sampling."""
    monkeypatch.setattr(log, "SILENCE", 0)
    model = torch.nn.Identity()
    rollouts = CausalLMOutput(logits=torch.zeros(3, 1, 2))
    for main in (True, False):
        with log.show_progress(model, 3000, main):
            model(rollouts)
        model(rollouts)
    assert capsys.readouterr().out == "  evaluating: 3 of at most 3,000 tokens\n"


def test_equal_rewards_are_explained(tmp_path, capsys):
    """After two steps of equal rewards a note gives likely causes, with flags to change.

    The causes are the shares of responses that are cut off or have no answer.
    """
    config = config_from(["--model", "M", "--method", "grpo"])
    run = run_of(config, None, torch.nn.Identity(), None)
    run.folder = tmp_path
    for first, second in ((0, 0), (1, 1), (0.5, 0.5), (0.25, 0)):
        found = METRICS | dict(truncated=0.9, no_answer=0.1)
        with log.step_log(run) as log_step:
            log_step(found | {"reward": first}, [])
            log_step(found | {"reward": second, "step": 2}, [])
        printed = " ".join(capsys.readouterr().out.split())
        note = f"all rewards are {second}, so nothing can be learned: 90% of responses are cut off "
        note += "(raise --max-tokens), 10% have no answer"
        assert (note in printed) == (first == second != 0.5)
