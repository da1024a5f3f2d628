"""What studies share: settings of train.py, lessons, and what a rule needs beside a policy."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lab.rules  # noqa: F401 - enters the rules
from credit.rules import RULES
from harness import fsdp
from harness.config import Config, parse_train
from harness.load import give_lessons, resolve
from harness.run import Run
from lab.rules import adapter, controls, prm
from tasks.errors import BadInput
from tasks.settings import TASKS

FAST = "lab.fast"
# By what their `prepare` is.
WITH_MODEL = {name for name, rule in RULES.items() if rule.prepare is prm.load}
WITH_ADAPTER = {name for name, rule in RULES.items() if rule.prepare is adapter.needs_adapter}
WITH_ERRORS = {name for name, rule in RULES.items() if rule.prepare is controls.needs_first_errors}
# Rules that are made of others: their arms have to name these.
MADE = {"scaled"}


def settings_of_run(words: Sequence[str]) -> Config:
    """train.py's settings by these flags, on this machine; raises BadInput.

    They use `lab.fast`, with the same numbers sooner, unless `--use` names it with options.
    """
    config = resolve(parse_train(words))
    if any(module.partition(":")[0] == FAST for module in config.use):
        return config
    return replace(config, use=(FAST, *config.use))


def teach(run: Run) -> None:
    """Teach the model the lessons of its task, and keep nothing of them on disk."""
    with tempfile.TemporaryDirectory() as folder:
        run.folder = Path(fsdp.from_main(folder, run.ranks))
        give_lessons(run)
        fsdp.gather(None, run.ranks)  # until all ranks have read it


def check_needs(config: Config) -> None:
    """Raise BadInput if a rule lacks what it needs, as far as it shows before loading."""
    task = TASKS[config.task]
    has_model = any(text.startswith("model=") for text in config.method_option)
    needs = [
        (WITH_ADAPTER, "lab.tools.lora" in " ".join(config.use), "--use lab.tools.lora"),
        (WITH_MODEL, task.makes_model or has_model, "--method-option model=NAME"),
        (WITH_ERRORS, task.makes_problems, "the true first error, which the task does not know"),
    ]
    for names, is_met, need in needs:
        if config.method in names and not is_met:
            raise BadInput(f"--method {config.method}: needs {need}")
