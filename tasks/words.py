r"""Word problems in English whose first wrong step is known: for a pretrained model, on the
embedded task's terms.

    problem    Mia has 14 shells. Mia finds 5 more. Mia gives away 9. How many shells does Mia have
               now?
    response   Mia then has 14 + 5 = 19 shells.
               Now there are 19 - 9 = 10 shells.
               The answer is \boxed{10}.

A problem has two to five steps, each of which uses the number before it. `first_error` compares
equation k of a response with step k of the problem: the first operand, operation or result that
differs is the error, and it begins where the text does. Operands of + and * may swap. What follows
consistently from a wrong number is not looked at, as the first error has been found. A response
that comes to the right answer by equations which hold, each beginning with the number before it,
has no error, in whatever order it takes the steps. Of a wrong response that cannot be read so, no
first error is known.

`warm_up` teaches a model the form, by demonstrations with slips, which go on from the wrong number:
it then makes slips of the same kinds where it samples, and reinforcement learning has something to
mend.

Left out: several steps in one equation, division, which are errors here.
"""

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fast.packing import packing_of
from grpo import Policy, Rollouts, pad_left
from tasks.lessons import FirstError, demonstrated, padded, teach, unlike

NAMES = "Tom Ann Ben Mia Leo Zoe Sam Eva Max Ivy".split()
THINGS = "apples pens books coins cards shells stamps marbles".split()
EVENTS = {
    "+": ["{name} buys {n} more.", "{name} finds {n} more.", "{name} gets {n} {things}."],
    "-": ["{name} loses {n}.", "{name} sells {n} {things}.", "{name} gives away {n}."],
    "*": [
        "Soon {name} has {n} times as many.",
        "The number of {things} grows to {n} times as many.",
    ],
}
WORK = [
    "{name} then has {work} {things}.",
    "Now there are {work} {things}.",
    "That makes {work} {things}.",
]
NUMBER = r"-?\d+(?:[.,]\d+)*"
EQUATION = re.compile(rf"({NUMBER})\s*([-+*x\u00d7/])\s*({NUMBER})\s*=\s*({NUMBER})")
BOX = re.compile(rf"\\boxed\{{\s*({NUMBER})")
TIMES = "*x\u00d7"  # as responses may write it
KINDS = "operand", "operator", "operand", "result"  # of the mistakes in an equation's four parts

LENGTHS = 2, 2, 3, 3, 4, 5  # steps of a problem
SLIP = 0.15  # chance that a step of a demonstration is wrong
BATCH = 8  # demonstrations in a batch of supervised learning
LR = 1e-4  # of a pretrained model's lessons


def result_of(op: str, left: int, right: int) -> int:
    """left op right."""
    return {"+": left + right, "-": left - right, "*": left * right}[op]


def make_problem(rng: random.Random) -> dict:
    """{"problem": text, "answer": number, "steps": [[left, op, right, result], ...], "name",
    "things"}.
    """
    name, things, value = rng.choice(NAMES), rng.choice(THINGS), rng.randint(3, 9)
    text, steps = f"{name} has {value} {things}.", []
    for _ in range(rng.choice(LENGTHS)):
        op = rng.choice("+" if value < 3 else "+-*" if value < 7 else "+-")
        number = rng.randint(2, {"+": 5, "-": min(value - 1, 5), "*": 3}[op])
        text += " " + rng.choice(_ways_to_tell(op, number, name, things))
        steps.append([value, op, number, result_of(op, value, number)])
        value = steps[-1][-1]
    text += f" How many {things} does {name} have now?"
    return {"problem": text, "answer": str(value), "steps": steps, "name": name, "things": things}


def _ways_to_tell(op: str, number: int, name: str, things: str) -> list[str]:
    """What happens in a step, in all words for it."""
    return [event.format(name=name, n=number, things=things) for event in EVENTS[op]]


def rephrase(problem: dict, k: int) -> tuple[dict, dict[str, str]]:
    """The same problem with its events told in other words, the k-th way; no thing gets another
    name.
    """
    first, *events, last = re.split(r"(?<=\.) ", problem["problem"])
    told = []
    for place, (event, (_, op, number, _)) in enumerate(zip(events, problem["steps"], strict=True)):
        others = [
            way
            for way in _ways_to_tell(op, number, problem["name"], problem["things"])
            if way != event
        ]
        told.append(others[(k >> place) % len(others)])
    return {**problem, "problem": " ".join([first, *told, last])}, {}


def make_problems(count: int, seed: int) -> list[dict]:
    """`count` problems, all different."""
    rng = random.Random(f"words {seed}")
    return unlike(0, count, lambda: make_problem(rng))[1]


def demonstrate(problem: dict, rng: random.Random, careless: bool = True) -> str:
    """A worked response, a sentence per step; a careless one makes mistakes and continues from the
    wrong numbers.
    """
    value, response = problem["steps"][0][0], ""
    for _, op, number, _ in problem["steps"]:
        work, value = _work(op, value, number, rng, careless)
        response += (
            rng.choice(WORK).format(name=problem["name"], things=problem["things"], work=work)
            + "\n"
        )
    return response + rf"The answer is \boxed{{{value}}}."


def _work(op: str, left: int, right: int, rng: random.Random, careless: bool) -> tuple[str, int]:
    """One step's equation and its result, e.g. ("14 + 5 = 19", 19)."""
    off = 0
    if careless and rng.random() < SLIP:
        slip = rng.random()
        if slip < 0.6:
            off = rng.choice((-10, -2, -1, 1, 2, 10))
        elif slip < 0.8:
            right += rng.choice((-1, 1))
        else:
            op = rng.choice([other for other in "+-*" if other != op])
    result = result_of(op, left, right) + off
    return f"{left} {op} {right} = {result}", result


def first_error(problem: dict, tokens: Sequence[str]) -> FirstError | None:
    r"""The first wrong step of a response, given as the texts of its tokens.

    Its kind is operand, operator, result, missing (a step), extra (an equation) or final (another
    number in the box). None if there is none, or if the response cannot be read so far: it has no
    equation, or ends without a box.
    """
    text = "".join(tokens)
    found = _first_fault(problem, text)
    if not found or found[1] == len(text):  # cut off within a number, which may have been right
        return None
    kind, start, end = found
    ends = list(accumulate(map(len, tokens)))  # of each token, in characters
    end = max(end, start + 1)  # of a number that ends too soon the error is what follows
    return FirstError(bisect_right(ends, start), kind, bisect_left(ends, end) + 1)


def _first_fault(problem: dict, text: str) -> tuple[str, int, int] | None:
    """The kind of the first mistake, and the characters from where it begins to the end of its
    step; None if none.
    """
    box = BOX.search(text)
    equations = list(EQUATION.finditer(text, 0, box.start() if box else len(text)))
    chained = all(later[1] == before[4] for before, later in pairwise(equations))
    if box and box[1] == problem["answer"] and chained and all(map(_holds, equations)):
        return None
    for equation, step in zip(equations, problem["steps"], strict=False):
        left, op, right, result = map(str, step)
        if op in "+*" and equation[1] == right:
            left, right = right, left
        expected = left, TIMES if op == "*" else op, right, result
        for group, kind in enumerate(KINDS, 1):
            said, due = equation[group], expected[group - 1]
            if said not in due if kind == "operator" else said != due:
                return kind, equation.start(group) + _common(said, due), equation.end()
    if not equations or not box:
        return None
    done, steps = len(equations), len(problem["steps"])
    if done < steps:  # the sentence of the box comes too soon
        return "missing", max(equations[-1].end(), text.rfind("\n", 0, box.start()) + 1), box.end()
    if done > steps:
        return "extra", equations[steps].start(), equations[steps].end()
    if box[1] != problem["answer"]:
        return "final", box.start(1) + _common(box[1], problem["answer"]), box.end()
    return None


def _holds(equation: re.Match) -> bool:
    """Whether an equation between integers is true; false for others."""
    op = "*" if equation[2] in TIMES else equation[2]
    try:
        return result_of(op, int(equation[1]), int(equation[3])) == int(equation[4])
    except (KeyError, ValueError):  # a division, a fraction
        return False


def _common(said: str, expected: str) -> int:
    """How many characters two texts begin with alike."""
    count = 0
    while count < min(len(said), len(expected)) and said[count] == expected[count]:
        count += 1
    return count


def warm_up(
    model, tokenizer, prompt: Callable[[dict], str], forbidden: set[str], *, steps: int, seed: int
) -> float:
    """Teach a model of any kind the form, slips and all: `steps` batches; returns the last loss.

    `prompt` makes the text that the model continues; `forbidden` problems (the held-out ones) are
    never shown.
    """
    rng, policy = random.Random(f"demonstrations {seed}"), Policy(model, **packing_of(model))

    def batch_loss() -> Tensor:
        """Minus the mean log-probability of a batch of demonstrations, which are laid out as
        rollouts are.
        """
        pairs = demonstrated(
            BATCH, lambda: make_problem(rng), lambda problem: demonstrate(problem, rng), forbidden
        )
        told = tokenizer([prompt(problem) for problem, _ in pairs], add_special_tokens=False)[
            "input_ids"
        ]
        said = tokenizer([response for _, response in pairs], add_special_tokens=False)["input_ids"]
        prompt_ids, prompt_mask = pad_left(told, 0, model.device)  # (8, P), (8, P)
        ids = padded([[*row, tokenizer.eos_token_id] for row in said], -1, model.device)  # (8, T)
        mask, ended = ids >= 0, torch.zeros(len(pairs), dtype=torch.bool)  # (8, T), (8,)
        rollouts = Rollouts(
            prompt_ids, prompt_mask, ids.clamp_min(0), mask, ended, [text for _, text in pairs]
        )
        return -policy(rollouts, 1.0)[mask].mean()

    return teach(model, batch_loss, steps, "warm-up", lr=LR, rise=5)
