"""What a credit method sees: a batch of rollouts with verdicts and scores, and where it may run passes of its own.

`Batch.split` makes blocks of whole groups, as the hidden states of all rollouts would not fit: at 4,096 rollouts of
3,000 tokens those of a 7B model are 88 GB. Only (B, T) tensors leave a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from credit.prm import RewardModel
from grpo import Policy, Rollouts, Scored, spread
from tasks.problems import Task

BLOCK_TOKENS = 2**15  # of responses, whose states exist together: 235 MB at 3,584 bfloat16s


@dataclass(frozen=True)
class Source:
    """What a method needs for passes of its own. It stays on its rank."""

    policy: Policy  # that sampled, its weights whole
    tokenizer: object
    task: Task
    problems: list[dict]  # one a group
    step: int  # steps done
    prm: RewardModel | None = None


@dataclass(frozen=True)
class Batch:
    """Everything a method may look at; rollouts of a group are adjacent."""

    advantages: Tensor  # (B,) float32, Eq. (1)
    rewards: Tensor  # (B,) float32, NaN where there is no verdict
    rollouts: Rollouts  # ids, mask (B, T); the mask is empty where there is no verdict
    scored: Scored | None  # logp, entropies (B, T), hidden (N, d) of a block; None before it is scored
    group_size: int
    source: Source | None = None
    logged: dict[str, tuple[float, int]] = field(default_factory=dict)  # name -> sum, count of what it is a mean of
    closest: list = field(default_factory=list)  # `shear_settings.closest_of` the first mixed group; filled for samples

    @classmethod
    def cat(cls, batches: Sequence["Batch"]) -> "Batch":
        """Several blocks, or ranks, as one, without `source`."""
        logged = {}
        for batch in batches:
            for name, (total, count) in batch.logged.items():
                sums = logged.get(name, (0.0, 0))
                logged[name] = sums[0] + total, sums[1] + count
        return cls(
            torch.cat([batch.advantages for batch in batches]),
            torch.cat([batch.rewards for batch in batches]),
            Rollouts.cat([batch.rollouts for batch in batches]),
            Scored.cat([batch.scored for batch in batches]),
            batches[0].group_size,
            logged=dict(sorted(logged.items())),
            closest=next((batch.closest for batch in batches if batch.closest), []),
        )

    def split(self) -> Iterator["Batch"]:
        """Blocks of whole groups: as many together as have BLOCK_TOKENS tokens at most, one at least."""
        starts, held = [0], 0  # the first group of each block; tokens of the last block
        for group, tokens in enumerate(self.group_tokens):
            if held and held + tokens > BLOCK_TOKENS:
                starts.append(group)
                held = 0
            held += tokens
        for start, end in pairwise([*starts, len(self.source.problems)]):
            rows = torch.arange(start * self.group_size, end * self.group_size)
            yield replace(
                self,
                advantages=self.advantages[rows],
                rewards=self.rewards[rows],
                rollouts=self.rollouts.take(rows),
                source=replace(self.source, problems=self.source.problems[start:end]),
                logged={},
            )

    def log(self, name: str, values: Tensor) -> None:
        """Log a metric, of which `stats` has the mean over all values: of groups, or of pairs, of all ranks."""
        self.logged[name] = values.double().sum().item(), values.numel()

    @property
    def stats(self) -> dict[str, float]:
        """What was logged, as means."""
        return {name: total / count for name, (total, count) in self.logged.items()}

    def groups(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows of each group, and its hidden states (G, T, d), 0 outside of the mask."""
        for number, states in enumerate(self.scored.hidden.split(self.group_tokens)):  # (n, d), n tokens of a group
            group = slice(number * self.group_size, (number + 1) * self.group_size)
            yield group, spread(states, self.rollouts.mask[group])

    @property
    def group_tokens(self) -> list[int]:
        """Response tokens of each group."""
        return self.rollouts.mask.sum(1).view(-1, self.group_size).sum(1).tolist()

    def without_states(self) -> "Batch":
        """What can be kept and sent: without states, and without what stays on its rank."""
        return replace(self, source=None, scored=replace(self.scored, hidden=None))

    @property
    def mixed(self) -> int | None:
        """The first group with right and wrong rollouts, if any."""
        rows = (self.advantages != 0).nonzero().flatten().tolist()
        return rows[0] // self.group_size if rows else None

    @property
    def correct(self) -> Tensor:
        """(B,) bool, the right rollouts."""
        return self.rewards > 0.5

    @property
    def problems(self) -> list[dict]:
        """The problem of each rollout."""
        return [self.source.problems[row // self.group_size] for row in range(len(self.advantages))]
