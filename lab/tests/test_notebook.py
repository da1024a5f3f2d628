"""The notebooks in lab/learn/: their cells run in order, on a smaller task."""

import json
import sys
from unittest.mock import create_autospec

import matplotlib
import matplotlib.pyplot as plt
import pytest
from builders.case_files import ROOT
from transformers import AutoModelForCausalLM

from tasks import toy

LEARN = ROOT / "lab" / "learn"
SMALLER = {
    "LINES, WARMUP = 4, 500": "LINES, WARMUP = 1, 100",
    "LINES, WARMUP, STEPS = 4, 600, 16": "LINES, WARMUP, STEPS = 1, 100, 1",
    "PROMPTS, G, LR = 16, 8": "PROMPTS, G, LR = 4, 4",
}


@pytest.fixture(scope="module", params=["shear", "ladder"])
def cells(request):
    notebook = json.loads((LEARN / f"{request.param}.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.long
def test_its_cells_run(cells, taught, monkeypatch, capsys):
    """They run from their folder, as Jupyter runs them, on a model that was warmed up before.

    The cells themselves compare their weights with `shear_weights`.
    """

    def load(model, *options, **others):
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(taught).state_dict())
        return 0.0

    monkeypatch.setattr(toy, "warm_up", create_autospec(toy.warm_up, side_effect=load))
    matplotlib.use("Agg")
    monkeypatch.chdir(LEARN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = {}
    for cell in cells:
        source = "".join(cell["source"])
        for sizes, small in SMALLER.items():
            source = source.replace(sizes, small)
        exec(source, names)
    figures = len(plt.get_fignums())
    plt.close("all")
    printed = capsys.readouterr().out
    if "curves" in names:
        assert figures == len(names["curves"]) + 1 == 8
        assert "before each update of the first step: 0.0000, 0.0" in printed
    else:
        assert figures == 3 and "mean change of log-probability" in printed
