"""The study's picture, study.svg: how far each method's mean training reward lies from GRPO's.

Run: `python -m docs.records.study_picture`. Dots are means over ten seeds, paired by seed; bars are
90% intervals by Student's t.
"""

from pathlib import Path

import numpy as np

from harness import files
from studies import compare, figures

RECORDS = Path(__file__).parent
CELLS = {  # in the order of the plan; its name, and what its wrong turns are
    "r.3": "often repaired (r.3)",
    "LP": "made by the environment,\nrarely repaired, padded (LP)",
    "r0": "never repaired (r0)",
    "r.1": "sometimes repaired (r.1)",
    "luck": "made by the environment,\nsometimes repaired (luck)",
    "T2": "impossible to repair:\nthe default task (T2)",
}
SMALLEST = 0.01  # effect of interest, by the plan

rows = files.read_lines(RECORDS / "study.jsonl", [dict])
places = np.arange(len(CELLS))
with figures.picture(RECORDS / "study.svg", 7.2, 4.2) as (axes,):
    axes.axvspan(-SMALLEST, SMALLEST, color=figures.FAINT, alpha=0.2, lw=0)
    axes.axvline(0, color=figures.INK, lw=1)
    for shift, method, colour in (
        (-0.13, "shear", figures.RIGHT),
        (0.13, "position", figures.FAINT),
    ):
        means = []
        halves = []
        for cell in CELLS:
            values = compare.differences(rows, cell, method, "grpo")
            means.append(values.mean())
            halves.append(compare.half_interval(values))
        axes.errorbar(
            means,
            places + shift,
            xerr=halves,
            fmt="o",
            color=colour,
            capsize=4,
            label=f"{method} - grpo",
        )
    axes.set(
        xlabel="difference of the mean training reward from GRPO's",
        ylabel="wrong turns are ...",
        yticks=places,
        yticklabels=CELLS.values(),
    )
    axes.invert_yaxis()
    axes.set_title("Means of ten seeds with 90% intervals; grey: too small to matter", fontsize=10)
    axes.legend(loc="lower left")
