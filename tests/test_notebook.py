"""docs/shear.ipynb: its cells run in order, on a smaller task."""

import json
import sys

import matplotlib
import matplotlib.pyplot as plt
import pytest
from cases import DOCS

SIZES, SMALL = "LINES, WARMUP = 4, 500", "LINES, WARMUP = 1, 100"


@pytest.fixture(scope="module")
def cells():
    notebook = json.loads((DOCS / "shear.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_its_cells_run(cells, monkeypatch, capsys):
    """From docs/, as Jupyter runs them; the cells themselves compare their weights with
    `shear_weights`.
    """
    matplotlib.use("Agg")
    monkeypatch.chdir(DOCS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names, sources = {}, ["".join(cell["source"]) for cell in cells]
    assert sum(SIZES in source for source in sources) == 1
    for source in sources:
        exec(source.replace(SIZES, SMALL), names)
    assert len(plt.get_fignums()) == 2
    plt.close("all")
    omega, mask = names["omega"], names["mask"]
    assert (omega[mask] > 0).all() and not omega[~mask].any() and 0 < names["correct"].sum() < 8
    assert names["changes"]["SHEAR"].keys() == names["changes"]["GRPO"].keys()
    assert "mean change of log-probability" in capsys.readouterr().out


def test_its_outputs_are_those_of_one_run(cells):
    """Every cell was run, in order, without an error, and shows something."""
    assert [cell["execution_count"] for cell in cells] == list(range(1, 1 + len(cells)))
    kinds = [{output["output_type"] for output in cell["outputs"]} for cell in cells]
    assert all(kinds) and not any("error" in kind for kind in kinds)
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell["outputs"])
