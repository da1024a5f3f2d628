"""This project's prompts, and its graders as TRL reward functions: for "answer" and for "tests".

A score is 1, 0, or None where grading itself failed, or where the row's answer or tests cannot be
read; TRL leaves those rollouts out.
"""

import json
from collections.abc import Callable, Iterable

from transformers import PreTrainedTokenizerBase

from rewards import Verdict, grade_all, grade_code, grade_math, infra_error
from tasks.problems import is_text
from tasks.readings import read_answer


def math_reward(completions: list, answer: list, **columns: object) -> list[float | None]:
    """Whether the last boxed answer is right; `answer` is LaTeX, a number, or GSM8K's."""

    def grade(response: str, value: object) -> Verdict:
        gold = read_answer(value)
        if not is_text(gold):
            raise ValueError(f"the answer {value!r} is no text and no number")
        return grade_math(response, gold)

    return scores(grade, completions, answer)


def code_reward(completions: list, tests: list[str], **columns: object) -> list[float | None]:
    """Whether the program passes its tests, which are JSON text.

    Each is one of the four forms in `rewards.py`. Text, because a table has one type per column,
    and would give every problem the keys of all forms.
    """
    return scores(lambda text, of: grade_code(text, json.loads(of)), completions, tests)


def scores(grade: Callable, completions: list, references: list) -> list[float | None]:
    """The score of each completion, a text or a list of messages.

    It is None, with a warning, for a row whose reference `grade` cannot read.
    """

    def grade_row(response: str, reference: object) -> Verdict:
        try:
            return grade(response, reference)
        except (ValueError, TypeError, RecursionError, ArithmeticError) as error:
            return infra_error(error)

    verdicts = grade_all(grade_row, list(map(last_text, completions)), references)
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
