"""lab/studies/advantages.py: a planted truth is found, and rows are measured alike.

Lines end where they should.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders.commands import DIAGNOSE_FLAGS
from builders.runs import ALONE, config_from

from credit.settings import Credit
from harness.load import load_run
from lab.studies.advantages import agreement, changes_of, line_ends, line_stats, measure, value_of

RIGHT = "a=3-6=3-6=7\nb=3+a=3+7=0\n\\boxed{0}"


def planted(groups: int, continuations: int) -> tuple[list[dict], float]:
    """Lines with known true advantages, and the true correlation with credit.

    The advantages are estimated by binomial draws.
    """
    rng = np.random.default_rng(1)
    lines = []
    truth = []
    for _ in range(10 * groups):
        chances = rng.uniform(0.1, 0.9, 2)
        scores = rng.random((2, continuations)) < chances[:, None]  # (2, K)
        before, after = (value_of(row.astype(float).tolist()) for row in scores)
        truth.append((chances[1] - chances[0], chances[1] - chances[0] + rng.normal(0, 0.4)))
        line = {"advantage": after[0] - before[0], "noise": before[1] + after[1]}
        lines.append(line | {"made": truth[-1][1]})
    return lines, np.corrcoef(np.array(truth).T)[0, 1]


def test_a_planted_correlation_is_found_behind_the_noise_of_few_continuations():
    """The corrected one is the true one, the plain one is too low."""
    lines, truth = planted(groups=1000, continuations=4)
    found = agreement(lines, ["made"])["made"]
    assert found["corrected"] == pytest.approx(truth, abs=0.03)
    assert found["r"] < truth - 0.1
    noise = np.mean([line["noise"] for line in lines])
    variance = np.var([line["advantage"] for line in lines])
    assert found["reliability"] == pytest.approx(1 - noise / variance)


def test_the_estimated_variance_of_a_value_has_no_bias():
    """Its mean over many draws is p (1 - p) / K; fewer than two verdicts, or none, tell nothing."""
    draws = np.random.default_rng(0).random((20_000, 4)) < 0.3
    variances = [value_of(row.astype(float).tolist())[1] for row in draws]
    assert np.mean(variances) == pytest.approx(0.3 * 0.7 / 4, rel=0.02)
    assert value_of([1.0, None, 0.0, 0.0, 0.0]) == pytest.approx((0.25, 0.25 * 0.75 / 3))
    assert np.isnan(value_of([1.0, None])[1])


def test_noise_without_signal_gives_no_number_that_looks_like_one():
    """The result is not finite where noise explains all variance, and where there are no lines."""
    lines, _ = planted(groups=1, continuations=4)
    for line in lines:
        line["noise"] = 9.0
    found = agreement(lines, ["made"])["made"]
    assert np.isfinite(found["r"]) and not np.isfinite(found["corrected"])
    assert np.isnan(list(agreement([], ["made"])["made"].values())).all()


def test_lines_end_with_their_newlines():
    """A line has 12 symbols, the box 3; a stop token belongs to the last line."""
    assert line_ends(RIGHT, 28) == [0, 12, 24, 28]
    assert line_ends(RIGHT[:17], 17) == [0, 12, 17]  # truncated within a line
    assert line_ends(RIGHT[:12], 12) == [0, 12]  # and after one: no boundary beyond the response
    assert line_ends(RIGHT[:12], 13) == [0, 13]  # which stops where the next line should be
    assert line_ends("", 1) == [0, 1]


def test_a_line_s_numbers_against_written_out_ones():
    """A row has the values of both ends, credit, and at the last line the verdict without noise.

    Without a verdict there is no line.
    """
    group = SimpleNamespace(responses=[[1] * 4, [1] * 3, [1] * 3], scores=[1.0, 0.0, None])
    group.ends = [[0, 2], [0], [0]]
    group.continued = [[[1.0, 0, 0, 0], [1.0, 1, 1, 0]], [[1.0, None]], [[1.0, 0.0]]]
    weights = {"made": torch.tensor([[1.0, 0, 2, 0.5], [1, 1, 1, 0], [1, 1, 1, 0]])}
    # no value of the other lines is known
    first, second = line_stats(group, torch.tensor([3.0, -1.0, 1.0]), weights)
    assert first == pytest.approx({"advantage": 0.5, "noise": 2 * 3 / 16 / 3, "made": 1.5})
    assert second == pytest.approx({"advantage": 0.25, "noise": 3 / 16 / 3, "made": 3.75})


def test_rows_of_changed_flags_are_measured_on_the_same_samples(taught):
    """A row changes no other's numbers, and a changed option leaves the given ones.

    `mean1` scales credit within a group, and no flag of the run's does.
    """
    config = config_from([*DIAGNOSE_FLAGS.split(), "--model", taught, "--negative-scale", "0.5"])
    run = load_run(config, ALONE)
    problems = run.context.task.heldout[:2]
    rows = {"shear": Credit("shear"), "shear mean1": Credit("shear", rescale="mean1")}
    both = measure(run, problems, rows, 2)
    alone = measure(run, problems, {"shear": rows["shear"]}, 2)
    assert both["methods"]["shear"] == alone["methods"]["shear"]
    assert both["methods"]["shear"] != both["methods"]["shear mean1"]
    plain = replace(run, config=replace(run.config, credit=Credit()))
    assert measure(plain, problems, {"shear": rows["shear"]}, 2) == alone
    json.dumps(both)
    assert "pool=mean" in changes_of(config.shear, ("pool=mean",))["distance mmd"][0].method_option
