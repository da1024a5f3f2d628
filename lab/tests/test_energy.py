"""The energy table: sums over the tokens before, at and after the first error, by a loop."""

import pytest
import torch
from builders.commands import words_of
from builders.runs import ALONE

from credit.batch import Batch
from harness.files import read_lines
from harness.load import load_run
from lab.studies import energy, gradients
from lab.tools.salience import logit_gradients

FLAGS = "--use builders.alternating --toy-lines 1 --toy-width 16 --warmup-steps 1 --heldout 8 --eval-groups 2"
FLAGS += " --prompts-per-step 4 --prompts-per-update 4"
START, END = 2, 5  # of every wrong rollout's first wrong step


def errors_at_one_place(batch, *_):
    """In place of `Batch.true_errors`: the untaught model's responses have no form."""
    places = torch.tensor([START, END]).expand(len(batch.rewards), 2)
    return torch.where(batch.correct[:, None], -1, places)


def test_the_table_has_the_sums_of_a_loop_over_tokens(tmp_path, monkeypatch, capsys):
    """Of two batches, with weights that differ from token to token, t / T."""
    monkeypatch.setattr(Batch, "true_errors", errors_at_one_place)
    rows = tmp_path / "rows.jsonl"
    energy.main(words_of(FLAGS, "--batches 2 --arms position --rows", rows))
    assert "| position | after" in capsys.readouterr().out
    found = {row["part"]: row for row in read_lines(rows) if row["arm"] == "position"}
    run = load_run(gradients.settings_of_run(words_of(FLAGS)), ALONE)
    energy.teach(run)
    sums = {part: torch.zeros(4) for part in energy.PARTS}  # tokens, n, w, w^2 n
    rollouts = 0
    for index in range(2):
        batch = gradients.sample_batch(run, index)
        norms = logit_gradients(batch.rollouts, run.context)
        for row in (~batch.correct).nonzero().flatten().tolist():
            rollouts += 1
            length = batch.lengths[row].item()
            for t in range(length):
                part = "before" if t < START else "at" if t < END else "after"
                n, w = norms[row, t].item(), (t + 1) / length
                sums[part] += torch.tensor([1, n, w, w * w * n])
    totals = sum(sums.values())
    for part, (tokens, n, w, weighted) in sums.items():
        expected = {
            "tokens": tokens / rollouts,
            "energy": n / rollouts,
            "share": 100 * n / totals[1],
            "weight": w / tokens,
            "w2 share": 100 * weighted / totals[3],
        }
        for name, value in expected.items():
            assert found[part][name] == pytest.approx(value.item(), rel=1e-3)
