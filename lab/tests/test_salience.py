"""lab/tools/salience.py: every signal against a slow computation of its own.

The slow one takes one rollout and one token at a time.
"""

import copy
from dataclasses import replace

import pytest
import torch
from builders.rollouts import rollouts_of
from builders.runs import recipe_with

from grpo import Policy, Rollouts
from harness.run import make_context
from lab.tools import salience
from lab.tools.salience import Answer, answer_places

TEXTS = [
    "a=1+2=1+2=3\nb=a*7=3*7=1\n\\boxed{1}",
    *("a=1+2=1+2=3\nb=a*7", "b=a*7=4\n\\boxed{23}", "\\boxed{5}", "\\boxed{}"),
]


PROBES = pytest.mark.parametrize("probe", ("kl", "logp"))


@pytest.fixture
def asked(tiny):
    """Responses of several lengths, and the context of a tiny model.

    There are responses with a box, without, with two digits in it, and of nothing but a box. The
    model passes 100 tokens at a time.
    """
    model, tokenizer = tiny
    prompts = ["a=1+2;b=a*7;b?\n", "b=4-1;b?\n"] * 3
    config = recipe_with(micro_tokens=100)
    context = replace(make_context(config, Policy(model), tokenizer, None, {}), step=4)
    return rollouts_of(tokenizer, prompts[:5], TEXTS), context


def answers_of(rollouts: Rollouts, context) -> list[tuple]:
    """Of each answer: row, tokens before it, ids of prompt and response, where the response starts.

    Last come the places that predict the answer.
    """
    found = []
    for row, answer in answer_places(context.tokenizer, rollouts).items():
        prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
        ids = torch.cat([prompt, rollouts.ids[row][rollouts.mask[row]]])  # (S,)
        places = torch.arange(answer.start, answer.end) + len(prompt) - 1
        found.append((row, answer.reasoning, ids, len(prompt), places))
    return found


# ---- where the answer stands ---------------------------------------------------------------------


def test_answer_places_of_one_symbol_tokens(asked):
    """A box with nothing before or in it is not an answer that was worked out."""
    rollouts, context = asked
    places = {0: Answer(24, 25, 26), 2: Answer(8, 9, 11)}
    assert answer_places(context.tokenizer, rollouts) == places


# ---- importance for the answer -------------------------------------------------------------------


def change_of(model, ids, places, embeddings, others, probe: str) -> float:
    """How far other embeddings (S, d) move what a float64 model predicts at the answer's places."""
    given = torch.stack([embeddings, others])
    clean, other = model(inputs_embeds=given).logits[:, places].log_softmax(-1)  # (n, V) each
    if probe == "kl":
        p, q = (values.mean(0).softmax(-1) for values in (clean, other))
        return (p * (p / q).log()).sum().item()
    return (clean - other).gather(-1, ids[places + 1][:, None]).mean().item()


@PROBES
def test_importance_by_masking_is_that_of_one_token_at_a_time(asked, probe):
    """Micro-batches of two masked copies give the same, and 0 outside of the reasoning."""
    rollouts, context = asked
    model = copy.deepcopy(context.policy.model).double()
    embed = model.get_input_embeddings()
    expected = torch.zeros(rollouts.mask.shape)
    for row, reasoning, ids, offset, places in answers_of(rollouts, context):
        for token in range(reasoning):
            masked = ids.clone()
            masked[offset + token] = 0
            change = change_of(model, ids, places, embed(ids), embed(masked), probe)
            expected[row, token] = max(0.0, change)
    answers = answer_places(context.tokenizer, rollouts)
    ours = salience.importance_by_masking(rollouts, context, answers, probe)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-3)


@PROBES
def test_importance_by_gradient_is_the_difference_that_a_small_step_makes(asked, probe):
    """Importance is |<dJ/de, e>|, by central differences in float64, one token at a time.

    The differences are of J(e + noise + step * e_t).
    """
    rollouts, context = asked
    answers = answer_places(context.tokenizer, rollouts)
    ours = salience.importance_by_gradient(rollouts, context, answers, probe, noise=1e-2)
    model = copy.deepcopy(context.policy.model).double()
    for row, reasoning, ids, offset, places in answers_of(rollouts, context):
        embeddings = model.get_input_embeddings()(ids).detach()
        noisy = embeddings.clone()
        noise = salience._fixed_noise(reasoning, embeddings.float(), context.step)
        noisy[offset : offset + reasoning] += 1e-2 * noise
        for token in (0, reasoning - 1):
            step = torch.zeros_like(embeddings)
            # norms and softmax stay float32 in a float64 model
            step[offset + token] = 1e-2 * embeddings[offset + token]
            up, down = (
                change_of(model, ids, places, embeddings, moved, probe)
                for moved in (noisy + step, noisy - step)
            )
            slope = abs(up - down) / 2e-2
            assert ours[row, token].item() == pytest.approx(slope, rel=2e-2, abs=1e-6)
        assert ours[row, reasoning:].abs().max() == 0
    assert ours[1].abs().max() == 0
