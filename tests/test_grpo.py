"""grpo.py: what was sampled is scored and trained on, and the loss is the written-out one."""

import math
from itertools import chain

import pytest
import torch
from builders.near import assert_near
from builders.rollouts import sample_rollouts
from builders.small_models import small_gpt2
from scipy.stats import chisquare
from tokenizers import AddedToken
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    GenerationConfig,
    PerceiverTokenizer,
)

import grpo
from grpo import Policy, Rollouts, cat_padded, decode, group_advantages, policy_loss, rollout, score
from harness import fsdp
from harness.fsdp import deal
from harness.models import stop_ids
from harness.run import Ranks


@pytest.fixture
def qwen(qwen_folder) -> tuple:
    """The model of the folder, and its tokenizer."""
    kinds = AutoModelForCausalLM, AutoTokenizer
    return tuple(kind.from_pretrained(qwen_folder) for kind in kinds)


def test_rollouts_keep_the_sampled_ids_up_to_the_stop_token(tiny):
    """The mask is 1 through the first stop token, and `truncated` where there is none.

    The text is decoded from just these ids.
    """
    rollouts = sample_rollouts(tiny, group_size=16)
    tokenizer = tiny[1]
    assert rollouts.ids.shape == rollouts.mask.shape and len(rollouts.texts) == 32
    assert rollouts.truncated.any() and not rollouts.truncated.all()
    for ids, mask, cut, text in zip(
        rollouts.ids, rollouts.mask, rollouts.truncated, rollouts.texts, strict=True
    ):
        kept = ids[: int(mask.sum())]
        assert not mask[len(kept) :].any()
        is_end = kept == tokenizer.eos_token_id
        assert is_end.nonzero().flatten().tolist() == ([] if cut else [len(kept) - 1])
        assert text == tokenizer.decode(kept[~is_end])


def test_texts_keep_the_spaces_that_were_sampled(qwen):
    """Programs are graded as they were sampled, whatever the tokenizer's folder asks for."""
    tokenizer = qwen[1]
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    text = "if x != y : print('a , b . do n't')"
    ids = tokenizer(text)["input_ids"]
    assert decode(tokenizer, ids) == text != tokenizer.decode(ids)


@pytest.mark.parametrize("kind", [ByT5Tokenizer, PerceiverTokenizer])
def test_ids_without_a_token_are_left_out_of_a_text(kind):
    """A model may have more embeddings than its tokenizer of bytes has tokens."""
    tokenizer = kind()
    ids = tokenizer("é", add_special_tokens=False)["input_ids"]
    more = [len(tokenizer), ids[0], len(tokenizer) + 6, ids[1]]
    assert decode(tokenizer, more) == decode(tokenizer, torch.tensor(more)) == "é"


def test_every_stop_id_of_folder_and_tokenizer_ends_a_response(qwen):
    """Qwen names <|endoftext|> in one file and <|im_end|> in the other; both end a response."""
    assert stop_ids(qwen[0], qwen[1]) == [0, 2]
    limits = dict(max_tokens=40, temperature=1.0, stops=stop_ids(*qwen))
    rollouts = rollout(*qwen, ["x"], 60, **limits)
    ends = {int(ids[mask][-1]) for ids, mask in zip(rollouts.ids, rollouts.mask, strict=True)}
    assert {0, 2} <= ends


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, [2]),  # all names taken away: <|im_end|>, which the vocabulary has
        ({"tokenizer": "<|endoftext|>"}, [0, 2]),
        ({"generation": 7}, [2, 7]),
        ({"generation": [7, 8]}, [2, 7, 8]),
        ({"config": [9]}, [2, 9]),
        ({"config": 9, "generation": [7]}, [2, 7, 9]),
        ({"template": "{{ messages[1]['content'] }} <|eot|>\n<|im_start|>"}, [2, "<|eot|>"]),
        ({"template": "<|eot|>{{ messages[1]['content'] }}. <|eot|>"}, [2]),  # a letter follows
        ({"template": "<|eot|>"}, [2]),  # the words are not in it
        ({"template": "{{ raise_exception('no') }}"}, [2]),
    ],
)
def test_stop_ids_come_from_every_place_that_names_one(change, expected, qwen, tiny):
    """They come from both configs, the tokenizer, <|im_end|> and the end of a template's turn."""
    model, tokenizer = qwen
    tokenizer.add_tokens(AddedToken("<|eot|>", special=True))
    model.generation_config.eos_token_id = change.get("generation")
    model.config.eos_token_id = change.get("config")
    tokenizer.eos_token = change.get("tokenizer")
    tokenizer.chat_template = change.get("template")
    names = {"<|eot|>": tokenizer.convert_tokens_to_ids("<|eot|>")}
    assert stop_ids(model, tokenizer) == [names.get(name, name) for name in expected]
    assert stop_ids(tiny[0], tiny[1]) == [
        tiny[1].eos_token_id
    ]  # which has neither template nor <|im_end|>


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
    rollouts = rollout(
        model, tokenizer, ["x"], draws, max_tokens=1, temperature=0.2, batch_size=draws
    )
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer("x")["input_ids"]])).logits[0, -1]
    expected = draws * (logits.double() / 0.2).softmax(-1)
    counts = rollouts.ids[:, 0].bincount(minlength=len(expected))
    assert len(expected) == 259 and chisquare(counts, expected).pvalue > 1e-5
    assert model.generation_config.top_k == 1  # and the folder's file is left as it was


@pytest.fixture(params=["rotary", "absolute"])
def any_positions(request, tiny):
    """The tiny Qwen2, with relative positions, and a GPT-2, which left padding would shift."""
    return tiny if request.param == "rotary" else (small_gpt2(), tiny[1])


@pytest.fixture
def chunks_of_7(monkeypatch):
    """The head is applied to 7 tokens at a time, across rollouts."""
    monkeypatch.setattr(grpo, "HEAD_CHUNK", 7)


@pytest.mark.usefixtures("chunks_of_7")
def test_scores_are_the_model_s_own_at_the_sampled_tokens(any_positions):
    """Log-probabilities, entropies and states at y_t are those of one forward per rollout.

    That forward has no padding.
    """
    model, _ = any_positions
    rollouts = sample_rollouts(any_positions)
    scored = score(Policy(model), rollouts, temperature=0.8, micro_tokens=150)
    hidden = grpo.to_padded(scored.hidden, rollouts.mask)  # (B, T, d)
    for row in range(8):
        prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
        mask = rollouts.mask[row]
        response = rollouts.ids[row][mask]
        with torch.no_grad():
            output = model(torch.cat([prompt, response])[None], output_hidden_states=True)
        all_log_probs = (output.logits[0, len(prompt) - 1 : -1] / 0.8).log_softmax(-1)
        expected = all_log_probs[torch.arange(len(response)), response]
        assert_near(scored.log_probs[row][mask], expected, 2e-5)
        entropy = torch.distributions.Categorical(logits=all_log_probs).entropy()
        assert_near(scored.entropies[row][mask], entropy, 2e-5)
        states = output.hidden_states[-1][0, len(prompt) :]
        assert_near(hidden[row][mask], states, 2e-5)
    assert not scored.hidden.requires_grad and not scored.log_probs.requires_grad


@pytest.mark.usefixtures("chunks_of_7")
@pytest.mark.parametrize("recompute", [False, True])
def test_head_in_chunks_and_recomputed_layers_give_the_plain_gradient(any_positions, recompute):
    """Log-probabilities and gradients are within 1e-5 of those with logits (b, T, V) at once.

    There activations are kept. The head sees at most HEAD_CHUNK tokens at a time, forward and again
    backward; a layer runs again backward only if it is recomputed.
    """
    model, _ = any_positions
    rollouts = sample_rollouts(any_positions)
    pulls = torch.randn(rollouts.ids.shape)
    ids, inside, _ = grpo.end_to_end(rollouts)
    log_probs = (model(ids).logits[:, :-1] / 0.7).log_softmax(-1)
    expected = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)[inside[:, 1:]]
    (expected * pulls[rollouts.mask]).sum().backward()
    plain = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    seen = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda head, inputs, logits: seen.append(len(logits)))
    runs = []
    part_of_a_layer = next(fsdp.layers_of(model)[0].children())
    part_of_a_layer.register_forward_hook(lambda part, inputs, output: runs.append(part))
    if recompute:
        fsdp.recompute_layers(model)
    logp = Policy(model)(rollouts, 0.7).log_probs
    assert_near(logp[rollouts.mask], expected, 2e-5)
    (logp * pulls).sum().backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, plain[name], atol=1e-4, rtol=1e-4)
    assert max(seen) == 7 and sum(seen) == 2 * len(expected)
    assert len(runs) == (2 if recompute else 1)


def test_micro_batches_are_bounded_in_tokens():
    """Every row comes once, the longest first, and padding counts within the budget.

    No rows make no micro-batch.
    """
    lengths = [*torch.randint(1, 60, (37,)).tolist(), 500]
    rows = list(range(1, 38))
    batches = [batch.tolist() for batch in grpo.pack(rows, lengths, 128)]
    assert sorted(chain.from_iterable(batches)) == rows
    longest = []
    for batch in batches:
        longest.append(max(lengths[row] for row in batch))
        assert len(batch) * longest[-1] <= 128 or len(batch) == 1
    assert longest == sorted(longest, reverse=True)
    assert grpo.pack([], lengths, 128) == []


def dealt(rows, lengths, world, tokens):
    """What the ranks do together: for each micro-batch, each rank's rows and whether it is a filler."""
    shares = []
    for rank in range(world):
        ranks = Ranks(rank, world, torch.device("cpu"))
        share = deal(rows, lengths, tokens, ranks, grpo.pack)
        shares.append([(batch.tolist(), is_filler) for batch, is_filler in share])
    return list(zip(*shares, strict=True))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ranks_are_dealt_every_row_in_equally_many_micro_batches(world):
    """Every row comes once; some ranks may have no work, and run a filler beside the others."""
    lengths = torch.randint(1, 60, (38,)).tolist()
    rows = list(range(1, 38))
    seen = []
    for together in dealt(rows, lengths, world, 60):
        for batch, is_filler in together:
            seen += [] if is_filler else batch
    assert sorted(seen) == rows


def test_a_rank_without_work_gets_a_filler():
    """It is the shortest rollout, also where no rank has work."""
    first, last = dealt([0, 1, 2], [9, 9, 9], 2, 9)
    assert [is_filler for _, is_filler in first + last] == [False, False, False, True]
    assert dealt([], [9, 8], 2, 9) == [(([1], True), ([1], True))]


def test_rollouts_of_several_ranks_become_one_batch(tiny):
    """Parts of different widths keep every prompt and response where its mask says."""
    whole = sample_rollouts(tiny)
    again = Rollouts.cat([whole.take(torch.arange(0, 3)), whole.take(torch.arange(3, 8))])
    assert again.texts == whole.texts and torch.equal(again.truncated, whole.truncated)
    for name, mask in (("prompt_ids", "prompt_mask"), ("ids", "mask")):
        ours, expected = (getattr(part, name)[getattr(part, mask)] for part in (again, whole))
        assert torch.equal(ours, expected)
    padded = cat_padded([torch.ones(1, 2), torch.ones(1, 3)], left=True, fill=7)
    assert padded.tolist() == [[7, 1, 1], [1, 1, 1]]


def test_prompts_of_like_length_are_generated_together(tiny):
    """They are sorted by length within, and returned in the order asked for."""
    prompts = ["a=1;b=a+2;c=b*3;c?\n", "a=1;a?\n", "a=1;b=a+2;b?\n"] * 2
    rollouts = rollout(tiny[0], tiny[1], prompts, 2, max_tokens=6, temperature=0.0, batch_size=4)
    for row, text in enumerate(rollouts.texts):
        prompt = tiny[1].decode(rollouts.prompt_ids[row][rollouts.prompt_mask[row]])
        assert prompt == prompts[row // 2]
        assert [text] == rollout(
            tiny[0], tiny[1], [prompt], 1, max_tokens=6, temperature=0.0, batch_size=1
        ).texts


def test_group_advantages_are_equation_1():
    """They are (r - mean) / (std + 1e-6), std unbiased: one right of four gives 1.5 and -.5."""
    ours = group_advantages(torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0]), 4)
    half = 0.5 / math.sqrt(1 / 3)
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5, half, half, -half, -half])
    assert_near(ours, expected, 1e-5)


def test_equal_rewards_and_missing_verdicts_get_no_advantage():
    """Equal rewards give 0, also 0.1s, whose mean rounds; a NaN leaves mean and std."""
    nan = math.nan
    root = math.sqrt(0.5)
    for equal in (0.0, 1.0, 0.1):
        assert not group_advantages(torch.full((7,), equal), 7).any()
    rewards = torch.tensor([[1.0, 0, nan, nan], [nan, nan, 0, nan], [nan] * 4])
    ours = group_advantages(rewards.flatten(), 4)
    assert_near(ours[:2], torch.tensor([root, -root]), 1e-5)
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
    """Each token stands alone, beside one that is padded, at both bounds and both signs of A."""
    logp = torch.tensor([[math.log(ratio), 99.0]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    advantages = torch.tensor([[advantage, 5.0]])
    ours, metrics = policy_loss(logp, torch.zeros(1, 2), advantages, mask, n_tokens=1)
    assert ours.item() == pytest.approx(loss, abs=1e-6)
    assert metrics["clip_share"] == (gradient == 0)
    ours.backward()
    assert_near(logp.grad, torch.tensor([[gradient, 0.0]]), 1e-6)


def test_the_loss_is_the_sum_over_all_tokens_by_their_number():
    """In one batch, with a padded token, the loss is the mean over the step's `n_tokens`.

    A ratio beyond float32 leaves it finite.
    """
    ratios, advantages, losses, _ = torch.tensor(CLIPPED).T.reshape(4, 2, 4)
    mask = torch.arange(8).view(2, 4) != 3
    log_ratio = ratios.log()
    old = torch.zeros(2, 4)
    loss, metrics = policy_loss(log_ratio, old, advantages, mask, n_tokens=21)
    assert loss.item() == pytest.approx(losses[mask].sum().item() / 21, abs=1e-6)
    apart = log_ratio[mask].abs().sum().item()
    assert metrics == pytest.approx({"clip_share": 3 / 21, "abs_log_ratio": apart / 21})
    far, _ = policy_loss(old + 100, old, old - 1, mask, 7)
    assert far.item() == pytest.approx(math.exp(20))
    of_rollouts = torch.tensor([2.0, -1.0])
    of_tokens = of_rollouts[:, None].expand(2, 4)
    both = [policy_loss(log_ratio, old, values, mask, 21) for values in (of_rollouts, of_tokens)]
    assert both[0] == both[1]
