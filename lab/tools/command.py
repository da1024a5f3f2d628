"""What the commands of this folder share: flags by tyro, and one sentence for a mistake.

    main = command("lab.tools.curve", draw)      # its flags are the arguments of `draw`
    with packages(): import matplotlib           # a package that is missing is a mistake, too

Left out: packages that the core needs as well (requirements.txt).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import tyro

from base.errors import BadInput
from harness.command import run_command

INSTALL = "pip install -r lab/requirements.txt"


def command(name: str, function: Callable[..., int | None]) -> Callable[..., int]:
    """The `main` of `python -m NAME`, which calls the function; it returns the exit status.

    The status is that of the function, 2 for bad input, 130 after Ctrl-C.
    """

    @run_command
    def main(argv: Sequence[str] | None = None) -> int | None:
        return tyro.cli(function, args=argv, prog=f"python -m {name}")

    return main


@contextmanager
def packages(install: str = INSTALL) -> Iterator[None]:
    """Inside, a package that is not installed raises BadInput, which says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise BadInput(f"{error.name} is not installed; {install}") from error
