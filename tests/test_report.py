"""harness/log.py: a step's numbers, the group that is shown, and the lines that a user reads."""

import dataclasses
import math
import time
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
from rewards import Verdict, grade_math
from shear import Closest, Weighed
from tasks import toy
from tasks.task import Task

(METRICS,) = cases("step.jsonl")
RIGHT = "a=1+2=1+2=3\n\\boxed{3}"
WRONG = "a=1+2=1+2=4\n\\boxed{4}"
BEFORE = {"greedy": (0.344, 0.021, 512), "sampled": (0.379, math.nan, 512)}
BEFORE |= {"localisation": {}, "length": 13.5, "truncated": 0, "no_answer": 0}
BEFORE |= {"by_problem": [0.25, 0.5]}


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

    Weights count where A is not 0; a problem is solved by one right rollout; a method's own numbers
    are passed on.
    """
    _, _, batch, weights = step
    metrics = step_metrics(batch)
    mixed = weights[2:, :16]
    expected = dict(reward=0.25, solved=0.5, equal_groups=0.5, length=16, truncated=0.25)
    expected |= dict(entropy=0.25, unconverged=0.5, timeout=0, crashed=0, parse_error=0)
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
    partly = dataclasses.replace(one, rewards=torch.tensor([0.3, 0.2, 0.0, 0.4]))
    assert step_metrics(partly)["solved"] == 0  # a response is right above .5
    of_one = step_metrics(one)
    expected = dict(reward=1 / 3, equal_groups=0, infra_errors=1, solved=1)
    assert {name: of_one[name] for name in expected} == pytest.approx(expected)


def test_samples_are_of_the_first_mixed_group(step):
    """Rows have verdicts, the true first error and one weight per token."""
    tokenizer, task, batch, weights = step
    context = Mock(tokenizer=tokenizer, task=task, shear=Shear(window=8, stride=8))
    right, wrong = sample_rows(context, batch, {"shear": weights}, batch.first_mixed)
    expected = {"response": RIGHT, "reason": "correct", "first_error": None}
    assert expected.items() <= right.items()
    expected = {"response": WRONG, "score": 0.0, "first_error": (0, "arith", 12)}
    expected |= {"weights": {"shear": pytest.approx([0.1] * 12 + [0.9] * 4)}}
    assert {name: wrong[name] for name in expected} == expected and wrong["advantage"] < 0
    assert "".join(wrong["tokens"]) == WRONG + "<eos>"
    assert "spans" not in right  # no rule has compared spans
    first = sample_rows(context, batch, {"shear": weights}, group=0)
    assert [row["response"] for row in first] == [WRONG] * 2
    assert credit_vs_first_error(context, batch, "shear")["samples"] == first


def test_a_step_shows_its_first_mixed_group(step):
    """The first group is all wrong; with --keep-samples all are shown."""
    tokenizer, task, batch, _ = step
    context = Mock(tokenizer=tokenizer, task=task)
    for keeps, texts in ((False, [RIGHT, WRONG]), (True, [WRONG, WRONG, RIGHT, WRONG])):
        run = Mock(context=context, config=Mock(keep_samples=keeps, method="shear"))
        rows = train.samples_of(run, batch, 6)
        assert [row["response"] for row in rows] == texts and rows[0]["step"] == 7


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


def test_seconds_of_a_phase_add_up(monkeypatch):
    """A step scores block by block."""
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", Mock(side_effect=[0, 1, 3, 7.5]))
        clock = log.Clock(torch.device("cpu"))
        for phase in ("score", "weights", "score"):
            clock.lap(phase)
    assert clock.laps == {"score": 5.5, "weights": 2}


@pytest.fixture
def logged(tmp_path):
    """A run that logs into a folder."""
    loaded = run_of(config_from(["--generate-batch", "512"]), None, torch.nn.Identity(), None)
    return Run(**vars(loaded), folder=tmp_path, rule=RULES["shear"], trained=None, optimizer=None)


def test_a_step_is_a_row_of_the_table_and_of_the_files(logged, capsys):
    """Numbers stand below their titles; rare counts are shown where they are not 0.

    Only the main rank writes and prints.
    """
    log.log_step(logged, METRICS, [{"step": 1}])
    log.log_step(logged, METRICS | dict(infra_errors=1234, skipped=1, step=2), [])
    titles, first, left, second, *rare = capsys.readouterr().out.split("\n")[1:-1]
    shown = dict(zip(titles.split(), first.split(), strict=True))
    assert shown == {
        "step": "1/40",
        "reward": "0.430",
        "solved": "1.00",
        "no-signal": "0.06",
        "length": "64",
        "trunc": "0.02",
        "entropy": "0.036",
        "weight": "0.26",
        "±": "0.17",
        "ess": "0.75",
        "gnorm": "0.051",
        "s/step": "2.1",
    }
    assert len(titles) == len(first) == len(second) <= 88
    assert left == "  the other steps take about 82 seconds"
    assert rare == ["  infra_errors 1234", "  skipped 1"]
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


@pytest.mark.parametrize("shown, repeats", [(1, True), (2, False), (20, False), (21, True)])
def test_the_header_repeats(shown, repeats, logged, capsys):
    """A long table has it every twenty rows."""
    log.log_step(logged, METRICS | {"step": shown}, [])
    assert ("reward" in capsys.readouterr().out) == repeats


@pytest.mark.parametrize(
    "flags, found, words",
    [
        ("", dict(equal_groups=1.0, truncated=0.9, no_answer=0.1), "90% of responses are cut off"),
        (
            "--method grpo",
            dict(equal_groups=1.0, no_answer=0.0),
            "rewards are equal in each group",
        ),
        (
            "",
            dict(length=12.0, nbar=13.0, eps_over_nbar=0.05, weight_mean=0.9),
            "one span per response",
        ),
        ("", dict(nbar=13.0, eps_over_nbar=0.5, weight_mean=0.9), "lower --eps, or --window"),
        ("", dict(nbar=13.0, eps_over_nbar=0.05, weight_mean=0.9), ""),
        ("--method grpo", dict(length=12.0), ""),
    ],
)
def test_a_first_step_that_teaches_little_says_why(flags, found, words):
    """Equal rewards teach nothing; one span a response, or a high floor, blurs SHEAR's weights."""
    config = config_from(flags.split())
    notes = " ".join(log.notes_of(METRICS | found, config))
    assert words in notes
    assert bool(words) == ("WARNING" in notes or "alike" in notes)


def test_a_plan_names_what_runs(small, monkeypatch, capsys):
    """Foreign text in it is harmless to a terminal."""
    monkeypatch.setattr(log, "has_lab", lambda: True)  # also where it was removed
    small.context.policy.model.num_parameters = lambda: 7
    small.notes = ["a key \x1b[31m\u202e"]
    used = "--use lab.fast --use lab.tools.page"
    for flags, words in (
        ("", "40 steps x 16 prompts x 8 rollouts of up to 64 tokens"),
        ("", r"a key \x1b[31m\u202e"),
        ("--model M", "--use lab.fast gives the same numbers sooner\n"),
        (used, "uses lab.fast, lab.tools.page\n"),
    ):
        small.config = config_from([*flags.split(), "--generate-batch", "512"])
        log.print_plan(small, small.folder)
        assert words in capsys.readouterr().out


@pytest.fixture
def small(logged):
    """A run with 40 problems to train on and ten held out."""
    problems = [{"problem": str(number)} for number in range(50)]
    logged.context.task = Task("own", problems[10:], problems[:10], None, None)
    return logged


def test_the_end_compares_with_the_start(small, monkeypatch, capsys):
    """Rollouts of the evaluations have files of their own; unknown numbers are dashes."""
    monkeypatch.setattr(log, "has_lab", lambda: True)
    rows = [{"step": 1, "problem": "1+1?"}]
    after = BEFORE | {"greedy": (0.893, 0.014, 512), "sampled": (0.666, 0.029, 512)}
    after |= {"localisation": {"auc": 0.984, "auc_position": 0.0}, "example": ["  0.10  a=3"]}
    files.append_rows(small.folder / "metrics.jsonl", [METRICS])
    for when, found in (("before", BEFORE), ("after", after)):
        log.log_evaluation(small, **{when: found | {"samples": rows}})
        assert files.read_lines(small.folder / f"{when}.jsonl") == rows
    _, first, last = files.read_lines(small.folder / "metrics.jsonl")
    assert first.keys() == {"before"} and last.keys() == {"after"}
    assert "samples" not in last["after"]
    assert "greedy" in capsys.readouterr().out
    log.print_results(before=BEFORE, after=after)
    log.print_end(small, BEFORE, after)
    _, titles, greedy, sampled, credit, position, *rest = capsys.readouterr().out.split("\n")
    assert titles.split()[-2:] == ["before", "after"]
    assert greedy.split()[-6:] == ["34.4", "±", "2.1", "89.3", "±", "1.4"]
    assert sampled.split()[-6:] == ["37.9", "±", "-", "66.6", "±", "2.9"]
    assert credit.split()[-2:] == ["-", "98.4"] and position.split()[-2:] == ["-", "0.0"]
    assert f"next: python eval.py --model {small.folder}" in rest and "  0.10  a=3" in rest


def told(gains: list[float]) -> str:
    """The verdict on a run whose sampled accuracy grew so by problem."""
    before = {"by_problem": [0.5] * len(gains)}
    after = {"by_problem": [0.5 + gain for gain in gains]}
    return " | ".join(log.verdict_of(before, after, [METRICS] * 2))


def test_a_verdict_is_the_paired_gain_beside_its_error():
    """A gain of two standard errors is told from none; unknown accuracies are in no number."""
    alike = told([0.25, -0.25] * 5)
    assert "gain +0.0 ± 8.3 points, paired by 10 held-out problems: it cannot be told" in alike
    assert "so many problems show gains above 17 points; 6% of the groups had no signal" in alike
    assert "+20.0 ± 3.3 points, paired by 10 held-out problems: more than" in told([0.1, 0.3] * 5)
    assert "-20.0 ± 3.3 points" in told([-0.1, -0.3] * 5)
    assert "paired by 9 held-out" in told([math.nan] + [0.1] * 9)
    assert told([math.nan] * 9 + [0.1]) == (
        "too few held-out problems to tell a gain from none: raise --heldout"
    )


def test_the_gain_that_a_run_can_show_is_known_before_it():
    """Two standard errors, for problems whose gains differ as SPREAD says."""
    assert [round(100 * log.smallest_gain(count)) for count in (10, 64, 512)] == [13, 5, 2]


def test_accuracies_count_problems():
    """The sampled ones' error is that of the problems' means; no verdict is no wrong answer."""
    right, wrong, unknown = (Verdict(reward, "") for reward in (1.0, 0.0, None))
    sampled = [right, wrong, right, right, unknown, unknown]
    found = log.accuracies([right, wrong, unknown], sampled, 2)
    assert found["greedy"] == (0.5, 0.5, 2)
    assert found["sampled"] == (0.75, 0.25, 4)
    np.testing.assert_equal(found["by_problem"], [0.5, 1, math.nan])
    mean, error, count = log.accuracies([unknown], [right, right], 2)["greedy"]
    assert math.isnan(mean) and math.isnan(error) and count == 0
