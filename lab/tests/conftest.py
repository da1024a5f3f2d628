"""The fixtures of all tests of the lab: those of the core's, and a scored batch."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from builders.fixtures import *  # noqa: F403 - pytest finds fixtures here
from filelock import FileLock


@pytest.fixture(scope="session")
def taught(tmp_path_factory):
    """The folder of `teach`; the first process of the tests that needs it makes it for all."""
    parent = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        parent = parent.parent
    folder = parent / "taught"
    with FileLock(parent / "taught.lock"):
        return str(folder) if folder.exists() else teach(folder)


def teach(folder: Path) -> str:
    """Saves a model that solves one-line problems three times in ten, and so gets gradients."""
    import torch
    from builders.small_models import save_model

    from tasks import toy

    torch.set_num_threads(1)
    model = toy.make_model(1, seed=0)
    toy.warm_up(model, 1, set(), steps=100, seed=0)
    return save_model(folder, model)


@pytest.fixture(scope="session")
def scored_once():
    """The batch of `crediting.worked_responses`."""
    from crediting import worked_responses

    return worked_responses()


@pytest.fixture
def told(scored_once, monkeypatch):
    """This batch, of which nothing is logged yet, with a process reward model."""
    from crediting import score_lines

    monkeypatch.setattr("lab.tools.reward_model.score_steps", score_lines)
    return replace(scored_once, stats={})
