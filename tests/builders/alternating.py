"""Verdicts that alternate, so that an untrained model gets gradients.

`--use builders.alternating`, in a process that finds the tests' folder.
"""

from rewards import Verdict
from tasks.task import Task

PLAIN = Task.verdicts


def use(hooks) -> None:
    """Replace the verdicts of groups; those of greedy responses stay."""
    Task.verdicts = alternate


def alternate(task, problems, rollouts):
    """Verdicts of which every other is right."""
    if len(problems) == len(rollouts.texts):
        return PLAIN(task, problems, rollouts)
    return [Verdict(row % 2.0, "drawn") for row in range(len(rollouts.texts))]
