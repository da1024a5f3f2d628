"""Controls and `first`, against written-out numbers and slow loops."""

import math

import torch
from builders.rollouts import batch_of, rollouts_like
from crediting import Told, assign, weights_of
from torch.testing import assert_close

from credit.batch import Batch, effective_weights
from grpo import to_padded
from shear import shear_weights
from tasks import toy
from tasks.task import Task


def random_batch(rewards: list[list[float]], *, shared: int = 0) -> Batch:
    """Groups of 5 to 10 tokens of random probabilities, entropies and states.

    The rollouts of a group share the first `shared` states.
    """
    generator = torch.Generator().manual_seed(0)
    rewards = torch.tensor(rewards)  # (groups, G), NaN for no verdict and no token
    groups, size = rewards.shape
    # (B, T)
    mask = torch.arange(10) < torch.randint(5, 11, (groups * size, 1), generator=generator)
    mask &= ~rewards.view(-1, 1).isnan()
    log_probs = -6 * torch.rand(mask.shape, generator=generator)
    entropies = torch.rand(mask.shape, generator=generator)
    hidden = torch.rand(groups, size, 10, 6, generator=generator)
    hidden[:, :, :shared] = hidden[:, :1, :shared]
    parts = dict(log_probs=log_probs, entropies=entropies, hidden=hidden.flatten(0, 1)[mask])
    return batch_of(rewards.flatten(), rollouts_like(mask), size, **parts)


class NumberTokenizer:
    """A tokenizer whose tokens are numbers."""

    def decode(self, ids: list[int], **options: bool) -> str:
        return "".join(map(str, ids))


def test_rescaling_makes_the_mean_weight_of_each_group_one():
    """The mean is over the tokens of the group, and the weights' proportions stay."""
    batch = random_batch([[1, 0, 0, 1], [0, 0.5, 0.5, 1], [1, 1, 1, 1]])
    plain = assign("scaled", batch, "of=shear", "negative=.3")
    ours = assign("scaled", batch, "of=shear", "negative=.3", "mean1=yes")
    weights = effective_weights(plain, batch.advantages, batch.mask)
    weights[~batch.mask | (batch.A == 0)] = torch.nan  # a reward of .5 is the mean of its group
    for group in (slice(0, 4), slice(4, 8)):
        assert_close(ours[group], plain[group] / weights[group].nanmean())
    assert ours[8:].abs().max() == 0


def test_own_side_takes_the_closest_span_of_the_same_outcome_in_another_rollout():
    """Each rollout is weighed against its peers alone, by shear.py, with the group's nbar.

    Weight 1 is kept by the only right rollout of the second group. A third group without an
    opposing side, and a fourth, whose others have no verdict, get nothing.
    """
    batch = random_batch([[1.0, 0, 0, 1], [0, 0, 1, 0], [1] * 4, [1, 1, math.nan, math.nan]])
    ours = assign("own-side", batch, window=4, stride=2)
    hidden = to_padded(batch.hidden, batch.mask).double()
    for i in range(8):
        group = range(i - i % 4, i - i % 4 + 4)
        peers = [j for j in group if j != i and batch.correct[j] == batch.correct[i]]
        omega = batch.mask[i].double()
        if peers:
            rows = [i, *peers]
            first = torch.arange(len(rows)) == 0
            nbar = hidden[group][batch.mask[group]].norm(dim=-1).mean().item()
            weighed = shear_weights(
                hidden[rows],
                batch.mask[rows],
                first,
                window=4,
                stride=2,
                eps=0.05 * nbar,
                eps_unit="raw",
            )
            omega = weighed.omega[0] * weighed.nbar / nbar
        assert_close(ours[i], (batch.advantages[i] * omega).float(), atol=1e-4, rtol=1e-4)
    assert not ours[8:].any()


def test_the_oracle_can_keep_the_sum_of_a_rollout():
    """With `mass` 1 the n tokens of the wrong step have A T / n; wherever that is, the sum is T A.

    A step may end after the response; a rollout whose error is not known keeps A.
    """
    steps = [None, (0, 1), (3, 5), None, (2, 99), None]
    batch = random_batch([[1, 0, 0, 0, 0, 1]])

    def first_error(problem, tokens):
        place = steps[int(tokens[0])]
        return place and toy.FirstError(place[0], "copy", place[1])

    task = Task("embedded", [], [], None, None, first_error=first_error)
    batch = Told(**vars(batch), tokenizer=NumberTokenizer(), task=task)
    plain, ours = assign("oracle", batch), assign("oracle", batch, "mass=1")
    for row, place in enumerate(steps):
        length = int(batch.lengths[row])
        on_step = [t for t in range(length) if not place or place[0] <= t < place[1]]
        expected = torch.zeros(batch.mask.shape[1])
        expected[on_step] = batch.advantages[row]
        assert_close(plain[row], expected)
        assert_close(ours[row], expected * length / len(on_step))


def test_position_and_random_are_what_they_say(told):
    """Position is t / T of each rollout's own length; random has runs of equal draws in [0, 2]."""
    length = int(told.lengths[0])
    weights = weights_of("position", told)[0]
    assert_close(weights[:length], torch.arange(1, length + 1) / length)
    weights = weights_of("random", told)[0, :length]
    runs = weights.split(6)
    assert all(len(run.unique()) == 1 for run in runs) and len(weights.unique()) == len(runs)
    assert weights.min() >= 0 and weights.max() <= 2


def test_first_keeps_right_rollouts_and_the_onset_of_wrong_ones():
    """Three wrong rollouts leave the right one at different places, and keep A there.

    Spans are 6 tokens every 3; the onset is kept, and 3 tokens on each side. A group without a
    right rollout keeps all. The tokens of a span lie apart, so that its distance to itself has a
    floor in the reading "value".
    """
    hidden = torch.eye(26)[2:].repeat(8, 1, 1)  # (8, 24, 26), a direction of its own for each place
    hidden[:, :, 0] = 1
    for row, departure in ((1, 12), (2, 3), (3, 18)):
        hidden[row, departure:, :2] = torch.tensor([0.0, 1.0])
    mask = torch.arange(24) < torch.tensor([24, 24, 14, 24] + [24] * 4)[:, None]
    batch = batch_of(torch.tensor([1.0] + [0] * 7), rollouts_like(mask), 4, hidden=hidden[mask])
    batch.advantages[:] = -1.0
    ours = -assign("first", batch)
    assert [row.nonzero().flatten().tolist() for row in ours[:4]] == [
        list(range(24)),
        list(range(9, 18)),  # [9, 15) is the first far span, whose last 3 tokens are [12, 15)
        list(range(9)),  # the span [0, 6) is far: onset at 3
        list(range(15, 24)),  # [15, 21): onset at 18
    ]
    assert ours.unique().tolist() == [0, 1] and ours[4:].min() == 1
    assert assign("first", batch, "threshold=2.0")[1:4].abs().max() == 0
    moved = -assign("first", batch, "place=random")
    assert torch.equal(moved.sum(1), ours.sum(1))  # as many tokens, within the response
    assert not torch.equal(moved, ours)


def test_shuffle_keeps_each_rollout_s_weights_and_not_their_places():
    """The same numbers stand in another order, anew with every draw."""
    batch = random_batch([[1, 0, math.nan, 0, 1]], shared=3)
    shear = assign("shear", batch)
    torch.manual_seed(0)
    ours, again = (assign("shuffle", batch) for _ in range(2))
    assert not torch.equal(ours, shear) and not torch.equal(ours, again)
    assert torch.equal(ours.sort(1).values, shear.sort(1).values)
