"""What a credit method sees: a batch of rollouts with rewards, and the context of the run.

    Batch.of(rollouts, ...)   graded rollouts, before they have advantages and are scored
    batch.blocks()            its parts, each of a few whole groups: they are scored and get credit
    Batch.cat(blocks, ...)    one batch again
    batch.groups()            the groups of a block, with hidden states: a `Group` each
    Context                   policy, tokenizer, task and settings
    tokens_of(...)            the text of each sampled token, without encoding it again

The hidden states of all rollouts would not fit in memory: for 4,096 rollouts of 3,000 tokens, a 7B
model's states take 88 GB. They exist for one block at a time, and only (B, T) tensors leave it.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from base.config import Shear
from base.errors import BadInput
from grpo import Policy, Rollouts, Scores, cat_padded, decode, score
from rewards import Verdict, rewards_of
from shear import Weighed
from tasks.task import FirstError, Task

BLOCK_TOKENS = 2**15  # response tokens per block: 235 MB of states, if each is 3,584 bfloat16s
NOT_SCORED = torch.empty(0)  # in place of a (B, T) tensor before scoring


@dataclass
class Context:
    """A method's inputs besides the batch: settings, and what forward passes of its own need."""

    policy: Policy  # the policy that sampled, with unsharded weights
    tokenizer: PreTrainedTokenizerBase
    task: Task
    shear: Shear
    seed: int
    temperature: float  # at which the policy sampled
    micro_tokens: int  # tokens per forward pass
    step: int = 0  # steps done
    # arguments of `shear.shear_weights` that take the place of its plain functions
    hooks: dict[str, Callable] = field(default_factory=dict)
    # what a rule's `prepare` keeps for it
    kept: dict[str, Any] = field(default_factory=dict)

    def score(self, rollouts: Rollouts, keep_hidden: bool = True) -> Scores:
        """Log-probabilities, entropies and states of rollouts, at the temperature of sampling."""
        return score(
            self.policy,
            rollouts,
            temperature=self.temperature,
            micro_tokens=self.micro_tokens,
            keep_hidden=keep_hidden,
        )


def effective_weights(token_advantages: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Token advantages (B, T) over rollout advantages A (B,): the weights (B, T) of the tokens.

    They are 1 where A = 0, and 0 outside of the mask (B, T).
    """
    scale = advantages[:, None]
    return torch.where(scale != 0, token_advantages / scale, 1.0) * mask


class Group(NamedTuple):
    """The rollouts of one problem, and their states."""

    rows: slice  # of the batch
    states: Tensor  # (n, d), of the n response tokens, end to end
    mask: Tensor  # (G, T) bool, the response tokens
    correct: Tensor  # (G,) bool, the right rollouts


@dataclass
class Batch:
    """B rollouts and all that a method may know of them; the rollouts of a group are adjacent."""

    rollouts: Rollouts  # ids, mask (B, T); the mask is empty where there is no verdict
    rewards: Tensor  # (B,) float32, NaN where there is no verdict
    advantages: Tensor  # (B,) float32, Eq. (1)
    group_size: int
    problems: list[dict]  # one per group
    reasons: list[str]  # of the verdicts, one per rollout
    log_probs: Tensor = NOT_SCORED  # (B, T) float32, by the policy that sampled
    entropies: Tensor = NOT_SCORED  # (B, T) float32, nats
    hidden: Tensor | None = None  # (N, d), a block's N response tokens end to end; None: not kept
    token_advantages: Tensor = NOT_SCORED  # (B, T) float32
    # what a rule that compares spans found in each group, without omega
    weighed: list[Weighed] = field(default_factory=list)
    # The logged metrics by name: [sum of the values, number of values].
    stats: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, rollouts: Rollouts, verdicts: list[Verdict], problems: list[dict]) -> "Batch":
        """Graded rollouts, without advantages; `problems` has one per group.

        The mask of a rollout without a verdict is emptied, so it is on no side of its group and in
        no loss.
        """
        rewards = torch.tensor(rewards_of(verdicts), device=rollouts.ids.device).float()  # (B,)
        rollouts = replace(rollouts, mask=rollouts.mask & ~rewards.isnan()[:, None])
        group_size = len(verdicts) // len(problems)
        reasons = [verdict.reason for verdict in verdicts]
        return cls(rollouts, rewards, NOT_SCORED, group_size, problems, reasons)

    @classmethod
    def cat(cls, batches: Sequence["Batch"], problems: list[dict]) -> "Batch":
        """One batch of scored blocks, or of the batches of all ranks, without hidden states.

        `problems` are those of all of them, one per group.
        """
        whole = cls(
            Rollouts.cat([batch.rollouts for batch in batches]),
            torch.cat([batch.rewards for batch in batches]),
            torch.cat([batch.advantages for batch in batches]),
            batches[0].group_size,
            problems,
            [reason for batch in batches for reason in batch.reasons],
            log_probs=cat_padded([batch.log_probs for batch in batches]),
            entropies=cat_padded([batch.entropies for batch in batches]),
            token_advantages=cat_padded([batch.token_advantages for batch in batches]),
        )
        for batch in batches:
            whole.weighed += batch.weighed
            for name, sums in batch.stats.items():
                whole.add(name, sums)
        return whole

    def blocks(self, most: int = BLOCK_TOKENS) -> Iterator["Batch"]:
        """The batch in parts of whole groups: at most `most` response tokens, or one group.

        The parts are not scored, even if the batch is.
        """
        starts = [0]  # the first group of each block
        held = 0  # tokens of the last block so far
        for group, tokens in enumerate(self.group_tokens):
            if held and held + tokens > most:
                starts.append(group)
                held = 0
            held += tokens
        for start, end in pairwise([*starts, len(self.group_tokens)]):
            rows = slice(start * self.group_size, end * self.group_size)
            yield Batch(
                self.rollouts.take(torch.arange(rows.start, rows.stop)),
                self.rewards[rows],
                self.advantages[rows],
                self.group_size,
                self.problems[start:end],
                self.reasons[rows],
            )

    def minibatches(self, groups: int, seed: int, step: int) -> Iterator[Tensor]:
        """The rows (m,) int64 of each mini-batch: `groups` whole groups, or what is left of them.

        The groups are shuffled by (seed, step).
        """
        starts = list(range(0, len(self.rewards), self.group_size))
        random.Random(f"minibatches {seed} {step}").shuffle(starts)
        for first in range(0, len(starts), groups):
            chosen = torch.tensor(starts[first : first + groups])[:, None]  # (groups, 1)
            yield (chosen + torch.arange(self.group_size)).flatten()

    def groups(self) -> Iterator[Group]:
        """Each group of a batch that keeps its states."""
        for number, states in enumerate(self.states.split(self.group_tokens)):  # (n, d) each
            rows = slice(number * self.group_size, (number + 1) * self.group_size)
            yield Group(rows, states, self.mask[rows], self.correct[rows])

    @property
    def mask(self) -> Tensor:
        """(B, T) bool, the response tokens."""
        return self.rollouts.mask

    @property
    def lengths(self) -> Tensor:
        """(B, 1) int64, the response tokens of each rollout."""
        return self.mask.sum(1, keepdim=True)

    @property
    def A(self) -> Tensor:
        """A of Eq. (1), a row per rollout, (B, 1)."""
        return self.advantages[:, None]

    @property
    def weights(self) -> Tensor:
        """(B, T), the `effective_weights` of the token advantages."""
        return effective_weights(self.token_advantages, self.advantages, self.mask)

    @property
    def states(self) -> Tensor:
        """(N, d), the hidden states; raises BadInput for a batch that does not keep them."""
        if self.hidden is None:
            reason = "the rule reads hidden states, and is entered without them"
            raise BadInput(f"--method: {reason}; add needs_states=True to its @rule")
        return self.hidden

    @property
    def group_tokens(self) -> list[int]:
        """Response tokens of each group."""
        return self.lengths.view(-1, self.group_size).sum(1).tolist()

    def log(self, name: str, values: Tensor) -> None:
        """Log further values of a metric, such as one per group or per pair of spans.

        The metric is the mean of its values over all blocks and ranks.
        """
        self.add(name, np.array([values.double().sum().item(), values.numel()]))

    def add(self, name: str, sums: np.ndarray) -> None:
        """Add further values to a metric, given as [their sum, their number]."""
        self.stats[name] = self.stats.get(name, 0) + sums

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each logged metric."""
        return {name: total / count for name, (total, count) in sorted(self.stats.items())}

    @property
    def first_mixed(self) -> int | None:
        """The number of the first group with right and wrong rollouts; None if there is none."""
        rows = self.advantages.nonzero().flatten().tolist()
        return rows[0] // self.group_size if rows else None

    @property
    def correct(self) -> Tensor:
        """(B,) bool, the right rollouts."""
        return self.rewards > 0.5

    def problem_of(self, row: int) -> dict:
        """The problem of a rollout."""
        return self.problems[row // self.group_size]

    def true_errors(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """Where each wrong rollout's first wrong step starts and ends, (B, 2) int64.

        The tokens are -1 for right rollouts, where A is 0, and where no wrong step is known.
        """
        places = torch.full((len(self.advantages), 2), -1, device=self.advantages.device)
        for row in ((self.advantages != 0) & ~self.correct).nonzero().flatten().tolist():
            error = self.true_error(row, task, tokenizer)
            if error:
                places[row] = places.new_tensor([error.token, error.end])
        return places

    def true_error(
        self, row: int, task: Task, tokenizer: PreTrainedTokenizerBase
    ) -> FirstError | None:
        """The first wrong step of a rollout; None if it has none, or the task does not know."""
        if not task.first_error:
            return None
        tokens = tokens_of(tokenizer, self.rollouts, row)
        if not self.rollouts.truncated[row]:
            tokens = tokens[:-1]  # without the stop token
        return task.first_error(self.problem_of(row), tokens)


# ---- the text of sampled tokens ------------------------------------------------------------------


def char_starts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Where in the text of `ids` each token starts.

    With these, what is found in a text is found in the sampled ids. Several byte-level tokens may
    be parts of one character; each of them starts where the character does, and so does the token
    after bytes that are not a character.
    """
    starts = []
    whole, shown = 0, 0  # tokens ids[:whole] are whole characters, `shown` of them
    context = 0  # a token before, as some tokenizers drop the space of a text's first one
    for end in range(1, len(ids) + 1):
        starts.append(shown)
        text = decode(tokenizer, ids[context:end])
        # otherwise the character goes on, up to four bytes
        if not text.endswith("\ufffd") or end - whole > 4:
            shown += len(text) - len(decode(tokenizer, ids[context:whole]))
            context, whole = whole, end
    return starts


def tokens_of(tokenizer: PreTrainedTokenizerBase, rollouts: Rollouts, row: int) -> list[str]:
    """The text of each response token of a rollout, which together are its text.

    A character of several tokens belongs to the last one.
    """
    ids = rollouts.ids[row][rollouts.mask[row]].tolist()
    text = decode(tokenizer, ids)
    return [text[start:end] for start, end in pairwise([*char_starts(tokenizer, ids), len(text)])]
