"""Places of the repository, and the tables of tests/cases, which can test other programs, too."""

import re
from pathlib import Path

from tasks.rows import read_rows

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WITHOUT_LINUX = ROOT / "tests" / "without_linux"  # on PYTHONPATH, it makes believe another system


def text_of(name: str) -> str:
    """A file of tests/cases: what is printed, to the letter."""
    return (ROOT / "tests" / "cases" / name).read_text(encoding="utf-8")


def cases(name: str) -> list[dict]:
    """The rows of a file of tests/cases, which other graders can be tested with, too."""
    return list(read_rows(ROOT / "tests" / "cases" / name))


def rows_of_text(text: str) -> list[list[str]]:
    """Rows of texts, a line each, with two spaces or more between cells."""
    return [re.split("  +", line.strip()) for line in text.splitlines() if line.strip()]
