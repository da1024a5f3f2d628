"""lab/studies/where.py: each measure of where credit lies, against written-out numbers."""

import math

import pytest
import torch

from lab.studies.where import first_wrong_token, localisation, weight_by_side
from tasks import toy


def test_localisation_against_written_out_numbers():
    """Every kind of AUC is that of two rollouts that count beside one that does not.

    The AUCs have a tie.
    """
    weights = torch.tensor([[0.1, 0.2, 0.2, 0.9], [0.5, 0.4, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    expected = dict(
        # after: .2 .9 | .4; before: .1 .2 | .5. Pairs won: (.2: 1.5 of 3), (.9: 3), (.4: 2); of 9
        auc=6.5 / 9,
        # positions after: 2, 3, 1; before: 0, 1, 0. Pairs won: 3, 3, 2.5; of 9
        auc_position=8.5 / 9,
        # the steps' tokens .2 | .4 against .1 .2 .9 .5: 1.5 and 2 of 4
        auc_step=3.5 / 8,
        weight_before=0.8 / 3,
        weight_after=1.5 / 3,
        rollouts=2,
    )
    ours = localisation(weights, mask, torch.tensor([[2, 3, 2], [1, 2, 1], [-1, -1, -1]]))
    assert {name: ours[name] for name in expected} == pytest.approx(expected)


def test_aucs_at_equal_position_and_from_the_wrong_token_against_written_out_numbers():
    """Three rollouts count; the first one's wrong step has two tokens, the second of them wrong."""
    weights = torch.tensor(
        [[0.3, 0.2, 0.5, 0.1], [0.3, 0.3, 0.6, 0.3], [0.1, 0.1, 0.5, 0.4], [9.0, 9.0, 9.0, 9.0]]
    )
    mask = torch.ones(4, 4).bool()
    expected = dict(
        # position 1: .3 against .2 .1; position 2: .5 .6 against .5
        auc_matched=(2 + 1.5) / 4,
        # position 1: .3 against .2 .1; position 2: .5 against .5
        auc_step_before=(2 + 0.5) / 3,
        # position 2: .5 against .6; position 3: .1 .4 against .3
        auc_step_after=(0 + 1) / 3,
        # .1 | .3 .6 .3 | .4 against .3 .2 .5 | .3 | .1 .1 .5
        auc_token=(1 + 4 + 7 + 4 + 5) / 35,
    )
    wrong_step = torch.tensor([[2, 4, 3], [1, 2, 1], [3, 4, 3], [-1, -1, -1]])
    ours = localisation(weights, mask, wrong_step)
    assert {name: ours[name] for name in expected} == pytest.approx(expected)
    alone = localisation(weights[:1], mask[:1], wrong_step[:1])
    assert alone["auc_matched"] is alone["auc_step_before"] is alone["auc_step_after"] is None


def test_localisation_against_a_loop_over_all_pairs():
    """Forty rollouts of other lengths, with ties; some do not count, some end within the step."""
    draw = torch.Generator().manual_seed(0)
    rows, length = 40, 12
    weights = torch.randint(0, 9, (rows, length), generator=draw) / 7
    lengths = torch.randint(3, length + 1, (rows, 1), generator=draw)
    mask = torch.arange(length) < lengths
    start = torch.randint(-1, 8, (rows, 1), generator=draw)
    wrong = start + torch.randint(0, 3, (rows, 1), generator=draw)
    wrong_step = torch.cat([start, wrong + 1, wrong], 1)
    wrong_step = torch.where(start < 0, -1, wrong_step)
    tokens = []  # (position, weight, start, end, wrong)
    for row in range(rows):
        for position in range(int(lengths[row])):
            if start[row] >= 0:
                place = wrong_step[row].tolist()
                tokens.append((position, weights[row, position].double().item(), *place))

    def share_won(is_high, is_low, matched):
        won = []
        for at, high, *place in tokens:
            for other_at, low, *other_place in tokens:
                paired = is_high(at, *place) and is_low(other_at, *other_place)
                if paired and (at == other_at or not matched):
                    won.append(0.5 * (high == low) + (high > low))
        return sum(won) / len(won)

    def before(at, start, end, wrong):
        return at < start

    def from_step(at, start, end, wrong):
        return at >= start

    def on_step(at, start, end, wrong):
        return start <= at < end

    def after(at, start, end, wrong):
        return at >= end

    ours = localisation(weights, mask, wrong_step)
    expected = dict(
        auc=share_won(from_step, before, matched=False),
        auc_matched=share_won(from_step, before, matched=True),
        auc_step_before=share_won(on_step, before, matched=True),
        auc_step_after=share_won(on_step, after, matched=True),
        auc_token=share_won(
            lambda at, start, end, wrong: at >= wrong,
            lambda at, start, end, wrong: at < wrong,
            matched=False,
        ),
    )
    assert {name: ours[name] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_position_has_no_advantage_at_equal_position():
    """A weight that only grows with position orders tokens well, and matched pairs not at all."""
    position = torch.arange(6.0).repeat(3, 1)
    wrong_step = torch.tensor([[1, 2, 1], [3, 4, 3], [4, 6, 5]])
    ours = localisation(position, torch.ones(3, 6).bool(), wrong_step)
    assert ours["auc"] == ours["auc_position"] > 0.8
    assert ours["auc_matched"] == ours["auc_step_before"] == ours["auc_step_after"] == 0.5


def test_localisation_without_anything_to_locate_is_none():
    """There is no number without a rollout that counts, or a token before the error."""
    weights = torch.rand(2, 3)
    mask = torch.ones(2, 3).bool()
    for place in ((-1, -1, -1), (0, 2, 1)):
        places = torch.tensor([place] * 2)
        assert localisation(weights, mask, places) is None
        assert math.isnan(weight_by_side(weights, mask, places[:, 0])["weight_before"])


PROBLEM = {"problem": "a=3-6;b=3+a;c=b*7;c?\n", "answer": "0"}
RIGHT = "a=3-6=3-6=7\nb=3+a=3+7=0\nc=b*7=0*7=0\n\\boxed{0}"


@pytest.mark.parametrize(
    "old, new, wrong",
    [
        ("=3-6=7", "=3-6=8", 10),
        ("=3+7=0", "=3+7=1", 22),
        ("=3+7=0", "=3+8=1", 20),
        ("=3+7=0", "=3-7=6", 19),
        ("b=3+a=", "b=4+a=", 14),
        ("c=b*7=0*7=0\n", "b=3+a=3+7=0\n", 24),
        ("a=3-6=3-6=7\n", "", 0),
        ("c=b*7=0*7=0", "c=b*7=0*7", 33),
        ("boxed{0}", "boxed{1}", 37),
        ("boxed{0}", "boxed{0}\n", 39),
        ("\\boxed{0}", "", 36),
        ("c=b*7=0*7=0\n", "c=4\n", 26),
        (RIGHT, "a=3-6=3-6=7\nb=3+a=3+7=1\nc=b*7=1*7=7\n\\boxed{7}", 22),
    ],
)
def test_the_first_wrong_token_differs_from_what_its_step_should_have_been(old, new, wrong):
    """Each row makes one change to a right response, or more after a mistake."""
    text = RIGHT.replace(old, new)
    error = toy.first_error(PROBLEM, text)
    assert old in RIGHT and first_wrong_token(PROBLEM, text, error.token, error.end) == wrong
