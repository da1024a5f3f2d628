"""How much GPU memory a run will need, before it starts: arithmetic on the model's config and the run's flags.

    predict(config, args, world) -> GB by part, and of the two phases: sampling, training; total is the larger one
    plan_line(parts)             -> the same as one line for the plan

`config` is that of a Qwen2- or Llama-like model. What stays all the time, a GPU:

    weights     float32, 4 bytes a parameter, divided by the ranks that hold one set of weights, as are the next two
    moments     AdamW's two, 8 bytes
    gradients   float32, 4 bytes; while training
    copy        the whole model that samples, in the dtype of compute; none where one rank computes in float32

Sampling adds the cache, or scoring, or credit; training adds the gathered weights and one of its moments (`_together`):

    cache       keys and values of the rollouts generated at a time, and four float32 copies of a token's logits
    prefill     beside the cache, a forward pass over the first prompts
    scoring     one forward pass of micro_tokens; nothing is kept
    credit      SHEAR's states and token-token distances of one group
    gathered    FSDP's whole weights in the dtype of compute: embeddings, head and two layers; gradients of the same
    inputs      what each layer keeps of micro_tokens tokens: its input, or without recomputation all that it saves
    layer       what one layer holds while it is recomputed and differentiated
    head        float32 logits of HEAD_CHUNK tokens, three times: log-probabilities, and what their gradient needs
    reduction   float32 gradients of the largest unit on their way to the ranks: embeddings and head, or a layer

Not counted: CUDA's and NCCL's own memory (1-2 GB), fragments (a tenth, say).
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

from credit import USES_HIDDEN
from decode import PREFILL
from grpo import HEAD_CHUNK, layers_of

PROMPT = 256  # tokens of a prompt, assumed: they are not known before the data is read
CREDIT_CHUNKS = 0.4e9  # bytes of the span pairs that are solved together


def predict(config, args: argparse.Namespace, world: int) -> dict[str, float]:
    """GB (1e9 bytes) a GPU, by part and by phase; `world` ranks share the work."""
    text = config.get_text_config()
    total, layer, rest = parameters(config)
    hidden, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
    wide = getattr(text, "intermediate_size", None) or 4 * hidden
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    size = 4 if args.dtype == "float32" else 2  # bytes of a number that is computed with
    split = world > 1 or size == 2  # else `parallel.shard` leaves the model as it is, and that one samples
    shards = args.shard_over or world
    rollouts = -(-args.batch // args.group // world) * args.group  # of the rank with most; at a time, if they fit
    rows = min(args.generate_batch or rollouts, rollouts)
    width = PROMPT + args.max_tokens
    tokens = max(args.micro_tokens, width)  # a rollout longer than micro_tokens goes alone
    group = args.group * args.max_tokens  # tokens whose states are compared
    saved = 11 * hidden + 4 * wide  # numbers a token that autograd saves in a layer; counted on Qwen2
    forward = 6 * hidden + 3 * wide  # numbers a token that a layer holds at once where nothing is saved
    logits = 3 * 4 * HEAD_CHUNK * text.vocab_size
    parts = {
        "weights": 4 * total / shards,
        "moments": 8 * total / shards,
        "gradients": 4 * total / shards,
        "copy": size * total * split,
        "cache": rows * (width * 2 * layers * key_heads * head_dim * size + 4 * 4 * text.vocab_size),
        "prefill": min(rows * PROMPT, PREFILL) * forward * size,
        "scoring": max(tokens * forward * size, logits),
        # bfloat16 twice, float32 once; half of the group against the other half, which is the most there can be
        "credit": (group * hidden * (2 * size + 4) + 4 * (group / 2) ** 2 + CREDIT_CHUNKS)
        * (args.method in USES_HIDDEN),
        "gathered": size * (2 * rest + 3 * layer) * split,  # embeddings and head, gradients; two layers, one gradient
        "inputs": layers * tokens * (hidden if args.recompute else saved) * size,
        "layer": tokens * (saved + 3 * wide) * size,  # and the gradients of gate, up and their product
        "head": logits,
        "reduction": 4 * max(rest, layer) * (1 + 1 / shards) * split,  # what goes in, what comes out
    }
    parts = {name: count / 1e9 for name, count in parts.items()}
    for phase, moments in _together().items():
        parts[phase] = max(sum(parts[name] for name in moment) for moment in moments)
    return {**parts, "total": max(parts["sampling"], parts["training"])}


def parameters(config) -> tuple[int, int, int]:
    """Parameters of the whole model, of its largest decoder layer, and of what is in no layer; allocates nothing."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in model.parameters())  # tied weights once
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(model)]
    return total, max(layers), total - sum(layers)


def plan_line(parts: dict[str, float]) -> str:
    """What `predict` says as one line: each phase and what is in memory at its largest moment."""
    phases = []
    for phase, moments in _together().items():
        largest = max(moments, key=lambda moment: sum(parts[name] for name in moment))
        listed = ", ".join(f"{name} {parts[name]:.1f}" for name in largest if parts[name] >= 0.05)
        phases.append(f"{phase} {parts[phase]:.1f} GB" + (f" ({listed})" if listed else ""))
    return "memory a GPU, predicted: " + ", ".join(phases)


def _together() -> dict[str, list[tuple[str, ...]]]:
    """Which parts are in memory together: the moments of each phase, one of which is its largest."""
    always = ("weights", "moments", "copy")
    training = (*always, "gradients", "gathered")
    return {
        "sampling": [(*always, "cache", "prefill"), (*always, "scoring"), (*always, "credit")],
        "training": [(*training, "inputs", "layer"), (*training, "inputs", "head"), (*training, "reduction")],
    }
