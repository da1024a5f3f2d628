"""`--help` of the scripts of this folder: it prints their docstring, and ends them.

    show_help(__doc__)  # before a script's other imports, which take seconds

Left out: flags. A script reads its own words, or none.
"""

import sys


def show_help(docstring: str) -> None:
    """Print a script's docstring and exit, if the command line asks for help."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(docstring.strip())
        sys.exit()
