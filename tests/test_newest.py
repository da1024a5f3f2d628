"""The newest methods of credit/table.py, each against its formula, token by token, in float64."""

import math
import re
from dataclasses import replace

import pytest
import torch
from cases import drawn_batch, flags, made_batch, with_a_stop

from credit.batch import Batch, Source
from credit.methods import assign_credit, own_side_weights
from credit.shear_settings import Settings
from grpo import Policy, log_probs, spread
from harness.launch import parse_args
from harness.prepare import embedded_task
from shear import span_bounds
from sinkhorn import sinkhorn
from tasks import toy
from tasks.problems import BadInput, Task


def renamed(text: str, names: dict[str, str]) -> str:
    """The text with other labels."""
    return re.sub(r"\\boxed|[a-h]", lambda found: names.get(found[0], found[0]), text)


def tokens(batch: Batch):
    """(rollout, place) of every token."""
    return batch.rollouts.mask.nonzero().tolist()


@pytest.mark.parametrize("options", [{}, dict(alpha=0.2, strength=0.5)])
def test_taco(options):
    """1 - lambda (1 - exp(-r)), r = -log p - H + log alpha, where A > 0 and r > 0; else 1. The defaults: .01, .9."""
    batch = drawn_batch([[1.0, 0, 0], [1, 1, 1]])
    alpha, strength = options.get("alpha", 0.01), options.get("strength", 0.9)
    given = flags(method_option=[f"{name}={value}" for name, value in options.items()])
    ours, weights = assign_credit("taco", batch, given), []
    for i, t in tokens(batch):
        r = -batch.log_probs[i, t].item() - batch.entropies[i, t].item() + math.log(alpha)
        weights.append(1 - strength * (1 - math.exp(-r)) if batch.advantages[i] > 0 and r > 0 else 1)
        assert ours[i, t].item() == pytest.approx(batch.advantages[i].item() * weights[-1], rel=1e-5)
    assert min(weights) < 0.9 < max(weights) == 1


def test_own_side_takes_the_closest_span_of_the_same_outcome_in_another_rollout():
    """Every span against every span, one pair at a time; the only right rollout of the second group keeps weight 1."""
    batch, window, stride = drawn_batch([[1.0, 0, 0, 1], [0, 0, 1, 0]]), 4, 2
    ours = assign_credit("own-side", batch, flags(window=window, stride=stride, max_iters=2000, tol=1e-5))
    hidden = spread(batch.hidden, batch.rollouts.mask).double()
    for group in (range(4), range(4, 8)):
        rollouts = {i: hidden[i][batch.rollouts.mask[i]] for i in group}
        nbar = torch.cat(list(rollouts.values())).norm(dim=-1).mean()
        for i in group:
            omega = torch.zeros(len(rollouts[i])).double()
            peers = [j for j in group if j != i and batch.correct[j] == batch.correct[i]]
            for start, end in span_bounds(len(omega), window, stride):
                found = []
                for j in peers:
                    for first, last in span_bounds(len(rollouts[j]), window, stride):
                        costs = torch.cdist(rollouts[i][start:end], rollouts[j][first:last])
                        found.append(sinkhorn(costs, eps=0.05 * nbar.item(), max_iters=2000, tol=1e-5).value / nbar)
                nearest = min(found, default=torch.tensor(1.0))
                omega[start:end] = omega[start:end].clamp_min(nearest)
            expected = (batch.advantages[i] * omega).float()
            torch.testing.assert_close(ours[i, : len(omega)], expected, atol=1e-4, rtol=1e-4)
            assert bool((omega == 1).all()) == (not peers)


def test_own_side_without_an_opposing_side_weighs_nothing():
    """As SHEAR does, and as where a rollout has no verdict."""
    batch = drawn_batch([[1.0, 1, 1]])
    mask = batch.rollouts.mask
    hidden, settings = spread(batch.hidden, mask), Settings(window=4, stride=2)
    assert torch.equal(own_side_weights(hidden, mask, batch.correct, settings), mask.float())
    mask[2] = False
    mixed = own_side_weights(hidden, mask, torch.tensor([1, 0, 0]), settings)
    assert torch.equal(mixed, mask.float())


@pytest.mark.parametrize("prefix", [0.0, 0.5])
def test_cliff(prefix):
    """One token at a time: two of five right, one without a verdict, one wrong whose error is not known (it keeps A).

    A group of equal verdicts gets nothing. The mean over the tokens of the first group is 0.
    """
    errors = {"a": 3, "b": 0, "?": None}
    texts = ["right", "a", "?", "b", "right", "none", *["a"] * 6]
    batch = drawn_batch([[1, 0, 0, 0, 1, math.nan], [0] * 6])
    batch.rollouts.texts[:] = texts

    def first_error(problem, text):
        return None if errors[text] is None else toy.FirstError(errors[text], "copy", errors[text] + 1)

    task = Task("embedded", [], [], None, None, first_error=first_error)
    batch = replace(batch, source=Source(None, None, task, 0))
    ours = assign_credit("cliff", batch, flags(method_option=[f"prefix={prefix}"]))
    mu, credit = 2 / 5, {}
    for i, t in tokens(batch):
        if i < 6 and texts[i] == "right":
            credit[i, t] = (1 - mu) / math.sqrt(mu * (1 - mu))
        elif i < 6 and texts[i] != "?":
            early = t < errors[texts[i]]
            credit[i, t] = prefix * credit[0, 0] if early else -mu / math.sqrt(mu * (1 - mu))
    kept = {(i, t): batch.advantages[i].item() for i, t in tokens(batch) if texts[i] == "?"}
    shift = (sum(credit.values()) + sum(kept.values())) / len(credit)
    expected = torch.zeros(ours.shape)
    for (i, t), value in credit.items():
        expected[i, t] = value - shift
    for (i, t), value in kept.items():
        expected[i, t] = value
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    assert abs(ours[:6].sum()) < 1e-4 and kept and ours[6:].abs().max() == 0


def test_scapo(tiny):
    """d and both z-scores in float64, each p_k from a pass of its own over renamed symbols."""
    model, tokenizer = tiny
    policy, task = Policy(model), embedded_task(parse_args(["--toy-lines", "3"]), tokenizer)
    problems, rng = task.train[:2], toy.random.Random(1)
    texts = [toy.demonstrate(problem, rng) for problem in problems for _ in range(2)]
    rollouts = with_a_stop(tokenizer, [problem["problem"] for problem in problems for _ in range(2)], texts)
    scored = log_probs(policy, rollouts, temperature=1.0, micro_tokens=300)._asdict()
    source = Source(policy, tokenizer, task, 0)
    batch = made_batch(torch.tensor([1.0, 0, 0, 0]), rollouts, 2, problems=problems, source=source, **scored)
    ours = assign_credit("scapo", batch, flags(method_option=["strength=0.5", "phrasings=3"]))

    def chances(problem: str, response: str) -> torch.Tensor:
        """p of each symbol of the response and of its end."""
        start, ids = tokenizer(problem)["input_ids"], [*tokenizer(response)["input_ids"], tokenizer.eos_token_id]
        logits = model(torch.tensor([start + ids])).logits[0, len(start) - 1 : -1].double()
        return logits.softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]

    def zscore(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        values = torch.cat(rows)
        return [(row - values.mean()) / values.std(correction=0) for row in rows]

    for group, problem in enumerate(problems):
        answers, scores = texts[2 * group : 2 * group + 2], [0, 0]
        for k in range(3):
            other, names = toy.rephrase(problem, k)
            rows = []
            for text in answers:
                p, p_k = chances(problem["problem"], text), chances(other["problem"], renamed(text, names))
                rows.append(-2 * (p - p_k).abs() / (p + p_k))
            scores = [score + row for score, row in zip(scores, zscore(rows), strict=True)]
        for row, u in enumerate(zscore(scores), 2 * group):
            expected = batch.advantages[row] + 0.5 * u.clamp_max(0).float()
            torch.testing.assert_close(ours[row, : len(u)], expected, atol=1e-3, rtol=1e-3)
            assert expected.min() < batch.advantages[row] - 0.1


def test_the_embedded_task_rephrases_by_renaming():
    """Four ways for five labels; what was right before is right under the new names, with the same answer."""
    problem = toy.make_problem(toy.random.Random(3), 5)
    ways = [toy.rephrase(problem, k) for k in range(4)]
    assert len({problem["problem"], *[other["problem"] for other, _ in ways]}) == 5
    response = toy.demonstrate(problem, toy.random.Random(0), careless=False)
    for other, names in ways:
        assert toy.first_error(other, renamed(response, names)) is None and other["answer"] == problem["answer"]


def test_a_task_that_does_not_rephrase_refuses_scapo():
    """Before anything is loaded."""
    with pytest.raises(BadInput, match="--method scapo needs its problems in other words"):
        parse_args("--task math --data x.jsonl --model M --method scapo".split())
