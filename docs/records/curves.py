"""The training rewards of the comparison's `grpo` and `shear` rows, as a picture.

Run: `python -m docs.records.curves`. It writes docs/records/curves.svg and prints the means.
"""

from pathlib import Path

import numpy as np

from harness import files
from studies import figures

RECORDS = Path(__file__).parent

rows = [row for row in files.read_lines(RECORDS / "compare.jsonl") if row["stage"] == "confirm"]
curves = {}
for method in ("grpo", "shear"):
    curves[method] = np.array([row["rewards"] for row in rows if row["rule"] == method])
print(figures.reward_curves(curves, RECORDS / "curves.svg"))
