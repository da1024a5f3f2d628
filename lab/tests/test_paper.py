"""docs/paper.md: the functions, commands and tests that it names are there."""

import importlib
import re
from importlib.util import find_spec

from builders.case_files import ROOT

PAGE = (ROOT / "docs" / "paper.md").read_text()


def resolve(dotted):
    """The function or module of a dotted name."""
    parts = dotted.split(".")
    for place in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:place]))
        except ModuleNotFoundError:
            continue
        for name in parts[place:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(dotted)


def test_the_page_names_what_is_there():
    """A renamed function or test fails here; each of the paper's tests stands on the page."""
    dotted = re.findall(r"`([a-z_]+(?:\.[a-z0-9_]+)+)`", PAGE)
    commands = re.findall(r"python -m ([\w.]+)", PAGE)
    for name in set(dotted) - {"eval.py", "train.py"}:
        resolve(name)
    assert all(map(find_spec, commands))
    files = [*ROOT.glob("tests/test_*.py"), *ROOT.glob("lab/tests/test_*.py")]
    tests = {file.name: re.findall(r"def (test_\w+)", file.read_text()) for file in files}
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert not named - {name for names in tests.values() for name in names}
    assert not set(tests["test_theory.py"]) - named
