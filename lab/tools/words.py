r"""Word problems in English whose first wrong step is known, for pretrained models.

    problem    Mia has 14 shells. Mia finds 5 more. Mia gives away 9.
               How many shells does Mia have now?
    response   Mia then has 14 + 5 = 19 shells.
               Now there are 19 - 9 = 10 shells.
               The answer is \boxed{10}.

A problem has two to five steps, each of which uses the number before it. `first_error` compares
each equation of a response with the problem's next step: the first operand, operation or result
that differs is the error, and it begins at the first character that differs. Operands of + and *
may swap. Nothing after the first error is read. A response has no error if all its equations are
true, each begins with the result before it, and the boxed answer is right, whatever the order of
its steps.

An equation may have units, `\times` or "plus", and "is" for =. A step that is not an equation is
skipped if the next equation is that of a later step; otherwise the first error is unknown. The
answer is that of the last box, as in grading.

The warm-up teaches a model this form by demonstrations with slips, each of which goes on from its
wrong number. The model then makes the same kinds of slips when it samples, which reinforcement
learning can remove.

Left out: several operations before one =, which are not read; division, which counts as an error.
"""

import os
import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from base.config import Problems
from lab.tools.warm_up import imitate
from rewards import box_place
from tasks.task import FirstError, Task, math_task
from tasks.toy import MADE_PROBLEMS

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
SIGNS = {  # each sign, and the forms in which responses may write it
    "+": r"\bplus\b",
    "-": r"[\u2212\u2013]|\bminus\b",
    "*": r"[\u00d7\u00b7]|\\times|\\cdot|\btimes\b|(?<![a-z])x(?![a-z])",
    "/": r"\u00f7|\\div",
    "=": r"\u2192|->|\b(?:is|are|equals?|makes?|gives?|leaves?)\b",
    " ": r"\$",
}
NUMBER = r"-?\d++(?:,\d++(?!\s*[-+*/]))*+(?:\.\d++)?+"
NUMERAL = re.compile(
    rf"({NUMBER})|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
    r"|\w+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)\b",
    re.I,
)
OPERAND = rf"({NUMBER})(?:\s+[a-z]+){{0,3}}\s*"  # a number and its unit
EQUATION = re.compile(  # one operation; ends before its result, with which the next may begin
    rf"(?<![-+*/\w])(?<![-+*/]\s){OPERAND}([-+*/])\s*{OPERAND}=\s*"
    rf"(?=(?:\\boxed\s*{{\s*)?({NUMBER}))",
    re.I,
)
IN_BOX = re.compile(rf"\D*?({NUMBER})\D*")
Number = TypeVar("Number", int, Decimal)
KINDS = "operand", "operator", "operand", "result"  # of a mistake, by the part that is wrong

LENGTHS = 2, 2, 3, 3, 4, 5  # steps per problem, drawn with equal chances
SLIP = 0.15  # chance that a step of a demonstration is wrong


def task(
    settings: Problems,
    tokenizer: PreTrainedTokenizerBase,
    model_name: str,
) -> tuple[Task, list[str]]:
    """The task with its problems, none held out yet, and a note for the user.

    Raises BadInput.
    """
    rng = random.Random(f"demonstrations {settings.seed}")
    made = make_problems(MADE_PROBLEMS + settings.heldout, settings.seed)
    plain, notes = math_task(settings, tokenizer, model_name, problems=made)
    return replace(
        plain,
        name="words",
        first_error=first_error,
        warm_up=partial(
            imitate,
            tokenizer=tokenizer,
            prompt=plain.prompt,
            make=partial(make_problem, rng),
            show=partial(demonstrate, rng=rng),
        ),
    ), notes


def make_problem(rng: random.Random) -> dict:
    """A problem, with its steps in figures.

    The keys are {"problem": text, "answer": number, "steps": [[left, op, right, result], ...],
    "name", "things"}.
    """
    name = rng.choice(NAMES)
    things = rng.choice(THINGS)
    value = rng.randint(3, 9)
    text = f"{name} has {value} {things}."
    steps = []
    for _ in range(rng.choice(LENGTHS)):
        op = rng.choice("+" if value < 3 else "+-*" if value < 7 else "+-")
        number = rng.randint(2, {"+": 5, "-": min(value - 1, 5), "*": 3}[op])
        text += " " + rng.choice(_ways_to_tell(op, number, name, things))
        result = result_of(op, value, number)
        steps.append([value, op, number, result])
        value = result
    text += f" How many {things} does {name} have now?"
    return {"problem": text, "answer": str(value), "steps": steps, "name": name, "things": things}


def result_of(op: str, left: Number, right: Number) -> Number:
    """The result of an operation: + - or *."""
    return {"+": left + right, "-": left - right, "*": left * right}[op]


def _ways_to_tell(op: str, number: int, name: str, things: str) -> list[str]:
    """All the ways to tell what happens in a step."""
    return [event.format(name=name, n=number, things=things) for event in EVENTS[op]]


def make_problems(count: int, seed: int) -> list[dict]:
    """`count` problems, all different."""
    rng = random.Random(f"words {seed}")
    problems: dict[str, dict] = {}
    while len(problems) < count:
        problem = make_problem(rng)
        problems[problem["problem"]] = problem
    return list(problems.values())


def demonstrate(problem: dict, rng: random.Random, careless: bool = True) -> str:
    """A worked response, one sentence per step.

    A careless one makes mistakes and continues from the wrong numbers.
    """
    value = problem["steps"][0][0]
    response = ""
    for _, op, number, _ in problem["steps"]:
        work, value = _work(op, value, number, rng, careless)
        sentence = rng.choice(WORK)
        response += sentence.format(name=problem["name"], things=problem["things"], work=work)
        response += "\n"
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
    number in the box). None if no step is wrong, or if the first error is unknown: a number stands
    outside the equations, or there is no equation or no box.
    """
    text = "".join(tokens)
    fault = _first_fault(problem, text)
    if not fault or fault[1] == len(text):  # cut off within a number, which may have been right
        return None
    kind, start, end = fault
    # a number that lacks digits is wrong at the character after it
    ends = list(accumulate(map(len, tokens)))  # where each token ends, in characters
    return FirstError(bisect_right(ends, start), kind, bisect_left(ends, max(end, start + 1)) + 1)


def _first_fault(problem: dict, text: str) -> tuple[str, int, int] | None:
    """The first mistake: its kind, the character where it begins, and where its step ends.

    None if no mistake is known.
    """
    box = box_place(text) or (len(text),) * 3  # no box counts as an empty one at the end
    for sign, forms in SIGNS.items():  # keeps the text's length, and so all places in it
        text = re.sub(forms, partial(_as_long, sign), text, flags=re.I)
    equations = list(EQUATION.finditer(text, 0, box[2]))
    boxed = IN_BOX.fullmatch(text, box[1], box[2])
    answer = int(problem["answer"])
    is_right = boxed and _number(boxed[1]) == answer
    chained = all(_number(later[1]) == _number(before[4]) for before, later in pairwise(equations))
    if is_right and chained and all(map(_holds, equations)):
        return None
    steps = [*problem["steps"], [answer, "", "", ""]]  # the last stands for the end: no operation
    read = 0  # characters up to the last equation's end
    done = 0  # steps

    def is_read(end: int) -> bool:
        """Whether the only numbers between the last equation and `end` are the next step's."""
        numerals = NUMERAL.finditer(text, read, end)
        return all(numeral[1] and _number(numeral[1]) in steps[done][::2] for numeral in numerals)

    for equation in equations:
        later = range(done, len(steps))  # steps may be skipped
        step = next((k for k in later if _first_difference(equation, steps[k])[0] > 2), done)
        part, start = _first_difference(equation, steps[step])
        if part == 0 and not is_read(equation.start()):
            return None
        if not steps[step][1]:
            return "extra", equation.start(), equation.end(4)
        if part < 4:
            return KINDS[part], start, equation.end(4)
        done = step + 1
        read = equation.end(4)
    if not equations or not boxed or is_right or not is_read(box[0]):
        return None
    if not steps[done][1]:
        return "final", boxed.start(1) + _common(_number(boxed[1]), answer), box[2]
    # a step is missing before the line with the box
    return "missing", max(read, text.rfind("\n", 0, box[0]) + 1), box[2]


def _as_long(sign: str, form: re.Match) -> str:
    """A sign, padded to the length of the form that it replaces."""
    return sign.ljust(len(form[0]))


def _number(text: str) -> Decimal:
    """The number in a text: 010 and 10.0 equal 10."""
    return Decimal(text.replace(",", ""))


def _holds(equation: re.Match) -> bool:
    """Whether an equation is true, which a division never is."""
    left, right, result = map(_number, equation.group(1, 3, 4))
    return equation[2] != "/" and result_of(equation[2], left, right) == result


def _first_difference(equation: re.Match, step: list) -> tuple[int, int]:
    """The first of an equation's four parts that differs from the step's, and at which character.

    4 and the equation's end if all agree. Operands of + and * may swap.
    """
    left, op, right, result = step
    if op in "+*" and _number(equation[1]) == right:
        left, right = right, left
    for part, due in enumerate((left, op, right, result)):
        written = equation[2] if part == 1 else _number(equation[part + 1])
        if written != due:
            return part, equation.start(part + 1) + _common(written, due)
    return 4, equation.end(4)


def _common(written: Decimal | str, due: int | str) -> int:
    """The length of the common beginning of two texts."""
    return len(os.path.commonprefix([str(written), str(due)]))  # noqa: RUF071, of characters
