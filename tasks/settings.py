"""The tasks, and the settings that problems, prompts and graders are made from.

    TASKS       by the name that --task takes: who makes the task, and its defaults
    Problems    a part of `harness.config.Config`

A comment beside or above a field is its flag's help. This file imports no torch, so that `--help`
answers at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Template = Literal["auto", "qwen-math", "chat", "plain"]
Sandbox = Literal["auto", "strict", "process"]  # `grading.sandbox.LEVELS`


@dataclass(frozen=True)
class Problems:
    """Problems for training, held-out problems, prompts, and how responses are graded."""

    # Problems to train on: embedded, math, code, own (math with sizes for a CPU), a task of the lab
    # (words) or one of your own (--use); default: embedded without --model, otherwise math.
    task: str = "math"
    model: str | None = None  # Hugging Face folder or hub id; by default embedded makes a model.
    data: str | None = None  # Your own problems, a file; default: the paper's set, from the hub.
    # Prompt template; auto: that of the run that made the model, qwen-math for Qwen2.5-Math,
    # otherwise the tokenizer's chat template, otherwise plain.
    template: Template = "auto"
    seed: int = 0  # Random seed of problems, new weights, sampling and shuffling.
    heldout: int = 64  # Number of problems held out of training; each is answered greedily.
    # Embedded: definitions per problem, at most 26. Above 8, with rarer mistakes and a larger
    # vocabulary.
    toy_lines: int = 5
    toy_width: int = 128  # Embedded: hidden size of the model that is made.
    # Supervised steps before training, on error-prone demonstrations (embedded), or those of
    # `--use lab.tools.warm_up`; 0: none.
    warmup_steps: int = 0
    # Time limit per response in seconds; default: 5 (math), 10 (code).
    grade_timeout: float | None = None
    sandbox: Sandbox = "auto"  # Of generated programs; auto: the strongest that works here.
    # Your own reward, FILE.py:FUNCTION or MODULE:FUNCTION; benchmarks keep their graders.
    reward: str | None = None


@dataclass(frozen=True)
class Kind:
    """A task, which --task names."""

    # MODULE:FUNCTION of (Problems, tokenizer, name of the model) -> the task and notes for the user
    make: str = "tasks.task:math"
    defaults: Mapping[str, Any] = field(default_factory=dict)  # in place of the paper's
    ignores: str = "toy_lines toy_width sandbox"  # settings that have no effect
    makes_model: bool = False  # unless --model is given; full responses have a known length
    makes_problems: bool = False
    about: str = ""  # a sentence for a run's page


TASKS = {
    # Sizes for two CPU cores. A line of work is 12 tokens; the scoring forward takes micro-batches
    # above a mini-batch.
    "embedded": Kind(
        make="tasks.toy:task",
        defaults=dict(
            heldout=512,
            warmup_steps=600,
            window=12,
            stride=6,
            prompts_per_step=16,
            max_tokens=0,
            steps=40,
            lr=1e-4,
            prompts_per_update=4,
            threads=1,
            recompute=False,
        ),
        ignores="data template sandbox",
        makes_model=True,
        makes_problems=True,
        about="The task: little programs, worked out line by line; all arithmetic is mod 10, so "
        "7*4=8.",
    ),
    "math": Kind(),
    "code": Kind(make="tasks.task:code", ignores="toy_lines toy_width"),
    # Math, with sizes for a model of 135 million parameters on two CPU cores. A step of a response
    # has about 16 tokens; spans of 12 in steps of 4 compare less than one.
    "own": Kind(
        defaults=dict(
            window=12,
            stride=4,
            prompts_per_step=4,
            max_tokens=256,
            steps=16,
            lr=2e-5,
            prompts_per_update=4,
            micro_tokens=4096,
            eval_groups=16,
            save_every=2,
            recompute=False,
        ),
    ),
}
