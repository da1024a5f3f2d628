"""The word problems: what a first error is, held against responses written by hand; and their
lessons.
"""

import json
import math
import random
import re

import pytest
import torch
from cases import SMALL, byte_tokenizer, saved, with_a_stop
from tokenizers import decoders
from transformers import LlamaConfig, LlamaForCausalLM

import train
from credit.batch import tokens_of
from harness import prepare
from harness.files import config_of
from harness.parallel import Ranks
from rewards import grade_math
from tasks import words

PROBLEM = {
    "problem": "Mia has 14 shells. Mia finds 5 more. Mia gives away 9. How many shells does Mia "
    "have now?",
    "answer": "10",
    "steps": [[14, "+", 5, 19], [19, "-", 9, 10]],
    "name": "Mia",
    "things": "shells",
}
TIMES = PROBLEM | {"answer": "36", "steps": [[12, "*", 3, 36]]}
RIGHT = (
    "Mia then has 14 + 5 = 19 shells.\nNow there are 19 - 9 = 10 shells.\nThe answer is "
    "\\boxed{10}."
)
# What a response is changed to; the kind of its first error, what it begins with and ends before.
WRONG = [
    ("= 19 shells.\nNow there are 19", "= 18 shells.\nNow there are 18", "result", "8 shells"),
    ("= 19 shells.\nNow there are 19", "= 20 shells.\nNow there are 20", "result", "20 shells"),
    ("= 19 shells.\nNow there are 19", "= 190 shells.\nNow there are 190", "result", "0 shells"),
    ("= 19 shells.\nNow there are 19", "= 1 shells.\nNow there are 1", "result", " shells"),
    ("= 19 shells", "= 19.5 shells", "result", ".5 shells"),
    ("14 + 5", "13 + 5", "operand", "3 + 5"),
    ("14 + 5", "14 + 6", "operand", "6 ="),
    ("14 + 5", "5 + 15", "operand", "5 = 19"),
    ("14 + 5 = 19", "14 - 5 = 9", "operator", "- 5 = 9"),
    ("14 + 5 = 19", "14 / 5 = 3", "operator", "/ 5 = 3"),
    ("19 - 9", "9 - 19", "operand", "9 - 19"),
    ("19 - 9", "18 - 9", "operand", "8 - 9"),
    ("19 - 9", "-19 - 9", "operand", "-19 - 9"),
    (
        "Now there are 19 - 9 = 10 shells.\nThe answer is \\boxed{10}",
        "The answer: \\boxed{19}",
        "missing",
        "The answer",
    ),
    (
        ".\nNow there are 19 - 9 = 10 shells.\nThe answer is \\boxed{10}",
        ", so \\boxed{19}",
        "missing",
        " shells, so",
    ),
    (
        "The answer is \\boxed{10}",
        "That makes 10 + 1 = 11 shells.\nThe answer: \\boxed{11}",
        "extra",
        "10 + 1",
    ),
    ("19 - 9 = 10", "10 / 1 = 10", "operand", "0 / 1"),
    ("boxed{10}", "boxed{11}", "final", "1}"),
    ("boxed{10}", "boxed{9}", "final", "9}"),
    ("boxed{10}", "boxed{100}", "final", "0}"),
    ("boxed{10}", "boxed{1}", "final", "}"),
]
READ = [
    RIGHT,
    RIGHT.replace("14 + 5", "5 + 14"),
    RIGHT.replace("14 + 5 = 19", "14+5=19"),
    RIGHT.replace("\n", " "),
    RIGHT.replace("shells", "of them"),
    RIGHT.replace("boxed{10}", "boxed{ 10 }"),
    RIGHT + " Mia has 3 + 4 = 8 of them.",
    RIGHT.replace("14 + 5 = 19", "14 - 9 = 5").replace("19 - 9", "5 + 5"),  # another order
    RIGHT.replace("Now there are 19 - 9 = 10 shells.\n", ""),  # a step that is not said
    "First, 14 + 5 = 19, and then 19 - 9 = 10: \\boxed{10}",
]
UNREAD = [
    "",
    "The answer is \\boxed{11}.",
    RIGHT[:-20],
    RIGHT[: RIGHT.index("9 shells")],
    RIGHT.replace("\\boxed{10}", "10"),
    RIGHT.replace("boxed{10}", "boxed{ten}"),
    "14 and 5 are 19, 19 less 9 is 11. \\boxed{11}",
]


@pytest.mark.parametrize(("old", "new", "kind", "begins"), WRONG)
def test_a_wrong_response_is_wrong_from_its_first_error_on(old, new, kind, begins):
    """In tokens of any size, whose place is where the text begins to differ from what is right."""
    assert old in RIGHT
    text = RIGHT.replace(old, new)
    error = words.first_error(PROBLEM, list(text))
    assert (
        error.kind == kind
        and text[error.token :].startswith(begins)
        and error.token < error.end <= len(text)
    )
    for size in (2, 3, 7):
        tokens = [text[start : start + size] for start in range(0, len(text), size)]
        of_tokens = words.first_error(PROBLEM, tokens)
        assert of_tokens == (error.token // size, kind, (error.end - 1) // size + 1)


def test_the_end_of_an_error_is_that_of_its_step():
    """An equation, or what the box holds."""
    text = RIGHT.replace("14 + 5", "14 + 6")
    error = words.first_error(PROBLEM, list(text))
    assert text[error.token : error.end] == "6 = 19"
    text = RIGHT.replace("boxed{10}", "boxed{11}")
    error = words.first_error(PROBLEM, list(text))
    assert text[error.token : error.end] == "1"


@pytest.mark.parametrize("text", READ + UNREAD)
def test_no_first_error_of_a_right_response_nor_of_one_that_cannot_be_read(text):
    assert words.first_error(PROBLEM, list(text)) is None


def test_tokens_are_parts_of_the_text_also_where_one_alone_is_decoded_otherwise():
    """A character of several tokens is its last one's; Llama's decoder drops the space that a text
    begins with.
    """
    bytes_alone, as_llama = byte_tokenizer(), byte_tokenizer()
    as_llama.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]
    )
    text = "4 \u00d7 3 = 12, 12 - 8 = 4 \\boxed{4}"
    problem = PROBLEM | {"answer": "5", "steps": [[4, "*", 3, 12], [12, "-", 7, 5]]}
    for tokenizer in (bytes_alone, as_llama):
        tokens = tokens_of(tokenizer, with_a_stop(tokenizer, ["?"], [text]), 0)
        assert "".join(tokens) == text + "<|endoftext|>" and len(tokens) == len(text.encode()) + 1
        assert tokens[words.first_error(problem, tokens).token] == "8"


@pytest.mark.parametrize("sign", ["*", "x", "\u00d7"])
def test_factors_may_swap_and_the_sign_may_be_another(sign):
    for text in (f"12 {sign} 3 = 36 \\boxed{{36}}", f"3 {sign} 12 = 36 \\boxed{{36}}"):
        assert words.first_error(TIMES, list(text)) is None
    assert words.first_error(TIMES, list(f"3 {sign} 12 = 37 \\boxed{{37}}")).kind == "result"
    assert words.first_error(TIMES, list(f"12 {sign} 2 = 24 \\boxed{{24}}")).kind == "operand"


def test_a_problem_is_told_in_other_words():
    """The same beginning, question, numbers and answer; other events, and in most problems not all
    ways alike.
    """
    several = 0
    for problem in words.make_problems(400, seed=0):
        ways = [words.rephrase(problem, k)[0] for k in range(4)]
        for other in ways:
            assert other | {"problem": 0} == problem | {"problem": 0}
            assert re.findall(r"\d+", other["problem"]) == re.findall(r"\d+", problem["problem"])
            before, after = (re.split(r"(?<=\.) ", each["problem"]) for each in (problem, other))
            kept = [old == new for old, new in zip(before, after, strict=True)]
            assert kept == [True, *[False] * (len(kept) - 2), True]
        several += len({other["problem"] for other in ways}) > 1
    assert several > 320


def test_demonstrations_are_right_but_for_their_slips():
    """A careful one is right and has no error. A careless one that is wrong has one; of the right
    ones 2% at most.
    """
    rng, wrong, lucky = random.Random(0), 0, 0
    for problem in words.make_problems(1000, seed=0):
        careful, careless = (
            words.demonstrate(problem, rng, careless=False),
            words.demonstrate(problem, rng),
        )
        assert (
            words.first_error(problem, list(careful)) is None
            and grade_math(careful, problem["answer"]).reward == 1
        )
        is_right = f"boxed{{{problem['answer']}}}" in careless
        error = words.first_error(problem, list(careless))
        assert is_right or error
        wrong, lucky = wrong + (not is_right), lucky + bool(is_right and error)
    assert 0.35 < wrong / 1000 < 0.5 and lucky / 1000 < 0.02  # 1 - .85^3.5 = .43


def test_problems_are_different_and_of_whole_numbers():
    """Two to five steps, each of which goes on from the one before, as the text says them."""
    problems = words.make_problems(700, seed=1)
    assert len(
        {problem["problem"] for problem in problems}
    ) == 700 and problems == words.make_problems(700, seed=1)
    assert problems != words.make_problems(700, seed=2)
    for problem in problems:
        steps = problem["steps"]
        said = [int(number) for number in re.findall(r"\d+", problem["problem"])]
        assert (
            said == [steps[0][0], *[number for _, _, number, _ in steps]] and 2 <= len(steps) <= 5
        )
        value = said[0]
        for left, op, number, result in steps:
            assert left == value and result == words.result_of(op, left, number) >= 0
            value = result
        assert problem["answer"] == str(value)


def test_warm_up_teaches_the_form():
    """A model of random weights and a tokenizer of bytes: a lesson is better known after some
    steps; no forbidden one is shown.
    """
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    sizes = dict(hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    shown, forbidden = [], {problem["problem"] for problem in words.make_problems(5, seed=0)}

    def prompt(problem: dict) -> str:
        shown.append(problem["problem"])
        return problem["problem"] + "\n"

    first = words.warm_up(model, tokenizer, prompt, forbidden, steps=1, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "LR", 1e-2)
        last = words.warm_up(model, tokenizer, prompt, forbidden, steps=15, seed=1)
    assert first == pytest.approx(math.log(len(tokenizer)), abs=0.5)  # nats per token
    assert last < 0.7 * first and len(set(shown)) > 100 and not forbidden & set(shown)


def test_lessons_are_copied_to_ranks_whose_model_is_stored_in_another_dtype(tmp_path, monkeypatch):
    """Rank 0 teaches in float32, so that is what all other ranks have."""
    copied = []
    monkeypatch.setattr(
        prepare.parallel, "broadcast", lambda model, ranks: copied.append(model.dtype)
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **SMALL)).bfloat16()
    prepare.make_start(model, None, None, None, tmp_path, Ranks(1, 2, torch.device("cpu")))
    assert copied == [torch.float32]


def test_training_begins_with_lessons_unless_the_model_has_had_them(tmp_path, no_curve, capsys):
    """From a folder that knows nothing of the task; the start is a model of its own, and so is paid
    for once.
    """
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **SMALL)
    model = saved(tmp_path / "model", LlamaForCausalLM(config), tokenizer)
    sizes = (
        "--smoke --steps 1 --warmup-steps 1 --heldout 2 --eval-groups 2 --prompts-per-step 2 "
        "--prompts-per-update 2"
    )
    common = [
        "--task",
        "words",
        *sizes.split(),
        "--rollouts-per-prompt",
        "2",
        "--out",
        str(tmp_path),
    ]
    assert train.main([*common, "--model", model, "--name", "one"]) == 0
    assert "warm-up: 1 steps" in capsys.readouterr().out
    start = tmp_path / "one" / "start"
    assert (start / "config.json").exists() and config_of(tmp_path / "one")["template"] == "plain"
    assert train.main([*common, "--model", str(start), "--name", "two"]) == 0
    assert "warm-up" not in capsys.readouterr().out and not (tmp_path / "two" / "start").exists()
    one, two = (
        json.loads((tmp_path / name / "metrics.jsonl").read_text().split("\n")[0])
        for name in ("one", "two")
    )
    assert one == two  # the evaluation before training is the same start's
