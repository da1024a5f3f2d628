"""The training rewards of the comparison's `grpo` and `shear` rows, as a picture.

Run: `python -m lab.records.curves`. It writes lab/records/curves.svg.
"""

from lab.records.help import show_help

show_help(__doc__)

from pathlib import Path

from lab.studies import compare, figures

RECORDS = Path(__file__).parent

trials = compare.trials_in(RECORDS / "compare.jsonl")
curves = {}  # method -> the rewards of each seed, step by step
for method in ("grpo", "shear"):
    own = compare.trials_of(trials, "confirm", "--steps 20", method)
    curves[method] = own["rewards"].tolist()
figures.reward_curves(curves, RECORDS / "curves.svg")
