"""Places of the repository, and its tables of cases, which can test other programs, too."""

import re
from pathlib import Path

from tasks.rows import read_rows

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CASES = ROOT / "tests" / "cases"
WITHOUT_LINUX = ROOT / "tests" / "without_linux"  # on PYTHONPATH, it makes believe another system


def text_of(name: str) -> str:
    """A file of tests/cases: what is printed, to the letter."""
    return (CASES / name).read_text(encoding="utf-8")


def cases(name: str, folder: Path = CASES) -> list[dict]:
    """The rows of a file of tests/cases, or of another folder."""
    return list(read_rows(folder / name))


def rows_of_text(text: str) -> list[list[str]]:
    """Rows of texts, a line each, with two spaces or more between cells."""
    return [re.split("  +", line.strip()) for line in text.splitlines() if line.strip()]
