"""Another task: of the embedded task's problems only the hard ones, with two products or more.

python train.py --use lab.learn.my_task --task my_task
"""

from dataclasses import replace
from typing import Any

from base.config import TASKS, Problems
from tasks import toy
from tasks.task import Task


def task(settings: Problems, tokenizer: Any, name: str) -> tuple[Task, list[str]]:
    """The task, and notes for the user."""
    whole, notes = toy.task(settings, tokenizer, name)
    train = [problem for problem in whole.train if problem["problem"].count("*") > 1]
    heldout = [problem for problem in whole.heldout if problem["problem"].count("*") > 1]
    return replace(whole, name="my_task", train=train, heldout=heldout), notes


TASKS["my_task"] = replace(TASKS["embedded"], make=f"{__name__}:task")  # with its model and sizes
