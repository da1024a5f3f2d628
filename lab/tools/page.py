"""Where credit went: one HTML page of groups of rollouts, every token shaded by its weight.

    python -m lab.tools.page runs/NAME          # runs/NAME/credit.html
    python -m lab.tools.page runs/NAME --open   # and show it in the browser

It reads the samples.jsonl of a run or of `lab.studies.diagnose`. If the rule compares spans, rows
have the closest one of each.

The text above the rollouts explains spans, distances and weights. The page opens on a wrong rollout
whose error lies about the middle, beside the right rollout that is closest there. Blue tokens are
reinforced and orange ones suppressed, by the sign of A x weight. Strength is |weight| relative to
the group's largest, or above its smallest. The true first error, where a task knows it, is
underlined. Pointing at a token, by mouse, finger or keyboard, highlights the farthest span that
covers it, which gives it its weight (Alg. 1 line 14), and the opposing span closest to that one
(line 5), in its rollout. Methods that keep no hidden states show the weight alone. Buttons show the
weights of `grpo` and, where first errors are known, `oracle` over the same rollouts. The rollouts
to one held-out problem before and after training (before.jsonl, after.jsonl) stand side by side.

The page is `page.html` with its placeholders filled: one file that loads nothing. Responses of
models are treated as hostile. The page holds them as JSON without <, > and &; its script makes text
nodes and attributes of them, never markup; a Content-Security-Policy admits only the file's own
script and style, by their hashes, which stand in page.html and which lab/tests/test_page.py
computes. Only the group that is shown is built.

Left out: `response`, because weights belong to tokens (a character split over several tokens
therefore shows as replacement marks), and `tests`, which can be large. Averages over a whole run
are in `lab/tools/curve.py` and metrics.jsonl.
"""

import html
import itertools
import math
import re
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import tyro

import lab.tasks  # noqa: F401 - enters the lab's tasks
from base.config import TASKS
from base.errors import BadInput
from base.files import as_json, config_of, read_lines, write_whole
from harness.command import run_command

# What the page shows of a row.
SHOWN = "problem tokens weights step score advantage first_error spans when reason answer".split()


@run_command
def main(argv: Sequence[str] | None = None) -> None:
    """The page of a run, whole or not at all. Exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    tyro.cli(write_and_show, args=argv, prog="python -m lab.tools.page")


def write_and_show(run: tyro.conf.Positional[Path], *, open: bool = False) -> None:
    """Write one HTML page of a run's groups of rollouts, every token shaded by its weight.

    `run` is the folder of a run or of lab.studies.diagnose; with `open` the browser shows the page.
    """
    print(write_page(run))
    if open:
        webbrowser.open((run / "credit.html").absolute().as_uri())


def write_page(folder: Path) -> str:
    """Write credit.html, the page of a run's samples; return its path and size in words.

    Raises BadInput.
    """
    groups = read_groups(folder)
    path = folder / "credit.html"
    settings = config_of(folder) or {}
    task = settings.get("task")
    about = TASKS[task].about if task in TASKS else ""
    page = as_html(groups, str(folder), about, floor_of(settings))
    write_whole(path, page)
    return f"{path} ({len(page) / 1e6:.1f} MB)"


def floor_of(settings: dict) -> float | None:
    """The weight of equal spans by a run's settings: eps ln(window) in units of nbar, Eq. (10).

    None where the settings do not tell it, as with an eps in the distances' unit.
    """
    if settings.get("eps_unit") != "nbar" or settings.get("method") != "shear":
        return None
    return settings["eps"] * math.log(settings["window"])


def read_groups(folder: Path) -> list[list[dict]]:
    """The groups of a run's samples.jsonl: neighbouring rows of one step and problem.

    The rollouts before and after training, if there are any, come first, as one group. A last line
    that is cut off is left out, as the run may still write it. Raises BadInput for a file without
    rollouts or with a bad line.
    """
    samples = read_lines(folder / "samples.jsonl")
    if not samples:
        raise BadInput(f"{folder / 'samples.jsonl'}: no rollouts to show; give the folder of a run")
    groups = [
        list(group)
        for _, group in itertools.groupby(samples, lambda row: (row.get("step"), row["problem"]))
    ]
    before = folder / "before.jsonl"
    after = folder / "after.jsonl"
    if before.exists() and after.exists():
        groups.insert(0, before_and_after(before, after))
    return groups


def before_and_after(before: Path, after: Path) -> list[dict]:
    """The rollouts of both files as one group.

    Each row gets "when" it was sampled; the rollout of a closest span is counted over both files.
    """
    group = read_lines(before)
    size = len(group)
    group += read_lines(after)
    for number, row in enumerate(group):
        row["when"] = "before training" if number < size else "after training"
        if number >= size and "spans" in row:
            row["spans"] = [[*span[:3], span[3] + size, *span[4:]] for span in row["spans"]]
    return group


def as_html(
    groups: list[list[dict]], title: str, task: str = "", floor: float | None = None
) -> str:
    """The page as ASCII text; groups hold rows of `credit.measures.sample_rows`.

    A row may have "spans", each a `credit.measures.ClosestSpan`. Weights may be negative;
    those that are None or not finite show as unknown. `task` is a sentence about the task, `floor`
    the weight of equal spans, if it is known.
    """
    frame = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    fillings = dict(title=html.escape(title), task=html.escape(task), data=groups_as_json(groups))
    fillings["floor"] = f" ({floor:.3g}: even equal spans keep a distance)" if floor else ""
    # One pass, so that a placeholder's name in a model's response stays text.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: fillings[match[1]], frame)
    return page.encode("ascii", "xmlcharrefreplace").decode()


def groups_as_json(groups: list[list[dict]]) -> str:
    """The parts of the rows that the page shows, as ASCII text that holds no markup.

    NaN and inf, which JSON lacks, are null.
    """
    shown = []
    for group in groups:
        shown.append([{name: row[name] for name in SHOWN if name in row} for row in group])
    text = as_json(shown)  # ASCII, so also without U+2028 and U+2029
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


if __name__ == "__main__":
    sys.exit(main())
