"""harness/memory.py against counts by hand, and a table of docs/hardware.md against its script."""

import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from builders.case_files import DOCS
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from fast.rollout import row_bytes, rows_that_fit
from grpo import HEAD_CHUNK
from harness import memory, parallel
from harness.config import PAPER, TrainConfig, with_values
from tasks.rows import BadInput

PAGE = (DOCS / "hardware.md").read_text(encoding="utf-8")
SHAPE = dict(
    hidden_size=8, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, vocab_size=10
)
TINY = Qwen2Config(**SHAPE, intermediate_size=16, tie_word_embeddings=False)
# q, k, v, o (8 x 8, 8 x 4, 8 x 4, 8 x 8) with biases of q, k, v; gate, up, down; two norms
LAYER = 64 + 32 + 32 + 64 + (8 + 4 + 4) + 3 * 8 * 16 + 2 * 8
TOTAL = 3 * LAYER + 2 * 10 * 8 + 8  # embeddings, head, norm


def flags(**changes) -> TrainConfig:
    """The paper's recipe, as far as memory depends on it."""
    recipe = {"dtype": "bfloat16", "prompts_per_step": 64, "heldout": 1, "device": "cuda"}
    return with_values(PAPER, {**recipe, "out": "o", "model": "M", **changes})


@pytest.fixture(scope="module")
def documented() -> dict:
    """The names of docs/records/memory_table.py, with the lines that it `printed`.

    Two of them, `large` and `small`, are models' configurations.
    """
    printed = []
    names = {"print": printed.append, "printed": printed}
    exec((DOCS / "records" / "memory_table.py").read_text(encoding="utf-8"), names)
    return names


def test_the_table_is_what_its_script_prints(documented):
    """The table's rows are those that the script prints.

    The models have the published numbers of parameters, of which tied ones count once.
    """
    assert documented["printed"] == re.findall(r"GPU.* \| ([\d.]+ \| [\d.]+ \| [\d.]+) \|\n", PAGE)
    assert len(documented["printed"]) == 5
    assert memory.parameters(documented["large"])[0] == 7_615_616_512
    assert memory.parameters(documented["small"])[0] == 1_543_714_304


def in_bytes(parts: dict, names: str) -> list[int]:
    """Some of the predicted parts, which are in GB."""
    return [round(1e9 * parts[name]) for name in names.split()]


def test_parts_are_those_counted_by_hand():
    """The predicted parts of a tiny model are those counted by hand.

    They are of four ranks, of pairs of these (--shard-over), with an adapter, and of one rank
    alone.
    """
    sizes = flags(prompts_per_step=5, rollouts_per_prompt=4, max_tokens=44)
    # two of the five groups on one rank: 8 rollouts, 300 tokens each; keys and values of 3 layers,
    # one head of 4 numbers; logits; prefill
    generating = 8 * (300 * 2 * 3 * 1 * 4 * 2 + 16 * 10 + 256 * (6 * 8 + 3 * 16) * 2)
    expected = {
        "weights": TOTAL,
        "moments": 2 * TOTAL,
        "gradients": TOTAL,
        "copy": 2 * TOTAL,
        "checkpoint": (4 + 2 + 8) * TOTAL,
        "generating": generating,
        "resident": 5 * TOTAL,
        "sampling": 5 * TOTAL + generating,
        "training": 6 * TOTAL + 3 * 4 * HEAD_CHUNK * 10,
    }
    assert in_bytes(memory.predict(TINY, sizes, 4), " ".join(expected)) == [*expected.values()]
    pairs = memory.predict(TINY, flags(shard_over=2), 4)
    assert in_bytes(pairs, "weights moments copy") == [2 * TOTAL, 4 * TOTAL, 2 * TOTAL]
    # layers; rank; in + out of q, k, v, o, gate, up, down
    adapter = 3 * 2 * (16 + 12 + 12 + 16 + 24 + 24 + 24)
    assert memory.parameters(TINY, 2) == (TOTAL + adapter, adapter)
    lora = memory.predict(TINY, flags(lora_rank=2), 4)
    assert in_bytes(lora, "weights moments") == [TOTAL + adapter, 2 * adapter]
    whole = memory.predict(TINY, flags(dtype="float32"), 1)
    half = memory.predict(TINY, flags(), 1)
    assert whole["copy"] == 0 < half["copy"]


def test_a_rollout_s_bytes_and_how_many_fit(documented, monkeypatch):
    """Rollouts fill four fifths of the free memory, in the model's dtype, and are at least one.

    A head's own width is read.
    """
    # 3 layers, one head of 4 numbers; 2 query heads; 10 logits
    model = AutoModelForCausalLM.from_config(TINY)
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        row = size * 100 * (24 + 16) + 160
        for rows, expected in (7.01, 7), (6.99, 6), (0, 1):
            free = int(rows * row / 0.8), 0
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: free)
            assert rows_that_fit(model.to(dtype), 10, 90) == expected
    configs = (LlamaConfig(**SHAPE, intermediate_size=16, head_dim=dim) for dim in (4, 8))
    narrow, wide = (row_bytes(config, 256, 3, 2) for config in configs)
    assert wide - narrow == 259 * 2 * 3 * 4 * 2
    large = documented["large"]
    bounded, free = (
        memory.predict(large, flags(), 1, room)["sampling"] for room in (150, math.inf)
    )
    assert bounded < 150 < free  # a GPU's size bounds the cache
    row = row_bytes(TINY, 256, 3000, 2)
    many = {"heldout": 9000}
    for rows, changes in (1, {"generate_batch": 1}), (9000, many), (512, many | {"device": "cpu"}):
        predicted = memory.predict(TINY, flags(**changes), 1)
        assert predicted["generating"] == pytest.approx(rows * row / 1e9)


@pytest.fixture
def plan(documented, monkeypatch):
    """A function that plans a run of 7.6B parameters, given a GPU's room and free disk in GB."""

    def plan(room: float, free: float, world: int, **changes) -> list[str]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, room * 1e9))
        disk = SimpleNamespace(free=free * 1e9)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk)
        ranks = parallel.Ranks(0, world, torch.device("cuda"))
        return memory.plan(documented["large"], flags(**changes), ranks)

    return plan


@pytest.mark.parametrize("room, free, warnings", [(80, 999, 0), (32, 999, 1), (32, 300, 2)])
def test_the_plan_of_the_papers_recipe(room, free, warnings, plan, documented):
    """AdamW fits eight GPUs of 80 GB; the plan says so in numbers, and warns of too little room."""
    first, disk, *others = plan(room, free, 8)
    sampling = memory.predict(documented["large"], flags(), 8, room)["sampling"]
    words = f"memory per rank, predicted: 26.7 GB stay; sampling {sampling:.1f} GB, training "
    assert first.startswith(words)
    assert disk.startswith("a checkpoint takes 107 GB; 2 stay")
    assert [line.split()[0] for line in others] == ["WARNING:"] * warnings


@pytest.mark.parametrize(
    "room, free, force, words",
    [
        (80, 999, False, "--model M: .* take 137.1 GB a rank of 80.0 GB; give --lora-rank 16, "),
        (1, 100, True, "--out o: a checkpoint takes 107 GB, and 100 GB of the disk are free"),
    ],
)
def test_what_can_never_fit_is_refused(room, free, force, words, plan):
    """18 bytes per parameter do not fit one GPU; --force goes on, but needs a disk."""
    with pytest.raises(BadInput, match=words):
        plan(room, free, 1, force=force)
    assert plan(1, 999, 1, force=True)
