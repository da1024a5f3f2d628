"""Where credit went, to look at: one HTML page of groups of rollouts, every token shaded by its weight.

    python -m studies.page runs/NAME        # of a training run, or of `studies.diagnose`: runs/NAME/credit.html

A group's rollouts stand side by side, right ones first, each under the curve of its weights. Blue tokens are
reinforced and orange ones suppressed, by the sign of A x weight. Strength is |weight| relative to the group's largest.
The true first error, where a task knows it, is underlined. A token that is pointed at, by mouse, finger or keyboard,
lights up the farthest span that covers it, which gives it its weight (Alg. 1 line 14), and the opposing span closest to
that one (line 5), where it stands; where a method keeps no hidden states, its weight alone. The page opens on a wrong
rollout whose error lies about the middle. Buttons change the method over the same rollouts.

The page is `page.html` with its placeholders filled: one file that loads nothing. What models wrote is hostile.
It stands in the page as JSON without <, > and &, the script makes text nodes and attributes of it and never markup, and
a Content-Security-Policy admits only the file's own script and style, by their hashes. Only the group that is looked at
is built.

Left out: `response`, as tokens are what weights belong to (a character split over several tokens therefore shows as
replacement marks), and `tests`, which can be large. Averages over a whole run are in `harness/report.py` and
`credit/measures.py`.
"""

import base64
import hashlib
import html
import itertools
import re
import sys
from pathlib import Path

from harness.config import Parser, answer


def make_parser() -> Parser:
    """This command's flags."""
    about = "One HTML page of a run's groups of rollouts, every token shaded by its weight."
    parser = Parser(prog="python -m studies.page", description=about)
    parser.usage = "%(prog)s RUN [flags]"
    run = "folder of a run of train.py, or of studies.diagnose, which holds samples.jsonl"
    parser.add_argument("run", type=Path, metavar="RUN", help=run)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page; if not given: credit.html in RUN")
    return parser


answer(__name__, lambda: make_parser().parse_args())  # before what takes seconds to import

from harness.files import as_json, rows, write_whole
from harness.launch import run_command
from tasks.problems import BadInput

REQUIRED = {"problem": str, "tokens": list, "weights": dict}
SHOWN = [*REQUIRED, "step", "score", "reason", "advantage", "answer", "first_error", "spans"]


@run_command(memory="remove groups from samples.jsonl", interrupted="interrupted: no page is written")
def main(argv: list[str] | None = None) -> None:
    """The page of a run, whole or not at all. Exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    flags = make_parser().parse_args(argv)
    groups = read_groups(flags.run / "samples.jsonl")
    out = flags.out or flags.run / "credit.html"
    if out.suffix != ".html" or not out.parent.is_dir():
        raise BadInput(f"--out {out}: name a file that ends in .html, in a folder that is there")
    page = as_html(with_controls(groups), str(flags.run))
    write_whole(out, page)
    print(f"{out}: {len(page) / 1e6:.1f} MB")


def read_groups(path: Path) -> list[list[dict]]:
    """A run's samples.jsonl as groups: neighbouring rows of one step and problem.

    A last line that is cut off is left out, as the run may still write it. Raises BadInput for a file of something
    else.
    """
    samples = rows(path, REQUIRED)
    if not samples:
        raise BadInput(f"{path}: no rollouts to show; give the folder of a run")
    return [list(group) for _, group in itertools.groupby(samples, lambda row: (row["step"], row["problem"]))]


def with_controls(groups: list[list[dict]]) -> list[list[dict]]:
    """The groups, with the weights that `grpo` gives, and `oracle` where first errors are known.

    What the run itself gave stays, as its flags may have changed it. `credit.methods.oracle` gives 1 to the error alone
    in a wrong rollout with one, else 1.
    """
    samples = [row for group in groups for row in group]
    knows_errors = any(row.get("first_error") for row in samples)
    for row in samples:
        size = len(row["tokens"])
        row["weights"].setdefault("grpo", [1] * size)
        if knows_errors:
            is_wrong = row["score"] == 0 and row["advantage"]
            start, _, end = (is_wrong and row["first_error"]) or (0, "none", size)
            row["weights"].setdefault("oracle", [int(start <= place < end) for place in range(size)])
    return groups


def as_html(groups: list[list[dict]], title: str) -> str:
    """The page, as text of ASCII characters, of groups of rows as `report.sample_rows` makes them.

    A row may have "spans", each a `shear_settings.Closest`. Weights may be negative; those that are None or not finite
    show as unknown.
    """
    frame = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    script = re.search("<script>(.*?)</script>", frame, re.DOTALL)[1]
    style = re.search("<style>(.*?)</style>", frame, re.DOTALL)[1]
    fillings = dict(title=html.escape(title), data=groups_as_json(groups))
    fillings |= dict(script_hash=hash_of(script), style_hash=hash_of(style))
    # One pass, so that a placeholder's name in what models wrote stays text.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: fillings[match[1]], frame)
    return page.encode("ascii", "xmlcharrefreplace").decode()


def groups_as_json(groups: list[list[dict]]) -> str:
    """What the page shows of the rows, as ASCII text that holds no markup; nan and inf, which JSON lacks, are null."""
    shown = []
    for group in groups:
        shown.append([{name: row[name] for name in SHOWN if name in row} for row in group])
    text = as_json(shown)  # ASCII, so also without U+2028 and U+2029
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def hash_of(text: str) -> str:
    """What admits an inline script or style to a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


if __name__ == "__main__":
    sys.exit(main())
