"""Reports of a run: plan, a row per step, summary; `credit/measures.py` has the numbers.

Everything of a run lies in `runs/NAME/`: config.json, metrics.jsonl (a row per step, one for each
evaluation), samples.jsonl (a group per step), before.jsonl and after.jsonl (one held-out group);
`train.py` puts the models beside them. Lines are plain text of at most WIDTH columns, so they
survive nohup. Nothing here changes what is trained.
"""

import math
import shlex
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from credit.settings import Shear
from harness import files
from harness.config import TrainConfig
from harness.run import Run
from harness.tables import percent
from rewards import Verdict, rewards_of
from shear import span_bounds
from tasks.errors import printable
from tasks.plug import has_lab
from tasks.toy import SILENCE

WIDTH = 88  # columns of what is printed; only a path may force more
HEADER_EVERY = 20  # rows of steps
ALIKE = 0.75  # the floor's share of the mean weight above which nearly all weights are alike
# A step's row, and the lines above the first one.
LEGEND = (
    "solved: problems with a right rollout; no-signal: groups of equal rewards, which teach "
    "nothing; trunc: responses cut off; weight: token weights, mean ± standard deviation; ess: "
    "share of the tokens that carry the credit; gnorm: gradient norm; more: docs/faq.md"
)
COLUMNS = " reward  solved  no-signal  length  trunc  entropy     weight   ess  gnorm  s/step"
ROW = (
    "{reward:7.3f}{solved:8.2f}{equal_groups:11.2f}{length:8.0f}{truncated:7.2f}{entropy:9.3f}"
    "{weight_mean:6.2f}±{weight_std:.2f}{ess:6.2f}{grad_norm:7.3f}{s_per_step:8.1f}"
)
# Counts that are shown below a row where they are not 0, with their names in metrics.jsonl.
RARE = {
    "infra_errors": "infra",
    "skipped": "skipped",
    "replaced": "replaced",
}


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


def peak_gb() -> float:
    """The largest memory that tensors held on this rank's GPU since the last call."""
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return round(peak, 2)


def print_plan(config: TrainConfig, folder: Path, notes: Sequence[str]) -> None:
    """Print what the run will do."""
    print(f"{config.credit.method} on the {config.task} task; everything goes to {folder}/")
    sampling = config.sampling
    shear = config.shear
    updates = sampling.prompts_per_step // config.optimisation.prompts_per_update
    lines = [
        *notes,
        f"{config.optimisation.steps} steps x {sampling.prompts_per_step} prompts x "
        f"{sampling.rollouts_per_prompt} rollouts of up to {sampling.max_tokens} tokens, "
        f"{config.machine.generate_batch} generated at a time; {updates} update(s) per step",
    ]
    if config.credit.method == "shear":
        floor = shear.eps * math.log(shear.window)
        lines.append(
            f"spans of {shear.window} tokens, eps {shear.eps:g} {shear.eps_unit}: equal spans are "
            f"up to {floor:.2g} {shear.eps_unit} apart (the floor)"
        )
    if config.use:
        lines.append(f"functions of {', '.join(config.use)} in place of the core's")
    elif config.model and has_lab():
        lines.append("--use lab.fast gives the same numbers sooner")
    lines.append("settings: config.json; all metrics: metrics.jsonl")
    for line in lines:
        print(wrap(line), flush=True)


def floor_note(metrics: dict, config: TrainConfig) -> str:
    """The note on nbar and the floor of the first step's weights.

    Where nearly all weights are alike, it also says what to lower.
    """
    floor = metrics["eps_over_nbar"] * math.log(config.shear.window)
    note = f"nbar {metrics['nbar']:.3g}: the floor is {floor:.2f} of it"
    if floor > ALIKE * metrics["weight_mean"]:
        note += "; nearly all tokens weigh alike: lower --eps, or --window"
    return note


def wrap(text: str) -> str:
    """Indented lines of at most WIDTH columns, but for longer words such as paths."""
    return textwrap.fill(
        printable(text),
        WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def step_lines(m: dict, steps: int, shown: int) -> list[str]:
    """A step's row after `shown` others, with the lines above and below it."""
    place = f"{m['step']}/{steps}"
    width = max(len("step"), 2 * len(str(steps)) + 1)
    lines = [place.rjust(width) + ROW.format(**m, s_per_step=sum(m["seconds"].values()))]
    if shown % HEADER_EVERY == 0:
        lines = ["", "step".rjust(width) + COLUMNS, *lines]
    if not shown:
        lines.insert(0, wrap(LEGEND))
    rare = [f"{title} {m[name]:.4g}" for name, title in RARE.items() if m.get(name)]
    if rare:
        lines.append(" " * (width + 2) + "  ".join(rare))
    return lines


def accuracies(
    greedy: list[Verdict], sampled: list[Verdict], group_size: int
) -> dict[str, tuple[float, float, int]]:
    """Mean, standard error and number of verdicts of greedy and of sampled responses.

    The sampled ones of a problem are adjacent; their error is clustered by problem.
    """
    of_greedy = pd.Series(rewards_of(greedy))  # (problems,); NaN: no verdict, in no number
    groups = pd.DataFrame(rewards_of(sampled).reshape(-1, group_size))  # (problems, G)
    by_problem = groups.mean(axis=1)
    return {
        "greedy": (of_greedy.mean(), of_greedy.sem(), int(of_greedy.count())),
        "sampled": (by_problem.mean(), by_problem.sem(), int(groups.count().sum())),
    }


def print_before(config: TrainConfig, folder: Path, before: dict) -> None:
    """Write the evaluation before training; print held-out accuracies with standard errors."""
    write_evaluation(folder, "before", before)
    shown = [f"{name} {percent(*before[name][:2])}%" for name in ("greedy", "sampled")]
    print(f"held-out accuracy before: {', '.join(shown)}", flush=True)
    if config.credit.method == "shear":
        print(wrap(span_note(before["length"], config.shear)), flush=True)
    print_no_signal(before["sampled"][0], before)


def print_time(run: Run, seconds: float) -> None:
    """Print how long sampling takes at most, from the `seconds` of the first evaluation.

    It is scaled by the number of responses. On a GPU a batch of more responses takes hardly longer,
    as a decoding step waits for Python; on a CPU it does.
    """
    sampling = run.config.sampling
    heldout = len(run.context.task.heldout)
    groups = min(heldout, run.config.evaluation.eval_groups)
    answered = heldout + groups * sampling.rollouts_per_prompt
    step = seconds / answered * sampling.prompts_per_step * sampling.rollouts_per_prompt
    of_step = timedelta(seconds=round(step))
    of_run = timedelta(seconds=round(step * run.config.optimisation.steps))
    note = f"at the speed of this evaluation, sampling takes {of_step} a step and {of_run} in all"
    rest = "on a GPU less, where a larger batch takes hardly longer; scoring and updates add to it"
    print(wrap(f"{note}; {rest}"), flush=True)


def write_evaluation(folder: Path, when: str, found: dict) -> None:
    """Add an evaluation to metrics.jsonl, as one row.

    Its rollouts, if there are any, go to a file of their own, before.jsonl or after.jsonl.
    """
    samples = found.pop("samples", [])
    files.append_rows(folder / "metrics.jsonl", [{when: found}])
    if samples:
        files.write_rows(folder / f"{when}.jsonl", samples)


def span_note(length: float, shear: Shear) -> str:
    """The note on the number of spans in a response of the median `length`.

    With one span all tokens of a response get the same weight; the note then warns.
    """
    spans = len(span_bounds(int(length), shear.window, shear.stride))
    note = f"median response {length:.0f} tokens, {spans} span(s) of {shear.window}"
    if spans > 1:
        return note
    return f"WARNING: {note}: all tokens of a response get one weight; lower --window"


@contextmanager
def show_progress(model: PreTrainedModel, most: int, main: bool) -> Iterator[None]:
    """Print the number of sampled tokens every half minute, on the main rank.

    `most` is the largest number that they can reach.
    """
    tokens = 0
    last = time.perf_counter()

    def count(module: torch.nn.Module, inputs: tuple, output: ModelOutput) -> None:
        nonlocal tokens, last
        tokens += len(output["logits"])  # one of each rollout
        if main and time.perf_counter() - last >= SILENCE:
            last = time.perf_counter()
            tqdm.write(f"  evaluating: {tokens:,} of at most {most:,} tokens")

    hook = model.register_forward_hook(count)
    yield
    hook.remove()


@contextmanager
def step_log(run: Run) -> Iterator[Callable[[dict, list[dict]], None]]:
    """Yield the function that logs a step's metrics and samples.

    It appends rows to the run's files, and prints a line of the table.
    """
    config = run.config
    folder = run.folder
    logged: list[float] = []  # rewards

    def log(metrics: dict, samples: list[dict]) -> None:
        if not run.ranks.main:
            return
        files.append_rows(folder / "metrics.jsonl", [metrics])
        files.append_rows(folder / "samples.jsonl", samples)
        tqdm.write("\n".join(step_lines(metrics, config.optimisation.steps, len(logged))))
        logged.append(metrics["reward"])
        if metrics["step"] == 1 and config.credit.method == "shear":
            tqdm.write(wrap(floor_note(metrics, config)))
        if metrics["step"] == 2 and len(set(logged)) == 1:
            print_no_signal(metrics["reward"], metrics)

    yield log


def print_no_signal(reward: float, found: dict) -> None:
    """Where all rewards are equal, print causes, with the shares in `found`, and remedies."""
    if reward in (0, 1):
        note = (
            f"all rewards are {reward:.0f}, so nothing can be learned: {found['truncated']:.0%} of "
            f"responses are cut off (raise --max-tokens), {found['no_answer']:.0%} have no answer "
            "(change --template); otherwise change the problems or the model: docs/faq.md"
        )
        tqdm.write(wrap(note))


def heldout_results(found: dict) -> dict[str, str]:
    """The printed results of an evaluation, by title."""
    shown = {}
    for name in ("greedy", "sampled"):
        shown[f"{name} accuracy, %"] = percent(*found[name][:2])
    if "localisation" in found:
        place = found["localisation"]  # empty without a mixed group
        shown["AUC to the true first error"] = f"{place.get('auc', math.nan):.3f}"
        shown["AUC of position alone"] = f"{place.get('auc_position', math.nan):.3f}"
    return shown


def print_after(
    config: TrainConfig, folder: Path, before: dict, after: dict, history: list[dict]
) -> None:
    """Print the change by training, and name the next commands."""
    write_evaluation(folder, "after", after)
    if not any(m["grad_norm"] for m in history):
        print("\nnothing was learned: no mixed groups; docs/faq.md says what to change")
    first = heldout_results(before)
    last = heldout_results(after)
    print(f"\n{'held out':27}{'before':>14}{'after':>14}")
    for title in first:
        print(f"{title:27}{first[title]:>14}{last[title]:>14}")
    if after.get("example"):
        weight = f"the mean {config.credit.method} weight of each line"
        print(f"\na wrong rollout after training, with {weight}:")
        print("\n".join(after["example"]))
    peak = max(m.get("peak_gb", 0) for m in history)
    if peak:
        print(f"peak memory per GPU: {peak:.1f} GB")
    place = shlex.quote(str(folder))
    print(f"\nthe model: {place}/model\nnext: python eval.py --model {place}")
    if has_lab():
        print(f"      python -m lab.tools.curve {place}")
        print(f"      python -m lab.tools.page {place}")
