"""lab/studies/where.py: each measure of where credit lies, against written-out numbers."""

import math

import pandas as pd
import pytest
import torch

from lab.studies.where import first_wrong_token, localisation, weight_by_side
from tasks import toy


def test_localisation_against_written_out_numbers():
    """Two rollouts count beside one that does not; the AUCs have a tie."""
    weights = torch.tensor([[0.1, 0.2, 0.2, 0.9], [0.5, 0.4, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    expected = dict(
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


def test_localisation_against_a_loop_over_all_pairs():
    """Forty rollouts of other lengths, with ties; some do not count, some end within the step."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.randint(0, 9, (40, 12), generator=draw) / 7
    lengths = torch.randint(3, 13, (40, 1), generator=draw)
    mask = torch.arange(12) < lengths
    start = torch.randint(-1, 8, (40, 1), generator=draw)
    wrong = start + torch.randint(0, 3, (40, 1), generator=draw)
    wrong_step = torch.cat([start, wrong + 1, wrong], 1)
    wrong_step[start[:, 0] < 0] = -1
    tokens = []
    for row, at in mask.nonzero().tolist():
        begin, end, first_wrong = wrong_step[row].tolist()
        if begin < 0:
            continue
        if at < begin:
            part = "before"
        elif at < end:
            part = "step"
        else:
            part = "after"
        tokens.append((at, weights[row, at].item(), part, at >= first_wrong))
    table = pd.DataFrame(tokens, columns=["at", "weight", "part", "is_wrong"])
    pairs = table.merge(table, how="cross", suffixes=("", "_other"))
    pairs["won"] = (pairs.weight > pairs.weight_other) + 0.5 * (pairs.weight == pairs.weight_other)
    expected = dict(
        auc="part != 'before' and part_other == 'before'",
        auc_matched="part != 'before' and part_other == 'before' and at == at_other",
        auc_step_before="part == 'step' and part_other == 'before' and at == at_other",
        auc_step_after="part == 'step' and part_other == 'after' and at == at_other",
        auc_token="is_wrong and not is_wrong_other",
    )
    ours = localisation(weights, mask, wrong_step)
    for name, paired in expected.items():
        assert ours[name] == pytest.approx(pairs.query(paired).won.mean(), abs=1e-12), name


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
        ("=3+7=0", "=3+8=1", 20),
        ("=3+7=0", "=3-7=6", 19),
        ("a=3-6=3-6=7\n", "", 0),
        ("c=b*7=0*7=0", "c=b*7=0*7", 33),
        ("boxed{0}", "boxed{1}", 37),
        ("\\boxed{0}", "", 36),
        (RIGHT, "a=3-6=3-6=7\nb=3+a=3+7=1\nc=b*7=1*7=7\n\\boxed{7}", 22),
    ],
)
def test_the_first_wrong_token_differs_from_what_its_step_should_have_been(old, new, wrong):
    """Each row makes one change to a right response, or more after a mistake."""
    text = RIGHT.replace(old, new)
    error = toy.first_error(PROBLEM, text)
    assert old in RIGHT and first_wrong_token(PROBLEM, text, error.token, error.end) == wrong
