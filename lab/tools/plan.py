"""Memory, disk and hours of a run on GPUs that are not here; reads no weights.

    python -m lab.tools.plan H100 8 --model Qwen/Qwen2.5-Math-7B      # 8 of them; flags of train.py

Memory is what `harness/models.py` predicts, and the rollouts of a step are put into batches as
train.py does. Hours are those of responses that are all as long as they may be. They are reckoned
from two steps on one H200 (docs/hardware.md, 2026-11-26): sampling waits for Python, so a decoding
step takes nearly the same time for any number of rows; scoring and updates are bound by the GPU's
arithmetic. Those steps' rows had mostly ended, so reading long caches is added, and makes a range.

Left out: evaluations; the warm-up; a second node.
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
from base.errors import BadInput
from grpo import HEAD_CHUNK, pack, token_ids
from harness import fsdp, log
from harness import models as memory
from harness.models import context_of, load_shapes, load_tokenizer
from harness.run import make_task, resolve
from lab.tools.command import command
from tasks import toy

# Memory in GB, peak TFLOP/s in bfloat16, and TB/s of memory.
GPUS = {"A100": (80, 312, 2.0), "H100": (80, 989, 3.35), "H200": (141, 989, 4.8)}
# Seconds of a decoding step, and more of it per parameter: 24 ms with 1.5 billion (72.8 s for 3,000
# steps), 46 ms with 7.6 billion and an adapter that was not merged (23.1 s for 500). Both have 28
# layers, so without the adapter they may take nearly the same time.
DECODING = 19e-3
PER_PARAMETER = 3.6e-12
PER_LAYER = 24e-3 / 28
# The share of the peak FLOP/s in scoring and training: 27% and 36% in these steps.
TRAINING = 0.3
PROMPT = 256  # tokens per prompt, where the problems cannot be read
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
    room, peak, bandwidth = GPUS[gpu]
    if config.model:
        model = load_shapes(config.model)
    else:
        model = toy.make_model(config.toy_lines, config.seed, config.toy_width)
    lengths, longest, note = prompt_lengths(config, model, world)
    stay = memory.resident_gb(model, config, world)
    batch = memory.choose_batch(model.config, config, room - stay, longest, config.max_tokens)
    config = replace(config, generate_batch=batch)
    sampling, training = peaks_gb(model, config, world, longest)
    lines = [
        f"memory per rank, predicted: {stay:.1f} GB stay; sampling {sampling:.1f} GB, training "
        f"{training:.1f} GB and activations"
    ]
    if max(sampling, training) > room:
        lines.append(f"WARNING: a rank has {room} GB; lower --generate-batch, or use more GPUs")

    rows = [length + config.max_tokens for length in lengths]
    batches = pack(range(len(rows)), rows, batch * (longest + config.max_tokens))
    prompt = sum(lengths) // len(lengths)
    fewest, most = decoding_seconds(model, config, max(map(len, batches)), prompt, bandwidth)
    decoded = config.steps * len(batches) * config.max_tokens  # decoding steps
    responses = config.steps * config.prompts_per_step * config.rollouts_per_prompt
    tokens = responses * config.max_tokens
    train = FLOPS * tokens * model.num_parameters() / (TRAINING * world * peak * 1e12)
    return [
        *lines,
        f"a checkpoint takes {memory.checkpoint_gb(model, config):.3g} GB; up to {config.keep + 1} "
        "are on the disk at a time",
        f"{in_words(decoded * fewest + train)} to {in_words(decoded * most + train)} on {world} "
        f"{gpu} if all {responses:,} responses have {config.max_tokens} tokens: "
        f"{in_words(decoded * fewest)} to {in_words(decoded * most)} of sampling, and "
        f"{in_words(train)} of scoring and updates, which take less if responses are shorter; a "
        "batch ends with its longest response",
        f"assumes {note}, {len(batches)} batch(es) of at most {max(map(len, batches))} rows per "
        f"step, {1000 * fewest:.2g} to {1000 * most:.2g} ms per decoding step, and {TRAINING:.0%} "
        "of the peak FLOP/s in scoring and updates, from one H200 (docs/hardware.md); measure one "
        "step with --steps 1 first",
    ]


def prompt_lengths(
    config: Config, model: PreTrainedModel, world: int
) -> tuple[list[int], int, str]:
    """Tokens of the prompts of rank 0's rollouts in the first step, those of the longest, a note.

    The problems and their prompts are made as train.py makes them, where the tokenizer and the data
    can be read, and PROMPT is assumed elsewhere.
    """
    try:
        if config.model:
            tokenizer = load_tokenizer("--model", config.model)
        else:
            tokenizer = toy.make_tokenizer(config.toy_lines)
        config, task, _ = make_task(config, tokenizer, context_of(model))
    except BadInput as error:
        count = -(-config.prompts_per_step // world) * config.rollouts_per_prompt
        return [PROMPT] * count, PROMPT, f"prompts of {PROMPT} tokens ({error})"
    prompts = token_ids(tokenizer, list(map(task.prompt, task.train + task.heldout)))
    drawn = task.draw(0, config.prompts_per_step, config.seed)
    own = fsdp.share(drawn, fsdp.Ranks(0, world, torch.device("cpu")))
    lengths = []
    for ids in token_ids(tokenizer, list(map(task.prompt, own))):
        lengths += [len(ids)] * config.rollouts_per_prompt
    longest = max(map(len, prompts))
    return lengths, longest, f"the prompts of the first step, of up to {longest} tokens in all"


def decoding_seconds(
    model: PreTrainedModel, config: Config, rows: int, prompt: int, bandwidth: float
) -> tuple[float, float]:
    """Seconds of a decoding step of so many rows: at least, and at most.

    At least what Python took per layer with 1.5 billion parameters and no adapter, and what reading
    the weights and half of the cache once takes. At most the line through both measured steps, and
    reading, copying and writing that cache.
    """
    text = model.config.get_text_config()
    parameters = model.num_parameters()
    size = getattr(torch, config.dtype).itemsize
    cache = rows * memory.row_bytes(model.config, 0, prompt + config.max_tokens // 2, size)
    weights = size * parameters
    fewest = max(PER_LAYER * text.num_hidden_layers, (weights + cache) / (bandwidth * 1e12))
    return fewest, DECODING + PER_PARAMETER * parameters + 3 * cache / (bandwidth * 1e12)


def peaks_gb(
    model: PreTrainedModel, config: Config, world: int, prompt: int = PROMPT
) -> tuple[float, float]:
    """GB on the fullest rank while it samples --generate-batch rollouts, and while it trains."""
    stay = memory.resident_gb(model, config, world)
    size = getattr(torch, config.dtype).itemsize
    groups = -(-config.prompts_per_step // world)  # on the rank with the most
    rollouts = min(config.generate_batch, groups * config.rollouts_per_prompt)
    row = memory.row_bytes(model.config, prompt, config.max_tokens, size)
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
