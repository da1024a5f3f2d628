"""lab.tools.track: a run's steps reach a dashboard under flat names, whatever it does."""

import sys
from types import SimpleNamespace

import pytest
from builders.case_files import cases

from base import files
from lab.tools import track

(METRICS,) = cases("step.jsonl")
NESTED = {"bench": {"aime24": {"mean": 0.25, "error": 0.1, "note": "no number"}}, "ess": None}


@pytest.fixture
def run(tmp_path):
    """The folder of a run of three steps that has not ended."""
    folder = tmp_path / "run"
    folder.mkdir()
    settings = {"program": files.PROGRAM, "task": "embedded", "method": "shear"}
    files.write_json(folder / "config.json", settings)
    rows = [METRICS | NESTED | {"step": step} for step in (1, 2, 3)]
    files.append_rows(folder / "metrics.jsonl", [{"before": {}}, *rows])
    return folder


@pytest.fixture
def board(monkeypatch):
    """A stand-in for wandb: what it was given, and the errors that its next calls raise."""
    board = SimpleNamespace(started=[], logged=[], errors=[])

    def log(values, step):
        error = board.errors.pop(0) if board.errors else None
        if error:
            raise error
        board.logged.append((step, values))

    def init(**options):
        board.started.append(options)
        return SimpleNamespace(log=log, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return board


def test_numbers_get_flat_names(run, board):
    """Each step's numbers are logged once, with the run's settings, and the command ends."""
    assert track.main(["wandb", str(run)]) == 0
    assert board.started[0]["name"] == "run" and board.started[0]["config"]["method"] == "shear"
    assert [step for step, _ in board.logged] == [1, 2, 3]
    values = board.logged[1][1]
    expected = {"reward": 0.43, "seconds/generate": 1.2, "bench/aime24/mean": 0.25}
    assert expected.items() <= values.items()
    assert not {"bench/aime24/note", "ess"} & values.keys()


def test_a_dashboard_that_fails_is_a_warning(run, board, capsys):
    """A step that was not taken is sent again with the next one, before it."""
    board.errors = [None, ConnectionError("no route")]
    assert track.main(["wandb", str(run)]) == 0
    assert [step for step, _ in board.logged] == [1, 2, 3]
    assert "WARNING: step 2 was not logged (no route)" in capsys.readouterr().err
    board.errors = [ConnectionError("no route")] * 99
    assert track.main(["wandb", str(run)]) == 1
    assert "wandb: 3 of 3 steps were not logged" in capsys.readouterr().err
