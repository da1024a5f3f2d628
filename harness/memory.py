"""How much GPU memory a run will need, computed from the model's shapes and the run's flags.

    predict(model, config, world)    GB per GPU that stay, and of sampling and training
    choose_batch(model_config, ...)  how many rollouts are generated together by default
    plan(model, config, ranks)       its lines on memory and disk; raises BadInput where either can
                                     never suffice

Weights, AdamW's moments and the sampling copy stay in memory throughout. Sampling adds the rollouts
that are generated together (`row_bytes` each); training adds gradients and logits.

Left out: activations, the layers that FSDP holds whole, the memory of a credit method (SHEAR's
states and distances, a process reward model), the lessons of `--task words` (16 bytes per
parameter, on rank 0), CUDA's and NCCL's own memory (1-2 GB), fragmentation (about a tenth).
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpo import AT_ONCE, HEAD_CHUNK
from harness.config import Machine, TrainConfig
from harness.files import checkpoints_of
from harness.run import Ranks
from tasks.errors import BadInput
from tasks.problems import Task

PROMPT = 256  # assumed tokens per prompt, in what is printed
# Share of a GPU's room for rollouts generated together; the rest is for what `row_bytes` omits.
SHARE = 0.8
CUDA = 2.0  # GB, at most, that CUDA and NCCL take for themselves


def predict(model: PreTrainedModel, config: TrainConfig, world: int) -> dict[str, float]:
    """The predicted memory in GB (1e9 bytes) per GPU, by part; of `model` only the shapes are read.

    If --generate-batch is not chosen yet, all rollouts of a rank are generated together.
    """
    total = model.num_parameters()  # tied ones once
    trained = model.num_parameters(only_trainable=True)  # fewer with an adapter
    size = 4 if config.machine.dtype == "float32" else 2  # bytes per number
    # With one rank in float32 `fsdp.shard` makes no copy: the trained model itself samples.
    has_copy = world > 1 or size == 2
    shards = config.machine.shard_over or world
    resident = (4 * total + 8 * trained) / shards + size * total * has_copy  # bytes
    # float32 logits, their softmax and their gradient
    logits = 3 * 4 * HEAD_CHUNK * model.config.get_text_config().vocab_size
    groups = -(-config.sampling.prompts_per_step // world)  # on the rank with the most
    rollouts = groups * config.sampling.rollouts_per_prompt
    row = row_bytes(model.config, PROMPT, config.sampling.max_tokens, size)
    parts = {
        "resident": resident,
        "gradients": 4 * trained / shards,
        "sampling": resident + row * min(config.machine.generate_batch or rollouts, rollouts),
        "training": resident + 4 * trained / shards + logits,
        # on disk: the weights, those of the sampling copy, the moments
        "checkpoint": (4 + size) * total + 8 * trained,
        "model": size * total,  # on disk
    }
    return {name: count / 1e9 for name, count in parts.items()}


def choose_batch(
    model_config: PreTrainedConfig, machine: Machine, room: float, prompt: int, response: int
) -> int:
    """How many rollouts are generated together where --generate-batch does not say; at least 1.

    On a GPU as many as fit into `room` GB, with this many tokens. The sampled tokens depend on the
    number, so `room` is what a command leaves of the whole GPU, not what is free at the time.
    """
    if machine.device == "cpu":
        return AT_ONCE
    row = row_bytes(model_config, prompt, response, getattr(torch, machine.dtype).itemsize)
    return max(1, int(SHARE * (room - CUDA) * 1e9 / row))


def row_bytes(config: PreTrainedConfig, prompt: int, response: int, itemsize: int) -> int:
    """Bytes per rollout in `generate`, with numbers of `itemsize` bytes.

    They are its cache for `prompt` and `response` tokens, four float32 copies of one token's
    logits, and the working memory of one layer. A layer works with the prompt's activations at
    first, then with keys and values that are copied for every query head; the larger of the two
    counts.
    """
    text = config.get_text_config()
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    head = 2 * (prompt + response) * head_width  # numbers in the keys and values of one head
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    cache = text.num_hidden_layers * kv_heads * head
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    prefill = prompt * (6 * text.hidden_size + 3 * wide)  # counted on Qwen2
    layer = max(prefill, text.num_attention_heads * head)
    return itemsize * (cache + layer) + 4 * 4 * text.vocab_size


def gb_of(model: torch.nn.Module) -> float:
    """GB of a model's weights."""
    return sum(weight.nbytes for weight in model.parameters()) / 1e9


def longest_prompt(task: Task, problems: Sequence[dict], tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokens of the prompt with the longest problem, by characters."""
    longest = max(problems, key=lambda problem: len(problem["problem"]))
    return len(tokenizer(task.prompt(longest), add_special_tokens=False)["input_ids"])


def plan(model: PreTrainedModel, config: TrainConfig, ranks: Ranks) -> list[str]:
    """The plan's lines on predicted memory and disk, with a warning where memory is too small.

    Raises BadInput if the checkpoints that are kept do not fit on the disk.
    """
    room = room_gb(ranks.device)
    gb = predict(model, config, ranks.world)
    lines = memory_lines(gb, room)
    free = free_gb(Path(config.out))
    checkpoint = f"a checkpoint takes {gb['checkpoint']:.3g} GB"
    count = checkpoints_at_once(config)
    if config.checkpoints.resume:  # those that are there have taken their room
        count = max(1, count - len(checkpoints_of(Path(config.out) / str(config.name))))
    kept = 0  # models that --keep-models leaves
    if config.checkpoints.keep_models:
        kept = config.optimisation.steps // config.checkpoints.keep_models
        checkpoint += f" and a kept model {gb['model']:.3g} GB"
    need = count * gb["checkpoint"] + kept * gb["model"]
    if need > free:
        raise BadInput(
            f"--out {config.out}: {checkpoint}, {count + kept} need room, and {free:.3g} GB of the "
            "disk are free; choose another, free space, or lower --keep"
        )
    disk = f"{checkpoint}; {config.checkpoints.keep} stay, and one more while it is written; "
    disk += f"{free:.0f} GB of the disk are free"
    return [*lines, disk]


def checkpoints_at_once(config: TrainConfig) -> int:
    """The most checkpoints on the disk: an old one goes after the new one is written."""
    saved = -(-config.optimisation.steps // config.checkpoints.save_every)
    return min(saved, config.checkpoints.keep + 1)


def memory_lines(gb: dict[str, float], room: float) -> list[str]:
    """A line on predicted memory, and a warning if it exceeds the `room` of a rank."""
    lines = [
        f"memory per rank, predicted: {gb['resident']:.1f} GB stay; sampling "
        f"{gb['sampling']:.1f} GB, training {gb['training']:.1f} GB and activations"
    ]
    if max(gb["sampling"], gb["training"]) > room:
        lines.append(
            f"WARNING: a rank has {room:.0f} GB; lower --generate-batch or --max-tokens, or use "
            "more GPUs"
        )
    return lines


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
