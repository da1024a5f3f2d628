"""The fixtures of all tests of the lab: those of the core's, and a scored batch."""

from dataclasses import replace

import pytest
from builders.fixtures import *  # noqa: F403 - pytest finds fixtures here


@pytest.fixture(autouse=True)
def few_problems(monkeypatch):
    """The embedded task makes a tenth of its problems, all of which a run encodes and checks."""
    monkeypatch.setattr("tasks.toy.MADE_PROBLEMS", 64)


@pytest.fixture(scope="session")
def taught(tmp_path_factory):
    """The folder of a model that solves one-line problems three times in ten, so gets gradients."""
    import torch
    from builders.small_models import save_model

    from tasks import toy

    torch.set_num_threads(1)
    model = toy.make_model(1, seed=0)
    toy.warm_up(model, 1, set(), steps=100, seed=0)
    return save_model(tmp_path_factory.mktemp("models") / "taught", model)


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
