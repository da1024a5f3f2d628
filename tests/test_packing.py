"""fast/packing.py: rollouts packed end to end, or padded, say what each says alone, and get its gradients."""

import copy

import pytest
import torch
from cases import adapted, small_gpt2
from test_decode import FAMILIES, generated, make, prompts
from torch.utils._python_dispatch import TorchDispatchMode

from fast import packing
from fast.packing import packing_of
from grpo import Policy, Rollouts, log_probs, spread

LENGTHS = [(3, 17), (9, 1), (1, 30), (12, 8), (5, 23), (2, 2), (7, 11), (4, 0)]  # of prompt and response


@pytest.fixture
def ragged() -> Rollouts:
    """Eight rollouts of unlike lengths, the last one emptied; what stands in the padding must not matter."""
    prompt_ids, prompt_mask = prompts([prompt for prompt, _ in LENGTHS], extra=2)
    responses = torch.tensor([response for _, response in LENGTHS])
    mask = torch.arange(33) < responses[:, None]
    return Rollouts(prompt_ids, prompt_mask, torch.randint(0, 40, (8, 33)), mask, torch.zeros(8).bool(), [""] * 8)


def gradients(policy: Policy, rollouts: Rollouts, pulls: torch.Tensor, at_once: int) -> tuple:
    """Log-probabilities (B, T), `at_once` rollouts a pass, and the gradients of their sum weighted by `pulls`."""
    logp = torch.zeros(pulls.shape)
    policy.zero_grad()
    for rows in torch.arange(len(rollouts.texts)).split(at_once):
        part = rollouts.take(rows)
        width = part.ids.shape[1]
        values = policy(part, 0.7)
        (values * pulls[rows, :width]).sum().backward()
        logp[rows, :width] = values.detach()
    trained = [parameter.grad.flatten() for parameter in policy.parameters() if parameter.requires_grad]
    return logp, torch.cat(trained)


@pytest.mark.parametrize("packs, recompute, rank", [(0, False, 0), (1, False, 0), (1, True, 0), (1, True, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_micro_batches_of_any_size_are_one_rollout_at_a_time(family, packs, recompute, rank, ragged):
    """Padded or packed, log-probabilities and gradients to 1e-5, also with an adapter that is not nothing."""
    plain = make(family, spread=0.3)
    if rank:
        adapted(plain, rank)
    model = copy.deepcopy(plain)
    policy = Policy(model, recompute, **(packing_of(model) if packs else {}))
    assert (policy.lay_out is packing.packed) == (policy.pack is packing.pack) == bool(packs)
    pulls = torch.randn(ragged.ids.shape)
    expected, gradient = gradients(Policy(plain), ragged, pulls, at_once=1)
    for at_once in (1, 2, 8):
        ours, others = gradients(policy, ragged, pulls, at_once)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
        assert (others - gradient).norm() / gradient.norm() < 1e-5


def test_scores_are_those_of_one_rollout_at_a_time(ragged):
    """Log-probabilities, entropies and states, by micro-batches in an order of their own."""
    plain = make()
    model = copy.deepcopy(plain)
    ours = log_probs(Policy(model, **packing_of(model)), ragged, temperature=0.7, micro_tokens=70)
    for row in range(8):
        alone = log_probs(Policy(plain), ragged.take(torch.tensor([row])), temperature=0.7, micro_tokens=70)
        length = LENGTHS[row][1]
        torch.testing.assert_close(ours.log_probs[row, :length], alone.log_probs[0, :length], atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.entropies[row, :length], alone.entropies[0, :length], atol=1e-5, rtol=0)
        states = spread(ours.hidden, ragged.mask)[row, :length]
        torch.testing.assert_close(states, alone.hidden, atol=1e-5, rtol=0)


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
    policy = Policy(model, **packing_of(model))
    many = Rollouts.cat([ragged] * 4)
    with torch.no_grad(), Largest() as largest:
        policy(many, 1.0)
    tokens = sum(many.lengths)
    assert tokens * 40 < largest.entries + 1 < tokens**2 / 4  # 48 numbers a token in a layer


def test_a_model_that_packs_samples_as_before():
    """Greedy tokens of `generate` with padded prompts; the folder that it is saved to names no attention."""
    model = make()
    inputs = *prompts([3, 9, 1, 6]), 12, []
    before = generated(model, *inputs)
    assert packing_of(model) and model.config._attn_implementation == "packed"
    assert torch.equal(generated(model, *inputs), before)
    assert "packed" not in model.config.to_json_string()


def test_other_models_are_padded():
    """A family that no test compares, and a window, which the loop over rollouts does not know."""
    for model in (small_gpt2(), make("mistral", sliding_window=8)):
        assert not packing_of(model)
        assert model.config._attn_implementation == "sdpa"
