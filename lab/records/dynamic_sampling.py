"""What dynamic sampling changes in held-out accuracy, from the rows of the comparison.

Run: `python -m lab.records.dynamic_sampling`.
"""

from lab.records.help import show_help

show_help(__doc__)

from pathlib import Path

from lab.studies.compare import outcomes_of, trials_in, with_interval

trials = trials_in(Path(__file__).parent / "compare.jsonl")
for method in ("grpo", "shear"):
    more = outcomes_of(trials, "--steps 20", f"{method}-dynamic")
    more -= outcomes_of(trials, "--steps 20", method)  # by seed
    print(method, with_interval(more["sampled"]))
