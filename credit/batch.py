"""What a credit method sees: a batch of rollouts with rewards, and the context of the run.

The hidden states of all rollouts would not fit: at 4,096 rollouts of 3,000 tokens those of a 7B
model are 88 GB. They exist for a block, and only (B, T) tensors leave it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from credit.reward_model import RewardModel
from credit.settings import Shear
from credit.shear_settings import ClosestSpan
from credit.tokens import tokens_of
from grpo import Policy, Rollouts, Scores, cat_padded, group_advantages, score, to_padded
from rewards import Verdict, rewards_of
from tasks.lessons import FirstError
from tasks.problems import Task

BLOCK_TOKENS = 2**15  # response tokens per block; their states take 235 MB at 3,584 bfloat16s
NOT_SCORED = torch.empty(0)  # stands for a (B, T) tensor before scoring


@dataclass(frozen=True)
class Context:
    """A method's inputs besides the batch: the run's settings, and all that its own passes need."""

    policy: Policy  # the policy that sampled, with unsharded weights
    tokenizer: PreTrainedTokenizerBase
    task: Task
    shear: Shear
    step: int  # steps done
    steps: int  # length of the run
    seed: int
    temperature: float  # at which the policy sampled
    micro_tokens: int  # tokens per pass
    prm: RewardModel | None = None

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
    """What each token's advantage was multiplied by, (B, T).

    It is 1 where A = 0, and 0 outside of the mask.
    """
    scale = advantages[:, None]
    return torch.where(scale != 0, token_advantages / scale, 1.0) * mask


@dataclass
class Batch:
    """Everything that a method may look at.

    The rollouts of a group are adjacent.
    """

    rollouts: Rollouts  # ids, mask (B, T); the mask is empty where there is no verdict
    rewards: Tensor  # (B,) float32, NaN where there is no verdict
    advantages: Tensor  # (B,) float32, Eq. (1)
    group_size: int
    problems: list[dict]  # one per group
    reasons: list[str]  # one per verdict
    log_probs: Tensor = NOT_SCORED  # (B, T) float32, by the policy that sampled
    entropies: Tensor = NOT_SCORED  # (B, T) float32, nats
    hidden: Tensor | None = None  # (N, d), a block's N response tokens end to end; None: not kept
    token_advantages: Tensor = NOT_SCORED  # (B, T) float32
    # For the page: the spans of each rollout of the first group that SHEAR solved.
    closest: list[list[ClosestSpan]] = field(default_factory=list)
    # Of each logged metric the sum of its values, and their number.
    stats: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, rollouts: Rollouts, verdicts: list[Verdict], problems: list[dict]) -> "Batch":
        """A batch before its scoring.

        A rollout without a verdict is in no set and in no loss.
        """
        rewards = torch.tensor(rewards_of(verdicts), device=rollouts.ids.device).float()  # (B,)
        rollouts = replace(rollouts, mask=rollouts.mask & ~rewards.isnan()[:, None])
        group_size = len(verdicts) // len(problems)
        advantages = group_advantages(rewards, group_size)  # (B,), Eq. (1)
        reasons = [verdict.reason for verdict in verdicts]
        return cls(rollouts, rewards, advantages, group_size, problems, reasons)

    @classmethod
    def cat(cls, batches: Sequence["Batch"]) -> "Batch":
        """Blocks, or the batches of all ranks, as one; after scoring, without hidden states."""
        whole = cls(
            Rollouts.cat([batch.rollouts for batch in batches]),
            torch.cat([batch.rewards for batch in batches]),
            torch.cat([batch.advantages for batch in batches]),
            batches[0].group_size,
            [problem for batch in batches for problem in batch.problems],
            [reason for batch in batches for reason in batch.reasons],
            log_probs=cat_padded([batch.log_probs for batch in batches]),
            entropies=cat_padded([batch.entropies for batch in batches]),
            token_advantages=cat_padded([batch.token_advantages for batch in batches]),
        )
        for batch in batches:
            for name, sums in batch.stats.items():
                whole.add(name, sums)
            whole.closest = whole.closest or batch.closest
        return whole

    def blocks(self) -> Iterator["Batch"]:
        """Whole groups with at most BLOCK_TOKENS tokens, or one group, as batches."""
        starts = [0]  # the first group of each block
        held = 0  # tokens of the last block
        for group, tokens in enumerate(self.group_tokens):
            if held and held + tokens > BLOCK_TOKENS:
                starts.append(group)
                held = 0
            held += tokens
        for start, end in pairwise([*starts, len(self.problems)]):
            rows = slice(start * self.group_size, end * self.group_size)
            yield Batch(
                self.rollouts.take(torch.arange(rows.start, rows.stop)),
                self.rewards[rows],
                self.advantages[rows],
                self.group_size,
                self.problems[start:end],
                self.reasons[rows],
            )

    def groups(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Of each group the rows, states (G, T, d), mask (G, T) and right rollouts (G,) bool.

        States are 0 outside of the mask.
        """
        for number, states in enumerate(self.states.split(self.group_tokens)):  # (n, d) each
            group = slice(number * self.group_size, (number + 1) * self.group_size)
            mask = self.mask[group]
            yield group, to_padded(states, mask), mask, self.correct[group]

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
        """(B, T), what token advantages are multiples of A by."""
        return effective_weights(self.token_advantages, self.advantages, self.mask)

    @property
    def states(self) -> Tensor:
        """(N, d), the hidden states of a batch that keeps them."""
        assert self.hidden is not None  # the method's entry needs "states"
        return self.hidden

    @property
    def group_tokens(self) -> list[int]:
        """Response tokens of each group."""
        return self.lengths.view(-1, self.group_size).sum(1).tolist()

    def log(self, name: str, values: Tensor) -> None:
        """Log a metric, which is the mean over all its values.

        Values are, for example, of groups or of pairs of spans; the mean is over all blocks and
        ranks.
        """
        self.add(name, np.array([values.double().sum().item(), values.numel()]))

    def add(self, name: str, sums: np.ndarray) -> None:
        """Add to a metric the sum of further values, and their number."""
        self.stats[name] = self.stats.get(name, 0) + sums

    @property
    def metrics(self) -> dict[str, float]:
        """The means of what was logged."""
        return {name: total / count for name, (total, count) in sorted(self.stats.items())}

    @property
    def first_mixed(self) -> int | None:
        """The first group with right and wrong rollouts, if any."""
        rows = (self.advantages != 0).nonzero().flatten().tolist()
        return rows[0] // self.group_size if rows else None

    @property
    def correct(self) -> Tensor:
        """(B,) bool, the right rollouts."""
        return self.rewards > 0.5

    def problem_of(self, row: int) -> dict:
        """The problem of a rollout."""
        return self.problems[row // self.group_size]

    def true_errors(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """Where the first wrong step of each wrong rollout starts and ends, (B, 2) int64.

        It is -1 if it is not known, or if A is 0.
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
        """The first wrong step of a rollout, None if the task knows none."""
        if not task.first_error:
            return None
        tokens = tokens_of(tokenizer, self.rollouts, row)
        return task.first_error(
            self.problem_of(row), tokens if self.rollouts.truncated[row] else tokens[:-1]
        )
