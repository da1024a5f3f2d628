"""The links of the docs, and the names that they say in backticks; tests/test_house.py reads the core."""

import re
from pathlib import Path

from builders.case_files import ROOT

PAPER = {"sinkhorn", "shear", "grpo", "rewards", "train", "eval"}
CORE = ["base", "credit", "grading", "harness", "tasks"]
SOURCES = [*ROOT.glob("*.py"), *(path for room in CORE for path in (ROOT / room).rglob("*.py"))]
LAB = list((ROOT / "lab").rglob("*.py"))
TESTS = list((ROOT / "tests").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
PAGES += ROOT.glob("lab/**/*.md")
PAGES += ROOT.glob("lab/learn/*.ipynb")
PROSE = re.compile(r'(?s)""".*?"""|#[^\n]*')  # of code
ROOMS = "|".join([*PAPER, *CORE, "lab", "docs", "tests"])
OURS = re.compile(rf"`(?:--(?:no-)?|(?:{ROOMS})[./])([\w./-]+)")
# Flags of other programs, and the ending of `train.py`.
OTHERS = {"py", "num_processes", "index_url", "custom_advantage_function_path", "bf16"}
OTHERS.add("custom_megatron_before_log_prob_hook_path")


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


def test_names_in_backticks_exist():
    """Flags, files and dotted names of ours exist, in guides, docstrings and comments.

    Records may name code that was removed.
    """
    known = OTHERS | {path.stem.replace("-", "_") for path in [*PAGES, *SOURCES, *LAB, *TESTS]}
    known |= {path.name for path in (ROOT / "lab").iterdir()}
    texts = {page: page.read_text() for page in PAGES if "records" not in page.parts}
    for path in [*SOURCES, *LAB]:
        known |= set(re.findall(r"\w+", PROSE.sub("", path.read_text())))
        if "records" not in path.parts:
            texts[path] = "".join(PROSE.findall(path.read_text()))
    for path, text in texts.items():
        names = [re.sub(r"\.(py|md|ipynb)$", "", name) for name in OURS.findall(text)]
        last = {re.split(r"[./]", name.strip("."))[-1].replace("-", "_") for name in names}
        assert last - {""} <= known, f"{path}: {last - known}"
