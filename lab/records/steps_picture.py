"""README's picture, docs/steps.svg: SHEAR's four steps on two rollouts of a default run.

Run: `python -m lab.records.steps_picture`. The rows of steps.jsonl, a right and a wrong rollout,
are the third and the first row of step 33 in the samples.jsonl of `python train.py`, and each is
closest to the other in every span that is shown; steps-frame.svg is the picture without their
tokens and weights.
"""

from lab.records.help import show_help

show_help(__doc__)

import html
from pathlib import Path
from string import Template

from harness import files

RECORDS = Path(__file__).parent
CELL = 22  # pixels of a token
FIRST, LAST = 12, 48  # three lines: the one before the first error, its own, and the next

right, wrong = files.read_lines(RECORDS / "steps.jsonl")
largest = max(right["weights"] + wrong["weights"])
fillings = {}
for name, row in {"right": right, "wrong": wrong}.items():
    cells = []
    bars = []
    for token in range(FIRST, LAST):
        x = (token - FIRST) * CELL
        share = row["weights"][token] / largest
        text = html.escape(row["tokens"][token].replace("\n", "\u21b5"))
        box = f'<rect x="{x}" width="20" height="26" rx="3" fill-opacity="{share:.2f}"/>'
        cells.append(f'{box}<text x="{x + 10}" y="18">{text}</text>')
        bars.append(f"M{x} 0v-{48 * share:.1f}h20V0z")
    fillings[name] = "".join(cells)
    fillings[f"{name}_bars"] = "".join(bars)
frame = (RECORDS / "steps-frame.svg").read_text(encoding="utf-8")
picture = Template(frame).substitute(fillings)
(RECORDS.parents[1] / "docs" / "steps.svg").write_text(picture, encoding="utf-8")
