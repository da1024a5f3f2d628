"""credit/salience.py: every signal against a slow computation of its own, one rollout and one token
at a time.
"""

import copy
import math

import pytest
import torch
from made import byte_tokenizer, learned, with_a_stop

from credit import lora, salience
from credit.salience import Answer, answer_places
from credit.tokens import char_starts
from grpo import Policy, Rollouts, score

TEXTS = [
    "a=1+2=1+2=3\nb=a*7=3*7=1\n\\boxed{1}",
    *("a=1+2=1+2=3\nb=a*7", "b=a*7=4\n\\boxed{23}", "\\boxed{5}", "\\boxed{}"),
]


PROBES = pytest.mark.parametrize("probe", ("kl", "logp"))


@pytest.fixture
def asked(tiny):
    """A tiny model and responses of several lengths: with a box, without, with two digits, nothing
    but a box.
    """
    model, tokenizer = tiny
    prompts = ["a=1+2;b=a*7;b?\n", "b=4-1;b?\n"] * 3
    return Policy(model), tokenizer, with_a_stop(tokenizer, prompts[:5], TEXTS)


def encoded(tokenizer, text: str) -> Rollouts:
    """The text as one response without a prompt and without a stop token."""
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    mask = torch.ones_like(ids).bool()
    return Rollouts(ids[:, :0], mask[:, :0], ids, mask, torch.zeros(1).bool(), [text])


def whole(rollouts: Rollouts, row: int) -> tuple[torch.Tensor, int]:
    """Prompt and response of one rollout, (S,), and where the response starts."""
    prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
    return torch.cat([prompt, rollouts.ids[row][rollouts.mask[row]]]), len(prompt)


# ---- where the answer stands ---------------------------------------------------------------------


def test_answer_places_of_one_symbol_tokens(asked):
    """24 tokens of work, the box, the digits after it; a box with nothing before or in it was not
    worked out.
    """
    _, tokenizer, rollouts = asked
    assert answer_places(tokenizer, rollouts) == [
        Answer(24, 25, 26),
        None,
        Answer(8, 9, 11),
        None,
        None,
    ]


def test_answer_places_where_tokens_hold_more_than_the_answer():
    """Tokens that end in the box's brace, or begin in the answer and run past it, belong to the
    answer.
    """
    tokenizer = byte_tokenizer(more=("{\\", "}}"), merges=[("{", "\\"), ("}", "}")])
    text = "So é: \\boxed{7} no, \\boxed{\\pi{2}}"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    ((reasoning, start, end),) = answer_places(tokenizer, encoded(tokenizer, text))
    assert tokenizer.decode(ids[:reasoning]) == "So é: \\boxed{7} no, "
    assert tokenizer.convert_ids_to_tokens(ids[start:end]) == ["{\\", "p", "i", "{", "2", "}}"]


def test_an_answer_of_bytes_is_whole_and_a_long_one_is_cut():
    """All tokens of the character that it starts with; the first ANSWER_TOKENS of a box that holds
    a whole solution.
    """
    tokenizer = byte_tokenizer()
    for inside, answer in (("π", "π"), ("12" * 90, "12" * (salience.ANSWER_TOKENS // 2))):
        text = f"So \\boxed{{{inside}}}"
        ids = tokenizer(text)["input_ids"]
        ((reasoning, start, end),) = answer_places(tokenizer, encoded(tokenizer, text))
        assert (
            tokenizer.decode(ids[:reasoning]) == "So "
            and tokenizer.decode(ids[start:end]) == answer
        )


def test_char_starts_of_characters_in_several_tokens():
    """Bytes of one character start where it does; broken ones do not shift what follows."""
    tokenizer = byte_tokenizer()
    ids = tokenizer("aé😀 b\n中x")["input_ids"]
    assert char_starts(tokenizer, ids) == [0, 1, 1, 2, 2, 2, 2, 3, 4, 5, 6, 6, 6, 7]
    broken = (
        ids[:2] + ids[7:]
    )  # é without its second byte: one replacement character, then the space
    assert tokenizer.decode(broken)[2] == " " and char_starts(tokenizer, broken)[-6:] == [
        3,
        4,
        5,
        5,
        5,
        6,
    ]


# ---- importance for the answer -------------------------------------------------------------------


def kl_of(logits, others) -> float:
    p, q = logits.softmax(-1).tolist(), others.softmax(-1).tolist()
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def slow_importance(policy, rollouts, row, answer, pad, probe) -> list[float]:
    """Hide one token, run everything, compare: float64, no batches."""
    model, (ids, offset) = copy.deepcopy(policy.model).double(), whole(rollouts, row)
    places = range(offset + answer.start - 1, offset + answer.end - 1)
    importance = []
    clean = model(ids[None]).logits[0].log_softmax(-1)
    for token in range(answer.reasoning):
        masked = ids.clone()
        masked[offset + token] = pad
        other = model(masked[None]).logits[0].log_softmax(-1)
        if probe == "kl":
            mean, changed = (
                sum(logits[place] for place in places) / len(places) for logits in (clean, other)
            )
            change = kl_of(mean, changed)
        else:
            change = sum(
                (clean[place] - other[place])[ids[place + 1]].item() for place in places
            ) / len(places)
        importance.append(max(0.0, change))
    return importance


@PROBES
def test_importance_by_masking_is_that_of_one_token_at_a_time(asked, probe):
    """Also with masked copies in micro-batches of two; 0 outside of the reasoning."""
    policy, tokenizer, rollouts = asked
    answers = answer_places(tokenizer, rollouts)
    for micro_tokens in (100, 100_000):
        ours = salience.importance_by_masking(
            policy, rollouts, answers, pad=0, probe=probe, micro_tokens=micro_tokens
        )
        for row, answer in enumerate(answers):
            expected = torch.zeros(ours.shape[1])
            if answer:
                slow = slow_importance(policy, rollouts, row, answer, 0, probe)
                expected[: answer.reasoning] = torch.tensor(slow)
            torch.testing.assert_close(ours[row], expected, atol=1e-5, rtol=1e-3)


@PROBES
def test_importance_by_gradient_is_the_difference_that_a_small_step_makes(asked, probe):
    """|<dJ/de, e>| by central differences of J(e + noise + step * e_t) in float64, one token at a
    time.
    """
    policy, tokenizer, rollouts = asked
    answers = answer_places(tokenizer, rollouts)
    noise, limits = 1e-2, dict(probe=probe, micro_tokens=100)
    ours = salience.importance_by_gradient(policy, rollouts, answers, noise=noise, seed=4, **limits)
    model = copy.deepcopy(policy.model).double()
    for row in (0, 2):
        answer, (ids, offset) = answers[row], whole(rollouts, row)
        places = torch.arange(offset + answer.start - 1, offset + answer.end - 1)
        embeddings = model.get_input_embeddings()(ids).detach()
        moved = noise * salience._fixed_noise(answer.reasoning, embeddings.float(), 4).double()
        clean = model(inputs_embeds=embeddings[None]).logits[0, places].log_softmax(-1)
        for token in (0, 3, answer.reasoning - 1):
            changes = []
            for step in (1e-2, -1e-2):  # norms and softmax stay float32 in a float64 model
                noisy = embeddings.clone()
                noisy[offset : offset + answer.reasoning] += moved
                noisy[offset + token] += step * embeddings[offset + token]
                other = model(inputs_embeds=noisy[None]).logits[0, places].log_softmax(-1)
                if probe == "kl":
                    changes.append(kl_of(clean.mean(0), other.mean(0)))
                else:
                    changes.append(
                        (clean - other).gather(-1, ids[places + 1][:, None]).mean().item()
                    )
            slope = abs(changes[0] - changes[1]) / 2e-2
            assert ours[row, token].item() == pytest.approx(slope, rel=2e-2, abs=1e-6)
        assert (
            ours[row, : answer.reasoning].min() > 0
            and ours[row, answer.reasoning :].abs().max() == 0
        )
    assert ours[1].abs().max() == 0


def test_noise_of_a_token_does_not_depend_on_what_follows():
    """Or a rollout's importance would depend on the longest of its batch."""
    like = torch.zeros(1, 7)
    assert torch.equal(salience._fixed_noise(40, like, 0)[:3], salience._fixed_noise(3, like, 0))
    assert salience._fixed_noise(400, like, 0).std().item() == pytest.approx(1, abs=0.05)


# ---- other passes --------------------------------------------------------------------------------


def test_adapter_residual_is_the_distance_of_two_models(asked):
    """With the adapter and without, 0 while it is nothing; afterwards the adapter is on again."""
    policy, _, rollouts = asked
    plain = copy.deepcopy(policy.model)
    lora.add(policy.model, 2, seed=0)
    limits = dict(temperature=1.0, micro_tokens=100)
    hidden = score(policy, rollouts, **limits).hidden
    assert salience.adapter_residual(policy, rollouts, hidden, **limits).abs().max() == 0
    learned(policy.model)
    hidden = score(policy, rollouts, **limits).hidden
    ours = salience.adapter_residual(policy, rollouts, hidden, **limits)
    for row in range(5):
        ids, offset = whole(rollouts, row)
        states = [
            model.base_model(ids[None]).last_hidden_state[0, offset:]
            for model in (policy.model, plain)
        ]
        inside = rollouts.mask[row]
        torch.testing.assert_close(
            ours[row][inside], (states[0] - states[1]).norm(dim=-1), atol=1e-4, rtol=1e-4
        )
        assert ours[row][inside].min() > 0 and ours[row][~inside].sum() == 0


def test_attention_entropy_is_that_of_the_middle_layer(asked):
    """Against the weights that transformers hands out, row by row; afterwards attention is as it
    was.
    """
    policy, _, rollouts = asked
    config = copy.deepcopy(policy.model.config)
    config.update({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    model = type(policy.model)(
        config
    ).eval()  # three layers: the middle one is neither first nor last
    ours = salience.attention_entropy(Policy(model), rollouts, micro_tokens=150)
    assert (
        model.config._attn_implementation == "sdpa"
        and not model.model.layers[1].self_attn._forward_hooks
    )
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    for row in range(5):
        ids, offset = whole(rollouts, row)
        weights = (
            plain(ids[None], output_attentions=True).attentions[1][0].double()
        )  # (heads, S, S)
        for token in range(int(rollouts.mask[row].sum())):
            looks = weights[:, offset + token, : offset + token + 1]
            entropy = -(looks * looks.clamp_min(1e-300).log()).sum(-1).mean()
            expected = entropy / torch.tensor(offset + token + 1.0).log()
            assert ours[row, token].item() == pytest.approx(expected.item(), abs=1e-5)
            assert 0 <= ours[row, token] <= 1


def test_attention_is_restored_after_a_failure(asked, monkeypatch):
    """A pass that runs out of memory leaves neither the hook nor the plain kernel behind."""
    policy, _, rollouts = asked
    monkeypatch.setattr(salience, "end_to_end", lambda part: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        salience.attention_entropy(policy, rollouts, micro_tokens=150)
    assert policy.model.config._attn_implementation == "sdpa"
    assert not any(layer.self_attn._forward_hooks for layer in policy.model.model.layers)
