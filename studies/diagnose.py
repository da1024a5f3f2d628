"""Does the distance see what it should? The paper's measurements of Secs. 2 and 5, and credit against the truth.

    python -m studies.diagnose  # the embedded task, its model made and warmed up
    python -m studies.diagnose --model runs/NAME/model --task embedded  # the same of a trained one
    python -m studies.diagnose --model PATH --data problems.jsonl  # real problems; other flags are train.py's
    python -m studies.diagnose --model PATH --rollouts solutions.jsonl  # of solutions from a file, states only
    python -m studies.diagnose --html credit.html  # and a page of the groups, tokens shaded (page.py)
    python -m studies.diagnose --html credit.html --samples runs/NAME/samples.jsonl  # only a page, of a training run

Sec. 2 of arXiv 2604.23318: sample G rollouts to each of `--groups` held-out problems, keep the groups with right and
wrong ones, and read their hidden states once. Complete each prefix of a rollout `--continuations` times: the share of
right completions is its continuation success. Its local distance is that of its last window of tokens to the closest
span of the opposing side, in units of nbar (`prefixes.py`). Both give Figs. 1(a), 1(b), 3 and 9; Fig. 10 needs verdicts
only, Fig. 11 distances only (`figures.py`). Where the task knows the first error, credit is scored against it
(`truth.py`), with the process reward model of --prm, or on the embedded task one that is made and taught here.

`--out` holds the groups, so the same command goes on where it was cut and samples nothing twice; diagnose.json, every
number beside the paper's; and a picture for each figure.

Left out: the paper's 8-bin edges, which it does not give (ours hold equally many spans); error bars that respect that
spans of a rollout and rollouts of a group depend on each other, so p-values here are too small.
"""

import argparse
import hashlib
import sys
from pathlib import Path

from harness.config import Parser, answer, check_flags, natural, positive_int, refuse_other_settings


def make_parser() -> Parser:
    """This command's own flags."""
    about = (
        "What the distance sees: the paper's figures on your rollouts. The embedded task takes four to five minutes "
        "on two CPU cores, --samples alone seconds."
    )
    epilog = "Flags of train.py can be added."
    parser = Parser(prog="python -m studies.diagnose", description=about, epilog=epilog, allow_abbrev=False)
    add = parser.add_argument
    groups = "problems that are sampled, or groups of --rollouts that are read"
    add("--groups", type=positive_int, default=16, help=groups)
    add("--continuations", type=natural, help="of each prefix; if not given: 16, and 0 with --rollouts; 0: none")
    lines = 'JSON lines with "problem", "solution", "label"; "answer" for --continuations'
    add("--rollouts", type=Path, metavar="FILE", help=lines)
    add("--prm", help="process reward model, to compare prm and pure, too; embedded: if not given, a tiny one is made")
    out = Path("runs/diagnose")
    add("--out", type=Path, metavar="DIR", default=out, help="folder of the groups, the numbers and the figures")
    add("--html", type=Path, metavar="FILE", help="a page to write, its tokens shaded by weight")
    samples = "samples.jsonl of a training run: the --html page of that, and nothing else"
    add("--samples", type=Path, metavar="FILE", help=samples)
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
from harness.models import load_model, load_reward_model, load_reward_tokenizer, load_tokenizer, round_weights
from harness.parallel import Ranks
from harness.prepare import make_start, own_prm, set_up
from shear import mean_norm, span_bounds, two_sides
from studies import figures, page
from studies.prefixes import Prefixes, collect, given, read, scored, span_table
from studies.truth import against_truth, errors_in, weights_of
from tasks.problems import BadInput, Task, cause, choose_template, grader, text_task

# Flags of train.py that have no use here.
REFUSED = "--method --name --resume --smoke --bench --eval-every --ranks --lora-rank"
# What decides on the samples. All else may change when a folder's groups are looked at again, or added to.
DECIDES = (
    "task model data template seed temperature max_tokens rollouts_per_prompt window stride continuations heldout "
    "toy_kind toy_lines toy_width toy_repair toy_luck toy_tail warmup_steps grade_timeout sandbox dtype digest"
).split()
# What the paper reports: Figs. 1 and 3, and App. I. Its other figures come without numbers.
PAPER = {"position": -0.96, "changes": -0.42, "auc_near": 0.64, "auc_far": 0.99, "mixed": 0.838}


@run_command(memory="lower --micro-tokens, --generate-batch or --rollouts-per-prompt")
def main(argv: list[str] | None = None) -> None:
    """Exit status: 0, 1 where memory does not suffice, 2 for bad input, 130 after Ctrl-C."""
    flags, args = parse_diagnose(argv)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    if flags.samples:
        save_page(flags, page.of_run(flags.samples))
    with files.made(flags.out, Ranks(0, 1, torch.device(args.device)), "config.json"):
        diagnose(flags, args)


def parse_diagnose(argv: list[str] | None) -> tuple[argparse.Namespace, argparse.Namespace]:
    """This command's flags, and train.py's; raises BadInput."""
    parser = make_parser()
    flags, rest = parser.parse_with_others(argv, REFUSED, "diagnose trains nothing and compares all methods")
    if flags.continuations is None:
        flags.continuations = 0 if flags.rollouts else 16
    args = parse_args([*rest, "--out", str(flags.out)])
    if flags.samples and not flags.html:
        raise BadInput(f"--samples {flags.samples}: is for a page; add --html")
    if flags.html and flags.html.exists() and (flags.html.suffix != ".html" or not flags.html.is_file()):
        raise BadInput(f"--html {flags.html}: is something else; name a file that ends in .html")
    if flags.html and not flags.html.parent.is_dir():
        raise BadInput(f"--html {flags.html}: its folder is not there; make it, or name another")
    if flags.rollouts and args.task != "math":
        raise BadInput(f"--rollouts {flags.rollouts}: holds solutions of math problems; add --model, drop --task")
    if not flags.rollouts and flags.groups > args.heldout:
        raise BadInput(f"--groups {flags.groups} exceeds --heldout {args.heldout}; lower it, or raise --heldout")
    return flags, args


def diagnose(flags: argparse.Namespace, args: argparse.Namespace) -> None:
    """From a model to numbers and figures in `--out`."""
    solutions = read(flags.rollouts, graded=flags.continuations > 0) if flags.rollouts else []
    check_folder(flags, args)
    task, model, tokenizer, reward_model, sources = prepare_all(flags, args, solutions)
    groups = collect(flags, args, task, model, tokenizer, sources)
    mixed = [group for group in groups if group.mixed]
    if not mixed:
        raise BadInput(f"--groups {flags.groups}: none holds right and wrong rollouts, so nothing opposes; raise it")
    left_out = []
    results = {"flags": decided(flags, args), "prm": flags.prm, "paper": PAPER, "left_out": left_out}
    results |= {"groups": len(groups), "mixed_groups": len(mixed)}
    scores = [[row["label"] for row in rows] for rows in solutions] or [group.scores for group in groups]
    results["fig_10"] = of_verdicts(scores, flags.out)
    policy = Policy(model, **packing_of(model))
    in_fig_11 = max(mixed, key=lambda group: min(2, group.scores.count(1.0)))
    batches, closest, pages = [], [], []
    for group in tqdm(mixed, "hidden states and distances", leave=False, disable=None):
        batch = scored(group, policy, task, tokenizer, args, reward_model)
        assign_credit("shear", batch, args)
        closest.append(report.closest_in(batch, args))
        if group is in_fig_11:
            results["fig_11"] = of_pairs(flags, args, task, batch)
        if flags.html:
            pages.append(page_rows(group, batch, args, task, tokenizer))
        if task.first_error:  # kept, as all methods and settings read the hidden states again
            batches.append(batch)
    if flags.html:
        save_page(flags, page.as_html(pages, args.model or "the embedded model, warmed up"))
    results |= of_prefixes(flags, span_table(mixed, closest), left_out)
    if task.first_error:
        results |= against_truth(args, task, batches, flags.out, left_out)
    else:
        left_out.append("credit against the truth: this task does not know the first error")
    write_json(flags.out / "diagnose.json", results)
    print("\n".join(summary(args, results)))
    print(f"figures and numbers are in {flags.out}/")


# ---- what is on disk ------------------------------------------------------------------------------------------


def decided(flags: argparse.Namespace, args: argparse.Namespace) -> dict:
    """What decides on the samples: both commands' flags, and the content of --rollouts."""
    digest = hashlib.sha256(flags.rollouts.read_bytes()).hexdigest() if flags.rollouts else None
    settings = vars(args) | {"continuations": flags.continuations, "digest": digest}
    return {name: settings[name] for name in DECIDES}


def check_folder(flags: argparse.Namespace, args: argparse.Namespace) -> None:
    """Refuse a folder of other samples; raises BadInput."""
    if not (flags.out / "config.json").exists():
        return
    had = files.settings_in(flags.out / "config.json")
    wanted = decided(flags, args)
    digest = wanted.pop("digest")  # which no flag gives
    refuse_other_settings(wanted, had, f"the groups in {flags.out} have", "choose another --out")
    if had.get("digest") != digest:
        made = f"the groups in {flags.out} are not of these solutions"
        raise BadInput(f"--rollouts {flags.rollouts}: {made}; choose another --out")


def prepare_all(
    flags: argparse.Namespace, args: argparse.Namespace, solutions: list[list[dict]]
) -> tuple[Task, torch.nn.Module, object, tuple | None, list]:
    """Task, model, tokenizer, process reward model, and what `collect` makes groups of.

    What decides on the samples is written down before any is made, and when nothing can be refused any more. What the
    embedded task makes itself stays in `--out`, whole, and is there the next time.
    """
    ranks = Ranks(0, 1, torch.device(args.device))
    dtype = getattr(torch, args.dtype)
    if flags.prm:
        load_reward_tokenizer(flags.prm)
    own_model = args.task == "embedded" and not args.model
    is_warm = (flags.out / "start").exists()
    if flags.rollouts:
        tokenizer = load_tokenizer("--model", args.model)
        model = load_model(args.model, ranks.device, tokenizer)
        template = choose_template(args.template, args.model, tokenizer)
        task = text_task("math", template, tokenizer, grader("math", args.grade_timeout, args.sandbox))
        mixed = [rows for rows in solutions if len({row["label"] for row in rows}) == 2]
        sources = [given(flags, args, task, model, tokenizer, rows) for rows in mixed[: flags.groups]]
    else:
        start = {"model": str(flags.out / "start")} if own_model and is_warm else {}
        ready = set_up(argparse.Namespace(**(vars(args) | start)), ranks)
        task, model, tokenizer = ready.task, ready.model, ready.tokenizer
        sources = task.heldout[: flags.groups]
        print("\n".join(f"  {note}" for note in ready.notes), flush=True)
    reward_model = load_reward_model(flags.prm, ranks.device, dtype) if flags.prm else None
    write_json(flags.out / "config.json", decided(flags, args))
    if own_model and not is_warm:
        make_start(model, tokenizer, task, args, flags.out, ranks)
    if args.task == "embedded" and not flags.prm and args.toy_kind != "recoverable":  # whose steps are not labelled
        flags.prm = str(flags.out / "prm")
        if (flags.out / "prm").exists():
            reward_model = load_reward_model(flags.prm, ranks.device, torch.float32)
        else:
            reward_model = own_prm(model, task, args, flags.out, ranks)
    round_weights(model, dtype)
    return task, model.eval(), tokenizer, reward_model, sources


def save_page(flags: argparse.Namespace, html: str) -> None:
    """The page, whole or not at all; raises BadInput."""
    try:
        write_whole(flags.html, html)
    except OSError as error:
        raise BadInput(f"--html {flags.html}: cannot be written ({cause(error)}); name another file") from error
    print(f"{flags.html}: {len(html) / 1e6:.1f} MB", flush=True)


# ---- figures --------------------------------------------------------------------------------------------------


def of_prefixes(flags: argparse.Namespace, spans: dict[str, np.ndarray], left_out: list[str]) -> dict:
    """Figs. 1(a), 1(b), 3 and 9, which need continuations."""
    spans = figures.rows_where(~np.isnan(spans["success"]), spans)
    count = len(spans["success"])
    if not count:
        why = "no prefix fits into a rollout; lower --window" if flags.continuations else "they need --continuations"
        left_out.append(f"Figs. 1(a), 1(b), 3, 9: {why}")
        return {}
    return {
        "spans": count,
        "fig_1a": figures.fig_1a_position(spans, flags.out / "fig_1a.png"),
        "fig_1b": figures.fig_1b_changes(spans, flags.out / "fig_1b.png"),
        "fig_3": figures.fig_3_separation(spans, flags.out / "fig_3.png"),
        "fig_9": figures.fig_9_depth(spans, flags.out / "fig_9.png"),
    }


def of_verdicts(scores: list[list[float | None]], out: Path) -> dict:
    """Fig. 10, of the scores of each group."""
    accuracies = []
    for group in scores:
        graded = [score for score in group if score is not None]
        if graded:
            accuracies.append(np.mean(graded))
    return figures.fig_10_accuracies(np.array(accuracies), out / "fig_10.png")


def of_pairs(flags: argparse.Namespace, args: argparse.Namespace, task: Task, batch: Batch) -> dict:
    """Fig. 11: a right rollout against a wrong one, with an error about the middle if known, and another right one."""
    right = batch.correct.nonzero().flatten().tolist()
    wrong = (batch.rewards == 0).nonzero().flatten().tolist()
    errors = errors_in(batch, task)[:, 0].tolist()
    middle = batch.rollouts.mask.sum(1).max().item() / 2
    chosen = min(wrong, key=lambda row: abs(errors[row] - middle))
    pairs = {"a wrong one": pair(batch, right[0], chosen, errors[chosen], args)}
    if len(right) > 1:
        pairs["another right one"] = pair(batch, right[0], right[1], -1, args)
    return figures.fig_11_matrices(pairs, flags.out / "fig_11.png")


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


def page_rows(group: Prefixes, batch: Batch, args: argparse.Namespace, task: Task, tokenizer) -> list[dict]:
    """A group as the page shows it: the weights of several methods over the same rollouts.

    `first` solves every pair of spans, and `oracle` needs the truth: both only where the task knows it.
    """
    methods = ("shear", "grpo", "first", "oracle") if task.first_error else ("shear", "grpo")
    weights = {name: weights_of(name, batch, args) for name in methods}  # (G, T) each
    rows = report.sample_rows(0, tokenizer, task, batch, args, weights)
    for row in rows:
        row["step"] = None
    return rows


# ---- what is printed ------------------------------------------------------------------------------------------


def summary(args: argparse.Namespace, results: dict) -> list[str]:
    """Our numbers beside the paper's, and what of them cannot be compared."""
    body = [["Fig. 10 groups with right and wrong rollouts", shown(results["fig_10"]["mixed"]), shown(PAPER["mixed"])]]
    if "spans" in results:
        body += prefix_lines(results)
    legend = ["paper: MATH500, Qwen2.5-Math-7B, 8 rollouts, spans of 100 tokens every 25"]
    if "spans" in results:
        legend.append("Spearman: of continuation success and distance")
    if any("-" in ours.split() for _, ours, _ in body):
        legend.append("-: too few prefixes, or all of them alike")
    if "fig_1a" in results and args.task == "embedded":
        legend.append("Fig. 1(a) is not comparable: responses are all of one length, and continuations come from")
        legend.append("the policy that sampled, so mean success hardly moves with position.")
    lines = tables.fitted([{"": what, "here": ours, "paper": theirs} for what, ours, theirs in body], *legend)
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


def prefix_lines(results: dict) -> list[list[str]]:
    """The part of the table that needs continuations."""
    position, local, depths = results["fig_1a"], results["fig_1b"], {"Fig. 3 all positions": results["fig_3"]}
    large = local["at_least_quarter"]
    p = "-" if local["p"] is None else f"{local['p']:.0e}"
    aucs = [auc for auc in results["fig_3"]["auc"] if auc is not None] or [None]
    near_far = shown(aucs[0], aucs[-1]), shown(PAPER["auc_near"], PAPER["auc_far"])
    body = [
        ["Fig. 1(a) success and distance by position: Spearman", shown(position["spearman"]), shown(PAPER["position"])],
        [f"Fig. 1(b) {local['n']} local changes, p {p}: Spearman", shown(local["spearman"]), shown(PAPER["changes"])],
        [f"  the same of {large['n']} changes of 1/4 and more", shown(large["spearman"]), ""],
        ["Fig. 3 AUC of success in the nearest / farthest bin", near_far[0], near_far[1]],
    ]
    for numbers in results["fig_9"]["bins"]:
        depths[f"Fig. 9 tokens {numbers['from']}-{numbers['to']}"] = numbers
    for name, numbers in depths.items():
        rhos = shown(numbers["within_right"]["spearman"], numbers["within_wrong"]["spearman"])
        body.append([f"{name}, right / wrong rollouts: Spearman", rhos, ""])
    return body


def shown(*values: float | None) -> str:
    """Two decimals of each number."""
    return " / ".join("-" if value is None else f"{value:.2f}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
