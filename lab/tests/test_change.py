"""docs/change.md: its five files run, do what they say, and are what the page shows."""

import json
import re
import shutil
import sys

import pytest
import torch
from builders.case_files import DOCS, ROOT
from builders.commands import BRIEF_FLAGS, run_well, words_of
from edited import TINY
from ragged import random_group
from torch.testing import assert_close

import train
from base.config import TASKS
from base.files import read_lines
from credit.rules import RULES
from harness.command import check_inputs
from lab.studies import compare, gradients
from shear import shear_weights, spans_of, token_distances

LEARN = ROOT / "lab" / "learn"
# Each file's flags: as the file of an empty folder, and as a module of the lab.
FILES = {
    "my_distance": "--use {} --method my_distance",
    "my_pooling": "--use {} --method my_pooling",
    "my_rule": "--use {} --method my_rule --method-option floor=0.1",
    "my_reward": "--reward {}:grade",
    "my_task": "--use {} --task my_task --toy-lines 2 --heldout 90",
}
SIZES = "--warmup-steps 0 --toy-width 16 --steps 1 --name run"


@pytest.fixture(autouse=True)
def forgotten(tmp_path, monkeypatch):
    """An empty folder, whose files enter nothing for the next test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    tables = [(table, dict(table)) for table in (RULES, TASKS)]
    yield
    for table, before in tables:
        table.clear()
        table.update(before)
    for name in list(sys.modules):
        if name.startswith(("own_my_", "lab.learn.my_")):
            del sys.modules[name]


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_an_empty_folder_trains(name, tmp_path, monkeypatch):
    """It passes the checks before torch is imported, trains a step, and stands in the run's files."""
    shutil.copy(LEARN / f"{name}.py", tmp_path)
    own_flags = FILES[name].format(f"{name}.py").split()
    monkeypatch.setattr(sys, "argv", ["train.py", *own_flags])
    check_inputs()
    run_well(train, BRIEF_FLAGS, own_flags, SIZES)
    config = json.loads((tmp_path / "runs/run/config.json").read_text())
    row = read_lines(tmp_path / "runs/run/samples.jsonl")[0]
    assert list(row["weights"]) == [config["method"]]
    if config["method"] != "shear":
        assert torch.tensor(row["weights"][name]).std() > 0.01


def test_the_distance_is_the_mean_over_all_pairs_of_tokens():
    """It stands in SHEAR's weights in units of nbar."""
    from lab.learn import my_distance

    hidden, mask, correct = random_group()  # rollouts 1 and 3 are right
    weighed = shear_weights(hidden, mask, correct, measure=my_distance.mean_distance, window=99)
    wrong = hidden[0][mask[0]]
    means = [token_distances(wrong, hidden[right][mask[right]]).mean() for right in (1, 3)]
    assert_close(weighed.omega[0][mask[0]], (min(means) / weighed.nbar).expand(17))


def test_the_pooling_is_the_smallest_distance():
    """Spans of 4 tokens, one every 2: tokens 2 and 3 are in both."""
    from lab.learn import my_pooling

    spans = spans_of(torch.ones(1, 6).bool(), window=4, stride=2)
    distances = torch.tensor([3.0, 1.0])
    assert my_pooling.smallest(distances, spans).tolist() == [3, 3, 1, 1, 1, 1]


def test_a_rule_of_one_s_own_is_an_arm_of_the_studies(tmp_path):
    """The gradient test has its row; a trial of `compare` knows when the file changes."""
    file = tmp_path / "my_rule.py"
    shutil.copy(LEARN / "my_rule.py", file)
    use = f"--use {file}"
    rows = tmp_path / "rows.jsonl"
    gradients.main(words_of(use, TINY, "--batches 2 --reference 2 --rows", rows, "--arms my_rule"))
    assert {row["arm"] for row in read_lines(rows)} == {"grpo", "my_rule"}
    assert compare.allowed_arms(["my_rule"], use.split()) == ["grpo", "my_rule"]
    before = compare.code_of("my_rule", flags=use)
    file.write_text(file.read_text().replace("0.01", "0.02"))
    assert compare.code_of("my_rule", flags=use) != before


def test_the_page_shows_the_files():
    """A block of docs/change.md is the end of its file, and its commands are those above."""
    page = (DOCS / "change.md").read_text()
    for name, flags in FILES.items():
        (block,) = re.findall(rf"lab/learn/{name}\.py\).*?```python\n(.*?)```", page, re.S)
        assert (LEARN / f"{name}.py").read_text().endswith(f"\n{block}")
        command = flags.split(" --toy-lines")[0].format(f"{name}.py")
        assert command in " ".join(page.split())
