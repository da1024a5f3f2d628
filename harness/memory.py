"""How much GPU memory a run will need, before it starts: arithmetic on the model's config and the run's flags.

    predict(config, args, world) -> GB by part, and of the two phases: sampling, training; total is the larger one
    plan_line(parts)             -> the same as one line for the plan

`config` is that of a Qwen2- or Llama-like model. What stays all the time, a GPU:

    weights     float32, 4 bytes a parameter, divided by the ranks that hold one set of weights, as are the next two
    moments     AdamW's two, 8 bytes
    gradients   float32, 4 bytes; while training
    copy        the whole model that samples, in the dtype of compute; none where one rank computes in float32
    judge       the process reward model of prm and pure

Sampling adds the cache, or scoring, or credit; training adds the gathered weights and one of its moments (`_together`):

    cache       keys and values of the rollouts generated at a time, and four float32 copies of a token's logits
    prefill     beside the cache, a layer's pass over the prompts, or transformers' copies of keys and values
    scoring     one forward pass of micro_tokens, and a block's states where the method reads them
    credit      SHEAR's states of a block of groups and token-token distances of one; or another method's largest pass
    gathered    FSDP's whole weights in the dtype of compute: embeddings, head and two layers; gradients of the same
    inputs      what each layer keeps of micro_tokens tokens: its input, or without recomputation all that it saves
    layer       what one layer holds while it is recomputed and differentiated
    head        float32 logits of HEAD_CHUNK tokens, three times: log-probabilities, and what their gradient needs
    reduction   float32 gradients of the largest unit on their way to the ranks: embeddings and head, or a layer

Not counted: CUDA's and NCCL's own memory (1-2 GB), fragments (a tenth, say).
"""

import argparse
import math
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from credit import lora
from credit.methods import BLOCK_TOKENS, USES_HIDDEN
from fast.decode import PREFILL, SHARE, layer_numbers, passing_bytes, row_bytes
from grpo import HEAD_CHUNK, layers_of

PROMPT = 256  # tokens of a prompt, assumed: they are not known before the data is read
CREDIT_CHUNKS = 0.4e9  # bytes of the span pairs that are solved together


def predict(
    config, args: argparse.Namespace, world: int, room: float = math.inf, judge: float = 0.0
) -> dict[str, float]:
    """GB (1e9 bytes) a GPU, by part and by phase; `world` ranks share the work.

    Where --generate-batch does not say how many rollouts are sampled at a time, those whose cache fits into `room`.
    `judge` is the size of a process reward model, in GB.
    """
    text = config.get_text_config()
    total, layer, rest, trained = parameters(config, args.lora_rank)
    hidden, layers = text.hidden_size, text.num_hidden_layers
    wide = getattr(text, "intermediate_size", None) or 4 * hidden
    size = 4 if args.dtype == "float32" else 2  # bytes of a number that is computed with
    split = world > 1 or size == 2  # else `parallel.shard` leaves the model as it is, and that one samples
    shards = args.shard_over or world
    rollouts = -(-args.batch // args.group // world) * args.group  # of the rank with most; at a time, if they fit
    width = PROMPT + args.max_tokens
    row = row_bytes(config, width, size)
    passing = 0 if args.decode == "fast" else passing_bytes(config, PROMPT, width, size)  # of a row
    always = (4 / shards + size * split) * total + 8 / shards * trained + 1e9 * judge
    fit = max(1, int(min(rollouts, SHARE * (room * 1e9 - always) // (row + passing))))
    rows = min(args.generate_batch or fit, rollouts)
    # Tokens of a forward pass: no more than there are; a rollout longer than micro_tokens goes alone.
    scored = max(min(args.micro_tokens, rollouts * width), width)
    tokens = max(min(args.micro_tokens, -(-args.minibatch // world) * width), width)
    group = args.group * args.max_tokens  # tokens whose states are compared
    saved = 11 * hidden + 4 * wide  # numbers a token that autograd saves in a layer; counted on Qwen2
    forward = layer_numbers(text)
    logits = 3 * 4 * HEAD_CHUNK * text.vocab_size
    block = max(group, min(BLOCK_TOKENS, rollouts * args.max_tokens))  # tokens whose states exist together
    states = block * hidden * size * (args.method in USES_HIDDEN)
    # One group's states once more and in float32; half of a group against the other half, thrice: the most there is.
    distances = states + group * hidden * (size + 4) + 3 * 4 * (group / 2) ** 2 + CREDIT_CHUNKS
    inputs = layers * (hidden if args.recompute else saved) * size  # a token
    credit = {
        "shear": distances,
        "first": distances,
        "oar-g": scored * (inputs + (saved + 3 * wide) * size) + logits,
        "oar-p": scored * forward * size + logits,
        "attention": scored * text.num_attention_heads * width * (2 * size + 8),  # weights, their logarithms
    }
    parts = {
        "weights": 4 * total / shards,
        "moments": 8 * trained / shards,
        "gradients": 4 * trained / shards,
        "copy": size * total * split,
        "judge": 1e9 * judge,
        "cache": rows * row,
        "prefill": rows * passing or min(rows * PROMPT, PREFILL) * forward * size,
        "scoring": max(scored * forward * size, logits) + states,
        "credit": credit.get(args.method, 0),
        "gathered": size * (2 * rest + 3 * layer) * split,  # embeddings and head, gradients; two layers, one gradient
        "inputs": tokens * inputs,
        "layer": tokens * (saved + 3 * wide) * size,  # and the gradients of gate, up and their product
        "head": logits,
        "reduction": 4 * max(rest, layer) * (1 + 1 / shards) * split,  # what goes in, what comes out
    }
    parts = {name: count / 1e9 for name, count in parts.items()}
    for phase, moments in _together().items():
        parts[phase] = max(sum(parts[name] for name in moment) for moment in moments)
    return {**parts, "total": max(parts["sampling"], parts["training"])}


def parameters(config, rank: int = 0) -> tuple[int, int, int, int]:
    """Parameters of the whole model, of its largest decoder layer, of what is in no layer, and those that are trained.

    `rank` is that of a LoRA adapter, 0 without one. Allocates nothing.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if rank:
            lora.add(model, rank, seed=0)
    total = sum(parameter.numel() for parameter in model.parameters())  # tied weights once
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(model)]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return total, max(layers, default=0), total - sum(layers), trained


def plan_line(parts: dict[str, float]) -> str:
    """What `predict` says as one line: each phase and what is in memory at its largest moment."""
    phases = []
    for phase, moments in _together().items():
        largest = max(moments, key=lambda moment: sum(parts[name] for name in moment))
        listed = ", ".join(f"{name} {parts[name]:.1f}" for name in largest if parts[name] >= 0.05)
        phases.append(f"{phase} {parts[phase]:.1f} GB" + (f" ({listed})" if listed else ""))
    return "memory a GPU, predicted: " + ", ".join(phases)


def size_gb(device: torch.device) -> float:
    """What a GPU has; no bound where there is none."""
    return torch.cuda.mem_get_info(device)[1] / 1e9 if device.type == "cuda" else math.inf


def notes(parts: dict[str, float], device: torch.device, model, folder: Path, args: argparse.Namespace) -> list[str]:
    """For the plan: the prediction, what a checkpoint takes of the disk, and a warning where either is too much."""
    lines = [plan_line(parts)]
    has = size_gb(device)
    if parts["total"] > has:
        lines.append(f"WARNING: this GPU has {has:.0f} GB; lower --micro-tokens or --max-tokens, or use more GPUs")
    numbers, _, _, trained = parameters(model.config, args.lora_rank)
    each = (numbers * (4 + (4 if args.dtype == "float32" else 2)) + 8 * trained) / 1e9
    free = shutil.disk_usage(folder).free / 1e9
    lines.append(f"a checkpoint takes {each:.2g} GB, {args.keep} stay; {free:.0f} GB of the disk are free")
    if (args.keep + 1) * each > free:
        lines.append("WARNING: the disk is too small for that; choose another --out, or lower --keep")
    return lines


def _together() -> dict[str, list[tuple[str, ...]]]:
    """Which parts are in memory together: the moments of each phase, one of which is its largest."""
    always = ("weights", "moments", "copy", "judge")
    training = (*always, "gradients", "gathered")
    return {
        "sampling": [(*always, "cache", "prefill"), (*always, "scoring"), (*always, "credit")],
        "training": [(*training, "inputs", "layer"), (*training, "inputs", "head"), (*training, "reduction")],
    }
