"""harness/track.py: metrics reach a tracker under flat names, and a resumed run goes on in it."""

import argparse
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from accelerate.state import PartialState

from harness import parallel
from harness.config import check_installed
from harness.track import tracker
from tasks.problems import BadInput

ROW = {"step": 2, "reward": 0.5, "seconds": {"generate": 1.5}, "bench": {"aime24": {"mean": 0.25, "note": "no number"}}}


def flags(track: str | None, resume: str | None = None) -> argparse.Namespace:
    """Those that a tracker reads."""
    return argparse.Namespace(track=track, resume=resume)


def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch):
    """Also beside a folder of that name, which Python would import as an empty package."""
    (tmp_path / "absent_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("absent_tracker")
    for name in ("absent_tracker", "nowhere_at_all"):
        sentence = f"--track {name}: the package {name} is not installed; pip install {name}, or leave it out"
        with pytest.raises(BadInput, match=sentence):
            check_installed(name)


def test_nothing_is_tracked_without_the_flag_or_on_other_ranks(tmp_path):
    """No package is imported, no file is made."""
    for args, main in ((flags(None), True), (flags("wandb"), False)):
        with tracker(args, tmp_path / "run", main) as track:
            track(ROW)
    assert "wandb" not in sys.modules and not list(tmp_path.iterdir())


@pytest.mark.parametrize("grouped", [False, True])
def test_wandb_gets_flat_numbers_and_the_id_of_the_run_it_continues(grouped, tmp_path, monkeypatch):
    """A stand-in makes the folder that wandb 0.31 makes, whose name ends in the run's id. Our process group stays.

    A run that fails is not finished: wandb does that as Python ends, with its exit status.
    """
    started, logged, finished = [], [], []

    def init(**options):
        started.append(options)
        (tmp_path / "wandb" / "offline-run-20260101_000000-id7").mkdir(parents=True, exist_ok=True)
        (tmp_path / "wandb" / "latest-run").touch()
        run = dict(log=lambda values, step: logged.append((step, values)), finish=lambda: finished.append(len(logged)))
        return SimpleNamespace(**run)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    PartialState._reset_state()
    if grouped:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tracker(flags("wandb"), tmp_path, True) as track:
        track(ROW)
    with pytest.raises(ZeroDivisionError), tracker(flags("wandb"), tmp_path, True) as track:
        track(ROW)
        1 / 0  # noqa: B018 - something fails
    assert dist.is_initialized() == grouped and finished == [1]
    parallel.leave()
    assert [options["id"] for options in started] == [None, "id7"] and started[0]["name"] == tmp_path.name
    assert logged[0] == (2, {"reward": 0.5, "seconds/generate": 1.5, "bench/aime24/mean": 0.25})


def test_tensorboard_shows_the_steps_of_the_resumed_run(tmp_path, monkeypatch):
    """Step 3 was tracked, and is made again after the checkpoint of step 2."""
    reason = "tensorboard is not installed, and no requirement"
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=reason)
    monkeypatch.setattr("harness.track.find", lambda path: (path, 2))
    for resume, steps, reward in ((None, (1, 2, 3), 0.5), ("step-000002", (3, 4), 0.75)):
        with tracker(flags("tensorboard", resume), tmp_path, True) as track:
            for step in steps:
                track({**ROW, "step": step, "reward": reward})
    shown = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rewards = {event.step: event.value for event in shown.Scalars("reward")}
    assert rewards == {1: 0.5, 2: 0.5, 3: 0.75, 4: 0.75} and len(shown.Scalars("reward")) == 4
    assert "seconds/generate" in shown.Tags()["scalars"]
