"""harness/report.py: the numbers of a step, which group is shown, and the lines that a user reads.

Run: pytest tests/test_report.py
"""

import pytest
import torch

from credit.methods import Batch
from grpo import Rollouts, Scored, group_advantages
from harness import report
from rewards import Verdict, grade_math
from tasks import toy
from tasks.problems import Task

RIGHT = "a=1+2=1+2=3\n\\boxed{3}"
WRONG = "a=1+2=1+2=4\n\\boxed{4}"


@pytest.fixture
def step():
    """Two groups of two: the first all wrong, the second mixed; all texts 16 tokens and the end."""
    tokenizer = toy.make_tokenizer()
    texts = [WRONG, WRONG, RIGHT, WRONG]
    ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts])
    mask = torch.ones_like(ids).bool()
    rewards = torch.tensor([0.0, 0, 1, 0])
    rollouts = Rollouts(ids, mask, ids, mask, torch.tensor([False, False, False, True]), texts)
    scored = Scored(torch.zeros(ids.shape), torch.full(ids.shape, 0.25), torch.zeros(*ids.shape, 2))
    batch = Batch(group_advantages(rewards, 2), rewards, rollouts, scored, 2, stats={"sinkhorn_error": 0.5})
    problems = [{"problem": "a=1+2;a?\n", "answer": "3"}] * 2
    task = Task("embedded", [], [], None, grade_math, first_error=toy.first_error)
    weights = torch.ones(ids.shape)
    weights[2], weights[3, :12], weights[3, 12:] = 0.5, 0.1, 0.9
    return tokenizer, task, problems, batch, weights


def test_step_metrics_are_those_of_the_batch(step):
    """Weights count where A is not 0; a problem is solved by one right rollout; a method's own numbers pass."""
    *_, batch, weights = step
    metrics = report.step_metrics(batch, weights * batch.advantages[:, None])
    assert metrics["reward"] == 0.25 and metrics["solved"] == 0.5 and metrics["equal_groups"] == 0.5
    assert metrics["length"] == 16 and metrics["truncated"] == 0.25 and metrics["entropy"] == 0.25
    mixed = weights[2:]
    assert metrics["weight_mean"] == pytest.approx(mixed.mean().item())
    assert metrics["weight_std"] == pytest.approx(mixed.std().item())
    assert 0.5 < metrics["ess"] < 1 and metrics["sign_changes"] == 0
    assert metrics["sinkhorn_error"] == 0.5


def test_samples_are_of_the_first_mixed_group(step):
    """With verdicts, the true first error, and one weight a token."""
    tokenizer, task, problems, batch, weights = step
    verdicts = [Verdict(0.0, "wrong")] * 2 + [Verdict(1.0, "correct"), Verdict(0.0, "wrong")]
    right, wrong = report.sample_rows(6, tokenizer, task, problems, batch, verdicts, weights)
    assert (right["response"], right["reason"], right["first_error"]) == (RIGHT, "correct", None)
    assert (wrong["response"], wrong["score"], wrong["first_error"]) == (WRONG, 0.0, (0, "arith", 12))
    assert wrong["step"] == 7 and "".join(wrong["tokens"]) == WRONG + "<eos>"
    assert wrong["weights"] == pytest.approx([0.1] * 12 + [0.9] * 4) and wrong["advantage"] < 0


def test_example_marks_the_line_of_the_first_error(step):
    """Mean weight of each line; a rollout whose error is its first token has no "before" and is not shown."""
    tokenizer, _, _, batch, weights = step
    lines = report.example(tokenizer, batch.rollouts, weights, torch.tensor([-1, 0, -1, 13]))
    assert lines == ["  0.10  a=1+2=1+2=4", "  0.90  \\boxed{4}<eos>  <- first error"]
    assert report.example(tokenizer, batch.rollouts, weights, torch.tensor([-1, 0, -1, -1])) == []


def test_the_step_line_holds_what_it_names(step):
    """One plain line, nothing rounded to something else."""
    *_, batch, weights = step
    updates = {"clip_share": 0.012, "abs_log_ratio": 3e-7, "grad_norm": 0.456, "loss": 0.0, "skipped": 1}
    metrics = {
        "step": 3,
        **report.step_metrics(batch, weights * batch.advantages[:, None]),
        **updates,
        "seconds": {"generate": 1.23},
    }
    line = report.step_line(metrics, 40)
    for part in (
        "step 3/40",
        "reward 0.250",
        "skipped 1",
        "equal 0.50",
        "clip 0.012",
        "logratio 3e-07",
        "gnorm 0.46",
        "generate 1.2",
    ):
        assert part in line
    assert "\n" not in line
