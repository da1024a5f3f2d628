"""The record of real states: what its script computes, and that its tables are those of its rows."""

import pandas as pd
import pytest
import torch
from builders.case_files import ROOT
from builders.near import assert_near
from builders.small_models import small_config, turns_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo import cat_padded
from harness.files import read_lines, write_rows
from lab.records import real_states as script
from shear import shear_weights


@pytest.fixture(scope="module")
def model():
    """A model of random weights, and its tokenizer with a token per byte."""
    tokenizer = turns_tokenizer()
    torch.manual_seed(0)
    return Qwen2ForCausalLM(small_config(Qwen2Config, vocab_size=len(tokenizer))).eval(), tokenizer


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """Its folder."""
    place = tmp_path_factory.mktemp("models") / "small"
    for part in model:
        part.save_pretrained(place)
    return place


@pytest.fixture
def rows_path(tmp_path, monkeypatch):
    """Where the script puts its rows; loops over pairs and the reference are short."""
    monkeypatch.setattr(script, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(script.bench, "TRUE_ITERS", 20)
    monkeypatch.setattr(script, "LOOPED", 2)
    return script.ROWS


def solutions_of(group: int, sizes: list[int], labels: list[int]) -> list[dict]:
    """The lines of a group of published solutions of so many letters."""
    rows = []
    for sample, (size, label) in enumerate(zip(sizes, labels, strict=True)):
        text = "".join(chr(97 + (7 * sample + place) % 23) for place in range(size))
        row = {"group": group, "level": "Level 4", "problem": "How many?", "solution": text}
        rows.append(row | {"label": label})
    return rows


def test_a_row_has_the_weights_of_the_states_of_the_solutions(model, folder, rows_path, tmp_path):
    """The mixed groups get rows, the shortest first; a cut run continues."""
    lines = solutions_of(5, [220, 180, 160, 200], [1, 0, 0, 1])
    lines += solutions_of(6, [150, 150], [1, 1])
    lines += solutions_of(8, [130, 170], [0, 1])
    write_rows(tmp_path / "solutions.jsonl", lines)
    groups = script.groups_in(tmp_path / "solutions.jsonl")
    assert [group.number for group in groups] == [6, 8, 5]
    groups = [group for group in groups if group.mixed]
    script.make_rows("published", str(folder), groups)
    rows = read_lines(rows_path)
    write_rows(rows_path, rows[:1])
    script.make_rows("published", str(folder), groups)
    assert [row["group"] for row in read_lines(rows_path)] == [8, 5]
    assert read_lines(rows_path)[1]["weights"] == rows[1]["weights"]

    policy, tokenizer = model
    prompt = tokenizer(script.load(str(folder)).task.prompt({"problem": "How many?"}))["input_ids"]
    states = []
    for line in lines[:4]:
        ids = torch.tensor([prompt + tokenizer(line["solution"])["input_ids"]])
        states.append(policy.base_model(ids).last_hidden_state[:, len(prompt) :])
    hidden = cat_padded(states).detach()  # (4, T, d)
    mask = cat_padded([torch.ones(1, len(line["solution"])) for line in lines[:4]]).bool()
    weighed = shear_weights(hidden, mask, torch.tensor([1, 0, 0, 1]))
    assert rows[1]["nbar"] == pytest.approx(weighed.nbar, rel=1e-4)
    quarters = script.quarters_of(weighed.omega, mask).mean(0)
    assert_near(torch.tensor(rows[1]["weights"][2]["quarters"]), quarters, 1e-4)
    assert rows[1]["tokens"] == [220, 180, 160, 200]
    again = script.weigh(hidden, mask, torch.tensor([1, 0, 0, 1]) > 0, wording=weighed.omega)
    assert again["weights"][2]["wording"] == pytest.approx(1.0, abs=1e-3)
    assert rows[1]["solvers"]["iterations"] >= 1


def test_own_responses_are_counted(folder, rows_path, tmp_path):
    """Of a group with right and wrong responses, and of one without, as eval.py has them."""
    problems = [{"id": 3, "problem": "How many?", "answer": "4", "level": 2}]
    problems += [{"id": 7, "problem": "How far?", "answer": "4", "level": 1}]
    write_rows(tmp_path / "problems.jsonl", problems)
    lines = []
    for name, score, reason in [
        ("1 3", 1.0, "correct"),
        ("1 3", 0.0, "wrong"),
        ("1 3", 0.0, "truncated"),
        ("2 7", 0.0, "wrong"),
        ("2 7", None, "timeout"),
    ]:
        text = "abcdefghijkl"[: 8 + len(lines)]
        lines.append({"problem": name, "score": score, "reason": reason, "response": text})
    write_rows(tmp_path / "generations.jsonl", lines)
    own = tmp_path / "own.jsonl"
    script.write_solutions(tmp_path / "problems.jsonl", tmp_path, own)
    script.make_rows("own", str(folder), script.groups_in(own))
    wrong, mixed = read_lines(rows_path)
    assert [mixed["group"], mixed["level"], mixed["right"], mixed["truncated"]] == [3, 2, 1, 1]
    assert [wrong["group"], wrong["level"], wrong["right"], wrong["truncated"]] == [7, 1, 0, 0]
    assert [mixed["tokens"], wrong["tokens"]] == [[8, 9, 10], [11, 12]]
    assert len(mixed["weights"]) == len(script.SETTINGS) and "weights" not in wrong


def test_verdicts_are_counted_without_the_responses(tmp_path, monkeypatch, capsys):
    """Of the folders of two evaluations, whose model is named without its place."""
    monkeypatch.setattr(script, "VERDICTS", tmp_path / "verdicts.jsonl")
    for name, reasons in [("math500", ["wrong", "correct", "wrong"]), ("humaneval", ["crashed"])]:
        lines = []
        for sample, reason in enumerate(reasons):
            row = {"set": name, "model": "models/small", "problem": "1 HumanEval/53"}
            row |= {"sample": sample, "reason": reason, "tokens": 10 + sample, "response": "text"}
            lines.append(row)
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "generations.jsonl", lines)
    script.write_verdicts([tmp_path / "math500", tmp_path / "humaneval"])
    rows = read_lines(script.VERDICTS)
    assert [row["reason"] for row in rows] == ["wrong", "correct", "wrong", "crashed"]
    assert rows[0]["model"] == "small" and rows[0]["problem"] == "HumanEval/53"
    assert "text" not in script.VERDICTS.read_text(encoding="utf-8")
    script.print_verdicts("math500", "small", pd.DataFrame(rows[:3]))
    printed = capsys.readouterr().out
    assert "verdicts, math500, small: 3 responses to 1 problems" in printed
    assert "| wrong   | 2         | 67%   | 11     |" in printed


def test_the_record_has_the_tables_of_its_rows(capsys):
    """Every line that the script prints is in the page."""
    script.print_all()
    page = (ROOT / "lab" / "records" / "real-states.md").read_text(encoding="utf-8")
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("|")]
    missing = [line for line in printed if line and line not in page]
    assert not missing


def test_quarters_are_those_of_a_loop():
    """Of responses of other lengths, one of fewer than four tokens."""
    mask = torch.arange(9) < torch.tensor([9, 6, 3])[:, None]  # (3, 9)
    omega = torch.rand(3, 9) * mask
    quarters = script.quarters_of(omega, mask)
    for row, length in enumerate([9, 6, 3]):
        parts = [[], [], [], []]
        for token in range(length):
            parts[sum(token >= share * length / 4 for share in (1, 2, 3))].append(omega[row, token])
        for number, part in enumerate(parts):
            expected = sum(part) / len(part) if part else torch.tensor(float("nan"))
            assert quarters[row, number].item() == pytest.approx(expected.item(), nan_ok=True)


def test_runs_are_shared_with_the_other_side_alone():
    """A right response starts as a wrong one does; another wrong one shares all with the latter."""
    right = [*range(20), *range(100, 112)]  # 25 runs of 8, of which 13 are in the first 20 tokens
    wrong = [*range(20), *range(200, 212)]
    shared = script.shared_runs([right, wrong, wrong, [1, 2]], [1, 0, 0, 0])
    assert [runs.tolist() for runs in shared] == [[True] * 13 + [False] * 12] * 3 + [[]]
    assert script.shared_by_quarter(shared) == pytest.approx([1.0, 1.0, 0.0, 0.0])


def test_a_token_has_the_newest_wording_of_its_spans():
    """Of a response of 150 tokens, two spans, whose first 60 tokens are shared; and of a short one."""
    runs = torch.arange(150 - script.RUN + 1) <= 60 - script.RUN
    mask = torch.arange(150) < torch.tensor([[150], [20]])  # (2, 150)
    weights = script.weights_of_wording([runs, runs[:13]], mask)
    spans = [(0, 100, 40 / 100), (25, 125, 65 / 100), (50, 150, 90 / 100)]
    for token in range(150):
        expected = max(share for start, end, share in spans if start <= token < end)
        assert weights[0, token].item() == pytest.approx(expected)
    assert weights[1].sum() == 0


def test_eps_is_interpolated_between_settings():
    """It is not known outside of them."""
    count = len(script.SETTINGS)
    over_nbar = [0.01 * (place + 1) for place in range(count)]
    weights = [
        {"eps_over_nbar": eps, "quarters": [20 * eps, 0.0, 0.0, 30 * eps]} for eps in over_nbar
    ]
    groups = pd.DataFrame({"weights": [weights, weights]})
    assert script.eps_of(groups, 0, 0.5) == pytest.approx(0.025)
    assert script.eps_of(groups, 3, 0.45) == pytest.approx(0.015)
    assert script.eps_of(groups, 3, 9.0) != script.eps_of(groups, 3, 9.0)  # NaN
