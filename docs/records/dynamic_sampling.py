"""What dynamic sampling changes in held-out accuracy, from the rows of the comparison.

Run: `python -m docs.records.dynamic_sampling`.
"""

from pathlib import Path

from harness import files
from studies.compare import differences, with_interval

rows = files.read_lines(Path(__file__).parent / "compare.jsonl")
for method in ("grpo", "shear"):
    of_seeds = differences(rows, "--steps 20", f"{method}-dynamic", method, "sampled")
    print(method, with_interval(of_seeds))
