"""The tables that are printed, as Markdown, and the paper's numbers beside them.

markdown(rows)           lines of a table; its columns are the rows' keys
with_legend(rows, ...)   the same, followed by a legend
result_table(...)        a model on its benchmarks, beside the paper's numbers, marked †
side_by_side(...)        several models, and how each differs from the first
select_checkpoints(...)  Table 1: several runs, each at its best checkpoint
"""

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from harness.evaluation import average
from harness.paper_tables import PAPER, backbone_of
from tasks.benchmarks import SUITES
from tasks.rows import printable

SURE = 1.96  # standard errors from which a difference is marked
UNKNOWN = math.nan, math.nan  # where the paper gives no number


def percent(value: float, error: float | None = None) -> str:
    """35.2 or 35.2 ± 1.4; a dash for what is not known."""
    if math.isnan(value):
        return "-"
    if error is None:
        return f"{100 * value:.1f}"
    return f"{percent(value)} ± {percent(error)}"


def mean_and_error(result: dict) -> str:
    """A mean and its standard error, in percent."""
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
    """A table and its legend, after an empty line: without one Markdown would read it as a row."""
    lines = [*markdown(rows), "", *map(printable, legend)]
    return [*lines, ""] if legend else lines


# ---- of an evaluation ----------------------------------------------------------------------------


def print_tables(settings: dict, results: dict, differences: dict, paper: str | None) -> None:
    """Print protocol and data, a table per model, and several models side by side.

    `paper` names the model whose numbers in the paper are added.
    """
    data = settings["data"]
    for name, about in ({"protocol": settings["protocol"]} | data).items():
        values = [f"{key}={value}" for key, value in about.items() if value is not None]
        print(printable(f"{name}: {' '.join(values)}"))
    templates = set()
    for model, result in results.items():
        about = settings["models"][model]
        templates.add(about["template"])
        print(f"\n{printable(model)} (template {about['template']})\n")
        print("\n".join(result_table(result, data, paper or backbone_of(about["origin"]))))
    if len(templates) > 1:
        print("WARNING: models were asked in different templates; give --template to compare them")
    if len(results) > 1 and same_benchmarks(results.values()):
        print("\n".join(["side by side", "", *side_by_side(results, differences)]))


def same_benchmarks(results: Iterable[dict[str, dict]]) -> bool:
    """Whether all of them are results on the same sets."""
    return len({frozenset(result) for result in results}) == 1


def result_table(
    results: dict[str, dict], data: dict[str, dict], backbone: str | None
) -> list[str]:
    """The table of one model: a line per benchmark.

    `data` describes each set; `backbone` asks for the paper's columns.
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
        for k in result:
            if f"{k} error" in result:  # pass@k
                row[k] = percent(result[k], result[f"{k} error"])
        row["right"] = f"{result['right']:.0f} of {result['samples']}"
        row["truncated"] = percent(result["truncated"]) + "%"
        row["no-answer"] = percent(result["no_answer"]) + "%"
        if result["infra_errors"]:
            row["not graded"] = str(result["infra_errors"])  # in no mean
        rows.append(row)
    if len(results) > 1:
        row = {"benchmark": "average", "percent ± SE": mean_and_error(average(results))}
        rows.append(row | paper_means(backbone, suite_of(results)))
    return with_legend(rows, [f"†: the paper's, {backbone}"] if backbone else [])


def with_average(results: dict[str, dict]) -> dict[str, dict]:
    """The results, and their average where there are several."""
    return results | {"average": average(results)} if len(results) > 1 else results


def suite_of(names: Iterable[str]) -> str:
    """The suite whose benchmarks these are, all of them; "" if there is none."""
    for suite, members in SUITES.items():
        if set(members) == set(names):
            return suite
    return ""


def paper_means(backbone: str | None, name: str) -> dict[str, str]:
    """The paper's numbers of a benchmark, or its own average of a suite, in columns."""
    cells = {}
    if backbone:
        for method in ("GRPO", "SHEAR"):
            mean, _ = PAPER[backbone][method].get(name, UNKNOWN)
            cells[f"{method} †"] = percent(mean / 100)
    return cells


def side_by_side(
    models: dict[str, dict[str, dict]], differences: dict[str, dict[str, dict]]
) -> list[str]:
    """Several models: their means, and after each but the first its gain over that one."""
    first, *others = models
    rows = []
    for name, result in with_average(models[first]).items():
        row = {"benchmark": name, first: mean_and_error(result)}
        for model in others:
            other = with_average(models[model])[name]
            gain = differences[model].get(name, {"mean": other["mean"] - result["mean"]})
            error = gain.get("error")  # not known of an average
            sure = error is not None and abs(gain["mean"]) > SURE * error  # False for NaN
            row[model] = mean_and_error(other)
            row[f"gain of {model}"] = percent(gain["mean"], error) + (" *" if sure else "")
        rows.append(row)
    legend = f"gain: over {first}, paired by problem; `*`: more than {SURE} standard errors"
    return with_legend(rows, [legend])


# ---- of several checkpoints ----------------------------------------------------------------------


def select_checkpoints(runs: dict[str, dict[str, dict]], backbone: str | None) -> dict:
    """Print each run's benchmark average at its last and its best checkpoint, and Table 1's mean.

    `runs` holds each checkpoint's results by benchmark. A checkpoint whose average is NaN, because
    a set has no verdict, is left out; so is a run that has only such checkpoints.
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
        last = mean_and_std(pd.DataFrame(selection).loc["last_average"])
        print(f"  last, mean ± standard deviation of {len(selection)} runs: {last}\n")
        print("\n".join(best_checkpoints(best_results, backbone)))
    return selection


def best_checkpoints(best: list[dict[str, dict]], backbone: str | None) -> list[str]:
    """A table like the paper's Table 1: runs at their best checkpoints, above the paper's rows.

    Cells are mean ± standard deviation over the runs.
    """
    row = {"": f"{len(best)} runs, best"}
    for name in with_average(best[0]):
        means = [with_average(results)[name]["mean"] for results in best]
        row[name] = mean_and_std(pd.Series(means))
    rows = [row]
    if not backbone:
        return with_legend(rows)
    suite = suite_of(best[0])
    for method, printed in PAPER[backbone].items():
        cells = {"": f"{method} †"}
        for name in with_average(best[0]):
            mean, deviation = printed.get(suite if name == "average" else name, UNKNOWN)
            cells[name] = percent(mean / 100, deviation / 100)
        rows.append(cells)
    return with_legend(rows, [f"†: the paper's, {backbone}"])
