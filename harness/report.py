"""What a run tells its user: the plan, a line and a row a step, samples with their weights, the curve.

Everything of a run lies in `runs/NAME/`: config.json, metrics.jsonl (a row a step, one for the evaluations),
samples.jsonl (a group a step) and curve.png; `train.py` puts the models beside them. Lines are plain text, so
they survive nohup. Nothing here changes what is trained.
"""

import argparse
import fcntl
import json
import os
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers
from matplotlib.figure import Figure
from torch import Tensor

from credit.measures import concentration, effective_weights, localisation
from credit.methods import Batch, true_errors
from grpo import Rollouts
from harness import tables
from harness.checkpoint import write_whole
from harness.parallel import Ranks, gather
from tasks.problems import BadInput, Task


class Clock:
    """Seconds of a step's phases."""

    def __init__(self, device: torch.device):
        self.device, self.laps, self.last = device, {}, time.perf_counter()

    def lap(self, name: str) -> None:
        """The phase that ends now; phases of one name add up."""
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


def make_folder(args: argparse.Namespace, ranks: Ranks) -> Path:
    """runs/NAME, new unless a run is resumed; raises BadInput where it cannot be made."""
    problem = None
    if ranks.main:
        args.name = args.name or free_name(args)
        folder = Path(args.out) / args.name
        try:
            folder.mkdir(parents=True, exist_ok=bool(args.resume))
        except OSError as error:
            problem = f"--out {args.out}: {folder} cannot be made ({error}); choose another --out or --name"
    args.name, problem = gather((args.name, problem), ranks)[0]
    if problem:
        raise BadInput(problem)
    return Path(args.out) / args.name


@contextmanager
def locked(folder: Path, ranks: Ranks):
    """The run's folder for this run alone; raises BadInput if another process writes there."""
    problem, handle = None, os.open(folder, os.O_RDONLY)
    try:
        if ranks.main:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        problem = f"--resume {folder}: another process is writing there; end it first"
    try:
        problem = gather(problem, ranks)[0]
        if problem:
            raise BadInput(problem)
        yield
    finally:
        os.close(handle)


def free_name(args: argparse.Namespace) -> str:
    """Task, method and the next free number."""
    number = 1
    while (Path(args.out) / f"{args.task}-{args.method}-{number}").exists():
        number += 1
    return f"{args.task}-{args.method}-{number}"


def print_plan(args: argparse.Namespace, folder: Path, notes: list[str]) -> None:
    """What will happen, before it does: printed, and saved as config.json."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    config = {**vars(args), "resume": None, "versions": versions}
    write_whole(folder / "config.json", json.dumps(config, indent=1) + "\n")
    print(f"{args.method} on the {args.task} task; files go to {folder}/")
    for note in notes:
        print(f"  {note}")
    print(
        f"  {args.steps} steps of {args.batch // args.group} problems x {args.group} samples x up to "
        f"{args.max_tokens} tokens, {args.batch // args.minibatch} update(s) each"
    )
    print("  " + " ".join(f"{name}={value}" for name, value in vars(args).items()), flush=True)


def step_metrics(batch: Batch, token_advantages: Tensor) -> dict[str, float]:
    """What a step says about its rollouts and its credit."""
    mask, rewards = batch.rollouts.mask, batch.rewards.cpu().numpy()
    groups = rewards.reshape(-1, batch.group_size)
    return {
        "reward": float(np.nanmean(rewards)),
        "solved": float((np.nan_to_num(groups).max(1) > 0.5).mean()),
        "equal_groups": float((batch.advantages.view(-1, batch.group_size) == 0).all(1).float().mean()),
        "infra_errors": int(np.isnan(rewards).sum()),  # rollouts without a verdict, which left their groups
        "length": mask.sum(1).float().mean().item(),
        "truncated": batch.rollouts.truncated.float().mean().item(),
        "entropy": batch.scored.entropies[mask].mean().item(),
        **concentration(token_advantages, batch.advantages, mask),
        **batch.stats,
    }


def step_line(m: dict, steps: int) -> str:
    """One line a step."""
    seconds = " ".join(f"{name} {value:.1f}" for name, value in m["seconds"].items())
    return (
        f"step {m['step']}/{steps} | reward {m['reward']:.3f} | solved {m['solved']:.2f}"
        f" | equal {m['equal_groups']:.2f} | len {m['length']:.0f} | trunc {m['truncated']:.2f}"
        f" | infra {m['infra_errors']} | skipped {m['skipped']} | entropy {m['entropy']:.3f}"
        f" | clip {m['clip_share']:.3f} | logratio {m['abs_log_ratio']:.0e}"
        f" | weight {m['weight_mean']:.2f}±{m['weight_std']:.2f} ess {m['ess']:.2f} gini {m['gini']:.2f}"
        f" top10 {m['top_tenth']:.2f} flip {m['sign_changes']:.2f} | gnorm {m['grad_norm']:.2f} | s: {seconds}"
        + (f"\n  on benchmarks: {tables.short(m['bench'])}" if "bench" in m else "")
    )


def sample_rows(step: int, tokenizer, task: Task, problems, batch: Batch, verdicts, weights: Tensor) -> list[dict]:
    """One group of the step for samples.jsonl: the first with right and wrong rollouts, else the first."""
    mixed = (batch.advantages != 0).nonzero().flatten().tolist()
    start = mixed[0] // batch.group_size * batch.group_size if mixed else 0
    rows = []
    for row in range(start, start + batch.group_size):
        problem, inside, text = problems[row // batch.group_size], batch.rollouts.mask[row], batch.rollouts.texts[row]
        rows.append(
            {
                "step": step + 1,
                "problem": problem["problem"],
                task.reference: problem[task.reference],
                "response": text,
                "score": verdicts[row].score,
                "reason": verdicts[row].reason,
                "first_error": task.first_error(problem, text) if task.first_error else None,
                "advantage": batch.advantages[row].item(),
                "tokens": [tokenizer.decode([token]) for token in batch.rollouts.ids[row][inside].tolist()],
                "weights": [round(weight, 4) for weight in weights[row][inside].tolist()],
            }
        )
    return rows


def example(tokenizer, rollouts: Rollouts, weights: Tensor, first_error: Tensor) -> list[str]:
    """The first wrong rollout whose error is not its first token: mean weight of each line, as text to print."""
    rows = (first_error > 0).nonzero().flatten().tolist()
    if not rows:
        return []
    tokens = [tokenizer.decode([token]) for token in rollouts.ids[rows[0]][rollouts.mask[rows[0]]].tolist()]
    lines, start = [], 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or tokens[end - 1] == "\n":
            mark = "  <- first error" if start <= first_error[rows[0]] < end else ""
            weight = weights[rows[0], start:end].mean().item()
            lines.append(f"  {weight:.2f}  {''.join(tokens[start:end]).strip()}{mark}")
            start = end
    return lines


def credit_vs_first_error(tokenizer, task: Task, problems: list[dict], batch: Batch, token_advantages: Tensor) -> dict:
    """Where the method puts credit, against the true first errors of the wrong rollouts of mixed groups."""
    weights = effective_weights(token_advantages, batch.advantages, batch.rollouts.mask)  # (B, T)
    wrong_step = true_errors(batch, task.first_error, problems)  # (B, 2)
    return {
        "localisation": localisation(weights, batch.rollouts.mask, wrong_step),
        "example": example(tokenizer, batch.rollouts, weights, wrong_step[:, 0]),
    }


def print_accuracy(when: str, result: dict) -> None:
    """Held-out accuracies with standard errors."""
    parts = "; ".join("{} {:.3f} ± {:.3f} (n = {})".format(name, *result[name]) for name in ("greedy", "sampled"))
    print(f"held-out accuracy {when}: {parts}", flush=True)


def print_localisation(before: dict, after: dict, args: argparse.Namespace) -> None:
    """How well the weights tell tokens from the true first error on from those before it."""
    for when, result in (("before", before), ("after", after)):
        if place := result.get("localisation"):
            print(
                f"weights against the true first error, {when}: AUC {place['auc']:.3f} pooled, "
                f"{place['auc_rollout']:.3f} the mean of {place['rollouts']} rollouts; "
                f"position alone {place['auc_position']:.3f}; the wrong step alone {place['auc_step']:.3f}; "
                f"mean weight {place['weight_before']:.2f} before it, {place['weight_after']:.2f} from it on"
            )
    if after.get("example"):
        print(f"a wrong rollout after training, with the mean {args.method} weight of each line:")
        print("\n".join(after["example"]))


def summary(result: dict) -> dict:
    """The numbers of an evaluation, without its example."""
    return {name: value for name, value in result.items() if name != "example"}


def rows(path: Path) -> list[dict]:
    """A JSON-lines file, without a last line that is cut off."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def cut_back(folder: Path, step: int) -> None:
    """Metrics, samples and skipped rollouts as they were after `step` steps."""
    for name in ("metrics.jsonl", "samples.jsonl", "nonfinite.jsonl"):
        if not (folder / name).exists():
            continue
        kept = [row for row in rows(folder / name) if row.get("step", 0) <= step and "after" not in row]
        write_whole(folder / name, "".join(json.dumps(row) + "\n" for row in kept))


def write_suspects(
    folder: Path, ranks: Ranks, step: int, rollouts: Rollouts, suspects: list[int], sums: dict[str, float]
) -> Path:
    """nonfinite.jsonl: the rollouts, of all ranks, of an update that was not finite."""
    found = sorted({row for part in gather(suspects, ranks) for row in part})
    path = folder / "nonfinite.jsonl"
    if ranks.main:
        append(path, [{"step": step + 1, "row": row, **sums, **raw(rollouts, row)} for row in found])
    return path


def raw(rollouts: Rollouts, row: int) -> dict:
    """A rollout as it is, for a file."""
    prompt, response = rollouts.prompt_ids[row][rollouts.prompt_mask[row]], rollouts.ids[row][rollouts.mask[row]]
    return {"prompt_ids": prompt.tolist(), "ids": response.tolist(), "response": rollouts.texts[row]}


def append(path: Path, rows: list[dict]) -> None:
    """Add rows to a JSON-lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def finish(
    args: argparse.Namespace, folder: Path, before: dict, after: dict | None, history: list[dict], predicted_gb: float
) -> None:
    """The evaluation after training, the curve, and how the memory's prediction held."""
    if after:
        append(folder / "metrics.jsonl", [{"after": summary(after)}])
        print_accuracy("before", before)
        print_accuracy("after", after)
        print_localisation(before, after, args)
    plot(history, before, after, args, folder / "curve.png")
    peaks = [m["peak_gb"] for m in history if "peak_gb" in m]
    if peaks:
        print(f"peak memory a GPU: {max(peaks):.1f} GB measured, {predicted_gb:.1f} GB predicted")


def plot(history: list[dict], before: dict, after: dict | None, args: argparse.Namespace, path: Path) -> None:
    """Reward of each step, held-out accuracy at both ends, and the weights' mean and spread."""
    figure = Figure(figsize=(9, 3.2))  # not pyplot: needs no display and no backend
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.15, top=0.91, wspace=0.15)
    steps = [m["step"] for m in history]
    left.plot(steps, [m["reward"] for m in history], label="reward, training batch")
    for name, marker in (("greedy", "o"), ("sampled", "s")):
        ends = [(0, before)] + ([(len(steps), after)] if after else [])
        mean, error = ([result[name][i] for _, result in ends] for i in (0, 1))
        left.errorbar([at for at, _ in ends], mean, error, fmt=marker, label=f"held out, {name}")
    left.set(xlabel="step", ylim=(0, 1), title=f"{args.method}, {args.task} task")
    left.legend(fontsize=8)
    mean, std = (np.array([m[name] for m in history]) for name in ("weight_mean", "weight_std"))
    right.plot(steps, mean)
    right.fill_between(steps, mean - std, mean + std, alpha=0.2)
    right.set(xlabel="step", title="token weight in mixed groups, mean ± std")
    figure.savefig(path, dpi=120)
