"""Places of the repository, and its tables of cases, which can test other programs, too."""

from pathlib import Path

from tasks.rows import read_rows

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CASES = ROOT / "tests" / "cases"
WITHOUT_LINUX = ROOT / "tests" / "without_linux"  # on PYTHONPATH, it makes believe another system


def cases(name: str, folder: Path = CASES) -> list[dict]:
    """The rows of a file of tests/cases, or of another folder."""
    return list(read_rows(folder / name))
