"""Tables whose rows name their kind: a few rows of each kind run by default, all of them in CI."""

from collections import Counter

import pytest

BY_DEFAULT = 2  # rows of each kind


def by_kind(rows: list[dict], name: str) -> list:
    """A parameter for each row, called by its column `name`; all but the first of a kind are long.

    The kind is the column `about`.
    """
    seen: Counter = Counter()
    parameters = []
    for row in rows:
        seen[row["about"]] += 1
        marks = [pytest.mark.long] if seen[row["about"]] > BY_DEFAULT else []
        parameters.append(pytest.param(row, id=row[name], marks=marks))
    return parameters
