"""lab.tools.track: a run's steps reach a dashboard under flat names, whatever it does."""

import sys
from unittest.mock import Mock

import pytest
from builders.case_files import cases

from base import files
from lab.tools import track

(METRICS,) = cases("step.jsonl")
NESTED = {"bench": {"aime24": {"mean": 0.25, "error": 0.1, "note": "no number"}}, "ess": None}


@pytest.fixture
def run(tmp_path):
    """The folder of a run of three steps that has not ended."""
    files.write_json(tmp_path / "config.json", {"program": files.PROGRAM, "method": "shear"})
    rows = [METRICS | NESTED | {"step": step} for step in (1, 2, 3)]
    files.append_rows(tmp_path / "metrics.jsonl", [{"before": {}}, *rows])
    return str(tmp_path)


@pytest.fixture
def board(monkeypatch):
    """A stand-in for wandb, whose `log` is a mock."""
    board = Mock()
    monkeypatch.setitem(sys.modules, "wandb", board)
    return board.init


def test_numbers_get_flat_names(run, board):
    """Each step's numbers are logged once, with the run's settings, and the command ends."""
    assert track.main(["wandb", run]) == 0
    assert board.call_args.kwargs["config"]["method"] == "shear"
    logged = board().log.call_args_list
    assert [call.kwargs["step"] for call in logged] == [1, 2, 3]
    values = logged[1].args[0]
    expected = {"reward": 0.43, "seconds/generate": 1.2, "bench/aime24/mean": 0.25}
    assert expected.items() <= values.items()
    assert not {"bench/aime24/note", "ess"} & values.keys()


def test_a_dashboard_that_fails_is_a_warning(run, board, capsys):
    """A step that was not taken is sent again with the next one, before it."""
    log = board().log
    log.side_effect = [None, ConnectionError("no route"), None, None]
    assert track.main(["wandb", run]) == 0
    assert [call.kwargs["step"] for call in log.call_args_list] == [1, 2, 2, 3]
    assert "WARNING: step 2 was not logged (no route)" in capsys.readouterr().err
    log.side_effect = ConnectionError("no route")
    assert track.main(["wandb", run]) == 1
    assert "wandb: 3 of 3 steps were not logged" in capsys.readouterr().err
