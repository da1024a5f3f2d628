"""A run's folder: its name and lock, and what is written and printed there.

`open_folder` makes runs/NAME/. It gets config.json, metrics.jsonl (a row per step, one for each
evaluation), samples.jsonl (a group per step), before.jsonl and after.jsonl (one held-out group);
`train.py` puts the models beside them. Nothing here changes what is trained.

Left out: pictures and pages, which commands of the lab draw from these files.
"""

import math
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm

from base import files
from base.config import Config
from base.errors import BadInput, printable
from base.options import has_lab
from harness import fsdp
from harness.run import Loaded, Run
from rewards import Verdict, rewards_of
from shear import span_bounds
from tasks.problems import HUB

ROOT = Path(__file__).parents[1]
PICTURES = ["-m lab.tools.page", "-m lab.tools.curve"]  # the lab's commands on a run
HEADER_EVERY = 20  # rows of steps
ALIKE = 0.75  # the floor's share of the mean weight above which nearly all weights are alike
# A step's row: titles, which docs/faq.md explains, and metrics with their formats.
COLUMNS = (
    ("reward", "reward", "7.3f"),
    ("solved", "solved", "8.2f"),
    ("no-signal", "equal_groups", "10.2f"),
    ("length", "length", "7.0f"),
    ("trunc", "truncated", "7.2f"),
    ("entropy", "entropy", "8.3f"),
    ("weight", "weight_mean", "7.2f"),
    ("±", "weight_std", "6.2f"),
    ("ess", "ess", "6.2f"),
    ("gnorm", "grad_norm", "7.3f"),
    ("s/step", "s_per_step", "7.1f"),
    ("left", "left", "10"),
)
EXPLAINED = (
    "no-signal: groups that teach nothing; trunc: cut off; weight: of tokens; ess: share of tokens "
    "with credit"
)
ERRORS = 2  # a gain of more standard errors is told from none: two-sided, 5%
# standard deviation of a problem's gain, before it is measured: 0.18 and 0.19 in two runs
SPREAD = 0.2
# Rows of a held-out table on how well credit finds the true first error, by AUC: the share of pairs
# of tokens in which the later one has the larger weight.
AUCS = {
    "auc": "tokens from the first error on outweigh earlier ones",
    "auc_position": "  how often position alone would do that",
}
RARE = "infra_errors", "skipped"  # shown where they are not 0
TIMEOUTS = 0.01  # share of a step's responses that may be graded as out of time without a warning
UNCONVERGED = 0.01  # share of a step's pairs of spans that Sinkhorn may leave above its tolerance


class Clock:
    """Measures the phases of a step, in seconds."""

    def __init__(self, device: torch.device):
        self.device = device
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        """End a phase; phases of one name add up."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.laps[name] = round(self.laps.get(name, 0.0) + now - self.last, 3)
        self.last = now


def say(text: str) -> None:
    """Print an indented line, beside progress bars."""
    tqdm.write(f"  {printable(text)}")


# ---- the folder ----------------------------------------------------------------------------------


@contextmanager
def open_folder(loaded: Loaded) -> Iterator[Path]:
    """Make and lock the run's folder, write config.json and print the plan.

    If the run ends early, a line says how to go on from what is there.
    """
    config = loaded.config
    ranks = loaded.ranks
    folder = Path(config.out) / fsdp.from_main(config.name or free_name(config), ranks)
    with ExitStack() as at_end:
        with fsdp.raise_together(ranks):
            if ranks.main:
                at_end.enter_context(files.locked_folder(folder))
                if not config.resume:
                    clear(folder)
        try:
            if ranks.main:
                if not config.resume:
                    write_config(config, folder)
                print_plan(loaded, folder)
            yield folder
        except BadInput:
            raise
        except BaseException:
            if ranks.main and files.checkpoints_of(folder):
                place = shlex.quote(str(folder))
                print(f"resume with: python train.py --resume {place}", file=sys.stderr)
            raise


def clear(folder: Path) -> None:
    """Remove what a run has left that was killed before its first checkpoint.

    Raises BadInput for any other folder: since `base.config.check` found its name free, another
    process may have finished a run there.
    """
    left = list(folder.iterdir())
    if left and files.is_taken(folder):
        raise BadInput(f"--name {folder.name}: exists in {folder.parent}/ by now; choose another")
    for path in left:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def free_name(config: Config) -> str:
    """Task and method, and the next free number."""
    name = f"{config.task}-{config.method}"
    number = 1
    while (Path(config.out) / f"{name}-{number}").exists():
        number += 1
    return f"{name}-{number}"


def write_config(config: Config, folder: Path) -> None:
    """Write config.json: the resolved flags, a digest of the problems, and versions of packages."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    settings = asdict(config) | {"name": folder.name, "resume": None, "versions": versions}
    files.write_json(folder / "config.json", settings | {"program": files.PROGRAM})


def print_plan(loaded: Loaded, folder: Path) -> None:
    """Print what the run will do."""
    config = loaded.config
    model = loaded.context.policy.model
    task = loaded.context.task
    print(f"{config.method} on the {config.task} task; everything goes to {folder}/")
    say(
        f"{loaded.ranks.world} rank(s) on {config.device}, compute {config.dtype}, "
        f"{torch.get_num_threads()} CPU threads each"
    )
    name = config.model or "made here"
    say(f"model {name}: {type(model).__name__}, {model.num_parameters():,} parameters")
    say(f"{len(task.train)} problems to train on, {len(task.heldout)} held out")
    sampled = min(len(task.heldout), config.eval_groups)
    smallest = 100 * smallest_gain(sampled)
    say(f"{sampled} held-out problems show only gains above {smallest:.0f} points")
    if config.data:
        steps = -(-len(task.train) // config.prompts_per_step)
        say(f"a pass over --data takes {steps} step(s)")
    if config.task == "math" and config.device == "cpu":
        say("sizes and --lr are the paper's; --task own has some for a CPU")
    for note in loaded.notes:
        say(note)
    if config.task in HUB and not config.data and not config.keep_models:
        models_gb = config.steps / 5 * model.num_parameters() * model.dtype.itemsize / 1e9
        say(
            f"the last {config.keep} checkpoints are kept; Table 1 needs the models of every fifth "
            f"step: --save-every 5 --keep-models 5, {models_gb:.3g} GB (docs/evaluation.md: hours)"
        )
    updates = config.prompts_per_step // config.prompts_per_update
    say(
        f"{config.steps} steps x {config.prompts_per_step} prompts x {config.rollouts_per_prompt} "
        f"rollouts of up to {config.max_tokens} tokens, {config.generate_batch} generated at a "
        f"time; {updates} update(s) per step"
    )
    if task.name == "embedded":
        say("the default sizes take two minutes on two CPU cores, with an evaluation at either end")
    if config.use:
        say(f"uses {', '.join(config.use)}")
    elif config.model and has_lab():
        say("--use lab.fast gives the same numbers sooner")
    say("settings: config.json; all metrics: metrics.jsonl; columns: docs/faq.md")


# ---- steps ---------------------------------------------------------------------------------------


def log_step(run: Run, metrics: dict, samples: list[dict]) -> None:
    """Append a step's metrics and samples to the run's files, and print its row of the table."""
    if not run.ranks.main:
        return
    files.append_rows(run.folder / "metrics.jsonl", [metrics])
    files.append_rows(run.folder / "samples.jsonl", samples)
    step = metrics["step"]
    if step == 1:
        say(EXPLAINED)
    if step % HEADER_EVERY == 1:
        print_header()
    seconds = sum(metrics["seconds"].values())
    left = str(timedelta(seconds=round(seconds * (run.config.steps - step))))
    values = metrics | {"s_per_step": seconds, "left": left.rjust(10)}
    cells = [format(values[name], form) for _, name, form in COLUMNS]
    tqdm.write(f"{step}/{run.config.steps}".ljust(8) + "".join(cells))
    for name in RARE:
        if metrics.get(name):
            say(f"{name} {metrics[name]:.4g}")
    if step == 1:
        for note in notes_of(metrics, run.config):
            say(note)
    if metrics.get("timeout", 0) > TIMEOUTS:
        say_once(
            run,
            f"WARNING: over {TIMEOUTS:.0%} of a step's responses took too long to grade, and count "
            "as wrong: give the graders more CPU cores, or raise --grade-timeout",
        )
    if metrics.get("unconverged", 0) > UNCONVERGED:
        say_once(
            run,
            f"WARNING: Sinkhorn left over {UNCONVERGED:.0%} of a step's pairs of spans above its "
            "tolerance, so their distances are too small: raise --eps",
        )


def duration(seconds: float) -> str:
    """Seconds, or minutes or hours where these are more than two."""
    for size, unit in ((3600, "hours"), (60, "minutes")):
        if seconds > 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def say_once(run: Run, note: str) -> None:
    """Print a note that the run has not printed before."""
    if note not in run.notes:
        run.notes.append(note)
        say(note)


def print_header() -> None:
    """Print the titles of the steps' table."""
    titles = [title.rjust(int(form.partition(".")[0])) for title, _, form in COLUMNS]
    tqdm.write("\n" + "step".ljust(8) + "".join(titles))


def notes_of(metrics: dict, config: Config) -> list[str]:
    """What shows in a first step: rewards that teach nothing, and weights that are all alike.

    Those are of SHEAR and of every rule that compares spans, which log nbar.
    """
    notes = []
    if metrics["equal_groups"] == 1:
        notes.append(
            "WARNING: rewards are equal in each group, so nothing is learned: "
            f"{metrics['truncated']:.0%} of responses are cut off (raise --max-tokens), "
            f"{metrics['no_answer']:.0%} have no answer (change --template): docs/faq.md"
        )
    if "nbar" not in metrics:
        return notes
    if len(span_bounds(int(metrics["length"]), config.window, config.stride)) == 1:
        notes.append("WARNING: one span per response, so one weight for all tokens: lower --window")
    floor = metrics["eps_over_nbar"] * math.log(config.window)
    if floor > ALIKE * metrics["weight_mean"]:
        notes.append(
            f"nearly all tokens weigh alike, as equal spans may weigh {floor:.2f}: lower --eps, or "
            "--window"
        )
    return notes


# ---- evaluations before and after training -------------------------------------------------------


def accuracies(greedy: list[Verdict], sampled: list[Verdict], group_size: int) -> dict[str, Any]:
    """Mean, standard error and number of verdicts of greedy and of sampled responses.

    The sampled ones of a problem are adjacent; their error is clustered by problem. "by_problem"
    has each problem's mean.
    """
    groups = rewards_of(sampled).reshape(-1, group_size)  # (problems, G); NaN: no verdict
    by_problem = np.array([mean_and_error(group)[0] for group in groups])  # (problems,)
    mean, error, _ = mean_and_error(by_problem)
    return {
        "greedy": mean_and_error(rewards_of(greedy)),
        "sampled": (mean, error, int((~np.isnan(groups)).sum())),
        "by_problem": by_problem.tolist(),
    }


def mean_and_error(numbers: np.ndarray) -> tuple[float, float, int]:
    """Mean, standard error and number of the numbers (n,) that are not NaN."""
    known = numbers[~np.isnan(numbers)]
    mean = float(known.mean()) if len(known) else math.nan
    error = float(known.std(ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan
    return mean, error, len(known)


def percent(value: float, error: float | None = None) -> str:
    """A share in percent, alone or with its error: 35.2 or 35.2 ± 1.4; "-" for NaN."""
    if math.isnan(value):
        return "-"
    if error is None:
        return f"{100 * value:.1f}"
    return f"{percent(value)} ± {percent(error)}"


def markdown(rows: list[dict[str, str]]) -> list[str]:
    """The lines of a Markdown table whose columns are the rows' keys.

    A cell that a row lacks is empty.
    """
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = [name, *(row.get(name, "") for row in rows)]
        width = max(map(len, cells))
        cells.insert(1, "-" * width)
        columns.append([cell.ljust(width) for cell in cells])
    return [printable("| " + " | ".join(line) + " |") for line in zip(*columns, strict=True)]


def log_evaluation(run: Run, **evaluations: dict | None) -> None:
    """Add the last of the evaluations, `before` or `after`, to metrics.jsonl; print all of them.

    `before` is None where a resumed run has lost it.
    Its rollouts, if there are any, go to a file of their own, before.jsonl or after.jsonl.
    """
    if not run.ranks.main:
        return
    found = {when: evaluation for when, evaluation in evaluations.items() if evaluation}
    when, newest = list(found.items())[-1]
    samples = newest.pop("samples", [])
    files.append_rows(run.folder / "metrics.jsonl", [{when: newest}])
    if samples:
        files.write_rows(run.folder / f"{when}.jsonl", samples)
    print_results(**found)


def results_of(found: dict) -> dict[str, str]:
    """The printed results of an evaluation, in percent, by title."""
    shown = {}
    for name in ("greedy", "sampled"):
        shown[f"right answers, {name}"] = percent(*found[name][:2])
    if "localisation" in found:  # empty without a mixed group
        for name, title in AUCS.items():
            shown[title] = percent(files.with_nan(found["localisation"].get(name)))
    return shown


def print_results(**columns: dict) -> None:
    """Print a table of evaluations, whose names are its titles."""
    results = {name: results_of(found) for name, found in columns.items()}
    print(f"\n{'held out, %':54}" + "".join(name.rjust(14) for name in results))
    for title in next(iter(results.values())):
        print(f"{title:54}" + "".join(shown[title].rjust(14) for shown in results.values()))


# ---- what a run shows ----------------------------------------------------------------------------


def smallest_gain(problems: int, spread: float = SPREAD) -> float:
    """The gain that can be told from none by so many held-out problems.

    `spread` is the standard deviation of a problem's gain.
    """
    return ERRORS * spread / math.sqrt(problems)


def verdict_of(before: dict | None, after: dict, steps: list[dict]) -> list[str]:
    """What the run shows, in sentences, from both evaluations and the metrics of its steps.

    A gain is that of the sampled accuracy, paired by problem. It can be told from none if it
    exceeds ERRORS standard errors.
    """
    if before is None:
        return ["no gain is known: the evaluation before training is lost"]
    gains = np.array(after["by_problem"]) - np.array(before["by_problem"])  # (problems,)
    mean, error, count = mean_and_error(gains)
    if count < 2:
        return ["too few held-out problems to tell a gain from none: raise --heldout"]
    if not np.nansum(before["by_problem"]) and not np.nansum(after["by_problem"]):
        return ["no held-out response was right, before or after: docs/faq.md has what helps"]
    told = "more than chance" if abs(mean) > ERRORS * error else "it cannot be told from none"
    no_signal = statistics.mean([row["equal_groups"] for row in steps] or [math.nan])
    return [
        f"gain {100 * mean:+.1f} ± {100 * error:.1f} points, paired by {count} held-out problems: "
        f"{told}",
        f"so many problems show gains above {100 * ERRORS * error:.0f} points; {no_signal:.0%} of "
        "the groups had no signal",
    ]


def print_end(run: Run, before: dict | None, after: dict) -> None:
    """Print what the run shows, a worked example, and the next commands."""
    if not run.ranks.main:
        return
    rows = files.read_lines(run.folder / "metrics.jsonl")
    print()
    for line in verdict_of(before, after, [row for row in rows if "step" in row]):
        say(line)
    found = after.get("localisation")
    if found:
        earlier, later = found["weight_before"], found["weight_after"]
        say(f"wrong answers weigh {earlier:.2f} before their first error, {later:.2f} from it on")
    if after.get("example"):
        print(f"\na wrong answer after training, with the {run.config.method} weight of each line:")
        print("\n".join(after["example"]))
    answers = two_answers(run.folder)
    if answers:
        print("\none problem: a wrong answer before training, and a right one after it:")
        print("\n".join(answers))
    seconds = sum(sum(row["seconds"].values()) for row in rows if "seconds" in row)
    print(f"\nthe steps took {duration(seconds)}; the model: {shlex.quote(str(run.folder))}/model")
    if run.config.task == "embedded" and run.config.method == "shear":
        print("GRPO learns faster on this task: README.md, What we found")
    print(f"next: {as_typed('eval.py --model', run.folder)}")
    for command in PICTURES if has_lab() else []:
        print(f"      {as_typed(command, run.folder)}")


def two_answers(folder: Path) -> list[str]:
    """A wrong answer of before.jsonl beside a right one of after.jsonl, line by line.

    Both are to one problem. [] where one of them is lacking.
    """
    columns = []
    for name, wanted in (("before", 0.0), ("after", 1.0)):
        path = folder / f"{name}.jsonl"
        rows = files.read_lines(path) if path.exists() else []
        found = [row["response"] for row in rows if row["score"] == wanted]
        if not found:
            return []
        columns.append([printable(line) for line in found[0].splitlines()])
    width = max(map(len, columns[0]))
    pairs = zip_longest(*columns, fillvalue="")
    return [f"  {wrong.ljust(width)}    {right}".rstrip() for wrong, right in pairs]


def as_typed(command: str, folder: Path) -> str:
    """A command on a run's folder as it can be typed here, by the interpreter that runs now."""
    python = sys.executable
    if shutil.which("python") == python:
        python = "python"
    elif ROOT in Path(python).parents:
        python = os.path.relpath(python, ROOT)
    if Path.cwd() == ROOT:
        return f"{shlex.quote(python)} {command} {shlex.quote(str(folder))}"
    words = f"{shlex.quote(python)} {command} {shlex.quote(str(folder.resolve()))}"
    return f"cd {shlex.quote(str(ROOT))} && {words}"
