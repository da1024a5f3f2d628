"""The fixtures of all tests of the lab, which are those of the core's."""

from builders.fixtures import *  # noqa: F403 - pytest finds fixtures here
