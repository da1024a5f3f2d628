"""GRPO, from scratch: rollouts, one scoring forward, group advantages (Eq. (1)), the clipped loss.

    rollout           prompts -> G sampled responses each       Rollouts: ids (B, T), mask, texts
    score             rollouts -> old log-probabilities, entropies, last hidden states, in one forward
    group_advantages  rewards (B,) -> A (B,)                    Eq. (1)
    policy_loss       -min(rho A, clip(rho) A), averaged over all tokens of an optimizer step

This file knows nothing of SHEAR: `policy_loss` takes advantages (B,) or (B, T), and that is the whole hook.

What makes it right, and is easy to get wrong:
  - Training uses the sampled token ids; no text is ever encoded again.
  - Sampler and trainer use one temperature, and the sampler nothing else (no top-k, no top-p, no penalties;
    every option is set here, none is taken from the model's folder). So the ratio starts at exactly 1.
  - One token count per optimizer step divides every micro-batch's loss, so gradients do not depend on the
    micro-batch size or on padding.
  - A reward of NaN (no verdict) leaves mean and std of its group and gets advantage 0.

Left out: KL penalty and entropy bonus (0 in the paper's recipe), PPO's value function, dynamic sampling. The
head runs over a whole micro-batch at once, so logits (b, T, V) exist for one micro-batch: lower it if V is
large.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig

CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # the paper's; DAPO's "clip higher"


@dataclass(frozen=True)
class Rollouts:
    """B sampled responses, those to one prompt adjacent. Prompts are padded left, responses right."""

    prompt_ids: Tensor  # (B, P) int64
    prompt_mask: Tensor  # (B, P) bool
    ids: Tensor  # (B, T) int64, exactly as sampled
    mask: Tensor  # (B, T) bool, True on response tokens including the stop token
    truncated: Tensor  # (B,) bool, no stop token within the limit
    texts: list[str]  # B decoded responses, without the stop token

    def take(self, rows: Tensor) -> "Rollouts":
        """Some of the rollouts, without the columns that hold only their padding."""
        longest_prompt, longest = int(self.prompt_mask[rows].sum(1).max()), max(1, int(self.mask[rows].sum(1).max()))
        left = self.prompt_ids.shape[1] - longest_prompt
        return Rollouts(
            self.prompt_ids[rows, left:],
            self.prompt_mask[rows, left:],
            self.ids[rows, :longest],
            self.mask[rows, :longest],
            self.truncated[rows],
            [self.texts[row] for row in rows.tolist()],
        )


@dataclass(frozen=True)
class Scored:
    """What the sampling policy says of its own rollouts; all detached."""

    logp: Tensor  # (B, T) float32, log-probability of each sampled token
    entropies: Tensor  # (B, T) float32, nats, of the distribution each token was drawn from
    hidden: Tensor  # (B, T, d) model's dtype, on the CPU: last_hidden_state (after the final norm) at y_t


def stop_ids(model, tokenizer) -> list[int]:
    """Every token id that ends a response, by the model's folder or by its tokenizer."""
    ids = model.generation_config.eos_token_id
    ids = set(ids if isinstance(ids, list) else [ids]) | {tokenizer.eos_token_id}
    return sorted(ids - {None})


@torch.no_grad()
def rollout(
    model,
    tokenizer,
    prompts: list[str],
    group_size: int,
    *,
    max_tokens: int,
    temperature: float,
    batch_size: int,
) -> Rollouts:
    """Sample `group_size` responses to each prompt; temperature 0 is greedy decoding.

    `batch_size` rollouts are generated at a time. Texts hold every sampled token but the stop token, special
    ones spelt out: what is graded is what was sampled.
    """
    stops = stop_ids(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0] if stops else 0
    sampling = dict(do_sample=True, temperature=temperature) if temperature else dict(do_sample=False)
    config = GenerationConfig(
        **sampling,
        top_k=0 if temperature else None,
        top_p=1.0 if temperature else None,
        repetition_penalty=1.0,
        num_beams=1,
        max_new_tokens=max_tokens,
        eos_token_id=stops or None,
        pad_token_id=pad,
    )
    encoded = [ids for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"] for _ in range(group_size)]
    prompt_ids, prompt_mask = _pad_left(encoded, pad, model.device)  # (B, P), (B, P)
    folder_config = model.generation_config
    model.generation_config = GenerationConfig()  # or `generate` takes what we left unset from the folder's file
    responses = []
    try:
        bar = tqdm(total=len(encoded), desc="generate", unit="rollout", leave=False, disable=None)
        for rows in torch.arange(len(encoded)).split(batch_size):
            output = model.generate(prompt_ids[rows], attention_mask=prompt_mask[rows].long(), generation_config=config)
            responses.append(output[:, prompt_ids.shape[1] :])
            bar.update(len(rows))
        bar.close()
    finally:
        model.generation_config = folder_config
    width = max(response.shape[1] for response in responses)
    ids = torch.cat([torch.nn.functional.pad(r, (0, width - r.shape[1]), value=pad) for r in responses])  # (B, T)
    is_stop = torch.isin(ids, torch.tensor(stops, device=ids.device, dtype=ids.dtype))  # (B, T)
    mask = is_stop.cumsum(1) - is_stop.long() == 0  # (B, T) up to and including the first stop token
    truncated = ~is_stop.any(1)
    texts = [tokenizer.decode(row[keep]) for row, keep in zip(ids, mask & ~is_stop, strict=True)]
    return Rollouts(prompt_ids, prompt_mask, ids, mask, truncated, texts)


@torch.no_grad()
def score(model, rollouts: Rollouts, *, temperature: float, micro_batch: int, keep_hidden: bool = True) -> Scored:
    """Old log-probabilities, entropies and the hidden states that SHEAR compares, in one forward.

    Without `keep_hidden` the states (B, T, d) are not stored: d is then 0.
    """
    shape = rollouts.ids.shape
    logp, entropies = (torch.zeros(shape, device=rollouts.ids.device) for _ in range(2))  # (B, T) float32
    hidden = None
    for rows in tqdm(torch.arange(shape[0]).split(micro_batch), desc="score", leave=False, disable=None):
        part = rollouts.take(rows)
        log_probs, states = forward(model, part, temperature)
        width = part.ids.shape[1]
        if hidden is None:
            hidden = torch.zeros(*shape, states.shape[-1] if keep_hidden else 0, dtype=states.dtype)  # (B, T, d), CPU
        logp[rows, :width] = token_logp(log_probs, part.ids)
        entropies[rows, :width] = -(log_probs.exp() * log_probs).sum(-1)
        if keep_hidden:
            hidden[rows, :width] = states.cpu()
    return Scored(logp, entropies, hidden)


def forward(model, rollouts: Rollouts, temperature: float) -> tuple[Tensor, Tensor]:
    """The model on prompt + response: log-probabilities (b, T, V) float32 and hidden states (b, T, d).

    Token y_t is predicted from the state one position before it, and *is* the state at its own position:
    logits come from positions P-1 .. P+T-2, hidden states from P .. P+T-1. Padding on the right needs no
    attention mask, as attention is causal.
    """
    ids = torch.cat([rollouts.prompt_ids, rollouts.ids], 1)  # (b, P + T)
    attention = torch.cat([rollouts.prompt_mask, torch.ones_like(rollouts.mask)], 1).long()
    states = model.base_model(
        input_ids=ids,
        attention_mask=attention,
        position_ids=(attention.cumsum(1) - 1).clamp_min(0),
        use_cache=False,
    ).last_hidden_state  # (b, P + T, d)
    first = rollouts.prompt_ids.shape[1]
    logits = model.get_output_embeddings()(states[:, first - 1 : -1]).float() / temperature  # (b, T, V)
    return logits.log_softmax(-1), states[:, first:]


def token_logp(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the sampled tokens: (b, T, V), (b, T) -> (b, T)."""
    return log_probs.gather(-1, ids[..., None]).squeeze(-1)


def group_advantages(rewards: Tensor, group_size: int, delta: float = 1e-6) -> Tensor:
    """Eq. (1): (r - mean) / (std + delta) within each group, unbiased std; rewards (B,) -> A (B,).

    0 where all rewards of the group are equal, and for a NaN reward, which also leaves mean and std.
    """
    groups = rewards.float().view(-1, group_size)  # (groups, G)
    known = ~groups.isnan()
    count = known.sum(1, keepdim=True)  # (groups, 1)
    mean = groups.nansum(1, keepdim=True) / count.clamp_min(1)
    centred = torch.where(known, groups - mean, 0.0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp_min(1)).sqrt()
    low, high = (torch.where(known, groups, fill) for fill in (torch.inf, -torch.inf))
    mixed = low.amin(1, keepdim=True) < high.amax(1, keepdim=True)  # not std > 0: a mean can round
    return torch.where(mixed, centred / (std + delta), 0.0).flatten()


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    n_tokens: int,
    clip_low: float = CLIP_LOW,
    clip_high: float = CLIP_HIGH,
) -> tuple[Tensor, dict[str, float]]:
    """Clipped surrogate of one micro-batch: logp, old_logp, mask (b, T); advantages (b,) or (b, T).

    `n_tokens` is the number of response tokens in the whole optimizer step, not in this micro-batch: the
    losses, and the metrics, of its micro-batches then add up to the step's.
    """
    if advantages.dim() == 1:
        advantages = advantages[:, None]  # GRPO: every token of a rollout gets A_i
    log_ratio = torch.where(mask, logp - old_logp, 0.0)  # (b, T)
    ratio = log_ratio.clamp(-20.0, 20.0).exp()  # rho; the clamp keeps exp finite
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.min(ratio * advantages, clipped * advantages)
    loss = -torch.where(mask, surrogate, 0.0).sum() / n_tokens
    with torch.no_grad():
        cut = mask & (clipped * advantages < ratio * advantages)  # tokens that get no gradient
        metrics = {
            "clip_share": cut.sum().item() / n_tokens,
            "abs_log_ratio": log_ratio.abs().sum().item() / n_tokens,
        }
    return loss, metrics


def _pad_left(rows: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token lists -> ids (B, P) int64 and mask (B, P) bool, padded on the left."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(width, device=device)[None] >= width - lengths[:, None]
