"""Salience: what further passes of the policy over its own rollouts say about each token, (B, T) float32.

    answer_places            the tokens of the final answer, found in the sampled ids; nothing is encoded again
    importance_by_masking    how the answer's distribution changes when one token is hidden     a pass a token
    importance_by_gradient   the same to first order, gradient times input                      one backward pass
    adapter_residual         how far the LoRA adapter moves the hidden state                    one forward pass
    informed_logp            log-probabilities where the prompt tells the answer                one forward pass
    attention_entropy        how widely a token looks back, in the middle layer                 one forward pass

`methods.py` makes token advantages of them, with formulas and sources. Each takes a `Policy` whose weights are whole on
this rank, works on at most `micro_tokens` tokens at a time, and leaves the parameters' `.grad` as it was.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from credit import lora
from grpo import HEAD_CHUNK, Policy, Rollouts, end_to_end, layers_of, pack, pad_id, pad_left, score
from rewards import box_place

PROBES = ("kl", "logp")
ANSWER_TOKENS = 32  # of an answer, at most, that are probed: their distributions exist all at once


class Answer(NamedTuple):
    """Where a response ends to reason and answers, in its tokens."""

    reasoning: int  # tokens before the last box
    start: int  # first token of what stands in the box
    end: int  # after the last one


def answer_places(tokenizer, rollouts: Rollouts) -> list[Answer | None]:
    """The last box of each response, None where there is none with anything in it and before it.

    Of a longer answer, its first ANSWER_TOKENS tokens.
    """
    places = []
    for ids, inside, text in zip(rollouts.ids, rollouts.mask, rollouts.texts, strict=True):
        box = box_place(text)
        if not box or box[0] == 0 or box[1] == box[2] or not inside.any():
            places.append(None)
            continue
        starts = char_starts(tokenizer, ids[inside].tolist())
        first = starts[bisect_right(starts, box[1]) - 1]  # of the token that holds it, or of a character's bytes
        start = bisect_left(starts, first)
        end = min(bisect_left(starts, box[2]), start + ANSWER_TOKENS)
        places.append(Answer(bisect_left(starts, box[0]), start, end))
    return places


def char_starts(tokenizer, ids: Sequence[int]) -> list[int]:
    """Where in the text of `ids` each token starts, so that what is found in a text is found in the sampled ids.

    Byte-level tokens may be parts of one character; each of these starts where the character does.
    """
    starts, before, shown = [], 0, 0  # tokens ids[:before] are whole characters, `shown` of them
    context = 0  # a token before, as some tokenizers drop the space of a text's first one
    for end in range(1, len(ids) + 1):
        starts.append(shown)
        known, text = (tokenizer.decode(ids[context:upto]) for upto in (before, end))
        if not text.endswith("\ufffd") or end - before > 4:  # else the character goes on; none has over four bytes
            shown += len(text) - len(known)
            context, before = before, end
    return starts


@torch.no_grad()
def importance_by_masking(
    policy: Policy, rollouts: Rollouts, answers: list[Answer | None], *, pad: int, probe: str, micro_tokens: int
) -> Tensor:
    """I_t for every token t before the answer: how the answer's distribution changes with `pad` in the place of t.

    `probe`: "kl", KL(clean || changed), or "logp", how much less likely the answer that was given becomes, at least
    0; the mean over the answer's tokens. Importance (B, T) float32 is 0 outside of the reasoning.
    """
    importance = torch.zeros(rollouts.ids.shape, device=rollouts.ids.device)  # (B, T)
    rows = [row for row, answer in enumerate(answers) if answer]
    for row in tqdm(rows, desc="mask tokens", leave=False, disable=None):
        answer = answers[row]
        part = rollouts.take(torch.tensor([row]))
        whole, offset = end_to_end(part)[0], part.prompt_mask.shape[1]  # (1, S)
        ids = whole[:, : offset + answer.end - 1]  # the answer's last token need not be seen
        places = range(offset + answer.start - 1, offset + answer.end - 1)
        tokens = part.ids[0, answer.start : answer.end]
        clean = _next_log_probs(policy, [(0, place) for place in places], input_ids=ids)  # (n, V)
        hidden = torch.arange(offset, offset + answer.reasoning, device=ids.device)
        for some in hidden.split(max(1, min(micro_tokens // ids.shape[1], HEAD_CHUNK // len(places)))):
            masked = ids.repeat(len(some), 1)  # (b, S)
            masked[torch.arange(len(some)), some] = pad
            other = _next_log_probs(
                policy, [(copy, place) for copy in range(len(some)) for place in places], input_ids=masked
            )
            changes = _change(clean.repeat(len(some), 1), other, tokens.repeat(len(some)), probe)  # (b * n,)
            importance[row, some - offset] = changes.view(len(some), -1).mean(1).clamp_min(0.0)
    return importance


def importance_by_gradient(
    policy: Policy,
    rollouts: Rollouts,
    answers: list[Answer | None],
    *,
    noise: float,
    seed: int,
    probe: str,
    micro_tokens: int,
) -> Tensor:
    """I_t = |<dJ/de_t, e_t>|, J the change of the answer's distribution, e_t the embedding of token t; (B, T) float32.

    J compares with itself under small noise on the reasoning's embeddings, as KL has no gradient at zero. The noise
    is drawn from `seed`, the same for every rollout, so that importance depends on nothing else in the batch.
    """
    importance = torch.zeros(rollouts.ids.shape, device=rollouts.ids.device)  # (B, T)
    rows = [row for row, answer in enumerate(answers) if answer]
    embed = policy.model.get_input_embeddings()
    longest = max((answers[row].reasoning for row in rows), default=0)
    moved = noise * _fixed_noise(longest, embed.weight, seed)  # (R, d)
    for batch in pack(rows, rollouts.lengths, micro_tokens):
        part, some = rollouts.take(batch), [answers[row] for row in batch.tolist()]
        ids, inside = end_to_end(part)  # (b, S), (b, S)
        embeddings = embed(ids).detach()  # (b, S, d)
        noisy, places, tokens, shares = embeddings.clone(), [], [], []
        for row, (answer, offset) in enumerate(zip(some, part.prompt_mask.sum(1).tolist(), strict=True)):
            noisy[row, offset : offset + answer.reasoning] += moved[: answer.reasoning]
            places += [(row, offset + at - 1) for at in range(answer.start, answer.end)]
            tokens.append(part.ids[row, answer.start : answer.end])
            shares += [1 / (answer.end - answer.start)] * (answer.end - answer.start)
        with torch.no_grad():
            clean = _next_log_probs(policy, places, inputs_embeds=embeddings)  # (N, V)
        with torch.enable_grad():
            other = _next_log_probs(policy, places, inputs_embeds=noisy.requires_grad_())
            change = _change(clean, other, torch.cat(tokens), probe)  # (N,)
            (gradient,) = torch.autograd.grad(change @ change.new_tensor(shares), noisy)  # of the embeddings alone
        inner = (gradient.float() * embeddings.float()).sum(-1).abs()  # (b, S)
        values = torch.zeros(part.ids.shape, device=ids.device).masked_scatter(part.mask, inner[inside])  # (b, T)
        for row, (index, answer) in enumerate(zip(batch.tolist(), some, strict=True)):
            importance[index, : answer.reasoning] = values[row, : answer.reasoning]
    return importance


def adapter_residual(
    policy: Policy, rollouts: Rollouts, hidden: Tensor, *, temperature: float, micro_tokens: int
) -> Tensor:
    """||h_adapted - h_base||, (B, T) float32: `hidden` (B, T, d) against the states without the adapter."""
    with lora.off(policy.model):
        base = score(policy, rollouts, temperature=temperature, micro_tokens=micro_tokens).hidden  # (B, T, d)
    return torch.stack([(ours.float() - its.float()).norm(dim=-1) for ours, its in zip(hidden, base, strict=True)])


def informed_logp(
    policy: Policy, rollouts: Rollouts, tokenizer, prompts: list[str], *, temperature: float, micro_tokens: int
) -> Tensor:
    """Log-probabilities (B, T) float32 of the same responses after other prompts, one a rollout."""
    encoded = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    ids, mask = pad_left(encoded, pad_id(tokenizer), rollouts.ids.device)
    informed = replace(rollouts, prompt_ids=ids, prompt_mask=mask)
    return score(policy, informed, temperature=temperature, micro_tokens=micro_tokens, keep_hidden=False).logp


@torch.no_grad()
def attention_entropy(policy: Policy, rollouts: Rollouts, *, micro_tokens: int) -> Tensor:
    """Entropy of each token's attention in the middle layer, mean over the heads, over log of the context's length.

    (B, T) float32 in [0, 1]. The context is all that came before, also where a layer sees only a window of it.
    Attention is computed the plain way for this one pass, as fused kernels keep no weights.
    """
    entropy = torch.zeros(rollouts.ids.shape, device=rollouts.ids.device)  # (B, T)
    layers, seen = layers_of(policy.model), []

    def keep(module, inputs, output) -> None:
        weights = output[1].float()  # (b, heads, S, S)
        seen.append(-torch.xlogy(weights, weights).sum(-1).mean(1))  # (b, S)

    usual = policy.model.config._attn_implementation
    hook = layers[len(layers) // 2].self_attn.register_forward_hook(keep)
    try:
        policy.model.set_attn_implementation("eager")
        for batch in pack(range(len(rollouts.texts)), rollouts.lengths, micro_tokens):
            part = rollouts.take(batch)
            ids, inside = end_to_end(part)  # (b, S), (b, S)
            policy.model.base_model(input_ids=ids, use_cache=False)
            context = torch.arange(1, ids.shape[1] + 1, device=ids.device)  # (S,) tokens up to each
            normed = seen.pop() / context.float().log().clamp_min(1e-6)
            entropy[batch, : part.ids.shape[1]] = torch.zeros_like(part.mask, dtype=torch.float).masked_scatter(
                part.mask, normed[inside]
            )
    finally:
        hook.remove()
        policy.model.set_attn_implementation(usual)
    return entropy


def _next_log_probs(policy: Policy, places: list[tuple[int, int]], **inputs) -> Tensor:
    """Log-distributions (n, V) float32 of what follows the tokens at `places`, (row, position)."""
    states = policy.model.base_model(**inputs, use_cache=False).last_hidden_state  # (b, S, d)
    rows, positions = torch.tensor(places, device=states.device).unbind(1)
    return policy.model.get_output_embeddings()(states[rows, positions]).float().log_softmax(-1)


def _change(clean: Tensor, other: Tensor, tokens: Tensor, probe: str) -> Tensor:
    """How far log-distribution `other` (n, V) is from `clean`, in nats, by `probe`; (n,)."""
    difference = clean - other
    if probe == "kl":
        return (clean.exp() * difference).sum(-1)
    return difference.gather(-1, tokens[:, None]).squeeze(-1)


def _fixed_noise(count: int, like: Tensor, seed: int) -> Tensor:
    """Standard normal (count, d); the first rows do not depend on how many follow."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(like.shape[1], generator=generator) for _ in range(count)]
    return torch.stack(rows).to(like) if rows else like.new_zeros(0, like.shape[1])
