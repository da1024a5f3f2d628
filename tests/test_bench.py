"""harness/memory.py against counts by hand, and studies/bench.py run in process as a user would run it.

Run: pytest tests/test_bench.py
"""

import argparse
import ast
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen2Config

import grpo
from harness import memory
from studies import bench

TINY = Qwen2Config(
    hidden_size=8,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=16,
    vocab_size=10,
    tie_word_embeddings=False,
)
# q, k, v, o (8 x 8, 8 x 4, 8 x 4, 8 x 8) with biases of q, k, v; gate, up, down; two norms
LAYER = 64 + 32 + 32 + 64 + (8 + 4 + 4) + 3 * 8 * 16 + 2 * 8
REST = 2 * 10 * 8 + 8  # embeddings, head, norm


def flags(**changes) -> argparse.Namespace:
    """The paper's recipe, as far as memory depends on it."""
    recipe = dict(
        dtype="bfloat16", micro_tokens=16_384, batch=512, minibatch=512, group=8, max_tokens=3000, recompute=True
    )
    usual = dict(shard_over=0, lora_rank=0, generate_batch=0, decode="generate", method="grpo")
    return argparse.Namespace(**{**recipe, **usual, **changes})


def test_parameters_are_those_of_the_model():
    """By hand for a tiny one; the published counts for the real shapes; tied weights count once."""
    assert memory.parameters(TINY) == (3 * LAYER + REST, LAYER, REST, 3 * LAYER + REST)
    assert memory.parameters(bench.architecture("7b"))[0] == 7_615_616_512
    assert memory.parameters(bench.architecture("1.5b"))[0] == 1_543_714_304


def test_parts_are_those_counted_by_hand():
    """Each part of a tiny model on four ranks."""
    args = flags(batch=32, group=4, max_tokens=44, micro_tokens=1000)
    parts = {name: round(gb * 1e9) for name, gb in memory.predict(TINY, args, 4).items()}
    total = 3 * LAYER + REST
    assert (parts["weights"], parts["moments"], parts["gradients"]) == (total, 2 * total, total)
    assert parts["copy"] == 2 * total
    # 8 rollouts a rank, 300 tokens each, aligned to 304; keys and values of 3 layers, one head of 4 numbers; logits
    assert parts["cache"] == 8 * (304 * 2 * 3 * 1 * 4 * 2 + 16 * 10)
    assert parts["prefill"] == 8 * 256 * (6 * 8 + 3 * 16) * 2  # of all rows at once
    many = flags(batch=512, group=4, max_tokens=44)
    long = flags(batch=32, group=4, max_tokens=9744)
    fast = flags(batch=512, group=4, max_tokens=44, decode="fast")
    prefills = [round(memory.predict(TINY, each, 4)["prefill"] * 1e9) for each in (many, long, fast)]
    assert prefills == [128 * 256 * 96 * 2, 8 * 10_000 * 2 * 8 * 2, 16_384 * 96 * 2]
    assert parts["inputs"] == 3 * 1000 * 8 * 2
    assert parts["layer"] == 1000 * (11 * 8 + 7 * 16) * 2
    assert parts["head"] == 3 * 4 * grpo.HEAD_CHUNK * 10
    assert parts["gathered"] == 2 * (2 * REST + 3 * LAYER)
    assert parts["reduction"] == 4 * LAYER * 5 / 4
    assert parts["credit"] == 0
    always = parts["weights"] + parts["moments"] + parts["copy"]
    assert parts["sampling"] == always + max(parts["cache"] + parts["prefill"], parts["scoring"])
    passing = max(parts["inputs"] + max(parts["layer"], parts["head"]), parts["reduction"])
    assert parts["training"] == always + parts["gradients"] + parts["gathered"] + passing
    assert parts["total"] == max(parts["sampling"], parts["training"])


def test_parts_follow_the_flags():
    """Ranks divide what is sharded and nothing else; --shard-over bounds that; the other flags change their part."""
    config = bench.architecture("7b")
    eight, four = (memory.predict(config, flags(), world) for world in (8, 4))
    for name in ("weights", "moments", "gradients", "cache"):
        assert four[name] == pytest.approx(2 * eight[name])
    for name in ("copy", "gathered", "inputs", "layer", "head", "scoring"):
        assert four[name] == eight[name]
    assert memory.predict(config, flags(shard_over=4), 8)["weights"] == four["weights"]
    assert memory.predict(config, flags(generate_batch=16), 8)["cache"] == pytest.approx(eight["cache"] / 4)
    assert memory.predict(config, flags(recompute=False), 8)["inputs"] > 10 * eight["inputs"]
    assert memory.predict(config, flags(micro_tokens=100), 8)["inputs"] == pytest.approx(
        eight["inputs"] * (memory.PROMPT + 3000) / 16_384
    )
    assert memory.predict(config, flags(method="shear"), 8)["credit"] > eight["credit"] == 0
    # A mini-batch of 8 rollouts, one a rank, fills no pass of 16,384 tokens; a GPU's size bounds the cache.
    assert memory.predict(config, flags(minibatch=8), 8)["inputs"] < eight["inputs"] / 5
    assert (
        memory.predict(config, flags(), 1, room=150)["sampling"] < 150 < memory.predict(config, flags(), 1)["sampling"]
    )


def test_an_adapter_is_all_that_has_moments_and_a_judge_stays():
    """Rank 2 beside every linear map: 2 (in + out) numbers each. A process reward model adds its size, no more."""
    adapter = 3 * 2 * (16 + 12 + 12 + 16 + 24 + 24 + 24)  # layers; q, k, v, o, gate, up, down
    assert memory.parameters(TINY, 2) == (3 * LAYER + REST + adapter, LAYER + adapter // 3, REST, adapter)
    parts = memory.predict(TINY, flags(lora_rank=2), 4)
    assert parts["moments"] == pytest.approx(2 * adapter / 1e9) and parts["gradients"] == parts["moments"] / 2
    assert parts["weights"] == pytest.approx((3 * LAYER + REST + adapter) / 1e9)
    config = bench.architecture("7b")
    plain, judged = memory.predict(config, flags(), 8), memory.predict(config, flags(method="prm"), 8, judge=14.0)
    for phase in ("sampling", "training"):
        assert judged[phase] == pytest.approx(plain[phase] + 14)


@pytest.mark.parametrize("method", ["shear", "first", "oar-g", "oar-p", "attention"])
def test_a_method_s_own_passes_are_counted(method):
    """For the others credit takes what scoring takes."""
    config = bench.architecture("7b")
    assert memory.predict(config, flags(method=method), 8)["credit"] > 1
    assert memory.predict(config, flags(method="hapo"), 8)["credit"] == 0


def test_one_rank_in_float32_has_no_copy():
    """It trains the model that samples; nothing is gathered or reduced. Head sizes of their own are read."""
    plain = memory.predict(TINY, flags(dtype="float32"), 1)
    assert plain["copy"] == plain["gathered"] == plain["reduction"] == 0
    assert memory.predict(TINY, flags(), 1)["copy"] > 0
    shape = dict(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, vocab_size=10)
    llama = [LlamaConfig(**shape, intermediate_size=16, head_dim=dim) for dim in (4, 8)]
    narrow, wide = (memory.predict(config, flags(batch=8, max_tokens=3), 1)["cache"] for config in llama)
    assert wide - narrow == pytest.approx(8 * 264 * 2 * 3 * 4 * 2 / 1e9)  # 256 + 3 tokens, aligned


def test_the_papers_recipe_fits_eight_gpus_of_80_gb():
    """7.6B parameters with AdamW; and the plan's line says what takes the memory."""
    parts = memory.predict(bench.architecture("7b"), flags(method="shear"), 8)
    assert 30 < parts["sampling"] < 70 and 30 < parts["training"] < 70
    line = memory.plan_line(parts)
    assert line.startswith(f"memory a GPU, predicted: sampling {parts['sampling']:.1f} GB (weights 3.8, moments 7.6,")
    assert "copy 15.2, cache 12.1, prefill 3.0), training" in line and "\n" not in line


def test_a_step_prints_its_table(capsys):
    """Every phase of both methods, shares that sum to 1, memory, overhead, bottleneck, and what was left out."""
    small = "--step --size tiny --tokens 12 --problems 2 --group 4 --threads 1 --window 6 --stride 3".split()
    assert bench.main([*small, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]
    table = {row[0]: row[1:] for row in rows}
    phases = ("generate", "grade", "score", "weights", "wait", "train", "refresh")
    for column in (1, 5):
        assert sum(float(table[phase][column].rstrip("%")) for phase in phases) == pytest.approx(100, abs=0.5)
    assert table["generate"][3].endswith("copy") and table["train"][3].endswith("matmul")
    assert table["sampling"][0] == "not on a CPU" and float(table["training"][1]) >= 0
    for said in ("torch", "ceilings", "overhead", "Next bottleneck", "every group mixed", "A share", "Sinkhorn"):
        assert said in printed


def test_a_step_in_bfloat16_is_the_sharded_one(capsys, monkeypatch):
    """FSDP over a mesh of one, a whole copy that samples, no optimizer: the path of a GPU, and its notes."""
    small = "--step --size tiny --tokens 6 --problems 1 --group 2 --threads 1 --window 6 --stride 3".split()
    step, max_tokens = bench.one_step, []
    monkeypatch.setattr(bench, "one_step", lambda run, *_: max_tokens.append(run.args.max_tokens) or step(run, *_))
    assert bench.main([*small, "--device", "cpu", "--dtype", "bfloat16", "--no-optimizer", "--repeat", "2"]) == 0
    printed = capsys.readouterr().out
    assert max_tokens == [6] * 5  # the warm-up, too, at full length: no method pays for shapes that are new
    assert "AdamW is left out" in printed and "median of 2" in printed and "step 2, shear" in printed


def test_rates_are_shares_of_the_ceilings():
    """Counts by hand: 2 and 6 FLOP a parameter and token; bytes read against the copy."""
    seconds = dict(generate=2.0, score=1.0, train=3.0, refresh=0.5)
    step = bench.Measured(seconds, {}, sampled=100, seen=150, bytes_read=4e9, iterations=None, skipped=0)
    ceilings = {"matmul": 1e12, "copy": 8e9}
    assert bench.of_ceiling("generate", step, ceilings, 10**8) == "25.0% copy"
    assert bench.of_ceiling("score", step, ceilings, 10**8) == "3.0% matmul"
    assert bench.of_ceiling("train", step, ceilings, 10**8) == "3.0% matmul"
    assert bench.of_ceiling("refresh", step, ceilings, 10**8) == ""
    slower = bench.Measured({**seconds, "score": 4.0}, {}, 100, 150, 4e9, None, 0)
    lines = "\n".join(bench.table({"shear": slower, "grpo": step}, ceilings, 10**8))
    assert "overhead over GRPO: +46.2% of the step (score +46.2%)" in lines
    assert "Next bottleneck: score, 42% of SHEAR's step, at 0.8% of the matmul ceiling." in lines


def test_weights_and_cache_are_read_once_a_token():
    """Two rollouts of three tokens after prompts of 5 and 7: contexts 5, 6, 7 and 7, 8, 9; weights once a batch."""
    config = bench.architecture("tiny")
    model = bench.AutoModelForCausalLM.from_config(config)
    weights, one = 4 * memory.parameters(config)[0], 4 * 2 * 2 * 2 * 16
    for at_a_time, batches in ((0, 1), (2, 1), (1, 2)):
        run = argparse.Namespace(sampler=model, args=argparse.Namespace(max_tokens=3, generate_batch=at_a_time))
        assert bench.bytes_read(run, [5, 7]) == batches * 3 * weights + (5 + 6 + 7 + 7 + 8 + 9) * one


def test_a_step_needs_neither_pot_nor_geomloss():
    """No file that `bench.py` imports when it is loaded imports them: they are for the table of peers."""
    root, seen, todo = Path(bench.__file__).parents[1], set(), ["studies.bench"]
    while todo:
        name = todo.pop()
        path = root / f"{name.replace('.', '/')}.py"
        if name in seen or not path.exists():
            seen.add(name)
            continue
        seen.add(name)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                todo += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    assert {"train", "grpo", "harness.memory"} <= seen
    assert not {"ot", "ot.batch", "geomloss"} & seen


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--step --size huge", "--size"),
        ("--step --problems 0", "--problems 0"),
        ("--step --tokens 5000", "--tokens 5000"),
        ("--step --group 1", "--group 1"),
        ("--step --method grpo", "--method is fixed"),
        ("--step --stride 200", "--stride 200"),
        ("--step --bogus 3", "--bogus"),
    ],
)
def test_bad_flags_are_one_sentence(argv, said, capsys):
    """Status 2, and the flag is named."""
    assert bench.main(argv.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_torchrun_is_refused(monkeypatch, capsys):
    """The table is of one rank."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench.main(["--step", "--size", "tiny"]) == 2
    assert "torchrun" in capsys.readouterr().err
