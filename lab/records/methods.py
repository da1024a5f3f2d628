"""Print the tables of methods.md from their rows; run it as `python -m lab.records.methods`.

"correlation" is that of credit with the true advantages of lines, corrected for their noise, over
two seeds. `studies.compare` measured it until daaeda9.
"""

from lab.records.help import show_help

show_help(__doc__)

from pathlib import Path

import pandas as pd

from harness import files, log
from lab.records.archived import marked
from lab.studies import compare

LEFT_OUT = ["lr", "held out", "weight", "share"]  # columns

for name in ("compare", "compare-newest", "compare-rules"):
    path = Path(__file__).with_name(f"{name}.jsonl")
    trials = compare.trials_in(path)
    cell = compare.Cell("--steps 20", trials["rule"].unique())
    rows = pd.json_normalize(files.read_lines(path), max_level=1)
    measured = rows["advantages.methods"].dropna()
    table = pd.DataFrame(compare.table_of(trials, cell)).drop(columns=LEFT_OUT)
    correlations = []
    for rule in table["method"]:
        corrected = [methods.get(rule, {}).get("corrected") for methods in measured]
        correlations.append(compare.mean_of(pd.Series(corrected, dtype=float)))
    table["correlation"] = correlations
    table["method"] = table["method"].map(marked)
    print("\n".join(log.markdown(table.to_dict("records"))) + "\n")
