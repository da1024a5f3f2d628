"""Errors of one sentence, and foreign text made safe to print.

    BadInput, RunFailed   a user's mistake, and a run that cannot continue

This file imports none of ours, and no torch, so that flags are read at once.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Half of a surrogate pair: JSON can spell one, and Python takes one for a byte that it cannot
# decode. No file of UTF-8 holds it, and no tokenizer reads it.
SURROGATE = re.compile("[\ud800-\udfff]")


class BadInput(ValueError):
    """A user's mistake, in one sentence that names the flag or file, the value and the remedy."""


class RunFailed(RuntimeError):
    """A run that cannot continue; the message says why. All ranks raise it."""


def printable(text: str) -> str:
    r"""Foreign text made safe for a terminal, with control characters spelt out, as \x1b.

    Those are the characters that would move the cursor, change colour, end the line or reverse its
    direction. Unusual spaces are spelt out, too.
    """
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


def cause(error: BaseException) -> str:
    """The first line of the message of an error's first cause, to be shown in brackets."""
    while error.__cause__:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(". ")


@contextmanager
def bad_input_on_error(name: str, remedy: str) -> Iterator[None]:
    """Turn any error inside, except MemoryError, into a BadInput.

    Its sentence has `name` (a file or flag), the message of the error's cause and the remedy.
    """
    try:
        yield
    except (BadInput, MemoryError):
        raise
    except Exception as error:  # libraries raise errors of any class
        raise BadInput(f"{name}: cannot be read ({cause(error)}); {remedy}") from error
