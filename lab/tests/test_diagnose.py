"""lab/studies/diagnose.py, its prefixes, truth and figures: planted effects are found."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from builders.alternating import alternate
from builders.case_files import cases
from builders.commands import interrupt, run_well, words_of
from builders.runs import run_of
from builders.stand_ins import replace_sampler
from scipy.stats import spearmanr

from base import files
from base.config import Config, Shear
from grpo import Rollouts, rollout
from lab.studies import diagnose, figures, prefixes
from lab.studies.prefixes import SPANS, Prefixes
from rewards import Verdict
from tasks.task import Task

DIAGNOSE_FLAGS = "--task embedded --toy-lines 1 --window 4 --stride 4 --heldout 16 --eval-groups 2"

CASES = Path(__file__).with_name("cases")
TEXT = "Step {0}: so it is {0}.\n\nTherefore \\boxed{{{0}}}."
FIGURES = {"fig_1a", "fig_1b", "fig_3", "fig_9", "fig_10"}


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Pictures are quickly written."""
    monkeypatch.setitem(figures.rcParams, "savefig.dpi", 20)


def table(rows: list[tuple]) -> pd.DataFrame:
    """The table that figures take, from rows of (rollout, right, end, distance, success).

    Prefixes are numbered by rollout.
    """
    seen = Counter()
    numbered = []
    for first, *row in rows:
        numbered.append((first, seen[first], *row))
        seen[first] += 1
    return pd.DataFrame(numbered, columns=SPANS, dtype=float)


def spans_of(figure: str) -> pd.DataFrame:
    """The table of a figure's written-out spans."""
    rows = [list(case.values()) for case in cases("spans.csv", CASES) if case["figure"] == figure]
    return table(np.array(rows)[:, 1:].astype(float))


# ---- statistics ----------------------------------------------------------------------------------


def test_fig_1a_is_the_rank_correlation_of_the_means_by_position(tmp_path):
    """The correlation is that of written-out means; a length with too few prefixes is left out."""
    found = figures.fig_1a_position(spans_of("1a"), tmp_path / "a.png", least=2)
    assert found["ends"] == [10, 20, 30, 40] and found["spearman"] == pytest.approx(-1)
    assert found["success"] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert found["distance"] == pytest.approx([0.15, 0.3, 0.45, 0.6])


def test_fig_1b_takes_changes_within_rollouts_that_one_continuation_can_show(tmp_path):
    """The events are those by hand: none across two rollouts, none below 1/16; rho is scipy's."""
    rows = spans_of("1b")
    of_success = [-1 / 4, 5 / 16, 1 / 16]
    of_distance = [0.3, -0.1, 0.1]
    changes = figures.changes(rows, 1 / 16)
    assert changes["success"].tolist() == pytest.approx(of_success)
    assert changes["distance"].tolist() == pytest.approx(of_distance)
    gap = rows.drop(1)  # two strides lie between its neighbours
    assert figures.changes(gap, 1 / 16)["success"].tolist() == pytest.approx([1 / 16])
    found = figures.fig_1b_changes(rows, tmp_path / "a.png")
    expected = spearmanr(of_success, of_distance)
    assert (found["spearman"], found["p"]) == pytest.approx(tuple(expected))
    assert found["n"] == 3


def test_fig_3_auc_of_each_bin(tmp_path):
    """In two bins success tells nothing among near spans and everything among far ones.

    Ties count half.
    """
    rows = spans_of("3")
    found = figures.fig_3_separation(rows, tmp_path / "a.png", bins=2)
    assert found["auc"] == [0.5, pytest.approx(5.5 / 6)]
    assert found["right"] == [2, 2] and found["wrong"] == [2, 3]


def test_fig_9_holds_depth_fixed(tmp_path):
    """A bin shows a planted effect, and none where distance and success follow depth alone."""
    rng = np.random.default_rng(1)
    depth = np.repeat([1, 2, 3, 4], 200)
    distance, success = rng.normal((depth / 4, 1 - depth / 5), 0.02)
    by_depth = table([*zip(range(800), depth % 2, 10 * depth, distance, success, strict=True)])
    assert figures.correlation(by_depth)["spearman"] < -0.9
    found = figures.fig_9_depth(by_depth, tmp_path / "a.png")["bins"]
    assert all(abs(each["spearman"]) < 0.2 for each in found)
    planted = by_depth.assign(distance=rng.random(800))
    planted["success"] = 1 - planted["distance"]
    found = figures.fig_9_depth(planted, tmp_path / "b.png")["bins"]
    assert [each["from"] for each in found] == [10, 20, 30, 40]
    assert [each["spearman"] for each in found] == pytest.approx([-1] * 4)


# ---- prefixes ------------------------------------------------------------------------------------


def test_prefixes_end_with_full_spans_and_before_the_reasoning_does(tiny):
    """The prefix that holds the whole reasoning is left out, and with it the box.

    Without a box the reasoning is the whole response.
    """
    _, tokenizer = tiny
    text = "a=3-6=3-6=7\nb=3+a=3+7=0\n\\boxed{0}"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids[24]) == r"\boxed{"
    texts = [text, text[:24]]
    empty = ["", ""]
    group = Prefixes({}, [1], [ids, ids[:24]], texts, [False, True], [1.0, 0.0], empty)
    group = prefixes.with_ends(group, Shear(window=8, stride=4), tokenizer)
    assert group.ends == [[8, 12, 16, 20]] * 2


def test_continuations_start_from_the_sampled_ids_and_whole_responses_are_graded(tiny, monkeypatch):
    """Prompt and prefix reach the sampler as ids, with what is left of the length limit.

    The text's ids are not the tokenizer's own. What is graded is prefix and continuation, without
    the stop; each verdict finds its place.
    """
    model, tokenizer = tiny
    empty = ["", ""]
    responses = [[4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4]]
    group = Prefixes({"answer": "1"}, [5, 6, 7], responses, empty, [False] * 2, [1.0, 0.0], empty)
    group = replace(group, ends=[[2, 4], [2]])
    whole = [[4, 5, 20], [4, 5, 21], [9, 8, 22], [9, 8, 23], [4, 5, 6, 7, 20], [4, 5, 6, 7, 21]]
    texts = tokenizer.batch_decode(whole)
    asked = []

    def sampler(model, tokenizer, prompts, count, *, max_tokens, temperature, **options):
        asked.append((prompts, count, max_tokens, temperature))
        # a token of its own, and the stop
        ids = torch.tensor([[20 + row, 1] for row in range(len(prompts) * count)])
        return Rollouts(ids, ids > 0, ids, ids > 0, torch.zeros(len(ids)).bool(), [""] * len(ids))

    def grade(text, reference):
        return Verdict(1.0 + texts.index(text), "counted")

    replace_sampler(monkeypatch, sampler, "lab.studies.prefixes")
    config = Config(max_tokens=10, temperature=0.7)
    run = run_of(config, Task("x", [], [], None, grade), model, tokenizer)
    found = prefixes.continue_prefixes(run, group, 2)
    short = [[5, 6, 7, 4, 5], [5, 6, 7, 9, 8]]
    assert asked == [(short, 2, 8, 0.7), ([[5, 6, 7, 4, 5, 6, 7]], 2, 6, 0.7)]
    assert found.continued == [[[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0]]]


def test_the_table_of_spans_has_a_row_per_prefix_of_a_graded_rollout():
    """Success is a mean over continuations."""
    empty = ["", ""]
    group = Prefixes({}, [], [[]] * 2, empty, [False] * 2, [1.0, 0.0], empty, [[2, 4], [2]])
    group = replace(group, continued=[[[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0]]])
    unsure = replace(group, scores=[None, 0.0])
    closest = [[Mock(distance=0.1), Mock(distance=0.2)], [Mock(distance=0.4)]]
    rows = prefixes.span_table([group, unsure], [closest] * 2).to_numpy().tolist()
    right = [[1, 0, 1, 2, 0.1, 1.5], [1, 1, 1, 4, 0.2, 5.5]]
    assert rows == [*right, [2, 0, 0, 2, 0.4, 3.5], [4, 0, 0, 2, 0.4, 3.5]]


# ---- the command ---------------------------------------------------------------------------------


def test_a_run_has_every_figure_and_samples_nothing_twice(
    untaught, tmp_path, monkeypatch, capsys, assert_refused
):
    """It writes PNGs, keys and a page; the same command again reads the disk.

    A missing group alone is made again, and is the same. A damaged group and other flags are
    refused.
    """
    flags = words_of("--model", untaught, DIAGNOSE_FLAGS, "--groups 2 --continuations 3 --out")
    flags.append(str(tmp_path))
    made = Mock(wraps=rollout)
    monkeypatch.setattr(Task, "verdicts", alternate)
    replace_sampler(monkeypatch, made, "lab.studies.prefixes")
    run_well(diagnose, flags)
    results = json.loads((tmp_path / "diagnose.json").read_text())
    assert {path.stem for path in tmp_path.glob("*.png")} == FIGURES
    assert results["groups"] == 2 and results["spans"] > 0
    weights = files.read_lines(tmp_path / "samples.jsonl")[0]["weights"]
    assert weights.keys() == results["truth"].keys() == {"shear", "grpo", "oracle"}
    made.reset_mock()

    # what comes after sampling is not of interest again
    monkeypatch.setattr(diagnose, "score_group", interrupt)
    assert diagnose.main(flags) == 130 and not made.called
    gone = tmp_path / "group-0001.json"
    before = gone.read_text()
    gone.unlink()
    assert diagnose.main(flags) == 130 and made.called and gone.read_text() == before
    gone.write_text("{")
    assert_refused(diagnose.main, flags, f"{gone}: cannot be read")
    assert_refused(diagnose.main, [*flags, "--seed", "9"], "--seed 9: the groups in")


def test_solutions_from_a_file_are_encoded_once_and_not_continued(
    qwen_folder, tmp_path, monkeypatch, capsys
):
    """Of two mixed groups and another, Fig. 10 and the page's samples are made.

    What needs continuations is left out, and named.
    """
    lines = []
    for problem, labels in (("1+1?", [1, 0]), ("2+2?", [1, 1]), ("3+3?", [0, 1])):
        for i, label in enumerate(labels):
            lines.append({"problem": problem, "solution": TEXT.format(i), "label": label})
    files.write_rows(tmp_path / "s.jsonl", lines)
    flags = f"--rollouts {tmp_path}/s.jsonl --window 16 --stride 8 --groups 1 --model {qwen_folder}"
    out = tmp_path / "out"
    replace_sampler(monkeypatch, None, "lab.studies.prefixes")
    run_well(diagnose, flags, "--out", out)
    assert "left out: Figs. 1, 3, 9" in capsys.readouterr().out
    results = json.loads((out / "diagnose.json").read_text())
    assert results["fig_10"] == {"mixed": 2 / 3, "accuracies": [0.5, 1], "groups": [2, 1]}
    right, wrong = files.read_lines(out / "samples.jsonl")
    assert (right["score"], wrong["score"]) == (1, 0) and wrong["spans"]
    assert "".join(wrong["tokens"]) == TEXT.format(1)


def test_truth_is_told_over_all_groups():
    """At equal position the token from the first error on has the larger weight; among all not."""
    whole = torch.ones(1, 3, dtype=torch.bool)
    one = {"shear": torch.tensor([[0.1, 0.9, 0.4]])}
    two = {"shear": torch.tensor([[0.5, 0.2, 0.3]])}
    batches = [(one, whole, torch.tensor([1])), (two, whole, torch.tensor([2]))]
    found = diagnose.truth_of("shear", batches)
    assert found["auc_matched"] == 1  # 0.9 against 0.2
    assert found["auc"] == pytest.approx(7 / 9)  # 0.9, 0.4, 0.3 against 0.1, 0.5, 0.2
