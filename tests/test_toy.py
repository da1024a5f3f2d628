"""tasks/toy.py: problems with one answer, demonstrations with known mistakes, an exact verifier."""

import math
import random
import re
import statistics
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from builders.runs import config_from
from transformers import AutoTokenizer, PreTrainedModel

from grpo import rollout
from rewards import rewards_of
from tasks import toy
from tasks.task import Task

PROBLEM = {"problem": "a=3-6;b=3+a;c=b*7;c?\n", "answer": "0"}
RIGHT = "a=3-6=3-6=7\nb=3+a=3+7=0\nc=b*7=0*7=0\n\\boxed{0}"


def test_careful_demonstrations_are_right_and_careless_ones_wrong_where_the_verifier_says():
    """There is no error without a wrong line, and no wrong answer without an error.

    Both kinds of demonstration occur, and a product is done as a sum in .55 of them.
    """
    rng = random.Random(0)
    wrong = 0
    errors = []
    summed = []
    for _ in range(300):
        problem = toy.make_problem(rng, 5)
        box = rf"\boxed{{{problem['answer']}}}"
        careful = toy.demonstrate(problem, rng, careless=False)
        assert careful.endswith(box) and toy.first_error(problem, careful) is None
        careless = toy.demonstrate(problem, rng)
        for left, right, result in re.findall(r"\*.=(.)\*(.)=(.)", careless):
            # by 3, 7 or 9, so that no product is the sum
            summed.append((int(left) + int(right)) % 10 == int(result))
        error = toy.first_error(problem, careless)
        assert error is not None or careless.endswith(box)
        wrong += not careless.endswith(box)
        if error:
            errors.append(error)
    assert 150 < wrong <= len(errors) < 280  # few wrong lines leave the answer right
    assert {error.token for error in errors} >= {0, 12}
    assert {error.kind for error in errors} == {"arith", "lookup", "operator"}
    assert statistics.mean(summed) == pytest.approx(0.55, abs=0.04)  # two standard errors


def test_answers_are_those_of_an_independent_evaluation():
    """They are those of Python's own arithmetic on the substituted definitions, mod 10.

    `*` has a literal factor 3, 7 or 9, and each value but the last is used once, in order.
    """
    rng = random.Random(0)
    for _ in range(300):
        problem = toy.make_problem(rng, 5)
        *definitions, query = problem["problem"].strip().split(";")
        values = {}
        used = []
        for definition in definitions:
            label, expression = definition.split("=")
            assert "*" not in expression or expression[2] in "379"
            used += [symbol for symbol in expression if symbol in toy.LABELS]
            values[label] = eval(expression, {}, values)
        assert str(values[query[0]] % 10) == problem["answer"]
        assert used == list(values)[:-1]


@pytest.mark.parametrize(
    "old, new, token, kind, end",
    [
        ("=3+7=0", "=3+7=1", 12, "arith", 24),  # a line of 12 tokens, its end of line among them
        ("=3+7=0", "=3+8=1", 12, "lookup", 24), ("=3+7=0", "=3-7=6", 12, "operator", 24),
        ("b=3+a=", "b=4+a=", 12, "copy", 24), ("c=b*7=0*7=0\n", "b=3+a=3+7=0\n", 24, "repeat", 36),
        ("a=3-6=3-6=7\n", "", 0, "order", 12), ("c=b*7=0*7=0", "c=b*7=0*7", 24, "format", 34),
        ("c=b*7=0*7=0\n", "c=4\n", 24, "shortcut", 28), ("boxed{0}", "boxed{1}", 36, "final", 39),
        ("boxed{0}", "boxed{0}\n", 36, "format", 40),
        ("\\boxed{0}", "", 36, "format", 37),  # the stop token stands where the box should
        ("b=3+a", "b=3+<pad>a", 12, "format", 25),  # a sampled <pad> is a token, and a fault
    ],
)  # fmt: skip
def test_first_error_names_kind_and_tokens(old, new, token, kind, end):
    """Each row makes one change to a right response.

    The tokens are the first of the changed step and the one after its last.
    """
    assert toy.first_error(PROBLEM, RIGHT) is None and old in RIGHT
    # a line without work counts by its value
    assert toy.first_error(PROBLEM, RIGHT.replace("c=b*7=0*7=0", "c=0")) is None
    assert toy.first_error(PROBLEM, RIGHT.replace(old, new)) == (token, kind, end)


def test_steps_after_an_error_are_judged_by_the_response_s_own_values():
    """A consistent continuation adds no second error.

    Another mistake before the error moves the first error.
    """
    consistent = "a=3-6=3-6=5\nb=3+a=3+5=8\nc=b*7=8*7=6\n\\boxed{6}"
    assert toy.first_error(PROBLEM, consistent)[:2] == (0, "arith")
    later = "a=3-6=3-6=7\nb=3+a=3+7=1\nc=b*7=1*7=7\n\\boxed{7}"
    assert toy.first_error(PROBLEM, later) == (12, "arith", 24)


def test_more_than_eight_lines_have_further_labels_and_a_vocabulary_of_their_own():
    """The default's vocabulary is as it was; that of 24 lines begins with it."""
    few, many = toy.make_tokenizer(), toy.make_tokenizer(24)
    assert few.get_vocab().items() < many.get_vocab().items() and len(few) == 29
    problem = toy.make_problem(random.Random(0), 24)
    response = toy.demonstrate(problem, random.Random(0), careless=False)
    ids = many(response)["input_ids"]
    assert many.decode(ids) == response and len(ids) + 1 == toy.response_tokens(24)
    assert toy.first_error(problem, response) is None
    assert toy.make_model(24, seed=0, width=8).vocab_size == len(many)


def test_demonstrations_of_many_lines_are_right_as_often_as_those_of_eight():
    """Mistakes are rarer by the number of lines, so that about as many responses are right."""
    rng = random.Random(0)
    for lines in (8, 24):
        right = 0
        for _ in range(600):
            problem = toy.make_problem(rng, lines)
            right += toy.first_error(problem, toy.demonstrate(problem, rng)) is None
        assert 0.1 < right / 600 < 0.25


def test_held_out_problems_are_not_trained_on():
    """No prompt is on both sides; too small a space gives fewer held-out problems."""
    train, heldout = toy.make_problems(2000, 100, 2, seed=4)
    asked = {problem["problem"] for problem in heldout}
    assert len(asked) == len(heldout) == 100
    assert not [problem for problem in train if problem["problem"] in asked]
    train, heldout = toy.make_problems(1, 1000, 1, seed=0)
    assert len(heldout) == 10 * (10 + 10 + 3) and not train


def test_tokenizer_has_one_token_a_symbol_and_survives_saving(untaught):
    """AutoTokenizer loads a model's folder and gives the same ids."""
    text = PROBLEM["problem"] + RIGHT
    for tokenizer in (toy.make_tokenizer(), AutoTokenizer.from_pretrained(untaught)):
        ids = tokenizer(text)["input_ids"]
        assert [toy.SYMBOLS[i] for i in ids] == toy.SYMBOL.findall(text)
        assert tokenizer.decode(ids) == text
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert len(toy.SYMBOL.findall(RIGHT)) + 1 == toy.response_tokens(3)


def test_warm_up_teaches_the_format_and_leaves_no_gradient():
    """A gradient that is left would leak into the first policy update; NaN ends the warm-up."""
    model = toy.make_model(2, seed=0, width=64)
    first = toy.warm_up(model, 2, set(), steps=1, seed=0)
    assert toy.warm_up(model, 2, set(), steps=25, seed=1) < 0.75 * first
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="non-finite"):
        toy.teach(model, lambda: model.lm_head.weight.sum() * math.nan, 1, "warm-up")


# ---- the start that ships with the project -------------------------------------------------------


def warm_up_of(flags: str = "") -> tuple[Callable[[], float], PreTrainedModel, Task]:
    """The warm-up of a run with these flags, its model before it, and its task."""
    config = config_from(flags.split())
    task, _ = toy.task(config, toy.make_tokenizer(config.toy_lines), "made here")
    model = toy.make_model(config.toy_lines, config.seed, config.toy_width)
    forbidden = {problem["problem"] for problem in task.heldout}
    warm_up = partial(task.warm_up, model, forbidden=forbidden, steps=config.warmup_steps)
    return warm_up, model, task


def test_the_default_run_reads_its_warm_up(monkeypatch):
    """Another seed or size is taught, an edited warm-up, and one that is asked for."""
    monkeypatch.setattr(torch.optim, "Adam", Mock(side_effect=InterruptedError))

    def is_taught(flags: str) -> bool:
        warm_up, *_ = warm_up_of(flags)
        try:
            warm_up()
        except InterruptedError:
            return True
        return False

    assert not is_taught("--steps 3 --method grpo")
    for flags in "--seed 1", "--toy-width 64", "--heldout 500", "--warmup-steps 600":
        assert is_taught(flags)
    for name, edited in ("MISCONCEPTION", 0.5), ("BATCH", 16), ("START", toy.START / "none"):
        with monkeypatch.context() as patch:
            patch.setattr(toy, name, edited)
            assert is_taught("")


def test_an_edit_of_the_code_is_another_warm_up(monkeypatch):
    """The digest has the source of the functions that make and teach the model."""
    model = toy.make_model(1, seed=0, width=16)
    digests = set()
    for name in "unused", "make_model", "batch_loss", "teach":
        with monkeypatch.context() as patch:
            patch.setattr(toy, name, warm_up_of, raising=False)
            digests.add(toy.facts_of_warm_up(model, 1, set(), 1, 0)["digest"])
    assert len(digests) == 4


def test_no_demonstration_shows_a_held_out_problem():
    """A warm-up that showed them would teach their answers."""
    _, heldout = toy.make_problems(1, 100, 1, seed=0)
    forbidden = {problem["problem"] for problem in heldout}
    shown = toy.demonstrations(1, forbidden, random.Random(0))
    assert len(shown) == toy.BATCH
    assert not [problem for problem, _ in shown if problem["problem"] in forbidden]


@pytest.mark.long
def test_the_start_is_what_the_warm_up_makes():
    """Taught anew, the model solves about as many held-out problems.

    Processors round differently, and training makes that points.
    """
    accuracies = []
    for flags in "", "--warmup-steps 600":
        warm_up, model, task = warm_up_of(flags)
        warm_up()
        prompts = [problem["problem"] for problem in task.heldout]
        limits = dict(max_tokens=toy.response_tokens(5), temperature=0.0)
        rollouts = rollout(model, toy.make_tokenizer(), prompts, 1, **limits)
        accuracies.append(rewards_of(task.verdicts(task.heldout, rollouts)).mean())
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.1) and accuracies[0] > 0.25
