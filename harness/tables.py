"""Numbers from graded generations: avg@k, pass@k, their standard errors, and the tables that show them.

    summarise(rows) -> means, errors and shares of one model on one benchmark
    compare(rows, others) -> the difference of two models, paired by problem
    table(...), side_by_side(...) -> lines to print, Markdown of at most WIDTH columns

A generation is a row with "problem", "seed", "score" (1, 0, or None where it could not be graded) and "reason".

**avg@k** is the mean over problems of a problem's mean score. Samples of one problem are alike, so its error is
clustered: the standard deviation of the problems' means, by the root of their number. Pooling the samples instead
would make it too small, by up to the root of k. It measures which problems were asked; what sampling adds is in it.
**pass@k** is the unbiased estimator 1 - C(n - c, k) / C(n, k), for c right ones of n samples.
**Several seeds** give the mean and the standard deviation (ddof 1) of the seeds' own avg@k besides.

Samples that could not be graded are in no mean; they are counted (`infra`). The numbers in PAPER are the paper's,
Tables 1 and 2, and are marked † where they are printed.

Left out: bootstrap, corrections for many comparisons.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from tasks.benchmarks import SUITES


def _printed(suite: str, numbers: str) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each benchmark and of the suite's average; NaN where none is printed."""
    printed = {}
    for name, cell in zip([*SUITES[suite], suite], numbers.split(", "), strict=True):
        mean, _, std = cell.partition(" ")
        printed[name] = float(mean), float(std or "nan")
    return printed


# Tables 1 and 2 of arXiv 2604.23318, percent: each run's best checkpoint on these very sets; math: mean and standard
# deviation of three seeds. The averages are the paper's own; on Qwen2.5-Math-7B SHEAR's 51.2 and PRM(Reshape adv.)'s
# 49.6 are of numbers whose means are 50.9 and 49.5.
PAPER = {
    "Qwen2.5-Math-7B": {
        "GRPO": _printed("math", "33.6 1.9, 15.5 0.6, 66.5 1.2, 84.9 1.7, 47.8 0.1, 49.6 0.8"),
        "Entropy adv.": _printed("math", "32.8 1.8, 16.7 1.8, 66.0 0.6, 83.4 0.3, 48.6 0.8, 49.5 0.5"),
        "PRM(Reshape adv.)": _printed("math", "34.1 3.2, 15.2 1.5, 66.8 1.7, 83.1 1.7, 48.1 1.8, 49.6 1.3"),
        "PRM(PURE)": _printed("math", "24.5 0.6, 16.2 2.7, 70.0 2.5, 82.5 1.1, 47.6 1.2, 48.2 0.6"),
        "SHEAR": _printed("math", "35.2 2.3, 16.8 0.5, 70.3 3.2, 83.3 0.8, 48.7 1.0, 51.2 0.8"),
    },
    "Qwen2.5-Coder-7B": {
        "GRPO": _printed("code", "75.8, 71.0, 81.8, 69.3, 17.8, 63.1"),
        "SHEAR": _printed("code", "76.1, 72.1, 82.2, 70.8, 18.3, 63.9"),
    },
    "Llama3.1-8B-Instruct": {
        "GRPO": _printed("code", "65.7, 60.0, 70.7, 59.7, 17.4, 54.7")
        | _printed("math", "7.9 0.7, 0.7 0.2, 32.7 1.2, 57.7 1.5, 24.5 1.3, 24.7 0.4"),
        "Entropy adv.": _printed("math", "11.7 2.2, 1.5 1.3, 33.1 2.1, 57.0 2.5, 22.1 0.1, 25.1 0.0"),
        "PRM(Reshape adv.)": _printed("math", "12.3 2, 1.1 0.4, 33.4 1.5, 55.2 0.5, 23.4 1.5, 25.1 0.9"),
        "PRM(PURE)": _printed("math", "8.1 5.1, 1.2 1.4, 27.9 3.4, 54.6 1.7, 20.5 1.1, 22.5 0.3"),
        "SHEAR": _printed("code", "70.0, 63.5, 69.5, 58.4, 17.7, 55.8")
        | _printed("math", "12.7 1.8, 2.1 1.4, 37.2 0.2, 56.3 1.3, 22.8 0.1, 26.2 0.1"),
    },
    "Qwen2.5-14B-Base": {
        "GRPO": _printed("code", "85.0, 79.3, 82.8, 68.8, 19.7, 67.1")
        | _printed("math", "16.5 1.8, 15.0 1.6, 62.4 1.3, 83.3 1.8, 49.9 0.5, 45.4 0.4"),
        "Entropy adv.": _printed("math", "18.5 1.5, 16.4 1.7, 64.8 1.8, 82.2 0.4, 49.4 1.5, 46.3 0.1"),
        "PRM(Reshape adv.)": _printed("math", "12.8 3.1, 10.6 2.8, 58.5 3.2, 79.7 2.4, 44.1 2.7, 41.2 2.3"),
        "PRM(PURE)": _printed("math", "13.0 1.6, 8.0 1.8, 49.2 1.2, 76.1 0.1, 40.7 0.1, 37.4 0.1"),
        "SHEAR": _printed("code", "85.5, 79.6, 83.1, 69.0, 21.1, 67.7")
        | _printed("math", "18.7 1.5, 16.9 1.1, 62.2 3.9, 84.5 1.1, 52.0 1.1, 46.9 1.0"),
    },
}
SURE = 1.96  # standard errors from which a difference is marked
WIDTH = 100  # columns of a terminal that a table may take


def by_problem(rows: list[dict]) -> dict[str, list[float]]:
    """The scores of each problem, without those that could not be graded."""
    scores = defaultdict(list)
    for row in rows:
        if row["score"] is not None:
            scores[row["problem"]].append(row["score"])
    return scores


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean of independent values and its standard error; NaN where there are none, or one."""
    if not len(values):
        return math.nan, math.nan
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), error


def avg_at_k(rows: list[dict]) -> tuple[float, float]:
    """Mean score and its standard error, clustered by problem."""
    return mean_and_error([float(np.mean(scores)) for scores in by_problem(rows).values()])


def pass_at_k(right: int, samples: int, k: int) -> float:
    """The chance that k of these samples, drawn without putting back, hold a right one."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def pass_at_k_of(rows: list[dict], k: int) -> tuple[float, float]:
    """pass@k and its standard error over the problems that have k graded samples."""
    values = []
    for scores in by_problem(rows).values():
        if len(scores) >= k:
            right = sum(score > 0.5 for score in scores)
            values.append(pass_at_k(right, len(scores), k))
    return mean_and_error(values)


def summarise(rows: list[dict], passes: Sequence[int] = ()) -> dict:
    """What a table says of one model on one benchmark; `passes` are the k of pass@k."""
    graded = [row for row in rows if row["score"] is not None]
    mean, error = avg_at_k(rows)
    result = {
        "mean": mean,
        "error": error,
        "problems": len(by_problem(rows)),
        "samples": len(graded),
        "right": sum(row["score"] for row in graded),
        "truncated": share_of(graded, "truncated"),
        "no_answer": share_of(graded, "no_answer"),
        "infra_errors": len(rows) - len(graded),
    }
    for k in passes:
        result[f"pass@{k}"], result[f"pass@{k} error"] = pass_at_k_of(rows, k)
    by_seed = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        by_seed.setdefault(str(row["seed"]), []).append(row)
    if len(by_seed) > 1:
        result["seeds"] = {seed: avg_at_k(of_seed)[0] for seed, of_seed in by_seed.items()}
        means = list(result["seeds"].values())
        result["seed_mean"], result["seed_std"] = float(np.mean(means)), float(np.std(means, ddof=1))
    return result


def share_of(rows: list[dict], reason: str) -> float:
    """How many of these rows have this reason."""
    return sum(row["reason"] == reason for row in rows) / len(rows) if rows else math.nan


def compare(rows: list[dict], others: list[dict]) -> dict:
    """How much higher `others` score, over the problems that both have, paired by problem."""
    first, second = by_problem(rows), by_problem(others)
    gaps = [float(np.mean(second[name]) - np.mean(first[name])) for name in first if name in second]
    mean, error = mean_and_error(gaps)
    return {"difference": mean, "error": error, "problems": len(gaps)}


def average(results: dict[str, dict]) -> tuple[float, float]:
    """The mean over benchmarks, with equal weights as in the paper, and its error, taking sets as independent.

    HumanEval and HumanEval+ ask the same problems, as do MBPP and MBPP+: on code the error is too small.
    """
    mean = float(np.mean([result["mean"] for result in results.values()]))
    variance = sum(result["error"] ** 2 for result in results.values())
    return mean, math.sqrt(variance) / len(results)


def backbone_of(name: str) -> str | None:
    """Which of the paper's models this is, by its name."""
    plain = re.sub("[-_.]", "", name.lower())
    keys = {
        "qwen25math7b": "Qwen2.5-Math-7B",
        "qwen25coder7b": "Qwen2.5-Coder-7B",
        "llama318b": "Llama3.1-8B-Instruct",
        "qwen2514b": "Qwen2.5-14B-Base",
    }
    return next((backbone for key, backbone in keys.items() if key in plain), None)


# ---- text -----------------------------------------------------------------------------------------------------


def percent(value: float, error: float | None = None) -> str:
    """35.2 or 35.2 ± 1.4; a dash for what is not known."""
    if math.isnan(value):
        return "-"
    if error is None:
        return f"{100 * value:.1f}"
    return f"{100 * value:.1f} ± " + ("-" if math.isnan(error) else f"{100 * error:.1f}")


def short(results: dict[str, dict]) -> str:
    """Several benchmarks on a line."""
    return ", ".join(f"{name} {percent(each['mean'], each['error'])}" for name, each in results.items())


def markdown(rows: list[dict[str, str]]) -> list[str]:
    """Lines of a Markdown table, in columns: the rows' keys, the same in each, are its head."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = [{name: name for name in widths}, {name: "-" * width for name, width in widths.items()}, *rows]
    return ["| " + " | ".join(line[name].ljust(width) for name, width in widths.items()) + " |" for line in lines]


def fitted(rows: list[dict[str, str]], *legend: str) -> list[str]:
    """A table and its legend. Columns beyond WIDTH go into further tables, which repeat the first one."""
    first, *others = rows[0]
    parts = [[first]]
    for name in others:
        wider = [{column: row[column] for column in (*parts[-1], name)} for row in rows]
        if len(markdown(wider)[0]) > WIDTH and len(parts[-1]) > 1:
            parts.append([first])
        parts[-1].append(name)
    lines = []
    for part in parts:
        lines += markdown([{column: row[column] for column in part} for row in rows])
        lines.append("")  # or what follows would be a row
    return [*lines, *legend, ""] if legend else lines


def data_table(data: dict[str, dict]) -> list[str]:
    """What each benchmark is."""
    rows = []
    for name, about in data.items():
        row = {"benchmark": name, "problems": str(about["problems"]), "revision": about["revision"]}
        if any(other["window"] for other in data.values()):
            row["window"] = about["window"] or ""
        rows.append(row)
    return fitted(rows)


def table(results: dict[str, dict], data: dict[str, dict], backbone: str | None) -> list[str]:
    """One model: a line a benchmark. `data` says what each set is; `backbone` asks for the paper's columns."""
    passes = sorted({name for result in results.values() for name in result if re.fullmatch(r"pass@\d+", name)})
    has_seeds = any("seed_std" in result for result in results.values())
    has_infra = any(result["infra_errors"] for result in results.values())
    paper = {method: PAPER[backbone][method] for method in ("GRPO", "SHEAR")} if backbone else {}
    rows = []
    for name, result in results.items():
        mean = percent(result["mean"], result["error"])
        row = {"benchmark": name, "avg": f"@{data[name]['k']}", "percent ± SE": mean}
        if has_seeds:
            row["seeds ± std"] = percent(result.get("seed_mean", math.nan), result.get("seed_std"))
        for method, printed in paper.items():
            row[f"{method} †"] = str(printed[name][0]) if name in printed else "-"
        for k in passes:
            row[k] = percent(result[k], result[f"{k} error"]) if k in result else "-"
        row["right"] = f"{result['right']:.0f} of {result['samples']}"
        row["truncated"] = percent(result["truncated"]) + "%"
        row["no-answer"] = percent(result["no_answer"]) + "%"
        if has_infra:
            row["infra"] = str(result["infra_errors"])
        rows.append(row)
    if len(results) > 1:
        last = dict.fromkeys(rows[0], "") | {"benchmark": "average", "percent ± SE": percent(*average(results))}
        for method, printed in paper.items():  # its own average, which is not always that of its row
            average_of_row = float(np.mean([printed.get(name, (math.nan,))[0] for name in results]))
            theirs, _ = printed.get(suite_of(results), (average_of_row, math.nan))
            last[f"{method} †"] = percent(theirs / 100)
        rows.append(last)
    legend = [papers_mark(backbone)] if backbone else []
    if has_infra:
        legend.append("infra: samples that could not be graded, which are in no mean")
    return fitted(rows, *legend)


def suite_of(names: Iterable[str]) -> str | None:
    """The suite that these benchmarks make up, if they are all of one."""
    return next((suite for suite, members in SUITES.items() if set(members) == set(names)), None)


def papers_mark(backbone: str) -> str:
    """The legend of †."""
    return f"†: the paper's, {backbone}"


def best_checkpoints(best: list[dict[str, dict]], backbone: str | None) -> list[str]:
    """As the paper's Table 1: mean ± standard deviation over runs, each at its best checkpoint; the paper's below."""
    names = list(best[0])
    row = {"": f"{len(best)} runs, best"}
    for name in names:
        row[name] = mean_and_std([results[name]["mean"] for results in best])
    row["average"] = mean_and_std([average(results)[0] for results in best])
    rows = [row]
    for method, printed in PAPER.get(backbone or "", {}).items():
        cells = {name: printed.get(name) for name in names} | {"average": printed.get(suite_of(names))}
        row = {name: percent(cell[0] / 100, cell[1] / 100) if cell else "-" for name, cell in cells.items()}
        rows.append({"": f"{method} †", **row})
    for row in rows:
        for name in row:  # narrower, so that six columns fit into WIDTH
            row[name] = row[name].replace(" ± ", "±")
    return fitted(rows, *([papers_mark(backbone)] if backbone in PAPER else []))


def mean_and_std(values: list[float]) -> str:
    """Of runs, with ddof 1, in percent."""
    return percent(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan)


def side_by_side(models: dict[str, dict[str, dict]], differences: dict[str, dict[str, dict]]) -> list[str]:
    """Several models: their means, and how each differs from the first."""
    first, *others = models
    names = dict(zip(models, short_names(list(models)), strict=True))
    gains = {model: "gain" if len(others) == 1 else f"gain {number}" for number, model in enumerate(others, 1)}
    rows, marked = [], False
    for name in models[first]:
        row = {"benchmark": name}
        for model, results in models.items():
            row[names[model]] = percent(results[name]["mean"], results[name]["error"])
        for model, gain in gains.items():
            difference, error = differences[model][name]["difference"], differences[model][name]["error"]
            sure = abs(difference) > SURE * error  # False for NaN
            marked = marked or sure
            row[gain] = percent(difference, error) + " *" * sure
        rows.append(row)
    if len(rows) > 1:
        row = {"benchmark": "average"}
        for model, results in models.items():
            row[names[model]] = percent(*average(results))
        for model, gain in gains.items():
            row[gain] = percent(average(models[model])[0] - average(models[first])[0])
        rows.append(row)
    legend = [f"{gain}: {names[model]} minus {names[first]}, paired by problem" for model, gain in gains.items()]
    if marked:
        legend.append(f"`*`: a gain of more than {SURE} standard errors")
    return fitted(rows, *legend)


def short_names(names: list[str]) -> list[str]:
    """Paths without the folders that all of them begin or end with, as long as a part of each is left."""
    paths = [name.split("/") for name in names]
    for place in (0, -1):
        while min(map(len, paths)) > 1 and len({path[place] for path in paths}) == 1:
            for path in paths:
                path.pop(place)
    return ["/".join(path) for path in paths]
