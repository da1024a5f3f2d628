"""The tables that are printed, as Markdown, and what of the paper stands beside them.

markdown(rows), with_legend(rows, legend)  lines of a table; its columns are the rows' keys
result_table(...)        a model on its benchmarks, beside the paper's numbers, marked †
side_by_side(...)        several models, and how each differs from the first
select_checkpoints(...)  Table 1: several runs, each at its best checkpoint
"""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from harness.evaluation import average
from harness.paper_tables import PAPER, backbone_of, suite_of
from tasks.rows import printable

SURE = 1.96  # standard errors from which a difference is marked


def percent(value: float, error: float | None = None) -> str:
    """35.2 or 35.2 ± 1.4; a dash for what is not known."""
    if math.isnan(value):
        return "-"
    if error is None:
        return f"{100 * value:.1f}"
    return f"{100 * value:.1f} ± " + ("-" if math.isnan(error) else f"{100 * error:.1f}")


def markdown(rows: list[dict[str, str]]) -> list[str]:
    """Lines of a Markdown table, in columns: the rows' keys, the same in each, are its head."""
    columns = []
    for name in rows[0]:
        cells = [name, *(row[name] for row in rows)]
        width = max(map(len, cells))
        cells.insert(1, "-" * width)
        columns.append([cell.ljust(width) for cell in cells])
    return [printable("| " + " | ".join(line) + " |") for line in zip(*columns, strict=True)]


def with_legend(rows: list[dict[str, str]], legend: Sequence[str] = ()) -> list[str]:
    """A table and its legend, after an empty line: without one Markdown would read it as a row."""
    lines = [*markdown(rows), "", *map(printable, legend)]
    return [*lines, ""] if legend else lines


# ---- of an evaluation ----------------------------------------------------------------------------


def print_tables(
    folder: Path, settings: dict, results: dict, differences: dict, paper: str | None
) -> None:
    """Protocol and data, a table per model, and several models side by side; `paper` names whose
    numbers are added.
    """
    protocol = " ".join(
        f"{name}={value}" for name, value in settings["protocol"].items() if value is not None
    )
    print(f"{printable(str(folder))}/\n{printable(protocol)}\n")
    data = {}
    rows = []
    for name, about in settings["data"].items():
        if any(name in of_model for of_model in results.values()):
            data[name] = about
            row = {"benchmark": name}
            for key in ("problems", "revision", "window"):
                row[key] = str(about[key] or "")
            rows.append(row)
    print("\n".join(with_legend(rows)))
    templates = set()
    for model, result in results.items():
        about = settings["models"].get(model, {"origin": model, "template": "unknown"})
        templates.add(about["template"])
        table = result_table(result, data, paper or backbone_of(about["origin"]))
        print("\n".join([printable(f"{model} (template {about['template']})"), "", *table]))
    if len(templates) > 1:
        print("WARNING: models were asked in different templates; give --template to compare them")
    if differences and same_benchmarks(results.values()):
        print("\n".join(["side by side", "", *side_by_side(results, differences)]))


def same_benchmarks(results: Iterable[dict[str, dict]]) -> bool:
    """Whether all of them are results on the same sets."""
    return len({frozenset(result) for result in results}) == 1


def result_table(
    results: dict[str, dict], data: dict[str, dict], backbone: str | None
) -> list[str]:
    """One model: a line per benchmark. `data` says what each set is; `backbone` asks for the
    paper's columns.
    """
    names = {name for result in results.values() for name in result}
    passes = sorted(name for name in names if re.fullmatch(r"pass@\d+", name))
    has_seeds = any("seed_std" in result for result in results.values())
    has_infra = any(result["infra_errors"] for result in results.values())
    paper = {}
    if backbone:
        paper = {f"{method} †": PAPER[backbone][method] for method in ("GRPO", "SHEAR")}
    rows = []
    for name, result in results.items():
        row = {"benchmark": name, "avg": f"@{data[name]['k']}"}
        row["percent ± SE"] = percent(result["mean"], result["error"])
        if has_seeds:
            row["seeds ± std"] = percent(result.get("seed_mean", math.nan), result.get("seed_std"))
        for method, printed in paper.items():
            row[method] = str(printed[name][0]) if name in printed else "-"
        for k in passes:
            row[k] = percent(result[k], result[f"{k} error"]) if k in result else "-"
        row["right"] = f"{result['right']:.0f} of {result['samples']}"
        row["truncated"] = percent(result["truncated"]) + "%"
        row["no-answer"] = percent(result["no_answer"]) + "%"
        if has_infra:
            row["infra"] = str(result["infra_errors"])
        rows.append(row)
    if len(results) > 1:
        last = dict.fromkeys(rows[0], "")
        last["benchmark"] = "average"
        last["percent ± SE"] = percent(*average(results))
        suite = suite_of(results)
        for method, printed in paper.items():
            # its own average, which is not always that of its row
            last[method] = percent(printed[suite][0] / 100 if suite in printed else math.nan)
        rows.append(last)
    legend = [f"†: the paper's, {backbone}"] if backbone else []
    if has_infra:
        legend.append("infra: samples that could not be graded, which are in no mean")
    return with_legend(rows, legend)


def side_by_side(
    models: dict[str, dict[str, dict]], differences: dict[str, dict[str, dict]]
) -> list[str]:
    """Several models: their means, and after each but the first its gain over that one."""
    first, *others = models
    rows = []
    for name, result in models[first].items():
        row = {"benchmark": name, first: percent(result["mean"], result["error"])}
        for model in others:
            gain = differences[model][name]["difference"]
            error = differences[model][name]["error"]
            row[model] = percent(models[model][name]["mean"], models[model][name]["error"])
            mark = " *" if abs(gain) > SURE * error else ""  # none for NaN
            row[f"gain of {model}"] = percent(gain, error) + mark
        rows.append(row)
    if len(rows) > 1:
        row = {"benchmark": "average", first: percent(*average(models[first]))}
        for model in others:
            row[model] = percent(*average(models[model]))
            row[f"gain of {model}"] = percent(average(models[model])[0] - average(models[first])[0])
        rows.append(row)
    legend = f"gain: over {first}, paired by problem; `*`: more than {SURE} standard errors"
    return with_legend(rows, [legend])


# ---- of several checkpoints ----------------------------------------------------------------------


def select_checkpoints(runs: dict[str, dict[str, dict]], backbone: str | None) -> dict:
    """Print the last and the best benchmark average of each run's checkpoints, then Table 1's mean
    over the runs.

    `runs` holds each checkpoint's results by benchmark. A checkpoint whose average is NaN, as a set
    has no verdict, is left out; so is a run of none but such.
    """
    selection: dict[str, dict] = {}
    best_results = []
    print(
        "benchmark average of each run at its last checkpoint, and at the best, SELECTED ON THE "
        "TEST SETS"
    )
    for run, checkpoints in runs.items():
        graded = {}
        for name, results in checkpoints.items():
            mean, _ = average(results)
            if not math.isnan(mean):
                graded[name] = mean
        if graded:
            last = list(graded)[-1]
            best = max(graded, key=lambda name: graded[name])
            best_results.append(checkpoints[best])
            selection[run] = {
                "last": last,
                "last_average": graded[last],
                "best": best,
                "best_average": graded[best],
            }
            both = [
                f"{percent(graded[name])} ({name.removeprefix(run + '/')})" for name in (last, best)
            ]
            choice = f"last {both[0]}; best {both[1]}, of {len(graded)} with an average"
            print(printable(f"  {run}: {choice}"))
    if len(selection) > 1:
        last = mean_and_std([choice["last_average"] for choice in selection.values()])
        print(f"  last, mean ± standard deviation of {len(selection)} runs: {last}\n")
        print("\n".join(best_checkpoints(best_results, backbone)))
    return selection


def best_checkpoints(best: list[dict[str, dict]], backbone: str | None) -> list[str]:
    """As the paper's Table 1: mean ± standard deviation over runs, each at its best checkpoint; the
    paper's below.
    """
    row = {"": f"{len(best)} runs, best"}
    for name in best[0]:
        row[name] = mean_and_std([results[name]["mean"] for results in best])
    row["average"] = mean_and_std([average(results)[0] for results in best])
    rows = [row]
    if not backbone:
        return with_legend(rows)
    keys = [*best[0], suite_of(best[0])]  # the columns of the paper's table
    for method, printed in PAPER[backbone].items():
        cells = [f"{method} †"]
        for key in keys:
            mean, deviation = printed.get(key or "", (math.nan, math.nan))
            cells.append(percent(mean / 100, deviation / 100))
        rows.append(dict(zip(row, cells, strict=True)))
    return with_legend(rows, [f"†: the paper's, {backbone}"])


def mean_and_std(values: list[float]) -> str:
    """Of several runs, with ddof 1, in percent."""
    return percent(float(np.mean(values)), float(np.std(values, ddof=1)))
