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
from collections.abc import Sequence
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
from harness.parallel import Ranks, from_main, gather_items, together
from tasks.problems import BadInput, Task

COLOURS = {"greedy": "C1", "sampled": "C2"}  # of held-out accuracies in curve.png


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


def make_out(folder: Path, ranks: Ranks) -> None:
    """The folder of --out, on rank 0 for all; raises BadInput where it cannot be made."""
    with together(ranks):
        if ranks.main:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadInput(f"--out {folder}: cannot be made ({error}); choose another") from error


def make_folder(args: argparse.Namespace, ranks: Ranks) -> Path:
    """runs/NAME, new unless a run is resumed; raises BadInput where it cannot be made."""
    with together(ranks):
        if ranks.main:
            args.name = args.name or free_name(args)
            folder = Path(args.out) / args.name
            try:
                folder.mkdir(parents=True, exist_ok=bool(args.resume))
            except OSError as error:
                reason = f"{folder} cannot be made ({error})"
                raise BadInput(f"--out {args.out}: {reason}; choose another --out or --name") from error
    args.name = from_main(args.name, ranks)
    return Path(args.out) / args.name


@contextmanager
def locked(folder: Path, ranks: Ranks, option: str):
    """The folder that an option names for this process alone; raises BadInput if another one writes there."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with together(ranks):
            if ranks.main:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise BadInput(f"{option} {folder}: another process is writing there; end it first") from error
        yield
    finally:
        os.close(handle)


def free_name(args: argparse.Namespace) -> str:
    """Task, method and the next free number."""
    number = 1
    while (Path(args.out) / f"{args.task}-{args.method}-{number}").exists():
        number += 1
    return f"{args.task}-{args.method}-{number}"


def write_config(args: argparse.Namespace, folder: Path, digest: str) -> None:
    """config.json: the resolved flags, and a digest of the problems."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    config = {**vars(args), "resume": None, "digest": digest, "versions": versions}
    write_whole(folder / "config.json", json.dumps(config, indent=1) + "\n")


def print_plan(args: argparse.Namespace, folder: Path, notes: list[str]) -> None:
    """What will happen, before it does."""
    print(f"{args.method} on the {args.task} task; files go to {folder}/")
    for note in notes:
        print(f"  {note}")
    print(
        f"  {args.steps} steps of {args.prompts_per_step} prompts x {args.rollouts_per_prompt} rollouts x up to "
        f"{args.max_tokens} tokens, {args.prompts_per_step // args.prompts_per_update} update(s) each"
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
    group = mixed[0] // batch.group_size if mixed else 0
    problem, rows = problems[group], []
    for row in range(group * batch.group_size, (group + 1) * batch.group_size):
        text = batch.rollouts.texts[row]
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
                "tokens": tokens_of(tokenizer, batch.rollouts, row),
                "weights": [round(weight, 4) for weight in weights[row][batch.rollouts.mask[row]].tolist()],
            }
        )
    return rows


def example(tokenizer, rollouts: Rollouts, weights: Tensor, first_error: Tensor) -> list[str]:
    """The first wrong rollout whose error is not its first token: mean weight of each line, as text to print."""
    rows = (first_error > 0).nonzero().flatten().tolist()
    if not rows:
        return []
    row, lines, start = rows[0], [], 0
    tokens = tokens_of(tokenizer, rollouts, row)
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or tokens[end - 1] == "\n":
            mark = "  <- first error" if start <= first_error[row] < end else ""
            weight = weights[row, start:end].mean().item()
            lines.append(f"  {weight:.2f}  {''.join(tokens[start:end]).strip()}{mark}")
            start = end
    return lines


def tokens_of(tokenizer, rollouts: Rollouts, row: int) -> list[str]:
    """The text of each response token of a rollout."""
    return [tokenizer.decode([token]) for token in rollouts.ids[row][rollouts.mask[row]].tolist()]


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
    accuracies = []
    for name in ("greedy", "sampled"):
        mean, error, count = result[name]
        accuracies.append(f"{name} {mean:.3f} ± {error:.3f} (n = {count})")
    print(f"held-out accuracy {when}: {'; '.join(accuracies)}", flush=True)


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


def rows(path: Path, keys: Sequence[str] = ()) -> list[dict]:
    """The objects of a JSON-lines file, without a last line that is cut off; raises BadInput, naming the line.

    Every object must have these `keys`.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read ({error}); restore it, or choose another folder") from error
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path}, line {number}: not JSON ({error}); restore or remove the file") from error
        if not isinstance(row, dict) or not set(keys) <= row.keys():
            needed = f" with {', '.join(keys)}" if keys else ""
            raise BadInput(f"{path}, line {number}: not an object{needed}; restore or remove the file")
        found.append(row)
    return found


def settings_in(path: Path, keys: Sequence[str] = ()) -> dict:
    """The object in a JSON file, which must have these `keys`; raises BadInput."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: cannot be read ({error}); restore it, or choose another folder") from error
    if not isinstance(settings, dict) or not set(keys) <= settings.keys():
        raise BadInput(
            f"{path}: not an object with {', '.join(keys) or 'settings'}; restore it, or choose another folder"
        )
    return settings


def rows_until(folder: Path, step: int) -> dict[str, list[dict]]:
    """What metrics, samples and skipped rollouts were after `step` steps, by file; raises BadInput."""
    kept = {}
    for name in ("metrics.jsonl", "samples.jsonl", "nonfinite.jsonl"):
        if (folder / name).exists():
            kept[name] = []
            for row in rows(folder / name):
                done = row.get("step", 0)
                if isinstance(done, int) and done <= step and "after" not in row:
                    kept[name].append(row)
    return kept


def cut_back(folder: Path, kept: dict[str, list[dict]]) -> None:
    """Write what `rows_until` returned."""
    for name, kept_rows in kept.items():
        write_whole(folder / name, "".join(json.dumps(row) + "\n" for row in kept_rows))


def write_suspects(
    folder: Path, ranks: Ranks, step: int, rollouts: Rollouts, suspects: list[int], metrics: dict[str, float]
) -> Path:
    """nonfinite.jsonl: the rollouts, of all ranks, of an update that was not finite."""
    path = folder / "nonfinite.jsonl"
    rows = []
    for row in sorted(set(gather_items(suspects, ranks))):
        prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]].tolist()
        ids = rollouts.ids[row][rollouts.mask[row]].tolist()
        said = {"prompt_ids": prompt, "ids": ids, "response": rollouts.texts[row]}
        rows.append({"step": step + 1, "row": row, **metrics, **said})
    if ranks.main:
        append(path, rows)
    return path


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
        for step, result in ((0, before), (len(steps), after)):
            if result:
                mean, error, _ = result[name]
                label = f"held out, {name}" if step == 0 else None
                left.errorbar(step, mean, error, fmt=marker, color=COLOURS[name], label=label)
    left.set(xlabel="step", ylim=(0, 1), title=f"{args.method}, {args.task} task")
    left.legend(fontsize=8)
    mean = np.array([m["weight_mean"] for m in history])
    std = np.array([m["weight_std"] for m in history])
    right.plot(steps, mean)
    right.fill_between(steps, mean - std, mean + std, alpha=0.2)
    right.set(xlabel="step", title="token weight in mixed groups, mean ± std")
    figure.savefig(path, dpi=120)
