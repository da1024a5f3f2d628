"""Run a command of ours in this process, or let a part of it fail."""

import os
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

from base import files

# Flags of a run that takes a second and learns nothing: its verdicts alternate, so that an untrained
# model gets gradients.
BRIEF_FLAGS = (
    "--task embedded --toy-lines 1 --use builders.alternating --prompts-per-step 4 ".split()
)
BRIEF_FLAGS += "--rollouts-per-prompt 4 --prompts-per-update 2 --heldout 4 --eval-groups 2".split()
BRIEF_FLAGS += "--max-tokens 8 --window 4 --stride 2".split()


class MakesAFolder:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def interrupt(*parts, **options):
    """Ctrl-C, in place of what would be done here."""
    raise KeyboardInterrupt


def words_of(*parts) -> list[str]:
    """A command line of lists of words, texts of several words, paths and numbers."""
    words = []
    for part in parts:
        words += words_of(*part) if isinstance(part, list | tuple) else str(part).split()
    return words


def raising(error: Exception) -> Mock:
    """A function that raises this error, whatever it is given."""
    return Mock(side_effect=error)


def run_well(command: ModuleType, *parts) -> None:
    """Asserts that a command ends with status 0."""
    assert command.main(words_of(*parts)) == 0


def change_json(path: Path, **values) -> None:
    """Gives some keys of a JSON file other values."""
    files.write_json(path, files.read_json(path) | values)
