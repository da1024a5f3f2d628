"""harness/models.py against counts by hand."""

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from base.config import Config, Machine
from harness import models as memory
from harness.models import outline_of, row_bytes

# Qwen2.5-Math-7B
LARGE = Qwen2Config(
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18_944,
    hidden_size=3584,
    vocab_size=152_064,
    tie_word_embeddings=False,
)
SHAPE = dict(
    hidden_size=8, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, vocab_size=10
)
TINY = Qwen2Config(**SHAPE, intermediate_size=16, tie_word_embeddings=False)
OUTLINE = outline_of(TINY)
# q, k, v, o (8 x 8, 8 x 4, 8 x 4, 8 x 8) with biases of q, k, v; gate, up, down; two norms
LAYER = 64 + 32 + 32 + 64 + (8 + 4 + 4) + 3 * 8 * 16 + 2 * 8
TOTAL = 3 * LAYER + 2 * 10 * 8 + 8  # embeddings, head, norm


def flags(**changes) -> Config:
    """The paper's recipe, as far as memory depends on it."""
    recipe = {"dtype": "bfloat16", "prompts_per_step": 64, "heldout": 1, "device": "cuda"}
    return Config(**recipe | {"out": "o", "model": "M"} | changes)


def test_parts_are_those_counted_by_hand():
    """The memory of a tiny model is that counted by hand: of four ranks, and of one alone."""
    sizes = flags()
    stay = (1 + 2 + 2) * TOTAL  # a quarter of weights and moments, and a copy
    for gb, expected in (
        (memory.resident_gb(OUTLINE, sizes, 4), stay),
        (memory.resident_gb(OUTLINE, sizes, 1), 14 * TOTAL),
        (memory.resident_gb(OUTLINE, flags(dtype="float32"), 1), 12 * TOTAL),  # no copy
        (memory.checkpoint_gb(OUTLINE, sizes), (4 + 2 + 8) * TOTAL),
    ):
        assert 1e9 * gb == pytest.approx(expected)


def test_a_rollout_s_bytes_and_how_many_fit():
    """Rollouts fill four fifths of the room that CUDA leaves, in the dtype, and are at least one.

    On a CPU they are 512. A head's own width is read.
    """
    # 3 layers, one head of 4 numbers; 2 query heads; 10 logits
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        row = size * 100 * (24 + 16) + 160
        for rows, expected in (7.01, 7), (6.99, 6), (0, 1), (-1e9, 1):
            room = 2 + rows * row / 0.8 / 1e9
            machine = Machine("cuda", dtype)
            assert memory.choose_batch(TINY, machine, room, 10, 90) == expected
    assert memory.choose_batch(TINY, Machine("cpu", "float32"), 0, 10, 90) == 512
    configs = (LlamaConfig(**SHAPE, intermediate_size=16, head_dim=dim) for dim in (4, 8))
    narrow, wide = (row_bytes(config, 256, 3, 2) for config in configs)
    assert wide - narrow == 259 * 2 * 3 * 4 * 2
    # 300 tokens; keys and values of 3 layers, one head of 4 numbers; logits; prefill
    row = 300 * 2 * 3 * 1 * 4 * 2 + 16 * 10 + 256 * (6 * 8 + 3 * 16) * 2
    assert row_bytes(TINY, 256, 44, 2) == row


@pytest.mark.parametrize(
    "room, free, warnings",
    [(80, 999, []), (28, 999, ["memory"]), (80, 300, ["the disk"])],
)
def test_the_plan_of_the_papers_recipe(room, free, warnings, monkeypatch):
    """AdamW fits eight GPUs of 80 GB; the plan says so in numbers, and warns of too little room.

    On the disk one more checkpoint than `--keep` is there while it is written.
    """
    monkeypatch.setattr(memory, "room_gb", lambda device: room)
    monkeypatch.setattr(memory, "free_gb", lambda folder: free)
    first, *others = memory.memory_notes(outline_of(LARGE), flags(), 8, torch.device("cuda"))
    assert first.startswith("memory per rank: 26.7 GB stay, 30.5 GB and activations in training")
    assert "a checkpoint takes 107 GB" in first
    assert len(others) == len(warnings)
    for line, start in zip(others, warnings, strict=True):
        assert line.startswith(f"WARNING: {start}")
