"""harness/memory.py against counts by hand."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from grpo import HEAD_CHUNK
from harness import memory
from harness.config import Config, Machine
from harness.load import choose_batch_of_run
from harness.memory import row_bytes
from harness.models import outline_of
from harness.run import Ranks
from tasks import toy
from tasks.errors import BadInput
from tasks.problems import Task

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


def in_bytes(parts: dict, names: str) -> list[int]:
    """Some of the predicted parts, which are in GB."""
    return [round(1e9 * parts[name]) for name in names.split()]


def test_parts_are_those_counted_by_hand():
    """The predicted parts of a tiny model are those counted by hand.

    They are of four ranks, of pairs of these (--shard-over), and of one rank alone.
    """
    sizes = flags(prompts_per_step=5, rollouts_per_prompt=4, max_tokens=44)
    # two of the five groups on one rank: 8 rollouts, 300 tokens each; keys and values of 3 layers,
    # one head of 4 numbers; logits; prefill
    generating = 8 * (300 * 2 * 3 * 1 * 4 * 2 + 16 * 10 + 256 * (6 * 8 + 3 * 16) * 2)
    expected = {  # a quarter of weights and moments, and a copy
        "resident": (1 + 2 + 2) * TOTAL,
        "gradients": TOTAL,
        "checkpoint": (4 + 2 + 8) * TOTAL,
        "sampling": 5 * TOTAL + generating,
        "training": 6 * TOTAL + 3 * 4 * HEAD_CHUNK * 10,
    }
    assert in_bytes(memory.predict(OUTLINE, sizes, 4), " ".join(expected)) == [*expected.values()]
    pairs = memory.predict(OUTLINE, flags(shard_over=2), 4)
    assert in_bytes(pairs, "resident") == [(2 + 4 + 2) * TOTAL]
    whole = memory.predict(OUTLINE, flags(dtype="float32"), 1)
    half = memory.predict(OUTLINE, flags(), 1)
    assert in_bytes(whole, "resident") == [12 * TOTAL]  # no copy
    assert in_bytes(half, "resident") == [14 * TOTAL]


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
    row = row_bytes(TINY, 256, 3000, 2)
    for rows, changes in (1, {"generate_batch": 1}), (512, {"generate_batch": 1024}):
        predicted = memory.predict(OUTLINE, flags(**changes), 1)
        generating = predicted["sampling"] - predicted["resident"]
        assert generating == pytest.approx(rows * row / 1e9)


def test_the_default_batch_depends_on_the_gpu_s_size_and_not_on_what_is_free(monkeypatch):
    """It fits beside what stays, with the longest prompt.

    Otherwise the samples of a run would depend on other processes.
    """
    config = flags(max_tokens=90, dtype="float32", rollouts_per_prompt=2)
    problems = [{"problem": "a?"}, {"problem": "a=1+2;a?\n"}]  # of 9 tokens
    task = Task("t", problems, [], lambda problem: problem["problem"], None)
    ranks = Ranks(0, 1, torch.device("cuda"))
    parts = config, ranks, task, OUTLINE, toy.make_tokenizer()
    resident = memory.predict(OUTLINE, config, 1)["resident"]
    for free in (10**6, 10**10):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**10))
        expected = memory.choose_batch(TINY, config, 10 - resident, 9, 90)
        assert choose_batch_of_run(*parts) == expected > 1000


@pytest.fixture
def plan(monkeypatch):
    """A function that plans a run of 7.6B parameters, given a GPU's room and free disk in GB."""

    def plan(room: float, free: float, world: int, **changes) -> list[str]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, room * 1e9))
        disk = SimpleNamespace(free=free * 1e9)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk)
        ranks = Ranks(0, world, torch.device("cuda"))
        return memory.plan(outline_of(LARGE), flags(**changes), ranks)

    return plan


@pytest.mark.parametrize("room, free, warnings", [(80, 999, 0), (32, 999, 1)])
def test_the_plan_of_the_papers_recipe(room, free, warnings, plan):
    """AdamW fits eight GPUs of 80 GB; the plan says so in numbers, and warns of too little room."""
    first, *others, disk = plan(room, free, 8, generate_batch=99)
    sampling = memory.predict(outline_of(LARGE), flags(generate_batch=99), 8)["sampling"]
    words = f"memory per rank, predicted: 26.7 GB stay; sampling {sampling:.1f} GB, training "
    assert first.startswith(words)
    assert disk.startswith("a checkpoint takes 107 GB; 2 stay")
    assert [line.split()[0] for line in others] == ["WARNING:"] * warnings


def test_checkpoints_that_do_not_fit_the_disk_are_refused(plan):
    """One more than `--keep` is there while it is written."""
    words = "--out o: a checkpoint takes 107 GB, 3 need room, and 100 GB of the disk are free"
    with pytest.raises(BadInput, match=words):
        plan(80, 100, 1)
    plan(80, 400, 1)
    with pytest.raises(
        BadInput, match=r"107 GB and a kept model 15\.2 GB, 33 need room, and 400 GB"
    ):
        plan(80, 400, 1, keep_models=10)
