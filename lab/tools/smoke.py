"""The whole path of a run in a minute: two steps of two problems per rank, at real sizes of model.

    python -m lab.tools.smoke --model PATH --ranks 8 FLAGS OF train.py   # runs/smoke-1

It loads, teaches, samples, grades, assigns credit, updates, saves and evaluates as train.py does
with these flags; only numbers of steps, problems, rollouts and tokens are small. As responses that
are cut off so early are never right, the rewards of a step alternate after grading:
`--use lab.tools.smoke` does that to any run. The test has passed if a step had a gradient and the
model is saved.

Left out: a warm-up of more than two steps, resuming, ranks that torchrun starts.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import train
from base import files
from base.config import parse_train
from base.errors import BadInput, RunFailed
from grpo import Rollouts
from harness.command import run_command
from harness.fsdp import on_machine, processes
from harness.run import needs_warm_up
from rewards import Verdict
from tasks.task import Task

if TYPE_CHECKING:
    from harness.run import Hooks

PER_RANK = 2  # problems of a step, and held-out ones
TOKENS = 16  # per response, at most


def use(hooks: "Hooks") -> None:
    """Let the rewards of each step be 1 and 0 in turn."""
    hooks.verdicts = alternate


def alternate(task: Task, problems: list[dict], rollouts: Rollouts) -> list[Verdict]:
    """Verdicts whose rewards are 1 and 0 in turn, after grading."""
    graded = task.verdicts(problems, rollouts)
    return [Verdict(float(number % 2 == 0), "drawn") for number in range(len(graded))]


@run_command
def main(argv: Sequence[str] | None = None) -> int:
    """Train two steps; returns the exit status of train.py, 1 where no step had a gradient."""
    words = list(sys.argv[1:] if argv is None else argv)
    config = parse_train(words)
    if config.resume:
        raise BadInput("lab.tools.smoke: starts a run of its own; leave --resume out")
    world = processes(on_machine(config))
    number = 1
    while (Path(config.out) / f"smoke-{number}").exists():
        number += 1
    folder = Path(config.out) / f"smoke-{number}"
    sizes = {
        "steps": 2,
        "prompts-per-step": PER_RANK * world,
        "prompts-per-update": PER_RANK * world,
        "rollouts-per-prompt": 2,
        "heldout": PER_RANK * world,
        "eval-groups": world,
        "name": folder.name,
    }
    if config.max_tokens:  # the embedded task's responses are short
        sizes["max-tokens"] = min(TOKENS, config.max_tokens)
    if needs_warm_up(config):
        sizes["warmup-steps"] = 2
    flags = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    status = train.main([*words, "--use", "lab.tools.smoke", *flags])
    if status:
        return status
    rows = files.read_lines(folder / "metrics.jsonl")
    if not any(row.get("grad_norm") for row in rows) or not (folder / "model").exists():
        raise RunFailed(f"{folder}: no step had a gradient; look at metrics.jsonl")
    print(f"\nsmoke test passed: {folder}; remove it when you have looked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
