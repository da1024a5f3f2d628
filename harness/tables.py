"""Tables of results in Markdown.

    markdown(rows)           lines of a table; its columns are the rows' keys
    with_legend(rows, ...)   the same, followed by a legend
    print_tables(...)        what `eval.py` prints: the two tables below
    result_table(...)        one model on its benchmarks
    side_by_side(...)        several models, and how each differs from the first

Here a "result" is what `evaluation.summarise` returns for one model on one benchmark; shares are
between 0 and 1, and printed in percent.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pandas as pd

from harness.evaluation import average
from tasks.errors import printable

SIGNIFICANT = 1.96  # a difference of more standard errors is marked: two-sided, 5%

# (a model's entry in settings.json, benchmarks) -> further cells of their row
Columns = Callable[[dict, list[str]], dict[str, str]]


def no_columns(entry: dict, benchmarks: list[str]) -> dict[str, str]:
    """No further cells."""
    return {}


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


def print_tables(
    settings: dict, results: dict, differences: dict, columns: Columns = no_columns
) -> None:
    """Print protocol and data, a table per model, and several models side by side.

    `settings` is the content of settings.json. `results` has model -> benchmark -> result,
    `differences` model -> benchmark -> `evaluation.paired_difference` from the first model.
    `columns` adds cells to a row, given the model's entry of the settings and its benchmarks.
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
        print("\n".join(result_table(by_benchmark, data, partial(columns, entry))))
    if len(templates) > 1:
        print("WARNING: models were asked in different templates; give --template to compare them")
    if len(results) > 1 and same_benchmarks(results.values()):
        print("\n".join(["side by side", "", *side_by_side(results, differences)]))


def same_benchmarks(results: Iterable[dict[str, dict]]) -> bool:
    """Whether all models, or checkpoints, have results on the same benchmarks."""
    return len({frozenset(by_benchmark) for by_benchmark in results}) == 1


def result_table(
    results: dict[str, dict], data: dict[str, dict], columns: Callable[[list[str]], dict]
) -> list[str]:
    """The lines of one model's table: a row per benchmark, then their average.

    `results` has benchmark -> result, `data` each benchmark's entry of settings.json. `columns`
    gives further cells of a row, by its benchmarks.
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
        row |= columns([name])
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
        rows.append(row | columns(list(results)))
    return with_legend(rows)


def with_average(results: dict[str, dict]) -> dict[str, dict]:
    """The results, and their average where there are several."""
    return results | {"average": average(results)} if len(results) > 1 else results


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
