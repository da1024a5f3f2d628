"""Tables of results in Markdown, beside the paper's (Tables 1 and 2 of arXiv 2604.23318).

    markdown(rows)           lines of a table; its columns are the rows' keys
    with_legend(rows, ...)   the same, followed by a legend
    print_tables(...)        what `eval.py` prints: the two tables below
    result_table(...)        one model on its benchmarks, beside the paper's numbers, marked †
    side_by_side(...)        several models, and how each differs from the first
    select_checkpoints(...)  several runs, each at its last and its best checkpoint, as in Table 1

Here a "result" is what `evaluation.summarise` returns for one model on one benchmark; shares are
between 0 and 1, and printed in percent.
"""

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from harness.evaluation import average
from harness.paper_tables import PAPER_TABLES, backbone_of
from tasks.benchmarks import SUITES
from tasks.errors import printable

SIGNIFICANT = 1.96  # a difference of more standard errors is marked: two-sided, 5%
UNKNOWN = math.nan, math.nan  # mean and deviation where the paper gives none


def percent(value: float, error: float | None = None) -> str:
    """A share in percent, alone or with its error: 35.2 or 35.2 ± 1.4; "-" for NaN."""
    if math.isnan(value):
        return "-"
    if error is None:
        return f"{100 * value:.1f}"
    return f"{percent(value)} ± {percent(error)}"


def mean_and_error(result: dict) -> str:
    """The mean and standard error of a result, in percent."""
    return percent(result["mean"], result["error"])


def mean_and_std(values: pd.Series) -> str:
    """The mean of several seeds or runs and their standard deviation (ddof 1), in percent."""
    return percent(values.mean(), values.std())


def markdown(rows: list[dict[str, str]]) -> list[str]:
    """The lines of a Markdown table whose columns are the rows' keys.

    A cell that a row lacks is empty.
    """
    columns = []
    for name, values in pd.DataFrame(rows).fillna("").items():
        cells = [str(name), *values]
        width = max(map(len, cells))
        cells.insert(1, "-" * width)
        columns.append([cell.ljust(width) for cell in cells])
    return [printable("| " + " | ".join(line) + " |") for line in zip(*columns, strict=True)]


def with_legend(rows: list[dict[str, str]], legend: Sequence[str] = ()) -> list[str]:
    """The lines of a table and of its legend, each with an empty line after it.

    Without the empty line Markdown would read the legend as a row of the table.
    """
    lines = [*markdown(rows), ""]
    if legend:
        lines += [*map(printable, legend), ""]
    return lines


# ---- of an evaluation ----------------------------------------------------------------------------


def print_tables(settings: dict, results: dict, differences: dict, paper: str | None) -> None:
    """Print protocol and data, a table per model, and several models side by side.

    `settings` is the content of settings.json. `results` has model -> benchmark -> result,
    `differences` model -> benchmark -> `evaluation.paired_difference` from the first model. `paper`
    is the paper's model whose numbers are added; None: the one that each model was trained from.
    """
    data = settings["data"]
    for name, entry in ({"protocol": settings["protocol"]} | data).items():
        values = [f"{key}={value}" for key, value in entry.items() if value is not None]
        print(printable(f"{name}: {' '.join(values)}"))
    templates = set()
    for model, by_benchmark in results.items():
        entry = settings["models"][model]
        templates.add(entry["template"])
        batch = settings.get("generate_batch", {}).get(model)
        at_once = f", {batch} responses at a time" if batch else ""
        print(f"\n{printable(model)} (template {entry['template']}{at_once})\n")
        print("\n".join(result_table(by_benchmark, data, paper or backbone_of(entry["origin"]))))
    if len(templates) > 1:
        print("WARNING: models were asked in different templates; give --template to compare them")
    if len(results) > 1 and same_benchmarks(results.values()):
        print("\n".join(["side by side", "", *side_by_side(results, differences)]))


def same_benchmarks(results: Iterable[dict[str, dict]]) -> bool:
    """Whether all models, or checkpoints, have results on the same benchmarks."""
    return len({frozenset(by_benchmark) for by_benchmark in results}) == 1


def result_table(
    results: dict[str, dict], data: dict[str, dict], backbone: str | None
) -> list[str]:
    """The lines of one model's table: a row per benchmark, then their average.

    `results` has benchmark -> result, `data` each benchmark's entry of settings.json. With a
    `backbone`, one of the paper's models, the table has columns of its numbers.
    """
    rows = []
    for name, result in results.items():
        row = {
            "benchmark": name,
            "avg": f"@{data[name]['k']}",
            "percent ± SE": mean_and_error(result),
        }
        if "seed_std" in result:
            row["seeds ± std"] = percent(result["seed_mean"], result["seed_std"])
        row |= paper_means(backbone, name)
        for key in result:
            if f"{key} error" in result:  # pass@k
                row[key] = percent(result[key], result[f"{key} error"])
        row["right"] = f"{result['right']:.0f} of {result['samples']}"
        row["truncated"] = percent(result["truncated"]) + "%"
        row["no-answer"] = percent(result["no_answer"]) + "%"
        if result["infra_errors"]:
            row["not graded"] = str(result["infra_errors"])  # left out of every mean
        rows.append(row)
    if len(results) > 1:
        row = {"benchmark": "average", "percent ± SE": mean_and_error(average(results))}
        rows.append(row | paper_means(backbone, suite_of(results)))
    return with_legend(rows, [f"†: the paper's, {backbone}"] if backbone else [])


def with_average(results: dict[str, dict]) -> dict[str, dict]:
    """The results, and their average where there are several."""
    return results | {"average": average(results)} if len(results) > 1 else results


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


def side_by_side(
    models: dict[str, dict[str, dict]], differences: dict[str, dict[str, dict]]
) -> list[str]:
    """The lines of a table of several models: their means, and their gains over the first.

    `models` has model -> benchmark -> result; `differences` is that of `print_tables`.
    """
    first, *others = models
    rows = []
    for name, result in with_average(models[first]).items():
        row = {"benchmark": name, first: mean_and_error(result)}
        for model in others:
            other = with_average(models[model])[name]
            gain = differences[model].get(name, {"mean": other["mean"] - result["mean"]})
            error = gain.get("error")  # the gain of an average has none
            marked = error is not None and abs(gain["mean"]) > SIGNIFICANT * error  # False for NaN
            row[model] = mean_and_error(other)
            row[f"gain of {model}"] = percent(gain["mean"], error) + (" *" if marked else "")
        rows.append(row)
    legend = f"gain: over {first}, paired by problem; `*`: more than {SIGNIFICANT} standard errors"
    return with_legend(rows, [legend])


# ---- of several checkpoints ----------------------------------------------------------------------


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
