"""The word problems: first errors, against responses written by hand, and their lessons."""

import math
import random
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from builders.case_files import cases
from builders.commands import run_well
from builders.rollouts import rollouts_of
from builders.small_models import byte_tokenizer, save_model, small_config
from tokenizers import decoders
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaConfig, LlamaForCausalLM

import lab.tasks  # noqa: F401 - enters the task
import train
from credit.tokens import tokens_of
from grpo import Policy
from harness.files import config_of, read_lines
from lab.tools import warm_up, words
from rewards import grade_math

LAB_CASES = Path(__file__).parent / "cases"


@pytest.mark.parametrize("case", cases("first_errors.jsonl", LAB_CASES))
def test_a_wrong_response_is_wrong_from_its_first_error_on(case):
    """A | stands before the first error, or one on each side of it.

    Tokens may be of any size. A response that is right has no error, and one that cannot be read
    has none that is known.
    """
    before, *rest = case["marked"].split("|")
    text = before + "".join(rest)
    error = words.first_error(case, list(text))
    if case["kind"] in ("right", "unknown"):
        assert error is None
        return
    assert error.kind == case["kind"] and error.token == len(before) < error.end <= len(text)
    assert len(rest) == 1 or text[error.token : error.end] == rest[0]
    for size in (2, 3, 7):
        tokens = [text[start : start + size] for start in range(0, len(text), size)]
        token = error.token // size
        place = (token, case["kind"], (error.end - 1) // size + 1)
        assert words.first_error(case, tokens) == place


def test_tokens_are_parts_of_the_text_also_where_one_alone_is_decoded_otherwise():
    """A character of several tokens belongs to the last one.

    Llama's decoder drops the space that a text begins with.
    """
    bytes_alone = byte_tokenizer()
    as_llama = byte_tokenizer()
    as_llama.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]
    )
    text = "4 \u00d7 3 = 12, 12 - 8 = 4 \\boxed{4}"
    problem = {"answer": "5", "steps": [[4, "*", 3, 12], [12, "-", 7, 5]]}
    for tokenizer in (bytes_alone, as_llama):
        tokens = tokens_of(tokenizer, rollouts_of(tokenizer, ["?"], [text]), 0)
        assert "".join(tokens) == text + "<|endoftext|>" and len(tokens) == len(text.encode()) + 1
        assert tokens[words.first_error(problem, tokens).token] == "8"


def test_demonstrations_are_right_but_for_their_slips():
    """A careful one is right and has no error; a careless one that is wrong has one.

    Of the careless ones that are right, 2% at most have one.
    """
    rng = random.Random(0)
    wrong = 0
    lucky = 0
    for problem in words.make_problems(1000, seed=0):
        careful = words.demonstrate(problem, rng, careless=False)
        careless = words.demonstrate(problem, rng)
        assert words.first_error(problem, list(careful)) is None
        assert grade_math(careful, problem["answer"]).reward == 1
        is_right = f"boxed{{{problem['answer']}}}" in careless
        has_error = words.first_error(problem, list(careless)) is not None
        assert is_right or has_error
        wrong += not is_right
        lucky += is_right and has_error
    assert 0.35 < wrong / 1000 < 0.5 and lucky / 1000 < 0.02  # 1 - .85^3.5 = .43


def test_problems_are_different_and_of_whole_numbers():
    """They have two to five steps, each of which goes on from the one before."""
    problems = words.make_problems(700, seed=1)
    assert len({problem["problem"] for problem in problems}) == 700
    for problem in problems:
        value, *numbers = map(int, re.findall(r"\d+", problem["problem"]))
        assert 2 <= len(numbers) <= 5
        for step, number in zip(problem["steps"], numbers, strict=True):
            assert list(step[::2]) == [value, number]
            value = words.result_of(step[1], value, number)
            assert step[3] == value >= 0
        assert problem["answer"] == str(value)


def test_warm_up_teaches_the_form(monkeypatch):
    """A model of random weights knows a lesson better after some steps.

    No forbidden problem is shown. Prompts end where responses begin, and responses end with the
    stop token.
    """
    tokenizer = byte_tokenizer()
    model = LlamaForCausalLM(small_config(LlamaConfig, vocab_size=len(tokenizer)))
    seen = []
    shown = []

    def prompt(problem: dict) -> str:
        shown.append(problem["problem"])
        return problem["problem"] + "\n"

    def note(module: torch.nn.Module, inputs: tuple) -> None:
        if isinstance(module, Policy):
            seen.append(inputs[0])

    def teach(steps: int, seed: int, forbidden: set[str]) -> float:
        rng = random.Random(seed)
        make = partial(words.make_problem, rng)
        show = partial(words.demonstrate, rng=rng)
        options = dict(steps=steps, tokenizer=tokenizer, prompt=prompt, make=make, show=show)
        return warm_up.imitate(model, forbidden, **options)

    hook = register_module_forward_pre_hook(note)
    first = teach(1, 0, set())
    hook.remove()
    assert first == pytest.approx(math.log(len(tokenizer)), abs=0.5)  # nats per token
    forbidden = set(shown[:8])
    shown.clear()
    monkeypatch.setattr(warm_up, "PRETRAINED_LR", 1e-2)
    assert teach(15, 0, forbidden) < 0.7 * first
    assert not forbidden & {*shown}
    rollouts = seen[0]
    assert rollouts.prompt_mask[:, -1].all()
    ends = rollouts.ids.gather(1, rollouts.mask.sum(1, keepdim=True) - 1)
    assert (ends == tokenizer.eos_token_id).all()


def test_training_begins_with_lessons_unless_the_model_has_had_them(tmp_path, capsys):
    """A folder that knows nothing of the task is taught, and kept as a start of its own.

    So the lessons are paid for once.
    """
    tokenizer = byte_tokenizer()
    config = small_config(LlamaConfig, vocab_size=len(tokenizer), max_position_embeddings=512)
    model = save_model(tmp_path / "model", LlamaForCausalLM(config), tokenizer)
    sizes = "--task words --steps 1 --warmup-steps 1 --heldout 2 --eval-groups 2 --max-tokens 8"
    sizes += " --prompts-per-step 2 --prompts-per-update 2 --rollouts-per-prompt 2"
    sizes += " --use builders.alternating"
    one = tmp_path / "one"
    two = tmp_path / "two"
    run_well(train, sizes, "--out", tmp_path, "--model", model, "--name one")
    assert "warm-up: 1 steps" in capsys.readouterr().out
    assert (one / "start" / "config.json").exists() and config_of(one)["template"] == "plain"
    run_well(train, sizes, "--out", tmp_path, "--model", one / "start", "--name two")
    assert "warm-up" not in capsys.readouterr().out and not (two / "start").exists()
    # the evaluation before training is the same start's
    assert read_lines(one / "metrics.jsonl")[0] == read_lines(two / "metrics.jsonl")[0]
