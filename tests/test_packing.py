"""fast/packing.py: rollouts packed end to end, or padded, say what each says alone, and get its
gradients.
"""

import copy
import dataclasses

import pytest
import torch
from cases import SMALL, adapted, small_gpt2
from make_believe import CUDA, Cuda
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from fast import packing, prefill
from fast.packing import packing_of
from grpo import PADDED, Policy, Rollouts, hf_generate, log_probs

FAMILIES = {
    "qwen2": {},
    "llama": {},
    "qwen3": dict(head_dim=16),
    "mistral": dict(sliding_window=None),
}
LENGTHS = [
    (3, 17),
    (9, 1),
    (1, 30),
    (12, 8),
    (5, 23),
    (2, 2),
    (7, 11),
    (4, 0),
]  # of prompt and response


def make(family="qwen2", spread=0.5, **options):
    """A small model with weights far from zero: its choices hang on every position and
    every mask.
    """
    shape = dict(vocab_size=40, max_position_embeddings=128, initializer_range=spread)
    shape |= (
        dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        | SMALL
        | dict(intermediate_size=48)
    )
    config = AutoConfig.for_model(family, **shape | FAMILIES.get(family, {}) | options)
    return AutoModelForCausalLM.from_config(config).eval()


def prompts(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of these lengths, padded left with random tokens, two columns more than
    needed.
    """
    lengths = torch.tensor(lengths)
    width = int(lengths.max()) + 2
    return torch.randint(0, 40, (len(lengths), width)), torch.arange(width) >= width - lengths[
        :, None
    ]


def of_unlike_lengths() -> Rollouts:
    """Eight rollouts of unlike lengths, the last one emptied; what stands in the padding must not
    matter.
    """
    prompt_ids, prompt_mask = prompts([prompt for prompt, _ in LENGTHS])
    responses = torch.tensor([response for _, response in LENGTHS])
    mask = torch.arange(33) < responses[:, None]
    return Rollouts(
        prompt_ids,
        prompt_mask,
        torch.randint(0, 40, (8, 33)),
        mask,
        torch.zeros(8).bool(),
        [""] * 8,
    )


@pytest.fixture
def ragged() -> Rollouts:
    return of_unlike_lengths()


def gradients(policy: Policy, rollouts: Rollouts, pulls: torch.Tensor, at_once: int) -> tuple:
    """Log-probabilities (B, T), `at_once` rollouts per pass, and the gradients of their sum
    weighted by `pulls`.
    """
    logp = torch.zeros_like(pulls)
    policy.zero_grad()
    for rows in torch.arange(len(rollouts.texts)).split(at_once):
        part = rollouts.take(rows)
        width = part.ids.shape[1]
        values = policy(part, 0.7).log_probs
        (values * pulls[rows, :width]).sum().backward()
        logp[rows, :width] = values.detach()
    trained = [
        parameter.grad.flatten() for parameter in policy.parameters() if parameter.requires_grad
    ]
    return logp, torch.cat(trained)


@pytest.mark.parametrize("packs, recompute, rank", [(0, False, 0), (1, False, 0), (1, True, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_micro_batches_of_any_size_are_one_rollout_at_a_time(
    family, packs, recompute, rank, ragged
):
    """Padded or packed, log-probabilities and gradients to 1e-5, also with an adapter that is not
    nothing.
    """
    plain = make(family, spread=0.3)
    if rank:
        adapted(plain, rank)
    model = copy.deepcopy(plain)
    policy = Policy(model, recompute, packing_of(model) if packs else PADDED)
    assert policy.layout == ((packing.packed, packing.pack) if packs else PADDED)
    pulls = torch.randn(ragged.ids.shape)
    expected, gradient = gradients(Policy(plain), ragged, pulls, at_once=1)
    for at_once in (2, 8):
        ours, others = gradients(policy, ragged, pulls, at_once)
        assert_close(ours, expected, atol=1e-5, rtol=0)
        assert (others - gradient).norm() / gradient.norm() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_of_one_prompt_compute_with_it_once(family, ragged, monkeypatch):
    """Wherever they stand in a micro-batch: log-probabilities, entropies, states and gradients as
    one at a time. Two prompts differ in their padding's mask alone, two in their ids.
    """
    monkeypatch.setattr(packing, "SHORT", 0)
    of_row = torch.tensor(
        [2, 0, 1, 2, 1, 2, 2, 0]
    )  # the prompt of each rollout, of 3, 9 and 9 tokens
    prompt = {
        "prompt_ids": ragged.prompt_ids[of_row // 2],
        "prompt_mask": ragged.prompt_mask[of_row.clamp_max(1)],
    }
    rollouts, plain = dataclasses.replace(ragged, **prompt), make(family, spread=0.3)
    assert packing.packed(rollouts)[0].shape[1] == (2 + 8 + 8) + 8 + int(rollouts.mask.sum())
    model, pulls = copy.deepcopy(plain), torch.randn(ragged.ids.shape)
    policy, alone = Policy(model, layout=packing_of(model)), Policy(plain)
    ours, others = (
        log_probs(each, rollouts, temperature=0.7, micro_tokens=tokens)
        for each, tokens in ((policy, 70), (alone, 1))
    )
    for name in ("log_probs", "entropies", "hidden"):
        assert_close(getattr(ours, name), getattr(others, name), atol=1e-5, rtol=0)
    (_, gradient), (_, expected) = (
        gradients(policy, rollouts, pulls, 8),
        gradients(alone, rollouts, pulls, 1),
    )
    assert (gradient - expected).norm() / expected.norm() < 1e-5


def test_nothing_grows_with_the_square_of_the_tokens(ragged):
    """A mask over all pairs of tokens would be the largest tensor of the pass by far."""

    class Largest(TorchDispatchMode):
        entries = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor):
                self.entries = max(self.entries, output.numel())
            return output

    model = make()
    policy = Policy(model, layout=packing_of(model))
    many = Rollouts.cat([ragged] * 4)
    with torch.no_grad(), Largest() as largest:
        policy(many, 1.0)
    tokens = sum(many.lengths)
    assert tokens * 40 < largest.entries + 1 < tokens**2 / 4  # 48 numbers a token in a layer


def test_a_model_that_packs_samples_as_before():
    """Greedy tokens of `generate` with padded prompts; the folder that it is saved to names no
    attention.
    """
    model = make()
    inputs = prompts([3, 9, 1, 6])
    limits = dict(max_tokens=12, temperature=0.0, stops=[], pad=0)
    before = hf_generate(model, *inputs, **limits)
    assert packing_of(model) != PADDED and model.config._attn_implementation == "packed"
    assert torch.equal(hf_generate(model, *inputs, **limits), before)
    assert "packed" not in model.config.to_json_string()


WINDOW = dict(sliding_window=8, use_sliding_window=True, max_window_layers=1)
ROPE = dict(factor=2.0, rope_theta=10_000.0, original_max_position_embeddings=64)
LONG = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4)


@pytest.mark.parametrize(
    "packs, family, options",
    [
        (True, "qwen2", dict(sliding_window=8, use_sliding_window=False)),
        (True, "llama", dict(rope_parameters=ROPE | dict(rope_type="yarn"))),
        (False, "llama", dict(rope_parameters=ROPE | dict(rope_type="dynamic"))),
        (False, "llama", dict(rope_parameters=ROPE | LONG)),
        (False, "qwen2", dict(layer_types=["full_attention", "chunked_attention"])),
        (False, "mistral", dict(sliding_window=8)),
        (False, "qwen2", WINDOW),
        (False, "qwen3", WINDOW),
    ],
)
def test_only_full_attention_packs(packs, family, options):
    """The loop over rollouts knows no window, nor positions that depend on the longest row, nor
    other families. Nor is a prompt of those read once.
    """
    model, inputs = make(family, **options), prompts([60, 60])
    alike = [part[[0, 0]] for part in inputs]
    given = []
    prefill.shared_prefill(lambda *inputs, **limits: given.append(limits), model, *alike)
    assert [bool(limits) for limits in given] == [packs]
    assert (packing_of(model) != PADDED) == packs
    other = small_gpt2()
    assert packing_of(other) == PADDED and other.config._attn_implementation == "sdpa"


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py asks the kernel itself")
def test_the_kernel_of_a_gpu_is_given_what_sdpa_computes(monkeypatch):
    """In half precision on CUDA; a stand-in takes what `varlen_attn` does, and its result is
    SDPA's.
    """

    def varlen_attn(query, key, value, starts, same, longest, same_longest, *, scale, window_size):
        assert (
            query.shape == key.shape == value.shape
            and query.dtype == key.dtype == value.dtype == torch.bfloat16
        )
        assert (
            starts is same
            and starts.is_cuda
            and starts.dtype == torch.int32
            and starts[-1] == len(query)
        )
        assert longest == same_longest == 4 and window_size == (-1, 0)
        segment = torch.bucketize(torch.arange(len(query), device=CUDA), starts, right=True)
        q, k, v = (part.transpose(0, 1) for part in (query, key, value))  # (H, N, w)
        mask = (segment[:, None] == segment).tril()
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1)

    monkeypatch.setattr(packing, "varlen_attn", varlen_attn)
    starts, lengths = torch.tensor([0, 4, 7, 8], dtype=torch.int32), [4, 3, 1]
    places = lengths, [(0, 0)] * 3
    given = [torch.randn(1, heads, 8, 6).bfloat16() for heads in (4, 2, 2)]
    expected, _ = packing.packed_attention(
        None, *given, None, segments=packing.Segments(starts, *places), scaling=0.3
    )
    with Cuda():
        there = [part.to(CUDA) for part in given]
        segments = packing.Segments(starts.to(CUDA), *places)
        ours, _ = packing.packed_attention(None, *there, None, segments=segments, scaling=0.3)
        assert ours.is_cuda
    assert_close(ours, expected, atol=2e-2, rtol=0)
