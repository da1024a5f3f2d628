"""tasks/toy.py: problems with one answer, demonstrations with known mistakes, an exact verifier."""

import math
import random
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from operator import itemgetter
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
from builders.runs import config_from
from builders.small_models import save_model
from transformers import AutoTokenizer, PreTrainedModel

from grpo import rollout
from rewards import rewards_of
from tasks import toy
from tasks.task import Task

PROBLEM = {"problem": "a=3-6;b=3+a;c=b*7;c?\n", "answer": "0"}
RIGHT = "a=3-6=3-6=7\nb=3+a=3+7=0\nc=b*7=0*7=0\n\\boxed{0}"


def problems() -> list[dict]:
    rng = random.Random(0)
    return [toy.make_problem(rng, 5) for _ in range(300)]


def test_careful_demonstrations_are_right_and_careless_ones_wrong_where_the_verifier_says():
    """There is no error without a wrong line, and no wrong answer without an error.

    Both kinds of demonstration occur, and a product is done as a sum in .55 of them.
    """
    rng = random.Random(0)
    wrong = 0
    found = 0
    starts = set()
    summed = []
    for problem in problems():
        box = rf"\boxed{{{problem['answer']}}}"
        careful = toy.demonstrate(problem, rng, careless=False)
        assert careful.endswith(box) and toy.first_error(problem, careful) is None
        careless = toy.demonstrate(problem, rng)
        for line in toy.LINE.finditer(careless):
            if "*" in line["definition"]:  # by 3, 7 or 9, so that no product is the sum
                total = int(line["left"]) + int(line["right"])
                summed.append(int(line["result"]) == total % 10)
        error = toy.first_error(problem, careless)
        assert error is not None or careless.endswith(box)
        wrong += not careless.endswith(box)
        found += error is not None
        if error:
            starts.add(error.token)
            assert error.kind in ("arith", "lookup", "operator")
    assert 150 < wrong <= found < 280  # most are wrong, and few wrong lines leave the answer right
    assert {0, 12} <= starts
    assert all((a * b - a - b) % 10 for a, b in product(range(10), (3, 7, 9)))
    assert statistics.mean(summed) == pytest.approx(0.55, abs=0.04)  # two standard errors


def test_answers_are_those_of_an_independent_evaluation():
    """They are those of Python's own arithmetic on the substituted definitions, mod 10.

    `*` has a literal factor 3, 7 or 9.
    """
    for problem in problems():
        *definitions, query = problem["problem"].strip().split(";")
        values = {}
        for definition in definitions:
            label, expression = definition.split("=")
            if "*" in expression:
                assert expression[2] in "379"
            values[label] = eval(expression, {}, values)
        assert str(values[query[0]] % 10) == problem["answer"]
        used = []
        for definition in definitions:
            used += [symbol for symbol in definition[2:] if symbol in toy.LABELS]
        assert sorted(used) == sorted(values)[:-1]  # every value but the last is used exactly once
        assert used == sorted(used)


@pytest.mark.parametrize(
    "old, new, token, kind, end",
    [
        ("=3-6=7", "=3-6=8", 0, "arith", 12),  # a line of 12 tokens, its end of line among them
        ("=3+7=0", "=3+7=1", 12, "arith", 24),
        ("=3+7=0", "=3+8=1", 12, "lookup", 24),
        ("=3+7=0", "=3-7=6", 12, "operator", 24),
        ("b=3+a=", "b=4+a=", 12, "copy", 24),
        ("c=b*7=0*7=0\n", "b=3+a=3+7=0\n", 24, "repeat", 36),
        ("a=3-6=3-6=7\n", "", 0, "order", 12),
        ("c=b*7=0*7=0", "c=b*7=0*7", 24, "format", 34),
        ("boxed{0}", "boxed{1}", 36, "final", 39),
        ("boxed{0}", "boxed{0}\n", 36, "format", 40),
        ("\\boxed{0}", "", 36, "format", 37),  # the stop token stands where the box should
        ("c=b*7=0*7=0\n", "c=4\n", 24, "shortcut", 28),
    ],
)
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
    assert few.get_vocab().items() < many.get_vocab().items()
    assert len(few) == 29 and len(many) == 29 + 18
    problem = toy.make_problem(random.Random(0), 24)
    response = toy.demonstrate(problem, random.Random(0), careless=False)
    ids = many(problem["problem"] + response)["input_ids"]
    assert many.decode(ids) == problem["problem"] + response
    assert len(many(response)["input_ids"]) + 1 == toy.response_tokens(24)
    assert toy.make_model(24, seed=0, width=8).get_input_embeddings().num_embeddings == len(many)
    assert toy.first_error(problem, toy.SYMBOL.findall(response)) is None


def test_demonstrations_of_many_lines_are_right_as_often_as_those_of_eight():
    """Mistakes are rarer by the number of lines, so that about as many responses are right."""
    rng = random.Random(0)
    right = {}
    for lines in (8, 24):
        count = 0
        for _ in range(600):
            problem = toy.make_problem(rng, lines)
            count += toy.first_error(problem, toy.demonstrate(problem, rng)) is None
        right[lines] = count / 600
    assert right[8] == pytest.approx(0.15, abs=0.05)  # three standard errors
    assert right[24] == pytest.approx(right[8], abs=0.07)


def test_special_tokens_in_a_response_are_tokens_and_faults():
    """A sampled <pad> counts as one token, so that the index is that of the sampled ids."""
    assert toy.first_error(PROBLEM, RIGHT.replace("b=3+a", "b=3+<pad>a"))[:2] == (12, "format")
    assert toy.first_error(PROBLEM, "<pad>" + RIGHT[:12] + "x")[:2] == (0, "format")


def test_held_out_problems_are_not_trained_on():
    """No prompt is on both sides; too small a space gives fewer held-out problems."""
    train, heldout = toy.make_problems(2000, 100, 2, seed=4)
    asked = {problem["problem"] for problem in heldout}
    assert len(asked) == len(heldout) == 100 and not asked & {
        problem["problem"] for problem in train
    }
    train, heldout = toy.make_problems(1, 1000, 1, seed=0)
    assert len(heldout) == 10 * (10 + 10 + 3) and not train


def test_tokenizer_has_one_token_a_symbol_and_survives_saving(tmp_path):
    """AutoTokenizer loads the folder and gives the same ids."""
    tokenizer = toy.make_tokenizer()
    loaded = AutoTokenizer.from_pretrained(save_model(tmp_path, toy.make_model(3, seed=0)))
    text = PROBLEM["problem"] + RIGHT
    for one in (tokenizer, loaded):
        ids = one(text)["input_ids"]
        assert len(ids) == len(toy.SYMBOL.findall(text)) and one.decode(ids) == text
        assert [toy.SYMBOLS[i] for i in ids] == toy.SYMBOL.findall(text)
        assert (one.pad_token_id, one.eos_token_id) == (0, 1)
    assert len(toy.SYMBOL.findall(RIGHT)) + 1 == toy.response_tokens(3)


def test_warm_up_teaches_the_format_and_leaves_no_gradient():
    """A few steps bring the loss down, and leave no gradient behind.

    One that is left would leak into the first policy update; one that is not finite ends the
    warm-up.
    """
    model = toy.make_model(2, seed=0, width=64)
    first = toy.warm_up(model, 2, set(), steps=1, seed=0)
    last = toy.warm_up(model, 2, set(), steps=25, seed=1)
    assert last < 0.75 * first
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="non-finite"):
        toy.teach(model, lambda: model.lm_head.weight.sum() * math.nan, 1, "warm-up")


# ---- the start that ships with the project -------------------------------------------------------


class WarmUp(NamedTuple):
    """The warm-up of a run, its model before it, and its task."""

    do: Callable[[], float]
    model: PreTrainedModel
    task: Task


def warm_up_of(*flags: str) -> WarmUp:
    """The warm-up of a run with these flags."""
    config = config_from(list(flags))
    task, _ = toy.task(config, toy.make_tokenizer(config.toy_lines), "made here")
    model = toy.make_model(config.toy_lines, config.seed, config.toy_width)
    forbidden = set(map(itemgetter("problem"), task.heldout))
    do = partial(task.warm_up, model, forbidden=forbidden, steps=config.warmup_steps)
    return WarmUp(do, model, task)


def test_the_default_run_reads_its_warm_up(monkeypatch):
    """Another seed or size is taught, an edited warm-up, and one that is asked for."""
    monkeypatch.setattr(torch.optim, "Adam", Mock(side_effect=InterruptedError))

    def is_taught(*flags: str) -> bool:
        try:
            warm_up_of(*flags).do()
        except InterruptedError:
            return True
        return False

    assert not is_taught() and not is_taught("--steps", "3", "--method", "grpo")
    for flags in "--seed 1", "--toy-width 64", "--heldout 500", "--warmup-steps 600":
        assert is_taught(*flags.split())
    for name, edited in ("MISCONCEPTION", 0.5), ("BATCH", 16), ("START", toy.START / "none"):
        with monkeypatch.context() as patch:
            patch.setattr(toy, name, edited)
            assert is_taught()


def test_an_edit_of_the_code_is_another_warm_up(monkeypatch):
    """The digest has the source of the functions that make and teach the model."""
    model = toy.make_model(1, seed=0, width=16)
    facts = toy.facts_of_warm_up(model, 1, set(), 1, 0)
    for name in "make_model", "batch_loss", "teach":
        with monkeypatch.context() as patch:
            patch.setattr(toy, name, warm_up_of)
            assert toy.facts_of_warm_up(model, 1, set(), 1, 0)["digest"] != facts["digest"]


def test_no_demonstration_of_the_start_shows_a_held_out_problem():
    """The start was taught the demonstrations of these random numbers."""
    forbidden = set(map(itemgetter("problem"), warm_up_of().task.heldout))
    rng = toy.demonstration_rng(0)
    for _ in range(config_from([]).warmup_steps):
        shown = {problem["problem"] for problem, _ in toy.demonstrations(5, forbidden, rng)}
        assert not shown & forbidden


@pytest.mark.long
def test_the_start_is_what_the_warm_up_makes():
    """Taught anew, the model solves as many held-out problems, within three points."""
    accuracies = []
    for flags in "", "--warmup-steps 600":
        warm_up = warm_up_of(*flags.split())
        warm_up.do()
        heldout = warm_up.task.heldout
        prompts = [problem["problem"] for problem in heldout]
        limits = dict(max_tokens=toy.response_tokens(5), temperature=0.0)
        rollouts = rollout(warm_up.model, toy.make_tokenizer(), prompts, 1, **limits)
        accuracies.append(rewards_of(warm_up.task.verdicts(heldout, rollouts)).mean())
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.03) and accuracies[0] > 0.25
