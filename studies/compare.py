"""Every credit method under the same loop, each at its own learning rate, as one table.

    python -m studies.compare --steps 20                       # the embedded task, every row of `trials.RULES`
    python -m studies.compare --methods grpo shear first       # some of them
    python -m studies.compare --methods grpo shear --toy-lines 3 --steps 10    # any flags of train.py

A trial is a row of the table, a learning rate and a seed. The stages of `studies/study.py` run one after the other:
`tune` tries half, one and two times `--lr` on two seeds, and further where the best lies at an end; `confirm` takes
each row's best rate on `--seeds`; `cost` times a step of each row, and of GRPO by turns; `advantages` measures true
token advantages at the start, on the embedded task. All rows of a seed go from one start and see the same problems.
Finished trials are lines of `--rows`, which is only added to: the same command goes on where it was interrupted, and
prints the table where nothing lacks. Other flags of train.py are another task, whose trials may go to the same file.

The table has means over the seeds, D the mean of the differences from GRPO, paired by seed, with its 90% interval:
    curve            mean reward of all training steps
    held out         accuracy on 256 problems after training, 8 samples each
    AUC              of the weights against the true first error, before / after training; and of the wrong step alone
    correlation      of credit with true token advantages at the start, corrected for their noise
    extra cost       a step's time beside GRPO's, median of three
    weight, share    mean weight of tokens, and the share of them that it is spread over

`shear-mean1` and `grpo-wrong-.12` are controls: methods differ in how much they punish, and in the size of the step.

Left out: several GPUs, and the process reward model of a real one: run train.py for these.
"""

import argparse
import shlex
import statistics
import sys
from pathlib import Path

from harness.config import Parser, answer, check_flags, positive_int, random_seed, spelled
from studies.trials import RULES, SEEDS, Cell, chosen_rate


def make_parser() -> Parser:
    """This command's own flags."""
    about = "Train with every credit method, each at its own learning rate; one table."
    epilog = "Flags of train.py that are not set here can be added. Without any, all rows take some hours."
    parser = Parser(prog="python -m studies.compare", description=about, epilog=epilog, allow_abbrev=False)
    add = parser.add_argument
    names = f"rows of the table, of {', '.join(RULES)}; if not given: all that the task allows"
    add("--methods", nargs="+", default=[], choices=list(RULES), metavar="ROW", help=names)
    add("--seeds", nargs="+", type=random_seed, default=[0, 1, 2, 3, 4], help="of the table; others choose the rates")
    add("--jobs", type=positive_int, default=2, help="seeds at a time, a process each")
    add("--rows", type=Path, metavar="FILE", default=Path("runs/compare.jsonl"), help="of finished trials")
    return parser


answer(__name__, lambda: check_flags(make_parser()))  # before what takes seconds to import


from harness import files, tables
from harness.launch import parse_args, run_command
from studies.findings import by_seed, differences, of_start, with_interval
from studies.study import run_stage
from tasks.problems import BadInput

OURS = "--method --seed --lr --heldout --name --out --resume --prm"  # flags of train.py that trials set themselves


@run_command(memory="lower --jobs or --micro-tokens")
def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 where memory does not suffice, 2 for bad input, 130 after Ctrl-C."""
    return compare(argv)


def compare(argv: list[str] | None) -> int:
    """The trials that are not there yet, and the table; raises BadInput for flags that no trial can have."""
    flags, others = make_parser().parse_with_others(argv, OURS, "the trials set it")
    args = parse_args(others)
    cell = Cell(shlex.join(others), args.lr, flags.methods or [rule for rule in RULES if allowed(rule, others)])
    for rule in cell.rules:
        flags_of(rule, others)  # raises for what it needs and does not have
    if len(set(flags.seeds)) < 2 or set(flags.seeds) & set(SEEDS["tune"]):
        given = " ".join(map(str, flags.seeds))
        raise BadInput(f"--seeds {given}: 100 and 101 choose the rates, an interval needs two others; give these")
    if "grpo" not in cell.rules:
        raise BadInput(f"--methods {' '.join(cell.rules)}: all are compared with grpo; add it")
    try:
        flags.rows.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--rows {flags.rows}: its folder cannot be made ({error}); choose another") from error
    stages = {"tune": SEEDS["tune"], "confirm": flags.seeds, "cost": SEEDS["tune"][:1]}
    if args.task == "embedded":
        stages["advantages"] = SEEDS["advantages"]
    for stage, seeds in stages.items():
        run_stage(stage, {cell.flags: cell}, seeds, flags.rows, flags.jobs)
    rows = [row for row in files.rows(flags.rows) if row["stage"] != "confirm" or row["seed"] in flags.seeds]
    print("\n".join(tables.markdown(table_of(rows, cell))))
    return 0


def flags_of(rule: str, others: list[str]) -> argparse.Namespace:
    """train.py's settings of a row; raises BadInput."""
    words = [word for name, value in RULES[rule].items() for word in spelled(name, value)]
    return parse_args([*others, *words])


def allowed(rule: str, others: list[str]) -> bool:
    """Whether the task has what the rule needs."""
    try:
        flags_of(rule, others)
    except BadInput:
        return False
    return True


def table_of(rows: list[dict], cell: Cell) -> list[dict[str, str]]:
    """A line a rule, of rows whose seeds are those of the table."""
    table = []
    for rule in cell.rules:
        of_rule = [row for row in rows if (row["cell"], row["rule"]) == (cell.flags, rule)]
        trials = [row for row in of_rule if row["stage"] == "confirm"]
        line = {"method": rule, "lr": f"{chosen_rate(cell.flags, rule, rows):g}"}
        for outcome, title in (("curve", "curve"), ("sampled", "held out")):
            line[title] = f"{statistics.mean(by_seed(rows, cell.flags, rule, outcome).values()):.3f}"
            of_grpo = differences(rows, cell.flags, rule, "grpo", outcome)
            line[f"D, {title}"] = "" if rule == "grpo" else with_interval(of_grpo)
        line["AUC"] = f"{mean_auc(trials, 'before', 'auc')} / {mean_auc(trials, 'after', 'auc')}"
        line["wrong step"] = f"{mean_auc(trials, 'before', 'auc_step')} / {mean_auc(trials, 'after', 'auc_step')}"
        line["correlation"] = mean_correlation(rows, cell, rule)
        costs = [row["step"] / row["of_grpo"] - 1 for row in of_rule if row["stage"] == "cost"]
        line["extra cost"] = " ".join(f"{cost:+.0%}" for cost in costs)
        line["weight"] = f"{statistics.mean(row['weight_mean'] for row in trials):.2f}"
        line["share"] = f"{statistics.mean(row['ess'] for row in trials):.2f}"
        table.append(line)
    return table


def mean_auc(trials: list[dict], when: str, name: str) -> str:
    """A measure of `localisation`, over the trials that have it."""
    values = [row[when][name] for row in trials if row[when]]
    return f"{statistics.mean(values):.2f}" if values else "-"


def mean_correlation(rows: list[dict], cell: Cell, rule: str) -> str:
    """Of a rule's credit with the true advantages of lines; mean over seeds."""
    of_seeds = [seed["methods"].get(rule, {}).get("corrected") for seed in of_start(rows, cell.flags)]
    found = [value for value in of_seeds if value is not None]  # None: not measured, or all noise
    return f"{statistics.mean(found):.2f}" if found else "-"


if __name__ == "__main__":
    sys.exit(main())
