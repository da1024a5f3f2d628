"""Write the page of a run, or of `lab.studies.diagnose`: where credit went.

    python -m lab.studies.page runs/NAME          # runs/NAME/credit.html
    python -m lab.studies.page runs/NAME --open   # and show it in the browser

A run of train.py writes its own at its end. What it shows is said in `harness/page.py`.
"""

import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from harness.config import PathFlag, read_flags


@dataclass(frozen=True)
class Page:
    """One HTML page of a run's groups of rollouts, every token shaded by its weight."""

    run: tyro.conf.Positional[PathFlag]
    """Folder of a run of train.py, or of studies.diagnose, which holds samples.jsonl."""
    open: bool = False
    """Show it in the browser."""


def parse_page(argv: Sequence[str] | None = None) -> Page:
    """This command's flags."""
    return read_flags(Page, argv, prog="python -m lab.studies.page")


if __name__ == "__main__":
    parse_page()  # --help and wrong flags end here: the imports below take seconds

from harness.command import run_command
from lab.tools.page import write_page


@run_command(
    memory="remove groups from samples.jsonl", interrupted="interrupted: no page is written"
)
def main(argv: list[str] | None = None) -> None:
    """The page of a run, whole or not at all. Exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    flags = parse_page(argv)
    print(write_page(flags.run))
    if flags.open:
        webbrowser.open((flags.run / "credit.html").absolute().as_uri())


if __name__ == "__main__":
    sys.exit(main())
