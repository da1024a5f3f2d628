"""The fixtures of all tests of the core."""

from builders.fixtures import *  # noqa: F403 - pytest finds fixtures here
