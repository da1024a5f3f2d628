r"""How the answers of a file are read, and which of their other forms are not right.

    python -m lab.tools.answers FILE     # .jsonl, .json (also .gz), .csv or .parquet, as --data

Each answer is graded against itself, the box of the row's own solution, and what a person would
write for it: its number alone and its \text form, without "about", with a decimal point for a
comma, and a time with and without a leading zero and a.m. A line names what is not right, and what
may not be read as it was meant: letters that are factors, a subtraction, a worked solution, several
boxes, braces that do not match. Last come the rows that `train.py` would drop, and its warnings, as
of problems that occur twice. A row needs no problem.
"""

import re
import sys
from pathlib import Path

import tyro

from grading.spelling import UNIT, respell
from lab.tools.command import command
from rewards import grade_math, last_box
from tasks.problems import doubts_of, noting, numbered, unread_of
from tasks.readings import HEDGED
from tasks.rows import from_file

# A number and letters that may be a unit, and nothing else.
LETTERS = re.compile(r"[-+0-9.,/\s]*[0-9]\s*(?:[mgshLlNWVJAtK]|[A-Za-z]{2,})")
SUBTRACTION = re.compile(r"[0-9]+(?:\s?[-\u2013]\s?[0-9]+)+")
COMMA = re.compile(r"(?<![0-9,.])(0|[1-9][0-9]*),([0-9]{1,2}|(?<=0,)[0-9]+)(?![0-9,])")
CLOCK = re.compile(r"0?([0-9]{1,2})(:[0-9]{2})(?:\s?([ap])\.?m\.?)?", re.I)
WORKED = re.compile(r"\\boxed|\n\s*\S|[a-z0-9]\.\s+[A-Z]|(?:[A-Za-z]{2,}[\s,]+){12}")


def check_answers(file: tyro.conf.Positional[Path]) -> None:
    """Print how a file's answers are read, and which of their other forms are not right."""
    names: set[str] = set()
    rows = enumerate(noting(from_file(str(file), str(file)), names), 1)
    complete = (
        {"prompt": [{"role": "user", "content": f"row {row}"}]} | keys for row, keys in rows
    )
    problems, dropped, _ = numbered(complete, "math", str(file))
    for row, problem in problems.items():
        gold = problem["answer"]
        reading = reading_of(gold, problem.get("solution"))
        if reading:
            print(f"row {row}: {gold!r} is {reading}")
        solution = problem.get("solution")
        if solution:
            graded = grade_math(solution, gold)
            if graded.reason != "correct":
                box = last_box(solution)
                print(f"row {row}: the solution's box, {box!r}, is {graded.reason} for {gold!r}")
        for form in forms_of(gold):
            graded = grade_math(rf"\boxed{{{form}}}", gold)
            if graded.reason != "correct":
                print(f"row {row}: {form!r} is {graded.reason} for {gold!r}")
    for note in [*dropped, *doubts_of(problems), *unread_of(names)]:
        print(note)
    print(f"{len(problems)} answers")


def reading_of(answer: str, solution: object = None) -> str:
    """How an answer is read, if perhaps not as it was meant.

    `solution` is the text that it was taken from, if it was.
    """
    boxes = str(solution).split(r"\boxed{")
    if len(boxes) > 2 and boxes[-1].startswith(answer):
        return "the last of several boxes"
    if WORKED.search(answer):
        return "a worked solution, which no response equals"
    if not _is_balanced(answer):
        return "not equal to itself, as its braces do not match"
    if SUBTRACTION.fullmatch(answer.strip()) and r"\text" not in respell(answer):
        return "read as a subtraction"
    if LETTERS.fullmatch(answer) and re.search("[0-9]\\s?[A-Za-z]", UNIT.sub("", respell(answer))):
        return "read as a product with letters, no unit; a unit of one letter needs a space before"
    return ""


def _is_balanced(text: str) -> bool:
    """Whether each brace has its counterpart; printed ones do not count."""
    braces = re.sub(r"\\.|[^{}]", "", text)
    while "{}" in braces:
        braces = braces.replace("{}", "")
    return not braces


def forms_of(answer: str) -> list[str]:
    r"""An answer, and what a person would write for it.

    That is the number of a number with a word alone, and \text{ word}; no "about"; a decimal point
    for a comma; other forms of a time.
    """
    forms = [answer]
    match = re.fullmatch(r"([-+$0-9.,/\s]*)(?:\\text\{)?([A-Za-z][A-Za-z/^.\s]*[0-9]?)\}?", answer)
    clock = CLOCK.fullmatch(answer.strip())
    if clock:
        forms += _times(*clock.groups())
    elif match:
        number, word = match.groups()
        forms += [rf"{number}\text{{{word}}}", *[number] * bool(number.strip())]
    exact = COMMA.sub(r"\1.\2", HEDGED.sub("", answer))
    return forms if exact == answer else [*forms, exact]


def _times(hour: str, minutes: str, half: str | None) -> list[str]:
    """A time with and without a leading zero, and with and without a.m. or p.m."""
    forms = [f"{hour}{minutes}", f"{hour:>02}{minutes}"]
    if half or 0 < int(hour) < 12:
        forms.append(f"{hour}{minutes} {half or 'a'}.m.")
    return forms


main = command("lab.tools.answers", check_answers)

if __name__ == "__main__":
    sys.exit(main())
