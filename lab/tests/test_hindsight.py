"""Hindsight: rules whose teacher is the policy after a prompt that tells more."""

import math
from unittest.mock import Mock

import pytest
import torch
from builders.near import assert_near
from builders.runs import recipe_with
from crediting import Told, assign, context_of, weights_of, with_rewards
from torch.testing import assert_close

from lab.rules import hindsight


def log_probs_of(told: Told, start: list[int], ids: torch.Tensor, temperature=1.0) -> torch.Tensor:
    """log pi of each of `ids` after a prompt, float64, by a pass of its own."""
    logits = told.policy.model(torch.tensor([start + ids.tolist()])).logits[0].double()
    logits = logits[len(start) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


@pytest.fixture
def teacher(told, monkeypatch):
    """The teacher's log-ratios, which a test fills in; `hindsight.informed_log_ratio` is a Mock."""
    ratios = torch.full_like(told.log_probs, 0.1)
    asked = Mock(side_effect=lambda *inputs: ratios.clone())
    monkeypatch.setattr(hindsight, "informed_log_ratio", asked)
    return ratios


def test_rlsd_moves_with_the_teacher_within_its_bound(told, teacher):
    """A right and a wrong rollout have log-ratios of .1 and -9; lam falls with the steps.

    lam is .5 at step 0, .25 at step 25, and 0 from step 50 on.
    """
    teacher[:, 1::2] = -9
    ratios = torch.tensor([[math.exp(0.1), 0.8], [math.exp(-0.1), 1.2]])
    for step, share in ((0, 0.5), (25, 0.25), (50, 0), (70, 0)):
        assert_near(weights_of("rlsd", told, step=step)[:2, :2], 1 - share + share * ratios, 1e-5)
    assert hindsight.informed_log_ratio.call_count == 2  # without a share the teacher is not asked


def test_serl_moves_with_a_teacher_that_sees_a_peer(told, teacher):
    """It moves as `rlsd` does, but rollouts of a group without another right one keep A."""
    teacher[:, 1::2] = -900  # no overflow
    weights = weights_of("serl", with_rewards(told, [1.0, 0, 0, 0, 1, 1, 0, 0]), step=25)
    assert weights[0][told.mask[0]].unique().tolist() == [1]  # no other is right
    ratios = torch.tensor([[math.exp(-0.1), 1.2], [math.exp(0.1), 0.8]])
    assert_near(weights[[1, 4], :2], 0.75 + 0.25 * ratios, 1e-5)


def test_informed_log_ratio_is_that_of_the_same_response_after_another_prompt(told):
    """Prompts have other lengths, and the responses' ids are untouched."""
    problems = [
        {"problem": f"\\boxed{{{row}}}\n" + "a=1+2;a?\n" * (1 + row % 2)} for row in range(8)
    ]
    context = context_of(told, recipe_with(temperature=0.7, micro_tokens=100))
    ours = hindsight.informed_log_ratio(told, problems, context) + told.log_probs
    for row, problem in enumerate(problems):
        start = told.tokenizer(problem["problem"])["input_ids"]
        inside = told.mask[row]
        expected = log_probs_of(told, start, told.rollouts.ids[row][inside], temperature=0.7)
        assert_close(ours[row][inside], expected.float(), atol=1e-4, rtol=1e-4)


def test_sdpo_is_told_the_first_other_right_rollout(told, teacher):
    """Rollouts 0 and 3 are right; credit is a mix of A and the log-ratio."""
    delta = torch.linspace(-1, 1, told.log_probs.shape[1]).expand_as(told.log_probs)
    teacher[:] = delta
    ours = assign("sdpo", told, "mix=.25")
    assert_close(ours[:4], ((0.25 * told.A + 0.75 * delta) * told.mask)[:4])
    assert ours[4:].abs().max() == 0  # nobody to learn from
    first, second = (problem["problem"] for problem in told.problems)
    right = [told.rollouts.texts[row] + "\n" for row in (0, 3)]
    _, problems, _ = hindsight.informed_log_ratio.call_args.args
    prompts = [problem["problem"] for problem in problems]
    assert prompts == [right[1] + first] + [right[0] + first] * 3 + [second] * 4
