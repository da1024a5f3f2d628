"""Memory, disk and hours of a run on GPUs that are not here; reads no weights.

    python -m lab.tools.plan H100 8 --model Qwen/Qwen2.5-Math-7B      # 8 of them; flags of train.py

Memory is what `harness/models.py` predicts. Hours are those of responses that are all as long as
they may be. They are reckoned from two steps on one H200 (docs/hardware.md, 2026-11-26): sampling
waits for Python, so a decoding step takes nearly the same time for any number of rows; scoring and
updates are bound by the GPU's arithmetic.

Left out: reading the keys and values of long responses, which those steps, whose rows had mostly
ended, did little of; evaluations; the warm-up; a second node.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Literal

import torch
import tyro
from transformers import PreTrainedModel

from base.config import TASKS, Config, parse_train
from grpo import HEAD_CHUNK
from harness import log
from harness import models as memory
from harness.models import load_shapes
from harness.run import resolve
from lab.tools.command import command
from tasks import toy

# Memory in GB and peak TFLOP/s in bfloat16.
GPUS = {"A100": (80, 312), "H100": (80, 989), "H200": (141, 989)}
# Seconds of a decoding step, and more of it per parameter: 24 ms with 1.5 billion (72.8 s for 3,000
# steps), 46 ms with 7.6 billion and an adapter (23.1 s for 500).
DECODING = 19e-3
PER_PARAMETER = 3.6e-12
# The share of the peak FLOP/s in scoring and training: 27% and 36% in these steps.
TRAINING = 0.3
PROMPT = 256  # assumed tokens per prompt
FLOPS = 10  # per token and parameter: 2 to score, 6 to train, 2 to recompute


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan of a run; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)

    def plan(
        gpu: tyro.conf.Positional[Literal["A100", "H100", "H200"]],
        ranks: tyro.conf.Positional[int],
    ) -> None:
        """Memory, disk and hours of a run on so many GPUs; flags of train.py follow."""
        for line in foresee(gpu, ranks, configure(words[2:])):
            log.say(line)

    return command("lab.tools.plan", plan)(words[:2])


def configure(flags: list[str]) -> Config:
    """The configuration of a run on a GPU that is not here; raises BadInput."""
    asked = parse_train(flags)
    config = resolve(replace(asked, device="cpu"))
    dtype = asked.dtype
    if dtype == "auto":
        dtype = "float32" if TASKS[config.task].makes_model else "bfloat16"
    return replace(config, device="cuda", dtype=dtype)


def foresee(gpu: str, world: int, config: Config) -> list[str]:
    """Lines on the memory, the disk and the hours of a run on `world` GPUs; raises BadInput."""
    room, peak = GPUS[gpu]
    if config.model:
        model = load_shapes(config.model)
    else:
        model = toy.make_model(config.toy_lines, config.seed, config.toy_width)
    parameters = model.num_parameters()
    stay = memory.resident_gb(model, config, world)
    batch = config.generate_batch or memory.choose_batch(
        model.config, config, room - stay, PROMPT, config.max_tokens
    )
    config = replace(config, generate_batch=batch)
    sampling, training = peaks_gb(model, config, world)
    lines = [
        f"memory per rank, predicted: {stay:.1f} GB stay; sampling {sampling:.1f} GB, training "
        f"{training:.1f} GB and activations"
    ]
    if max(sampling, training) > room:
        lines.append(f"WARNING: a rank has {room} GB; lower --generate-batch, or use more GPUs")

    steps = config.steps
    of_rank = math.ceil(config.prompts_per_step / world) * config.rollouts_per_prompt
    batches = math.ceil(of_rank / batch)
    decoding = DECODING + PER_PARAMETER * parameters  # seconds
    sample = steps * batches * config.max_tokens * decoding
    responses = steps * config.prompts_per_step * config.rollouts_per_prompt
    tokens = responses * config.max_tokens
    train = FLOPS * tokens * parameters / (TRAINING * world * peak * 1e12)
    return [
        *lines,
        f"a checkpoint takes {memory.checkpoint_gb(model, config):.3g} GB; up to {config.keep + 1} "
        "are on the disk at a time",
        f"about {in_words(sample + train)} on {world} {gpu} if all {responses:,} responses have "
        f"{config.max_tokens} tokens, less if they are shorter: {in_words(sample)} of sampling, "
        f"{in_words(train)} of scoring and updates",
        f"assumes {1000 * decoding:.2g} ms per decoding step, {batches} batch(es) of at most "
        f"{min(batch, of_rank)} rows per step, and {TRAINING:.0%} of the peak FLOP/s in scoring "
        "and updates, as measured on one H200 (docs/hardware.md); measure one step with --steps 1 "
        "first",
    ]


def peaks_gb(model: PreTrainedModel, config: Config, world: int) -> tuple[float, float]:
    """GB on the fullest rank while it samples --generate-batch rollouts, and while it trains."""
    stay = memory.resident_gb(model, config, world)
    size = getattr(torch, config.dtype).itemsize
    groups = -(-config.prompts_per_step // world)  # on the rank with the most
    rollouts = min(config.generate_batch, groups * config.rollouts_per_prompt)
    row = memory.row_bytes(model.config, PROMPT, config.max_tokens, size)
    gradients = 4 * model.num_parameters(only_trainable=True) / world
    # float32 logits, their softmax and their gradient
    logits = 3 * 4 * HEAD_CHUNK * model.config.get_text_config().vocab_size
    return stay + rollouts * row / 1e9, stay + (gradients + logits) / 1e9


def in_words(seconds: float) -> str:
    """A time as hours, or as h:mm:ss below ten hours."""
    hours = seconds / 3600
    return f"{hours:,.0f} hours" if hours >= 10 else f"{timedelta(seconds=math.ceil(seconds))} h"


if __name__ == "__main__":
    sys.exit(main())
