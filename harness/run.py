"""What every step of a run needs: `Run`, which holds the `Context` that credit rules see.

Parts                    the functions of a run that a module of `--use` may replace
harness.load.load_run    makes the run: configuration, task, model and tokenizer
harness.fsdp.shard       adds what is trained, what samples and the optimizer
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from credit.batch import Context
from grpo import PADDED, Layout, Policy, hf_generate
from harness.config import Config
from tasks.task import Task

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


def save_pretrained(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Save model and tokenizer as any tool loads them."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def padded(model: PreTrainedModel) -> Layout:
    """The layout of any model's micro-batches: padded rows."""
    return PADDED


def keep_all(model: PreTrainedModel, seed: int) -> None:
    """Train all weights of the model."""


def lessons_of_task(context: Context) -> Callable[..., float] | None:
    """The lessons of the task, if it has any, as `Task.lessons`."""
    return context.task.lessons


@dataclass
class Parts:
    """The functions of a run that a module of `--use` may replace.

    Its `use(parts, NAME=VALUE, ...)` is called before anything is loaded, and only assigns
    functions: the model is taught, adapted and sharded later, in this order. eval.py calls
    `generate` alone.
    """

    sample: Callable  # a step's problems, rollouts and verdicts, as `harness.sampling.sample_step`
    generate: Callable[..., Tensor] = hf_generate
    layout: Callable[[PreTrainedModel], Layout] = padded
    lessons: Callable[[Context], Callable[..., float] | None] = lessons_of_task
    adapt: Callable[[PreTrainedModel, int], None] = keep_all  # in place, before it is sharded
    save_model: Callable[[PreTrainedModel, PreTrainedTokenizerBase, Path], None] = save_pretrained
    # "distances", "closest" and "pool": arguments of `shear.shear_weights`
    hooks: dict[str, Callable] = field(default_factory=dict)


@dataclass
class Run:
    """A run. Fields without a value are set when the run gets that far."""

    config: Config
    ranks: Ranks
    # Its policy samples and scores: a whole copy of the weights, in the dtype of compute.
    context: Context
    parts: Parts
    notes: list[str] = field(default_factory=list)  # for the user, about what was loaded
    extra: dict[str, float] = field(default_factory=dict)  # metrics that parts add to a step's row
    folder: Path = field(init=False)
    # float32 weights, sharded over the ranks; the context's policy itself on one rank in float32
    trained: Policy = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    interrupted: bool = False  # by Ctrl-C: this step is the last


def make_context(
    config: Config,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    hooks: dict[str, Callable],
) -> Context:
    """What credit methods see of a run with this configuration, before its first step."""
    return Context(
        policy=policy,
        tokenizer=tokenizer,
        task=task,
        shear=config,
        seed=config.seed,
        temperature=config.temperature,
        micro_tokens=config.micro_tokens,
        hooks=hooks,
    )


def seed_of(seed: int, step: int = EVALUATION, rank: int = 0) -> int:
    """A seed that depends on seed, step and rank alone: methods see the same random numbers."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
