"""This project's prompts, and its graders as TRL reward functions: for "answer" and for "tests".

A score is 1, 0, or None where grading itself failed; TRL leaves those rollouts out.
"""

import json
from collections.abc import Callable, Iterable

from transformers import PreTrainedTokenizerBase

from grading.readings import read_answer
from rewards import grade_all, grade_code, grade_math


def math_reward(completions: list, answer: list, **columns: object) -> list[float | None]:
    """Whether the last boxed answer is right; `answer` is LaTeX, a number, or GSM8K's."""
    return scores(grade_math, completions, list(map(read_answer, answer)))


def code_reward(completions: list, tests: list[str], **columns: object) -> list[float | None]:
    """Whether the program passes its tests, which are JSON text.

    Each is one of the four forms in `rewards.py`. Text, because a table has one type per column,
    and would give every problem the keys of all forms.
    """
    return scores(grade_code, completions, [json.loads(text) for text in tests])


def scores(grade: Callable, completions: list, references: list) -> list[float | None]:
    """The score of each completion, a text or a list of messages."""
    verdicts = grade_all(grade, list(map(last_text, completions)), references)
    return [verdict.reward for verdict in verdicts]


def last_text(completion: str | list[dict]) -> str:
    """The text of a completion: of messages, the last one's, whose content may be in parts.

    Without a message, or beside calls of tools, there may be none.
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def without_bos(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[str]) -> list[str]:
    """Prompts without the token that begins texts.

    TRL's tokenization of prompts writes that token itself.
    """
    bos = tokenizer.bos_token if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else ""
    return [prompt.removeprefix(bos) for prompt in prompts]
