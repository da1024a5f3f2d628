r"""A task that a small model learns in seconds: of two rows it reads one.

    prompt     a=3141;b=2718;b?          the rows differ in their last digits
    response   b2e                       a line a digit: label, that row's digit, a filler
               a1d                       a slip: from here on the other row is read
               ...
               \boxed{1}                 the last line's digit

It replaces functions of tasks/toy.py by others of the same names. Demonstrations slip mostly where
the digit is 7 to 9, and never return. A first error is a slip without a return.
"""

import re

from tasks import toy

LINE = re.compile(r"([ab])\d[c-h]\n")


def make_problem(rng, lines: int) -> dict:
    rows = {label: "".join(rng.choices("0123456789", k=lines)) for label in "ab"}
    if rows["a"][-1] == rows["b"][-1]:
        return make_problem(rng, lines)
    wanted = rng.choice("ab")
    return {"problem": f"a={rows['a']};b={rows['b']};{wanted}?\n", "answer": rows[wanted][-1]}


def demonstrate(problem: dict, rng) -> str:
    a, b, wanted = re.fullmatch(r"a=(\d+);b=(\d+);([ab])\?\n", problem["problem"]).groups()
    response = ""
    label = wanted
    for number, digit in enumerate(a if wanted == "a" else b):
        if label == wanted and rng.random() < (0.55 if digit in "789" else 0.05):
            label = {"a": "b", "b": "a"}[wanted]
        shown = (a if label == "a" else b)[number]
        response += f"{label}{shown}{rng.choice('cdefgh')}\n"
    return response + rf"\boxed{{{shown}}}"


def first_error(problem: dict, tokens: list[str]) -> toy.FirstError | None:
    wanted = problem["problem"][-3]
    error = None
    start = 0
    response = "".join(tokens)
    for line in response.splitlines(keepends=True):
        if not LINE.fullmatch(line):
            break
        error = None if line[0] == wanted else error or toy.FirstError(start, "slip", start + 4)
        start += 4
    is_right = response.endswith(rf"\boxed{{{problem['answer']}}}")
    return None if is_right else error or toy.FirstError(start, "format", start + 1)


def response_tokens(lines: int) -> int:
    return 4 * lines + 4
