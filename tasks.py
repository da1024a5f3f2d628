"""Tasks: problems, their prompts, and how a response is graded.

    task = file_task("problems.jsonl", tokenizer, ...)   # one {"problem": ..., "answer": ...} a line
    task.draw(step, count, seed)                         # the problems of one training step
    task.verdicts(problems, rollouts)                    # a Verdict for each rollout

The embedded task is built from the same `Task` in `train.py`; its problems come from `toy.py`. A prompt is the
tokenizer's chat template around the problem and an instruction to box the answer, or, where there is no
template, the two as plain text.

Left out: data sets from a hub, code problems, a choice of templates.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo import Rollouts
from rewards import Verdict, grade_math

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


class BadInput(ValueError):
    """A user's mistake, in one sentence that names the flag or file, the value and the remedy."""


@dataclass(frozen=True)
class Task:
    """Problems are dictionaries with at least "problem" and "answer", both text."""

    name: str
    train: list[dict]
    heldout: list[dict]
    prompt: Callable[[dict], str]
    grade: Callable[[str, dict], Verdict]
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
        return [
            Verdict(0.0, "truncated") if cut else self.grade(text, problems[row // group_size])
            for row, (text, cut) in enumerate(zip(rollouts.texts, rollouts.truncated.tolist(), strict=True))
        ]


def grade_answer(response: str, problem: dict) -> Verdict:
    """The last boxed answer against the problem's."""
    return grade_math(response, problem["answer"])


def file_task(path: str, tokenizer, *, heldout: int, seed: int, max_prompt_tokens: int) -> tuple[Task, int]:
    """Problems of a JSON-lines file, `heldout` of them (drawn by the seed) kept for evaluation.

    Returns the task and the number of problems dropped because their prompt exceeds `max_prompt_tokens`.
    Raises BadInput for a file that cannot be read or used, naming the line.
    """
    problems = read_problems(Path(path))
    fitting = [
        p
        for p in problems
        if len(tokenizer(_prompt(p, tokenizer), add_special_tokens=False)["input_ids"]) <= max_prompt_tokens
    ]
    if len(fitting) <= heldout:
        raise BadInput(
            f"--data {path}: {len(fitting)} of its {len(problems)} problems have prompts of at most "
            f"{max_prompt_tokens} tokens, not more than --heldout {heldout}; lower --heldout or --max-tokens"
        )
    random.Random(f"heldout {seed}").shuffle(fitting)
    task = Task(
        name="math",
        train=fitting[heldout:],
        heldout=fitting[:heldout],
        prompt=lambda problem: _prompt(problem, tokenizer),
        grade=grade_answer,
    )
    return task, len(problems) - len(fitting)


def read_problems(path: Path) -> list[dict]:
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
        texts = [row.get(key) for key in ("problem", "answer")] if isinstance(row, dict) else [None]
        if not all(isinstance(text, str) and text.strip() and _is_unicode(text) for text in texts):
            raise BadInput(f'--data {path}, line {number}: needs "problem" and "answer", both non-empty text')
        problems.append(row)
    if not problems:
        raise BadInput(f"--data {path}: holds no problem; give one JSON object a line")
    return problems


def _is_unicode(text: str) -> bool:
    """JSON can spell half a surrogate pair, which no tokenizer reads."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _prompt(problem: dict, tokenizer) -> str:
    """The text that the model continues; special tokens are written out in it."""
    content = f"{problem['problem']}\n{INSTRUCTION}"
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": content}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    starts = tokenizer.bos_token_id is not None and tokenizer.bos_token_id in tokenizer("")["input_ids"]
    return f"{tokenizer.bos_token if starts else ''}{content}\n"
