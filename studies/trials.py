"""The trials of the studies: cells, rules, learning rates and seeds, and which of them a stage still lacks.

A cell is a task, a rule a credit method. `lacking` lists what `studies/study.py` is to run, by docs/study-plan.md, and
`studies/compare.py`, of which the cell is a user's own. Rows are those of the file to which they add.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from credit.table import METHODS, needing

WALK = "--toy-kind recoverable --toy-lines 8 --toy-width 64 --warmup-steps 400 --window 6 --stride 3 --steps 24"
CHANGED = {
    "shear-mean1": {"method": "shear", "rescale": "mean1"},
    "grpo-wrong-.12": {"method": "grpo", "negative_scale": 0.12},
    "sdpo": {"method": "sdpo", "method_option": ["mix=0.9"]},
    "grpo-dynamic": {"method": "grpo", "dynamic_sampling": 4},
    "shear-dynamic": {"method": "shear", "dynamic_sampling": 4},
    "grpo-lora": {"method": "grpo", "lora_rank": 16},
    "arca-lora": {"method": "arca", "lora_rank": 16},
}
ALL = "grpo shear shear-mean1 position shuffle kgae first grpo-wrong-.12".split()
# A rule's flags: the study's first, then the other methods, then what is changed of one.
RULES = {}
for rule in [*ALL, *METHODS, *CHANGED]:
    if rule not in needing("adapter"):  # only by `-lora`
        RULES[rule] = CHANGED.get(rule, {"method": rule})
FEW = ["grpo", "shear", "position", "kgae"]


class Cell(NamedTuple):
    """A task by its flags of train.py, the learning rate in the middle of its grid, and the rules that are tried."""

    flags: str
    lr: float
    rules: list[str]


CELLS = {
    "r.3": Cell(f"{WALK} --toy-repair 0.3", 2e-4, ALL),
    "LP": Cell(f"{WALK} --toy-repair 0.03 --toy-luck 0.2 --toy-tail 16", 2e-4, ALL),
    "r0": Cell(f"{WALK} --toy-repair 0", 2e-4, FEW),
    "r.1": Cell(f"{WALK} --toy-repair 0.1", 2e-4, FEW),
    "luck": Cell(f"{WALK} --toy-repair 0.1 --toy-luck 0.2", 2e-4, FEW),
    "T2": Cell("--steps 20", 1e-4, FEW),
}
ORACLE = ["grpo", "oracle-value"]
RARE = f"{WALK} --toy-repair 0.03 --toy-luck 0.2"  # repairs are rare: few rollouts succeed
LONG = "--toy-kind recoverable --toy-lines 24 --toy-width 64 --warmup-steps 600 --window 6 --stride 3 --steps 12"
LONG += " --toy-repair 0.02 --toy-luck 0.05"  # wrong turns are rare and long: answers of 100 and 205 tokens
HEADROOM = {
    "rare": Cell(RARE, 2e-4, ORACLE),
    "rare, 32 rollouts": Cell(f"{RARE} --prompts-per-step 4 --prompts-per-update 1", 2e-4, ORACLE),
    "rare, groups of 2": Cell(  # draws its 640 problems more than once
        f"{RARE} --prompts-per-step 64 --prompts-per-update 16 --rollouts-per-prompt 2", 2e-4, ORACLE
    ),
    "rare, one update": Cell(f"{RARE} --prompts-per-update 16", 2e-4, ORACLE),
    "rarer": Cell(f"{WALK} --toy-repair 0.01 --toy-luck 0.2", 2e-4, ORACLE),
    "r0, 32 rollouts": Cell(f"{WALK} --toy-repair 0 --prompts-per-step 4 --prompts-per-update 1", 2e-4, ORACLE),
    "24 lines": Cell(f"{LONG} --toy-tail 0", 2e-4, ORACLE),
    "24 lines, tail": Cell(f"{LONG} --toy-tail 104", 2e-4, ORACLE),
    "r.3": CELLS["r.3"]._replace(rules=ORACLE),  # the policy's own slips
    "r.1": CELLS["r.1"]._replace(rules=ORACLE),
}
PRIMARY = ("r.3", "LP")  # the cells whose tests decide
SEEDS = {"headroom": (100, 101), "advantages": (100, 101), "tune": (100, 101), "confirm": tuple(range(10))}
LOWEST, HIGHEST = 1 / 8, 8  # of the grid's middle: no grid goes further


class Trial(NamedTuple):
    """What tells a row of a stage from the others."""

    cell: str
    seed: int
    rule: str
    lr: float


def lacking(stage: str, rows: list[dict], cells: dict[str, Cell], seeds: Sequence[int]) -> list[Trial]:
    """The trials of a stage without a row, cell by cell and seed by seed."""
    ran = {Trial(row["cell"], row["seed"], row["rule"], row["lr"]) for row in rows if row["stage"] == stage}
    trials = []
    for name, cell in cells.items():
        if stage == "advantages":  # one trial, measured before its first step, has the credit of all rules
            rates = {"grpo": [cell.lr]}
        elif stage == "cost":
            rates = {rule: [cell.lr] for rule in cell.rules}
        elif stage == "confirm":
            rates = {rule: [chosen_rate(name, rule, rows)] for rule in cell.rules}
        else:
            rates = {rule: grid(middle(cell, rule), mean_curves(stage, name, rule, rows)) for rule in cell.rules}
        for seed in seeds:
            trials += [Trial(name, seed, rule, lr) for rule in rates for lr in rates[rule]]
    return [trial for trial in trials if trial not in ran]


def mean_curves(stage: str, cell: str, rule: str, rows: list[dict]) -> dict[float, float]:
    """Learning rate -> mean training reward over steps and seeds, for the rates that all seeds have run."""
    found = {}
    for row in rows:
        if (row["stage"], row["cell"], row["rule"]) == (stage, cell, rule):
            found.setdefault(row["lr"], []).append(statistics.mean(row["rewards"]))
    return {lr: statistics.mean(curves) for lr, curves in found.items() if len(curves) == len(SEEDS[stage])}


def middle(cell: Cell, rule: str) -> float:
    """The learning rate in the middle of a rule's grid; adapters need ten times that of the whole model."""
    return 10 * cell.lr if "lora_rank" in RULES[rule] else cell.lr


def grid(middle: float, curves: dict[float, float]) -> list[float]:
    """Half the middle rate, itself and its double; beyond, by factors of 2, as long as the best lies at an end."""
    rates = [middle / 2, middle, middle * 2]
    while set(rates) <= set(curves):
        best = max(rates, key=curves.get)
        if best == rates[0] and best > LOWEST * middle:
            rates.insert(0, best / 2)
        elif best == rates[-1] and best < HIGHEST * middle:
            rates.append(best * 2)
        else:
            break
    return rates


def chosen_rate(cell: str, rule: str, rows: list[dict]) -> float:
    """The rate of the highest mean curve in the stage `tune`."""
    curves = mean_curves("tune", cell, rule, rows)
    return max(curves, key=curves.get)
