"""Stand-ins for what samples, for the machine and for other ranks, wherever ours call them.

Where a function moves, this file changes, and no test.
"""

from collections.abc import Callable

import pytest

SAMPLING = "harness.run", "eval"


def replace_sampler(
    monkeypatch: pytest.MonkeyPatch, rollout: Callable | None, *others: str
) -> None:
    """Let `rollout` answer in the model's place, in other modules too; None: nothing is sampled."""
    for module in [*SAMPLING, *others]:
        monkeypatch.setattr(f"{module}.rollout", rollout)


def generate_together(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the default of --generate-batch be `count`, whatever memory this machine has."""
    monkeypatch.setattr("harness.models.ON_CPU", count)


def hear_no_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank of several, which runs alone in this process, gather what it has itself."""
    for name, alone in {
        "gather": lambda value, ranks: [value],
        "total": lambda sums, ranks: sums,
    }.items():
        monkeypatch.setattr(f"harness.fsdp.{name}", alone)
