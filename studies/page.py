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
import json
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

from harness.files import rows, write_whole
from harness.launch import run_command
from tasks.problems import BadInput, cause

REMEDY = "give the folder of a run"
NUMBER = int | float | None  # None stands for one that is not known
# Keys of a row and their types, see `has_form`.
REQUIRED = {
    "step": int | None,
    "problem": str,
    "score": NUMBER,
    "reason": str | None,
    "advantage": NUMBER,
    "tokens": [str],
    "weights": dict,
}
OPTIONAL = {"answer": object, "first_error": list | None, "spans": [[NUMBER]]}


@run_command(memory="remove groups from samples.jsonl", interrupted="interrupted: no page is written")
def main(argv: list[str] | None = None) -> None:
    """The page of a run, whole or not at all. Exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    flags = make_parser().parse_args(argv)
    out = flags.out or flags.run / "credit.html"
    if out.suffix != ".html":
        raise BadInput(f"--out {out}: is no page; name a file that ends in .html")
    page = as_html(with_controls(read_groups(flags.run / "samples.jsonl")), str(flags.run))
    try:
        write_whole(out, page)
    except OSError as error:
        raise BadInput(f"--out {out}: cannot be written ({cause(error)}); name another file") from error
    print(f"{out}: {len(page) / 1e6:.1f} MB")


def read_groups(path: Path) -> list[list[dict]]:
    """A run's samples.jsonl as groups: neighbouring rows of one step and problem.

    A last line that is cut off is left out, as the run may still write it. Raises BadInput for a file of something
    else.
    """
    samples = rows(path)
    for number, row in enumerate(samples, 1):
        if not is_sample(row):
            raise BadInput(f"{path}: line {number} is not a rollout with its weights; {REMEDY}")
    if not samples:
        raise BadInput(f"{path}: no rollouts to show; {REMEDY}")
    return [list(group) for _, group in itertools.groupby(samples, lambda row: (row["step"], row["problem"]))]


def with_controls(groups: list[list[dict]]) -> list[list[dict]]:
    """The groups, with the weights that `grpo` gives, and `oracle` where first errors are known.

    What the run itself gave stays, as its flags may have changed it.
    """
    rows = [row for group in groups for row in group]
    for row in rows:
        row["weights"].setdefault("grpo", [1] * len(row["tokens"]))
    if any(row.get("first_error") for row in rows):
        for row in rows:
            row["weights"].setdefault("oracle", oracle_weights(row))
    return groups


def oracle_weights(row: dict) -> list[int]:
    """Its weights by `credit.methods.oracle`: in a wrong rollout with a known error 1 on that alone, else 1."""
    size = len(row["tokens"])
    start, _, end = row.get("first_error") or (0, "none", size)
    wrong = row["score"] == 0 and row["advantage"]
    return [int(not wrong or start <= place < end) for place in range(size)]


def has_form(value, form) -> bool:
    """Whether JSON is of a type, or, for a `form` in brackets, a list whose values all have the form inside."""
    if isinstance(form, list):
        return isinstance(value, list) and all(has_form(item, form[0]) for item in value)
    return isinstance(value, form)


def is_sample(row: dict) -> bool:
    """Whether the page can show a row."""
    forms = REQUIRED | {name: form for name, form in OPTIONAL.items() if name in row}
    if not all(name in row and has_form(row[name], form) for name, form in forms.items()):
        return False
    size = len(row["tokens"])
    for weights in row["weights"].values():
        if not has_form(weights, [NUMBER]) or len(weights) != size:
            return False
    error = row.get("first_error") or [0, "none", 0]  # first token, kind, token after the last
    is_error = len(error) == 3 and isinstance(error[1], str) and has_form([error[0], error[2]], [int])
    return is_error and bool(row["weights"])


def as_html(groups: list[list[dict]], title: str) -> str:
    """The page, as text of ASCII characters, of groups of rows as `report.sample_rows` makes them.

    "step" may be None. A row may have "spans", each a `shear_settings.Closest`. Weights may be negative; those that are
    None or not finite show as unknown.
    """
    frame = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    script = re.search("<script>(.*?)</script>", frame, re.DOTALL)[1]
    style = re.search("<style>(.*?)</style>", frame, re.DOTALL)[1]
    fillings = {
        "title": html.escape(title),
        "data": groups_as_json(groups),
        "script_hash": hash_of(script),
        "style_hash": hash_of(style),
    }
    # One pass, so that a placeholder's name in what models wrote stays text.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: fillings[match[1]], frame)
    return page.encode("ascii", "xmlcharrefreplace").decode()


def groups_as_json(groups: list[list[dict]]) -> str:
    """What the page shows of the rows, as ASCII text that holds no markup; nan and inf, which JSON lacks, are null."""
    shown = []
    for group in groups:
        shown.append([{name: row[name] for name in REQUIRED | OPTIONAL if name in row} for row in group])
    finite = json.loads(json.dumps(shown), parse_constant=lambda _: None)
    text = json.dumps(finite, separators=(",", ":"))  # ASCII, so also without U+2028 and U+2029
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def hash_of(text: str) -> str:
    """What admits an inline script or style to a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


if __name__ == "__main__":
    sys.exit(main())
