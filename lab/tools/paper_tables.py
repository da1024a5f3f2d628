"""Tables 1 and 2 of arXiv 2604.23318, and which of their models a name means.

Numbers are in percent: mean and standard deviation of three seeds on math, the mean alone on code
(its deviation is NaN). Each run's numbers are from its best checkpoint, selected on these very
sets. The averages, under "math" and "code", are the paper's own. On Qwen2.5-Math-7B two of them
differ from the means of their rows by more than rounding: SHEAR's 51.2 (mean 50.9) and
PRM(Reshape adv.)'s 49.6 (mean 49.5).
"""

import csv
import re
from pathlib import Path

TABLES = Path(__file__).with_suffix(".csv")


def read_tables() -> dict[str, dict[str, dict[str, tuple[float, float]]]]:
    """The tables: model -> method -> benchmark or suite -> mean and standard deviation."""
    tables: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    with TABLES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            methods = tables.setdefault(row.pop("model"), {})
            cells = methods.setdefault(row.pop("method"), {})
            for benchmark, cell in row.items():
                mean, _, deviation = cell.partition(" ± ")
                if mean:
                    cells[benchmark] = float(mean), float(deviation or "nan")
    return tables


PAPER_TABLES = read_tables()


def backbone_of(name: str) -> str | None:
    """The paper's model that a hub id or folder names: Qwen/Qwen2.5-14B is Qwen2.5-14B-Base.

    None for any other model, such as one that was trained further (Qwen2.5-14B-Instruct).
    """
    for backbone in PAPER_TABLES:
        if plain(backbone) == plain(Path(name).name):
            return backbone
    return None


def plain(name: str) -> str:
    """A model's name in lower case, without punctuation, "meta" before it and "base" after it."""
    return re.sub("[-_.]", "", name.lower()).removeprefix("meta").removesuffix("base")
