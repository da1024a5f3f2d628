"""Does the distance see what it should? The paper's measurements of Secs. 2 and 5, and credit against the truth.

    python -m studies.diagnose  # the embedded task, its model made and warmed up
    python -m studies.diagnose --model runs/NAME/model --task embedded  # the same of a trained one
    python -m studies.diagnose --model PATH --data problems.jsonl  # real problems; other flags are train.py's
    python -m studies.diagnose --model PATH --rollouts solutions.jsonl  # of solutions from a file, states only

Sec. 2 of arXiv 2604.23318: sample G rollouts to each of `--groups` held-out problems, keep the groups with right and
wrong ones, and read their hidden states once. Complete each prefix of a rollout `--continuations` times: the share of
right completions is its continuation success. Its local distance is that of its last window of tokens to the closest
span of the opposing side, in units of nbar (`prefixes.py`). Both give Figs. 1(a), 1(b), 3 and 9; Fig. 10 needs verdicts
only, Fig. 11 distances only (`figures.py`). Where the task knows the first error, credit is scored against it
(`advantages.against_truth`), with a process reward model that is made and taught here.

`--out` holds the groups, so the same command goes on where it was cut and samples nothing twice; diagnose.json, every
number beside the paper's; a picture for each figure; and samples.jsonl, the groups as `studies.page` shows them.

Left out: the paper's 8 bins of Fig. 3 (ours hold equally many spans); error bars that respect that spans of a rollout
and rollouts of a group depend on each other, so p-values here are too small.
"""

import argparse
import hashlib
import shlex
import sys
from pathlib import Path

from harness.config import Parser, answer, check_flags, natural, positive_int, refuse_other_settings


def make_parser() -> Parser:
    """This command's own flags."""
    about = (
        "What the distance sees: the paper's figures on your rollouts. The embedded task takes four to five minutes "
        "on two CPU cores."
    )
    epilog = "Flags of train.py can be added."
    parser = Parser(prog="python -m studies.diagnose", description=about, epilog=epilog, allow_abbrev=False)
    add = parser.add_argument
    groups = "problems that are sampled, or groups of --rollouts that are read"
    add("--groups", type=positive_int, default=16, help=groups)
    add("--continuations", type=natural, help="of each prefix; if not given: 16, and 0 with --rollouts; 0: none")
    lines = 'JSON lines with "problem", "solution", "label"; "answer" for --continuations'
    add("--rollouts", type=Path, metavar="FILE", help=lines)
    about = "folder of the groups, the numbers and the figures"
    add("--out", type=Path, metavar="DIR", default=Path("runs/diagnose"), help=about)
    return parser


answer(__name__, lambda: check_flags(make_parser()))  # before what takes seconds to import

import numpy as np
import torch
from tqdm import tqdm

from credit.batch import Batch
from credit.methods import assign_credit
from credit.shear_settings import pair_distances, settings_of
from credit.table import options_of
from fast.distances import token_distances
from fast.packing import packing_of
from grpo import Policy, spread
from harness import files, report, tables
from harness.files import write_json, write_whole
from harness.launch import parse_args, run_command
from harness.models import load_model, load_tokenizer, round_weights
from harness.parallel import Ranks
from harness.prepare import make_start, own_prm, set_up
from shear import mean_norm, span_bounds, two_sides
from studies import figures
from studies.advantages import against_truth, errors_in, weights_of
from studies.prefixes import collect, given, read, scored, span_table
from tasks.problems import BadInput, Task, choose_template, grader, text_task

# Flags of train.py that have no use here.
REFUSED = "--method --prm --name --resume --smoke --bench --eval-every --ranks --lora-rank"
# What decides on the samples. All else may change when a folder's groups are looked at again, or added to.
DECIDES = (
    "task model data template seed temperature max_tokens rollouts_per_prompt window stride continuations heldout "
    "toy_lines toy_width warmup_steps grade_timeout sandbox dtype rollouts"
).split()
# What the paper reports: Figs. 1, 3 and 9, and App. I. Its other figures come without numbers.
PAPER = {"position": -0.96, "changes": -0.42, "auc_near": 0.64, "auc_far": 0.99, "mixed": 0.838}
PAPER |= {"shallow": -0.055, "deep": -0.225}


@run_command(memory="lower --micro-tokens, --generate-batch or --rollouts-per-prompt")
def main(argv: list[str] | None = None) -> None:
    """Exit status: 0, 1 where memory does not suffice, 2 for bad input, 130 after Ctrl-C."""
    args = parse_diagnose(argv)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    with files.made(args.out, Ranks(0, 1, torch.device(args.device)), "config.json"):
        diagnose(args)


def parse_diagnose(argv: list[str] | None) -> argparse.Namespace:
    """train.py's flags and, above these, this command's; raises BadInput."""
    flags, rest = make_parser().parse_with_others(argv, REFUSED, "diagnose trains nothing and compares all methods")
    if flags.continuations is None:
        flags.continuations = 0 if flags.rollouts else 16
    args = argparse.Namespace(**vars(parse_args(rest)) | vars(flags))
    if args.rollouts and args.task != "math":
        raise BadInput(f"--rollouts {args.rollouts}: holds solutions of math problems; add --model, drop --task")
    if not args.rollouts and args.groups > args.heldout:
        raise BadInput(f"--groups {args.groups} exceeds --heldout {args.heldout}; lower it, or raise --heldout")
    return args


def diagnose(args: argparse.Namespace) -> None:
    """From a model to numbers and figures in `--out`."""
    solutions = read(args.rollouts, graded=args.continuations > 0) if args.rollouts else []
    if (args.out / "config.json").exists():
        had = files.settings_in(args.out / "config.json")
        refuse_other_settings(decided(args), had, f"the groups in {args.out} have", "choose another --out")
    task, model, tokenizer, reward_model, sources = prepare_all(args, solutions)
    groups = collect(args, task, model, tokenizer, sources)
    mixed = [group for group in groups if group.mixed]
    if not mixed:
        raise BadInput(f"--groups {args.groups}: none holds right and wrong rollouts, so nothing opposes; raise it")
    left_out = []
    results = {"flags": decided(args), "paper": PAPER, "left_out": left_out}
    results |= {"groups": len(groups), "mixed_groups": len(mixed)}
    scores = [[row["label"] for row in rows] for rows in solutions] or [group.scores for group in groups]
    results["fig_10"] = of_verdicts(scores, args.out)
    policy = Policy(model, **packing_of(model))
    in_fig_11 = max(mixed, key=lambda group: min(2, group.scores.count(1.0)))
    # Both only where the truth is known: `first` solves every pair of spans.
    shown_methods = ("shear", "grpo", "first", "oracle") if task.first_error else ("shear", "grpo")
    batches, closest, samples = [], [], []
    for group in tqdm(mixed, "hidden states and distances", leave=False, disable=None):
        batch = scored(group, policy, task, tokenizer, args, reward_model)
        assign_credit("shear", batch, args)
        closest.append(report.closest_in(batch, args))
        if group is in_fig_11:
            results["fig_11"] = of_pairs(args, task, batch)
        weights = {name: weights_of(name, batch, args) for name in shown_methods}  # (G, T) each
        samples += report.sample_rows(0, tokenizer, task, batch, args, weights)
        if task.first_error:  # kept, as all methods and settings read the hidden states again
            batches.append(batch)
    write_whole(args.out / "samples.jsonl", "".join(map(files.as_json, samples)))
    results |= of_prefixes(args, span_table(mixed, closest), left_out)
    if task.first_error:
        results |= against_truth(args, task, batches, args.out, left_out)
    else:
        left_out.append("credit against the truth: this task does not know the first error")
    write_json(args.out / "diagnose.json", results)
    print("\n".join(summary(args, results)))
    print(f"figures and numbers are in {args.out}/\nnext: python -m studies.page {shlex.quote(str(args.out))}")


def decided(args: argparse.Namespace) -> dict:
    """What decides on the samples: both commands' flags, and of --rollouts a digest of the content."""
    digest = f"sha256:{hashlib.sha256(args.rollouts.read_bytes()).hexdigest()}" if args.rollouts else None
    return {name: vars(args)[name] for name in DECIDES} | {"rollouts": digest}


def prepare_all(args: argparse.Namespace, solutions: list[list[dict]]) -> tuple:
    """Task, model, tokenizer, process reward model or None, and what `collect` makes groups of.

    What decides on the samples is written down before any is made, and when nothing can be refused any more. What the
    embedded task makes itself stays in `--out`, whole, and is there the next time.
    """
    ranks, out = Ranks(0, 1, torch.device(args.device)), args.out
    own_model = args.task == "embedded" and not args.model
    is_warm = (out / "start").exists()
    if args.rollouts:
        tokenizer = load_tokenizer("--model", args.model)
        model = load_model(args.model, ranks.device, tokenizer)
        template = choose_template(args.template, args.model, tokenizer)
        task = text_task("math", template, tokenizer, grader("math", args.grade_timeout, args.sandbox))
        mixed = [rows for rows in solutions if len({row["label"] for row in rows}) == 2]
        sources = [given(args, task, model, tokenizer, rows) for rows in mixed[: args.groups]]
    else:
        start = {"model": str(out / "start")} if own_model and is_warm else {}
        ready = set_up(argparse.Namespace(**(vars(args) | start)), ranks)
        task, model, tokenizer = ready.task, ready.model, ready.tokenizer
        sources = task.heldout[: args.groups]
        print("\n".join(f"  {note}" for note in ready.notes), flush=True)
    write_json(out / "config.json", decided(args))
    if own_model and not is_warm:
        make_start(model, tokenizer, task, args, out, ranks)
    reward_model = None
    if args.task == "embedded":
        taught = {"resume": (out / "prm").exists()}
        reward_model = own_prm(model, task, argparse.Namespace(**(vars(args) | taught)), out, ranks)
    round_weights(model, getattr(torch, args.dtype))
    return task, model.eval(), tokenizer, reward_model, sources


# ---- figures --------------------------------------------------------------------------------------------------


def of_prefixes(args: argparse.Namespace, spans: dict[str, np.ndarray], left_out: list[str]) -> dict:
    """Figs. 1(a), 1(b), 3 and 9, which need continuations."""
    spans = figures.rows_where(~np.isnan(spans["success"]), spans)
    count = len(spans["success"])
    if not count:
        why = "no prefix fits into a rollout; lower --window" if args.continuations else "they need --continuations"
        left_out.append(f"Figs. 1(a), 1(b), 3, 9: {why}")
        return {}
    return {
        "spans": count,
        "fig_1a": figures.fig_1a_position(spans, args.out / "fig_1a.png"),
        "fig_1b": figures.fig_1b_changes(spans, args.out / "fig_1b.png"),
        "fig_3": figures.fig_3_separation(spans, args.out / "fig_3.png"),
        "fig_9": figures.fig_9_depth(spans, args.out / "fig_9.png"),
    }


def of_verdicts(scores: list[list[float | None]], out: Path) -> dict:
    """Fig. 10, of the scores of each group."""
    accuracies = []
    for group in scores:
        graded = [score for score in group if score is not None]
        if graded:
            accuracies.append(np.mean(graded))
    return figures.fig_10_accuracies(np.array(accuracies), out / "fig_10.png")


def of_pairs(args: argparse.Namespace, task: Task, batch: Batch) -> dict:
    """Fig. 11: a right rollout against a wrong one, with an error about the middle if known, and another right one."""
    right = batch.correct.nonzero().flatten().tolist()
    wrong = (batch.rewards == 0).nonzero().flatten().tolist()
    errors = errors_in(batch, task)[:, 0].tolist()
    middle = batch.rollouts.mask.sum(1).max().item() / 2
    chosen = min(wrong, key=lambda row: abs(errors[row] - middle))
    pairs = {"a wrong one": pair(batch, right[0], chosen, errors[chosen], args)}
    if len(right) > 1:
        pairs["another right one"] = pair(batch, right[0], right[1], -1, args)
    return figures.fig_11_matrices(pairs, args.out / "fig_11.png")


def pair(batch: Batch, row: int, other: int, error: int, args) -> tuple[np.ndarray, list[int], list[int], int | None]:
    """A pair for `fig_11_matrices`, whatever the verdicts, with nbar and eps of its own.

    The other's first error begins at `error`, -1 without one.
    """
    rows = [row, other]
    hidden = spread(batch.hidden, batch.rollouts.mask)[rows]  # (2, T, d)
    mask = batch.rollouts.mask[rows]  # (2, T)
    correct = torch.tensor([True, False], device=mask.device)
    right, wrong = two_sides(hidden, mask, correct, args.window, args.stride)
    lengths = mask.sum(1).tolist()
    row_ends = [end for _, end in span_bounds(lengths[0], args.window, args.stride)]
    ends = [end for _, end in span_bounds(lengths[1], args.window, args.stride)]
    beyond = [column for column, end in enumerate(ends) if end > error >= 0]
    settings, nbar = settings_of(args, **options_of("shear", args.method_option)), mean_norm(hidden[mask])
    costs = token_distances(right.states, wrong.states)
    distances_of = pair_distances(hidden, mask, correct, settings)
    matrix = distances_of(costs, right.spans, wrong.spans, settings.eps_over(nbar) * nbar) / nbar  # (K, L)
    return matrix.cpu().numpy(), row_ends, ends, beyond[0] if beyond else None


# ---- what is printed ------------------------------------------------------------------------------------------


def summary(args: argparse.Namespace, results: dict) -> list[str]:
    """Our numbers beside the paper's, and what of them cannot be compared."""
    rows, legend = [], ["paper: MATH500, Qwen2.5-Math-7B, 8 rollouts, spans of 100 tokens every 25"]

    def add(what: str, here: list, paper: tuple[str, ...] = ()) -> None:
        rows.append({"": what, "here": shown(*here), "paper": shown(*[PAPER[name] for name in paper])})

    add("Fig. 10 groups with right and wrong rollouts", [results["fig_10"]["mixed"]], ("mixed",))
    if "spans" in results:
        legend.append("Spearman: of continuation success and distance")
        local, bins = results["fig_1b"], results["fig_9"]["bins"]
        p = "-" if local["p"] is None else f"{local['p']:.0e}"
        aucs = [auc for auc in results["fig_3"]["auc"] if auc is not None] or [None]
        add("Fig. 1(a) success and distance by position: Spearman", [results["fig_1a"]["spearman"]], ("position",))
        add(f"Fig. 1(b) {local['n']} local changes, p {p}: Spearman", [local["spearman"]], ("changes",))
        large = local["at_least_quarter"]
        add(f"  the same of {large['n']} changes of 1/4 and more", [large["spearman"]])
        add("Fig. 3 AUC of success in the nearest / farthest bin", [aucs[0], aucs[-1]], ("auc_near", "auc_far"))
        add("Fig. 9 first / last position: Spearman", [bins[0]["spearman"], bins[-1]["spearman"]], ("shallow", "deep"))
        depths = {f"Fig. 9 tokens {numbers['from']}-{numbers['to']}": numbers for numbers in bins}
        for name, numbers in {"Fig. 3 all positions": results["fig_3"], **depths}.items():
            rhos = [numbers[side]["spearman"] for side in ("within_right", "within_wrong")]
            add(f"{name}, right / wrong rollouts: Spearman", rhos)
        if args.task == "embedded":
            legend.append("Fig. 1(a) is not comparable: responses are all of one length, and continuations come from")
            legend.append("the policy that sampled, so mean success hardly moves with position.")
    if any("-" in row["here"].split() for row in rows):
        legend.append("-: too few prefixes, or all of them alike")
    lines = tables.fitted(rows, *legend)
    if "methods" in results:
        lines += truth_lines(results["methods"], results["pooling"])
    return lines + [f"left out: {reason}" for reason in results["left_out"]]


def truth_lines(methods: dict[str, dict], poolings: dict[str, dict]) -> list[str]:
    """Credit against the true first error."""
    rows = []
    after, alone = "AUC, from the error on", "AUC, wrong step alone"
    for name, place in methods.items():
        rows.append({"weights": name, after: shown(place["auc"]), alone: shown(place["auc_step"])})
    rows.append({"weights": "position alone", after: shown(methods["grpo"]["auc_position"]), alone: ""})
    legend = ["AUC: the chance that one of these tokens has a larger weight than one of the others"]
    for pooling, curve in poolings.items():
        if curve["half_risen"] is not None:
            half = f"{pooling} pooling: half of the weights' rise is done at token {curve['half_risen']}"
            legend.append(f"{half}, where 0 is the wrong step's last")
    return tables.fitted(rows, *legend)


def shown(*values: float | None) -> str:
    """Two decimals of each number."""
    return " / ".join("-" if value is None else f"{value:.2f}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
