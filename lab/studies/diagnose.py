"""Does SHEAR's distance find errors? The paper's measurements of Secs. 2 and 5 on your rollouts.

    python -m lab.studies.diagnose                                          # a model made here
    python -m lab.studies.diagnose --model runs/NAME/model --task embedded  # a trained one
    python -m lab.studies.diagnose --model PATH --data problems.jsonl       # real problems
    python -m lab.studies.diagnose --model PATH --rollouts solutions.jsonl  # distances in these

Other flags are those of train.py; `--use lab.fast` gives the same numbers sooner.

Sec. 2 of arXiv 2604.23318: sample G rollouts to each of `--groups` held-out problems, keep the
groups with right and wrong ones, and read their hidden states once. Complete each prefix of a
rollout `--continuations` times: the share of right completions is its continuation success. The
local distance of a prefix is that of its last window of tokens to the closest span of the opposing
side, in units of nbar (`prefixes.py`). Both give Figs. 1(a), 1(b), 3 and 9; Fig. 10 needs verdicts
only (`figures.py`). Where the task knows the first error of a wrong rollout, three AUCs say how
often a token from it on outweighs an earlier one: among all tokens ("all"), among tokens at the
same position ("matched"), and of the position itself.

`--out` holds the sampled groups, so that the same command continues where it was interrupted;
diagnose.json, with all numbers; a picture of each figure; and samples.jsonl, the groups as
`lab.tools.page` shows them. The main numbers are printed next to the paper's.

Left out: the paper's 8 bins of Fig. 3 (ours hold equal numbers of spans); error bars that account
for dependence between the spans of a rollout and the rollouts of a group, so p-values here are too
small.
"""

import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from base.config import Config, Credit, flag
from lab.studies.flags import parse_study, refuse_flags


@dataclass(frozen=True)
class Diagnose:
    """The paper's figures on your rollouts.

    Flags of train.py can be added.
    """

    groups: int = 16
    """Problems to sample, or mixed groups of --rollouts."""
    continuations: int = 16
    """Continuations of each prefix; 0: none."""
    rollouts: str | None = None
    """Math problems: JSON lines with "problem", "solution", "label" instead of samples."""
    out: Path = Path("runs/diagnose")
    """Folder for the groups, the numbers and the figures."""


if __name__ == "__main__":
    parse_study(Diagnose)  # --help and wrong flags end here: the imports below take seconds

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from base import files
from base.errors import BadInput
from credit.batch import Context, effective_weights
from credit.measures import (
    auc_matched,
    closest_by_rollout,
    first_error_auc,
    positions,
    sample_rows,
)
from credit.rules import assign_credit, with_options
from grpo import cat_padded
from harness import fsdp, log
from harness.command import run_command
from harness.fsdp import Ranks
from harness.models import round_weights
from harness.run import Loaded, load_run, warm_up_policy
from lab.studies import figures
from lab.studies.needs import settings_of_run
from lab.studies.prefixes import (
    Prefixes,
    collect,
    context_at_start,
    load_with_solutions,
    score_group,
    span_table,
)

# Flags of train.py that are useless here.
REFUSED = "method name resume ranks"
# The settings that determine the samples; the others may change when the groups of a folder are
# analysed again or extended.
DECIDES = (
    "task model data template seed temperature max_tokens rollouts_per_prompt window stride "
    "continuations heldout "
    "toy_lines toy_width warmup_steps grade_timeout sandbox reward dtype rollouts use"
).split()
FIGURES = {
    "fig_1a": figures.fig_1a_position,
    "fig_1b": figures.fig_1b_changes,
    "fig_3": figures.fig_3_separation,
    "fig_9": figures.fig_9_depth,
}


@run_command
def main(argv: list[str] | None = None) -> None:
    """Exit status: 0, 1 where memory does not suffice, 2 for bad input, 130 after Ctrl-C."""
    flags, others = parse_study(Diagnose, argv)
    refuse_flags(others, REFUSED, "diagnose trains nothing")
    config = settings_of_run([*others, "--task", "math"] if flags.rollouts else others)
    heldout = config.heldout
    if not flags.rollouts and flags.groups > heldout:
        raise BadInput(f"--groups {flags.groups}: --heldout has {heldout}; raise it, or lower this")
    ranks = fsdp.join(config.device, config.threads)
    with files.locked_folder(flags.out):
        diagnose(flags, config, ranks)


def diagnose(flags: Diagnose, config: Config, ranks: Ranks) -> None:
    """Sample or read the groups, measure, and write numbers and figures to `--out`."""
    out = flags.out
    values = asdict(config) | vars(flags) | {"use": list(config.use)}  # as JSON has it
    decided = {name: values[name] for name in DECIDES}
    if not (out / "config.json").exists() and any(out.glob("group-*.json")):
        raise BadInput(f"--out {out}: has groups, and no config.json; choose another")
    if (out / "config.json").exists():
        had = files.read_json(out / "config.json")
        for name, value in decided.items():
            if value != had.get(name):
                reason = f"the groups in {out} have {had.get(name)}"
                raise BadInput(f"{flag(name)} {value}: {reason}; choose another --out")
    of_groups = from_file if flags.rollouts else from_model
    run, groups = of_groups(flags, config, decided, ranks)
    mixed = [group for group in groups if group.mixed][: flags.groups]
    if not mixed:
        none_mixed = "none holds right and wrong rollouts; raise it, or change --rollouts"
        raise BadInput(f"--groups {flags.groups}: {none_mixed}")
    # a row per group; None, and what a smaller group of --rollouts lacks, do not count
    accuracies = pd.DataFrame([group.scores for group in groups], dtype=float).mean(axis=1)
    results: dict = {
        "flags": decided,
        "groups": len(groups),
        "mixed_groups": len(mixed),
        "fig_10": figures.fig_10_accuracies(accuracies.dropna(), out / "fig_10.png"),
    }
    context = context_at_start(run)
    closest, results["truth"] = read_all(mixed, context, out)
    spans = span_table(mixed, closest).dropna()  # of prefixes that were continued
    if spans.empty:
        print("left out: Figs. 1, 3, 9: no prefix of --window tokens or more was continued")
    else:
        results["spans"] = len(spans)
        for name, draw in FIGURES.items():
            results[name] = draw(spans, out / f"{name}.png")
    files.write_json(out / "diagnose.json", results)
    print("\n".join(summary(results)))
    print(f"figures and numbers: {out}/\nnext: python -m lab.tools.page {shlex.quote(str(out))}")


def read_all(groups: list[Prefixes], context: Context, out: Path) -> tuple[list, dict]:
    """SHEAR's closest spans of each group, and `truth_of` each method.

    Writes samples.jsonl for the page.
    """
    methods = ["shear", "grpo"]
    if context.task.first_error:
        methods.append("oracle")
    closest = []
    batches = []  # weights of each method, mask, first errors
    rows = []
    for group in tqdm(groups, "hidden states and distances", leave=False, disable=None):
        batch = score_group(group, context)
        weights = {}
        for method in methods:
            credit = assign_credit(with_options(Credit(method)), batch, context)  # (G, T)
            weights[method] = effective_weights(credit, batch.advantages, batch.mask)
        first_error = batch.true_errors(context.task, context.tokenizer)[:, 0]  # (G,)
        batches.append((weights, batch.mask, first_error))
        (weighed,) = batch.weighed  # by the rule shear
        closest.append(closest_by_rollout(weighed, batch.mask, batch.correct, context.shear))
        rows += sample_rows(context, batch, weights, group=0)
    files.write_rows(out / "samples.jsonl", rows)
    truth = {method: truth_of(method, batches) for method in methods if context.task.first_error}
    return closest, truth


def truth_of(method: str, batches: list[tuple[dict, Tensor, Tensor]]) -> dict[str, float | None]:
    """How a method's weights order the tokens before and after the first errors of all groups.

    `auc_matched` compares tokens at the same position alone: position gets one half there.
    """
    weights = cat_padded([of_method[method] for of_method, _, _ in batches])  # (B, T)
    mask = cat_padded([inside for _, inside, _ in batches])  # (B, T)
    first_error = torch.cat([place for _, _, place in batches])  # (B,)
    after = positions(mask) >= first_error[:, None]  # (B, T)
    counts = mask & (first_error >= 0)[:, None]  # (B, T)
    matched = auc_matched(weights, counts & after, counts & ~after)
    return first_error_auc(weights, mask, first_error) | {"auc_matched": matched}


def from_file(
    flags: Diagnose, config: Config, decided: dict, ranks: Ranks
) -> tuple[Loaded, list[Prefixes]]:
    """The model, and the groups of `--rollouts`."""
    assert flags.rollouts
    run, groups = load_with_solutions(flags.rollouts, config, ranks)
    files.write_json(flags.out / "config.json", decided)
    return run, groups


def from_model(
    flags: Diagnose, config: Config, decided: dict, ranks: Ranks
) -> tuple[Loaded, list[Prefixes]]:
    """The model and sampled groups.

    The settings that determine the samples are written after the last refusal and before the first
    sample. A model taught here is saved in `--out`, and loaded from there next time.
    """
    run = load_run(config, ranks)
    print("\n".join(run.notes), flush=True)
    files.write_json(flags.out / "config.json", decided)
    warm_up_policy(run, flags.out)
    round_weights(run.context.policy.model, getattr(torch, config.dtype))
    return run, collect(run, flags.groups, flags.continuations, flags.out)


# ---- tables to print -----------------------------------------------------------------------------


def summary(results: dict) -> list[str]:
    """Lines to print: our numbers next to the paper's."""
    numbers = [("Fig. 10, share of mixed groups", [results["fig_10"]["mixed"]], "0.84")]
    if "spans" in results:
        aucs = results["fig_3"]["auc"]
        bins = results["fig_9"]["bins"]
        numbers += [
            ("Fig. 1(a), by position", rhos(results["fig_1a"]), "-0.96"),
            ("Fig. 1(b), local changes", rhos(results["fig_1b"]), "-0.42"),
            ("Fig. 3, AUC in the nearest / farthest bin", [aucs[0], aucs[-1]], "0.64 / 0.99"),
            ("Fig. 9, first / last position", rhos(bins[0], bins[-1]), "-0.06 / -0.23"),
        ]
        depths = {f"Fig. 9, tokens {depth['from']}-{depth['to']}": depth for depth in bins}
        for name, depth in ({"Fig. 3, all positions": results["fig_3"]} | depths).items():
            sides = rhos(depth["within_right"], depth["within_wrong"])
            numbers.append((f"{name}, right / wrong rollouts", sides, ""))
    for method, aucs in results["truth"].items():
        found = [aucs.get(name) for name in ("auc", "auc_matched", "auc_position")]
        name = f"AUC of the true first error, {method}: all / matched / position"
        numbers.append((name, found, ""))
    rows = []
    for name, values, paper in numbers:
        here = ["-" if value is None else f"{value:.2f}" for value in values]
        rows.append({"": name, "here": " / ".join(here), "paper": paper})
    legend = [
        "Spearman's rho of continuation success and distance; AUC: of success",
        "paper: its figures, MATH500, Qwen2.5-Math-7B, 8 rollouts, window 100, stride 25",
    ]
    return [*log.markdown(rows), "", *legend, ""]


def rhos(*results: dict) -> list[float | None]:
    """The correlations in these results."""
    return [result["spearman"] for result in results]


if __name__ == "__main__":
    sys.exit(main())
