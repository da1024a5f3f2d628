"""The flags of a study: its own, and those of train.py, which are the other words.

flags, others = parse_study(Compare, argv)
refuse_flags(others, "seed lr", "the trials set it")
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TypeVar

from base.config import flag, read_flags
from base.errors import BadInput
from lab.tools.command import INSTALL

Study = TypeVar("Study")


def parse_study(kind: type[Study], argv: Sequence[str] | None = None) -> tuple[Study, list[str]]:
    """A study's own flags, and the other words of the command line: flags of train.py.

    Ends with a sentence where a package of the lab is not installed, before anything is computed.
    """
    for package in ("pandas", "matplotlib"):
        if find_spec(package) is None:
            print(f"error: {package} is not installed; {INSTALL}", file=sys.stderr)
            sys.exit(2)
    prog = f"python -m lab.studies.{kind.__name__.lower()}"
    return read_flags(kind, argv, prog=prog, return_unknown_args=True)


def refuse_flags(words: Sequence[str], refused: str, reason: str) -> None:
    """Raise BadInput for flags of train.py among the words that a study has no use for."""
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    for name in refused.split():
        if {flag(name), flag(f"no_{name}")} & given:
            raise BadInput(f"{flag(name)}: {reason}; leave it out")
