"""The word problems: what a first error is, held against responses written by hand; and their
lessons.
"""

import math
import random
import re

import pytest
import torch
from made import SMALL, byte_tokenizer, flags, run_well, saved, with_a_stop
from tokenizers import decoders
from transformers import LlamaConfig, LlamaForCausalLM

import train
from credit.tokens import tokens_of
from grpo import Policy
from harness import prepare
from harness.files import config_of, read_lines
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
RIGHT = (
    "Mia then has 14 + 5 = 19 shells.\nNow there are 19 - 9 = 10 shells.\nThe answer is "
    "\\boxed{10}."
)
# What a response is changed to, with | before its first error; and the error's kind.
WRONG = [
    ("= 19 shells.\nNow there are 19", "= 1|8 shells.\nNow there are 18", "result"),
    ("= 19 shells.\nNow there are 19", "= 19|0 shells.\nNow there are 190", "result"),
    ("= 19 shells.\nNow there are 19", "= 1| shells.\nNow there are 1", "result"),
    ("= 19 shells", "= 19|.5 shells", "result"),
    ("14 + 5", "1|3 + 5", "operand"),
    ("14 + 5", "5 + 1|5", "operand"),
    ("14 + 5 = 19", "14 |- 5 = 9", "operator"),
    ("14 + 5 = 19", "14 |/ 5 = 3", "operator"),
    ("19 - 9", "|9 - 19", "operand"),
    ("19 - 9", "1|8 - 9", "operand"),
    ("19 - 9", "|-19 - 9", "operand"),
    (
        "Now there are 19 - 9 = 10 shells.\nThe answer is \\boxed{10}",
        "|The answer: \\boxed{19}",
        "missing",
    ),
    (
        " shells.\nNow there are 19 - 9 = 10 shells.\nThe answer is \\boxed{10}",
        "| of them: \\boxed{19}",
        "missing",
    ),
    ("The answer is \\boxed{10}", "That makes |10 + 1 = 11 shells: \\boxed{11}", "extra"),
    ("19 - 9 = 10", "1|0 / 1 = 10", "operand"),
    ("boxed{10}", "boxed{1|1}", "final"),
    ("boxed{10}", "boxed{10|0}", "final"),
    ("boxed{10}", "boxed{1|}", "final"),
]
READ = [
    RIGHT,
    RIGHT.replace("14 + 5", "5 + 14"),
    RIGHT.replace("boxed{10}", "boxed{ 10 }"),
    RIGHT + " Mia has 3 + 4 = 8 of them.",
    RIGHT.replace("14 + 5 = 19", "14 - 9 = 5").replace("19 - 9", "5 + 5"),  # another order
    RIGHT.replace("Now there are 19 - 9 = 10 shells.\n", ""),  # a step that is not said
]
UNREAD = [
    "",
    "The answer is \\boxed{11}.",
    RIGHT[:-20],
    RIGHT[: RIGHT.index("9 shells")],
    RIGHT.replace("\\boxed{10}", "10"),
    RIGHT.replace("boxed{10}", "boxed{ten}"),
]
# Of problems by their steps: responses in other forms, with | before the first error that can be read, or around it.
BY_HAND = {
    "14 + 5 = 19, 19 - 9 = 10": {
        "result": [
            r"14 plus 5 is 19, $19$ minus 9 is $1|1$: \boxed{11}",
            r"14 and 5 make 19, 19 - 9 = 1|1: \boxed{11}",
            r"Five more, nineteen; 19 - 9 = 1|1: \boxed{11}",
            r"14 shells + 5 shells = 1|8 shells, 18 - 9 = 9: \boxed{9}",
            "14 + 5 = 19, 19 \u2212 9 = 1|1: \\boxed{11}",
            "14 + 5 \u2192 19, 19 \u2013 9 -> 1|1: \\boxed{11}",
            r"14 + 5 = 19 - 9 = 1|1: \boxed{11}",
            r"14+5=19,19-9=1|1: \boxed{11}",
            r"14.0 + 5 = 19.0, 19 - 9 = 1|1: \boxed{11}",
            r"14 + 5 = 19, 19 - 9 = \boxed{1|1}",
            r"14 + 5 = \boxed{19}, 19 - 9 = 1|1: \boxed{11}",
            r"14 + 5 = 19|,5: \boxed{19}",
            "\u0661\u0664 + \u0665 = \u0661|\u0668: \\boxed{18}",
        ],
        "operand": [
            r"14, 5 more: 1|3 + 5 = 18: \boxed{18}",
            r"14 shells + |6 = 20|, 20 - 9 = 11: \boxed{11}",
            r"14 plus 5 is 19, 19 minus |8 is 11: \boxed{11}",
        ],
        "operator": ["14 |\u2212 5 = 9: \\boxed{9}", r"14 |times 5 is 70: \boxed{70}"],
        "missing": [
            "14 shells + 5 shells = 19.\n|So, 19: \\boxed{19}",
            "14 + 5 = 19.\n|\\boxed{19}",
        ],
        "final": [
            r"14 + 5 = 19, 19 - 9 = 10: \boxed{10}, \boxed{|9|}",
            r"14 plus 5 is 19, 19 minus 9 is 10: \boxed{1|9}",
        ],
        "": [
            r"14 and 5 make 18, 18 - 9 = 9: \boxed{9}",
            r"Five more, eighteen; 18 - 9 = 9: \boxed{9}",
            r"14 + 5 = 19, 9 fewer, 11: \boxed{11}",
            r"(14 + 5) - 9 = 11: \boxed{11}",
            r"14 + 5 = 19, 19 - 9 = 10, 1 more, 11: \boxed{11}",
            r"14 + 5 = 19: \boxed{19}, 19 - 9 = 10: \boxed{10}",
            r"014 + 5 = 19, 19 - 09 = 10: \boxed{10.0}",
            r"14 - 9 + 5 = 10: \boxed{10}",
            r"14 + 5 = 19, 19 - 9 = 10: \boxed{11}, \boxed{10",
            "\u0661\u0664 + \u0665 = \u0661\u0669, \u0661\u0669 - \u0669 = \u0661\u0660: \\boxed{10}",
        ],
    },
    "6 * 3 = 18, 18 - 5 = 13": {
        "result": [
            r"6 * 3 = 18 - 5 = 1|4: \boxed{14}",
            r"6 \times 3 = 18, 18 - 5 = 1|4: \boxed{14}",
            "3 \u00d7 6 = 18, 18 - 5 = 1|4: \\boxed{14}",
            r"3 x 6 = 1|9, 19 - 5 = 14: \boxed{14}",
            r"3 shells x 6 = 1|9, 19 - 5 = 14: \boxed{14}",
        ],
        "operand": [r"6*|2 = 12: \boxed{12}", r"6 times 3 are 18, 18 - |4 = 14: \boxed{14}"],
        "": [r"6 \cdot 3 = 18.0 - 5 = 13: \boxed{13}", r"3x6 = 18, 18 - 5 = 13: \boxed{13}"],
    },
    "8 - 3 = 5, 5 + 3 = 8": {
        "result": [r"8-3=5,5+3=|9: \boxed{9}", r"08 - 3 = 5, 5 + 3 = |9: \boxed{9}"],
        "": [r"8-3=5,3+5=8: \boxed{8}"],
    },
    "7 + 3 = 10, 10 + 5 = 15": {
        "": [r"7 + 3 + 5 = 16: \boxed{16}", r"7+3+5=15: \boxed{15}"],
    },
}
RESPONSES = [(PROBLEM, kind, RIGHT.replace(old, new)) for old, new, kind in WRONG]
RESPONSES += [(PROBLEM, "", text) for text in READ + UNREAD]
for said, by_kind in BY_HAND.items():
    parts = [step.split() for step in said.split(", ")]
    steps = [[int(left), op, int(right), int(result)] for left, op, right, _, result in parts]
    problem = {"answer": parts[-1][-1], "steps": steps}
    for kind, texts in by_kind.items():
        RESPONSES += [(problem, kind, text) for text in texts]


@pytest.mark.parametrize(("problem", "kind", "marked"), RESPONSES)
def test_a_wrong_response_is_wrong_from_its_first_error_on(problem, kind, marked):
    """In tokens of any size, whose place is where the text begins to differ from what is right;
    None of a right response and of one that cannot be read.
    """
    before, *rest = marked.split("|")
    text = before + "".join(rest)
    error = words.first_error(problem, list(text))
    if not kind:
        assert error is None
        return
    assert error.kind == kind and error.token == len(before) < error.end <= len(text)
    assert len(rest) == 1 or text[error.token : error.end] == rest[0]
    for size in (2, 3, 7):
        tokens = [text[start : start + size] for start in range(0, len(text), size)]
        of_tokens = words.first_error(problem, tokens)
        assert of_tokens == (error.token // size, kind, (error.end - 1) // size + 1)


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


def test_a_problem_is_told_in_other_words():
    """The same beginning, question, numbers and answer; other events, and in most problems not all
    ways alike.
    """
    several = 0
    for problem in words.make_problems(400, seed=0):
        before = re.split(r"(?<=\.) ", problem["problem"])
        numbers, ways = re.findall(r"\d+", problem["problem"]), set()
        for k in range(4):
            other = words.rephrase(problem, k)[0]
            assert other | {"problem": 0} == problem | {"problem": 0}
            assert re.findall(r"\d+", other["problem"]) == numbers
            after = re.split(r"(?<=\.) ", other["problem"])
            kept = [old == new for old, new in zip(before, after, strict=True)]
            assert kept == [True, *[False] * (len(kept) - 2), True]
            ways.add(other["problem"])
        several += len(ways) > 1
    assert several > 320


def test_demonstrations_are_right_but_for_their_slips():
    """A careful one is right and has no error. A careless one that is wrong has one; of the right
    ones 2% at most.
    """
    rng, wrong, lucky = random.Random(0), 0, 0
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


def test_problems_are_different_and_of_whole_numbers(monkeypatch):
    """Two to five steps, each of which goes on from the one before, as the text says them."""
    problems = words.make_problems(700, seed=1)
    assert len({problem["problem"] for problem in problems}) == 700
    assert problems == words.make_problems(700, seed=1) != words.make_problems(700, seed=2)
    for problem in problems:
        value, *numbers = map(int, re.findall(r"\d+", problem["problem"]))
        assert 2 <= len(numbers) <= 5
        for step, number in zip(problem["steps"], numbers, strict=True):
            assert list(step[::2]) == [value, number]
            value = words.result_of(step[1], value, number)
            assert step[3] == value >= 0
        assert problem["answer"] == str(value)
    config = flags(task="words", heldout=60)
    task, _ = words.task(config.problems, config.grading, 1, byte_tokenizer(), "M")
    assert (task.train, task.step_end) == (problems, "\n")
    monkeypatch.setattr(words, "warm_up", lambda *args, seed, **options: (args[-1], seed))
    assert task.lessons(None, {"a"}, 1) == ({"a"}, 1)


def test_warm_up_teaches_the_form(monkeypatch):
    """A model of random weights and a tokenizer of bytes: a lesson is better known after some
    steps; no forbidden one is shown. Prompts end where responses begin, and these with the stop.
    """
    tokenizer = byte_tokenizer()
    sizes = dict(hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    seen, shown = [], []

    def prompt(problem: dict) -> str:
        shown.append(problem["problem"])
        return problem["problem"] + "\n"

    def policy(*parts, **packing):
        policy = Policy(*parts, **packing)
        policy.register_forward_pre_hook(lambda policy, inputs: seen.append(inputs[0]))
        return policy

    monkeypatch.setattr(words, "Policy", policy)
    first = words.warm_up(model, tokenizer, prompt, set(), steps=1, seed=0)
    monkeypatch.setattr(words, "LR", 1e-2)
    last = words.warm_up(model, tokenizer, prompt, set(), steps=15, seed=1)
    assert first == pytest.approx(math.log(len(tokenizer)), abs=0.5)  # nats per token
    words.warm_up(model, tokenizer, prompt, set(shown[:8]), steps=1, seed=0)
    assert last < 0.7 * first and len(set(shown)) > 100
    assert not set(shown[:8]) & {*shown[8:16], *shown[-8:]}  # another seed, and forbidden ones
    ids, mask = seen[0].ids, seen[0].mask
    assert seen[0].prompt_mask[:, -1].all()
    ends = ids.gather(1, mask.sum(1, keepdim=True) - 1)
    assert (ends == tokenizer.eos_token_id).all()


def test_lessons_are_read_by_ranks_whose_model_is_stored_in_another_dtype(tmp_path):
    """Rank 0 teaches in float32, so that is what all other ranks have."""
    config = LlamaConfig(vocab_size=len(byte_tokenizer()), **SMALL)
    saved(tmp_path / "start", LlamaForCausalLM(config), byte_tokenizer())
    stored = LlamaForCausalLM(config).bfloat16()
    parts = prepare.Parts(flags(task="words"), None, stored, byte_tokenizer())
    model = prepare.teach_policy(parts, tmp_path, Ranks(0, 1, torch.device("cpu")))
    assert model.dtype == torch.float32


def test_training_begins_with_lessons_unless_the_model_has_had_them(tmp_path, no_curve, capsys):
    """From a folder that knows nothing of the task; the start is a model of its own, and so is paid
    for once.
    """
    tokenizer = byte_tokenizer()
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **SMALL)
    model = saved(tmp_path / "model", LlamaForCausalLM(config), tokenizer)
    sizes = "--task words --smoke --steps 1 --warmup-steps 1 --heldout 2 --eval-groups 2"
    sizes += " --prompts-per-step 2 --prompts-per-update 2 --rollouts-per-prompt 2"
    one, two = tmp_path / "one", tmp_path / "two"
    run_well(train, sizes, "--out", tmp_path, "--model", model, "--name one")
    assert "warm-up: 1 steps" in capsys.readouterr().out
    assert (one / "start" / "config.json").exists() and config_of(one)["template"] == "plain"
    run_well(train, sizes, "--out", tmp_path, "--model", one / "start", "--name two")
    assert "warm-up" not in capsys.readouterr().out and not (two / "start").exists()
    # the evaluation before training is the same start's
    assert read_lines(one / "metrics.jsonl")[0] == read_lines(two / "metrics.jsonl")[0]
