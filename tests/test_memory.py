"""harness/memory.py against counts by hand, and the table of docs/real-models.md against its snippet."""

import argparse
import contextlib
import math
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import grpo
import harness.run
import train
from credit.batch import Batch
from harness import memory, parallel, report
from harness.launch import parse_args
from harness.run import assemble
from rewards import Verdict
from tasks.problems import BadInput, Task

PAGE = (Path(__file__).parents[1] / "docs" / "real-models.md").read_text(encoding="utf-8")
SHAPE = dict(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, vocab_size=10)
TINY = Qwen2Config(**SHAPE, intermediate_size=16, tie_word_embeddings=False)
# q, k, v, o (8 x 8, 8 x 4, 8 x 4, 8 x 8) with biases of q, k, v; gate, up, down; two norms
LAYER = 64 + 32 + 32 + 64 + (8 + 4 + 4) + 3 * 8 * 16 + 2 * 8
REST = 2 * 10 * 8 + 8  # embeddings, head, norm
TOTAL = 3 * LAYER + REST
WHOLE = 2 * REST + 3 * LAYER  # that FSDP gathers


def flags(**changes) -> argparse.Namespace:
    """The paper's recipe, as far as memory depends on it."""
    recipe = dict(dtype="bfloat16", micro_tokens=16_384, prompts_per_step=64, out="runs", model="M", force=False)
    recipe |= dict(max_tokens=3000, recompute=True, shard_over=0, lora_rank=0, generate_batch=0)
    return argparse.Namespace(**{**recipe, "rollouts_per_prompt": 8, **changes})


@pytest.fixture(scope="module")
def documented() -> dict:
    """The names of the snippet of docs/real-models.md, `large` and `small` of them; and what it has `printed`."""
    printed = []
    names = {"print": printed.append, "printed": printed}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], names)
    return names


def test_the_table_is_what_its_snippet_prints(documented):
    """Row by row."""
    assert documented["printed"] == re.findall(r"GPU.* \| ([\d.]+ \| [\d.]+ \| [\d.]+) \|\n", PAGE)
    assert len(documented["printed"]) == 5


def test_parameters_are_those_of_the_model(documented):
    """By hand for a tiny one; the published counts for the real shapes; tied weights count once."""
    assert memory.parameters(TINY) == (TOTAL, TOTAL, WHOLE)
    assert memory.parameters(documented["large"])[0] == 7_615_616_512
    assert memory.parameters(documented["small"])[0] == 1_543_714_304


def test_parts_are_those_counted_by_hand():
    """Each part of a tiny model on four ranks."""
    args = flags(prompts_per_step=8, rollouts_per_prompt=4, max_tokens=44, micro_tokens=1000)
    parts = {name: round(gb * 1e9) for name, gb in memory.predict(TINY, args, 4).items()}
    assert (parts["weights"], parts["moments"], parts["gradients"]) == (TOTAL, 2 * TOTAL, TOTAL)
    assert parts["copy"] == 2 * TOTAL and parts["checkpoint"] == (4 + 2 + 8) * TOTAL
    # 8 rollouts a rank, 300 tokens each; keys and values of 3 layers, one head of 4 numbers; logits
    cache = 300 * 2 * 3 * 1 * 4 * 2 + 16 * 10
    assert parts["generating"] == 8 * (cache + 256 * (6 * 8 + 3 * 16) * 2)  # prompts of all rows at once
    assert parts["backward"] == 3 * 1000 * 8 * 2 + max(1000 * (11 * 8 + 7 * 16) * 2, 3 * 4 * grpo.HEAD_CHUNK * 10)
    assert parts["gathered"] == 2 * WHOLE
    assert parts["resident"] == parts["weights"] + parts["moments"] + parts["copy"]
    assert parts["sampling"] == parts["resident"] + max(parts["generating"], parts["scoring"])
    assert parts["training"] == parts["resident"] + parts["gradients"] + parts["gathered"] + parts["backward"]
    assert parts["total"] == max(parts["sampling"], parts["training"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(prompts_per_step=128), 128 * (300 * 24 * 2 + 160 + 256 * 96 * 2)),
        # copies of keys, values
        (dict(prompts_per_step=8, max_tokens=9744), 8 * (10_000 * 24 * 2 + 160 + 10_000 * 2 * 8 * 2)),
    ],
)
def test_generating_holds_cache_and_prefill(changes, expected):
    """Of all rows at once; keys and values copied for every query head where that is more."""
    args = flags(**{**dict(rollouts_per_prompt=4, max_tokens=44), **changes})
    assert round(memory.predict(TINY, args, 4)["generating"] * 1e9) == expected


def test_parts_follow_the_flags(documented):
    """Ranks divide what is sharded and nothing else; --shard-over bounds that; the other flags change their part."""
    config = documented["large"]
    eight, four = (memory.predict(config, flags(), world) for world in (8, 4))
    for name in ("weights", "moments", "gradients", "generating"):
        assert four[name] == pytest.approx(2 * eight[name])
    for name in ("copy", "gathered", "backward", "scoring"):
        assert four[name] == eight[name]
    assert memory.predict(config, flags(shard_over=4), 8)["weights"] == four["weights"]
    assert memory.predict(config, flags(generate_batch=16), 8)["generating"] == pytest.approx(eight["generating"] / 4)
    assert memory.predict(config, flags(recompute=False), 8)["backward"] > 5 * eight["backward"]
    bounded, free = (memory.predict(config, flags(), 1, room)["sampling"] for room in (150, math.inf))
    assert bounded < 150 < free  # a GPU's size bounds the cache


def test_an_adapter_is_all_that_has_moments():
    """Rank 2 beside every linear map: 2 (in + out) numbers each."""
    adapter = 3 * 2 * (16 + 12 + 12 + 16 + 24 + 24 + 24)  # layers; q, k, v, o, gate, up, down
    assert memory.parameters(TINY, 2) == (TOTAL + adapter, adapter, WHOLE + adapter)
    parts = memory.predict(TINY, flags(lora_rank=2), 4)
    assert parts["moments"] == pytest.approx(2 * adapter / 1e9) and parts["gradients"] == parts["moments"] / 2
    assert parts["weights"] == pytest.approx((TOTAL + adapter) / 1e9)


def test_one_rank_in_float32_has_no_copy():
    """It trains the model that samples; nothing is gathered. Head sizes of their own are read."""
    plain = memory.predict(TINY, flags(dtype="float32"), 1)
    assert plain["copy"] == plain["gathered"] == 0
    assert memory.predict(TINY, flags(), 1)["copy"] > 0
    args = flags(prompts_per_step=1, max_tokens=3)
    llama = [LlamaConfig(**SHAPE, intermediate_size=16, head_dim=dim) for dim in (4, 8)]
    narrow, wide = (memory.predict(config, args, 1)["generating"] for config in llama)
    assert wide - narrow == pytest.approx(8 * 259 * 2 * 3 * 4 * 2 / 1e9)  # 256 + 3 tokens


def test_as_many_rollouts_at_a_time_as_fit(monkeypatch):
    """Four fifths of what is free, over a rollout's bytes in the model's dtype; at least one."""
    model = AutoModelForCausalLM.from_config(TINY)  # 3 layers, one head of 4 numbers; 2 query heads; 10 logits
    for dtype, row in (torch.float32, 4 * 100 * (24 + 16) + 160), (torch.bfloat16, 2 * 100 * (24 + 16) + 160):
        for rows, expected in (7.01, 7), (6.99, 6), (0, 1):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=int(rows * row / 0.8): (free, 0))
            assert memory.rows_that_fit(model.to(dtype), 10, 90) == expected


@pytest.mark.parametrize("room, warnings", [((80, 999), 0), ((40, 999), 1), ((40, 300), 2)])
def test_the_plan_of_the_papers_recipe(room, warnings, documented, monkeypatch):
    """7.6B parameters with AdamW fit eight GPUs of 80 GB; what the plan says, and where it warns."""
    for name, gb in zip(("room_gb", "free_gb"), room, strict=True):
        monkeypatch.setattr(memory, name, lambda place, gb=gb: gb)
    parts = memory.predict(documented["large"], flags(), 8)
    assert 30 < parts["sampling"] < 70 and 30 < parts["training"] < 70
    first, disk, *others = memory.notes(parts, torch.device("cuda"), None, 2)
    assert first.startswith(f"memory a rank, predicted: sampling {parts['sampling']:.1f} GB, training ")
    assert first.endswith(" of which 26.7 GB stay all the time")
    assert disk.startswith("a checkpoint takes 107 GB; 2 stay")
    assert len(others) == warnings and all(line.startswith("WARNING") for line in others)


@pytest.mark.parametrize(
    "device, changes, rooms, names",
    [
        ("cuda", {}, dict(room_gb=80), ["--model M", "137.1 GB", "80.0 GB", "--lora-rank 16, more GPUs or"]),
        ("cuda", {}, dict(room_gb=140), []),  # too little for activations: a warning of the plan's
        ("cpu", {}, dict(room_gb=999), ["--model M", "7.6 billion parameters on a CPU", "at most 2 billion"]),
        ("cpu", dict(force=True), dict(room_gb=1), []),
        ("cpu", dict(force=True), dict(room_gb=999, free_gb=100), ["--out runs", "107 GB", "100 GB of the disk"]),
    ],
)
def test_what_can_never_fit_is_refused(device, changes, rooms, names, documented, monkeypatch):
    """7.6B parameters: 18 bytes each on one GPU. The remedies are named; --force goes on, but needs a disk."""
    for name, room in (dict(free_gb=999) | rooms).items():
        monkeypatch.setattr(memory, name, lambda place, room=room: room)
    ranks = parallel.Ranks(0, 1, torch.device(device))
    with pytest.raises(BadInput) if names else contextlib.nullcontext() as refused:
        memory.refuse_what_cannot_fit(memory.predict(documented["large"], flags(**changes), 1), flags(**changes), ranks)
    for name in names:
        assert name in str(refused.value)


class LiveBytes(TorchDispatchMode):
    """What the tensors that are made inside hold, and the most that they ever held."""

    def __init__(self):
        super().__init__()
        self.storages = set()  # that live
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in self.storages:
                storage = value.untyped_storage()
                self.storages.add(storage._cdata)
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return output

    def freed(self, storage: int, size: int) -> None:
        """A storage has gone."""
        self.storages.remove(storage)
        self.now -= size


@pytest.mark.parametrize(
    "recompute, shape",
    [
        ("--recompute", dict(hidden_size=96, num_hidden_layers=4, intermediate_size=384, vocab_size=500)),
        ("--no-recompute", dict(hidden_size=64, num_hidden_layers=2, intermediate_size=128, vocab_size=6000)),
    ],
)
def test_predictions_are_the_bytes_that_live(recompute, shape, monkeypatch):
    """A step of GRPO in float32 on one rank, of full-length rollouts: .95 to 1.3 times its largest moment."""
    config = Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    sizes = "--prompts-per-step 2 --prompts-per-update 2 --max-tokens 100 --micro-tokens 1424"
    args = parse_args(f"--task math --method grpo --model x --device cpu --dtype float32 {recompute} {sizes}".split())
    prompts = torch.randint(1, 500, (16, memory.PROMPT))
    ones = torch.ones(16, args.max_tokens).bool()
    responses = torch.randint(1, 500, ones.shape)
    rollouts = grpo.Rollouts(prompts, torch.ones_like(prompts).bool(), responses, ones, ones[:, 0], [""] * 16)
    monkeypatch.setattr(harness.run, "sample", lambda *inputs: rollouts)
    predicted = memory.predict(config, args, 1)
    with LiveBytes() as live:
        ranks = parallel.join("cpu")
        model = AutoModelForCausalLM.from_config(config).eval()
        run = assemble(args, ranks, Task("math", [], [], None, None), model, None, None)
        for parameter in run.trained.parameters():
            parameter.grad = torch.zeros_like(parameter)
        run.optimizer.step()  # which makes AdamW's moments
        run.optimizer.zero_grad()
        live.peak = 0
        problems = [{"problem": number} for number in range(2)]
        clock = report.Clock(ranks.device)
        verdicts = [Verdict(row % 2.0, "drawn") for row in range(16)]
        batch = Batch.of(harness.run.sample(run, problems, 8, 1.0), verdicts, problems)
        batch = train.with_credit(run, batch, 1, clock)
        sampling, live.peak = live.peak, 0
        train.update(run, batch, 1)
    assert 0.95 < 1e9 * (predicted["resident"] + predicted["scoring"]) / sampling < 1.3
    assert 0.95 < 1e9 * predicted["training"] / live.peak < 1.3
