"""What one may want beside eval.py's tables: the paper's numbers, and pass@k.

    python -m lab.tools.tables evals/NAME --paper Qwen2.5-Math-7B --pass-at 1 8
    python -m lab.tools.tables evals/NAME      # the paper's numbers where a model's name has some

It reads generations.jsonl; nothing is evaluated again. Models that are checkpoints of runs are
compared as `lab.tools.select` does, too. The paper took each run's best checkpoint, selected on the
test sets: such numbers are biased upwards.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import tyro

from eval import KINDS, show
from harness import files
from harness.config import Counts, PathFlag
from harness.evaluation import average
from harness.tables import percent, same_benchmarks, with_average, with_legend
from lab.tools.command import command
from lab.tools.paper_tables import PAPER_TABLES, backbone_of
from tasks.benchmarks import SUITES
from tasks.errors import BadInput, bad_input_on_error, printable
from tasks.settings import one_of, spec

UNKNOWN = math.nan, math.nan  # mean and deviation where the paper gives none
Backbone = Annotated[str | None, spec("NAME", one_of(PAPER_TABLES))]
KEYS = {"model": str, "benchmark": str, "seed": int, "reason": str}  # types of what a row must have


def print_tables(
    folder: tyro.conf.Positional[PathFlag], *, paper: Backbone = None, pass_at: Counts = ()
) -> None:
    """Print the tables of a folder of evaluations.

    `paper` is the model of the paper whose numbers stand beside; default: by the models' names.
    `pass_at` are the k of pass@k.
    """
    generations = read_generations(folder)
    path = folder / "settings.json"
    settings = files.read_settings(path)
    for kind in KINDS:
        if not isinstance(settings.get(kind), dict):
            raise BadInput(f"{path}: has no {kind}; restore it")
    for (model, name), rows in generations.items():
        counts: dict[tuple, int] = defaultdict(int)
        for row in rows:
            counts[row["problem"]] += 1
        if max(pass_at, default=0) > max(counts.values()):
            raise BadInput(
                f"--pass-at {max(pass_at)}: {printable(model)} has {max(counts.values())} samples "
                f"per problem of {name}; lower it, or evaluate with more --samples"
            )

    def columns(entry: dict, benchmarks: list[str]) -> dict[str, str]:
        name = benchmarks[0] if len(benchmarks) == 1 else suite_of(benchmarks)
        return paper_means(paper or backbone_of(entry["origin"]), name)

    shown = show(folder, pass_at, columns)
    results = shown["results"]
    if all("/checkpoints/" in model for model in results) and same_benchmarks(results.values()):
        runs: dict[str, dict[str, dict]] = defaultdict(dict)  # run -> checkpoint -> results
        for model, by_name in results.items():
            run, _, step = model.partition("/checkpoints/")
            runs[run][step.removesuffix("/model")] = by_name
        origin = next(iter(shown["models"].values()))["origin"]
        select_checkpoints(runs, paper or backbone_of(origin))


def read_generations(folder: Path) -> dict[tuple[str, str], list[dict]]:
    """(model, benchmark) -> its rows in a folder's generations.jsonl; raises BadInput."""
    path = folder / "generations.jsonl"
    generations: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for number, row in enumerate(files.read_lines(path), 1):
        with bad_input_on_error(f"{path}, line {number}", "restore the file"):
            for name, kind in KEYS.items():
                if not isinstance(row[name], kind):
                    raise ValueError(f'"{name}" is {row[name]!r}')
            if not isinstance(row["problem"], str | int):
                raise ValueError('"problem" is neither text nor a number')
            if not isinstance(row["score"], int | float | None):
                raise ValueError('"score" is neither a number nor null')
        generations[row["model"], row["benchmark"]].append(row)
    if not generations:
        raise BadInput(f"{path}: holds no generations yet; give another folder")
    return generations


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
            of_paper, _ = PAPER_TABLES[backbone][method].get(name, UNKNOWN)
            cells[f"{method} †"] = percent(of_paper / 100)
    return cells


def select_checkpoints(runs: dict[str, dict[str, dict]], backbone: str | None) -> dict:
    """Print each run's average at its last and its best checkpoint, and means over the runs.

    `runs` has run -> checkpoint -> benchmark -> result, checkpoints by ascending step. One whose
    average is NaN, because a benchmark has no verdict, is left out; so is a run that has only such
    checkpoints. Returns what is printed of each run.
    """
    selection: dict[str, dict] = {}
    best_results = []
    print(
        "benchmark average of each run at its last checkpoint, and at the best, SELECTED ON THE "
        "TEST SETS"
    )
    for run, checkpoints in runs.items():
        averages = {}
        for name, results in checkpoints.items():
            of_sets = average(results)["mean"]
            if not math.isnan(of_sets):
                averages[name] = of_sets
        if not averages:
            continue
        last = list(averages)[-1]
        best = max(averages, key=averages.__getitem__)
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
        of_last = mean_and_std([entry["last_average"] for entry in selection.values()])
        print(f"  last, mean ± standard deviation of {len(selection)} runs: {of_last}\n")
        print("\n".join(best_checkpoints(best_results, backbone)))
    return selection


def mean_and_std(values: list[float]) -> str:
    """The mean of several runs and their standard deviation (ddof 1), in percent."""
    return percent(mean(values), stdev(values))


def best_checkpoints(best: list[dict[str, dict]], backbone: str | None) -> list[str]:
    """A table like the paper's Table 1: runs at their best checkpoints, above the paper's rows.

    `best` has each run's benchmark -> result. Cells are mean ± standard deviation over the runs.
    """
    row = {"": f"{len(best)} runs, best"}
    for name in with_average(best[0]):
        means = [with_average(results)[name]["mean"] for results in best]
        row[name] = mean_and_std(means)
    rows = [row]
    if not backbone:
        return with_legend(rows)
    suite = suite_of(best[0])
    for method, numbers in PAPER_TABLES[backbone].items():
        cells = {"": f"{method} †"}
        for name in with_average(best[0]):
            of_paper, deviation = numbers.get(suite if name == "average" else name, UNKNOWN)
            cells[name] = percent(of_paper / 100, deviation / 100)
        rows.append(cells)
    return with_legend(rows, [f"†: the paper's, {backbone}"])


main = command("lab.tools.tables", print_tables)

if __name__ == "__main__":
    sys.exit(main())
