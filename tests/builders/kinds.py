"""Tables whose rows name their kind: a few of each kind run by default, all of them in CI."""

from collections import Counter

import pytest


def by_kind(rows: list[dict], name: str, by_default: int) -> list:
    """A parameter for each row, called by its column `name`.

    The first `by_default` rows of each kind run by default, the others are long. The kind is the
    column `about`, by verdict in `same` if there is one.
    """
    seen: Counter = Counter()
    parameters = []
    for row in rows:
        kind = row["about"], row.get("same")
        seen[kind] += 1
        marks = [pytest.mark.long] if seen[kind] > by_default else []
        parameters.append(pytest.param(row, id=row[name], marks=marks))
    return parameters
