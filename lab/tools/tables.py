"""What one may want beside eval.py's tables: the paper's numbers, pass@k, the best checkpoints.

    python -m lab.tools.tables evals/NAME --paper Qwen2.5-Math-7B --pass-at 1 8
    python -m lab.tools.tables evals/NAME      # of runs/*/checkpoints/*/model: last and best, as Table 1

It reads generations.jsonl; nothing is evaluated again.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from eval import show
from harness.evaluation import average
from harness.tables import mean_and_std, percent, same_benchmarks, with_average, with_legend
from lab.tools.paper_tables import PAPER_TABLES, backbone_of
from tasks.benchmarks import SUITES
from tasks.errors import printable

UNKNOWN = math.nan, math.nan  # mean and deviation where the paper gives none


def main(argv: list[str] | None = None) -> None:
    """Print the tables of a folder of evaluations, and its runs' best checkpoints."""
    parser = argparse.ArgumentParser(prog="python -m lab.tools.tables", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--paper", choices=PAPER_TABLES, help="default: by the models' names")
    parser.add_argument("--pass-at", type=int, nargs="*", default=[])
    flags = parser.parse_args(argv)

    def columns(entry: dict, benchmarks: list[str]) -> dict[str, str]:
        name = benchmarks[0] if len(benchmarks) == 1 else suite_of(benchmarks)
        return paper_means(flags.paper or backbone_of(entry["origin"]), name)

    shown = show(flags.folder, flags.pass_at, columns)
    results = shown["results"]
    if all("/checkpoints/" in model for model in results) and same_benchmarks(results.values()):
        runs: dict[str, dict[str, dict]] = defaultdict(dict)  # run -> checkpoint -> results
        for model, by_name in results.items():
            run, _, step = model.partition("/checkpoints/")
            runs[run][step.removesuffix("/model")] = by_name
        origin = next(iter(shown["models"].values()))["origin"]
        select_checkpoints(runs, flags.paper or backbone_of(origin))


def suite_of(names: Iterable[str]) -> str:
    """The suite, such as "math", that has exactly these benchmarks; "" if none has."""
    for suite, members in SUITES.items():
        if set(members) == set(names):
            return suite
    return ""


def paper_means(backbone: str | None, name: str) -> dict[str, str]:
    """The cells with the paper's means on a benchmark, or its own average over a suite."""
    cells = {}
    if backbone:
        for method in ("GRPO", "SHEAR"):
            mean, _ = PAPER_TABLES[backbone][method].get(name, UNKNOWN)
            cells[f"{method} †"] = percent(mean / 100)
    return cells


def select_checkpoints(runs: dict[str, dict[str, dict]], backbone: str | None) -> dict:
    """Print each run's average at its last and its best checkpoint, and means over the runs.

    `runs` has run -> checkpoint -> benchmark -> result, checkpoints by ascending step. One whose
    average is NaN, because a benchmark has no verdict, is left out; so is a run that has only such
    checkpoints. Returns what is printed of each run, for results.json.
    """
    selection: dict[str, dict] = {}
    best_results = []
    print(
        "benchmark average of each run at its last checkpoint, and at the best, SELECTED ON THE "
        "TEST SETS"
    )
    for run, checkpoints in runs.items():
        means = {name: average(results)["mean"] for name, results in checkpoints.items()}
        averages = pd.Series(means).dropna()
        if averages.empty:
            continue
        last = averages.index[-1]
        best = averages.idxmax()
        best_results.append(checkpoints[best])
        selection[run] = {
            "last": last,
            "last_average": averages[last],
            "best": best,
            "best_average": averages[best],
        }
        choice = f"last {percent(averages[last])} ({last}); best {percent(averages[best])} ({best})"
        print(printable(f"  {run}: {choice}, of {len(averages)} with an average"))
    if len(selection) > 1:
        of_last = mean_and_std(pd.DataFrame(selection).loc["last_average"])
        print(f"  last, mean ± standard deviation of {len(selection)} runs: {of_last}\n")
        print("\n".join(best_checkpoints(best_results, backbone)))
    return selection


def best_checkpoints(best: list[dict[str, dict]], backbone: str | None) -> list[str]:
    """A table like the paper's Table 1: runs at their best checkpoints, above the paper's rows.

    `best` has each run's benchmark -> result. Cells are mean ± standard deviation over the runs.
    """
    row = {"": f"{len(best)} runs, best"}
    for name in with_average(best[0]):
        means = [with_average(results)[name]["mean"] for results in best]
        row[name] = mean_and_std(pd.Series(means))
    rows = [row]
    if not backbone:
        return with_legend(rows)
    suite = suite_of(best[0])
    for method, numbers in PAPER_TABLES[backbone].items():
        cells = {"": f"{method} †"}
        for name in with_average(best[0]):
            mean, deviation = numbers.get(suite if name == "average" else name, UNKNOWN)
            cells[name] = percent(mean / 100, deviation / 100)
        rows.append(cells)
    return with_legend(rows, [f"†: the paper's, {backbone}"])


if __name__ == "__main__":
    main()
