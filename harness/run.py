"""What every step of a run needs: `Run`, which holds the `Context` that credit methods see.

harness.load.load_run    makes it: configuration, task, model and tokenizer
harness.fsdp.shard       adds what is trained, what samples and the optimizer
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from credit.batch import Context
from credit.reward_model import RewardModel
from grpo import Policy
from harness.config import TrainConfig
from tasks.benchmarks import Loaded
from tasks.problems import Task

EVALUATION = 2**31  # instead of a step, before and after training alike


@dataclass(frozen=True)
class Ranks:
    """This process's place among all."""

    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        """The one that writes and prints."""
        return self.rank == 0


@dataclass
class Run:
    """A run. Fields without a value are set when the run gets that far."""

    config: TrainConfig
    ranks: Ranks
    # Its policy samples and scores: a whole copy of the weights, in the dtype of compute.
    context: Context
    sets: Sequence[Loaded] = ()  # the --bench sets
    notes: Sequence[str] = ()  # for the user, about what was loaded
    folder: Path = field(init=False)
    # float32 weights, sharded over the ranks; the context's policy itself on one rank in float32
    trained: Policy = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    interrupted: bool = False  # by Ctrl-C: this step is the last


def make_context(
    config: TrainConfig,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    prm: RewardModel | None = None,
) -> Context:
    """What credit methods see of a run with this configuration, before its first step."""
    return Context(
        policy=policy,
        tokenizer=tokenizer,
        task=task,
        prm=prm,
        shear=config.shear,
        seed=config.seed,
        temperature=config.sampling.temperature,
        micro_tokens=config.optimisation.micro_tokens,
    )


def seed_of(seed: int, step: int = EVALUATION, rank: int = 0) -> int:
    """A seed that depends on seed, step and rank alone: methods see the same random numbers."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
