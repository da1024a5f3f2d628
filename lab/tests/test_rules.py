"""Credit rules: what holds for every one of them, how they are listed, started and refused."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders.case_files import cases
from builders.commands import words_of
from builders.runs import ALONE, config_from
from builders.small_models import save_model
from crediting import assign, with_rewards
from torch.testing import assert_close

import train
from credit.batch import Batch
from credit.rules import RULES
from grpo import Rollouts, to_padded
from harness.run import load_run, prepare_rule
from lab.rules import adapter, prm
from lab.tools import teacher

LAB_CASES = Path(__file__).parent / "cases"
WITH_ADAPTER = {name for name in RULES if RULES[name].prepare is adapter.needs_adapter}
WITH_MODEL = {name for name in RULES if RULES[name].prepare is prm.load}


def pad_more(rollouts: Rollouts, left: int, right: int) -> Rollouts:
    """The same rollouts with more padding on both sides; what stands in it must not matter."""
    pad = torch.nn.functional.pad
    masks = dict(
        prompt_mask=pad(rollouts.prompt_mask, (left, 0)), mask=pad(rollouts.mask, (0, right))
    )
    prompt_ids = torch.cat(
        [torch.randint(0, 20, (len(rollouts.texts), left)), rollouts.prompt_ids], 1
    )
    ids = torch.cat([rollouts.ids, torch.randint(0, 20, (len(rollouts.texts), right))], 1)
    return replace(rollouts, prompt_ids=prompt_ids, ids=ids, **masks)


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


@pytest.mark.parametrize("rule", [*RULES])
def test_every_rule_gives_finite_token_advantages_that_padding_and_order_leave_alone(rule, told):
    """Token advantages are (B, T), without gradient, and 0 outside of the mask.

    Without contrast there are none, except from `pure`, whose scores differ.
    """
    torch.manual_seed(5)
    ours = assign(rule, told)
    assert ours.shape == told.mask.shape and not ours.requires_grad
    assert ours.isfinite().all() and ours[:4].abs().max() > 0
    assert ours[~told.mask].abs().max() == 0
    assert (ours[4:].abs().max() == 0) == (rule != "pure")
    # if it weighs, tokens of right rollouts are never punished, of wrong ones never rewarded
    assert (ours * told.A >= 0).all() or not RULES[rule].weighs
    # `negative` is a factor of wrong rollouts alone
    torch.manual_seed(5)
    scaled = assign("scaled", told, f"of={rule}", "negative=.25")
    assert_close(scaled, torch.where(told.correct[:, None], ours, 0.25 * ours))
    if not RULES[rule].needs_states:
        torch.manual_seed(5)
        assert torch.equal(assign(rule, replace(told, hidden=None)), ours)
    wide = wider(told, 3)  # filled with garbage
    torch.manual_seed(5)
    padded = assign(rule, wide)
    assert_close(padded[:, :-3], ours, atol=2e-5, rtol=1e-4)
    assert padded[:, -3:].abs().max() == 0
    # draws and peers follow the order
    if rule not in {"random", "shuffle"}:
        order = [6, 5, 4, 7, 3, 0, 1, 2]
        exchanged = assign(rule, reordered(told, order))
        # the gradient of a KL of 1e-7 nats has four digits in float32
        assert_close(exchanged, ours[order], atol=1e-3 if rule == "oar-g" else 2e-5, rtol=1e-4)
    alone = with_rewards(told, [1] + [math.nan] * 7)
    # no NaN, and no division by the deviation of a single rollout
    assert assign(rule, alone).abs().max() == 0
    assert assign("scaled", alone, f"of={rule}", "mean1=yes").abs().max() == 0


# Of the whole batch; oar-p's are of the mixed group's rollouts: as it is, and all masked versions.
PASSES = {"oar-g": 2 * 4, "oar-p": 2 * 4, "arca": 1, "own-baseline": 1}


@pytest.mark.parametrize("rule", [*RULES])
def test_a_rule_pays_for_its_own_passes_and_leaves_gradients_alone(rule, told):
    """Forward passes are counted in tokens; no parameter's `.grad` is touched."""
    model = told.policy.model
    parameters = list(model.parameters())
    trainable = [parameter.requires_grad for parameter in parameters]
    seen = []

    def count(module, inputs, kwargs):
        given = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        seen.append(given.shape[0] * given.shape[1])

    hook = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    assign(rule, told, micro_tokens=100_000)
    assert len(seen) == PASSES.get(rule, 0)
    seen.clear()
    assign(rule, told, micro_tokens=90)
    hook.remove()
    assert all(tokens <= 90 for tokens in seen)
    assert all(parameter.grad is None for parameter in parameters)
    assert trainable == [parameter.requires_grad for parameter in parameters]


# ---- before the first step -----------------------------------------------------------------------


NEEDY = [rule for rule in RULES if RULES[rule].prepare]


@pytest.mark.parametrize("rule", [*NEEDY, "scaled --method-option of=prm"])
def test_rules_that_need_something_start_with_the_defaults(rule, tmp_path):
    """Each finds what it needs on the embedded task; an adapter is asked for.

    Prompts that tell an answer or a response fit into its model's context, too.
    """
    adapter = "--use lab.tools.lora:rank=2" if rule in WITH_ADAPTER else ""
    run = load_run(config_from(words_of("--method", rule, adapter)), ALONE)
    has_model = rule in WITH_MODEL or "of=prm" in rule
    if has_model:  # as after its warm-up, which take minutes
        lines = run.config.toy_lines
        taught = teacher.make_prm(run.context.policy.model, lines, set(), steps=1, seed=0)
        save_model(tmp_path / "prm", taught[0], taught[1])
    prepare_rule(run, tmp_path)
    assert bool(run.context.kept.get("prm")) == has_model


@pytest.mark.parametrize("case", cases("rule_refusals.jsonl", LAB_CASES))
def test_a_rule_that_lacks_what_it_needs_is_refused(case, assert_refused, qwen_folder, tmp_path):
    """It is refused before the first step, in one sentence."""
    flags = case["flags"].replace("QWEN", f"{qwen_folder} --data {tmp_path / 'data.jsonl'}")
    (tmp_path / "data.jsonl").write_text(case.get("data", ""))
    words = words_of(flags, "--out", tmp_path, "--name mine")
    assert_refused(train.main, words, case["words"])
    assert not (tmp_path / "mine" / "metrics.jsonl").exists()
