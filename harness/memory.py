"""How much GPU memory a run will need, before it starts: arithmetic on the model's config and the run's flags.

    predict(config, args, world, room) -> GB by part, and of the phases sampling and training; total is the larger
    refuse_what_cannot_fit(gb, ...)    -> refuses what can never fit
    notes(predicted, device, ...)      -> the plan's lines on memory and disk, with a warning where either is too small
    rows_that_fit(model, ...)          -> how many rollouts to generate at a time

Weights, AdamW's moments and the copy that samples stay all the time. Sampling adds the larger of `generating` (cache,
logits and prefill of the rollouts generated at a time) and `scoring` (a forward pass of micro_tokens tokens). Training
adds `gradients`, `gathered` (the layers that FSDP holds whole) and `backward` (activations and logits).

tests/test_memory.py holds scoring and training against the bytes that live on a CPU: predicted are .95 to 1.3 times as
many. Left out: what a credit method adds (SHEAR's states and distances, a process reward model), CUDA's and NCCL's own
memory (1-2 GB), fragmentation (about a tenth), and models unlike Qwen2 and Llama.
"""

import argparse
import math
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from credit import lora
from grpo import HEAD_CHUNK, layers_of
from harness.parallel import Ranks
from tasks.problems import BadInput

PROMPT = 256  # tokens of a prompt, assumed: they are not known before the data is read
SHARE = 0.8  # of the free memory for the rollouts generated at a time; the rest is for what is not counted
CPU_PARAMETERS = 2.0  # billions; more of them take hours a step on a CPU


def predict(config, args: argparse.Namespace, world: int, room: float = math.inf) -> dict[str, float]:
    """GB (1e9 bytes) a GPU. Without --generate-batch as many rollouts are generated at a time as fit into `room` GB."""
    text = config.get_text_config()
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    total, trained, gathered = parameters(config, args.lora_rank)
    size = 4 if args.dtype == "float32" else 2  # bytes of a number that is computed with
    has_copy = world > 1 or size == 2  # else `parallel.shard` leaves the model as it is, and that one samples
    shards = args.shard_over or world
    gb = {"weights": 4 * total / shards, "moments": 8 * trained / shards, "copy": size * total * has_copy}  # float32
    gb["resident"] = sum(gb.values())

    rollouts = -(-args.prompts_per_step // world) * args.rollouts_per_prompt  # of the rank that has most
    width = PROMPT + args.max_tokens
    row = row_bytes(config, PROMPT, args.max_tokens, size)
    rows = max(1, int(min(args.generate_batch or SHARE * (room * 1e9 - gb["resident"]) / row, rollouts)))
    gb["generating"] = rows * row

    # Tokens of a pass: no more than there are; a rollout longer than micro_tokens goes alone.
    tokens = max(min(args.micro_tokens, rollouts * width), width)
    logits = 3 * 4 * min(HEAD_CHUNK, tokens * args.max_tokens / width) * text.vocab_size
    saved = 11 * text.hidden_size + 4 * wide  # numbers a token that autograd saves in a layer; counted on Qwen2
    kept = text.num_hidden_layers * (text.hidden_size if args.recompute else saved) * size  # bytes a token
    of_layer = (saved + 3 * wide) * size  # bytes a token; gate, up and their product have gradients, too
    gb["scoring"] = max(tokens * layer_numbers(text) * size, logits + tokens * text.hidden_size * size)
    gb["gradients"] = 4 * trained / shards
    gb["gathered"] = size * gathered * has_copy
    gb["backward"] = tokens * kept + max(tokens * of_layer, logits)
    gb["sampling"] = gb["resident"] + max(gb["generating"], gb["scoring"])
    gb["training"] = gb["resident"] + gb["gradients"] + gb["gathered"] + gb["backward"]
    gb["total"] = max(gb["sampling"], gb["training"])
    gb["checkpoint"] = (4 + size) * total + 8 * trained  # on the disk: weights, the sampling copy's, moments
    gb["parameters"] = total  # billions
    return {name: count / 1e9 for name, count in gb.items()}


def rows_that_fit(model, prompt: int, response: int) -> int:
    """How many rollouts of so many tokens the free memory of this rank's GPU holds; at least 1."""
    torch.cuda.empty_cache()  # or what training has cached counts as taken
    free, _ = torch.cuda.mem_get_info()
    return max(1, int(SHARE * free) // row_bytes(model.config, prompt, response, model.dtype.itemsize))


def row_bytes(config, prompt: int, response: int, itemsize: int) -> int:
    """Memory of a rollout in `generate`: its cache, four float32 copies of a token's logits, and what one layer holds.

    A layer holds the larger of the prompt's activations, and of keys and values copied once for every query head.
    """
    text = config.get_text_config()
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    head = 2 * (prompt + response) * head_width  # numbers
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    cache = text.num_hidden_layers * kv_heads * head
    layer = max(prompt * layer_numbers(text), text.num_attention_heads * head)  # all prompts are prefilled at once
    return itemsize * (cache + layer) + 4 * 4 * text.vocab_size


def layer_numbers(text) -> int:
    """Numbers a token that a layer holds at once where nothing is saved for a backward pass; counted on Qwen2."""
    return 6 * text.hidden_size + 3 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)


def parameters(config, rank: int = 0) -> tuple[int, int, int]:
    """Numbers of parameters with a LoRA adapter of this rank: all, trained, gathered by FSDP. Allocates nothing."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if rank:
            lora.add(model, rank, seed=0)
    total = sum(parameter.numel() for parameter in model.parameters())  # tied weights count once
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(model)]
    # Whole at a time: embeddings, head and two layers, and gradients of embeddings, head and one layer.
    return total, trained, 2 * (total - sum(layers)) + 3 * max(layers, default=0)


def refuse_what_cannot_fit(gb: dict[str, float], args: argparse.Namespace, ranks: Ranks) -> None:
    """Refuse what can never fit, whatever is sampled at a time; raises BadInput. `--force` asks for the disk alone."""
    room, free = room_gb(ranks.device), free_gb(Path(args.out))
    if gb["checkpoint"] > free:
        reason = f"a checkpoint takes {gb['checkpoint']:.3g} GB, and {free:.3g} GB of the disk are free"
        raise BadInput(f"--out {args.out}: {reason}; choose another, or free space")
    need = gb["resident"] + gb["gradients"]
    reason = remedy = ""
    if ranks.device.type == "cpu" and gb["parameters"] > CPU_PARAMETERS:
        reason = f"{gb['parameters']:.1f} billion parameters on a CPU take hours a step"
        remedy = f"use a GPU or a model of at most {CPU_PARAMETERS:.0f} billion"
    elif need > room:
        reason = f"weights, moments, gradients and the sampling copy take {need:.1f} GB a rank of {room:.1f} GB"
        remedy = "give --lora-rank 16, more GPUs or a smaller model"
    if reason and not args.force:
        raise BadInput(f"--model {args.model}: {reason}; {remedy}, or go on with --force")


def room_gb(device: torch.device) -> float:
    """What a GPU has, or the machine's memory for each of its ranks."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] / 1e9
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def free_gb(folder: Path) -> float:
    """What is free on the disk of a folder, which may have to be made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / 1e9


def notes(predicted: dict[str, float], device: torch.device, folder: Path, keep: int) -> list[str]:
    """For the plan: the prediction, what `keep` checkpoints take, and a warning where memory or disk is too small."""
    sampling, training, resident = (f"{predicted[name]:.1f} GB" for name in ("sampling", "training", "resident"))
    room, free = room_gb(device), free_gb(folder)
    lines = [
        f"memory a rank, predicted: sampling {sampling}, training {training}, of which {resident} stay all the time",
        f"a checkpoint takes {predicted['checkpoint']:.3g} GB; {keep} stay; {free:.0f} GB of the disk are free",
    ]
    if predicted["total"] > room:
        lines.append(f"WARNING: a rank has {room:.0f} GB; lower --micro-tokens or --max-tokens, or use more GPUs")
    if (keep + 1) * predicted["checkpoint"] > free:
        lines.append("WARNING: the disk is too small for that; choose another --out, or lower --keep")
    return lines
