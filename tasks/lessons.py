"""What tasks share: problems that are made and held out, and supervised lessons.

    FirstError                             where a response begins to be wrong
    draw_apart(count, heldout, make)       problems to train on, and others that are held out
    demonstrate_batch(count, make, ...)    problems, each with a demonstration
    teach(model, batch_loss, ...)          steps of Adam on a loss

Left out: several ranks (one teaches, the others get its weights).
"""

import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import NamedTuple, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

# Problems for training; the same for any --steps, so that a resumed run draws the same ones.
MADE_PROBLEMS = 640
SILENCE = 30  # seconds between two lines of a log while nothing else is printed

Number = TypeVar("Number", int, Decimal)


class FirstError(NamedTuple):
    """The first wrong step of a response."""

    token: int  # index in the response's tokens of the step's first token
    kind: str  # what is wrong, in one of the task's words
    end: int  # index after the step's last token
    wrong: int  # index of the first token that is wrong


def result_of(op: str, left: Number, right: Number) -> Number:
    """The result of an operation: + - or *."""
    return {"+": left + right, "-": left - right, "*": left * right}[op]


def draw_apart(count: int, heldout: int, make: Callable[[], dict]) -> tuple[list[dict], list[dict]]:
    """`count` problems to train on and `heldout` others, with no prompt in both.

    No prompt is held out twice. Fewer problems come where so many do not exist.
    """
    train: list[dict] = []
    tests: dict[str, dict] = {}
    for _ in range(100 * (count + heldout)):
        if len(tests) == heldout and len(train) == count:
            break
        problem = make()
        if len(tests) < heldout:
            tests[problem["problem"]] = problem
        elif problem["problem"] not in tests:
            train.append(problem)
    return train, list(tests.values())


def demonstrate_batch(
    count: int, make: Callable[[], dict], show: Callable[[dict], str], forbidden: set[str]
) -> list[tuple[dict, str]]:
    """`count` problems that are not forbidden, each with a response."""
    pairs: list[tuple[dict, str]] = []
    while len(pairs) < count:
        problem = make()
        if problem["problem"] not in forbidden:
            pairs.append((problem, show(problem)))
    return pairs


def teach(
    model: torch.nn.Module,
    batch_loss: Callable[[], torch.Tensor],
    steps: int,
    name: str,
    *,
    lr: float = 2e-3,
    rise: int = 30,
) -> float:
    """Train a model with Adam on a loss, and return the last batch's.

    The learning rate rises to `lr` over `rise` steps and falls over the last fifth of the steps.
    """

    def share_of_lr(step: int) -> float:
        return min(1.0, (step + 1) / rise, (steps - step) / max(1, steps // 5))

    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr)
    bar = tqdm(range(steps), desc=name, leave=False, disable=None)
    shown = time.perf_counter()
    for step in bar:
        if bar.disable and time.perf_counter() - shown >= SILENCE:  # off a terminal
            shown = time.perf_counter()
            print(f"  {name}: {step} of {steps} steps", flush=True)
        loss = batch_loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()
    return loss.item()


def pad_right(rows: Sequence[Sequence[float]], fill: float, device: torch.device) -> torch.Tensor:
    """Lists of numbers -> (rows, length of the longest), filled up on the right."""
    return pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=fill
    ).to(device)
