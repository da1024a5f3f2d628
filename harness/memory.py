"""How much GPU memory a run will need, before it starts: arithmetic on the model's config and the run's flags.

    predict(config, args, world) -> GB by part, and of the phases: loading, sampling, training; total is the largest
    check(config, args, ranks)   -> refuses what can never fit: the weights and what training adds to each, a checkpoint
    notes(predicted, ...)        -> the plan's lines on memory and disk, with a warning where either is too small

`config` is that of a Qwen2- or Llama-like model. These stay on a GPU all the time:

    weights       float32, 4 bytes a parameter, divided by the ranks that hold one set of weights, as are the moments
    moments       AdamW's two, 8 bytes a trained parameter
    copy          the whole model that samples, in the dtype of compute; none where one rank computes in float32
    reward_model  the process reward model of prm and pure

Loading takes the model as it is stored, beside the copy. Sampling adds the largest of three to what stays, training
adds gradients, gathered weights and the larger of two:

    generating    keys and values of the rollouts generated at a time, four float32 copies of a token's logits, and a
                  layer's pass over the prompts
    scoring       one forward pass of micro_tokens tokens, and a block's states where the method reads them
    credit        SHEAR's states of a block and token distances of a group; or another method's largest pass
    gradients     float32, divided like the weights
    gathered      FSDP's whole weights in the dtype of compute: embeddings, head and two layers; gradients of the same
    backward      what each layer keeps of micro_tokens tokens, and the larger of one layer's backward pass and the
                  float32 logits of HEAD_CHUNK tokens, three times
    reduction     float32 gradients of the largest unit on their way to the ranks

tests/test_memory.py holds scoring, credit and training against the bytes that live on a CPU: predicted are .95 to 1.3
times as many. Left out: CUDA's and NCCL's own memory (1-2 GB) and fragmentation (about a tenth).
"""

import argparse
import math
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM

from credit import lora
from credit.batch import BLOCK_TOKENS
from credit.table import METHODS
from fast.decode import PREFILL, SHARE, layer_numbers, passing_bytes, row_bytes
from fast.race import CHUNK_ENTRIES
from grpo import HEAD_CHUNK, layers_of
from harness.config import SAVE_SHARE, SAVE_STEPS
from harness.parallel import Ranks
from tasks.problems import BadInput

PROMPT = 256  # tokens of a prompt, assumed: they are not known before the data is read
CPU_PARAMETERS = 2e9  # more of them take hours a step on a CPU
ADAPTER = 16  # rank of the adapter that is proposed where the whole model cannot be trained


class Parameters(NamedTuple):
    """How many parameters a model has, and where."""

    total: int  # tied weights count once
    layer: int  # of the largest decoder layer
    rest: int  # in no layer: embeddings, head, final norm
    trained: int


def predict(
    config, args: argparse.Namespace, world: int, room: float = math.inf, reward_gb: float = 0.0
) -> dict[str, float]:
    """GB (1e9 bytes) a GPU, by part and by phase; `world` ranks share the work.

    Without --generate-batch, as many rollouts are generated at a time as their cache fits into `room` GB.
    `reward_gb` is the size of a process reward model.
    """
    text = config.get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    wide = getattr(text, "intermediate_size", None) or 4 * hidden
    total, layer, rest, trained = parameters(config, args.lora_rank)
    size = 4 if args.dtype == "float32" else 2  # bytes of a number that is computed with
    has_copy = world > 1 or size == 2  # else `parallel.shard` leaves the model as it is, and that one samples
    shards = args.shard_over or world
    gb = {
        "weights": 4 * total / shards,
        "moments": 8 * trained / shards,
        "copy": size * total * has_copy,
        "reward_model": 1e9 * reward_gb,
    }
    resident = sum(gb.values())

    rollouts = -(-args.prompts_per_step // world) * args.rollouts_per_prompt  # of the rank that has most
    width = PROMPT + args.max_tokens
    forward = layer_numbers(text) * size  # bytes a token
    # Tokens of a forward pass: no more than there are; a rollout longer than micro_tokens goes alone.
    scored = max(min(args.micro_tokens, rollouts * width), width)
    updated = -(-args.prompts_per_update * args.rollouts_per_prompt // world)  # rollouts of a mini-batch, a rank
    trained_on = max(min(args.micro_tokens, updated * width), width)
    logits = 3 * 4 * min(HEAD_CHUNK, scored * args.max_tokens / width) * text.vocab_size
    saved = 11 * hidden + 4 * wide  # numbers a token that autograd saves in a layer; counted on Qwen2
    kept = layers * (hidden if args.recompute else saved) * size  # bytes a token, by all layers
    layer_backward = (saved + 3 * wide) * size  # bytes a token; gate, up and their product have gradients, too
    group = args.rollouts_per_prompt * args.max_tokens  # tokens whose states are compared
    block = max(group, min(BLOCK_TOKENS, rollouts * args.max_tokens))  # tokens whose states exist together
    needs = METHODS[args.method].needs
    states = block * hidden * size * ("states" in needs)
    # One group's states: padded, by sides, in float32; matrices of half a group against the other half; pairs of spans.
    matrices, pairs = 3 * 4 * (group / 2) ** 2, 3 * 4 * CHUNK_ENTRIES["cuda"]
    distances = states + group * hidden * (2 * size + 4) + matrices + pairs
    credit = {
        "pairs": distances,
        "gradient": scored * (kept + layer_backward) + logits,
        "masking": scored * forward + logits,
        "attention": scored * text.num_attention_heads * width * (2 * size + 8),  # weights, their logarithms
    }
    gb["generating"] = generating(config, args, rollouts, room * 1e9 - resident, size)
    gb["scoring"] = max(scored * forward, logits + scored * hidden * size) + states
    gb["credit"] = max((credit[word] for word in needs if word in credit), default=0)
    gb["gradients"] = 4 * trained / shards
    gb["gathered"] = size * (2 * rest + 3 * layer) * has_copy
    gb["backward"] = trained_on * kept + max(trained_on * layer_backward, logits)
    gb["reduction"] = 4 * max(rest, layer) * (1 + 1 / shards) * has_copy  # what goes in, what comes out
    stored = getattr(text.dtype, "itemsize", 4)  # bytes of a number in the model's files
    gb["loading"] = (stored + size * has_copy) * total
    gb["sampling"] = resident + max(gb["generating"], gb["scoring"], gb["credit"])
    gb["training"] = resident + gb["gradients"] + gb["gathered"] + max(gb["backward"], gb["reduction"])
    gb["total"] = max(gb["loading"], gb["sampling"], gb["training"])
    return {name: count / 1e9 for name, count in gb.items()}


def generating(config, args: argparse.Namespace, rollouts: int, room: float, size: int) -> float:
    """Bytes of generating `rollouts` rollouts, as many at a time as --generate-batch says, or as `room` bytes hold."""
    width = PROMPT + args.max_tokens
    cache = row_bytes(config, width, size)  # of one rollout, as is the next
    prefill = 0 if args.decode == "fast" else passing_bytes(config, PROMPT, width, size)
    fitting = max(1, int(min(rollouts, SHARE * room // (cache + prefill))))
    rows = min(args.generate_batch or fitting, rollouts)
    if args.decode == "fast":  # it prefills some rows at a time
        return rows * cache + min(rows * PROMPT, PREFILL) * layer_numbers(config.get_text_config()) * size
    return rows * (cache + prefill)


def parameters(config, rank: int = 0) -> Parameters:
    """The counts of a model, with a LoRA adapter of this rank if it is not 0. Allocates nothing."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if rank:
            lora.add(model, rank, seed=0)
    total = sum(parameter.numel() for parameter in model.parameters())
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(model)]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Parameters(total, max(layers, default=0), total - sum(layers), trained)


def plan_line(predicted: dict[str, float]) -> str:
    """What `predict` says, as one line."""
    resident = sum(predicted[name] for name in ("weights", "moments", "copy", "reward_model"))
    return (
        f"memory per rank, predicted: sampling {predicted['sampling']:.1f} GB, "
        f"training {predicted['training']:.1f} GB, of which {resident:.1f} GB stay all the time"
    )


def size_gb(device: torch.device) -> float:
    """What a GPU has; no bound where there is none."""
    return torch.cuda.mem_get_info(device)[1] / 1e9 if device.type == "cuda" else math.inf


def check(config, args: argparse.Namespace, ranks: Ranks) -> None:
    """Refuse what can never fit, whatever is sampled at a time; raises BadInput.

    Weights, moments, gradients and the copy that samples must fit into a GPU, or into the machine's memory; a CPU is
    given at most CPU_PARAMETERS. `--force` goes on all the same, but the disk must hold a checkpoint.
    """
    counts = parameters(config, args.lora_rank)
    size, free = checkpoint_gb(counts, args), free_gb(Path(args.out))
    if size > free:
        reason = f"a checkpoint takes {size:.3g} GB, and {free:.3g} GB of the disk are free"
        raise BadInput(f"--out {args.out}: {reason}; choose another, or free space")
    if args.force:
        return
    on_gpu = ranks.device.type == "cuda"
    if not on_gpu and counts.total > CPU_PARAMETERS:
        reason = f"{counts.total / 1e9:.1f} billion parameters on a CPU take hours a step"
        remedy = f"use a GPU or a model of at most {CPU_PARAMETERS / 1e9:.0f} billion"
        raise BadInput(f"--model {args.model}: {reason}; {remedy}, or go on with --force")
    room = size_gb(ranks.device) if on_gpu else machine_gb()
    gb = predict(config, args, ranks.world, room)
    need = gb["weights"] + gb["moments"] + gb["gradients"] + gb["copy"]
    if need > room:
        reason = f"weights, moments, gradients and the sampling copy take {need:.1f} GB"
        reason += f", and there are {room:.1f} GB a {'GPU' if on_gpu else 'rank'}"
        remedy = smallest_change(config, args, ranks, room)
        raise BadInput(f"--model {args.model}: {reason}; {remedy}, or go on with --force")


def smallest_change(config, args: argparse.Namespace, ranks: Ranks, room: float) -> str:
    """An adapter, or more GPUs: what is predicted to fit, activations and cache included."""
    remedies = []
    adapted = argparse.Namespace(**{**vars(args), "lora_rank": ADAPTER})
    if not args.lora_rank and predict(config, adapted, ranks.world, room)["total"] < room:
        remedies.append(f"--lora-rank {ADAPTER}")
    more = [2**power for power in range(1, 8) if 2**power > ranks.world]
    for world in more:
        if ranks.device.type == "cuda" and predict(config, args, world, room)["total"] < room:
            remedies.append(f"{world} GPUs")
            break
    return f"give {' or '.join(remedies or ['a smaller model'])}"


def machine_gb() -> float:
    """The machine's memory for each of its ranks."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return size / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def free_gb(folder: Path) -> float:
    """What is free on the disk of a folder, which may have to be made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / 1e9


def checkpoint_gb(counts: Parameters, args: argparse.Namespace) -> float:
    """Float32 weights, the sampler's weights in the dtype of compute, and moments."""
    compute = 4 if args.dtype == "float32" else 2  # bytes
    return (counts.total * (4 + compute) + 8 * counts.trained) / 1e9


def notes(
    predicted: dict[str, float], device: torch.device, model, folder: Path, args: argparse.Namespace
) -> list[str]:
    """For the plan: the prediction, what a checkpoint takes of the disk, and a warning where either is too much."""
    lines = [plan_line(predicted)]
    if predicted["total"] > size_gb(device):
        lines.append(
            f"WARNING: this GPU has {size_gb(device):.0f} GB; lower --micro-tokens or --max-tokens, or use more GPUs"
        )
    counts = parameters(model.config, args.lora_rank)
    checkpoint, free = checkpoint_gb(counts, args), free_gb(folder)
    often = f"every {args.save_every} steps"
    if not args.save_every:
        often = f"every {SAVE_STEPS} steps, or less often to stay under {SAVE_SHARE:.0%} of the time"
    lines.append(f"a checkpoint takes {checkpoint:.3g} GB, and is written {often}")
    lines.append(f"{args.keep} of them stay; {free:.0f} GB of the disk are free")
    if (args.keep + 1) * checkpoint > free:
        lines.append("WARNING: the disk is too small for that; choose another --out, or lower --keep")
    return lines
