"""What studies say of a tiny run, as one line of JSON: python edited.py FOLDER.

test_edited.py runs it with a copy of the sources in which shear.py was edited.
"""

import json
import sys
from pathlib import Path

from base.files import read_lines
from lab.studies import compare, gradients

# Flags of tiny runs of studies, whose verdicts alternate.
TINY = "--use builders.alternating --toy-lines 1 --toy-width 16 --warmup-steps 1 --heldout 8 --eval-groups 2 "
TINY += "--prompts-per-step 2 --prompts-per-update 2 --threads 1"
SIZES = f"{TINY} --rollouts-per-prompt 4 --max-tokens 8 --steps 1 --window 4 --stride 2".split()


def measure(folder: Path) -> dict:
    """Cosines of the gradient test by arm, and rewards and mean weight of a trial of `compare`."""
    rows = folder / "rows.jsonl"
    gradients.main([*SIZES, "--batches", "2", "--reference", "2", "--rows", str(rows)])
    cosines = {row["arm"]: row["cos"] for row in read_lines(rows)}
    config = compare.settings_of("shear", [*SIZES, "--out", str(folder)])
    return cosines | compare.run_trial(config, "tune")


def main() -> None:
    """Print the numbers, and the exit status of both studies with `--use lab.fast`."""
    folder = Path(sys.argv[1])
    measured = measure(folder)
    flags = [*SIZES, "--use", "lab.fast", "--rows", str(folder / "other.jsonl")]
    measured["statuses"] = [study.main(flags) for study in (gradients, compare)]
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
