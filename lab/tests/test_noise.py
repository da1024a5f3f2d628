"""The task made for SHEAR's theory: what decides, what is random, and the exact gradient."""

import random
from collections import Counter

import pytest
import torch
from builders.commands import words_of
from builders.rollouts import rollouts_of
from builders.runs import ALONE
from edited import TINY
from scipy import stats

import lab.tasks  # noqa: F401 - enters the tasks
from credit.batch import Batch
from harness.run import load_run
from lab.studies import gradients
from lab.tools import noise
from rewards import Verdict, grade_math
from tasks import toy

PROBLEM = {"problem": "3+7-2?\n", "answer": "3"}


@pytest.mark.parametrize("name", noise.CELLS)
def test_only_the_digit_decides(name):
    """Before the box, right and wrong demonstrations have one law; what is random is as named."""
    rng = random.Random(0)
    cell = noise.CELLS[name]
    before = {True: Counter(), False: Counter()}  # of right and of wrong responses
    after = Counter()  # of the right ones
    for _ in range(2000):
        tokens = noise.demonstrate(PROBLEM, cell, 2, rng)
        place = noise.digit_place(tokens)
        is_right = grade_math("".join(tokens), "3").reward == 1.0
        assert is_right == (tokens[place] == "3")
        before[is_right].update(tokens[: place - 1])
        if is_right:
            after.update(tokens[place + 2 :])
    assert stats.binomtest(after.total() // 8, 2000, noise.RIGHT).pvalue > 0.001
    assert sorted(before[False]) == (list(noise.BEFORE) if cell.before else [noise.FIXED])
    counts = [[side[letter] for letter in before[False]] for side in before.values()]
    assert not cell.before or stats.chi2_contingency(counts).pvalue > 0.001
    assert sorted(after) == (noise.letters_of("3") if cell.after else ["3"])


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (r"abca\boxed{3}33", None),
        (r"abca\boxed{4}44", (5, "digit", 6)),
        (r"\boxed{3}b\boxed{4}", (5, "digit", 6)),  # the last box counts, as in grading
        (r"abc\boxed{", (3, "form", 4)),
        ("", (0, "form", 1)),
    ],
)
def test_the_first_error_is_the_digit(response, error):
    assert noise.first_error(PROBLEM, toy.SYMBOL.findall(response)) == error


def test_the_reference_is_the_gradient_of_the_chance_of_a_right_digit():
    """It is taken here by autograd through the softmax; a rollout without a box has no chance."""
    run = load_run(gradients.settings_of_run(words_of(TINY, "--task noise-both")), ALONE)
    task = run.context.task
    tokenizer = run.context.tokenizer
    problems = task.train[:2]
    texts = [r"abcd\boxed{3}ef", r"bb\boxed{7}", "abc", r"a\boxed{0}33"] * 2
    prompts = [task.prompt(problem) for problem in problems for _ in range(4)]
    rollouts = rollouts_of(tokenizer, prompts, texts)
    verdicts = [Verdict(float(row % 2), "drawn") for row in range(8)]
    batch = Batch.of(rollouts, verdicts, problems)
    model = run.context.policy.model
    terms = []  # of each rollout: log pi of the tokens before the box or of all, and the chance
    for row, text in enumerate(texts):
        place = noise.digit_place(toy.SYMBOL.findall(text))
        prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
        ids = torch.cat([prompt, rollouts.ids[row, : place or batch.lengths[row]]])
        log_probs = model(input_ids=ids[None]).logits[0].log_softmax(-1)  # (L, V)
        of_prefix = log_probs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])
        answer = toy.IDS[problems[row // 4]["answer"]]
        chance = log_probs[-1, answer].exp() if place else torch.zeros(())
        terms.append((of_prefix.sum(), chance))
    prefixes, chances = (torch.stack(column) for column in zip(*terms, strict=True))  # (8,) each
    groups = chances.detach().view(2, 4)
    gaps = (groups - (groups.sum(1, keepdim=True) - groups) / 3).flatten()
    objective = (chances + gaps * prefixes).sum() / batch.mask.sum()
    expected = torch.autograd.grad(objective, model.parameters())
    exact, credit = noise.exact_credit(batch, run.context)
    (ours,) = gradients.gradients_of(run, exact, credit[None], 10**9)
    torch.testing.assert_close(ours, torch.cat([part.flatten() for part in expected]))


def test_the_gradient_test_runs_on_it(tmp_path, capsys):
    """With the task's warm-up, and a rule that needs first errors."""
    rows = tmp_path / "rows.jsonl"
    flags = words_of(TINY, "--task noise-after --arms grpo oracle --batches 2 --reference 2")
    gradients.main([*flags, "--rows", str(rows)])
    assert "| oracle |" in capsys.readouterr().out
