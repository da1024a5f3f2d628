"""Tokens per second of three ways of sampling, with random weights in the shape of the 1.5B.

    python -m lab.records.gpu_sampling 1000 fast transformers
    python -m lab.records.gpu_sampling 150 fast transformers batch cudnn

The number is the limit of tokens; half of the responses end within a fifth of it. `fast` is what
training calls, `transformers` its own loop, `batch` its continuous batching (`generate_batch`), and
`cudnn` is `fast` with cuDNN's attention, which train.py turns off. 32 prompts x 8 responses.
Without a GPU a tiny model rehearses it.
"""

from lab.records.help import show_help

show_help(__doc__)

import sys
import time

import torch
from transformers import GenerationConfig

from grpo import hf_generate, rollout
from harness import fsdp
from harness.models import stop_ids
from lab.fast.generate import fast_generate
from lab.fast.packing import packing_of
from lab.records import random_model

limit = int(sys.argv[1])
ranks = fsdp.join("cuda" if torch.cuda.is_available() else "cpu")
shape = "1.5B" if ranks.device.type == "cuda" else "tiny"  # a rehearsal
model = random_model.make_model(shape, ranks.device, limit / 5)
tokenizer = random_model.make_tokenizer(shape)
packing_of(model)  # sets the attention that training sets
prompts = [f"{number:04} What is the sum of f(p)? {'Step by step. ' * 12}" for number in range(32)]


def sample(way: str, max_tokens: int) -> list[int]:
    """Sample 256 responses; returns their lengths."""
    if way == "batch":
        return sample_in_batch(max_tokens)
    torch.backends.cuda.enable_cudnn_sdp(way == "cudnn")
    generate = hf_generate if way == "transformers" else fast_generate
    rollouts = rollout(
        model,
        tokenizer,
        prompts,
        8,
        max_tokens=max_tokens,
        temperature=1.0,
        stops=stop_ids(model, tokenizer),
        generate=generate,
    )
    return rollouts.mask.sum(1).tolist()


def sample_in_batch(max_tokens: int) -> list[int]:
    """Sample 256 responses by continuous batching; returns their lengths."""
    model.set_attn_implementation("sdpa")
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max_tokens)
    config.eos_token_id = stop_ids(model, tokenizer)
    config.pad_token_id = tokenizer.pad_token_id
    inputs = [ids for ids in tokenizer(prompts)["input_ids"] for _ in range(8)]
    outputs = model.generate_batch(inputs, generation_config=config, progress_bar=False)
    return [len(output.generated_tokens) for output in outputs.values()]


for way in sys.argv[2:]:
    if way != "batch":  # its start is part of a call
        sample(way, 8)
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    began = time.perf_counter()
    lengths = sample(way, limit)
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() / 1e9  # 0 without a GPU
    print(
        f"{way:12} {len(lengths)} responses, mean {sum(lengths) / len(lengths):.0f}, longest "
        f"{max(lengths)}: {seconds:.1f} s, {sum(lengths) / seconds:,.0f} tokens/s, "
        f"{1000 * seconds / max(lengths):.1f} ms per step, peak {peak:.1f} GB",
        flush=True,
    )
