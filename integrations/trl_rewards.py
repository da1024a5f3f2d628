"""This project's prompts, and its graders as TRL reward functions: for "answer" and for "tests".

A score is 1, 0, or None where grading itself failed; TRL leaves those rollouts out.
"""

import json
from collections.abc import Callable, Iterable

from transformers import PreTrainedTokenizerBase

from rewards import grade_all, grade_code, grade_math


def math_reward(completions: list, answer: list[str], **columns: object) -> list[float | None]:
    """Whether the last boxed answer is right; `answer` is LaTeX."""
    return scores(grade_math, completions, answer)


def code_reward(completions: list, tests: list[str], **columns: object) -> list[float | None]:
    """Whether the program passes its tests, which are JSON text.

    Each is one of the four forms in `rewards.py`. Text, because a table has one type per column,
    and would give every problem the keys of all forms.
    """
    return scores(grade_code, completions, [json.loads(text) for text in tests])


def scores(grade: Callable, completions: list, references: list) -> list[float | None]:
    """The score of each completion, a text or a list of messages."""
    texts = []
    for completion in completions:
        texts.append(completion if isinstance(completion, str) else completion[-1]["content"])
    return [verdict.reward for verdict in grade_all(grade, texts, references)]


def without_bos(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[str]) -> list[str]:
    """Prompts without the token that begins texts.

    TRL's tokenization of prompts writes that token itself.
    """
    bos = tokenizer.bos_token if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else ""
    return [prompt.removeprefix(bos) for prompt in prompts]
