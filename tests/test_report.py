"""harness/log.py: a step's numbers, the group that is shown, and the lines that a user reads."""

import math
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from builders.case_files import cases
from builders.rollouts import batch_of
from builders.runs import config_from, run_of

import train
from base import files
from base.config import Shear
from credit.measures import credit_vs_first_error, sample_rows, step_metrics, worked_example
from credit.rules import RULES
from grpo import Rollouts, group_advantages
from harness import log
from harness.fsdp import Ranks
from harness.run import Run
from rewards import grade_math
from shear import Closest, Weighed
from tasks import toy
from tasks.task import Task

(METRICS,) = cases("step.jsonl")
RIGHT = "a=1+2=1+2=3\n\\boxed{3}"
WRONG = "a=1+2=1+2=4\n\\boxed{4}"
BEFORE = {"greedy": (0.344, 0.021, 512), "sampled": (0.379, math.nan, 512)}
BEFORE |= {"localisation": {}, "by_problem": [0.25, 0.5]}


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
    parts |= dict(entropies=0.25 * mask, stats={"unconverged": np.array([1.0, 2])})
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

    A problem is solved by one right rollout, above .5; a method's own numbers are passed on.
    """
    _, _, batch, weights = step
    metrics = step_metrics(batch)
    expected = dict(reward=0.25, solved=0.5, equal_groups=0.5, length=16, truncated=0.25)
    expected |= dict(entropy=0.25, unconverged=0.5, timeout=0, crashed=0, parse_error=0)
    expected |= dict(weight_mean=weights[2:, :16].mean().item())  # where A is not 0
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    rewards = torch.tensor([math.nan, 0, 1, 0])  # one group, whose first rollout has no verdict
    one = replace(batch, rewards=rewards, advantages=group_advantages(rewards, 4), group_size=4)
    metrics = step_metrics(one)
    expected = dict(reward=1 / 3, equal_groups=0, infra_errors=1, solved=1)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert step_metrics(replace(one, rewards=torch.tensor([0.3, 0.2, 0.0, 0.4])))["solved"] == 0


def test_samples_are_of_the_first_mixed_group(step):
    """Rows have verdicts, the true first error and one weight per token; --keep-samples has all.

    The first group is all wrong.
    """
    tokenizer, task, batch, weights = step
    config = Mock(keep_samples=False, method="shear")
    run = Mock(context=Mock(tokenizer=tokenizer, task=task), config=config)
    right, wrong = train.samples_of(run, batch, 6)
    assert [right["response"], right["reason"], right["first_error"]] == [RIGHT, "correct", None]
    expected = {"step": 7, "response": WRONG, "answer": "3", "score": 0.0}
    expected |= {"first_error": (0, "arith", 12)}
    expected |= {"weights": {"shear": pytest.approx([0.1] * 12 + [0.9] * 4)}}
    assert expected.items() <= wrong.items() and wrong["advantage"] < 0
    assert "".join(wrong["tokens"]) == WRONG + "<eos>"
    config.keep_samples = True
    assert [row["response"] for row in train.samples_of(run, batch, 6)] == batch.rollouts.texts
    first = sample_rows(run.context, batch, {"shear": weights}, group=0)
    assert credit_vs_first_error(run.context, batch, "shear")["samples"] == first
    assert credit_vs_first_error(run.context, batch, "shear")["localisation"] == {}
    assert "spans" not in first[0]  # no rule has compared spans


def test_samples_have_the_closest_span_of_each_span(step):
    """Start, end, distance, then rollout, start and end of the closest one; of mixed groups."""
    tokenizer, task, batch, weights = step
    distances = torch.tensor([2.0, 4.0])  # of the two spans of a side
    found = Closest(distances, torch.tensor([1, 0]), distances, torch.tensor([1, 1]))
    batch.weighed = [Weighed(None, 2.0, None), Weighed(None, 2.0, found)]
    context = Mock(tokenizer=tokenizer, task=task, shear=Shear(window=8, stride=8))
    right, wrong = sample_rows(context, batch, {"shear": weights}, group=1)
    assert right["spans"] == [(0, 8, 1.0, 1, 8, 16), (8, 16, 2.0, 1, 0, 8)]
    assert wrong["spans"] == [(0, 8, 1.0, 0, 8, 16), (8, 16, 2.0, 0, 8, 16)]
    assert "spans" not in sample_rows(context, batch, {"shear": weights}, group=0)[0]


def test_example_marks_the_line_of_the_first_error(step):
    """Each line is shown with its mean weight.

    A rollout whose error is its first token has no "before" and is not shown.
    """
    tokenizer, _, batch, weights = step
    marked = ["  0.10  a=1+2=1+2=4", "  0.90  \\boxed{4}<eos>  <- first error"]
    for last, lines in ((12, marked), (-1, [])):
        errors = torch.tensor([-1, 0, -1, last])
        assert worked_example(tokenizer, batch.rollouts, weights, errors) == lines


@pytest.fixture
def logged(tmp_path):
    """A run that logs into a folder."""
    loaded = run_of(config_from(["--generate-batch", "512"]), None, torch.nn.Identity(), None)
    return Run(**vars(loaded), folder=tmp_path, rule=RULES["shear"], trained=None, optimizer=None)


def test_a_step_is_a_row_of_the_table_and_of_the_files(logged, capsys):
    """Rare counts are shown where they are not 0. Only the main rank writes and prints."""
    log.log_step(logged, METRICS, [{"step": 1}])
    printed = capsys.readouterr().out
    assert "\n1/40 " in printed and " 0.430 " in printed and "skipped" not in printed
    assert printed.count("s/step") == 1 and "0:01:22" in printed  # left: 39 steps of 2.1 s
    log.log_step(logged, METRICS | dict(infra_errors=1234, skipped=1, step=2), [])
    lines = capsys.readouterr().out.splitlines()
    assert {"  infra_errors 1234", "  skipped 1"} <= set(lines) and len(lines) == 3
    assert [row["step"] for row in files.read_lines(logged.folder / "metrics.jsonl")] == [1, 2]
    assert files.read_lines(logged.folder / "samples.jsonl") == [{"step": 1}]
    logged.ranks = Ranks(1, 2, logged.ranks.device)
    log.log_step(logged, METRICS, [])
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "name, remedy", [("unconverged", "raise --eps"), ("timeout", "raise --grade-timeout")]
)
def test_what_goes_wrong_in_more_than_a_hundredth_is_warned_of_once(name, remedy, logged, capsys):
    """Distances that Sinkhorn has not found, and responses that starved graders call wrong."""
    for step, share in ((2, 0.01), (3, 0.011), (4, 0.5)):
        log.log_step(logged, METRICS | {name: share, "step": step}, [])
        warned = remedy in capsys.readouterr().out
        assert warned == (step == 3)


@pytest.mark.parametrize(
    "found, words",
    [
        (dict(equal_groups=1.0, truncated=0.9, no_answer=0.1), "90% of responses are cut off"),
        (dict(length=12.0, nbar=13.0, eps_over_nbar=0.05), "one span per response"),
        (dict(nbar=13.0, eps_over_nbar=0.5, weight_mean=0.9), "lower --eps, or --window"),
        (dict(nbar=13.0, eps_over_nbar=0.05, weight_mean=0.9), ""),
        (dict(nbar=13.0, eps_over_nbar=0.5, weight_mean=4.0), ""),
    ],
)
def test_a_first_step_that_teaches_little_says_why(found, words):
    """Equal rewards teach nothing; one span a response, or a high floor, blurs SHEAR's weights."""
    notes = " ".join(log.notes_of(METRICS | found, config_from([])))
    assert words in notes
    assert bool(words) == ("WARNING" in notes or "alike" in notes)


def test_a_plan_names_what_runs(small, capsys):
    """Foreign text in it is harmless to a terminal."""
    small.context.policy.model.num_parameters = lambda: 7
    small.notes = ["a key \x1b[31m\u202e"]
    small.config = config_from(["--generate-batch", "512", "--use", "lab.fast"])
    log.print_plan(small, small.folder)
    printed = capsys.readouterr().out
    assert "10 held-out problems show only gains above 13 points" in printed
    assert "40 steps x 16 prompts x 8 rollouts of up to 64 tokens, 512 generated" in printed
    assert r"a key \x1b[31m\u202e" in printed and "uses lab.fast\n" in printed


@pytest.fixture
def small(logged):
    """A run with 40 problems to train on and ten held out."""
    problems = [{"problem": str(number)} for number in range(50)]
    logged.context.task = Task("own", problems[10:], problems[:10], None, None)
    return logged


def test_the_end_compares_with_the_start(small, capsys):
    """Rollouts of the evaluations have files of their own; unknown numbers are dashes.

    A wrong answer of the start stands beside a right one of the end.
    """
    wrong = {"problem": "1+1?", "response": "1+1\n=3", "score": 0.0}
    right = {"problem": "1+1?", "response": "1+1=2", "score": 1.0}
    rows = {"before": [right, wrong], "after": [wrong, right]}
    credit = {"auc": 0.984, "weight_before": 0.1, "weight_after": 0.9}
    after = BEFORE | {"greedy": (0.893, 0.014, 512), "localisation": credit}
    log.log_evaluation(small, before=BEFORE | {"samples": rows["before"]})
    log.log_evaluation(small, before=BEFORE, after=after | {"samples": rows["after"]})
    log.print_end(small, BEFORE, after | {"example": ["  0.10  a=3"]})
    first, last = files.read_lines(small.folder / "metrics.jsonl")
    assert first.keys() == {"before"} and last.keys() == {"after"}
    assert "samples" not in last["after"]
    for when in "before", "after":
        assert files.read_lines(small.folder / f"{when}.jsonl") == rows[when]
    printed = " ".join(capsys.readouterr().out.split())
    for words in "34.4 ± 2.1 89.3 ± 1.4", "37.9 ± - 37.9 ± -", "- 98.4", " 0.10 a=3 ":
        assert words in printed
    assert "weigh 0.10 before their first error, 0.90 from it on" in printed
    assert "a right one after it: 1+1 1+1=2 =3 the" in printed
    assert f"eval.py --model {small.folder}" in printed and "took 0 seconds" in printed


@pytest.mark.parametrize(
    "gains, words",
    [
        ([0.25, -0.25] * 5, "gain +0.0 ± 8.3 points, paired by 10 held-out problems: it cannot"),
        ([0.25, -0.25] * 5, "problems show gains above 17 points; 6% of the groups had no signal"),
        ([-0.1, -0.3] * 5, "-20.0 ± 3.3 points, paired by 10 held-out problems: more than chance"),
        ([0.24, -0.1] * 5, "+7.0 ± 5.7 points, paired by 10 held-out problems: it cannot"),
        ([math.nan] + [0.1] * 9, "paired by 9 held-out"),
        ([math.nan] * 9 + [0.1], "too few held-out problems"),
    ],
)
def test_a_verdict_is_the_paired_gain_beside_its_error(gains, words):
    """A gain of two standard errors is told from none; unknown accuracies are in no number."""
    before = {"by_problem": [0.5] * len(gains)}
    after = {"by_problem": [0.5 + gain for gain in gains]}
    assert words in " | ".join(log.verdict_of(before, after, [METRICS] * 2))
