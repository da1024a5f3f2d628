"""Verdicts that alternate, so that an untrained model gets gradients.

`--use builders.alternating`, in a process that finds the tests' folder.
"""

from rewards import Verdict


def use(hooks) -> None:
    """Replace the verdicts of every step; those of evaluations stay."""
    hooks.verdicts = alternate


def alternate(task, problems, rollouts):
    """Verdicts of which every other is right."""
    return [Verdict(row % 2.0, "drawn") for row in range(len(rollouts.texts))]
