"""What studies share: settings of train.py, warm-up, and batches."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import lab.rules  # noqa: F401 - enters the rules
from base.config import Config, parse_train
from credit.batch import Batch
from grpo import Rollouts, group_advantages
from harness import fsdp
from harness.run import Hooks, Loaded, resolve, use, warm_up_policy
from rewards import Verdict


def settings_of_run(words: Sequence[str]) -> Config:
    """train.py's settings by these flags, on this machine; raises BadInput.

    Its functions are the plain ones, which a reader may edit; `--use lab.fast` is sooner.
    """
    config = resolve(parse_train(words))
    use(Hooks(), config.use)  # what a module refuses shows before a model is loaded
    return config


def teach(loaded: Loaded) -> None:
    """Give the model the warm-up of its task, and keep nothing of it on disk."""
    with tempfile.TemporaryDirectory() as folder:
        warm_up_policy(loaded, Path(fsdp.from_main(folder, loaded.ranks)))
        fsdp.gather(None, loaded.ranks)  # until all ranks have read it


def graded(rollouts: Rollouts, verdicts: list[Verdict], problems: list[dict]) -> Batch:
    """A batch with the advantages of Eq. (1), before it is scored."""
    batch = Batch.of(rollouts, verdicts, problems)
    batch.advantages = group_advantages(batch.rewards, batch.group_size)
    return batch
