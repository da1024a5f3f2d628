"""--track: metrics reach a tracker under flat names."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from accelerate.state import PartialState
from made import ALONE

from harness.config import PAPER, TrainConfig
from harness.parallel import Ranks, leave
from harness.report import tracker

OTHER = Ranks(1, 1, None)
ROW = {
    "step": 2,
    "reward": 0.5,
    "seconds": {"generate": 1.5},
    "bench": {"aime24": {"mean": 0.25, "note": "no number"}},
}


def flags(track: str | None) -> TrainConfig:
    """A run's, with a tracker."""
    return replace(PAPER, track=track)


def test_nothing_is_tracked_without_the_flag_or_on_other_ranks(tmp_path):
    """No package is imported, no file is made."""
    for config, ranks in ((flags(None), ALONE), (flags("wandb"), OTHER)):
        with tracker(config, tmp_path / "run", ranks) as track:
            track(ROW)
    assert "wandb" not in sys.modules and not list(tmp_path.iterdir())


@pytest.mark.parametrize("grouped", [False, True])
def test_wandb_gets_flat_numbers(grouped, tmp_path, monkeypatch):
    """Our process group stays. A run that fails is not finished: wandb does that as Python ends,
    with its status.
    """
    started, logged, finished = [], [], []

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
    with tracker(flags("wandb"), tmp_path, ALONE) as track:
        track(ROW)
    with pytest.raises(ZeroDivisionError), tracker(flags("wandb"), tmp_path, ALONE) as track:
        track(ROW)
        1 / 0  # noqa: B018 - something fails
    assert dist.is_initialized() == grouped and finished == [1]
    leave()
    assert started[0]["name"] == tmp_path.name and started[0]["dir"] == tmp_path
    assert logged[0] == (2, {"reward": 0.5, "seconds/generate": 1.5, "bench/aime24/mean": 0.25})
