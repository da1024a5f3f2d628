"""credit/: what holds for every method, and each against its formula, token by token or in
written-out numbers.
"""

import math
import re
import statistics
from dataclasses import dataclass, replace

import made
import pytest
import torch
from made import Numbers, adapted, drawn_batch, made_batch, widened, with_a_stop
from torch.testing import assert_close

from credit import hindsight, methods, salience
from credit.batch import Batch, Context
from credit.measures import effective_weights
from credit.methods import assign_credit, first_weights, own_side_weights, true_errors
from credit.salience import Answer, outcome_weights
from credit.shear_settings import Settings
from credit.table import METHODS, method_of, methods_needing
from grpo import Policy, group_advantages, score, to_padded
from harness.config import TrainConfig
from harness.prepare import make_task
from harness.run import credit_context
from shear import span_bounds
from sinkhorn import sinkhorn
from tasks import toy
from tasks.problems import Task

OPTIONS = {
    "shear": dict(window=6, stride=3),
    "first": dict(window=6, stride=3),
    "random": dict(window=5),
}


def flags(method: str = "", **changes) -> TrainConfig:
    """The recipe's, but for OPTIONS of the method, and `changes`."""
    return made.flags(**OPTIONS.get(method, {}), **changes)


def with_entropies(batch: Batch, entropies: torch.Tensor, mask: torch.Tensor) -> Batch:
    """The same advantages over responses of other lengths and entropies."""
    rollouts = replace(batch.rollouts, mask=mask.bool())
    return replace(batch, rollouts=rollouts, entropies=entropies)


@dataclass
class Told(Batch):
    """A batch, and what its methods may use besides."""

    context: Context | None = None


def context_of(batch: Batch, config: TrainConfig) -> Context:
    """The batch's own context, if it has one, with these settings."""
    if not isinstance(batch, Told):
        return credit_context(config, None, None, None, 0)
    known = batch.context
    return credit_context(config, known.policy, known.tokenizer, known.task, known.step, known.prm)


def assign(method: str, batch: Batch, config: TrainConfig) -> torch.Tensor:
    """Token advantages by a method with these settings."""
    credit = replace(config.credit, method=method)
    return assign_credit(batch, context_of(batch, config), credit)


def with_context(batch: Told, **changes) -> Told:
    """The batch in a changed context."""
    return replace(batch, context=replace(batch.context, **changes))


def with_rewards(batch: Batch, rewards: list[float]) -> Batch:
    """The batch with other verdicts, NaN for none."""
    rewards = torch.tensor(rewards)
    rollouts = replace(batch.rollouts, mask=batch.rollouts.mask & ~rewards.isnan()[:, None])
    hidden = to_padded(batch.hidden, batch.rollouts.mask)[rollouts.mask]
    advantages = group_advantages(rewards, batch.group_size)
    return replace(batch, rewards=rewards, advantages=advantages, rollouts=rollouts, hidden=hidden)


def weights_of(method: str, batch: Batch) -> torch.Tensor:
    """(B, T), what the method multiplies advantages by."""
    return effective_weights(
        assign(method, batch, flags(method)), batch.advantages, batch.rollouts.mask
    )


@pytest.fixture
def told(scored_once) -> Batch:
    """The batch, of which nothing is logged yet."""
    return replace(scored_once, stats={})


@pytest.fixture(scope="module")
def scored_once() -> Batch:
    """Of problems of two lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods.reward_model, "score_steps", score_lines)
        yield worked_responses(2)


def worked_responses(lines: int) -> Batch:
    """Two groups of four worked responses, the second all wrong, scored by a tiny model with a
    trained adapter.
    """
    model, tokenizer = toy.make_model(2, seed=1).eval(), toy.make_tokenizer()
    torch.manual_seed(0)
    adapted(model, std=0.1)
    words = ["--toy-lines", str(lines), "--heldout", "8", "--eval-groups", "8"]
    _, task, _ = make_task(made.configured(words), tokenizer, 512)
    problems = [task.train[0], task.train[1]]
    rng = toy.random.Random(1)
    texts = [toy.demonstrate(problem, rng) for problem in problems for _ in range(4)]
    texts[6] = texts[6][:9]  # without a box
    rollouts = with_a_stop(
        tokenizer, [problem["problem"] for problem in problems for _ in range(4)], texts
    )
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])
    policy = Policy(model)
    scored = score(policy, rollouts, temperature=1.0, micro_tokens=300)._asdict()
    context = credit_context(flags(), policy, tokenizer, task, 3, prm=())
    batch = made_batch(rewards, rollouts, 4, problems=problems, **scored)
    return Told(**vars(batch), context=context)


def score_lines(prm, questions, rollouts, tokenizer=None, step_end="\n", micro_tokens=0):
    """A process reward model that likes long texts and early lines."""
    scores = []
    for row, text in enumerate(rollouts.texts):
        count = len(text.split(step_end))
        step = [
            min(text[:t].count(step_end), count - 1) for t in range(int(rollouts.mask[row].sum()))
        ]
        good = [1 / (k + 2) + len(text) / 1000 for k in range(count)]
        scores.append((torch.tensor(good), torch.tensor(step).long()))
    return scores


def wider(batch: Batch, by: int) -> Batch:
    """The same batch with more padding on both sides, which holds garbage."""
    log_probs, entropies = (
        torch.nn.functional.pad(values, (0, by), value=3)
        for values in (batch.log_probs, batch.entropies)
    )
    return replace(
        batch, rollouts=widened(batch.rollouts, by, by), log_probs=log_probs, entropies=entropies
    )


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
        hidden=to_padded(batch.hidden, batch.rollouts.mask)[rows][batch.rollouts.mask[rows]],
    )


def renamed(text: str, names: dict[str, str]) -> str:
    """The text with other labels."""
    return re.sub(r"\\boxed|[a-h]", lambda found: names.get(found[0], found[0]), text)


def tokens(batch: Batch):
    """(rollout, place) of every token."""
    return batch.rollouts.mask.nonzero().tolist()


# ---- every method --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*METHODS, "hapo+shear"])
def test_every_method_gives_finite_token_advantages_that_padding_and_order_leave_alone(
    method, told
):
    """(B, T), no gradient, 0 outside of the mask; nothing without contrast, but from those that
    need none.
    """
    options = flags(method)
    torch.manual_seed(5)
    ours = assign(method, told, options)
    assert ours.shape == told.rollouts.mask.shape and not ours.requires_grad
    # to bipace the four are alike, whose verdicts differ
    assert ours.isfinite().all() and (ours[:4].abs().max() > 0 or method == "bipace")
    assert ours[~told.rollouts.mask].abs().max() == 0
    assert (ours[4:].abs().max() == 0) == (method not in ("pure", "hsd", "scapo"))
    if method_of(
        method
    ).weighs:  # tokens of right rollouts are never punished, of wrong ones never rewarded
        assert (ours * told.advantages[:, None] >= 0).all()
    wide = wider(told, 3)  # filled with garbage
    torch.manual_seed(5)
    padded = assign(method, wide, options)
    assert_close(padded[:, :-3], ours, atol=2e-5, rtol=1e-4)
    assert padded[:, -3:].abs().max() == 0
    # draws, peers and the leaders of clusters follow the order
    if method not in {"random", "shuffle", "bipace"} | methods_needing("peer"):
        order = [6, 5, 4, 7, 3, 0, 1, 2]
        exchanged = assign(method, reordered(told, order), options)
        # the gradient of a KL of 1e-7 nats has four digits in float32
        assert_close(exchanged, ours[order], atol=1e-3 if method == "oar-g" else 2e-5, rtol=1e-4)
    if method not in ("hsd", "scapo"):  # which compare nothing
        alone = with_rewards(told, [1, math.nan, math.nan, math.nan] + [math.nan] * 4)
        for rescale in (
            "none",
            "mean1",
        ):  # no NaN, and no division by the deviation of a single rollout
            assert assign(method, alone, flags(method, rescale=rescale)).abs().max() == 0


# Of the whole batch; oar-p's depend on lengths.
PASSES = {"oar-g": 2, "rlsd": 1, "hsd": 1, "scapo": 4, "attention": 1, "arca": 1}
PASSES |= dict.fromkeys(["serl", "sdpo", "iw-opd", "dasd"], 1)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_pays_for_its_own_passes_and_leaves_gradients_alone(method, told):
    """Forward passes are counted in tokens; `.grad` of every parameter is what it was, and so is
    every weight.
    """
    model = told.context.policy.model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    seen = []

    def count(module, inputs, kwargs):
        given = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        seen.append(given.shape[0] * given.shape[1])

    hook = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    assign(method, told, flags(method, micro_tokens=100_000))
    if method == "oar-p":
        assert (
            len(seen) == 2 * 4
        )  # of the mixed group's rollouts: as it is, and all masked versions at once
    else:
        assert len(seen) == PASSES.get(method, 0)
    seen.clear()
    assign(method, told, flags(method, micro_tokens=90))
    hook.remove()
    assert all(tokens <= 90 for tokens in seen)
    assert all((parameter.grad == 1).all() for parameter in model.parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert trainable == [parameter.requires_grad for parameter in model.parameters()]


@pytest.mark.parametrize("method", ["shear", "hapo", "prm", "rlsd", "oracle"])
def test_credit_of_blocks_is_credit_of_the_batch(method, told, monkeypatch):
    """Whole groups with their own problems, verdicts and text: nothing of another group was
    needed.
    """
    monkeypatch.setattr("credit.batch.BLOCK_TOKENS", 1)
    torch.manual_seed(5)
    whole = assign(method, told, flags(method))
    batch = replace(told, hidden=None, stats={})
    for number, rows in enumerate(batch.block_rows()):
        block = Told(**vars(batch.block(rows)), context=batch.context)
        scored = score(batch.context.policy, block.rollouts, temperature=1.0, micro_tokens=300)
        block.log_probs, block.entropies, block.hidden = scored
        block.token_advantages = assign(method, block, flags(method))
        assert block.problems == [told.problems[number]]
        assert block.rollouts.texts == told.rollouts.texts[4 * number : 4 * number + 4]
        batch.fill(rows, block)
    assert number == 1 and batch.hidden is None
    assert_close(batch.token_advantages, whole, atol=2e-5, rtol=1e-4)
    assert_close(batch.log_probs, told.log_probs, atol=1e-5, rtol=0)
    assert_close(batch.entropies, told.entropies, atol=1e-5, rtol=0)
    assert batch.metrics == pytest.approx(told.metrics, rel=1e-4) and len(batch.metrics) == 4 * (
        method == "shear"
    )


def test_a_metric_is_the_mean_over_all_that_it_is_of():
    """Of two blocks or ranks, three values: not the mean of two means. Spans are those of the first
    group, which is shown.
    """
    one, other = drawn_batch([[1, 0]]), drawn_batch([[1, 0]])
    one.log("iterations", torch.tensor([1.0, 2.0]))
    other.log("iterations", torch.tensor([6.0]))
    one.closest = "of the first block"
    other.closest = "of the second"
    other.token_advantages = other.log_probs
    one.fill(torch.arange(2), other)
    assert one.metrics == {"iterations": 3.0} and one.closest == "of the first block"


# ---- the door ------------------------------------------------------------------------------------


def test_negative_scale_multiplies_wrong_rollouts_only():
    """Half the punishment, the same reward."""
    batch = drawn_batch([[1, 0, 0, 1]])
    ours = assign("grpo", batch, flags(negative_scale=0.5))
    expected = batch.advantages * torch.tensor([1, 0.5, 0.5, 1])
    assert torch.equal(ours, expected[:, None] * batch.rollouts.mask)


@pytest.mark.parametrize("method", ["shear", "first"])
def test_rescaling_makes_the_mean_weight_of_each_group_one(method):
    """Over the tokens of the group; the weights' proportions stay."""
    batch = drawn_batch([[1, 0, 0, 1], [0, 0.5, 0.5, 1], [1, 1, 1, 1]])
    plain = assign(method, batch, flags(method, negative_scale=0.3))
    ours = assign(method, batch, flags(method, negative_scale=0.3, rescale="mean1"))
    weights = effective_weights(ours, batch.advantages, batch.rollouts.mask)
    signal = (
        batch.rollouts.mask & (batch.advantages != 0)[:, None]
    )  # a reward of .5 is the mean of its group
    for group in (slice(0, 4), slice(4, 8)):
        assert weights[group][signal[group]].mean() == pytest.approx(1, abs=1e-5)
        assert torch.allclose(
            ours[group] * plain[group].abs().sum(),
            plain[group] * ours[group].abs().sum(),
            atol=1e-4,
        )
    assert ours[8:].abs().max() == 0


# ---- mixtures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "step", "lam"),
    [
        ([], 3, 0.5),
        (["share=.2"], 3, 0.2),
        (["share=.2", "until=8"], 0, 0.2),
        (["share=.2", "until=8"], 4, 0.6),
        (["until=8"], 8, 1),
        (["until=8"], 30, 1),
    ],
)
def test_a_mixture_is_a_share_of_the_first_and_the_rest_of_the_second(options, step, lam, told):
    """Token by token; `--negative-scale` and `--rescale` act on what is mixed."""
    told = with_context(told, step=step)
    flags_of_shear = flags("shear", method_option=options)
    ours = assign("entropy+shear", told, flags_of_shear)
    entropy, shear = (assign(method, told, flags("shear")) for method in ("entropy", "shear"))
    assert_close(ours, lam * entropy + (1 - lam) * shear)
    both = flags("shear", method_option=options, negative_scale=0.5, rescale="mean1")
    halved = torch.where(told.correct[:, None], ours, ours / 2)
    weights = effective_weights(halved, told.advantages, told.rollouts.mask)
    mean = weights[:4][told.rollouts.mask[:4]].mean()
    assert_close(assign("entropy+shear", told, both), halved / mean)


def test_a_mixture_needs_what_either_needs_and_weighs_if_both_do():
    """The rest is as in a method without a plus."""
    mixed = method_of("rlsd+kgae")
    assert set(mixed.needs) == {"box", "hint", "states", "pairs"} and not mixed.weighs
    assert method_of("grpo+shear").weighs and not method_of("kgae+grpo").weighs
    assert set(mixed.options) == {"share", "until"} and not mixed.drops_uncredited
    for name in ("grpo+", "+", "grpo+sheer", "grpo+shear+kgae", "grpo+sdpo", "iw-opd+grpo", ""):
        with pytest.raises(ValueError, match=r"must be one of grpo, .* but not sdpo or iw-opd"):
            method_of(name)


# ---- formulas ------------------------------------------------------------------------------------


def test_signbalance_is_one_and_what_balances_it():
    """Three of five right: -3 / 2; one of four, one without a verdict: -1 / 3; equal ones: 0. Its
    sum over a group is 0.
    """
    batch = drawn_batch([[1, 0, 1, 0, 1], [0, 0, 1, math.nan, 0], [1] * 5])
    ours = assign("signbalance", batch, flags())
    balance = [[1, -3 / 2, 1, -3 / 2, 1], [-1 / 3, -1 / 3, 1, 0, -1 / 3], [0] * 5]
    expected = torch.tensor(balance).view(-1, 1) * batch.rollouts.mask
    assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kept", [0.2, 0.5])
def test_gmts_keeps_the_tokens_of_large_advantage_and_entropy(kept):
    """Those of each group that lie at or above the quantile of H |A|."""
    batch = drawn_batch([[1.0, 0, 0], [1, 1, 0]])
    ours = assign("gmts", batch, flags(method_option=[f"kept={kept}"]))
    for group in (range(3), range(3, 6)):
        sizes = {}
        for i, t in tokens(batch):
            if i in group:
                sizes[i, t] = abs(batch.advantages[i].item()) * batch.entropies[i, t].item()
        least = sorted(sizes.values())[math.ceil((1 - kept) * (len(sizes) - 1))]
        for (i, t), size in sizes.items():
            assert ours[i, t] == (batch.advantages[i] if size >= least else 0)


def test_bipace_against_a_loop():
    """States of three directions, four tokens; the radius takes one in the middle to the earlier
    one. A token alone of its kind, a state alone, a rollout without a verdict.
    """
    batch = drawn_batch([[1, 0, 1, math.nan], [0, 1, 0, 0]])
    mask = batch.rollouts.mask
    torch.manual_seed(0)
    ids = torch.randint(3, mask.shape)
    directions = torch.tensor([[1.0, 0, 0], [0.9, 0.5, 0], [0.4, 1, 0], [0, 0, 2], [-1, 0, 0]])
    kinds = torch.randint(4, (int(mask.sum()),))
    kinds[3] = 4
    hidden = directions[kinds]
    batch = replace(batch, rollouts=replace(batch.rollouts, ids=ids), hidden=hidden)
    ours = assign("bipace", batch, flags(method_option=["radius=.2"]))
    states = to_padded(hidden, mask).double()
    outcomes = set()
    for group in (range(4), range(4, 8)):
        leaders, members = [], {}  # of each token, its cluster
        for i, t in tokens(batch):
            if i not in group:
                continue
            members[i, t] = -1  # of first tokens
            if t:
                state = states[i, t - 1]
                cosines = [torch.cosine_similarity(state, leader, dim=0) for leader in leaders]
                near = [number for number, cosine in enumerate(cosines) if cosine >= 0.8]
                members[i, t] = near[0] if near else len(leaders)
                if not near:
                    leaders.append(state)
        for i, t in members:
            same = [at for at in members if members[at] == members[i, t]]
            peers = [at for at in same if ids[at] == ids[i, t]]
            reward = {at: batch.rewards[at[0]].item() for at in same}
            others = [reward[at] for at in same if at != (i, t)]
            if len(same) == 1:
                expected, outcome = 0.0, "alone"
            elif len(peers) == 1:
                expected, outcome = reward[i, t] - statistics.mean(others), "a token of its own"
            else:
                of_peers = statistics.mean(reward[at] for at in peers)
                expected, outcome = of_peers - statistics.mean(reward.values()), "with peers"
            outcomes.add(outcome)
            assert ours[i, t].item() == pytest.approx(expected, abs=1e-6)
    assert len(outcomes) == 3


def test_entropy_adds_at_most_half_the_advantage():
    """A + min(.4 H, |A| / 2): A is +-.5 (1e6 delta aside), so 1.25 |A| nats reach the bound;
    penalties shrink.
    """
    batch = drawn_batch([[1, 0]])
    scale = batch.advantages.tolist()
    entropies = torch.tensor([0.0, 0.1, 2.0]).repeat(2, 1)
    ours = assign("entropy", with_entropies(batch, entropies, torch.ones(2, 3)), flags())
    expected = [[a, a + 0.04, a + abs(a) / 2] for a in scale]
    assert_close(ours, torch.tensor(expected))


def test_hapo_stays_within_its_bound_and_knows_the_group():
    """Entropies 0 0 1 | 1 of one group: mean .5, deviation .5, z = -1, -1, 1 | 1; clipped at |A| /
    2, times .2.
    """
    batch = drawn_batch([[1, 0]])
    scale = batch.advantages.tolist()
    entropies = torch.tensor([[0.0, 0, 1], [1.0, 99, 99]])
    batch = with_entropies(batch, entropies, torch.tensor([[1, 1, 1], [1, 0, 0]]))
    ours = assign("hapo", batch, flags())
    bend = 0.2 * abs(scale[0]) / 2
    expected = [[scale[0] - bend, scale[0] - bend, scale[0] + bend], [scale[1] - bend, 0, 0]]
    assert_close(ours, torch.tensor(expected))
    mild = assign(
        "hapo", replace(batch, advantages=10 * batch.advantages), flags(method_option=["alpha=1"])
    )
    assert_close(mild[0], 10 * scale[0] + torch.tensor([-1.0, -1, 1]))
    flat = replace(
        batch, entropies=torch.full_like(entropies, 0.3)
    )  # no deviation, no bend, no NaN
    hapo, grpo = (assign(method, flat, flags()) for method in ("hapo", "grpo"))
    assert_close(hapo, grpo, atol=1e-4, rtol=0)


def test_rsi_keeps_what_is_neither_certain_nor_far_off():
    """1 + log pi / H of -6.1, -6, .7, .81 and, of no entropy, of 1: two of five tokens stay, at 5 /
    2 times A.
    """
    entropies = torch.tensor([0.5, 0.5, 2, 2, 0]).repeat(2, 1)
    batch = with_entropies(drawn_batch([[1, 0]]), entropies, torch.ones(2, 5))
    logp = torch.tensor([-3.55, -3.5, -0.6, -0.38, 0]).repeat(2, 1)
    batch = replace(batch, log_probs=logp)
    expected = batch.advantages[:, None] * torch.tensor([0, 2.5, 2.5, 0, 0])
    assert_close(assign("rsi", batch, flags()), expected)
    none = assign("rsi", batch, flags(method_option=["low=.85", "high=.9"]))
    assert none.abs().max() == 0  # no token, no division by nothing


def test_delta_against_a_float64_loop():
    """DelTA's steps 0 to 5 with one refinement, token by token, on the second of two groups; their
    mean weight is 1.
    """
    batch = drawn_batch([[1, 1, 0], [0, 1, 0]])
    logp = -torch.rand(batch.rollouts.mask.shape) * 3
    batch = replace(batch, log_probs=logp)
    hidden = to_padded(batch.hidden, batch.rollouts.mask).double()
    sides, vectors = {True: [], False: []}, {}
    for row in (3, 4, 5):
        for t in range(1, int(batch.rollouts.mask[row].sum())):
            vectors[row, t] = (1 - logp[row, t].double().exp()) * hidden[row, t - 1]
            sides[bool(batch.correct[row])].append((row, t))
    own, stds = dict.fromkeys(vectors, 1.0), None
    for _ in range(2):
        means = {}
        for side, tokens in sides.items():
            means[side] = sum(own[at] * vectors[at] for at in tokens) / sum(
                own[at] for at in tokens
            )
        margins = {}
        for side, tokens in sides.items():
            for at in tokens:
                closer, further = (
                    (vectors[at] - means[s]).square().sum() for s in (side, not side)
                )
                margins[at] = float(further - closer)
        if stds is None:
            stds = {
                side: statistics.pstdev(margins[at] for at in tokens)
                for side, tokens in sides.items()
            }
        own = {
            at: 1 / (1 + math.exp(-margins[at] / stds[bool(batch.correct[at[0]])]))
            for at in vectors
        }
    weights = weights_of("delta", batch)[3:]
    expected = torch.ones(3, 10) * batch.rollouts.mask[3:]  # a first token's 0.8 + 0.4 / 2
    for (row, t), share in own.items():
        expected[row - 3, t] = 0.8 + 0.4 * share
    expected *= batch.rollouts.mask[3:].sum() / expected.sum()
    assert_close(weights * batch.rollouts.mask[3:], expected, atol=1e-5, rtol=1e-4)


def slow_kgae(
    states: list[list], rewards: list[float], window: int, width: float, decay: float
) -> list[list[float]]:
    """The formula of one group, one number at a time; states (T_i, d) of each rollout."""
    norms = [math.hypot(*state) for rollout in states for state in rollout]
    nbar = sum(norms) / len(norms)
    graded = [row for row in range(len(states)) if not math.isnan(rewards[row])]
    std = statistics.stdev(rewards[row] for row in graded) + 1e-6
    advantages = [[] for _ in states]
    for i in graded:
        others = [j for j in graded if j != i]
        base = sum(rewards[j] for j in others) / len(others)
        values = [base]
        for t in range(1, len(states[i]) + 1):
            above, below = base, 1.0
            for j in others:
                nearest = math.inf
                for u in range(1, len(states[j]) + 1):
                    run = min(window, t, u)
                    total = sum(
                        math.dist(states[i][t - 1 - k], states[j][u - 1 - k]) for k in range(run)
                    )
                    nearest = min(nearest, total / run / nbar)
                kernel = math.exp(-nearest / width)
                above += kernel * rewards[j]
                below += kernel
            values.append(above / below)
        values[-1] = rewards[i]
        for t in range(len(states[i])):
            later = range(t, len(states[i]))
            total = sum(decay ** (s - t) * (values[s + 1] - values[s]) for s in later)
            advantages[i].append(total / std)
    return advantages


@pytest.mark.parametrize(("window", "decay"), [(1, 0.95), (4, 0.5), (7, 1.0), (50, 0.0)])
def test_kgae_against_a_loop_by_its_formula(window, decay):
    """Ragged lengths, a rollout without a verdict, two groups; windows of one token and above all
    lengths.
    """
    batch = drawn_batch([[1, 0, math.nan, 0, 1], [0, 1, 0, 0, 0]], shared=3)
    ours = assign("kgae", batch, flags(window=window, method_option=["width=.3", f"decay={decay}"]))
    hidden = to_padded(batch.hidden, batch.rollouts.mask).double()
    for start in (0, 5):
        rows = range(start, start + 5)
        states = [hidden[row][batch.rollouts.mask[row]].tolist() for row in rows]
        expected = slow_kgae(states, batch.rewards[start : start + 5].tolist(), window, 0.3, decay)
        for row in rows:
            of_rollout = ours[row][batch.rollouts.mask[row]]
            assert_close(of_rollout, torch.tensor(expected[row - start]), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, dict(alpha=0.2, strength=0.5)])
def test_taco(options):
    """1 - lambda (1 - exp(-r)), r = -log p - H + log alpha, where A > 0 and r > 0; else 1. The
    defaults: .01, .9.
    """
    batch = drawn_batch([[1.0, 0, 0], [1, 1, 1]])
    alpha, strength = options.get("alpha", 0.01), options.get("strength", 0.9)
    given = flags(method_option=[f"{name}={value}" for name, value in options.items()])
    ours, weights = assign("taco", batch, given), []
    for i, t in tokens(batch):
        r = -batch.log_probs[i, t].item() - batch.entropies[i, t].item() + math.log(alpha)
        weights.append(
            1 - strength * (1 - math.exp(-r)) if batch.advantages[i] > 0 and r > 0 else 1
        )
        assert ours[i, t].item() == pytest.approx(
            batch.advantages[i].item() * weights[-1], rel=1e-5
        )
    assert min(weights) < 0.9 < max(weights) == 1


def test_own_side_takes_the_closest_span_of_the_same_outcome_in_another_rollout():
    """Every span against every span, one pair at a time; the only right rollout of the second group
    keeps weight 1.
    """
    batch, window, stride = drawn_batch([[1.0, 0, 0, 1], [0, 0, 1, 0]]), 4, 2
    ours = assign("own-side", batch, flags(window=window, stride=stride, max_iters=2000, tol=1e-5))
    hidden = to_padded(batch.hidden, batch.rollouts.mask).double()
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
                        found.append(
                            sinkhorn(costs, eps=0.05 * nbar.item(), max_iters=2000, tol=1e-5).value
                            / nbar
                        )
                nearest = min(found, default=torch.tensor(1.0))
                omega[start:end] = omega[start:end].clamp_min(nearest)
            expected = (batch.advantages[i] * omega).float()
            assert_close(ours[i, : len(omega)], expected, atol=1e-4, rtol=1e-4)
            assert bool((omega == 1).all()) == (not peers)


def test_own_side_without_an_opposing_side_weighs_nothing():
    """As SHEAR does, and as where a rollout has no verdict."""
    batch = drawn_batch([[1.0, 1, 1]])
    mask = batch.rollouts.mask
    hidden, settings = to_padded(batch.hidden, mask), Settings(window=4, stride=2)
    assert torch.equal(own_side_weights(hidden, mask, batch.correct, settings), mask.float())
    mask[2] = False
    mixed = own_side_weights(hidden, mask, torch.tensor([1, 0, 0]), settings)
    assert torch.equal(mixed, mask.float())


@pytest.mark.parametrize("prefix", [0.0, 0.5])
def test_cliff(prefix):
    """One token at a time: two of five right, one without a verdict, one wrong whose error is not
    known (it keeps A).

    A second group has another share of right ones and a b of its own; one of equal verdicts gets
    nothing. The mean over a group's tokens is 0.
    """
    errors = {"a": 3, "b": 0, "?": None}
    texts = ["right", "a", "?", "b", "right", "none", "b", *["right"] * 4, *["a"] * 7]
    batch = drawn_batch([[1, 0, 0, 0, 1, math.nan], [0, 1, 1, 1, 1, 0], [0] * 6])

    def first_error(problem, tokens):
        place = errors[texts[int(tokens[0])]]
        return None if place is None else toy.FirstError(place, "copy", place + 1)

    task = Task("embedded", [], [], None, None, first_error=first_error)
    batch = Told(**vars(batch), context=credit_context(flags(), None, Numbers(), task, 0))
    ours = assign("cliff", batch, flags(method_option=[f"prefix={prefix}"]))
    expected = torch.zeros(ours.shape)
    for first, mu in ((0, 2 / 5), (6, 4 / 6)):
        sigma, moved = math.sqrt(mu * (1 - mu)), []
        for i, t in tokens(batch):
            if not first <= i < first + 6:
                continue
            if texts[i] == "?":
                expected[i, t] = batch.advantages[i]
                continue
            moved.append((i, t))
            good = texts[i] == "right"
            early = not good and t < errors[texts[i]]
            expected[i, t] = ((1 - mu) * (prefix if early else 1) if good or early else -mu) / sigma
        shift = expected[first : first + 6].sum() / len(moved)
        for i, t in moved:
            expected[i, t] -= shift
        assert abs(ours[first : first + 6].sum()) < 1e-4
    assert_close(ours, expected, atol=1e-6, rtol=1e-5)


def test_scapo():
    """d and both z-scores in float64, each p_k from a pass of its own over renamed symbols. Of
    problems of three lines, as two lines have one phrasing.
    """
    told = worked_responses(3)
    tokenizer, model = told.context.tokenizer, told.context.policy.model
    ours = assign("scapo", told, flags(method_option=["strength=0.5", "phrasings=3"]))

    def chances(problem: str, response: str) -> torch.Tensor:
        """p of each symbol of the response and of its end."""
        start, ids = (
            tokenizer(problem)["input_ids"],
            [*tokenizer(response)["input_ids"], tokenizer.eos_token_id],
        )
        logits = model(torch.tensor([start + ids])).logits[0, len(start) - 1 : -1].double()
        return logits.softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]

    def zscore(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        values = torch.cat(rows)
        return [(row - values.mean()) / values.std(correction=0) for row in rows]

    for group, problem in enumerate(told.problems):
        answers, scores = told.rollouts.texts[4 * group : 4 * group + 4], [0] * 4
        for k in range(3):
            other, names = toy.rephrase(problem, k)
            rows = []
            for text in answers:
                p, p_k = (
                    chances(problem["problem"], text),
                    chances(other["problem"], renamed(text, names)),
                )
                rows.append(-2 * (p - p_k).abs() / (p + p_k))
            scores = [score + row for score, row in zip(scores, zscore(rows), strict=True)]
        for row, u in enumerate(zscore(scores), 4 * group):
            expected = told.advantages[row] + 0.5 * u.clamp_max(0).float()
            assert_close(ours[row, : len(u)], expected, atol=1e-3, rtol=1e-3)
            assert expected.min() < told.advantages[row] - 0.1


def test_the_embedded_task_rephrases_by_renaming():
    """Four ways for five labels; what was right before is right under the new names, with the same
    answer.
    """
    problem = toy.make_problem(toy.random.Random(3), 5)
    ways = [toy.rephrase(problem, k) for k in range(4)]
    assert len({problem["problem"], *[other["problem"] for other, _ in ways]}) == 5
    response = toy.demonstrate(problem, toy.random.Random(0), careless=False)
    for other, names in ways:
        assert (
            toy.first_error(other, renamed(response, names)) is None
            and other["answer"] == problem["answer"]
        )


def test_first_keeps_right_rollouts_and_the_onset_of_wrong_ones():
    """Three wrong rollouts leave the right one at other places: spans of 6 by 3 tokens; onset, and
    3 on each side.
    """
    hidden = torch.zeros(4, 24, 2)
    hidden[..., 0] = 1
    hidden[1, 12:] = hidden[2, 3:] = hidden[3, 18:] = torch.tensor([0.0, 1.0])
    mask = torch.arange(24) < torch.tensor([24, 24, 14, 24])[:, None]
    group = hidden, mask, torch.tensor([True, False, False, False]), Settings(window=6, stride=3)
    ours = first_weights(*group, threshold=0.03)
    assert [row.nonzero().flatten().tolist() for row in ours] == [
        list(range(24)),
        list(range(9, 18)),  # [9, 15) is the first far span, whose last 3 tokens are [12, 15)
        list(range(9)),  # the span [0, 6) is far: onset at 3
        list(range(15, 24)),  # [15, 21): onset at 18
    ]
    assert set(ours.flatten().tolist()) == {0, 1}
    assert first_weights(*group, threshold=2.0)[1:].abs().max() == 0
    right = first_weights(
        hidden, mask, torch.ones(4).bool(), Settings(window=6, stride=3), threshold=0.03
    )
    assert torch.equal(right, mask.float())


def test_outcome_weights_against_written_out_numbers():
    """Importances whose log1p is 0, 1, 2, 4: n = 0, .25, .5, 1; theta, the quarter quantile, .1875;
    beta 1.
    """
    importance = torch.tensor([[0, 1, 2, 4, 9, 0.0], [0.7] * 6, [0.7] * 6]).expm1()
    mask = torch.arange(6) < torch.tensor([6, 5, 6])[:, None]
    ours = outcome_weights(importance, [Answer(4, 4, 5), Answer(3, 3, 4), None], mask, 0.25, 1.0)
    raw = torch.tensor([0.1, 1 + 0.0625 / 0.8125, 1 + 0.3125 / 0.8125, 2])
    assert_close(ours[0], torch.cat([raw * 4 / raw.sum(), torch.ones(2)]))
    assert_close(ours[1:], mask[1:].float())  # flat importance, and no answer


def test_arca_is_uniform_without_an_adapter_and_follows_it_with_one(told, monkeypatch):
    """T w_t: mean 1 in each rollout; proportional to how far the adapter moves a state."""
    change = torch.rand(told.rollouts.mask.shape) + 0.1
    monkeypatch.setattr(salience, "adapter_residual", lambda *inputs, **limits: change)
    weights = weights_of("arca", told)
    for row in range(4):
        inside = told.rollouts.mask[row]
        expected = change[row][inside] / change[row][inside].sum() * inside.sum()
        assert_close(weights[row][inside], expected, atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(salience, "adapter_residual", lambda *inputs, **limits: 0 * change)
    assert_close(assign("arca", told, flags()), assign("grpo", told, flags()))


def test_rlsd_moves_with_the_teacher_within_its_bound(told, monkeypatch):
    """log-ratios .1 and -9 of right and wrong rollouts; lam .5 at step 0, .25 at 25, 0 from step 50
    on.
    """
    delta = torch.full_like(told.log_probs, 0.1)
    delta[:, 1::2] = -9
    monkeypatch.setattr(hindsight, "told_log_probs", lambda *inputs: told.log_probs + delta)
    for step, share in ((0, 0.5), (25, 0.25), (50, 0), (70, 0)):
        if not share:  # the teacher is not asked
            monkeypatch.setattr(hindsight, "told_log_probs", None)
        weights = weights_of("rlsd", with_context(told, step=step))
        right, wrong = weights[0], weights[1]
        up, down = torch.tensor([0.1, -0.1]).exp()
        for got, ratio in ((right[0], up), (right[1], 0.8), (wrong[0], down), (wrong[1], 1.2)):
            assert got.item() == pytest.approx(1 - share + share * float(ratio), abs=1e-5)


def test_serl_moves_with_a_teacher_that_sees_a_peer(told, monkeypatch):
    """As `rlsd`, but for rollouts of a group without another right one, which keep A."""
    delta = torch.full_like(told.log_probs, 0.1)
    delta[:, 1::2] = -900  # no overflow
    monkeypatch.setattr(hindsight, "told_log_probs", lambda *inputs: told.log_probs + delta)
    one_right = with_rewards(told, [1.0, 0, 0, 0, 1, 1, 0, 0])
    weights = weights_of("serl", with_context(one_right, step=25))
    assert weights[0][told.rollouts.mask[0]].unique().tolist() == [1]  # no other is right
    expected = {1: (math.exp(-0.1), 1.2), 4: (math.exp(0.1), 0.8)}
    for row, ratios in expected.items():
        for t, ratio in enumerate(ratios):
            assert weights[row, t].item() == pytest.approx(0.75 + 0.25 * ratio, abs=1e-5)


def test_iw_opd_and_dasd_against_loops(told, monkeypatch):
    """Of a log-ratio that padding does not have; the second group has no peers: 0, and A."""
    torch.manual_seed(3)
    delta = torch.randn(told.log_probs.shape)
    monkeypatch.setattr(hindsight, "told_log_probs", lambda *inputs: told.log_probs + delta)
    iw_opd = assign("iw-opd", told, flags(method_option=["gamma=.7"]))
    dasd = assign("dasd", told, flags(method_option=["beta=.3"]))
    for row, mask in enumerate(told.rollouts.mask[:4]):
        ratios, entropies = delta[row][mask].tolist(), told.entropies[row][mask].tolist()
        total = sum(map(abs, ratios))
        for t, ratio in enumerate(ratios):
            before = sum(abs(earlier) for earlier in ratios[:t])
            expected = ratio * (1 + 0.7 * (1 - before / total))
            assert iw_opd[row, t].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        place = 0.2 * (len(ratios) - 1)
        low, high = sorted(entropies)[int(place)], sorted(entropies)[int(place) + 1]
        tau = low + (place - int(place)) * (high - low)
        mean, deviation = statistics.mean(ratios), statistics.pstdev(ratios)
        middle = statistics.mean(entropies)
        sigma = statistics.mean(abs(entropy - middle) for entropy in entropies)
        for t, ratio in enumerate(ratios):
            d = (ratio - mean) / deviation
            omega = math.tanh((tau - entropies[t]) / sigma) / (1 + math.exp(1 - abs(d)))
            expected = told.advantages[row].item() + 0.3 * omega * d
            assert dasd[row, t].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert iw_opd[4:].abs().max() == dasd[4:].abs().max() == 0
    sdpo = assign("sdpo", told, flags())
    assert torch.equal(assign("iw-opd", told, flags(method_option=["gamma=0"])), sdpo)


def test_told_logp_is_that_of_the_same_response_after_another_prompt(told):
    """Prompts of other lengths, the responses' ids untouched."""
    problems = [
        {"problem": f"\\boxed{{{row}}}\n" + "a=1+2;a?\n" * (1 + row % 2)} for row in range(8)
    ]
    ours = hindsight.told_log_probs(
        told, problems, context_of(told, flags(temperature=0.7, micro_tokens=100))
    )
    tokenizer, rollouts = told.context.tokenizer, told.rollouts
    for row, problem in enumerate(problems):
        response = rollouts.ids[row][rollouts.mask[row]]
        start = tokenizer(problem["problem"])["input_ids"]
        logits = told.context.policy.model(torch.tensor([start + response.tolist()])).logits[
            0, len(start) - 1 : -1
        ]
        expected = (logits / 0.7).log_softmax(-1).gather(-1, response[:, None])[:, 0]
        assert_close(ours[row, : len(response)], expected, atol=1e-4, rtol=1e-4)


def test_sdpo_and_hsd_are_told_another_right_rollout(told, monkeypatch):
    """Rollouts 0 and 3 are right. SDPO shows the first other one, HSD any, after the answer;
    log-ratio and ratio.
    """
    texts, prompts = told.rollouts.texts, []
    delta = torch.linspace(-1, 1, told.log_probs.shape[1]).expand_as(told.log_probs)

    def told_logp(batch, problems, args):
        prompts.append([problem["problem"] for problem in problems])
        return told.log_probs + delta

    monkeypatch.setattr(hindsight, "told_log_probs", told_logp)
    inside, scale = told.rollouts.mask, told.advantages[:, None]
    ours = assign("sdpo", told, flags(method_option=["mix=.25"]))
    assert_close(ours[:4], (0.25 * scale + 0.75 * delta * inside)[:4] * inside[:4])
    assert ours[4:].abs().max() == 0  # nobody to learn from
    for _ in range(20):
        assert_close(assign("hsd", told, flags()), (delta.exp() - 1) * inside)
    first, second = (problem["problem"] for problem in told.problems)
    right = [texts[0] + "\n", texts[3] + "\n"]
    assert (
        prompts[0]
        == [right[1] + first, right[0] + first, right[0] + first, right[0] + first] + [second] * 4
    )
    answers = [f"\\boxed{{{problem['answer']}}}\n" for problem in told.problems]
    of_wrong = {shown[1] for shown in prompts[1:]}
    assert of_wrong == {
        right[0] + answers[0] + first,
        right[1] + answers[0] + first,
    }  # twenty draws see both
    assert (
        prompts[1][0] == right[1] + answers[0] + first
        and prompts[1][4:] == [answers[1] + second] * 4
    )


def test_attention_leans_from_focused_to_wide_tokens(told, monkeypatch):
    """Before the middle of the run low entropies weigh more, after it high ones, in the middle
    none; mean 1.
    """
    values = torch.rand(told.rollouts.mask.shape)
    monkeypatch.setattr(salience, "attention_entropy", lambda *inputs, **limits: values)
    inside = told.rollouts.mask[:4]
    z = (values[:4] - values[:4][inside].mean()) / values[:4][inside].std(correction=0)
    for step, slope in ((0, -1), (20, 0), (40, 1)):
        weights = weights_of("attention", with_context(told, step=step))[:4][inside]
        expected = torch.sigmoid(slope * z[inside])
        assert_close(weights, expected / expected.mean(), atol=1e-5, rtol=1e-4)


def test_prm_fills_scores_backward_and_turns_them_for_wrong_rollouts(told):
    """Each token has the score of its own step; the stop token that of the last."""
    weights = weights_of("prm", told)
    scores = score_lines(None, None, told.rollouts)
    for row in range(4):
        good, step = scores[row]
        expected = good[step] if told.advantages[row] > 0 else 1 - good[step]
        assert_close(weights[row, : len(step)], expected)
        assert weights[row, 0] != weights[row, 13]  # lines are 12 tokens


@pytest.mark.parametrize("second", [0.0, math.nan])
def test_pure_against_a_loop_by_its_formula(second, told):
    """r*, suffix sums, leave-one-out baseline, the group's deviation; one without a verdict is as
    if not there.
    """
    batch = with_rewards(told, [1, second, 0, 1, 0, 0, 0, 0])
    ours = assign("pure", batch, flags())
    scores = score_lines(None, None, batch.rollouts)
    for group in (range(4), range(4, 8)):
        graded = [row for row in group if not batch.rewards[row].isnan()]
        returns = {}
        for row in graded:
            good, step = scores[row]
            r = [2 * p - 1 for p in good.tolist()]
            total = sum(math.exp(-x / 0.1) for x in r)
            star = [x * math.exp(-x / 0.1) / total for x in r]
            assert min(r) - 1e-9 <= sum(star) <= sum(r) / len(r) + 1e-9
            returns[row] = [sum(star[k:]) + batch.rewards[row].item() for k in step.tolist()]
        means = {row: sum(values) / len(values) for row, values in returns.items()}
        centred = {}
        for row, values in returns.items():
            baseline = sum(means[other] for other in graded if other != row) / (len(graded) - 1)
            centred[row] = [value - baseline for value in values]
        std = statistics.pstdev(value for values in centred.values() for value in values)
        for row in group:
            expected = torch.tensor(centred.get(row, [])) / std
            assert_close(ours[row, : len(expected)], expected, atol=1e-4, rtol=1e-4)
            assert ours[row, len(expected) :].count_nonzero() == 0


def test_pure_does_not_blow_up_small_differences_of_scores(told, monkeypatch):
    """A group of equal verdicts whose scores differ by a hundredth: advantages stay of that order,
    not of order 1.
    """
    even = []
    for row, (good, step) in enumerate(score_lines(None, None, told.rollouts)):
        even.append((torch.full_like(good, 0.5 + 0.001 * row), step))
    monkeypatch.setattr(methods.reward_model, "score_steps", lambda *inputs: even)
    assert 0 < assign("pure", told, flags())[4:].abs().max() < 0.2


def test_true_errors_and_the_oracle(told):
    """Wrong rollouts keep A on their first wrong step alone, and where none is known on every
    token.
    """
    tokenizer, problem = told.context.tokenizer, told.problems[0]
    careful = toy.demonstrate(problem, toy.random.Random(0), careless=False)
    digit = str((int(careful[11 - 1]) + 1) % 10)
    texts = [careful, careful[:10] + digit + careful[11:], careful, careful]
    rollouts = with_a_stop(tokenizer, [problem["problem"]] * 4, texts)
    rewards = torch.tensor([1.0, 0, 0, 1])
    batch = made_batch(rewards, rollouts, 4, problems=[problem])
    batch = Told(**vars(batch), context=told.context)
    places = true_errors(batch, told.context.task, told.context.tokenizer)
    assert places.tolist() == [[-1, -1], [0, 12], [-1, -1], [-1, -1]]
    weights = weights_of("oracle", batch)
    assert weights[1].tolist() == [1] * 12 + [0] * 16
    assert torch.equal(weights[[0, 2, 3]], rollouts.mask[[0, 2, 3]].float())


def test_position_and_random_are_what_they_say(told):
    """t / T of each rollout's own length; runs of equal draws within [0, 2]."""
    weights = weights_of("position", told)
    length = int(told.rollouts.mask[0].sum())
    assert_close(weights[0, :length], torch.arange(1, length + 1) / length)
    weights = weights_of("random", told)[0, :length]
    assert all(len(run.unique()) == 1 for run in weights.split(5)) and len(weights.unique()) == -(
        -length // 5
    )
    assert weights.min() >= 0 and weights.max() <= 2
    many = assign("random", told, flags(window=1))[:4] / told.advantages[:4, None]
    assert many[told.rollouts.mask[:4]].mean() == pytest.approx(1, abs=0.2)


def test_the_noise_of_oar_g_is_made_anew_by_seed_and_step(told):
    """And is the same again, whatever was drawn before."""
    cases = [
        (with_context(told, step=step), flags(seed=seed)) for step, seed in ((3, 0), (4, 0), (3, 1))
    ]
    ours = [assign("oar-g", *case) for case in cases]
    assert torch.equal(assign("oar-g", told, flags()), ours[0])
    assert len(torch.stack(ours).unique(dim=0)) == 3


def test_shuffle_keeps_each_rollout_s_weights_and_not_their_places():
    """The same numbers in another order, anew with every draw."""
    given = flags(window=4, stride=2)
    batch = drawn_batch([[1, 0, math.nan, 0, 1]], shared=3)
    shear = assign("shear", batch, given)
    torch.manual_seed(0)
    ours, again = (assign("shuffle", batch, given) for _ in range(2))
    assert not torch.equal(ours, shear) and not torch.equal(ours, again)
    for row, inside in enumerate(batch.rollouts.mask):
        assert ours[row][inside].sort().values.tolist() == shear[row][inside].sort().values.tolist()
