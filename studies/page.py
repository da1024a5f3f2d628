"""Write the page of a run: where credit went, to look at. A run of train.py writes its own at its
end.

    python -m studies.page runs/NAME          # of a training run, or of `studies.diagnose`:
                                              runs/NAME/credit.html
    python -m studies.page runs/NAME --open   # and show it in the browser

What it shows is said in `harness/page.py`.
"""

import sys
import webbrowser
from pathlib import Path

from harness.config import Parser, answer


def make_parser() -> Parser:
    """This command's flags."""
    about = "One HTML page of a run's groups of rollouts, every token shaded by its weight."
    parser = Parser(prog="python -m studies.page", description=about)
    parser.usage = "%(prog)s RUN [flags]"
    run = "folder of a run of train.py, or of studies.diagnose, which holds samples.jsonl"
    parser.add_argument("run", type=Path, metavar="RUN", help=run)
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    return parser


answer(__name__, lambda: make_parser().parse_args())  # before what takes seconds to import

from harness.launch import run_command
from harness.page import write_page


@run_command(
    memory="remove groups from samples.jsonl", interrupted="interrupted: no page is written"
)
def main(argv: list[str] | None = None) -> None:
    """The page of a run, whole or not at all. Exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    flags = make_parser().parse_args(argv)
    print(write_page(flags.run))
    if flags.open:
        webbrowser.open((flags.run / "credit.html").absolute().as_uri())


if __name__ == "__main__":
    sys.exit(main())
