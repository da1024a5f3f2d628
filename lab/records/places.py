"""Where weights lie around first errors, on the toy task: the tables of lab/records/diagnose.md.

    for seed in 0 1 2 3 4; do
      python -m lab.studies.diagnose --seed $seed --heldout 256 --groups 256 --continuations 0 \\
        --methods shear shear-cost first own-side position random --out runs/places-$seed
    done
    python -m lab.records.places runs/places-?/diagnose.json    # these numbers -> places.jsonl
    python -m lab.records.places                                # places.jsonl -> the tables

The rows of 24 lines, and of seed 2, are from `lab.records.quick_places`. Rows until daaeda9 call
`shear-cost` "reading cost".

A row of places.jsonl is one kind of weights of one start policy, with the AUCs of
`lab.studies.where.localisation`. There is a table for each number of lines of the task: means over
the seeds, and in brackets the lowest and the highest; of one seed, ± half of the 90% interval.
"""

from lab.records.help import show_help

show_help(__doc__)

import sys
from pathlib import Path

import pandas as pd

from harness import files, log
from lab.studies.diagnose import AUCS

ROWS = Path(__file__).with_name("places.jsonl")
SHOWN = "shear|first|own-side|position|surprisal|reading cost|shear-cost|window \\d+.*"


def rows_of(path: Path) -> list[dict]:
    """A row per kind of weights in a file of numbers."""
    found = files.read_json(path)
    rows = []
    for name, place in {**found["methods"], **found["settings"]}.items():
        row = {"lines": found["flags"]["toy_lines"], "seed": found["flags"]["seed"]}
        row |= {"weights": name, "mixed_groups": found["mixed_groups"]}
        row |= {key: value for key, value in place.items() if key.startswith("auc")}
        rows.append(row | {"rollouts": place["rollouts"]})
    return rows


def cell_of(values: pd.Series, halves: pd.Series) -> str:
    """The mean and the range of values over seeds."""
    if len(values) == 1:
        return f"{values.iloc[0]:.2f} ± {halves.iloc[0]:.2f}"
    return f"{values.mean():.2f} ({values.min():.2f}-{values.max():.2f})"


if sys.argv[1:]:
    rows = []
    for name in sys.argv[1:]:
        rows += rows_of(Path(name))
    files.write_rows(ROWS, rows)
places = pd.DataFrame(files.read_lines(ROWS))
places = places[places["weights"].str.fullmatch(SHOWN)]
for lines, of_lines in places.groupby("lines"):
    table = []
    for name, own in of_lines.groupby("weights", sort=False):
        line = {"weights": name}
        for title, measure in AUCS.items():
            line[title] = cell_of(own[measure], own[f"{measure}_half"])
        table.append(line)
    first = of_lines[of_lines["weights"] == "shear"]
    position = cell_of(first["auc_position"], first["auc_position_half"])
    print(f"{lines} lines, AUC of position {position}")
    print(first[["seed", "mixed_groups", "rollouts"]].to_string(index=False) + "\n")
    print("\n".join(log.markdown(table)) + "\n")
