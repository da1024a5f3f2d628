"""README's picture, docs/steps.svg: SHEAR's four steps on two rollouts of a default run.

Run: `python -m docs.records.steps_picture`. A row of steps.jsonl has three lines of a rollout, and
each token's weight over the group's largest; steps-frame.svg is the picture without them.
"""

import html
from pathlib import Path
from string import Template

from harness import files

RECORDS = Path(__file__).parent
CELL = 22  # pixels of a token

fillings = {}
for row in files.read_lines(RECORDS / "steps.jsonl"):
    cells = []
    bars = []
    for number, share in enumerate(row["shares"]):
        x = number * CELL
        text = html.escape(row["tokens"][number].replace("\n", "\u21b5"))
        box = f'<rect x="{x}" width="20" height="26" rx="3" fill-opacity="{share:.2f}"/>'
        cells.append(f'{box}<text x="{x + 10}" y="18">{text}</text>')
        bars.append(f"M{x} 0v-{48 * share:.1f}h20V0z")
    fillings[row["name"]] = "".join(cells)
    fillings[f"{row['name']}_bars"] = "".join(bars)
frame = (RECORDS / "steps-frame.svg").read_text(encoding="utf-8")
picture = Template(frame).substitute(fillings)
(RECORDS.parent / "steps.svg").write_text(picture, encoding="utf-8")
