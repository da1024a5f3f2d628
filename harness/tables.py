"""Numbers from graded generations: avg@k, pass@k, their standard errors, and the tables that show them.

    summarise(rows) -> means, errors and shares of one model on one benchmark
    compare(rows, others) -> the difference of two models, paired by problem
    table(...), side_by_side(...) -> lines to print

A generation is a row with "problem", "seed", "score" (1, 0, or None where it could not be graded) and "reason".

**avg@k** is the mean over problems of a problem's mean score. Samples of one problem are alike, so its error is
clustered: the standard deviation of the problems' means, by the root of their number. Pooling the samples instead
would make it too small, by up to the root of k. It measures which problems were asked; what sampling adds is in it.
**pass@k** is the unbiased estimator 1 - C(n - c, k) / C(n, k), for c right ones of n samples.
**Several seeds** give the mean and the standard deviation (ddof 1) of the seeds' own avg@k besides.

Samples that could not be graded are in no mean; they are counted (`infra`). The numbers in PAPER are the paper's,
Tables 1 and 2, and are printed in columns that say so.

Left out: bootstrap, corrections for many comparisons.
"""

import math
from collections import defaultdict

import numpy as np

MATH = "aime24 aime25 amc23 math500 olympiadbench".split()
CODE = "humaneval humaneval+ mbpp mbpp+ livecodebench".split()


def _printed(names: list[str], *numbers: float) -> dict[str, float]:
    return dict(zip(names, numbers, strict=True))


# Tables 1 and 2 of arXiv 2604.23318, percent: each run's best checkpoint on these very sets; math: mean of three seeds.
# Averages are taken of these; the paper prints 51.2 for SHEAR on Qwen2.5-Math-7B, whose five numbers average 50.9.
PAPER = {
    "Qwen2.5-Math-7B": {
        "GRPO": _printed(MATH, 33.6, 15.5, 66.5, 84.9, 47.8),
        "SHEAR": _printed(MATH, 35.2, 16.8, 70.3, 83.3, 48.7),
    },
    "Qwen2.5-Coder-7B": {
        "GRPO": _printed(CODE, 75.8, 71.0, 81.8, 69.3, 17.8),
        "SHEAR": _printed(CODE, 76.1, 72.1, 82.2, 70.8, 18.3),
    },
    "Llama3.1-8B-Instruct": {
        "GRPO": _printed(MATH + CODE, 7.9, 0.7, 32.7, 57.7, 24.5, 65.7, 60.0, 70.7, 59.7, 17.4),
        "SHEAR": _printed(MATH + CODE, 12.7, 2.1, 37.2, 56.3, 22.8, 70.0, 63.5, 69.5, 58.4, 17.7),
    },
    "Qwen2.5-14B-Base": {
        "GRPO": _printed(MATH + CODE, 16.5, 15.0, 62.4, 83.3, 49.9, 85.0, 79.3, 82.8, 68.8, 19.7),
        "SHEAR": _printed(MATH + CODE, 18.7, 16.9, 62.2, 84.5, 52.0, 85.5, 79.6, 83.1, 69.0, 21.1),
    },
}
SURE = 1.96  # standard errors from which a difference is marked


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
    return mean_and_error(
        [
            pass_at_k(sum(score > 0.5 for score in scores), len(scores), k)
            for scores in by_problem(rows).values()
            if len(scores) >= k
        ]
    )


def summarise(rows: list[dict], passes: tuple[int, ...] = ()) -> dict:
    """What a table says of one model on one benchmark."""
    graded = [row for row in rows if row["score"] is not None]
    mean, error = avg_at_k(rows)
    result = {
        "mean": mean,
        "error": error,
        "problems": len(by_problem(rows)),
        "samples": len(graded),
        "right": sum(row["score"] for row in graded),
        "truncated": share(graded, "truncated"),
        "no_answer": share(graded, "no_answer"),
        "infra_errors": len(rows) - len(graded),
    }
    for k in passes:
        result[f"pass@{k}"], result[f"pass@{k} error"] = pass_at_k_of(rows, k)
    seeds = sorted({row["seed"] for row in rows})
    if len(seeds) > 1:
        means = [avg_at_k([row for row in rows if row["seed"] == seed])[0] for seed in seeds]
        result["seeds"] = dict(zip(map(str, seeds), means, strict=True))
        result["seed_mean"], result["seed_std"] = float(np.mean(means)), float(np.std(means, ddof=1))
    return result


def share(rows: list[dict], reason: str) -> float:
    """How many of these rows have this reason."""
    return sum(row["reason"] == reason for row in rows) / len(rows) if rows else math.nan


def compare(rows: list[dict], others: list[dict]) -> dict:
    """How much higher `others` score, over the problems that both have, paired by problem."""
    first, second = by_problem(rows), by_problem(others)
    both = [name for name in first if name in second]
    mean, error = mean_and_error([float(np.mean(second[name]) - np.mean(first[name])) for name in both])
    return {"difference": mean, "error": error, "problems": len(both)}


def average(results: dict[str, dict]) -> tuple[float, float]:
    """The mean over benchmarks, with equal weights as in the paper, and its error, taking sets as independent.

    HumanEval and HumanEval+ ask the same problems, as do MBPP and MBPP+: on code the error is too small.
    """
    means, errors = ([result[name] for result in results.values()] for name in ("mean", "error"))
    return float(np.mean(means)), math.sqrt(sum(error**2 for error in errors)) / len(errors)


def backbone_of(name: str) -> str | None:
    """Which of the paper's models this is, by its name."""
    plain = name.lower().replace("-", "").replace("_", "").replace("llama3.1", "llama31")
    keys = {"qwen2.5math7b": 0, "qwen2.5coder7b": 1, "llama318b": 2, "qwen2.514b": 3}
    return next((list(PAPER)[place] for key, place in keys.items() if key in plain), None)


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


def lay_out(head: list[str], body: list[list[str]]) -> list[str]:
    """Lines of a Markdown table, in columns."""
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *body]
    return [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]


def table(results: dict[str, dict], data: dict[str, dict], backbone: str | None) -> list[str]:
    """One model: a line a benchmark. `data` says what each set is; `backbone` asks for the paper's columns."""
    passes = sorted(
        {name for result in results.values() for name in result if name.startswith("pass@") and " " not in name}
    )
    seeded = any("seed_std" in result for result in results.values())
    paper = PAPER.get(backbone or "", {})
    head = ["benchmark", "avg", "percent ± SE", *(["seeds: mean ± std"] if seeded else []), *passes]
    head += "problems samples right truncated no-answer infra revision window".split()
    head += [f"paper's {method}, {backbone}" for method in paper]
    body = []
    for name, result in results.items():
        about = data[name]
        line = [name, f"@{about['k']}", percent(result["mean"], result["error"])]
        if seeded:
            line.append(percent(result.get("seed_mean", math.nan), result.get("seed_std")))
        line += [percent(result[each], result[f"{each} error"]) if each in result else "-" for each in passes]
        line += [str(result["problems"]), str(result["samples"]), f"{result['right']:.0f}"]
        line += [percent(result["truncated"]) + "%", percent(result["no_answer"]) + "%", str(result["infra_errors"])]
        line += [about["revision"], about["window"] or "-"]
        body.append(line + [str(columns.get(name, "-")) for columns in paper.values()])
    if len(results) > 1:
        blank = [""] * (len(head) - 3 - len(paper))
        whole = all(name in columns for columns in paper.values() for name in results)
        theirs = [f"{np.mean([columns[name] for name in results]):.1f}" if whole else "-" for columns in paper.values()]
        body.append(["average", "", percent(*average(results)), *blank, *theirs])
    return lay_out(head, body)


def side_by_side(models: dict[str, dict[str, dict]], differences: dict[str, dict[str, dict]]) -> list[str]:
    """Several models: their means, and how each differs from the first; * from SURE standard errors on."""
    first, *others = models
    head = ["benchmark", *models, *(f"{name} - {first}" for name in others)]
    body = []
    for name in models[first]:
        line = [name, *(percent(results[name]["mean"], results[name]["error"]) for results in models.values())]
        for other in others:
            gap = differences[other][name]
            sure = abs(gap["difference"]) > SURE * gap["error"]  # False for NaN
            line.append(percent(gap["difference"], gap["error"]) + (" *" if sure else ""))
        body.append(line)
    if len(models[first]) > 1:
        means = {name: average(results)[0] for name, results in models.items()}
        gaps = [percent(means[other] - means[first]) for other in others]
        body.append(["average", *(percent(*average(results)) for results in models.values()), *gaps])
    return lay_out(head, body)
