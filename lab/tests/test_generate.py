"""lab/fast/generate.py: rows that leave the batch change the time alone."""

from functools import partial

import pytest
import torch
from builders.small_models import family_model
from ragged import random_prompts
from scipy.stats import chi2_contingency

from grpo import hf_generate
from lab.fast.generate import fast_generate, live_rows
from lab.fast.packing import packing_of

LIMITS = dict(max_tokens=16, temperature=0.0, stops=[1, 2, 3, 4, 5], pad=0)
WINDOW = dict(sliding_window=8, use_sliding_window=True, max_window_layers=1)
HYBRID = dict(sliding_window=8, head_dim=16, tie_word_embeddings=False)
HYBRID["layer_types"] = ["sliding_attention", "full_attention"]
MAMBA = dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8)
CONVOLUTION = dict(layer_types=["conv", "full_attention"])


@pytest.mark.parametrize(
    ("family", "options", "leaves"),
    [
        ("qwen2", WINDOW, True),
        ("llama", {}, True),
        ("gemma3_text", HYBRID, True),
        ("lfm2", CONVOLUTION, False),
        ("falcon_h1", MAMBA, False),  # its layers hold keys and values, and states beside them
    ],
)
def test_greedy_tokens_are_those_of_generate(family, options, leaves, monkeypatch):
    """Greedy tokens are those of transformers' loop.

    So they are for prompts of unlike lengths, and for prompts that are read once. A cache that cannot drop rows takes transformers' loop. Models that can pack do pack.
    """
    monkeypatch.setattr("lab.fast.generate.SHORT", 0)
    model = family_model(family, **options)
    packing_of(model)
    ids, mask = (part[[0] * 5 + [1] + [2] * 4 + [3] * 2] for part in random_prompts([3, 9, 1, 6]))
    shared = ids[:, :-1].contiguous(), mask[:, :-1].contiguous()
    ids[:, -1] = torch.arange(6, 18)  # the same prompt but for its last token
    generate = partial(hf_generate, model, **LIMITS)
    if leaves:  # otherwise both loops are transformers' own
        assert torch.equal(generate(*shared, custom_generate=live_rows), generate(*shared))
    assert torch.equal(fast_generate(model, *shared, **LIMITS), generate(*shared))
    expected = generate(ids, mask)
    rows = []  # of each pass
    model.register_forward_pre_hook(
        lambda module, inputs, options: rows.append(len(options["input_ids"])), with_kwargs=True
    )
    found = generate(ids, mask, custom_generate=live_rows)
    assert torch.equal(found, expected)
    assert (rows[-1] < len(found)) == leaves


def test_sampled_tokens_are_of_the_same_distribution():
    """By a chi-square test, 4,096 responses are of the kinds that transformers' loop draws."""
    model = family_model(vocab_size=4, spread=0.3)
    ids = torch.tensor([[1, 2]]).expand(4096, 2)
    mask = torch.ones(4096, 2, dtype=torch.bool)
    generate = partial(hf_generate, max_tokens=3, temperature=1.0, stops=[2, 3], pad=0)
    counts = []
    for loop in (None, live_rows):
        found = generate(model, ids, mask, custom_generate=loop)  # (4096, 3)
        counts.append((found @ torch.tensor([16, 4, 1])).bincount(minlength=64))
    table = torch.stack(counts)
    table = table[:, table.sum(0) >= 20]  # kinds too rare to be tested
    assert table.shape[1] > 8 and chi2_contingency(table).pvalue > 0.01
