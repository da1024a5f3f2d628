"""tasks.py: problem files, prompts, the order of problems, verdicts.

Run: pytest tests/test_tasks.py
"""

import json

import pytest
import torch
from transformers import AutoTokenizer

import toy
from grpo import Rollouts
from rewards import grade_code, grade_math
from tasks import INSTRUCTIONS, BadInput, Task, file_task, read_problems


def write(path, rows) -> str:
    """A JSON-lines file of these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(count: int) -> list[dict]:
    """Problems told apart by their answers."""
    return [{"problem": f"What is {i}?", "answer": str(i)} for i in range(count)]


def test_an_epoch_holds_every_problem_once_in_a_seeded_order():
    """Steps that straddle an epoch's end lose and repeat nothing; a step depends on (step, seed) alone."""
    task = Task("t", numbered(10), [], None, grade_math)
    steps = [task.draw(step, 4, seed=0) for step in range(5)]
    flat = [problem["answer"] for step in steps for problem in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == sorted(str(i) for i in range(10))
    assert flat[:10] != flat[10:]
    assert task.draw(3, 4, seed=0) == steps[3] and task.draw(3, 4, seed=1) != steps[3]


def test_verdicts_go_to_the_right_problem_and_cut_responses_score_zero():
    """G rollouts a problem, adjacent; a response without an end is wrong even with the right box in it."""
    task = Task("t", [], [], None, grade_math)
    texts = [r"\boxed{0}", r"\boxed{1}", r"\boxed{1}", r"\boxed{1}"]
    cut = torch.tensor([False, False, False, True])
    verdicts = task.verdicts(numbered(2), Rollouts(None, None, None, None, cut, texts))
    assert [tuple(v) for v in verdicts] == [(1, "correct"), (0, "wrong"), (1, "correct"), (0, "truncated")]


def test_prompts_use_the_chat_template_or_plain_text(qwen_folder, tmp_path):
    """The template's own special tokens become their ids; without a template the instruction follows the problem."""
    path = write(tmp_path / "p.jsonl", numbered(6))
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    task, dropped = file_task("math", path, tokenizer, grade_math, heldout=2, seed=0, max_prompt_tokens=400)
    prompt = task.prompt({"problem": "1+1?", "answer": "2"})
    assert prompt == f"<|im_start|>user\n1+1?\n{INSTRUCTIONS['math']}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(prompt, add_special_tokens=False)["input_ids"][0] == 1
    assert (len(task.train), len(task.heldout), dropped) == (4, 2, 0)
    assert not {p["answer"] for p in task.train} & {p["answer"] for p in task.heldout}
    plain, _ = file_task("math", path, toy.make_tokenizer(), grade_math, heldout=1, seed=0, max_prompt_tokens=400)
    assert plain.prompt({"problem": "1+1?", "answer": "2"}) == f"1+1?\n{INSTRUCTIONS['math']}\n"


def test_prompts_that_leave_no_room_are_dropped_and_counted(qwen_folder, tmp_path):
    """Byte-level: a problem of 300 letters exceeds 250 tokens."""
    rows = [*numbered(5), {"problem": "x" * 300, "answer": "1"}]
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    path = write(tmp_path / "p.jsonl", rows)
    task, dropped = file_task("math", path, tokenizer, grade_math, heldout=1, seed=0, max_prompt_tokens=250)
    assert dropped == 1 and len(task.train) + len(task.heldout) == 5


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"problem": "a", "answer": "1"}\n{"problem": \n', "line 2: not JSON"),
        ('{"problem": "a"}\n', 'line 1: needs "answer"'),
        ('{"problem": "a", "answer": " "}\n', "line 1: needs"),
        ('{"problem": "\\ud800", "answer": "1"}\n', "line 1: needs"),
        ('{"problem": "a", "answer": ' + "9" * 5000 + "}\n", "line 1: not JSON"),
        ("[" * 100_000 + "\n", "line 1: not JSON"),
        ('\n{"problem": "a", "answer": 1}\n', "line 2: needs"),
        ("[1]\n", "line 1: needs"),
        ("\n\n", "holds no problem"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(content, message, tmp_path):
    """One sentence with file, line and remedy."""
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadInput, match=message) as error:
        read_problems(path, "math")
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "tests, message",
    [
        ("null", "must be an object"),
        ("{}", "needs inputs and outputs, lists of text; or asserts"),
        ('{"inputs": ["1"], "outputs": []}', "needs inputs"),
        ('{"inputs": ["1"], "outputs": ["1", "2"]}', "has 1 inputs and 2 outputs"),
    ],
)
def test_tests_that_decide_nothing_are_refused(tests, message, tmp_path):
    """A program must not pass because there was nothing to fail."""
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"problem": "a", "tests": {tests}}}\n')
    with pytest.raises(BadInput, match=f'line 1, "tests": {message}'):
        read_problems(path, "code")


def test_code_problems_are_graded_against_their_tests(qwen_folder, tmp_path):
    """The prompt asks for a program, and the verdict is the sandbox's."""
    rows = [{"problem": f"Print {i}.", "tests": {"inputs": [""], "outputs": [str(i)]}} for i in range(3)]
    path, tokenizer = write(tmp_path / "p.jsonl", rows), AutoTokenizer.from_pretrained(qwen_folder)
    task, _ = file_task("code", path, tokenizer, grade_code, heldout=1, seed=0, max_prompt_tokens=400)
    assert INSTRUCTIONS["code"] in task.prompt(rows[0])
    texts = ["```python\nprint(1)\n```"] * 2
    verdicts = task.verdicts(rows[:2], Rollouts(None, None, None, None, torch.tensor([False, False]), texts))
    assert [tuple(v) for v in verdicts] == [(0, "wrong"), (1, "correct")]


def test_too_few_problems_are_refused(qwen_folder, tmp_path):
    """Nothing would be left to train on."""
    with pytest.raises(BadInput, match="not more than --heldout 6"):
        path, tokenizer = write(tmp_path / "p.jsonl", numbered(6)), AutoTokenizer.from_pretrained(qwen_folder)
        file_task("math", path, tokenizer, grade_math, heldout=6, seed=0, max_prompt_tokens=400)
