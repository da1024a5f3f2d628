r"""How the answers of a file are read, and which of their other forms are not right.

    python -m lab.tools.answers FILE     # .jsonl, .json, .csv or .parquet, as --data takes it

Each answer is graded against itself, its number alone and its \text form. A line names what is not
right, and what may not be read as it was meant: letters that are factors, a subtraction, a worked
solution, several boxes, braces that do not match. A row needs no problem.
"""

import re
import sys
from pathlib import Path

import tyro

from grading.spelling import UNIT, respell
from lab.tools.command import command
from rewards import grade_math
from tasks.errors import bad_input_on_error
from tasks.problems import as_problem
from tasks.rows import from_file

# A number and letters that may be a unit, and nothing else.
LETTERS = re.compile(r"[-+0-9.,/\s]*[0-9]\s*(?:[mgshLlNWVJAtK]|[A-Za-z]{2,})")
SUBTRACTION = re.compile(r"[0-9]+(?:\s?[-\u2013]\s?[0-9]+)+")
WORKED = re.compile(r"\\boxed|\n\s*\S|[a-z0-9]\.\s+[A-Z]|(?:[A-Za-z]{2,}[\s,]+){12}")


def check_answers(file: tyro.conf.Positional[Path]) -> None:
    """Print how a file's answers are read, and which of their other forms are not right."""
    count = 0
    for count, row in enumerate(from_file(str(file), str(file)), 1):
        with bad_input_on_error(f"{file}, row {count}", 'give rows with "answer" or "solution"'):
            gold = as_problem({"problem": "any"} | row, "math")["answer"]
        reading = reading_of(gold, row.get("solution"))
        if reading:
            print(f"row {count}: {gold!r} is {reading}")
        for form in forms_of(gold):
            graded = grade_math(rf"\boxed{{{form}}}", gold)
            if graded.reason != "correct":
                print(f"row {count}: {form!r} is {graded.reason} for {gold!r}")
    print(f"{count} answers")


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
    r"""An answer, and as far as it is a number with a word: the number alone, and \text{ word}."""
    match = re.fullmatch(r"([-+$0-9.,/\s]*)(?:\\text\{)?([A-Za-z][A-Za-z/^.\s]*[0-9]?)\}?", answer)
    if match is None:
        return [answer]
    number, word = match.groups()
    return [answer, rf"{number}\text{{{word}}}", *[number] * bool(number.strip())]


main = command("lab.tools.answers", check_answers)

if __name__ == "__main__":
    sys.exit(main())
