"""lab/fast/packing.py: packed or padded rollouts give what each gives alone, gradients included."""

import copy
import dataclasses

import pytest
import torch
from adapters import add_adapter
from builders.runs import config_from, run_of, sharded
from builders.small_models import family_model
from near import assert_near
from ragged import gradients, random_prompts, unlike_rollouts
from transformers import AttentionInterface

from base.errors import BadInput
from grpo import PADDED, Policy, score
from harness import fsdp
from lab.fast import packing
from lab.fast.generate import read_prompts
from lab.fast.packing import packing_of

FAMILIES = {
    "qwen2": {},
    "llama": {},
    "qwen3": dict(head_dim=16),
    "mistral": dict(sliding_window=None),
}
LONG = [pytest.param(family, marks=pytest.mark.long) for family in ("llama", "mistral")]


@pytest.mark.parametrize("packs, recompute, rank", [(0, False, 0), (1, False, 0), (1, True, 2)])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", *LONG])
def test_micro_batches_of_any_size_are_one_rollout_at_a_time(family, packs, recompute, rank):
    """Padded or packed, log-probabilities and gradients are the same to 1e-5.

    This also holds with an adapter that is not zero.
    """
    ragged = unlike_rollouts()
    plain = family_model(family, spread=0.3, **FAMILIES[family])
    if rank:
        add_adapter(plain, rank)
    model = copy.deepcopy(plain)
    policy = Policy(model, packing_of(model) if packs else PADDED)
    if recompute:
        fsdp.recompute_layers(model)
    assert (policy.layout == PADDED) != packs
    pulls = torch.randn(ragged.ids.shape)
    expected, gradient = gradients(Policy(plain), ragged, pulls, at_once=1)
    for at_once in (2, 8):
        ours, others = gradients(policy, ragged, pulls, at_once)
        assert_near(ours, expected, 1e-5)
        assert (others - gradient).norm() / gradient.norm() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_of_one_prompt_compute_with_it_once(family, monkeypatch):
    """Wherever they stand in a micro-batch, all is as with one rollout at a time.

    That is log-probabilities, entropies, states and gradients. Two prompts differ in their
    padding's mask alone, two in their ids.
    """
    monkeypatch.setattr(packing, "SHORT", 0)
    ragged = unlike_rollouts()
    # the prompt of each rollout, of 3, 9 and 9 tokens
    of_row = torch.tensor([2, 0, 1, 2, 1, 2, 2, 0])
    ids = ragged.prompt_ids[of_row // 2]
    mask = ragged.prompt_mask[of_row.clamp_max(1)]
    rollouts = dataclasses.replace(ragged, prompt_ids=ids, prompt_mask=mask)
    assert packing.pack_rollouts(rollouts)[0].shape[1] == (2 + 8 + 8) + 8 + int(rollouts.mask.sum())
    plain = family_model(family, spread=0.3, **FAMILIES[family])
    pulls = torch.randn(ragged.ids.shape)
    model = copy.deepcopy(plain)
    policy = Policy(model, layout=packing_of(model))
    alone = Policy(plain)
    ours = score(policy, rollouts, temperature=0.7, micro_tokens=70)
    others = score(alone, rollouts, temperature=0.7, micro_tokens=1)
    for name in ("log_probs", "entropies", "hidden"):
        assert_near(getattr(ours, name), getattr(others, name), 1e-5)
    _, gradient = gradients(policy, rollouts, pulls, 8)
    _, expected = gradients(alone, rollouts, pulls, 1)
    assert (gradient - expected).norm() / expected.norm() < 1e-5


ROPE = dict(
    factor=2.0, rope_theta=10_000.0, original_max_position_embeddings=64, rope_type="dynamic"
)


@pytest.mark.parametrize(
    "packs, family, options",
    [
        (True, "qwen2", dict(sliding_window=8, use_sliding_window=False)),
        (False, "llama", dict(rope_parameters=ROPE)),
        (False, "qwen2", dict(layer_types=["full_attention", "chunked_attention"])),
        (False, "mistral", dict(sliding_window=8)),
    ],
)
def test_only_full_attention_packs(packs, family, options):
    """The loop over rollouts knows no window, no positions by the longest row, no other families.

    Nor is a prompt of those read once.
    """
    model = family_model(family, **options)
    inputs = random_prompts([60, 60])
    alike = [part[[0, 0]] for part in inputs]
    assert (read_prompts(model, *alike) is not None) == packs
    assert (packing_of(model) != PADDED) == packs
    other = family_model("gpt2")
    assert packing_of(other) == PADDED and other.config._attn_implementation == "sdpa"


def test_a_wrong_packed_attention_is_refused_before_a_run_starts(tiny, monkeypatch):
    """The plain functions are compared when a model is loaded, packed rows once they are set."""
    loaded = run_of(config_from(["--use", "lab.fast"]), None, *tiny)
    loaded.hooks.layout = packing_of
    sharded(loaded)

    def across_rollouts(*inputs, segments=None, **options):
        if segments:
            whole = [sum(segments.lengths)]
            segments = segments._replace(lengths=whole, shared=[(0, 0)])
        return packing.packed_attention(*inputs, segments=segments, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "packed", across_rollouts)
    loaded = run_of(config_from(["--use", "lab.fast"]), None, *tiny)
    loaded.hooks.layout = packing_of
    with pytest.raises(BadInput, match="the log-probabilities of sampling and of scoring differ"):
        sharded(loaded)
