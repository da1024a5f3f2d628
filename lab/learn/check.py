"""Check the exercises of `lab/learn/exercises.py` against the functions of the paper's files.

    python -m lab.learn.check                        # all five
    python -m lab.learn.check span_bounds --hint     # one of them, and a hint

What is checked is your copy, mine/exercises.py: the first command makes it, and git ignores it. The
inputs are those of `lab/learn/cases.py`. The first result that differs is shown beside the one that
is due. The exit status is 0 if all are right, otherwise 1.

Left out: speed and style.
"""

import argparse
import ast
import shutil
import sys
from pathlib import Path

EXERCISES = Path(__file__).with_name("exercises.py")
MINE = Path("mine", "exercises.py")
HINTS = {
    "span_bounds": "Walk from span to span, and stop after the first whose end is the length.",
    "sinkhorn_potentials": (
        "log sum exp(x) is torch.logsumexp(x, dim), and b_j exp(x) is exp(x + log b_j)."
    ),
    "closest_distances": (
        "Fill a matrix (K+, K-): C is costs[rows][:, columns] of two spans. Then take its minima."
    ),
    "token_weights": (
        "Start with zeros; for each span, torch.maximum at its tokens whose mass is not 0."
    ),
    "clipped_loss": (
        "Select tokens first, as in logp[mask]: the gradient of NaN is NaN. Clip rho, not rho A."
    ),
}
STUB = ast.dump(ast.parse("raise NotImplementedError").body[0])


def unwritten_in(source: str) -> set[str]:
    """The functions of a source that end as the exercises do, in `raise NotImplementedError`.

    They are found in the text, because running it imports torch, which takes seconds.
    """
    functions = [part for part in ast.parse(source, MINE).body if isinstance(part, ast.FunctionDef)]
    ends = {function.name: ast.dump(function.body[-1]) for function in functions}
    return {name for name, end in ends.items() if end == STUB}


def check(name: str, source: str) -> tuple[bool, str]:
    """Whether a function of the source is right, and what to print of it."""
    if name in unwritten_in(source):
        return False, "not written yet"
    from lab.learn.cases import assess  # imports torch

    names: dict = {}
    exec(compile(source, MINE, "exec"), names)
    return assess(name, names[name])


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0 if all exercises are right, otherwise 1."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.learn.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", choices=HINTS, help="an exercise; if none, all")
    parser.add_argument("--hint", action="store_true", help="print a hint for what is not right")
    args = parser.parse_args(argv)
    if not MINE.exists():
        MINE.parent.mkdir(exist_ok=True)
        shutil.copy(EXERCISES, MINE)
        print(f"wrote {MINE}, your copy of the exercises: write the functions there")
    source = MINE.read_text(encoding="utf-8")
    names = [args.name] if args.name else list(HINTS)
    right = 0
    for name in names:
        is_right, sentence = check(name, source)
        right += is_right
        print(f"{name:20} {sentence}")
        if args.hint and not is_right:
            print(f"{'':20} hint: {HINTS[name]}")
    print(f"{right} of {len(names)} right")
    return 0 if right == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
