"""studies/advantages.py: a planted truth is found, lines end where they should, a run is measured."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_diagnose import SIZES

from harness.launch import parse_args
from harness.run import write_config
from studies.advantages import agreement, line_stats, lines_of, main, measure, statistics_of, value_of
from tasks import toy
from tasks.problems import Task

PROBLEM = {"problem": "a=3-6;b=3+a;b?\n", "answer": "0"}
RIGHT = "a=3-6=3-6=7\nb=3+a=3+7=0\n\\boxed{0}"


def planted(groups: int, continuations: int) -> tuple[list[dict], float]:
    """Lines whose true advantages are known, estimated by binomial draws; and the true correlation with credit."""
    rng = np.random.default_rng(1)
    lines, truth = [], []
    for group in range(groups):
        for _ in range(10):
            chances = rng.uniform(0.1, 0.9, 2)
            scores = rng.random((2, continuations)) < chances[:, None]  # (2, K)
            before, after = (value_of(row.astype(float).tolist()) for row in scores)
            truth.append((chances[1] - chances[0], chances[1] - chances[0] + rng.normal(0, 0.4)))
            line = {"group": group, "kind": "before", "side": "right", "start": 0}
            line |= {"advantage": after[0] - before[0], "noise": before[1] + after[1]}
            lines.append(line | {"credit": {"made": truth[-1][1]}, "weight": {"made": 1.0}})
    return lines, np.corrcoef(np.array(truth).T)[0, 1]


def test_a_planted_correlation_is_found_behind_the_noise_of_few_continuations():
    """The corrected one within its error, the plain one too low; the error is that of as many new data sets."""
    lines, truth = planted(groups=200, continuations=4)
    found = agreement(lines, "made")
    assert abs(found["corrected"] - truth) < 2 * found["corrected_se"] < 0.1
    assert found["r"] < truth - 5 * found["r_se"]
    values = np.array([line["advantage"] for line in lines]), np.array([line["credit"]["made"] for line in lines])
    assert found["r"] == pytest.approx(np.corrcoef(values)[0, 1])
    noise = np.mean([line["noise"] for line in lines])
    assert found["reliability"] == pytest.approx(1 - noise / values[0].var())
    assert agreement(lines, "made") == found  # a fixed seed
    parts = [agreement(lines[start : start + 200], "made")["r"] for start in range(0, 2000, 200)]
    assert found["r_se"] == pytest.approx(np.std(parts) / np.sqrt(10), rel=0.6)


def test_the_estimated_variance_of_a_value_has_no_bias():
    """Its mean over many draws is p (1 - p) / K; fewer than two verdicts, or none, tell nothing."""
    draws = np.random.default_rng(0).random((20_000, 4)) < 0.3
    variances = [value_of(row.astype(float).tolist())[1] for row in draws]
    assert np.mean(variances) == pytest.approx(0.3 * 0.7 / 4, rel=0.02)
    assert value_of([1.0, None, 0.0, 0.0, 0.0]) == (0.25, 0.25 * 0.75 / 3)
    assert np.isnan(value_of([1.0, None])).all()


def test_errors_of_one_group_and_noise_without_signal_are_not_known():
    """None, and no number that looks like one."""
    lines, _ = planted(groups=1, continuations=4)
    assert agreement(lines, "made")["r_se"] is None
    for line in lines:
        line["noise"] = 9.0
    assert agreement(lines, "made")["corrected"] is None and agreement(lines, "made")["r"] is not None
    lines[0]["kind"] = "after"
    found = statistics_of(lines, ["made"])
    assert found["lines"] == 10 and sorted(row["lines"] for row in found["kinds"]) == [1, 9]
    assert found["methods"]["made"] == agreement(lines, "made")
    nothing = statistics_of([], ["made"])
    assert nothing["lines"] == nothing["mixed_groups"] == 0 and nothing["methods"]["made"]["r"] is None


def chain(text: str, length: int) -> list[tuple[int, int, str]]:
    """Lines of the embedded task."""
    return lines_of(Task("embedded", [], [], None, None, first_error=toy.first_error), PROBLEM, text, length)


def test_lines_end_with_their_newlines_and_are_named_by_the_first_error():
    """12 symbols a line, 3 the box; the stop token, where there is one, belongs to the last line."""
    assert chain(RIGHT, 28) == [(0, 12, "before"), (12, 24, "before"), (24, 28, "before")]
    wrong = RIGHT.replace("=7\n", "=8\n", 1)  # then 3 + 7 has the wrong value of a: only the first error counts
    assert [kind for *_, kind in chain(wrong, 28)] == ["first error", "after", "after"]
    assert [kind for *_, kind in chain(RIGHT.replace("{0}", "{1}"), 28)] == ["before", "before", "first error"]
    assert chain(RIGHT[:17], 17) == [(0, 12, "before"), (12, 17, "first error")]  # truncated within a line
    assert chain(RIGHT[:12], 12) == [(0, 12, "before")]  # and after one: no boundary beyond the response
    assert chain(RIGHT[:12], 13) == [(0, 13, "first error")]  # which stops where the next line should be
    assert chain("", 1) == [(0, 1, "first error")]


def test_a_line_s_numbers_against_written_out_ones():
    """Values of both ends, the own verdict without noise at the last, mean weights, credit; a line with no value."""
    group = SimpleNamespace(problem=PROBLEM, texts=["", ""], responses=[[1] * 4, [1] * 3], scores=[1.0, 0.0])
    group.ends, group.continued = [[0, 2], [0]], [[[1.0, 0, 0, 0], [1.0, 1, 1, 0]], [[1.0, None]]]
    lines = [[(0, 2, "one"), (2, 4, "two")], [(0, 3, "one")]]
    batch = SimpleNamespace(advantages=torch.tensor([3.0, -1.0]), correct=torch.tensor([True, False]))
    weights = {"made": torch.tensor([[1.0, 0, 2, 0.5], [1, 1, 1, 0]])}
    first, second = line_stats(7, group, lines, batch, weights)  # of the other, one verdict is not enough
    assert first == {
        **{"group": 7, "kind": "one", "side": "right", "start": 0, "advantage": 0.5},
        **{"noise": 2 * 3 / 16 / 3, "weight": {"made": 0.5}, "credit": {"made": 1.5}},
    }
    assert second["advantage"] == 0.25 and second["noise"] == 3 / 16 / 3
    assert second["weight"] == {"made": 1.25} and second["credit"] == {"made": 3.75}


@pytest.fixture
def run(taught, tmp_path) -> Path:
    """A run's folder with its configuration and its warmed-up model."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(parse_args([*SIZES, "--method", "grpo"]), folder)
    (folder / "start").symlink_to(taught)
    return folder


def test_a_run_is_measured_and_the_same_again(run, tmp_path, capsys):
    """Kinds of lines, two tables and their numbers; the model is the one that is asked for."""
    flags = [str(run), "--start", "--groups", "3", "--continuations", "2", "--methods", "grpo", "shear", "oracle"]
    assert main([*flags, "--out", str(tmp_path / "a")]) == 0 == main([*flags, "--out", str(tmp_path / "b")])
    results = json.loads((tmp_path / "a" / "advantages.json").read_text())
    assert results == json.loads((tmp_path / "b" / "advantages.json").read_text())
    assert results["model"] == str(run / "start") and 0 < results["mixed_groups"] <= results["groups"] == 3
    assert sum(row["lines"] for row in results["kinds"]) == results["lines"] > 16
    for row in results["kinds"]:
        assert row["weight"]["grpo"] == pytest.approx(1) and -1 <= row["advantage"] <= 1
        assert (row["credit"]["grpo"] > 0) == (row["side"] == "right")
        if row["side"] == "wrong":
            assert row["weight"]["oracle"] == pytest.approx(float(row["kind"] == "first error"))
    printed = capsys.readouterr().out
    assert "| corrected" in printed and "first error, wrong" in printed and "reliability" in printed


def test_rows_of_changed_flags_are_measured_on_the_same_samples(run, taught):
    """`mean1` scales credit within a group, and no flag of the run's does; a row changes no other's numbers."""
    from harness.parallel import Ranks
    from harness.prepare import set_up

    args = parse_args([*SIZES, "--model", taught, "--negative-scale", "0.5"])
    ready = set_up(args, Ranks(0, 1, torch.device("cpu")))
    parts = args, ready.task, ready.model, ready.tokenizer, ready.task.heldout[:2]
    rows = {"shear": {"method": "shear"}, "shear mean1": {"method": "shear", "rescale": "mean1"}}
    both = measure(*parts, rows, 2)
    alone = measure(*parts, {"shear": rows["shear"]}, 2)
    assert both["methods"]["shear"] == alone["methods"]["shear"]
    assert both["methods"]["shear"] != both["methods"]["shear mean1"]
    plain = argparse.Namespace(**(vars(args) | {"negative_scale": 1.0}))
    assert measure(plain, *parts[1:], {"shear": rows["shear"]}, 2) == alone
    json.dumps(both)


@pytest.mark.parametrize(
    ("changed", "flags", "names"),
    [
        ({}, [], "model: no such folder"),
        ({}, ["--start", "--groups", "17"], "--groups 17: the run holds out 16"),
        ({"task": "math"}, ["--start"], "--task math"),
        ({}, ["--start", "--continuations", "1"], "--continuations 1: must be at least 2"),
        ({}, ["--start", "--methods", "pure"], "'pure'"),
        (None, ["--start"], "config.json: cannot be read"),
    ],
)
def test_bad_input_is_one_sentence(run, tmp_path, assert_refused, changed, flags, names):
    """What is wrong with a run's folder or with a flag, before anything is sampled."""
    config = run / "config.json"
    if changed is None:
        config.unlink()
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    assert_refused(main, [run, *flags, "--out", tmp_path / "out"], names)
    assert not (tmp_path / "out").exists()


def test_groups_of_one_side_give_no_numbers(run, tmp_path, assert_refused, monkeypatch):
    """The remedy is more groups."""
    monkeypatch.setattr("studies.prefixes.Prefixes.mixed", False)
    words = [run, "--start", "--groups", "1", "--out", tmp_path / "out"]
    assert_refused(main, words, "--groups 1: none holds right and wrong rollouts")
    assert_refused(main, [], "required: RUN")
