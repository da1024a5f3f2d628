"""Memory: how many rollouts to generate at a time, and a warning where a run may not fit.

    resident_gb(model, config, world)    what stays on each GPU: weights, moments, a copy
    choose_batch(shape, config, ...)     as many rollouts as fit beside it
    memory_notes(model, config, ranks)   the plan's lines on memory and disk

Weights and AdamW's moments are float32 and spread over the ranks; each rank also has a whole copy
of the weights, in the dtype of compute, which samples.

Left out: activations, the layers that FSDP holds whole, the memory of a credit method
(SHEAR's states and distances, a process reward model), lessons (16 bytes per parameter, on rank 0),
CUDA's and NCCL's own memory (1-2 GB), fragmentation (about a tenth).
"""

import os
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from grpo import AT_ONCE
from harness.config import Config, Machine
from harness.run import Ranks

# Share of a GPU's room for rollouts generated together; the rest is for what `row_bytes` omits.
SHARE = 0.8
CUDA = 2.0  # GB, at most, that CUDA and NCCL take for themselves


def resident_gb(model: PreTrainedModel, config: Config, world: int) -> float:
    """GB (1e9 bytes) that stay on each of `world` GPUs; of `model` only the shapes are read."""
    total = model.num_parameters()  # tied ones once
    trained = model.num_parameters(only_trainable=True)  # fewer with an adapter
    size = getattr(torch, config.dtype).itemsize
    # With one rank in float32 `fsdp.shard` makes no copy: the trained model itself samples.
    has_copy = world > 1 or size == 2
    return ((4 * total + 8 * trained) / world + size * total * has_copy) / 1e9


def choose_batch(
    shape: PreTrainedConfig, machine: Machine, room: float, prompt: int, response: int
) -> int:
    """How many rollouts are generated together where --generate-batch does not say; at least 1.

    On a GPU as many as fit into `room` GB, with this many tokens. The sampled tokens depend on the
    number, so `room` is what a command leaves of the whole GPU, not what is free at the time.
    """
    if machine.device == "cpu":
        return AT_ONCE
    row = row_bytes(shape, prompt, response, getattr(torch, machine.dtype).itemsize)
    return max(1, int(SHARE * (room - CUDA) * 1e9 / row))


def row_bytes(shape: PreTrainedConfig, prompt: int, response: int, itemsize: int) -> int:
    """Bytes per rollout in `generate`, with numbers of `itemsize` bytes.

    They are its cache for `prompt` and `response` tokens, four float32 copies of one token's
    logits, and the working memory of one layer. A layer works with the prompt's activations at
    first, then with keys and values that are copied for every query head; the larger of the two
    counts.
    """
    text = shape.get_text_config()
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    head = 2 * (prompt + response) * head_width  # numbers in the keys and values of one head
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    cache = text.num_hidden_layers * kv_heads * head
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    prefill = prompt * (6 * text.hidden_size + 3 * wide)  # counted on Qwen2
    layer = max(prefill, text.num_attention_heads * head)
    return itemsize * (cache + layer) + 4 * 4 * text.vocab_size


def memory_notes(model: PreTrainedModel, config: Config, ranks: Ranks) -> list[str]:
    """The plan's lines on memory and disk, with warnings where one is too small."""
    stay = resident_gb(model, config, ranks.world)
    gradients = 4 * model.num_parameters(only_trainable=True) / ranks.world / 1e9
    room = room_gb(ranks.device)
    disk = checkpoint_gb(model, config)
    free = free_gb(Path(config.out))
    notes = [
        f"memory per rank: {stay:.1f} GB stay, {stay + gradients:.1f} GB and activations in "
        f"training, of {room:.0f} GB; a checkpoint takes {disk:.3g} GB of the disk's {free:.0f} GB"
    ]
    if stay + gradients > room:
        notes.append("WARNING: memory is too small; use more GPUs, or a smaller model")
    if (config.keep + 1) * disk > free:  # one more while it is written
        notes.append("WARNING: the disk is too small; free space, or choose another --out")
    return notes


def checkpoint_gb(model: PreTrainedModel, config: Config) -> float:
    """GB of a checkpoint: the weights, those of the sampling copy, the moments."""
    size = getattr(torch, config.dtype).itemsize
    trained = model.num_parameters(only_trainable=True)
    return ((4 + size) * model.num_parameters() + 8 * trained) / 1e9


def room_gb(device: torch.device) -> float:
    """GB of the GPU's memory; without a GPU, of each rank's share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] / 1e9
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return size / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def free_gb(folder: Path) -> float:
    """Free GB on the disk of a folder, which may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / 1e9
