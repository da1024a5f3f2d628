"""grpo.py: Eq. (1), the clipped loss, and that what was sampled is what is scored and trained on."""

import math
from types import SimpleNamespace

import pytest
import torch
from builders.rollouts import sample_rollouts
from builders.small_models import family_model
from scipy.stats import chisquare
from tokenizers import AddedToken
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)

import grpo
from grpo import (
    Policy,
    Rollouts,
    decode,
    group_advantages,
    hf_generate,
    policy_loss,
    rollout,
    score,
)
from harness import fsdp
from harness.fsdp import Ranks, own_micro_batches
from harness.models import stop_ids

# ---- advantages and loss -------------------------------------------------------------------------


def test_group_advantages_are_equation_1(must_fail):
    """Eq. (1): (r - mean) / (std + 1e-6) of each group, std unbiased."""
    ours = group_advantages(torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0]), 4)
    half = 0.5 / math.sqrt(1 / 3)
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5, half, half, -half, -half])
    assert_close(ours, expected, atol=1e-5, rtol=0)
    with must_fail("a biased std"):
        biased = expected * math.sqrt(4 / 3)
        assert_close(ours, biased, atol=1e-5, rtol=0)


def test_equal_rewards_and_missing_verdicts_get_no_advantage():
    """Equal rewards give 0, also 0.1s, whose mean rounds; a NaN leaves mean and std."""
    for equal in (0.0, 1.0, 0.1):
        assert not group_advantages(torch.full((7,), equal), 7).any()
    ours = group_advantages(torch.tensor([1.0, 0, *[math.nan] * 4, 0, *[math.nan] * 5]), 4, 0.1)
    assert_close(ours[:2], torch.tensor([0.5, -0.5]) / (math.sqrt(0.5) + 0.1), atol=1e-5, rtol=0)
    assert not ours[2:].any()


# ratio, advantage -> loss of the token, and its gradient by the log-probability: 0 where the clip
# holds. The bounds are 1 - .2 below and 1 + .28 above; .75 and 1.25 lie between these and the
# bounds with the two exchanged.
CLIPPED = [
    (2.0, 1.0, -1.28, 0.0), (2.0, -1.0, 2.0, 2.0), (1.25, 1.0, -1.25, -1.25), (1.25, -1.0, 1.25, 1.25),
    (0.75, 1.0, -0.75, -0.75), (0.75, -1.0, 0.8, 0.0), (0.5, 3.0, -1.5, -1.5), (0.5, -3.0, 2.4, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("ratio, advantage, loss, gradient", CLIPPED)
def test_the_clip_token_by_token(ratio, advantage, loss, gradient):
    """-min(rho A, clip(rho) A) of one token beside one that is padded, both bounds and signs of A."""
    logp = torch.tensor([[math.log(ratio), 99.0]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    advantages = torch.tensor([[advantage, 5.0]])
    ours, metrics = policy_loss(logp, torch.zeros(1, 2), advantages, mask)
    assert ours.item() == pytest.approx(loss, abs=1e-6)
    assert metrics["clipped"] == (gradient == 0)
    ours.backward()
    assert_close(logp.grad, torch.tensor([[gradient, 0.0]]), atol=1e-6, rtol=0)


def test_the_loss_is_the_sum_over_all_tokens(must_fail):
    """The tokens of the micro-batch are summed; the caller divides by those of the whole step."""
    ratios, advantages, losses, _ = torch.tensor(CLIPPED).T.reshape(4, 2, 4)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    loss, metrics = policy_loss(ratios.log(), torch.zeros(2, 4), advantages, mask)
    assert loss.item() == pytest.approx(losses[mask].sum().item(), abs=1e-6)
    apart = ratios.log()[mask].abs().sum().item()
    assert metrics == pytest.approx({"clipped": 3, "abs_log_ratio": apart})
    with must_fail("the mean over rollouts of their means"):
        of_rollouts = (losses * mask).sum(1) / mask.sum(1)
        assert loss.item() == pytest.approx(of_rollouts.mean().item(), abs=1e-6)


def test_the_loss_takes_advantages_of_rollouts_and_extreme_ratios():
    """A (B,) is A on every token of its rollout; a ratio beyond float32 leaves the loss finite."""
    logp = torch.randn(2, 4)
    old = torch.zeros(2, 4)
    mask = torch.ones(2, 4).bool()
    of_rollouts = torch.tensor([2.0, -1.0])
    one = policy_loss(logp, old, of_rollouts, mask)
    assert one == policy_loss(logp, old, of_rollouts[:, None].expand(2, 4), mask)
    far, _ = policy_loss(old + 100, old, old - 1, mask)
    assert far.item() == pytest.approx(8 * math.exp(20))


# ---- scoring -------------------------------------------------------------------------------------


@pytest.fixture(params=["rotary", "absolute"])
def any_positions(request, tiny):
    """The tiny Qwen2, with relative positions, and a GPT-2, which left padding would shift."""
    if request.param == "rotary":
        return tiny
    return family_model("gpt2", spread=0.02, vocab_size=29), tiny[1]


@pytest.fixture
def chunks_of_7(monkeypatch):
    """The head is applied to 7 tokens at a time, across rollouts."""
    monkeypatch.setattr(grpo, "HEAD_CHUNK", 7)


@pytest.mark.usefixtures("chunks_of_7")
def test_scores_are_the_model_s_own_at_the_sampled_tokens(any_positions, must_fail):
    """They are those of one forward per rollout, without padding, at the sampler's temperature.

    y_t is predicted one position before its own; h_t is the state at its own.
    """
    model, _ = any_positions
    rollouts = sample_rollouts(any_positions)
    scored = score(Policy(model), rollouts, temperature=0.8, micro_tokens=150)
    assert not scored.hidden.requires_grad and not scored.log_probs.requires_grad
    hidden = grpo.to_padded(scored.hidden, rollouts.mask)  # (B, T, d)
    near = dict(atol=2e-5, rtol=0)
    for row, mask in enumerate(rollouts.mask):
        prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
        response = rollouts.ids[row][mask]
        with torch.no_grad():
            output = model(torch.cat([prompt, response])[None], output_hidden_states=True)
        logits = output.logits[0, len(prompt) - 1 : -1] / 0.8
        of_next = torch.distributions.Categorical(logits=logits)
        assert_close(scored.log_probs[row][mask], of_next.log_prob(response), **near)
        assert_close(scored.entropies[row][mask], of_next.entropy(), **near)
        states = output.hidden_states[-1][0]
        assert_close(hidden[row][mask], states[len(prompt) :], **near)
        with must_fail("the state that predicts y_t"):
            assert_close(hidden[row][mask], states[len(prompt) - 1 : -1], **near)


@pytest.mark.usefixtures("chunks_of_7")
@pytest.mark.parametrize("recompute", [False, True])
def test_head_in_chunks_and_recomputed_layers_give_the_plain_gradient(tiny, recompute):
    """Log-probabilities and gradients are those with logits (b, T, V) at once and kept activations.

    The head sees at most HEAD_CHUNK tokens at a time, forward and again backward; a layer runs again
    backward only if it is recomputed.
    """
    model, _ = tiny
    rollouts = sample_rollouts(tiny)
    pulls = torch.randn(rollouts.ids.shape)
    ids, is_response, _ = grpo.end_to_end(rollouts)
    log_probs = (model(ids).logits[:, :-1] / 0.7).log_softmax(-1)
    expected = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)[is_response[:, 1:]]
    (expected * pulls[rollouts.mask]).sum().backward()
    plain = [weights.grad for weights in model.parameters()]
    model.zero_grad()
    seen = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda head, inputs, logits: seen.append(len(logits)))
    passes = []
    part_of_a_layer = next(fsdp.layers_of(model)[0].children())
    part_of_a_layer.register_forward_hook(lambda part, inputs, output: passes.append(part))
    if recompute:
        fsdp.recompute_layers(model)
    logp = Policy(model)(rollouts, 0.7).log_probs
    assert_close(logp[rollouts.mask], expected, atol=2e-5, rtol=0)
    (logp * pulls).sum().backward()
    assert_close([weights.grad for weights in model.parameters()], plain, atol=1e-4, rtol=1e-4)
    assert max(seen) == 7 and sum(seen) == 2 * len(expected)
    assert len(passes) == (2 if recompute else 1)


def test_logits_of_a_bfloat16_head_are_divided_in_float32(must_fail):
    """Rounding the quotient once more would move a log-probability by up to .4%."""
    head = torch.nn.Linear(8, 50).bfloat16()
    states = 9 * torch.randn(20, 8).bfloat16()
    tokens = torch.randint(0, 50, (20,))
    ours, _ = grpo._log_probs_of(head, states, tokens, 0.7, False)

    def log_probs(logits):
        return logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)

    assert torch.equal(ours, log_probs(head(states).float() / 0.7))
    with must_fail("in bfloat16"):
        assert_close(ours, log_probs((head(states) / 0.7).float()))


# ---- sampling ------------------------------------------------------------------------------------


@pytest.fixture
def qwen(qwen_folder) -> tuple:
    """The model of the folder, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(qwen_folder)
    return model, AutoTokenizer.from_pretrained(qwen_folder)


def test_rollouts_keep_the_sampled_ids_up_to_a_stop_token(qwen):
    """The mask is 1 through the first stop token, and `truncated` where there is none.

    Qwen's folder names <|endoftext|> and its tokenizer <|im_end|>; both end a response. The text is
    decoded from just the ids before it.
    """
    stops = stop_ids(*qwen)
    rollouts = rollout(*qwen, ["x"], 60, max_tokens=40, temperature=1.0, stops=stops)
    seen = set()
    for row, mask in enumerate(rollouts.mask):
        kept = rollouts.ids[row, : mask.sum()].tolist()
        assert not mask[len(kept) :].any()
        ends = [token for token in kept if token in stops]
        assert ends == ([] if rollouts.truncated[row] else [kept[-1]])
        assert rollouts.texts[row] == decode(qwen[1], kept[: len(kept) - len(ends)])
        seen.update(ends)
    assert seen == {0, 2} and rollouts.truncated.any()


def test_sampler_draws_from_the_softmax_whatever_the_folder_says(qwen):
    """First-token frequencies match softmax(logits / T) over all 259 tokens.

    The folder asks otherwise.
    """
    model, tokenizer = qwen
    penalties = dict(repetition_penalty=5.0, suppress_tokens=list(range(40)), eos_token_id=0)
    model.generation_config = GenerationConfig(
        do_sample=False, top_k=1, top_p=0.1, min_p=0.5, **penalties
    )
    draws = 6_000
    rollouts = rollout(model, tokenizer, ["x"], draws, max_tokens=1, temperature=0.2)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer("x")["input_ids"]])).logits[0, -1]
    expected = draws * (logits.double() / 0.2).softmax(-1)
    counts = rollouts.ids[:, 0].bincount(minlength=len(expected))
    assert chisquare(counts, expected).pvalue > 1e-5
    assert model.generation_config.top_k == 1  # and the folder's file is left as it was


def test_prompts_of_like_length_are_generated_together(tiny):
    """They are sorted by length within, and returned in the order asked for."""
    prompts = ["a=1;a?\n", "a=1;b=a+2;c=b*3;c?\n", "a=1;b=a+2;b?\n"]
    greedy = dict(max_tokens=6, temperature=0.0, batch_tokens=4 * 26)
    sizes = []

    def generate(model, prompt_ids, *others, **options):
        sizes.append(len(prompt_ids) * (prompt_ids.shape[1] + 6))
        return hf_generate(model, prompt_ids, *others, **options)

    rollouts = rollout(*tiny, prompts, 2, generate=generate, **greedy)
    assert len(sizes) == 2 and max(sizes) <= 4 * 26
    for row, text in enumerate(rollouts.texts):
        prompt = tiny[1].decode(rollouts.prompt_ids[row][rollouts.prompt_mask[row]])
        assert prompt == prompts[row // 2]
        assert [text] == rollout(*tiny, [prompt], 1, **greedy).texts


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, [2]),  # all names taken away: <|im_end|>, which the vocabulary has
        ({"tokenizer": "<|endoftext|>", "config": 9, "generation": [7, 8]}, [0, 2, 7, 8, 9]),
        ({"template": "{{ messages[1]['content'] }} <|eot|>\n<|im_start|>"}, [2, 259]),
        ({"template": "<|eot|>{{ messages[1]['content'] }}. <|eot|>"}, [2]),  # a letter follows
        ({"template": "{{ raise_exception('no') }}"}, [2]),
    ],
)
def test_stop_ids_come_from_every_place_that_names_one(change, expected, qwen):
    """They come from both configs, the tokenizer, <|im_end|> and the end of a template's turn."""
    model, tokenizer = qwen
    tokenizer.add_tokens(AddedToken("<|eot|>", special=True))
    model.generation_config.eos_token_id = change.get("generation")
    model.config.eos_token_id = change.get("config")
    tokenizer.eos_token = change.get("tokenizer")
    tokenizer.chat_template = change.get("template")
    assert stop_ids(model, tokenizer) == expected


def test_padding_is_a_token_that_the_model_has(tiny):
    """A tokenizer may have a padding token without an embedding; then another token pads."""
    model, tokenizer = tiny
    size = model.get_input_embeddings().num_embeddings
    for pad, expected in ((size - 1, size - 1), (size, tokenizer.eos_token_id)):
        named = SimpleNamespace(pad_token_id=pad, eos_token_id=tokenizer.eos_token_id)
        assert grpo.pad_id(named, model) == expected


def test_texts_keep_the_spaces_that_were_sampled(qwen):
    """Programs are graded as they were sampled, whatever the tokenizer's folder asks for."""
    tokenizer = qwen[1]
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    text = "if x != y : print('a , b . do n't')"
    ids = tokenizer(text)["input_ids"]
    assert decode(tokenizer, ids) == text != tokenizer.decode(ids)


# ---- batches -------------------------------------------------------------------------------------


def test_micro_batches_are_bounded_in_tokens():
    """Every row comes once, the longest first, and padding counts within the budget."""
    lengths = [*torch.randint(1, 60, (37,)).tolist(), 500]
    batches = grpo.pack(range(38), lengths, 128)
    assert sorted(torch.cat(batches).tolist()) == list(range(38))
    longest = [max(lengths[row] for row in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True)
    assert batches[0].tolist() == [37]  # too long for the budget, so alone
    for batch, length in zip(batches[1:], longest[1:], strict=True):
        assert len(batch) * length <= 128
    assert grpo.pack([], lengths, 128) == []


@pytest.mark.parametrize("world, count", [(1, 38), (3, 38), (8, 38), (2, 4), (2, 1)])
def test_ranks_are_dealt_every_row_in_equally_many_micro_batches(world, count):
    """Every row but the first comes once, and no rank runs more passes than another.

    A rank without work gets a filler: the shortest rollout, also where no rank has work.
    """
    lengths = torch.randint(20, 40, (count,)).tolist()
    lengths[-1] = 9
    seen = []
    passes = set()
    for rank in range(world):
        ranks = Ranks(rank, world, torch.device("cpu"))
        share = own_micro_batches(list(range(1, count)), lengths, 60, ranks, grpo.pack)
        passes.add(len(share))
        for batch, is_filler in share:
            seen += [] if is_filler else batch.tolist()
            assert not is_filler or batch.tolist() == [count - 1]
    assert sorted(seen) == list(range(1, count)) and len(passes) == 1 and min(passes) > 0


def test_rollouts_of_several_ranks_become_one_batch(tiny):
    """Parts of different widths keep every prompt and response where its mask says."""
    whole = sample_rollouts(tiny)
    again = Rollouts.cat([whole.take(torch.arange(3)), whole.take(torch.arange(3, 8))])
    assert again.texts == whole.texts and torch.equal(again.truncated, whole.truncated)
    assert torch.equal(again.prompt_ids[again.prompt_mask], whole.prompt_ids[whole.prompt_mask])
    assert torch.equal(again.ids[again.mask], whole.ids[whole.mask])
