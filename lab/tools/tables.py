"""What one may want beside eval.py's table: pass@k, seeds, checkpoints, the paper's numbers.

    python -m lab.tools.tables evals/NAME --paper Qwen2.5-Math-7B --pass-at 1 8
    python -m lab.tools.tables evals/A evals/B  # several folders, as of the checkpoints of runs

It reads generations.jsonl; nothing is evaluated again. pass@k is the unbiased estimator
1 - C(n - c, k) / C(n, k), for c right samples of n. Several seeds also give the mean and the
standard deviation (ddof 1) of the seeds' own avg@k.

A run keeps the models of its checkpoints with --keep-models. If all models are checkpoints of runs,
each run's average is printed at its last checkpoint, and at its best, which is SELECTED ON THE TEST
SETS and so biased upwards; several runs get the paper's Table 1 of their best checkpoints, too.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

import pandas as pd
import tyro
from scipy.special import comb

from base import files
from base.errors import BadInput, printable
from eval import average
from harness.generations import newest, read_generations
from harness.log import markdown, percent
from lab.tools.command import command
from lab.tools.paper_tables import PAPER_TABLES, backbone_of
from tasks.benchmarks import SUITES

UNKNOWN = math.nan, math.nan  # mean and deviation where the paper gives none
Results = dict[str, dict]  # set -> what `summarise` returns


def print_tables(
    *folders: tyro.conf.Positional[Path], paper: str = "", pass_at: tuple[int, ...] = ()
) -> None:
    """Print the tables of folders of evaluations.

    `paper` is the model of the paper whose numbers stand beside; default: by the models' names.
    `pass_at` are the k of pass@k.
    """
    results = results_of(folders, pass_at)
    for model, by_set in results.items():
        backbone = choose_backbone(paper, model)
        lines = []
        for name, result in with_average(by_set).items():
            line = {"benchmark": name, "percent ± SE": mean_and_error(result)}
            if "seed_std" in result:
                line["seeds ± std"] = percent(result["seed_mean"], result["seed_std"])
            line |= paper_means(backbone, suite_of(by_set) if name == "average" else name)
            for k in pass_at:
                if f"pass@{k}" in result:
                    line[f"pass@{k}"] = percent(result[f"pass@{k}"], result[f"pass@{k} error"])
            lines.append(line)
        print("\n".join([printable(model), "", *markdown(lines), ""]))
    if not all("/checkpoints/" in model for model in results):
        return
    if not same_sets(results.values()):
        print("WARNING: the checkpoints were asked different --bench, so none is chosen")
        return
    counts = [
        [(name, by_set[name]["rows"]) for name in sorted(by_set)] for by_set in results.values()
    ]
    if any(count != counts[0] for count in counts):
        print("WARNING: some checkpoints have fewer samples; finish their evaluation first")
    runs: dict[str, dict[str, Results]] = defaultdict(dict)  # run -> checkpoint -> results
    for model, by_set in sorted(results.items()):
        run, _, step = model.partition("/checkpoints/")
        runs[run][step.removesuffix("/model")] = by_set
    select_checkpoints(runs, choose_backbone(paper, next(iter(results))))


def results_of(folders: Iterable[Path], passes: Sequence[int] = ()) -> dict[str, Results]:
    """Model -> set -> result, of the newest generations in the folders; raises BadInput."""
    generations: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for folder in dict.fromkeys(folders):
        for row in newest(read_generations(folder)):
            generations[row["model"], row["set"]].append(row | {"folder": folder})
    if not generations:
        given = ", ".join(map(str, folders)) or "lab.tools.tables"
        raise BadInput(f"{given}: holds no generations; give another folder")
    results: dict[str, Results] = defaultdict(dict)
    for (model, name), rows in generations.items():
        if len({row["folder"] for row in rows}) > 1:
            raise BadInput(f"{printable(model)}: {name} is in several folders; give one of them")
        counts = pd.Series([row["problem"] for row in rows]).value_counts()
        if max(passes, default=0) > counts.max():
            raise BadInput(
                f"--pass-at {max(passes)}: {printable(model)} has {counts.max()} samples per "
                f"problem of {name}; lower it, or evaluate with more --samples"
            )
        results[model][name] = summarise(rows, passes)
    return results


def choose_backbone(paper: str, model: str) -> str | None:
    """The paper's model whose numbers stand beside those of `model`; raises BadInput."""
    if paper and paper not in PAPER_TABLES:
        raise BadInput(f"--paper {paper}: must be one of {', '.join(PAPER_TABLES)}")
    return paper or backbone_of(files.run_of(model).get("model") or model)


# ---- numbers -------------------------------------------------------------------------------------


def pass_at_k(right: pd.Series, samples: pd.Series, k: int) -> pd.Series:
    """By problem, the chance that k samples drawn without replacement include a right one."""
    return 1 - pd.Series(comb(samples - right, k) / comb(samples, k))


def summarise(rows: list[dict], passes: Sequence[int] = ()) -> dict:
    """Statistics of one model on one set.

    `passes` are the k of pass@k, each over the problems with at least k samples.
    """
    graded = pd.DataFrame(rows).dropna(subset="score").astype({"score": float})
    scores = graded.groupby("problem")["score"].mean()
    result = {"mean": scores.mean(), "error": scores.sem(), "rows": len(rows)}
    counts = graded.groupby("problem")["score"].agg(right="sum", samples="count")
    for k in passes:
        enough = counts[counts["samples"] >= k]
        chances = pass_at_k(enough["right"], enough["samples"], k)
        result[f"pass@{k}"] = chances.mean()
        result[f"pass@{k} error"] = chances.sem()
    # avg@k of each seed: the mean over problems of the mean over a problem's samples
    by_seed = graded.groupby(["seed", "problem"])["score"].mean().groupby("seed").mean()
    if len(by_seed) > 1:
        result["seed_mean"] = by_seed.mean()
        result["seed_std"] = by_seed.std()
    return result


def mean_and_error(result: dict) -> str:
    """The mean and standard error of a result, in percent."""
    return percent(result["mean"], result["error"])


def mean_of(results: Results) -> dict:
    """The average over sets, and its error."""
    of_sets, error = average((result["mean"], result["error"]) for result in results.values())
    return {"mean": of_sets, "error": error}


def with_average(results: Results) -> Results:
    """The results, and their average where there are several."""
    return results | {"average": mean_of(results)} if len(results) > 1 else results


def same_sets(results: Iterable[Results]) -> bool:
    """Whether all models, or checkpoints, have results on the same sets."""
    return len({frozenset(by_set) for by_set in results}) == 1


# ---- the paper's ---------------------------------------------------------------------------------


def suite_of(names: Iterable[str]) -> str:
    """The suite, "math" or "code", that has exactly these sets; "" if none has."""
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


# ---- checkpoints ---------------------------------------------------------------------------------


def select_checkpoints(runs: dict[str, dict[str, Results]], backbone: str | None) -> dict:
    """Print each run's average at its last and its best checkpoint, and means over the runs.

    `runs` has run -> checkpoint -> results, checkpoints by ascending step. One whose average is
    NaN, because a set has no verdict, is left out; so is a run that has only such checkpoints.
    Returns what is printed of each run.
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
            of_sets = mean_of(results)["mean"]
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
    if selection:
        best = max(selection, key=lambda name: selection[name]["best_average"])
        print(printable(f"  best of all: {best}/checkpoints/{selection[best]['best']}/model"))
    if len(selection) > 1:
        of_last = mean_and_std([entry["last_average"] for entry in selection.values()])
        print(f"  last, mean ± standard deviation of {len(selection)} runs: {of_last}\n")
        print("\n".join(best_checkpoints(best_results, backbone)))
    return selection


def mean_and_std(values: list[float]) -> str:
    """The mean of several runs and their standard deviation (ddof 1), in percent."""
    return percent(mean(values), stdev(values))


def best_checkpoints(best: list[Results], backbone: str | None) -> list[str]:
    """A table like the paper's Table 1: runs at their best checkpoints, above the paper's rows.

    `best` has each run's results. Cells are mean ± standard deviation over the runs.
    """
    row = {"": f"{len(best)} runs, best"}
    for name in with_average(best[0]):
        means = [with_average(results)[name]["mean"] for results in best]
        row[name] = mean_and_std(means)
    rows = [row]
    if not backbone:
        return [*markdown(rows), ""]
    suite = suite_of(best[0])
    for method, numbers in PAPER_TABLES[backbone].items():
        cells = {"": f"{method} †"}
        for name in with_average(best[0]):
            of_paper, deviation = numbers.get(suite if name == "average" else name, UNKNOWN)
            cells[name] = percent(of_paper / 100, deviation / 100)
        rows.append(cells)
    return [*markdown(rows), "", f"†: the paper's, {backbone}", ""]


main = command("lab.tools.tables", print_tables)

if __name__ == "__main__":
    sys.exit(main())
