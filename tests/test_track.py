"""--track: metrics reach a tracker under flat names."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from accelerate.state import PartialState
from builders.case_files import cases
from builders.runs import ALONE, run_of

from harness.config import PAPER_RECIPE
from harness.fsdp import leave
from harness.log import step_log
from harness.run import Ranks, Run

CONFIG = replace(PAPER_RECIPE, track="wandb")
(METRICS,) = cases("step.jsonl")
ROW = METRICS | {"step": 2, "bench": {"aime24": {"mean": 0.25, "error": 0.1, "note": "no number"}}}


def run_in(folder, ranks=ALONE) -> Run:
    """A run that is tracked."""
    run = run_of(CONFIG, None, None, None, ranks=ranks)
    run.folder = folder
    return run


def test_nothing_is_tracked_on_other_ranks(tmp_path):
    """On another rank no package is imported and no file is made."""
    with step_log(run_in(tmp_path / "run", Ranks(1, 1, None))) as log:
        log(ROW, [])
    assert "wandb" not in sys.modules and not list(tmp_path.iterdir())


@pytest.mark.parametrize("grouped", [False, True])
def test_wandb_gets_flat_numbers(grouped, tmp_path, monkeypatch):
    """Numbers reach wandb under flat names, and our process group stays.

    A run that fails is not finished: wandb does that as Python ends, with its status.
    """
    started = []
    logged = []
    finished = []

    def init(**options):
        started.append(options)
        run = dict(
            log=lambda values, step: logged.append((step, values)),
            finish=lambda: finished.append(len(logged)),
        )
        return SimpleNamespace(**run)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    PartialState._reset_state()
    if grouped:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with step_log(run_in(tmp_path)) as log:
        log(ROW, [])
    with pytest.raises(ZeroDivisionError), step_log(run_in(tmp_path)) as log:
        log(ROW, [])
        1 / 0  # noqa: B018 - something fails
    assert dist.is_initialized() == grouped and finished == [1]
    leave()
    assert started[0]["name"] == tmp_path.name and started[0]["dir"] == tmp_path
    step, values = logged[0]
    expected = {"reward": 0.43, "seconds/generate": 1.2, "bench/aime24/mean": 0.25}
    assert step == 2 and expected.items() <= values.items() and "bench/aime24/note" not in values
