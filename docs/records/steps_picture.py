"""README's picture, docs/steps.svg: SHEAR's four steps on two rollouts of a default run.

python train.py --name shear-0
python -m docs.records.steps_picture runs/shear-0
"""

import sys
from pathlib import Path

from harness.page import read_groups
from studies.figures import four_steps

four_steps(read_groups(Path(sys.argv[1])), Path(__file__).parents[1] / "steps.svg")
