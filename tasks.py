"""Tasks: problems, their prompts, and how a response is graded.

    task = file_task("math", "problems.jsonl", tokenizer, ...)   # {"problem": ..., "answer": ...} a line
    task = file_task("code", "problems.jsonl", tokenizer, ...)   # {"problem": ..., "tests": ...}, as in `rewards.py`
    task.draw(step, count, seed)                                 # the problems of one training step
    task.verdicts(problems, rollouts)                            # a Verdict for each rollout

The embedded task is built from the same `Task` in `train.py`; its problems come from `toy.py`. A prompt is the
tokenizer's chat template around the problem and an instruction on the form of the answer, or, where there is no
template, the two as plain text.

Left out: data sets from a hub, a choice of templates.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo import Rollouts
from rewards import Verdict, grade_all, style_of

# What a kind of problems asks for, and under which key its lines hold what a response is graded against.
INSTRUCTIONS = {
    "math": r"Please reason step by step, and put your final answer within \boxed{}.",
    "code": "Please reason step by step, and give your final program in a ```python block.",
}
REFERENCES = {"math": "answer", "code": "tests"}


class BadInput(ValueError):
    """A user's mistake, in one sentence that names the flag or file, the value and the remedy."""


@dataclass(frozen=True)
class Task:
    """Problems are dictionaries with at least "problem", a text, and `reference`, what a response is graded against."""

    name: str
    train: list[dict]
    heldout: list[dict]
    prompt: Callable[[dict], str]
    grade: Callable[[str, object], Verdict]
    reference: str = "answer"
    # The first wrong step of a response, (token, kind) or None, where a task knows it.
    first_error: Callable[[dict, str], tuple[int, str] | None] | None = None

    def draw(self, step: int, count: int, seed: int) -> list[dict]:
        """The `count` problems of a step (from 0): consecutive ones of an endless row of shuffled epochs."""
        places = range(step * count, (step + 1) * count)
        orders = {}
        for epoch in {place // len(self.train) for place in places}:
            orders[epoch] = list(range(len(self.train)))
            random.Random(f"epoch {seed} {epoch}").shuffle(orders[epoch])
        return [self.train[orders[place // len(self.train)][place % len(self.train)]] for place in places]

    def verdicts(self, problems: list[dict], rollouts: Rollouts) -> list[Verdict]:
        """One verdict a rollout; G rollouts a problem, adjacent. A response without an end scores 0."""
        group_size = len(rollouts.texts) // len(problems)
        whole = [row for row, cut in enumerate(rollouts.truncated.tolist()) if not cut]
        references = [problems[row // group_size][self.reference] for row in whole]
        verdicts = [Verdict(0.0, "truncated")] * len(rollouts.texts)
        grades = grade_all(self.grade, [rollouts.texts[row] for row in whole], references)
        for row, grade in zip(whole, grades, strict=True):
            verdicts[row] = grade
        return verdicts


def file_task(
    kind: str, path: str, tokenizer, grade: Callable, *, heldout: int, seed: int, max_prompt_tokens: int
) -> tuple[Task, int]:
    """Problems of a JSON-lines file, "math" or "code", `heldout` of them (drawn by the seed) kept for evaluation.

    Returns the task and the number of problems dropped because their prompt exceeds `max_prompt_tokens`.
    Raises BadInput for a file that cannot be read or used, naming the line.
    """
    problems = read_problems(Path(path), kind)

    def prompt(problem: dict) -> str:
        return _prompt(f"{problem['problem']}\n{INSTRUCTIONS[kind]}", tokenizer)

    fitting = [
        problem
        for problem in problems
        if len(tokenizer(prompt(problem), add_special_tokens=False)["input_ids"]) <= max_prompt_tokens
    ]
    if len(fitting) <= heldout:
        raise BadInput(
            f"--data {path}: {len(fitting)} of its {len(problems)} problems have prompts of at most "
            f"{max_prompt_tokens} tokens, not more than --heldout {heldout}; lower --heldout or --max-tokens"
        )
    random.Random(f"heldout {seed}").shuffle(fitting)
    task = Task(kind, fitting[heldout:], fitting[:heldout], prompt, grade, REFERENCES[kind])
    return task, len(problems) - len(fitting)


def read_problems(path: Path, kind: str) -> list[dict]:
    """The problems of a JSON-lines file; blank lines are skipped. Raises BadInput, naming the line."""
    problems = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--data {path}: cannot be read ({error}); give a UTF-8 JSON-lines file") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"--data {path}, line {number}: not JSON ({error}); give one object a line") from error
        if not isinstance(row, dict) or not _is_text(row.get("problem")):
            raise BadInput(f'--data {path}, line {number}: needs "problem", non-empty text')
        if kind == "math" and not _is_text(row.get("answer")):
            raise BadInput(f'--data {path}, line {number}: needs "answer", non-empty text')
        if kind == "code":
            try:
                style_of(row.get("tests"))
            except ValueError as error:
                raise BadInput(f'--data {path}, line {number}, "tests": {error}') from error
        problems.append(row)
    if not problems:
        raise BadInput(f"--data {path}: holds no problem; give one JSON object a line")
    return problems


def _is_text(value) -> bool:
    """Non-empty text; JSON can spell half a surrogate pair, which no tokenizer reads."""
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= c <= "\udfff" for c in value)


def _prompt(content: str, tokenizer) -> str:
    """The text that the model continues; special tokens are written out in it."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": content}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    starts = tokenizer.bos_token_id is not None and tokenizer.bos_token_id in tokenizer("")["input_ids"]
    return f"{tokenizer.bos_token if starts else ''}{content}\n"
