r"""A task made for SHEAR's theory: one digit decides, among tokens that decide nothing.

    prompt     3+7-2?
    response   bdacab ... \boxed{3}dededd ... with 8 letters per line before the box, 4 after it

The answer is the prompt's first digit. The warm-up writes it with chance 0.35, and any other digit
otherwise, so a rollout diverges at the digit in its box and nowhere else: before it, right and
wrong rollouts have the same law, which is what SHEAR's theory assumes. What stands before and after
the box is random or fixed:

    task           before the box           after it
    noise-before   letters drawn from abcd  the digit, again and again
    noise-after    one letter               letters of the digit: each is one of two, by chance
    noise-both     letters drawn from abcd  letters of the digit
    noise-none     one letter               the digit, again and again

    python -m lab.studies.gradients --task noise-before --arms grpo shear position shuffle
    python -m lab.studies.compare --task noise-after --steps 20 --arms grpo shear

`--toy-lines` sets the length. The model is that of the embedded task.

Left out: arithmetic, which a model of this size does not learn beside the rest.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from base.config import Problems
from base.errors import BadInput
from credit.batch import Batch, Context
from lab.tools.moments import above_others
from tasks import toy
from tasks.task import FirstError, Task, grader

BOX = r"\boxed{"
BEFORE = "abcd"  # letters that are drawn before the box
FIXED = "a"  # the letter that stands there otherwise
# with the box's four tokens, the embedded task's length
BEFORE_PER_LINE = 8
AFTER_PER_LINE = 4
PROMPT = 7  # tokens of a prompt
DIFFERENT = 9000  # problems: three digits and two operators
RIGHT = 0.35  # chance that a demonstration has the right digit
DIGIT_WEIGHT = 6.0  # of the digit in the warm-up's loss, which is what has to be learned


class Cell(NamedTuple):
    """Where a response is random."""

    before: bool
    after: bool


CELLS = {
    "noise-before": Cell(True, False),
    "noise-after": Cell(False, True),
    "noise-both": Cell(True, True),
    "noise-none": Cell(False, False),
}


def task(
    settings: Problems, tokenizer: PreTrainedTokenizerBase, model_name: str
) -> tuple[Task, list[str]]:
    """The task that `settings` name, with its problems, and no notes; raises BadInput."""
    lines = settings.toy_lines
    if len(tokenizer) != len(toy.symbols_of(lines)):
        raise BadInput(
            f"--task {settings.task}: {model_name} is not a model of the embedded task with "
            f"--toy-lines {lines}; give that of its training"
        )
    count = toy.MADE_PROBLEMS + settings.heldout
    if count > DIFFERENT:
        raise BadInput(
            f"--heldout {settings.heldout}: there are {DIFFERENT} different problems, of which "
            f"{toy.MADE_PROBLEMS} are trained on; lower it"
        )
    problems = make_problems(count, settings.seed)
    cell = CELLS[settings.task]
    return Task(
        settings.task,
        problems[settings.heldout :],
        problems[: settings.heldout],
        itemgetter("problem"),
        grader("math", settings.grade_timeout, settings.sandbox),
        first_error=first_error,
        warm_up=partial(warm_up, cell=cell, lines=lines, seed=settings.seed),
    ), []


def make_problem(rng: random.Random) -> dict:
    """A problem {"problem": prompt, "answer": its first digit}."""
    first, second, third = rng.choices("0123456789", k=3)
    one, other = rng.choices("+-*", k=2)
    return {"problem": f"{first}{one}{second}{other}{third}?\n", "answer": first}


def make_problems(count: int, seed: int) -> list[dict]:
    """`count` problems, all different, at most DIFFERENT."""
    rng = random.Random(f"noise {seed}")
    problems: dict[str, dict] = {}
    while len(problems) < count:
        problem = make_problem(rng)
        problems[problem["problem"]] = problem
    return list(problems.values())


def demonstrate(problem: dict, cell: Cell, lines: int, rng: random.Random) -> list[str]:
    """The tokens of a response, whose digit is right with chance RIGHT."""
    digit = problem["answer"]
    if rng.random() >= RIGHT:
        digit = rng.choice([other for other in toy.DIGIT_VALUES if other != digit])
    count = BEFORE_PER_LINE * lines
    before = rng.choices(BEFORE, k=count) if cell.before else [FIXED] * count
    count = AFTER_PER_LINE * lines
    after = rng.choices(letters_of(digit), k=count) if cell.after else [digit] * count
    return [*before, BOX, digit, "}", *after]


def letters_of(digit: str) -> list[str]:
    """The two letters that may stand after a digit.

    Neighbouring digits share one letter, 0 and 8 both, and so do 1 and 9.
    """
    return [toy.LABELS[(int(digit) + more) % toy.FEW] for more in (0, 1)]


def first_error(problem: dict, tokens: Sequence[str]) -> FirstError | None:
    """The digit in the last box, if it is wrong; the last token of a response without a box."""
    place = digit_place(tokens)
    if place is None:
        last = max(0, len(tokens) - 1)
        return FirstError(last, "form", last + 1)
    if tokens[place] == problem["answer"]:
        return None
    return FirstError(place, "digit", place + 1)


def digit_place(tokens: Sequence[str]) -> int | None:
    """The index of the token after the last `\\boxed{`; None if there is none."""
    for place in range(len(tokens) - 1, 0, -1):
        if tokens[place - 1] == BOX:
            return place
    return None


def warm_up(
    model: PreTrainedModel, forbidden: set[str], *, cell: Cell, lines: int, steps: int, seed: int
) -> float:
    """Teach the model by batches of fresh demonstrations; return the last loss.

    `steps` is the number of batches. `forbidden` prompts are never shown.
    """
    rng = random.Random(f"demonstrations {seed}")

    def batch_loss() -> Tensor:
        """The loss of the next token, over the responses of a batch of demonstrations."""
        rows: list[list[str]] = []
        while len(rows) < toy.BATCH:
            problem = make_problem(rng)
            if problem["problem"] not in forbidden:
                rows.append([*problem["problem"], *demonstrate(problem, cell, lines, rng), "<eos>"])
        ids = torch.tensor([[toy.IDS[symbol] for symbol in row] for row in rows])  # (32, L) int64
        ids = ids.to(model.device)
        logits = model(input_ids=ids[:, :-1]).logits[:, PROMPT - 1 :]  # (32, T, V)
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, PROMPT:], reduction="none"
        )  # (32, T)
        weights = torch.ones_like(losses[0])  # (T,)
        weights[BEFORE_PER_LINE * lines + 1] = DIGIT_WEIGHT
        return (losses * weights).sum() / (weights.sum() * toy.BATCH)

    return toy.teach(model, batch_loss, steps, "warm-up")


def exact_credit(batch: Batch, context: Context) -> tuple[Batch, Tensor]:
    """A batch and token advantages (B, T) whose gradient is that of the chance of a right digit.

    That chance, p, is known at every box. So the digits that were drawn are replaced by right ones,
    whose advantage is p, as p grad log p = grad p. The tokens before the box, all of a response
    without one, whose p is 0, have p minus the mean of the group's others, and what follows the
    digit has 0. The gradient's mean is that of the policy gradient without a baseline. Its noise is
    what the tokens before the box leave.
    """
    rollouts = replace(batch.rollouts, ids=batch.rollouts.ids.clone())
    places = {}
    for row, ids in enumerate(rollouts.ids.tolist()):
        tokens = context.tokenizer.convert_ids_to_tokens(ids)
        place = digit_place(tokens)
        if place is not None and batch.mask[row, place]:
            places[row] = place
            rollouts.ids[row, place] = toy.IDS[batch.problem_of(row)["answer"]]
    log_probs = context.score(rollouts, keep_hidden=False).log_probs  # (B, T)
    chances = log_probs.new_zeros(len(log_probs))  # (B,)
    for row, place in places.items():
        chances[row] = log_probs[row, place].exp()
    credit = torch.zeros_like(log_probs)  # (B, T)
    gaps = above_others(chances, batch.group_size)  # (B,)
    for row, gap in enumerate(gaps):
        end = places.get(row, int(batch.lengths[row]))
        credit[row, :end] = gap
    for row, place in places.items():
        credit[row, place] = chances[row]
    return replace(batch, rollouts=rollouts), credit
