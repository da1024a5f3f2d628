"""credit/: what holds for every method, and the formula of each.

A method is compared with its formula token by token, or with written-out numbers.
"""

import functools
import math
from dataclasses import dataclass, replace
from unittest.mock import Mock

import pytest
import torch
from builders.near import assert_near
from builders.rollouts import batch_of, pad_more, random_batch, rollouts_like, rollouts_of
from builders.runs import config_from, recipe_with
from builders.small_models import NumberTokenizer, add_adapter
from credit.table import METHODS, Need, methods_needing
from torch.testing import assert_close

from credit.batch import Batch, Context, effective_weights
from credit.rules import assign_credit
from grpo import Policy, group_advantages, score, to_padded
from harness.config import TrainConfig
from harness.load import make_task
from harness.run import make_context
from lab.rules import hindsight
from lab.tools import lora, salience
from lab.tools.salience import Answer, outcome_weights
from shear import closest_spans, shear_weights
from tasks import toy
from tasks.problems import Task


@dataclass
class Told(Batch):
    """A batch, and what its methods may use besides."""

    policy: Policy | None = None
    tokenizer: object | None = None
    task: Task | None = None


def as_told(batch: Batch, **known) -> Told:
    """The batch with what is known besides."""
    return Told(**vars(batch) | known)


def context_of(batch: Batch, config: TrainConfig, step: int = 3) -> Context:
    """What is known besides the batch, `step` steps done."""
    told = as_told(batch)
    context = make_context(config, told.policy, told.tokenizer, told.task, prm=())
    return replace(context, step=step)


def assign(method: str, batch: Batch, *options: str, step: int = 3, **changes) -> torch.Tensor:
    """Token advantages by a method with these options, and other settings but the recipe's."""
    changes = dict(window=6, stride=3, method=method, method_option=options) | changes
    config = recipe_with(**changes)
    return assign_credit(batch, context_of(batch, config, step), config.credit)


def weights_of(method: str, batch: Batch, **changes) -> torch.Tensor:
    """(B, T), what the method multiplies advantages by."""
    return effective_weights(assign(method, batch, **changes), batch.advantages, batch.mask)


def pair(entropies: list[float]) -> Batch:
    """A right and a wrong rollout of equal tokens."""
    values = torch.tensor([entropies] * 2)  # (2, T)
    rollouts = rollouts_like(torch.ones_like(values).bool())
    return batch_of(torch.tensor([1.0, 0]), rollouts, 2, entropies=values)


def with_rewards(batch: Batch, rewards: list[float]) -> Batch:
    """The batch with other verdicts, NaN for none."""
    rewards = torch.tensor(rewards)
    rollouts = replace(batch.rollouts, mask=batch.mask & ~rewards.isnan()[:, None])
    hidden = to_padded(batch.hidden, batch.mask)[rollouts.mask]
    advantages = group_advantages(rewards, batch.group_size)
    return replace(batch, rewards=rewards, advantages=advantages, rollouts=rollouts, hidden=hidden)


@pytest.fixture
def told(scored_once) -> Told:
    """The batch, of which nothing is logged yet."""
    return replace(scored_once, stats={})


@pytest.fixture(scope="module")
def scored_once() -> Told:
    """With a process reward model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods.reward_model, "score_steps", score_lines)
        yield worked_responses()


def worked_responses() -> Told:
    """Two groups of four worked responses, scored by a tiny model with a trained adapter.

    Problems have two lines. All responses of the second group are wrong.
    """
    model = toy.make_model(2, seed=1).eval()
    tokenizer = toy.make_tokenizer()
    torch.manual_seed(0)
    add_adapter(model, std=0.1)
    words = "--toy-lines 2 --heldout 8 --eval-groups 8".split()
    _, task, _ = make_task(config_from(words), tokenizer, 512)
    problems = task.train[:2]
    asked = [problems[0]] * 4 + [problems[1]] * 4
    rng = toy.random.Random(1)
    texts = [toy.demonstrate(problem, rng) for problem in asked]
    texts[6] = texts[6][:9]  # without a box
    rollouts = rollouts_of(tokenizer, [problem["problem"] for problem in asked], texts)
    policy = Policy(model)
    scored = score(policy, rollouts, temperature=1.0, micro_tokens=300)._asdict()
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])
    batch = batch_of(rewards, rollouts, 4, problems=problems, **scored)
    return as_told(batch, policy=policy, tokenizer=tokenizer, task=task)


def score_lines(prm, questions, rollouts, tokenizer=None, step_end="\n", micro_tokens=0):
    """A process reward model that likes long texts and early lines."""
    scores = []
    for row, text in enumerate(rollouts.texts):
        count = text.count(step_end)
        step = [text[:t].count(step_end) for t in range(int(rollouts.mask[row].sum()))]
        good = 1 / torch.arange(2, count + 3) + len(text) / 1000
        scores.append((good, torch.tensor(step).long()))
    return scores


def wider(batch: Batch, by: int) -> Batch:
    """The same batch with more padding on both sides, which holds garbage."""
    values = torch.stack([batch.log_probs, batch.entropies])
    log_probs, entropies = torch.nn.functional.pad(values, (0, by), value=3)
    rollouts = pad_more(batch.rollouts, by, by)
    return replace(batch, rollouts=rollouts, log_probs=log_probs, entropies=entropies)


def reordered(batch: Batch, order: list[int]) -> Batch:
    """Other groups first, other rollouts first within them."""
    rows = torch.tensor(order)
    return replace(
        batch,
        rollouts=batch.rollouts.take(rows),
        rewards=batch.rewards[rows],
        advantages=batch.advantages[rows],
        problems=[batch.problem_of(row) for row in order[:: batch.group_size]],
        log_probs=batch.log_probs[rows],
        entropies=batch.entropies[rows],
        hidden=to_padded(batch.hidden, batch.mask)[rows][batch.mask[rows]],
    )


# ---- every method --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_finite_token_advantages_that_padding_and_order_leave_alone(
    method, told
):
    """Token advantages are (B, T), without gradient, and 0 outside of the mask.

    Without contrast there are none, except from `pure`, whose scores differ.
    """
    torch.manual_seed(5)
    ours = assign(method, told)
    assert ours.shape == told.mask.shape and not ours.requires_grad
    assert ours.isfinite().all() and ours[:4].abs().max() > 0
    assert ours[~told.mask].abs().max() == 0
    assert (ours[4:].abs().max() == 0) == (method != "pure")
    # if it weighs, tokens of right rollouts are never punished, of wrong ones never rewarded
    assert (ours * told.A >= 0).all() or not METHODS[method].weighs
    wide = wider(told, 3)  # filled with garbage
    torch.manual_seed(5)
    padded = assign(method, wide)
    assert_close(padded[:, :-3], ours, atol=2e-5, rtol=1e-4)
    assert padded[:, -3:].abs().max() == 0
    # draws and peers follow the order
    if method not in {"random", "shuffle"} | methods_needing(Need.PEER):
        order = [6, 5, 4, 7, 3, 0, 1, 2]
        exchanged = assign(method, reordered(told, order))
        # the gradient of a KL of 1e-7 nats has four digits in float32
        assert_close(exchanged, ours[order], atol=1e-3 if method == "oar-g" else 2e-5, rtol=1e-4)
    alone = with_rewards(told, [1] + [math.nan] * 7)
    # no NaN, and no division by the deviation of a single rollout
    for rescale in ("none", "mean1"):
        assert assign(method, alone, rescale=rescale).abs().max() == 0


# Of the whole batch; oar-p's are of the mixed group's rollouts: as it is, and all masked versions.
PASSES = {
    "oar-g": 2 * 4,
    "oar-p": 2 * 4,
    "dgpo": 2,
}
PASSES |= dict.fromkeys(["rlsd", "serl", "sdpo", "arca"], 1)
PASSES |= dict.fromkeys(["opo", "otb", "opo-shear", "otb-shear"], 1)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_pays_for_its_own_passes_and_leaves_gradients_alone(method, told):
    """Forward passes are counted in tokens; every parameter and its `.grad` stay as they were."""
    model = told.policy.model
    parameters = list(model.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    trainable = [parameter.requires_grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    seen = []

    def count(module, inputs, kwargs):
        given = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        seen.append(given.shape[0] * given.shape[1])

    hook = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    assign(method, told, micro_tokens=100_000)
    assert len(seen) == PASSES.get(method, 0)
    seen.clear()
    assign(method, told, micro_tokens=90)
    hook.remove()
    assert all(tokens <= 90 for tokens in seen)
    assert all((parameter.grad == 1).all() for parameter in parameters)
    assert all(map(torch.equal, parameters, before))
    assert trainable == [parameter.requires_grad for parameter in parameters]


@pytest.mark.parametrize("method", ["shear", "hapo", "prm", "rlsd", "oracle"])
def test_credit_of_blocks_is_credit_of_the_batch(method, told):
    """Whole groups with their own problems, verdicts and text need nothing of other groups."""
    whole = assign(method, told)
    blocks = []
    for number, block in enumerate(told.blocks(most=1)):
        block = replace(told, **vars(block))
        scored = score(told.policy, block.rollouts, temperature=1.0, micro_tokens=300)
        block.log_probs, block.entropies, block.hidden = scored
        block.token_advantages = assign(method, block)
        assert block.problems == [told.problems[number]]
        assert block.rollouts.texts == told.rollouts.texts[4 * number : 4 * number + 4]
        blocks.append(block)
    batch = Batch.cat(blocks)
    assert number == 1 and batch.hidden is None
    assert_close(batch.token_advantages, whole, atol=2e-5, rtol=1e-4)
    assert_near(batch.log_probs, told.log_probs, 1e-5)
    assert_near(batch.entropies, told.entropies, 1e-5)
    assert batch.metrics == pytest.approx(told.metrics, rel=1e-4)
    assert len(batch.metrics) == 4 * (method == "shear")


def test_a_metric_is_the_mean_over_all_that_it_is_of(told):
    """Three values of two blocks or ranks have one mean, not the mean of two means.

    Spans are those of the first group, which is shown.
    """
    told.token_advantages = told.log_probs
    one = replace(told, stats={})
    other = replace(told, stats={})
    one.log("iterations", torch.tensor([1.0, 2.0]))
    other.log("iterations", torch.tensor([6.0]))
    one.closest = "of the first block"
    other.closest = "of the second"
    whole = Batch.cat([one, other])
    assert whole.metrics == {"iterations": 3.0} and whole.closest == "of the first block"


# ---- the door ------------------------------------------------------------------------------------


def test_rescaling_makes_the_mean_weight_of_each_group_one():
    """The mean is over the tokens of the group, and the weights' proportions stay."""
    batch = random_batch([[1, 0, 0, 1], [0, 0.5, 0.5, 1], [1, 1, 1, 1]])
    plain = assign("shear", batch, negative_scale=0.3)
    ours = assign("shear", batch, negative_scale=0.3, rescale="mean1")
    weights = effective_weights(plain, batch.advantages, batch.mask)
    signal = batch.mask & (batch.A != 0)  # a reward of .5 is the mean of its group
    for group in (slice(0, 4), slice(4, 8)):
        assert_close(ours[group], plain[group] / weights[group][signal[group]].mean())
    assert ours[8:].abs().max() == 0


# ---- formulas ------------------------------------------------------------------------------------


def squared_norms(told: Told) -> torch.Tensor:
    """(B, T) of the gradients of log pi in the logits, by autograd in float64."""
    norms = torch.zeros(told.mask.shape, dtype=torch.float64)
    for row, rollouts in enumerate(told.rollouts.take(torch.tensor([n])) for n in range(8)):
        prompt = rollouts.prompt_ids[rollouts.prompt_mask]
        response = rollouts.ids[rollouts.mask]
        with torch.no_grad():
            logits = told.policy.model(torch.cat([prompt, response])[None]).logits[0].double()
        logits = logits[len(prompt) - 1 : -1].requires_grad_()  # (T, V)
        chosen = logits.log_softmax(-1).gather(1, response[:, None])
        (gradient,) = torch.autograd.grad(chosen.sum(), logits)
        norms[row, : len(response)] = gradient.square().sum(-1)
    return norms


def test_baselines_are_means_weighted_by_the_squared_norms_of_gradients(told):
    """A rollout that has ended keeps its norm; SHEAR's weights multiply what is above them."""
    norms = squared_norms(told)
    omega = weights_of("shear", told)
    for method, per_token in (("opo", False), ("otb", True)):
        expected = torch.zeros_like(norms)
        for row, t in told.mask.nonzero().tolist():
            members = range(row // 4 * 4, row // 4 * 4 + 4)
            weights = [norms[n, : t + 1 if per_token else None].sum() for n in members]
            rewards = [told.rewards[n].item() for n in members]
            baseline = sum(w * r for w, r in zip(weights, rewards, strict=True)) / sum(weights)
            expected[row, t] = told.rewards[row] - baseline
        assert_near(assign(method, told), expected.float(), 1e-4)
        assert_near(assign(f"{method}-shear", told), omega * expected.float(), 1e-4)


def test_entropy_adds_at_most_half_the_advantage():
    """Token advantages are A + min(.4 H, |A| / 2), so penalties shrink.

    A is +-.5 (but for the delta of 1e-6), so 1.25 |A| nats reach the bound.
    """
    batch = pair([0.0, 0.1, 2.0])
    expected = [[a, a + 0.04, a + abs(a) / 2] for a in batch.advantages.tolist()]
    assert_close(assign("entropy", batch), torch.tensor(expected))


def test_hapo_stays_within_its_bound_and_knows_the_group():
    """Standardised entropies are clipped at |A| / 2, then multiplied by .2.

    The entropies 0 0 1 | 1 of one group have mean .5 and deviation .5: z = -1, -1, 1 | 1.
    """
    batch = pair([0.0, 0, 1])
    batch.entropies = torch.tensor([[0.0, 0, 1], [1.0, 99, 99]])
    batch.rollouts.mask[1, 1:] = False
    right, wrong = batch.advantages.tolist()
    bend = 0.2 * right / 2
    expected = [[right - bend, right - bend, right + bend], [wrong - bend, 0, 0]]
    assert_close(assign("hapo", batch), torch.tensor(expected))
    mild = assign("hapo", replace(batch, advantages=10 * batch.advantages), "alpha=1")
    assert_close(mild[0], 10 * right + torch.tensor([-1.0, -1, 1]))
    batch.entropies = torch.full((2, 3), 0.3)  # no deviation, no bend, no NaN
    assert_near(assign("hapo", batch), assign("grpo", batch), 1e-4)


def test_own_side_takes_the_closest_span_of_the_same_outcome_in_another_rollout():
    """Each rollout is weighed against its peers alone, by shear.py, with the group's nbar.

    Weight 1 is kept by the only right rollout of the second group. A third group without an
    opposing side, and a fourth, whose others have no verdict, get nothing.
    """
    batch = random_batch([[1.0, 0, 0, 1], [0, 0, 1, 0], [1] * 4, [1, 1, math.nan, math.nan]])
    ours = assign("own-side", batch, window=4, stride=2, max_iters=2000, tol=1e-5)
    closest = functools.partial(closest_spans, max_iters=2000, tol=1e-5)
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
                closest=closest,
            )
            omega = weighed.omega[0] * weighed.nbar / nbar
        assert_close(ours[i], (batch.advantages[i] * omega).float(), atol=1e-4, rtol=1e-4)
    assert not ours[8:].any()


@pytest.mark.parametrize("prefix", [0.0, 0.5])
def test_cliff(prefix):
    """Advantages are the written-out numbers, whose mean over a group's tokens is 0.

    In the first, two of five are right, one has no verdict, and one is wrong with an unknown error:
    it keeps A. A second group has another share of right ones and a b of its own; one of equal
    verdicts gets nothing.
    """
    errors = {"right": 99, "a": 3, "b": 0, "?": None}
    texts = ["right", "a", "?", "b", "right", "b", "b", *["right"] * 4, *["a"] * 7]
    batch = random_batch([[1, 0, 0, 0, 1, math.nan], [0, 1, 1, 1, 1, 0], [0] * 6])

    def first_error(problem, tokens):
        place = errors[texts[int(tokens[0])]]
        return None if place is None else toy.FirstError(place, "copy", place + 1, place)

    task = Task("embedded", [], [], None, None, first_error=first_error)
    batch = as_told(batch, tokenizer=NumberTokenizer(), task=task)
    ours = assign("cliff", batch, f"prefix={prefix}")
    expected = batch.A * batch.mask
    for group, mu in ((range(6), 2 / 5), (range(6, 12), 4 / 6)):
        sigma = math.sqrt(mu * (1 - mu))
        moved = [i for i in group if texts[i] != "?"]
        for i in moved:
            share = 1 if texts[i] == "right" else prefix
            before = torch.arange(10) < errors[texts[i]]
            expected[i] = torch.where(before, share * (1 - mu), -mu) / sigma * batch.mask[i]
        shift = expected[group].sum() / batch.mask[moved].sum()
        expected[moved] -= shift * batch.mask[moved]
        assert abs(ours[group].sum()) < 1e-4
    assert_close(ours, expected, atol=1e-6, rtol=1e-5)


def log_probs_of(told: Told, start: list[int], ids: torch.Tensor, temperature=1.0) -> torch.Tensor:
    """log pi of each of `ids` after a prompt, float64, by a pass of its own."""
    logits = told.policy.model(torch.tensor([start + ids.tolist()])).logits[0].double()
    logits = logits[len(start) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


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
    rewards = torch.tensor([1.0] + [0] * 7)
    batch = batch_of(rewards, rollouts_like(mask), 4, hidden=hidden[mask])
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
    starts = set()
    for seed in range(8):
        torch.manual_seed(seed)
        moved = -assign("first", batch, "place=random")
        assert torch.equal(moved.sum(1), ours.sum(1))  # as many tokens, within the response
        assert all(row.diff().count_nonzero() <= 2 for row in moved[1:4])  # side by side
        starts.add(int(moved[1].nonzero()[0]))
    assert len(starts) > 2


def test_outcome_weights_against_written_out_numbers():
    """Importances have log1p 0, 1, 2, 4, so that n = 0, .25, .5, 1.

    theta, the quarter quantile, is .1875; beta is 1.
    """
    importance = torch.tensor([[0, 1, 2, 4, 9, 0.0], [0.7] * 6, [0.7] * 6]).expm1()
    mask = torch.arange(6) < torch.tensor([6, 5, 6])[:, None]
    ours = outcome_weights(importance, {0: Answer(4, 4, 5), 1: Answer(3, 3, 4)}, mask, 0.25, 1.0)
    raw = torch.tensor([0.1, 1 + 0.0625 / 0.8125, 1 + 0.3125 / 0.8125, 2])
    assert_close(ours[0], torch.cat([raw * 4 / raw.sum(), torch.ones(2)]))
    assert_close(ours[1:], mask[1:].float())  # flat importance, and no answer


def test_arca_is_uniform_without_an_adapter_and_follows_it_with_one(told):
    """T w_t has mean 1 in each rollout, in proportion to how far the adapter moves a state."""
    context = context_of(told, recipe_with())
    change = salience.adapter_residual(told.rollouts, context, told.states)
    assert change[told.mask].std() > 0.05 * change[told.mask].mean()
    expected = change * told.lengths / change.sum(1, keepdim=True)
    assert_close(weights_of("arca", told)[:4], expected[:4], atol=1e-4, rtol=1e-4)
    with lora.off(told.policy.model):
        unmoved = replace(told, hidden=context.score(told.rollouts).hidden)
    assert_close(assign("arca", unmoved), assign("grpo", told))


@pytest.mark.parametrize(("tau", "kappa"), [(0.5, 1.0), (0.02, 0.5), (0.1, 0.0)])
def test_dgpo_against_a_loop_by_its_formula(told, tau, kappa):
    """Token by token: whole distributions, the start's by a model without an adapter, and a softmax.

    All of it is in float64. The sum of a rollout is T A, and at kappa 0 entropies do not count.
    """
    start = toy.make_model(2, seed=1).eval()  # as `worked_responses` adapted it
    options = [f"tau={tau}", f"kappa={kappa}"] if tau != 0.5 else []
    ours = assign("dgpo", told, *options, temperature=0.7, micro_tokens=100)
    for row, inside in enumerate(told.mask):
        prompt = told.rollouts.prompt_ids[row][told.rollouts.prompt_mask[row]].tolist()
        ids = told.rollouts.ids[row][inside].tolist()
        scores = []
        for t in range(len(ids)):
            given = torch.tensor([prompt + ids[:t]])
            p, q = (
                (model(given).logits[0, -1].double() / 0.7).softmax(0).tolist()
                for model in (told.policy.model, start)
            )
            distance = 1 - sum(math.sqrt(one * other) for one, other in zip(p, q, strict=True))
            entropy = told.entropies[row, t].item() / math.log(len(p))
            scores.append(distance * entropy**kappa)
        total = sum(math.exp(score / tau) for score in scores)
        weights = [len(ids) * math.exp(score / tau) / total for score in scores]
        expected = told.advantages[row] * torch.tensor(weights)
        assert_close(ours[row][inside], expected, atol=1e-5, rtol=1e-4)
        assert max(weights) - min(weights) > 0.005  # at the default tau, near GRPO
    if not kappa:
        other = replace(told, entropies=0 * told.entropies)
        assert torch.equal(assign("dgpo", other, *options, temperature=0.7, micro_tokens=100), ours)


def test_dgpo_is_grpo_at_the_start_and_at_a_high_temperature(told):
    """A fresh adapter moves nothing; a large tau makes all weights 1."""
    uniform = assign("grpo", told)
    assert (assign("dgpo", told, "tau=.02") - uniform).abs().max() > 0.01
    assert_near(assign("dgpo", told, "tau=1e6"), uniform, 1e-5)
    fresh = toy.make_model(2, seed=1).eval()
    lora.add(fresh, seed=0, rank=2)
    assert_near(assign("dgpo", replace(told, policy=Policy(fresh))), uniform, 1e-6)


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


def test_prm_fills_scores_backward_and_turns_them_for_wrong_rollouts(told):
    """Each token has the score of its own step, the stop token that of the last."""
    weights = weights_of("prm", told)
    for row, (good, step) in enumerate(score_lines(None, None, told.rollouts)[:4]):
        expected = good[step] if told.advantages[row] > 0 else 1 - good[step]
        assert_close(weights[row, : len(step)], expected)
        assert weights[row, 0] != weights[row, 13]  # lines are 12 tokens


def slow_finepo(
    advantage: float, good: list[float], step: list[int], alpha: float, bound: float
) -> list[float]:
    """The formula of one rollout, step by step: A' = A + alpha k D, k = |A| / max D, clipped."""
    lengths = [step.count(k) for k in range(len(good))]
    mean = sum(length * p for length, p in zip(lengths, good, strict=True)) / sum(lengths)
    k = abs(advantage) / (max(0.0, max(good) - mean) + 1e-6)
    moved = [advantage + alpha * k * (p - mean) for p in good]
    if advantage > 0:
        clipped = [min(max(value, 0.0), bound * advantage) for value in moved]
    else:
        clipped = [max(min(value, 0.0), bound * advantage) for value in moved]
    return [clipped[number] for number in step]


@pytest.fixture
def scores(told, monkeypatch):
    """For each rollout, the scores of its steps, which a test changes, and its tokens' steps.

    A step of a token, three longer ones, and one without a token.
    """
    generator = torch.Generator().manual_seed(3)
    rows = []
    for length in told.lengths.flatten().tolist():
        step = torch.tensor([0, *sorted([1, 2, 3] * length)[: length - 1]])
        rows.append((torch.rand(5, generator=generator), step))
    monkeypatch.setattr(methods.reward_model, "score_steps", lambda *inputs: rows)
    return rows


@pytest.mark.parametrize(("alpha", "bound"), [(0.5, 2.0), (0.1, 1.0), (3.0, 1.5)])
def test_finepo_against_a_loop_by_its_formula(told, scores, alpha, bound):
    """Right and wrong rollouts, with and without clipping; A times 3 gives 3 times the credit."""
    options = [f"alpha={alpha}", f"bound={bound}"] if alpha != 0.5 else []
    ours = assign("finepo", told, *options)
    for row, (good, step) in enumerate(scores):
        advantage = told.advantages[row].item()
        credit = slow_finepo(advantage, good.tolist(), step.tolist(), alpha, bound)
        expected = torch.tensor(credit)
        assert_close(ours[row, : len(step)], expected, atol=1e-6, rtol=1e-5)
    thrice = replace(told, advantages=3 * told.advantages)
    assert_close(assign("finepo", thrice, *options), 3 * ours)


def test_finepo_moves_credit_within_a_rollout(told, scores):
    """Before any clip the sum stays T A, and the unit of scores does not matter.

    Equal scores, and a single step, give A. Random scores are drawn anew each time.
    """
    uniform, ours = assign("grpo", told), assign("finepo", told)
    mild = assign("finepo", told, "alpha=.01")
    assert_close(mild.sum(1), uniform.sum(1), atol=1e-4, rtol=1e-4)
    drawn = assign("finepo", told, "scores=random")
    assert not torch.equal(drawn, assign("finepo", told, "scores=random"))
    original = list(scores)
    scores[:] = [(0.3 * good + 0.2, step) for good, step in original]
    assert_near(assign("finepo", told), ours, 1e-4)
    scores[:] = [(torch.full((5,), 0.7), step) for _, step in original]
    assert_near(assign("finepo", told), uniform, 1e-6)
    scores[:] = [(good[:1], 0 * step) for good, step in original]
    assert_near(assign("finepo", told), uniform, 1e-6)


@pytest.mark.parametrize("second", [0.0, math.nan])
def test_pure_against_its_formula(second, told):
    """Its advantages come from r*, suffix sums, a leave-one-out baseline and the group's deviation.

    A rollout without a verdict changes nothing for the others.
    """
    batch = with_rewards(told, [1, second, 0, 1, 0, 0, 0, 0])
    ours = assign("pure", batch)
    scores = score_lines(None, None, batch.rollouts)
    for group in (range(4), range(4, 8)):
        returns = {}
        for row in group:
            good, step = scores[row]
            r = 2 * good.double() - 1
            star = r * (-r / 0.1).exp() / (-r / 0.1).exp().sum()
            assert r.min() - 1e-9 <= star.sum() <= r.mean() + 1e-9
            if len(step):
                later = torch.stack([star[k:].sum() for k in step.tolist()])
                returns[row] = later + batch.rewards[row]
        centred = {}
        for row, values in returns.items():
            others = [returns[other].mean() for other in returns if other != row]
            centred[row] = values - sum(others) / len(others)
        std = torch.cat(list(centred.values())).std(correction=0)
        for row in group:
            expected = centred.get(row, torch.zeros(0)) / std
            inside = batch.mask[row]
            assert_close(ours[row][inside], expected.float(), atol=1e-4, rtol=1e-4)
            assert ours[row][~inside].count_nonzero() == 0


def test_pure_does_not_blow_up_small_differences_of_scores(told, monkeypatch):
    """Scores that differ by a hundredth give advantages of that order, not of order 1.

    All verdicts of the group are equal.
    """
    even = []
    for row, (good, step) in enumerate(score_lines(None, None, told.rollouts)):
        even.append((torch.full_like(good, 0.5 + 0.001 * row), step))
    monkeypatch.setattr(methods.reward_model, "score_steps", lambda *inputs: even)
    assert 0 < assign("pure", told)[4:].abs().max() < 0.2
    even[4] = torch.full_like(even[4][0], math.nan), even[4][1]
    # a reward model that overflows is no missing verdict: the update is skipped, and says so
    assert assign("pure", told)[4:][told.mask[4:]].isnan().all()


def test_true_errors_and_the_oracle(told):
    """Wrong rollouts keep A on their first wrong step alone, or on all tokens if none is known."""
    problem = told.problems[0]
    careful = toy.demonstrate(problem, toy.random.Random(0), careless=False)
    digit = str((int(careful[10]) + 1) % 10)
    texts = [careful, careful[:10] + digit + careful[11:], careful, careful]
    rollouts = rollouts_of(told.tokenizer, [problem["problem"]] * 4, texts)
    batch = batch_of(torch.tensor([1.0, 0, 0, 1]), rollouts, 4, problems=[problem])
    batch = replace(told, **vars(batch))
    places = batch.true_errors(told.task, told.tokenizer)
    assert places.tolist() == [[-1, -1, -1], [0, 12, 10], [-1, -1, -1], [-1, -1, -1]]
    expected = 1.0 * rollouts.mask
    expected[1, 12:] = 0
    assert torch.equal(weights_of("oracle", batch), expected)


def test_the_oracle_can_keep_the_sum_of_a_rollout():
    """With `mass` 1 the n tokens of the wrong step have A T / n; wherever that is, the sum is T A.

    A step may end after the response; a rollout whose error is not known keeps A.
    """
    steps = [None, (0, 1), (3, 5), None, (2, 99), None]
    batch = random_batch([[1, 0, 0, 0, 0, 1], [0, 1, 0, 1, 1, 0]])
    steps += [(1, 2), None, (4, 7), None, None, (0, 99)]

    def first_error(problem, tokens):
        place = steps[int(tokens[0])]
        return place and toy.FirstError(place[0], "copy", place[1], place[0])

    task = Task("embedded", [], [], None, None, first_error=first_error)
    batch = as_told(batch, tokenizer=NumberTokenizer(), task=task)
    plain, ours = assign("oracle", batch), assign("oracle", batch, "mass=1")
    for row, place in enumerate(steps):
        length = int(batch.lengths[row])
        on_step = [t for t in range(length) if not place or place[0] <= t < place[1]]
        expected = torch.zeros(batch.mask.shape[1])
        expected[on_step] = batch.advantages[row]
        assert_close(plain[row], expected)
        assert_close(ours[row], expected * length / len(on_step))
    assert_close(ours.sum(1), batch.advantages * batch.lengths[:, 0])


def test_position_and_random_are_what_they_say(told):
    """Position is t / T of each rollout's own length; random has runs of equal draws in [0, 2]."""
    length = int(told.lengths[0])
    weights = weights_of("position", told)[0, :length]
    assert_close(weights, torch.arange(1, length + 1) / length)
    weights = weights_of("random", told)[0, :length]
    assert all(len(run.unique()) == 1 for run in weights.split(6))
    assert len(weights.unique()) == -(-length // 6)
    assert weights.min() >= 0 and weights.max() <= 2
    many = weights_of("random", told, window=1, stride=1)[:4]
    assert many[told.mask[:4]].mean() == pytest.approx(1, abs=0.2)


def test_the_noise_of_oar_g_is_made_anew_by_seed_and_step(told):
    """For a seed and step it is the same again, whatever was drawn before."""
    ours = [assign("oar-g", told, step=step, seed=seed) for step, seed in ((3, 0), (4, 0), (3, 1))]
    assert torch.equal(assign("oar-g", told), ours[0])
    assert len(torch.stack(ours).unique(dim=0)) == 3


def test_shuffle_keeps_each_rollout_s_weights_and_not_their_places():
    """The same numbers stand in another order, anew with every draw."""
    batch = random_batch([[1, 0, math.nan, 0, 1]], shared=3)
    shear = assign("shear", batch)
    torch.manual_seed(0)
    ours, again = (assign("shuffle", batch) for _ in range(2))
    assert not torch.equal(ours, shear) and not torch.equal(ours, again)
    for row, inside in enumerate(batch.mask):
        assert ours[row][inside].sort().values.tolist() == shear[row][inside].sort().values.tolist()
