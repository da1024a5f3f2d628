"""The links of the docs; tests/test_house.py reads the core."""

import re
from pathlib import Path

from builders.case_files import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
PAGES += ROOT.glob("lab/**/*.md")
PAGES += ROOT.glob("lab/learn/*.ipynb")


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in headings}


def test_links_hold():
    """Links within the repository have a target."""
    for page in PAGES:
        for target in re.findall(r'(?:\]\(|src="|srcset=")(?!http)([^)"\s]+)', page.read_text()):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors_of(file), f"{page}: {target}"
