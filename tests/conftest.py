"""The fixtures of all tests of the core, and `must_fail`, which shows that a check can fail."""

from contextlib import contextmanager

import pytest
from builders.fixtures import *  # noqa: F403 - pytest finds fixtures here


@pytest.fixture
def must_fail():
    """Assert that the assertion inside fails, as it is for a wrong variant of what is tested.

    with must_fail("the mean instead of the maximum"):
        assert ...
    """

    @contextmanager
    def check(variant: str):
        try:
            yield
        except AssertionError:
            return
        raise AssertionError(f"holds for a wrong variant, too: {variant}")

    return check
