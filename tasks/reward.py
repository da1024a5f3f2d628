"""A reward of one's own: `--reward FILE.py:FUNCTION`, or `--reward MODULE:FUNCTION`.

    load_reward("mine.py:grade")       the function, as a task calls it
    digest_of_reward("mine.py:grade")  tells its file from an edited one

It takes a response and what the problem has to grade it by: the answer or, with `--task code`, the
tests. Its parameters may have any names; those named `response` and `answer` may come in any order.
It returns a `Verdict`, a number or a bool; a response is right if its reward exceeds .5. A function
that raises, ends the program or returns something else has not graded: the rollout gets no verdict,
and a warning has the cause. Responses are graded in several threads at a time.

Left out: rewards of whole groups, a time limit, a process for the function: `os._exit` in it ends
the run without a word.
"""

import contextlib
import hashlib
import inspect
import os
import re
from collections.abc import Callable
from functools import cache, partial
from numbers import Real
from pathlib import Path

import numpy as np

from base.errors import bad_input_on_error
from base.options import module_at
from rewards import Verdict, infra_error

# Names of a parameter that can only be the answer.
GOLD = re.compile(
    r"(?:gold(?:en)?|gt|(?:ground_)?truth|expected|target|tgt|ref(?:erence)?|label|y(?:_true)?)"
    r"(?:_answer)?"
)
LARGEST = 1e17  # the squares of a group of 4,096 rewards have a sum in float32, for Eq. (1)


@cache
def load_reward(text: str) -> Callable[[str, object], Verdict]:
    """The function `grade(response, answer)` that a value of --reward names; raises BadInput."""
    place, _, name = text.rpartition(":")
    remedy = "give FILE.py:FUNCTION or MODULE:FUNCTION, a function of response and answer"
    # a file that changes the working directory must not move the run's relative paths
    with contextlib.chdir("."), bad_input_on_error(f"--reward {text}", remedy):
        return partial(grade_by, in_order(getattr(module_at(place), name)))


def digest_of_reward(text: str) -> str:
    """A digest of the file that a value of --reward names; what the file imports is not in it.

    It is empty for a module of Python's own without a file.
    """
    file = getattr(module_at(text.rpartition(":")[0]), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] if file else ""


def in_order(function: Callable[..., object]) -> Callable[[str, object], object]:
    """The function of (response, answer), by name where their places would swap the two.

    Raises TypeError for other parameters, and for names that say that the answer comes first.
    """
    signature = inspect.signature(function)
    placed = signature.bind("response", "answer").arguments
    first, second = [*placed, *placed][:2]
    if GOLD.fullmatch(first) and not GOLD.fullmatch(second):
        raise TypeError(f"its parameters are {first}, {second}, but the response comes first")
    if placed.get("answer") != "response" and placed.get("response") != "answer":
        return function
    signature.bind(response="response", answer="answer")
    return lambda response, answer: function(response=response, answer=answer)


def grade_by(function: Callable[[str, object], object], response: str, answer: object) -> Verdict:
    """The verdict of a function that may return a number or a bool, or fail."""
    trainer = os.getpid()
    try:
        return as_verdict(function(response, answer))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of any class, SystemExit too: the function is not ours
        return infra_error(f"--reward: {type(error).__name__}: {error}")
    finally:
        if os.getpid() != trainer:  # a copy that the function has forked would go on training
            os._exit(1)


def as_verdict(result: object) -> Verdict:
    """A verdict as it is; "correct" for a number above .5, else "wrong"; raises TypeError."""
    if isinstance(result, Verdict):
        return result if result.reward is None else result._replace(reward=number_of(result.reward))
    reward = number_of(result)
    return Verdict(reward, "correct" if reward > 0.5 else "wrong")


def number_of(reward: object) -> float:
    """A reward as a float; raises TypeError for what Eq. (1) could not be computed with."""
    if isinstance(reward, Real | np.bool_) and abs(float(reward)) <= LARGEST:
        return float(reward)
    raise TypeError(
        f"it returned {reward!r}, not a Verdict, a finite number (up to {LARGEST:g}) or a bool"
    )
