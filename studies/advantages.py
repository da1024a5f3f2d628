"""True token advantages, line by line: what every credit method approximates, and nobody reports.

    python -m studies.advantages runs/NAME          # of a run's trained model, on its held-out problems
    python -m studies.advantages runs/NAME --start  # of the one that it was warmed up to

Credit methods guess from one verdict a rollout what each token contributed. For the line of tokens s to e that is

    a = V(e) - V(s)        V(t): the chance of a right answer after the first t tokens, under the policy

V after the last token is the rollout's own verdict. Any other V is estimated by p, the mean verdict of K fresh
continuations, with the same temperature and limit of the whole response, so a_hat = a + noise. p (1 - p) / (K - 1) is
an unbiased estimate of p's variance, and a line's noise variance the sum over its two ends. A line's credit c is the
mean token advantage of its tokens. Over all lines of the groups with right and wrong rollouts,

    r = corr(c, a_hat)     reliability = (var(a_hat) - mean noise variance) / var(a_hat)
    corrected = r / sqrt(reliability)

The correction is valid as fresh continuations' noise is independent of credit and advantage. Standard errors are of a
bootstrap, 1,000 draws of groups with replacement, as lines of a group depend on each other. A line is "before", "after"
or itself the "first error".

`against_truth` measures credit against the first errors themselves, for `studies.diagnose`: how well weights tell a
wrong rollout's tokens from its first error on from those before it, and how far off the largest weight lies
(`measures.localisation`, `peak`), for every credit method that gives weights and for SHEAR with one option changed at a
time. And how far ahead of the error they rise: a span that ends beyond it starts up to w - 1 tokens before it and gives
these tokens its distance (App. H.1 of arXiv 2604.23318), whole by max pooling, in part by mean pooling. Every kind of
error is over at the wrong step's last token, so the rise is counted from there, in rollouts with a window of tokens
before the step.

Left out: tasks other than the embedded one; single tokens; the samples, of which only the numbers are kept; `arca`,
whose weights need a trained adapter, which no saved model has (`lora.save_merged` merges it).
"""

import argparse
import dataclasses
import math
import sys
from collections import defaultdict
from itertools import accumulate, pairwise
from pathlib import Path

from credit.table import METHODS, NEEDS, needing, options_of
from harness.config import MAY_CHANGE, Parser, answer, number, positive_int


def make_parser() -> Parser:
    """This command's flags."""
    about = "Credit against true token advantages, which continuations of every line's two ends estimate."
    parser = Parser(prog="python -m studies.advantages", description=about, allow_abbrev=False)
    parser.usage = "%(prog)s RUN [flags]"
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run of the embedded task")
    add("--start", action="store_true", help="the run's warmed-up model, not its trained one")
    add("--groups", type=positive_int, default=12, help="held-out problems that are sampled")
    add("--continuations", type=number(int, 2, 10**6), default=16, help="from every line boundary")
    names = [name for name in METHODS if name not in needing("adapter") | needing("prm")]
    quick = [name for name in names if set(METHODS[name].needs) <= {"states", "pairs"}]  # no further passes
    about = "credit methods: " + ", ".join(names)
    add("--methods", nargs="+", default=quick, choices=names, metavar="NAME", help=about)
    out = Path("runs/advantages")
    add("--out", type=Path, metavar="DIR", default=out, help="folder of advantages.json")
    return parser


answer(__name__, lambda: make_parser().parse_args())  # before what takes seconds to import

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from credit.batch import Batch
from credit.measures import around, effective_weights, localisation, peak
from credit.methods import assign_credit, true_errors
from fast.packing import packing_of
from grpo import Policy, cat_padded
from harness import files, tables
from harness.launch import parse_args, run_command
from harness.parallel import Ranks
from harness.prepare import set_up
from harness.run import seed_of
from studies.prefixes import Prefixes, continued, sampled, scored
from tasks.problems import BadInput, Task
from tasks.toy import SYMBOL

RESAMPLES = 1000  # of the bootstrap
# Settings of a run that say nothing of its problems, its sampling or the options of credit methods.
OTHERS = MAY_CHANGE | set("model out name prm lora_rank smoke dtype".split())


@run_command(memory="lower --continuations", interrupted="interrupted: nothing is kept")
def main(argv: list[str] | None = None) -> None:
    """Exit status: 0, 1 where memory does not suffice, 2 for bad input, 130 after Ctrl-C."""
    flags = make_parser().parse_args(argv)
    args = settings_of_run(flags)
    torch.set_num_threads(args.threads)
    ranks = Ranks(0, 1, torch.device(args.device))
    with files.made(flags.out, ranks, "advantages.json"):
        task, model, tokenizer, *_ = set_up(args, ranks)
        methods = {name: {"method": name} for name in flags.methods}
        problems = task.heldout[: flags.groups]
        results = measure(args, task, model, tokenizer, problems, methods, flags.continuations)
        if not results["mixed_groups"]:
            raise BadInput(f"--groups {flags.groups}: none holds right and wrong rollouts; raise it")
        results = {"model": args.model, "seed": args.seed, "continuations": flags.continuations, **results}
        files.write_json(flags.out / "advantages.json", results)
    print("\n".join(advantage_tables(results)))


def settings_of_run(flags: argparse.Namespace) -> argparse.Namespace:
    """The settings of a run, `model` being the one that is asked for; raises BadInput."""
    config = files.settings_in(flags.run / "config.json", dict(task=str, method=str, heldout=int))
    folder = flags.run / ("start" if flags.start else "model")
    if config["task"] != "embedded":
        raise BadInput(f"{flags.run}: is a run of --task {config['task']}; give one of the embedded task")
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder; {'leave out' if flags.start else 'finish the run, or add'} --start")
    if flags.groups > config["heldout"]:
        raise BadInput(f"--groups {flags.groups}: the run holds out {config['heldout']} problems; lower it")
    args = parse_args(["--task", "embedded", "--model", str(folder)])
    of_run = {name: config[name] for name in vars(args).keys() & config.keys() - OTHERS}
    return argparse.Namespace(**vars(args) | of_run)


def weights_of(method: str, batch: Batch, args: argparse.Namespace, **changed) -> Tensor:
    """What a method multiplies each token's advantage by, (G, T), with the flags' options but for those `changed`."""
    torch.manual_seed(args.seed)
    uncontrolled = {"negative_scale": 1.0, "rescale": "none"}  # controls, which belong to no method
    options = [] if method != args.method else args.method_option
    args = argparse.Namespace(**(vars(args) | uncontrolled | {"method_option": options} | changed))
    return effective_weights(assign_credit(method, batch, args), batch.advantages, batch.rollouts.mask)


def measure(args, task: Task, model, tokenizer, problems: list, methods: dict, continuations: int) -> dict:
    """The numbers of both tables, of rollouts to these problems.

    `args` are train.py's flags; `methods` has the flags changed in each row, "method" among them. --negative-scale and
    --rescale act in a row only if it has them. Random numbers depend on the seed and the problem's number alone.
    """
    policy = Policy(model, **packing_of(model))
    measured = []
    for index, problem in enumerate(tqdm(problems, "groups", leave=False, disable=None)):
        torch.manual_seed(seed_of(args.seed, index))
        group = sampled(args, task, model, tokenizer, problem)
        if not group.mixed:
            continue
        lines, ends = [], []
        for text, ids, score in zip(group.texts, group.responses, group.scores, strict=True):
            lines.append([] if score is None else lines_of(task, problem, text, len(ids)))
            ends.append(sorted({place for line in lines[-1] for place in line[:2]} - {len(ids)}))
        group = continued(dataclasses.replace(group, ends=ends), continuations, args, task, model, tokenizer)
        batch = scored(group, policy, task, tokenizer, args)
        weights = {name: weights_of(batch=batch, args=args, **changed) for name, changed in methods.items()}
        measured += line_stats(index, group, lines, batch, weights)
    return {"groups": len(problems), **statistics_of(measured, list(methods))}


def lines_of(task: Task, problem: dict, text: str, length: int) -> list[tuple[int, int, str]]:
    """The lines of a response of `length` tokens, one a symbol and the stop token: start, end after the last, kind."""
    error = task.first_error(problem, text)
    sizes = [len(SYMBOL.findall(line)) for line in text.splitlines(keepends=True)]
    lines = []
    for start, end in pairwise([0, *list(accumulate(sizes))[:-1], length]):
        kind = "before"
        if error and error[0] < end:
            kind = "first error" if start <= error[0] else "after"
        lines.append((start, end, kind))
    return lines


def value_of(scores: list[float | None]) -> tuple[float, float]:
    """V, the mean of continuations' scores, and the estimated variance of its error; NaN for fewer than two."""
    graded = [score for score in scores if score is not None]
    if len(graded) < 2:
        return math.nan, math.nan
    p = sum(graded) / len(graded)
    return p, p * (1 - p) / (len(graded) - 1)


def line_stats(number: int, group: Prefixes, lines: list[list], batch: Batch, weights: dict) -> list[dict]:
    """The lines (of each rollout) with their advantages, noise variances, mean weights and credits."""
    measured = []
    for row, response in enumerate(group.responses):
        values = {len(response): (group.scores[row], 0.0)}  # boundary -> V, variance
        for end, scores in zip(group.ends[row], group.continued[row], strict=True):
            values[end] = value_of(scores)
        side = "right" if batch.correct[row] else "wrong"
        for start, end, kind in lines[row]:
            line = {"group": number, "kind": kind, "side": side, "start": start}
            line["advantage"] = values[end][0] - values[start][0]
            line["noise"] = values[end][1] + values[start][1]
            line["weight"] = {name: of_tokens[row, start:end].mean().item() for name, of_tokens in weights.items()}
            line["credit"] = {name: weight * batch.advantages[row].item() for name, weight in line["weight"].items()}
            if not math.isnan(line["advantage"]):
                measured.append(line)
    return measured


def statistics_of(lines: list[dict], methods: list[str]) -> dict:
    """How well each method's credit goes with the true advantage, and the means of each kind of line."""
    results = {"mixed_groups": len({line["group"] for line in lines}), "lines": len(lines), "kinds": []}
    results["methods"] = {name: agreement(lines, name) for name in methods}
    kinds = {}  # (kind, side) -> lines
    for line in sorted(lines, key=lambda line: (line["side"], line["start"], line["kind"])):
        kinds.setdefault((line["kind"], line["side"]), []).append(line)
    for (kind, side), same in kinds.items():
        row = {"kind": kind, "side": side, "lines": len(same)}
        numbers = agreement(same, methods[0])  # the advantage is the same for all methods
        row |= {name: numbers[name] for name in ("advantage", "advantage_se")}
        for column in ("weight", "credit"):
            row[column] = {name: float(np.mean([line[column][name] for line in same])) for name in methods}
        results["kinds"].append(row)
    return results


def agreement(lines: list[dict], method: str) -> dict[str, float | None]:
    """The numbers of `from_sums`, and as NAME_se their standard deviations over draws of groups with replacement.

    None for what is not finite, as where noise explains all of the variance, and for the error of one group.
    """
    by_group = defaultdict(lambda: np.zeros(7))
    for line in lines:
        x, y = line["credit"][method], line["advantage"]
        by_group[line["group"]] += [1, x, y, x * x, y * y, x * y, line["noise"]]
    sums = np.array(list(by_group.values())).reshape(-1, 7)  # (groups, 7)
    draws = np.random.default_rng(0).integers(max(1, len(sums)), size=(RESAMPLES, len(sums)))
    with np.errstate(divide="ignore", invalid="ignore"):
        values, redrawn = from_sums(sums.sum(0)), from_sums(sums[draws].sum(1).T)  # (), (RESAMPLES,) each
    result = {}
    for name, value in values.items():
        finite = redrawn[name][np.isfinite(redrawn[name])]
        result[name] = float(value) if np.isfinite(value) else None
        result[f"{name}_se"] = float(finite.std()) if len(sums) > 1 and len(finite) > 1 else None
    return result


def from_sums(sums: np.ndarray) -> dict[str, np.ndarray]:
    """Of credit x and estimated advantage y, from the sums (7, ...) of 1, x, y, xx, yy, xy and noise variance."""
    x, y, xx, yy, xy, noise = sums[1:] / sums[0]
    variance = yy - y * y
    r = (xy - x * y) / np.sqrt((xx - x * x) * variance)
    reliability = 1 - noise / variance
    return {"r": r, "corrected": r / np.sqrt(reliability), "reliability": reliability, "advantage": y}


def advantage_tables(results: dict) -> list[str]:
    """The two tables."""
    methods, kinds = [], []
    for name, numbers in results["methods"].items():
        pairs = {column: with_error(numbers[column], numbers[f"{column}_se"]) for column in ("r", "corrected")}
        methods.append({"method": name} | pairs)
    for line in results["kinds"]:
        advantage = with_error(line["advantage"], line["advantage_se"])
        row = {"line": f"{line['kind']}, {line['side']}", "count": str(line["lines"]), "true advantage": advantage}
        for name in results["methods"]:
            row[name] = f"{line['weight'][name]:.2f} / {line['credit'][name]:.2f}"
        kinds.append(row)
    legend = f"{results['lines']} lines of {results['mixed_groups']} mixed groups, reliability "
    first = next(iter(results["methods"].values()))  # the same for all
    legend += with_error(first["reliability"], first["reliability_se"])
    return tables.with_legend(methods, legend) + tables.with_legend(kinds, "each method: mean weight / mean credit")


def with_error(value: float | None, error: float | None) -> str:
    """0.35 ± 0.02; a dash for what is not known."""
    return " ± ".join("-" if number is None else f"{number:.2f}" for number in (value, error))


# ---- the first error -------------------------------------------------------------------------------------------


def against_truth(args: argparse.Namespace, task: Task, batches: list[Batch], left_out: list[str]) -> dict:
    """Every method ("methods") and every changed option of SHEAR ("settings") against the true first errors.

    What cannot be measured goes to `left_out`, with the reason.
    """
    errors = torch.cat([true_errors(batch, task, batch.source.tokenizer) for batch in batches])  # (B, 2)
    errors = torch.where(errors[:, :1] > 0, errors, -1)
    last_wrong = torch.where(errors[:, 0] >= args.window, errors[:, 1] - 1, -1)  # (B,)
    mask = cat_padded([batch.rollouts.mask for batch in batches])  # (B, T)
    has = {"adapter": None, "prm": batches[0].source.prm, "rephrase": task.rephrase}  # no saved model has an adapter
    absent = set()
    for need in [name for name in has if not has[name]]:
        absent |= needing(need)
        left_out.append(f"{', '.join(needing(need))} against the truth: needs {NEEDS[need]}")
    if localisation(mask.float(), mask, errors) is None:
        left_out.append("credit against the truth: no rollout has tokens before and after its first error")
        return {}
    runs = [("methods", name, name, {}) for name in METHODS if name not in absent]
    runs += [("settings", name, "shear", changed) for name, changed in changes_of(args).items()]
    results = {"methods": {}, "settings": {}}
    for part, name, method, changed in tqdm(runs, "methods and settings", leave=False, disable=None):
        weights = cat_padded([weights_of(method, batch, args, **changed) for batch in batches])  # (B, T)
        place = localisation(weights, mask, errors) | {"peak": peak(weights, mask, errors)}
        place["half_risen"] = half_risen(around(weights, mask, last_wrong, 2 * args.window), args.window)
        results[part][name] = place
    return results


def half_risen(curve: list[float | None], window: int) -> int | None:
    """The offset at which half of a rise is done, of mean weights at offsets -r to r from the wrong step's last token.

    The rise is from the largest weight where no span reaches the wrong step's end, w tokens ahead and more, to the
    largest in the w tokens after it; None where the curve (2 r + 1,) lacks these, or does not rise.
    """
    values = np.array(curve, dtype=float)  # None becomes NaN
    offsets = np.arange(len(values)) - len(values) // 2
    known = ~np.isnan(values)
    before = values[known & (offsets <= -window)]
    after = values[known & (offsets > 0) & (offsets <= window)]
    if not len(before) or not len(after) or before.max() >= after.max():
        return None
    return int(offsets[(offsets > -window) & (values >= (before.max() + after.max()) / 2)].min())


def changes_of(args: argparse.Namespace) -> dict[str, dict]:
    """SHEAR with one option changed at a time."""
    half = max(1, args.window // 2)
    settings = {}
    for changed in (
        {"window": half, "stride": min(args.stride, half)},
        {"window": 2 * args.window},
        {"stride": max(1, args.stride // 2)},
        {"stride": min(2 * args.stride, args.window)},
        {"eps": args.eps / 5},
        {"eps": args.eps * 5},
    ):
        if vars(args) | changed != vars(args):
            settings[", ".join(f"{name} {value:g}" for name, value in changed.items())] = changed
    options = options_of("shear", args.method_option)
    for name in ("pool", "reading", "distance"):
        for choice in METHODS["shear"].options[name].choices:
            if choice != options[name]:
                settings[f"{name} {choice}"] = {"method_option": [*args.method_option, f"{name}={choice}"]}
    return settings


if __name__ == "__main__":
    sys.exit(main())
