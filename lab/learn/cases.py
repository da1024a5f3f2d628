"""What the exercises are checked with: inputs, and the functions of the paper's files.

    assess("span_bounds", function)  # whether it is right, and a sentence

Each function gets random input and nasty input: padding, one token, NaN, costs that underflow.
"""

import copy
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import shear


class Exercise(NamedTuple):
    """A function to write, and what it is compared with."""

    solution: Callable
    cases: Callable[[], Iterator[tuple]]  # each yields a description and the arguments


def reference_closest(
    costs: Tensor, right: shear.Side, wrong: shear.Side, eps: float
) -> tuple[Tensor, Tensor]:
    """The distances of `shear.closest_spans`."""
    found = shear.closest_spans(costs, right, wrong, eps)
    return found.of_right, found.of_wrong


def reference_potentials(
    C: Tensor, a: Tensor, b: Tensor, eps: float, iterations: int
) -> tuple[Tensor, Tensor]:
    """Plain iterations; those of `sinkhorn.sinkhorn` are over-relaxed from the fifth on."""
    g = torch.zeros_like(b)
    for _ in range(iterations):
        f = -eps * ((g - C) / eps + b.log()).logsumexp(1)
        g = -eps * ((f[:, None] - C) / eps + a.log()[:, None]).logsumexp(0)
    return f, g


def reference_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, n_tokens: int, *clip: float
) -> Tensor:
    """The loss of `grpo.policy_loss`, whose sum `train.backward` divides."""
    from grpo import policy_loss  # grpo imports transformers, which takes seconds

    return policy_loss(logp, old_logp, advantages, mask, *clip)[0] / n_tokens


# ---- the inputs ------------------------------------------------------------------------------


def sinkhorn_cases() -> Iterator[tuple]:
    """Costs, masses, eps and iterations."""
    C = torch.rand(5, 4)
    a = torch.rand(5).softmax(0)
    b = torch.rand(4).softmax(0)
    yield "one iteration", C, a, b, 0.5, 1
    yield "20 iterations", C, a, b, 0.1, 20
    yield "a single point on each side", C[:1, :1], torch.ones(1), torch.ones(1), 0.1, 3
    yield "eps a thousandth of the costs", C, a, b, 1e-3, 5
    padded = torch.tensor([0.25, 0.0, 0.75, 0.0])
    yield "two points of mass 0", C, a, padded, 0.1, 5


def span_cases() -> Iterator[tuple]:
    """Length, window and stride."""
    for length in (31, 12, 13, 18, 1, 0):
        yield f"{length} tokens, window 12, stride 6", length, 12, 6
    yield "9 tokens, window 4, stride 4", 9, 4, 4
    yield "5 tokens, window 3, stride 1", 5, 3, 1


def sides_of(lengths: list[int], right: int) -> tuple[shear.Side, shear.Side]:
    """The two sides of a group of random states with responses of these lengths.

    The first `right` responses are right.
    """
    hidden = torch.randn(len(lengths), max(lengths), 3)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    sides = shear.two_sides(
        hidden[mask], mask, torch.arange(len(lengths)) < right, window=4, stride=2
    )
    assert sides is not None
    return sides


def closest_cases() -> Iterator[tuple]:
    """Costs, two sides and eps."""
    for about, lengths, eps in (
        ("responses of one length", [8, 8, 8], 0.5),
        ("responses of many lengths, so that spans are padded", [7, 1, 9, 4], 0.5),
        ("one token on each side", [1, 1], 0.5),
    ):
        right, wrong = sides_of(lengths, right=1)
        yield about, shear.token_distances(right.states, wrong.states), right, wrong, eps
    yield "equal states", torch.zeros(len(right.states), len(wrong.states)), right, wrong, 0.5


def weight_cases() -> Iterator[tuple]:
    """Distances and spans."""
    for about, lengths in (
        ("one response", [9, 1]),
        ("two responses of one side, spans padded", [7, 3, 1]),
    ):
        side, _ = sides_of(lengths, right=len(lengths) - 1)
        yield about, torch.rand(len(side.spans.tokens)), side.spans
    yield "distances of 0", torch.zeros(len(side.spans.tokens)), side.spans
    tokens = torch.tensor([[0, 1], [2, 0]])  # the second span has one token; its padding is token 0
    spans = shear.Spans(tokens, torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    yield "padding that points at another span's token", torch.tensor([0.2, 0.7]), spans


def loss_cases() -> Iterator[tuple]:
    """The seven inputs of the loss."""
    old = torch.randn(3, 6) - 2
    logp = old + torch.randn(3, 6) / 2
    advantages = torch.randn(3, 6)
    mask = torch.arange(6) < torch.tensor([6, 2, 5])[:, None]
    every = torch.ones(3, 6).bool()
    yield "no padding", logp, old, advantages, every, 18, 0.2, 0.2
    yield "an upper bound of its own", logp, old, advantages, every, 18, 0.2, 0.9
    yield "a part of an optimizer step of 40 tokens", logp, old, advantages, mask, 40, 0.2, 0.28
    nan = logp.masked_fill(~mask, torch.nan)
    yield "NaN in the padding", nan, old, advantages, mask, 13, 0.2, 0.28


EXERCISES = {
    "span_bounds": Exercise(shear.span_bounds, span_cases),
    "sinkhorn_potentials": Exercise(reference_potentials, sinkhorn_cases),
    "closest_distances": Exercise(reference_closest, closest_cases),
    "token_weights": Exercise(shear.token_weights, weight_cases),
    "clipped_loss": Exercise(reference_loss, loss_cases),
}


# ---- the comparison --------------------------------------------------------------------------


def results_of(name: str, function: Callable, arguments: list) -> object:
    """What a function returns.

    A loss comes with its gradient; the potential of a point without mass is set to 0. The arguments
    are copied, so that a function may write into them.
    """
    arguments = copy.deepcopy(arguments)
    if name == "clipped_loss":
        arguments[0].requires_grad_()
    found = function(*arguments)
    if name == "clipped_loss":
        return found, torch.autograd.grad(found, arguments[0])[0]
    if name == "sinkhorn_potentials":
        f, g = found
        return f.masked_fill(arguments[1] == 0, 0.0), g.masked_fill(arguments[2] == 0, 0.0)
    return found


def assess(name: str, function: Callable) -> tuple[bool, str]:
    """Whether a function is right, and what to print of it."""
    exercise = EXERCISES[name]
    torch.manual_seed(0)
    cases = list(exercise.cases())
    for about, *arguments in cases:
        due = results_of(name, exercise.solution, arguments)
        try:
            got = results_of(name, function, arguments)
        except Exception:
            return False, f"{about}: raises {traceback.format_exc(limit=-1)}"
        try:
            torch.testing.assert_close(got, due, rtol=1e-4, atol=1e-5)
        except (AssertionError, TypeError) as error:
            reason = str(error).splitlines()[0]
            return False, f"{about}: {reason}\n  got {got}\n  due {due}"
    return True, f"right on {len(cases)} inputs"
