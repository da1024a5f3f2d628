"""The word problems: first errors, against responses written by hand, and the warm-up."""

import random
from pathlib import Path

import pytest
from builders.case_files import cases
from builders.commands import run_well
from builders.small_models import byte_tokenizer, save_model, small_config
from transformers import LlamaConfig, LlamaForCausalLM

import lab.tasks  # noqa: F401 - enters the task
import train
from lab.tools import words
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


def test_demonstrations_are_right_but_for_their_slips():
    """A careful one is right and has no error; a careless one that is wrong has one."""
    rng = random.Random(0)
    wrong = 0
    for problem in words.make_problems(1000, seed=0):
        careful = words.demonstrate(problem, rng, careless=False)
        careless = words.demonstrate(problem, rng)
        assert words.first_error(problem, list(careful)) is None
        assert grade_math(careful, problem["answer"]).reward == 1
        is_right = f"boxed{{{problem['answer']}}}" in careless
        assert is_right or words.first_error(problem, list(careless))
        wrong += not is_right
    assert 0.35 < wrong / 1000 < 0.5  # 1 - .85^3.5 = .43


@pytest.mark.long
def test_training_begins_with_a_warm_up_unless_the_model_has_had_it(tmp_path, capsys):
    """A folder that knows nothing of the task is taught, and kept as a start of its own.

    So the warm-up is paid for once.
    """
    tokenizer = byte_tokenizer()
    config = small_config(LlamaConfig, vocab_size=len(tokenizer), max_position_embeddings=512)
    model = save_model(tmp_path / "model", LlamaForCausalLM(config), tokenizer)
    sizes = "--task words --steps 1 --warmup-steps 1 --heldout 2 --eval-groups 2 --max-tokens 8"
    sizes += f" --prompts-per-step 2 --use builders.alternating --out {tmp_path}"
    run_well(train, sizes, "--model", model, "--name one")
    assert "warm-up: 1 steps" in capsys.readouterr().out
    run_well(train, sizes, "--model", tmp_path / "one/start", "--name two")
    assert "warm-up" not in capsys.readouterr().out
