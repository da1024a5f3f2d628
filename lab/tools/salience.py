"""Salience: what further passes of the policy over its own rollouts say about each token.

    function                 | what it returns                                    | passes
    -------------------------+----------------------------------------------------+---------------
    answer_places            | the tokens of the final answer, in the sampled ids | none
    importance_by_masking    | how hiding a token changes the answer              | one per token
    importance_by_gradient   | the same to first order, gradient times input      | a backward one
    outcome_weights          | OAR's token weights, from importance               | none
    adapter_residual         | how far the LoRA adapter moves the hidden state    | a forward one
    logit_gradients          | the size of each token's policy gradient, roughly  | a forward one

All but the places are (B, T) float32. `lab/rules/` makes token advantages of them, with formulas
and sources. Passes take at most `Context.micro_tokens` tokens at a time, or one longer rollout, and
leave the parameters' `.grad` as it was. Importance is measured one rollout at a time.
"""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from credit.batch import Context, char_starts
from grpo import HEAD_CHUNK, Policy, Rollouts, end_to_end, pack, pad_id, to_padded
from lab.tools import lora
from rewards import box_place

ANSWER_TOKENS = 32  # probed per answer, at most: their distributions are in memory all at once


class Answer(NamedTuple):
    """Where a response stops reasoning and gives its answer, in tokens."""

    reasoning: int  # tokens before the last box
    start: int  # the first token of the box's content
    end: int  # the token after the last one that is probed


Answers = dict[int, Answer]  # of the rollouts that have one


def answer_places(tokenizer: PreTrainedTokenizerBase, rollouts: Rollouts) -> Answers:
    """Where each response's last box stands, cut to ANSWER_TOKENS tokens.

    A response with nothing in the box or before it has no answer.
    """
    places = {}
    for row, text in enumerate(rollouts.texts):
        ids = rollouts.ids[row][rollouts.mask[row]].tolist()
        # in characters: where the box starts, and where its content starts and ends
        opening, begin, end = box_place(text) or (0, 0, 0)
        if opening == 0 or begin == end or not ids:
            continue
        starts = char_starts(tokenizer, ids)
        # where the token that holds `begin` starts; all bytes of a character start there
        first = starts[bisect_right(starts, begin) - 1]
        start = bisect_left(starts, first)
        end = min(bisect_left(starts, end), start + ANSWER_TOKENS)
        places[row] = Answer(bisect_left(starts, opening), start, end)
    return places


@torch.no_grad()
def importance_by_masking(
    rollouts: Rollouts, context: Context, answers: Answers, probe: str
) -> Tensor:
    """How much the answer's distribution changes when a token before it is hidden, (B, T) float32.

    Padding takes the hidden token's place. `probe` is "kl", KL(clean || changed) of the mean logits
    over the answer's tokens, or "logp", how much the given answer's log-probability falls, the mean
    over its tokens. Importance is at least 0, and 0 outside of the reasoning.
    """
    importance = torch.zeros(rollouts.ids.shape, device=rollouts.ids.device)  # (B, T)
    pad = pad_id(context.tokenizer, context.policy.model)
    for row, answer in tqdm(answers.items(), desc="mask tokens", leave=False, disable=None):
        ids, prompt_length = _up_to_answer(rollouts, row, answer)  # (S,)
        tokens = rollouts.ids[row, answer.start : answer.end]  # (n,)
        clean = _next_log_probs(context.policy, tokens, input_ids=ids[None])  # (1, n, V)
        at_once = max(1, min(context.micro_tokens // len(ids), HEAD_CHUNK // len(tokens)))
        for masked in torch.arange(answer.reasoning, device=ids.device).split(at_once):  # (b,)
            copies = ids.repeat(len(masked), 1)  # (b, S)
            copies[torch.arange(len(masked)), prompt_length + masked] = pad
            changed = _next_log_probs(context.policy, tokens, input_ids=copies)  # (b, n, V)
            importance[row, masked] = _change(clean, changed, tokens, probe).clamp_min(0.0)
    return importance


def importance_by_gradient(
    rollouts: Rollouts, context: Context, answers: Answers, probe: str, noise: float
) -> Tensor:
    """I_t = |<dJ/de_t, e_t>|, J the change of the answer's distribution, e_t the token's embedding.

    The result is (B, T) float32. J compares the distribution with itself under small noise on the
    reasoning's embeddings, as KL has no gradient at zero. The noise is drawn from seed and step,
    the same for every rollout, so that importance depends on nothing else in the batch.
    """
    importance = torch.zeros(rollouts.ids.shape, device=rollouts.ids.device)  # (B, T)
    embed = context.policy.model.get_input_embeddings()
    weight = embed.get_parameter("weight")  # (V, d)
    seed = context.seed * 2**20 + context.step  # no run takes so many steps
    moves = noise * _fixed_noise(rollouts.ids.shape[1], weight, seed)  # (T, d)
    for row, answer in tqdm(answers.items(), desc="gradients", leave=False, disable=None):
        ids, prompt_length = _up_to_answer(rollouts, row, answer)  # (S,)
        reasoning = slice(prompt_length, prompt_length + answer.reasoning)
        tokens = rollouts.ids[row, answer.start : answer.end]  # (n,)
        embeddings = embed(ids[None]).detach()  # (1, S, d)
        noisy = embeddings.clone()
        noisy[0, reasoning] += moves[: answer.reasoning]
        with torch.no_grad():
            clean = _next_log_probs(context.policy, tokens, inputs_embeds=embeddings)  # (1, n, V)
        with torch.enable_grad():
            changed = _next_log_probs(
                context.policy, tokens, inputs_embeds=noisy.requires_grad_()
            )  # (1, n, V)
            (gradient,) = torch.autograd.grad(_change(clean, changed, tokens, probe), noisy)
        inner = (gradient.float() * embeddings.float()).sum(-1).abs()  # (1, S)
        importance[row, : answer.reasoning] = inner[0, reasoning]
    return importance


def outcome_weights(
    importance: Tensor, answers: Answers, mask: Tensor, quantile: float, beta: float
) -> Tensor:
    """OAR's bi-level reshaping: importance (B, T) -> omega (B, T), summing to the rollout's length.

    Of the reasoning's tokens, those below the quantile theta of n = log(1 + I), scaled to [0, 1],
    are suppressed to max(n / theta, 0.1), the others boosted to 1 + beta (n - theta) / (1 - theta).
    All other tokens keep 1, as do rollouts that are not in `answers`.
    """
    omega = mask.float()  # (B, T)
    for row, answer in answers.items():
        reasoning = slice(answer.reasoning)
        scores = importance[row, reasoning].log1p()  # (R,)
        scores = (scores - scores.min()) / (scores.max() - scores.min()).clamp_min(1e-30)
        theta = scores.quantile(quantile)
        low = (scores / theta.clamp_min(1e-30)).clamp_min(0.1)
        high = 1 + beta * (scores - theta) / (1 - theta).clamp_min(1e-30)
        weights = torch.where(scores < theta, low, high)
        omega[row, reasoning] = weights * len(weights) / weights.sum()
    return omega


def adapter_residual(rollouts: Rollouts, context: Context, hidden: Tensor) -> Tensor:
    """||h_adapted - h_base||, (B, T) float32: how far the adapter moves each token's state.

    `hidden` (N, d) holds the states with the adapter; a pass without it gives the others.
    """
    with lora.off(context.policy.model):
        base = context.score(rollouts).hidden  # (N, d)
    assert base is not None  # they are kept unless asked otherwise
    return to_padded((hidden.float() - base.float()).norm(dim=-1), rollouts.mask)


@torch.no_grad()
def logit_gradients(rollouts: Rollouts, context: Context) -> Tensor:
    """The squared norm of the gradient of log pi(y_t) in the logits, (B, T) float32.

    The gradient is e - p, where e is 1 at y_t and 0 elsewhere, so the norm is
    1 - 2 p(y_t) + sum_v p_v^2 (the "logit-gradient proxy" of arXiv 2602.07078). It is between 0,
    where the policy was certain, and 2.
    """
    model = context.policy.model
    norms = torch.zeros(rollouts.ids.shape, device=rollouts.ids.device)  # (B, T)
    for rows in pack(range(len(rollouts.texts)), rollouts.lengths, context.micro_tokens):
        micro_batch = rollouts.take(rows)
        ids, inside, _ = end_to_end(micro_batch)  # (b, S), (b, S)
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (b, S, d)
        before = states[:, :-1][inside[:, 1:]]  # (n, d)
        squared = []
        for at, tokens in zip(before.split(HEAD_CHUNK), ids[inside].split(HEAD_CHUNK), strict=True):
            logits = model.get_output_embeddings()(at).float() / context.temperature
            gaps = logits.softmax(-1)  # (c, V)
            gaps[torch.arange(len(gaps)), tokens] -= 1
            squared.append(gaps.square().sum(-1))
        of_response = to_padded(torch.cat(squared), micro_batch.mask)  # (b, t)
        norms[rows, : of_response.shape[1]] = of_response
    return norms


def _up_to_answer(rollouts: Rollouts, row: int, answer: Answer) -> tuple[Tensor, int]:
    """A rollout's ids (S,), prompt included, up to its answer, and the length of its prompt.

    The last n ids predict the n tokens of the answer, so its last token is not among them.
    """
    prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]  # (P,)
    return torch.cat([prompt, rollouts.ids[row, : answer.end - 1]]), len(prompt)


def _next_log_probs(policy: Policy, tokens: Tensor, **inputs: Tensor) -> Tensor:
    """Log-distributions (b, n, V) float32 at the last n positions, for `tokens` (n,)."""
    states = policy.model.base_model(**inputs, use_cache=False).last_hidden_state  # (b, S, d)
    return policy.model.get_output_embeddings()(states[:, -len(tokens) :]).float().log_softmax(-1)


def _change(clean: Tensor, changed: Tensor, tokens: Tensor, probe: str) -> Tensor:
    """How far an answer's log-distributions `changed` are from `clean`, by `probe`, in nats.

    `clean` is (1, n, V), `changed` (b, n, V), the result (b,).
    """
    if probe == "kl":  # the mean of log-probabilities is that of logits, up to a constant
        # float64: rounding would leave the distributions' sums, and so enter the KL at first order
        clean, changed = (x.mean(1).double().log_softmax(-1) for x in (clean, changed))  # (b, V)
        return (clean.exp() * (clean - changed)).sum(-1).float()
    places = torch.arange(len(tokens), device=tokens.device)  # (n,)
    return (clean - changed)[:, places, tokens].mean(-1)


def _fixed_noise(count: int, like: Tensor, seed: int) -> Tensor:
    """Standard normal (count, d); the first rows do not depend on how many follow."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randn(like.shape[1], generator=generator) for _ in range(count)]).to(
        like
    )
