"""The fixtures of all tests of the lab: those of the core's, and a scored batch."""

from dataclasses import replace

import pytest
from builders.fixtures import *  # noqa: F403 - pytest finds fixtures here


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
