"""The study's picture, study.svg: how far each method's mean training reward lies from GRPO's.

Run: `python -m docs.records.study_picture`. Dots are means over ten seeds, paired by seed; bars are
90% intervals by Student's t.
"""

from pathlib import Path

from scipy import stats

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
with figures.picture(RECORDS / "study.svg", 7.2, 4.2) as (axes,):
    axes.axvspan(-SMALLEST, SMALLEST, color=figures.FAINT, alpha=0.2, lw=0)
    axes.axvline(0, color=figures.INK, lw=1)
    for shift, method, colour in (
        (-0.13, "shear", figures.RIGHT),
        (0.13, "position", figures.FAINT),
    ):
        for place, cell in enumerate(CELLS):
            values = compare.differences(rows, cell, method, "grpo")
            half = stats.t.ppf(0.95, len(values) - 1) * stats.sem(values)
            label = f"{method} - grpo" if place == 0 else None
            axes.errorbar(
                values.mean(),
                place + shift,
                xerr=half,
                fmt="o",
                color=colour,
                capsize=4,
                label=label,
            )
    axes.set(
        xlabel="difference of the mean training reward from GRPO's",
        ylabel="wrong turns are ...",
        yticks=range(len(CELLS)),
        yticklabels=CELLS.values(),
    )
    axes.invert_yaxis()
    axes.set_title("Means of ten seeds with 90% intervals; grey: too small to matter", fontsize=10)
    axes.legend(loc="lower left")
