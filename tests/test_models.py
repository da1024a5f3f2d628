"""Models that are refused, and a prompt that is read once."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from builders.commands import words_of
from builders.runs import ALONE, config_from, run_of, sharded
from builders.small_models import family_model, save_model, turns_tokenizer

import eval as evaluation
import train
from base.errors import BadInput
from base.files import write_rows
from grpo import Layout, end_to_end, hf_generate, rollout
from harness import models

GEMMA = dict(sliding_window=8, head_dim=16)
SIZES = (1e-3, 0.5)  # standard deviations of the weights
# The last layer compresses each four tokens.
BLOCKS = dict(num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2)
EXPERTS = dict(head_dim=16, intermediate_size_mlp=48, num_local_experts=2)


@pytest.mark.parametrize(
    "family, options, is_ours, spreads",
    [
        ("qwen2", {}, True, SIZES), ("gpt2", {}, True, SIZES), ("gemma3_text", GEMMA, True, SIZES),
        ("gemma2", GEMMA | dict(final_logit_softcapping=500.0), False, SIZES),
        ("granite", dict(logits_scaling=1.001), False, SIZES),
        ("gemma3_text", GEMMA | dict(use_bidirectional_attention=True), False, SIZES[:1]),
        ("llama4_text", EXPERTS, False, SIZES[:1]),
        ("bart", dict(decoder_layers=2), False, SIZES[:1]), ("deepseek_v4", BLOCKS, False, SIZES[:1]),
    ],
)  # fmt: skip
def test_a_model_whose_sampler_is_another_than_its_trainer_is_found_at_any_size(
    family, options, is_ours, spreads
):
    """A cap or a scale of the logits is found, a look ahead, and positions that count padding.

    Llama 4 has no base model under the name that its class gives.
    """
    for spread in spreads:
        model = family_model(family, spread, **options)
        before = model(torch.tensor([[1, 2, 3]])).logits
        assert models.computes_as_ours(model, turns_tokenizer(), [1, 2, 3, 4]) == is_ours
        assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, before)  # no hook stays


@pytest.fixture
def without_embedding(tmp_path):
    """The folder of a model whose tokenizer has two tokens more than there are embeddings.

    One of them pads.
    """
    tokenizer = turns_tokenizer("<image>", "<pad>")
    tokenizer.pad_token = "<pad>"
    model = family_model(vocab_size=len(tokenizer) - 2, max_position_embeddings=512)
    return Path(save_model(tmp_path / "model", model, tokenizer))


def test_tokens_without_an_embedding_never_pad(without_embedding):
    """Responses to prompts of unlike lengths are those of the model's own tokenizer."""
    tokenizer = models.load_tokenizer("--model", str(without_embedding))
    model = models.load_model(str(without_embedding), ALONE.device, tokenizer)
    assert tokenizer.pad_token_id >= model.config.vocab_size
    prompts = ["1+1=?", "1", "What is 12*7?"]
    limits = dict(max_tokens=8, temperature=0.0)
    own = rollout(model, turns_tokenizer(), prompts, 2, **limits)
    assert rollout(model, tokenizer, prompts, 2, **limits).texts == own.texts


def test_a_prompt_with_a_token_without_an_embedding_is_refused(
    without_embedding, tmp_path, assert_refused
):
    """Training and evaluation refuse it before anything is sampled."""
    rows = [{"problem": "1", "answer": "1"}] * 39
    write_rows(tmp_path / "x.jsonl", [*rows, {"problem": "Describe <image>.", "answer": "1"}])
    words = "--model", "no embedding for '<image>', which a prompt or its template has"
    flags = words_of("--model", without_embedding, "--max-tokens 9 --out", tmp_path / "out --data")
    assert_refused(
        train.main, [*flags, tmp_path / "x.jsonl", "--heldout=1", "--eval-groups=1"], *words
    )
    assert_refused(
        evaluation.main, [*flags, f"amc23={tmp_path / 'x.jsonl'}", "--bench=amc23"], *words
    )


def test_rounding_leaves_the_rotary_frequencies(tiny):
    """In bfloat16 they would turn far tokens by wrong angles."""
    model, _ = tiny
    frequencies = model.model.rotary_emb.inv_freq.clone()
    models.round_weights(model, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


def attending_to_padding(model, prompt_ids, prompt_mask, **options):
    """A wrong stand-in for `hf_generate`."""
    return hf_generate(model, prompt_ids, torch.ones_like(prompt_mask), **options)


def one_token_late(rollouts):
    """A wrong stand-in for `end_to_end`."""
    ids, is_response, model_kwargs = end_to_end(rollouts)
    return ids.roll(1, dims=1), is_response, model_kwargs


@pytest.mark.parametrize(
    "changes, is_right",
    [
        (dict(generate=partial(hf_generate), layout=lambda model: Layout(end_to_end)), True),
        (dict(generate=attending_to_padding), False),
        (dict(layout=lambda model: Layout(one_token_late)), False),
    ],
)
def test_functions_of_use_must_sample_and_score_one_model(changes, is_right, tiny):
    """They are compared before the first step, as the run has them."""
    config = config_from(["--use", "builders.generating", "--temperature", "0.7"])
    loaded = run_of(config, None, *tiny)
    for hook, function in changes.items():
        setattr(loaded.hooks, hook, function)
    told = pytest.raises(BadInput, match="the log-probabilities of sampling and of scoring")
    with nullcontext() if is_right else told:
        sharded(loaded)
