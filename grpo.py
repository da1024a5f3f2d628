"""GRPO, from scratch: rollouts, one scoring forward, group advantages (Eq. (1)), the clipped loss.

    rollout           prompts -> G sampled responses each       Rollouts: ids (B, T), mask, texts
    Policy            a causal LM as training sees it: rollouts -> log-probabilities of their tokens
    score             rollouts -> old log-probabilities, entropies, last hidden states, in one
                      forward
    group_advantages  rewards (B,) -> A (B,)                    Eq. (1)
    policy_loss       -min(rho A, clip(rho) A), summed over tokens
    pack              rollouts of many lengths -> micro-batches of a bounded number of tokens

Two things here serve SHEAR: `score` returns the hidden states, and `policy_loss` takes advantages
(B, T) as well as (B,).

What makes it right, and is easy to get wrong:
  - Training uses the sampled token ids; no text is ever encoded again.
  - Sampler and trainer use one temperature, and the sampler nothing else (no top-k, no top-p, no
    penalties; every option is set here, none is taken from the model's folder). So the ratio starts
    at 1, up to rounding.
  - One token count per optimizer step divides every micro-batch's loss, so gradients do not depend
    on the micro-batch size, on padding, or on the number of ranks.
  - A reward of NaN (no verdict) does not count in its group's mean and std and gets advantage 0.
  - Logits (b, T, V) never exist: the head runs over HEAD_CHUNK response tokens at a time, in
    training too.

Left out: KL penalty and entropy bonus (0 in the paper's recipe), PPO's value function.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # the paper's; DAPO's "clip higher"
AT_ONCE = 2**21  # tokens that a batch of prompts and responses may have while it is generated
# tokens whose logits exist at a time: 1.2 GB in float32 for a vocabulary of 152,000
HEAD_CHUNK = 2048
# progress bars: rank 0's alone, and on a terminal (None) alone
HIDE_BAR = os.environ.get("RANK", "0") != "0" or None


@dataclass(frozen=True)
class Rollouts:
    """B sampled responses, those to one prompt adjacent.

    Prompts are padded on the left, responses on the right.
    """

    prompt_ids: Tensor  # (B, P) int64
    prompt_mask: Tensor  # (B, P) bool
    ids: Tensor  # (B, T) int64, exactly as sampled
    mask: Tensor  # (B, T) bool, True on response tokens including the stop token
    truncated: Tensor  # (B,) bool, no stop token within the limit
    texts: list[str]  # B decoded responses, without the stop token

    def take(self, rows: Tensor) -> "Rollouts":
        """Some of the rollouts, without the columns that hold only their padding."""
        first = self.prompt_ids.shape[1] - int(self.prompt_mask[rows].sum(1).max())
        longest = max(1, int(self.mask[rows].sum(1).max()))
        return Rollouts(
            self.prompt_ids[rows, first:],
            self.prompt_mask[rows, first:],
            self.ids[rows, :longest],
            self.mask[rows, :longest],
            self.truncated[rows],
            [self.texts[row] for row in rows.tolist()],
        )

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each rollout, prompt and response together."""
        return (self.prompt_mask.sum(1) + self.mask.sum(1)).tolist()

    @classmethod
    def cat(cls, batches: Sequence["Rollouts"]) -> "Rollouts":
        """The rollouts of several batches, in order."""
        return cls(
            cat_padded([batch.prompt_ids for batch in batches], left=True),
            cat_padded([batch.prompt_mask for batch in batches], left=True),
            cat_padded([batch.ids for batch in batches]),
            cat_padded([batch.mask for batch in batches]),
            torch.cat([batch.truncated for batch in batches]),
            list(itertools.chain.from_iterable(batch.texts for batch in batches)),
        )


class Scores(NamedTuple):
    """What a policy says of rollouts; detached, but for the log-probabilities in training."""

    log_probs: Tensor  # (B, T) float32, of each sampled token
    entropies: Tensor  # (B, T) float32, nats, of the distribution each token was drawn from
    # (N, d) model's dtype: last_hidden_state (after the final norm) at each y_t of the mask, end to
    # end; None: not kept
    hidden: Tensor | None


def to_padded(values: Tensor, mask: Tensor) -> Tensor:
    """Values (N, ...) of the tokens of a mask (B, T), such as their states -> (B, T, ...).

    The result is 0 outside of the mask.
    """
    whole = values.new_zeros(mask.shape + values.shape[1:])
    whole[mask] = values
    return whole


def cat_padded(tensors: Sequence[Tensor], left: bool = False, fill: int = 0) -> Tensor:
    """Tensors (B_i, T_i, ...) -> (sum of B_i, max of T_i, ...), shorter ones padded with `fill`."""
    rows = list(itertools.chain.from_iterable(tensors))
    side = "left" if left else "right"
    return pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)


def pad_left(rows: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token lists -> ids (B, P) int64 and mask (B, P) bool, padded on the left."""
    ids = [torch.tensor(row, dtype=torch.int64, device=device) for row in rows]  # (P_i,) each
    mask = [torch.ones_like(row, dtype=torch.bool) for row in ids]
    return pad_sequence(ids, True, pad, "left"), pad_sequence(mask, True, False, "left")


def pad_id(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> int:
    """The id that pads prompts and responses; any will do, as a mask or causality hides it.

    A pad token that was added to the tokenizer alone has no embedding, and is passed over.
    """
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None and token < model.get_input_embeddings().num_embeddings:
            return token
    return 0


def token_ids(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str | list[int]]
) -> list[list[int]]:
    """The ids of each prompt: a text is encoded, ids stay as they are."""
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        encoded.append(prompt)
    return encoded


def decode(tokenizer: PreTrainedTokenizerBase, ids: Tensor | list[int]) -> str:
    """The text of a response's ids, with the spaces before punctuation that were sampled.

    Ids without a token, which a model may have embeddings for, are left out.
    """
    try:
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    except ValueError:  # tokenizers of bytes written in Python raise it for such ids
        known = set(tokenizer.get_vocab().values())
        kept = [id for id in map(int, ids) if id in known]
        text = tokenizer.decode(kept, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)  # a list only for several responses
    return text


def hf_generate(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    max_tokens: int,
    temperature: float,
    stops: list[int],
    pad: int,
    **generate_kwargs: object,
) -> Tensor:
    """transformers' `generate`, for any model and device: (b, P) -> (b, T) ids.

    `pad` fills a row after its stop token; `generate_kwargs` go to transformers. `rollout` takes
    any function of this signature.
    """
    config = GenerationConfig(
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_k=0 if temperature else None,
        top_p=1.0 if temperature else None,
        repetition_penalty=1.0,
        num_beams=1,
        max_new_tokens=max_tokens,
        eos_token_id=stops or None,
        pad_token_id=pad,
    )
    processors = None if temperature else [refuse_unknown]
    folder_config = model.generation_config
    # otherwise `generate` takes what we left unset from the folder's file
    model.generation_config = GenerationConfig()
    try:
        output = model.generate(  # type: ignore[operator]  # typed for another checker than mypy
            prompt_ids,
            attention_mask=prompt_mask.long(),
            generation_config=config,
            logits_processor=processors,
            **generate_kwargs,
        )
    finally:
        model.generation_config = folder_config
    return output[:, prompt_ids.shape[1] :]


def refuse_unknown(ids: Tensor, logits: Tensor) -> Tensor:
    """Return logits (b, V) unchanged; raise RuntimeError if a row's largest is not finite.

    Sampling raises the same error; greedy decoding would choose the NaN.
    """
    if not logits.amax(-1).isfinite().all():
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    return logits


@torch.no_grad()
def rollout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | list[int]],
    group_size: int,
    *,
    max_tokens: int,
    temperature: float,
    stops: Sequence[int] | None = None,
    batch_tokens: int = AT_ONCE,
    generate: Callable[..., Tensor] = hf_generate,
) -> Rollouts:
    """Sample `group_size` responses to each prompt, a text or its token ids.

    Temperature 0 is greedy decoding. `stops` are the ids that end a response, by default the
    tokenizer's end of text; `harness.models.stop_ids` finds those of chat models, too. Rollouts
    with prompts of like length are generated together, at most `batch_tokens` tokens of padded
    prompts and full responses at a time. `generate` has the signature of `hf_generate`. Texts hold
    every sampled token but the stop token, special ones spelt out: what is graded is what was
    sampled.
    """
    stops = [tokenizer.eos_token_id] if stops is None else list(stops)
    pad = pad_id(tokenizer, model)
    encoded = []
    for ids in token_ids(tokenizer, prompts):
        encoded += [ids] * group_size
    prompt_ids, prompt_mask = pad_left(encoded, pad, model.device)  # (B, P), (B, P)
    lengths = prompt_mask.sum(1)  # (B,)
    batches = pack(range(len(encoded)), (lengths + max_tokens).tolist(), batch_tokens)
    responses = []
    bar = tqdm(total=len(encoded), desc="generate", unit="rollout", leave=False, disable=HIDE_BAR)
    for rows in batches:
        first = prompt_ids.shape[1] - int(lengths[rows].max())
        response = generate(  # (b, t)
            model,
            prompt_ids[rows, first:],
            prompt_mask[rows, first:],
            max_tokens=max_tokens,
            temperature=temperature,
            stops=stops,
            pad=pad,
        )
        responses.append(response)
        bar.update(len(rows))
    bar.close()
    order = torch.cat(batches)  # (B,)
    sampled = cat_padded(responses, fill=pad)[order.argsort()]  # (B, T)
    stop_tokens = torch.tensor(stops, device=sampled.device, dtype=sampled.dtype)
    is_stop = torch.isin(sampled, stop_tokens)  # (B, T)
    mask = up_to_first(is_stop)  # (B, T)
    is_text = mask & ~is_stop  # (B, T)
    texts = [decode(tokenizer, sampled[row][is_text[row]]) for row in range(len(sampled))]
    return Rollouts(prompt_ids, prompt_mask, sampled, mask, ~is_stop.any(1), texts)


def up_to_first(is_stop: Tensor) -> Tensor:
    """Stop tokens (B, T) bool -> the response tokens, up to the first stop token and with it."""
    stops_before = is_stop.cumsum(1) - is_stop.long()  # (B, T)
    return stops_before == 0


def end_to_end(rollouts: Rollouts) -> tuple[Tensor, Tensor, dict]:
    """Prompt and response of each rollout without a gap: ids (b, S), and which are of the response.

    All padding is then on the right, where causal attention never looks, so no attention mask is
    needed: the third value, further arguments of the model, is empty.
    """
    used = torch.cat([rollouts.prompt_mask, rollouts.mask], 1)  # (b, P + T)
    longest = int(used.sum(1).max())  # S
    order = (~used).int().argsort(dim=1, stable=True)[:, :longest]  # (b, S), used places first
    ids = torch.cat([rollouts.prompt_ids, rollouts.ids], 1).gather(1, order)
    in_response = torch.cat([torch.zeros_like(rollouts.prompt_mask), rollouts.mask], 1)
    return ids, in_response.gather(1, order), {}


def pack(
    rows: Sequence[int], lengths: Sequence[int], tokens: int, multiple: int = 1
) -> list[Tensor]:
    """Micro-batches of `rows`, at most `tokens` tokens each, padding included.

    Rollouts of like length go together, longest first, so what does not fit in memory fails at
    once. `multiple` micro-batches, one for each rank, are computed at a time and are about equally
    large. A rollout longer than `tokens` goes alone.
    """
    longest_first = sorted(rows, key=lambda row: -lengths[row])
    micro_batches = []
    while longest_first:
        count = multiple * max(1, tokens // lengths[longest_first[0]])
        together = longest_first[:count]
        longest_first = longest_first[count:]
        for turn in range(min(multiple, len(together))):
            micro_batches.append(torch.tensor(together[turn::multiple]))
    return micro_batches


class Layout(NamedTuple):
    """How rollouts become micro-batches, and a micro-batch the rows that the model computes."""

    lay_out: Callable[[Rollouts], tuple[Tensor, Tensor, dict]] = end_to_end
    pack: Callable[..., list[Tensor]] = pack


PADDED = Layout()


class Policy(torch.nn.Module):
    """A causal LM as training sees it: rollouts in, what it says of their tokens out.

    A module and not a function because sharding gathers the outermost weights around its root's
    forward (`harness/fsdp.py`): base model and head both have to run inside one such forward.
    `--use lab.fast` has a layout without padding.
    """

    def __init__(self, model: PreTrainedModel, layout: Layout = PADDED) -> None:
        super().__init__()
        self.model = model
        self.layout = layout

    def forward(self, rollouts: Rollouts, temperature: float, *, details: bool = False) -> Scores:
        """Log-probabilities of the sampled tokens, with gradient, 0 outside of the mask.

        With `details`, for scoring, also entropies and hidden states; without, these are 0 and
        None. Token y_t is predicted from the state one position before its own; the state that
        represents it, h_t, is the one at its own position.
        """
        # (b, S), (b, S); (1, N) if packed
        ids, is_response, model_kwargs = self.layout.lay_out(rollouts)
        states = self.model.base_model(
            input_ids=ids, use_cache=False, **model_kwargs
        ).last_hidden_state  # (b, S, d)
        before = states[:, :-1][is_response[:, 1:]]  # (n, d)
        head = self.model.get_output_embeddings()
        tokens = rollouts.ids[rollouts.mask]  # (n,)
        logp = []
        entropies = []
        for start in range(0, max(1, len(tokens)), HEAD_CHUNK):
            chunk = slice(start, start + HEAD_CHUNK)
            values = checkpoint(
                _log_probs_of,
                head,
                before[chunk],
                tokens[chunk],
                temperature,
                details,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            logp.append(values[0])
            entropies.append(values[1])
        zeros = torch.zeros(rollouts.ids.shape, device=ids.device)  # (b, T) float32
        return Scores(
            zeros.masked_scatter(rollouts.mask, torch.cat(logp)),
            zeros.masked_scatter(rollouts.mask, torch.cat(entropies)),
            states[is_response] if details else None,
        )


def _log_probs_of(
    head: torch.nn.Module, states: Tensor, tokens: Tensor, temperature: float, details: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens (n,) predicted from states (n, d), and their entropies.

    Without `details` the entropies are 0.
    """
    log_probs = (head(states).float() / temperature).log_softmax(-1)  # (n, V)
    of_tokens = log_probs.gather(-1, tokens[:, None]).squeeze(-1)  # (n,)
    if not details:
        return of_tokens, torch.zeros_like(of_tokens)
    return of_tokens, -(log_probs.exp() * log_probs).sum(-1)


@torch.no_grad()
def score(
    policy: Policy,
    rollouts: Rollouts,
    *,
    temperature: float,
    micro_tokens: int,
    keep_hidden: bool = True,
) -> Scores:
    """Old log-probabilities, entropies and the hidden states that SHEAR compares, in one forward.

    The states of many rollouts would fill the memory: score a few whole groups at a time, or keep
    no states, with `keep_hidden` false.
    """
    logp = torch.zeros(rollouts.ids.shape, device=rollouts.ids.device)  # (B, T) float32
    entropies = torch.zeros_like(logp)  # (B, T) float32
    hidden: Tensor | None = None
    # (B, T) each token's place among the N
    places = (rollouts.mask.flatten().cumsum(0) - 1).view_as(rollouts.mask)
    batches = policy.layout.pack(range(len(rollouts.texts)), rollouts.lengths, micro_tokens)
    for rows in tqdm(batches, desc="score", leave=False, disable=HIDE_BAR):
        micro_batch = rollouts.take(rows)
        width = micro_batch.ids.shape[1]
        scored = policy(micro_batch, temperature, details=True)
        logp[rows, :width] = scored.log_probs
        entropies[rows, :width] = scored.entropies
        if keep_hidden:
            if hidden is None:
                shape = int(rollouts.mask.sum()), scored.hidden.shape[-1]  # (N, d)
                hidden = scored.hidden.new_empty(shape)
            hidden[places[rows, :width][micro_batch.mask]] = scored.hidden
    return Scores(logp, entropies, hidden)


def group_advantages(rewards: Tensor, group_size: int, delta: float = 1e-6) -> Tensor:
    """Eq. (1): (r - mean) / (std + delta) within each group, unbiased std; rewards (B,) -> A (B,).

    A is 0 where all rewards of the group are equal, and for a NaN reward, which does not count in
    mean and std either.
    """
    groups = rewards.float().view(-1, group_size)  # (groups, G)
    count = (~groups.isnan()).sum(1, keepdim=True)  # (groups, 1)
    centred = (groups - groups.nanmean(1, keepdim=True)).nan_to_num(0.0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp_min(1)).sqrt()
    lowest = groups.nan_to_num(torch.inf).amin(1, keepdim=True)
    highest = groups.nan_to_num(-torch.inf).amax(1, keepdim=True)
    mixed = lowest < highest  # not std > 0: the mean of equal rewards can round
    return torch.where(mixed, centred / (std + delta), 0.0).flatten()


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = CLIP_LOW,
    clip_high: float = CLIP_HIGH,
) -> tuple[Tensor, dict[str, float]]:
    """Clipped surrogate of one micro-batch: logp, old_logp, mask (b, T); advantages (b,) or (b, T).

    Returns sums over tokens: the loss, and the metrics "clipped", the number of tokens whose
    gradient is clipped away, and "abs_log_ratio", |log rho|. Whoever adds up the micro-batches of
    an optimizer step divides once, by the number of tokens in all of them.
    """
    if advantages.dim() == 1:
        advantages = advantages[:, None]  # GRPO: every token of a rollout gets A_i
    log_ratio = torch.where(mask, logp - old_logp, 0.0)  # (b, T)
    ratio = log_ratio.clamp(-20.0, 20.0).exp()  # rho; the clamp keeps exp finite
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.min(ratio * advantages, clipped * advantages)
    loss = -torch.where(mask, surrogate, 0.0).sum()
    with torch.no_grad():
        cut = mask & (clipped * advantages < ratio * advantages)  # their gradient is clipped away
        metrics = {
            "clipped": float(cut.sum()),
            "abs_log_ratio": log_ratio.abs().sum().item(),
        }
    return loss, metrics
