"""The whole of train.py on the embedded task, at a small size, with nothing replaced."""

import contextlib
import io
import json

import pytest
from builders.commands import run_well
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from harness.files import read_lines
from tasks import toy

# Two lines a problem, a fourth of the parameters, fewer steps; the rest are defaults.
SMALLER = "--toy-lines 2 --toy-width 64 --steps 16 --heldout 128 --eval-groups 16"


@pytest.fixture(scope="module")
def learning(tmp_path_factory):
    """The folder of a run by `python train.py` and SMALLER, with what it `printed`."""
    out = tmp_path_factory.mktemp("learning")
    printed = io.StringIO()
    with contextlib.chdir(out), contextlib.redirect_stdout(printed):
        run_well(train, SMALLER, "--out .")
    folder = out / "embedded-shear-1"
    (folder / "printed").write_text(printed.getvalue())
    return folder


def test_shear_learns_the_embedded_task(learning):
    """From a warm-up to a better policy: held-out accuracy rises, and weights find the error.

    Greedy accuracy rose by .12 to .16 with three seeds of training, sampled accuracy by .07 to .13.
    It fails if credit, loss or update pull the wrong way: then both fall.
    """
    first, *_, last = read_lines(learning / "metrics.jsonl")
    before = first["before"]
    after = last["after"]
    assert 0.3 < before["greedy"][0] < 0.8  # a misconception is left, and the rest is known
    assert after["greedy"][0] >= before["greedy"][0] + 0.05
    assert after["sampled"][0] >= before["sampled"][0] + 0.02
    found = after["localisation"]
    assert found["auc"] > max(0.85, found["auc_position"])


def test_a_run_prints_its_parts(learning):
    """It tells the plan, the evaluations, a row per step, and what to do next."""
    printed = (learning / "printed").read_text()
    before, after = printed.split("\n2/16 ")
    assert "16 prompts x 8 rollouts" in before and "right answers, greedy" in after


def test_a_run_leaves_what_it_promises(learning):
    """It leaves config, metrics, samples with weights, a picture, and a model's folder."""
    config = json.loads((learning / "config.json").read_text())
    assert config["lr"] == 1e-4 and config["window"] == 12 and "torch" in config["versions"]
    before, *metrics, after = read_lines(learning / "metrics.jsonl")
    assert before["before"] and after["after"]
    assert [row["step"] for row in metrics] == list(range(1, 17))
    first = metrics[0]
    assert first["abs_log_ratio"] < 1e-5 and first["nbar"] > 0
    assert first["eps_over_nbar"] == pytest.approx(0.05)
    phases = {"generate", "grade", "score", "weights", "wait", "train", "measure"}
    assert set(first["seconds"]) == phases
    samples = read_lines(learning / "samples.jsonl")
    assert len(samples) == 16 * 8
    assert {"response", "reason", "first_error", "advantage"} <= samples[0].keys()
    # where right does not oppose wrong, each weight is 1
    for row in samples:
        weights = row["weights"]["shear"]
        assert len(row["tokens"]) == len(weights)
        assert (set(weights) == {1.0}) == (row["advantage"] == 0)
    model = AutoModelForCausalLM.from_pretrained(learning / "model")
    tokenizer = AutoTokenizer.from_pretrained(learning / "model")
    logits = model(**tokenizer(["a=1+2;a?\n"], return_tensors="pt")).logits
    assert logits.shape[-1] == len(toy.symbols_of(2))
