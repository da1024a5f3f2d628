"""Tables 1 and 2 of arXiv 2604.23318, and which of their models a name means.

Percent: mean and standard deviation of three seeds on math, the mean alone on code (its deviation
is NaN). Each number is that of a run's best checkpoint on these very sets. The averages, under
"math" and "code", are the paper's own; on Qwen2.5-Math-7B SHEAR's 51.2 and PRM(Reshape adv.)'s 49.6
are of numbers whose means are 50.9 and 49.5.
"""

import csv
import re
from collections.abc import Iterable
from pathlib import Path

TABLES = Path(__file__).with_suffix(".csv")
MATH = ("aime24", "aime25", "amc23", "math500", "olympiadbench", "math")
CODE = ("humaneval", "humaneval+", "mbpp", "mbpp+", "livecodebench", "code")


def read_tables() -> dict[str, dict[str, dict[str, tuple[float, float]]]]:
    """The tables: model -> method -> benchmark -> mean and standard deviation."""
    tables: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    with TABLES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            cells = {}
            for benchmark in (*CODE, *MATH):
                mean, _, deviation = row[benchmark].partition(" ± ")
                if mean:
                    cells[benchmark] = float(mean), float(deviation or "nan")
            tables.setdefault(row["model"], {})[row["method"]] = cells
    return tables


PAPER = read_tables()


def backbone_of(name: str) -> str | None:
    """Which of the paper's models this is, by its name."""
    plain = re.sub("[-_.]", "", name.lower())
    keys = {
        "qwen25math7b": "Qwen2.5-Math-7B",
        "qwen25coder7b": "Qwen2.5-Coder-7B",
        "llama318b": "Llama3.1-8B-Instruct",
        "qwen2514b": "Qwen2.5-14B-Base",
    }
    return next((backbone for key, backbone in keys.items() if key in plain), None)


def suite_of(names: Iterable[str]) -> str | None:
    """The suite whose benchmarks these are, all of them: "math", "code" or None."""
    return next((suite for *members, suite in (MATH, CODE) if set(members) == set(names)), None)
