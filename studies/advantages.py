"""True token advantages, line by line: what every credit method approximates, and nobody reports.

    python -m studies.advantages runs/NAME          # of a run's trained model, on its held-out problems
    python -m studies.advantages runs/NAME --start  # of the one that it was warmed up to

A policy gradient wants the advantage of each action. Credit methods approximate it from one verdict a rollout; they are
judged by what training with them gives, or by whether they find the first error. Nobody reports how close they come to
the advantage itself. That of a line of tokens s to e is

    a = V(e) - V(s)        V(t): the chance of a right answer after the first t tokens, under the policy

V after the last token is the rollout's own verdict. Any other V is estimated by p, the mean verdict of K fresh
continuations from there, with the same temperature and limit of the whole response, so a_hat = a + noise. p (1 - p) /
(K - 1) is an unbiased estimate of p's variance, and a line's noise variance the sum over its two ends. A line's credit
c is the mean token advantage of its tokens. Over all lines of the groups with right and wrong rollouts,

    r = corr(c, a_hat)     reliability = (var(a_hat) - mean noise variance) / var(a_hat)
    corrected = r / sqrt(reliability)

The correction is valid because continuations are fresh: their noise is independent of credit and advantage. Standard
errors are deviations over RESAMPLES draws of groups with replacement, as lines of a group depend on each other. Kinds
of lines come from `Task.lines`; else a line is "before", "after" or itself the "first error". Lines that begin with a
token of the environment (`Task.foreign`) are no act of the policy's: they are in the table of kinds alone.

Left out: tasks without known lines; single tokens; the samples, of which only the numbers are kept.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable

from harness.flags import answer
from studies.options import advantages_parser

answer(__name__, lambda: advantages_parser().parse_args())  # before what takes seconds to import

import numpy as np
import torch
from tqdm import tqdm
from transformers.utils import logging

from credit.batch import Batch
from fast.packing import packing_of
from grpo import Policy
from harness import folders, tables
from harness.checkpoint import write_whole
from harness.command import guarded
from harness.parallel import Ranks
from harness.prepare import set_up
from harness.recipe import MAY_CHANGE
from harness.resolve import parse_args, renamed, spelled
from harness.run import seed_of
from studies.prefixes import Group, continued, sampled, scored
from studies.truth import weights_of
from tasks.problems import BadInput, Task
from tasks.toy import SYMBOL

RESAMPLES = 1000  # of the bootstrap
# Settings of a run that say nothing of its problems, its sampling or the options of credit methods.
OTHERS = MAY_CHANGE | set("task model out name method prm lora_rank smoke fused dtype".split())


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 where memory does not suffice, 2 for bad input, 130 after Ctrl-C."""
    logging.disable_progress_bar()

    def work() -> int:
        flags = advantages_parser().parse_args(argv)
        args = settings_of_run(flags)
        torch.set_num_threads(args.threads or torch.get_num_threads())
        ranks = Ranks(0, 1, torch.device(args.device))
        folders.make_out(flags.out, ranks)
        task, model, tokenizer, *_ = set_up(args, ranks)
        methods = {name: {"method": name} for name in flags.methods}
        results = {"model": args.model, "seed": args.seed, "continuations": flags.continuations}
        results |= measure(args, task, model, tokenizer, task.heldout[: flags.groups], methods, flags.continuations)
        if not results["mixed_groups"]:
            raise BadInput(f"--groups {flags.groups}: none holds right and wrong rollouts; raise it")
        write_whole(flags.out / "advantages.json", json.dumps(results, indent=1) + "\n")
        print("\n".join(summary(results)))
        return 0

    return guarded(work, interrupted="interrupted: nothing is kept", memory="lower --continuations")


def settings_of_run(flags: argparse.Namespace) -> argparse.Namespace:
    """The settings of a run, `model` being the one that is asked for; raises BadInput."""
    config = renamed(folders.settings_in(flags.run / "config.json", ["task", "toy_lines"]))
    folder = flags.run / ("start" if flags.start else "model")
    if config["task"] != "embedded":
        raise BadInput(f"{flags.run}: is a run of --task {config['task']}; give one of the embedded task")
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder; {'leave out' if flags.start else 'finish the run, or add'} --start")
    words = ["--task", "embedded", "--model", str(folder)]
    known = vars(parse_args(words)).keys() - OTHERS
    for name in known & config.keys():
        words += spelled(name, config[name])
    args = parse_args(words)
    if flags.groups > args.heldout:
        raise BadInput(f"--groups {flags.groups}: the run holds out {args.heldout} problems; lower it")
    return args


def measure(
    args: argparse.Namespace,
    task: Task,
    model: torch.nn.Module,
    tokenizer,
    problems: list[dict],
    methods: dict[str, dict],
    continuations: int,
) -> dict:
    """The numbers of both tables, of rollouts to these problems.

    `args` are train.py's flags; `methods` has the flags changed in each row, "method" among them. --negative-scale and
    --rescale act in a row only if it has them. Random numbers depend on the seed and the problem's number alone.
    """
    policy = Policy(model, **packing_of(model))
    mixed, measured = 0, []
    for number, problem in enumerate(tqdm(problems, "groups", leave=False, disable=None)):
        torch.manual_seed(seed_of(args.seed, number))
        group = sampled(args, task, model, tokenizer, problem)
        if not group.mixed:
            continue
        mixed += 1
        lines, ends = [], []
        for text, ids, score in zip(group.texts, group.responses, group.scores, strict=True):
            lines.append([] if score is None else lines_of(task, problem, text, len(ids)))
            boundaries = {place for start, end, _ in lines[-1] for place in (start, end)}
            ends.append(sorted(boundaries - {len(ids)}))
        group = dataclasses.replace(group, ends=ends)
        group = continued(group, continuations, args, task, model, tokenizer)
        batch = scored(group, policy, task, tokenizer, args)
        weights = {}  # (G, T) each
        for name, changed in methods.items():
            options = {flag: value for flag, value in changed.items() if flag != "method"}
            weights[name] = weights_of(changed["method"], batch, args, **options)
        measured += with_credit(number, group, lines, batch, weights, task)
    return {"groups": len(problems), "mixed_groups": mixed, **statistics_of(measured, list(methods))}


# ---- lines and their advantages -------------------------------------------------------------------------------


def lines_of(task: Task, problem: dict, text: str, length: int) -> list[tuple[int, int, str]]:
    """The lines of a response of `length` tokens: start, end after the last token, kind.

    A symbol is a token, as on the embedded task. The stop token, which is not in the text, belongs to the last line.
    """
    symbols = len(SYMBOL.findall(text))
    lines = []
    if task.lines:
        lines = [line for line in task.lines(problem, text) if line[0] < symbols]
        covered = min(lines[-1][1], symbols) if lines else 0
        if covered < symbols or not lines:
            lines.append((covered, length, "rest"))
        lines[-1] = (lines[-1][0], length, lines[-1][2])
        return lines
    error = task.first_error(problem, text) if task.first_error else None
    start = 0
    pieces = text.splitlines(keepends=True) or [""]
    for number, piece in enumerate(pieces, 1):
        end = start + len(SYMBOL.findall(piece)) if number < len(pieces) else length
        kind = "before"
        if error and error[0] < end:
            kind = "first error" if start <= error[0] else "after"
        lines.append((start, end, kind))
        start = end
    return lines


def value_of(scores: list[float | None]) -> tuple[float, float]:
    """V, the mean of continuations' scores, and the estimated variance of its error; NaN for fewer than two."""
    graded = [score for score in scores if score is not None]
    if len(graded) < 2:
        return math.nan, math.nan
    p = sum(graded) / len(graded)
    return p, p * (1 - p) / (len(graded) - 1)


def with_credit(number: int, group: Group, lines: list[list], batch: Batch, weights: dict, task: Task) -> list[dict]:
    """A dictionary for each line: estimated advantage, noise variance, and each method's mean weight and credit.

    `lines` has those of each rollout, `weights` (G, T) of each method.
    """
    measured = []
    for row, text in enumerate(group.texts):
        values = {len(group.responses[row]): (group.scores[row], 0.0)}  # boundary -> V, variance
        for end, scores in zip(group.ends[row], group.continued[row], strict=True):
            values[end] = value_of(scores)
        foreign = task.foreign(group.problem, text) if task.foreign else []
        rollout_advantage = batch.advantages[row].item()  # not 0 in a mixed group
        for start, end, kind in lines[row]:
            line = {"group": number, "kind": kind, "side": "right" if batch.correct[row] else "wrong"}
            line |= {"start": start, "own": start not in foreign}
            line["advantage"] = values[end][0] - values[start][0]
            line["noise"] = values[end][1] + values[start][1]
            line["weight"] = {name: of_tokens[row, start:end].mean().item() for name, of_tokens in weights.items()}
            line["credit"] = {name: rollout_advantage * weight for name, weight in line["weight"].items()}
            if not math.isnan(line["advantage"]):
                measured.append(line)
    return measured


# ---- statistics -----------------------------------------------------------------------------------------------


def statistics_of(lines: list[dict], methods: list[str]) -> dict:
    """How well each method's credit goes with the true advantage, and the means of each kind of line."""
    own = [line for line in lines if line["own"]]
    results = {"lines": len(own), "methods": {}, "kinds": []}
    if own:
        results["methods"] = {name: agreement(own, name) for name in methods}
    kinds = {}  # (kind, side) -> lines
    for line in sorted(lines, key=lambda line: (line["start"], line["side"])):
        kinds.setdefault((line["kind"], line["side"]), []).append(line)
    for (kind, side), same in kinds.items():
        columns = np.array([[1, line["advantage"]] for line in same])  # (n, 2)
        mean = bootstrapped(["advantage"], lambda sums: [sums[1] / sums[0]], columns, same)
        row = {"kind": kind, "side": side, "lines": len(same), **mean}
        for column in ("weight", "credit"):
            row[column] = {name: float(np.mean([line[column][name] for line in same])) for name in methods}
        results["kinds"].append(row)
    return results


def agreement(lines: list[dict], method: str) -> dict[str, float | None]:
    """Pearson's r of a method's credit and the estimated advantage; that corrected for noise; and the reliability."""
    x = np.array([line["credit"][method] for line in lines])
    y = np.array([line["advantage"] for line in lines])
    noise = np.array([line["noise"] for line in lines])
    columns = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y, noise], axis=1)  # (n, 7)

    def correlations(sums: np.ndarray) -> list:
        x, y, xx, yy, xy, noise = sums[1:] / sums[0]
        variance = yy - y * y  # of estimated advantages
        r = (xy - x * y) / np.sqrt((xx - x * x) * variance)
        reliability = 1 - noise / variance
        return [r, r / np.sqrt(reliability), reliability]

    return bootstrapped(["r", "corrected", "reliability"], correlations, columns, lines)


def bootstrapped(names: list[str], statistic: Callable, columns: np.ndarray, lines: list[dict]) -> dict:
    """Statistics of the sums (k,) of the lines' columns (n, k) and, as NAME_se, their deviation over draws of groups.

    `statistic` maps sums (k, ...) to a value (...) for each name. None for what is not a finite number.
    """
    group = np.array([line["group"] for line in lines])
    sums = np.array([columns[group == number].sum(0) for number in np.unique(group)])  # (groups, k)
    draws = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(sums.sum(0))
        redrawn = statistic(sums[draws].sum(1).T)  # (RESAMPLES,) each
    result = {}
    for name, value, others in zip(names, values, redrawn, strict=True):
        error = others[np.isfinite(others)].std() if len(sums) > 1 and np.isfinite(value) else math.nan
        result[name] = float(value) if np.isfinite(value) else None
        result[f"{name}_se"] = float(error) if np.isfinite(error) else None
    return result


# ---- what is printed ------------------------------------------------------------------------------------------


def summary(results: dict) -> list[str]:
    """The two tables."""
    methods, kinds = [], []
    for name, numbers in results["methods"].items():
        row = {"method": name, "correlation": shown(numbers["r"], numbers["r_se"])}
        methods.append(row | {"corrected for noise": shown(numbers["corrected"], numbers["corrected_se"])})
    for line in results["kinds"]:
        row = {"lines of": f"{line['kind']}, {line['side']}", "number": str(line["lines"])}
        row["true advantage"] = shown(line["advantage"], line["advantage_se"])
        for name in results["methods"]:
            row[name] = f"{shown(line['weight'][name])} / {shown(line['credit'][name])}"
        kinds.append(row)
    sizes = f"{results['lines']} lines of {results['mixed_groups']} mixed groups"
    reliability = shown(numbers["reliability"], numbers["reliability_se"])  # the same for all methods
    legend = f"of a line's credit and its true advantage; {sizes}; reliability {reliability}"
    return tables.fitted(methods, legend) + tables.fitted(kinds, "each method: mean weight / mean credit")


def shown(value: float | None, error: float | None = None) -> str:
    """0.35 or 0.35 ± 0.02; a dash for what is not known."""
    if value is None:
        return "-"
    return f"{value:.2f}" + ("" if error is None else f" ± {error:.2f}")


if __name__ == "__main__":
    sys.exit(main())
