"""Does the distance see what it should? The paper's measurements of Secs. 2 and 5, and credit against the truth.

    python -m studies.diagnose  # the embedded task, its model made and warmed up
    python -m studies.diagnose --model runs/NAME/model --task embedded  # the same of a trained one
    python -m studies.diagnose --model PATH --data problems.jsonl  # real problems; other flags are train.py's
    python -m studies.diagnose --model PATH --rollouts solutions.jsonl  # texts that are there already: states only
    python -m studies.diagnose --html credit.html  # and a page of the groups, tokens shaded (page.py)
    python -m studies.diagnose --html credit.html --samples runs/NAME/samples.jsonl  # only a page, of a training run

Sec. 2 of arXiv 2604.23318, step by step: sample G rollouts to each of `--groups` held-out problems, keep the groups
with right and wrong ones, and read their hidden states once. Prefixes end where spans do, after window, window +
stride, ... tokens, and before the last token ahead of the answer's box, so that no prefix has the whole reasoning.
Each is completed `--continuations` times, from token ids, by the model that sampled it and at the same temperature:
the share that is right is its continuation success. Its local distance is that of its last window of tokens to the
closest span of the opposing side, in units of nbar (`prefixes.py`). From both, Figs. 1(a), 1(b), 3 and 9; Fig. 10
needs verdicts only, Fig. 11 distances only (`figures.py`). Where the task knows the first error, credit is scored
against it (`truth.py`); the embedded task makes and teaches the process reward model that this asks for, if --prm
gives none.

`--out` holds the groups, so that the same command goes on where it was cut and samples nothing twice; diagnose.json,
every number beside the paper's; and a picture a figure.

Left out: the paper's 8-bin edges, which it does not give (ours hold equally many spans); error bars that respect that
spans of a rollout and rollouts of a group depend on each other, so p-values here are too small.
"""

import argparse
import csv
import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers.utils import logging

from credit import prm
from credit.ablations import settings_of, span_matrix
from credit.methods import Batch
from grpo import Policy
from harness import report, tables
from harness.checkpoint import write_whole
from harness.command import GOES_ON, guarded
from harness.parallel import Ranks
from harness.prepare import grader, load_model, own_prm, set_up, warm_up
from harness.recipe import Parser, flag, parse_args
from shear import span_bounds, two_sides
from studies import figures, page
from studies.prefixes import Group, collect, distances_of, read, scored, table_of
from studies.truth import against_truth, errors_in, weights_of
from tasks import toy
from tasks.problems import INSTRUCTIONS, BadInput, Task, cause, choose_template, render

OURS = "--method --name --resume --smoke --bench --eval-every --ranks --lora-rank".split()  # train.py's, no use here
# What decides on the samples: a folder's groups may be looked at with other flags, and added to.
DECIDES = (
    "task model data template seed temperature max_tokens group window stride continuations heldout toy_kind toy_lines "
    "warmup_steps grade_timeout sandbox dtype digest"
)
# What the paper reports: Figs. 1 and 3, and App. I. Its other figures come without numbers.
PAPER = {"position": -0.96, "changes": -0.42, "auc_near": 0.64, "auc_far": 0.99, "mixed": 0.838}


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 where memory does not suffice, 2 for bad input, 130 after Ctrl-C."""
    logging.disable_progress_bar()

    def work() -> int:
        flags, args = parse(argv)
        torch.set_num_threads(args.threads or torch.get_num_threads())
        if flags.samples:
            save_page(flags, page.of_run(flags.samples))
        else:
            diagnose(flags, args)
        return 0

    return guarded(work, interrupted=GOES_ON, memory="lower --micro-tokens, --generate-batch or --group")


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, argparse.Namespace]:
    """This command's flags, and train.py's; raises BadInput."""
    parser = Parser(
        prog="python -m studies.diagnose",
        description="What the distance sees; the paper's figures.",
        allow_abbrev=False,
    )
    parser.epilog = "Flags of train.py can be added."
    add = parser.add_argument
    add("--groups", type=int, default=16, help="problems that are sampled, or groups of --rollouts that are read")
    add("--continuations", type=int, help="of each prefix; if not given: 16, and 0 with --rollouts; 0: none")
    add("--rollouts", type=Path, help='JSON lines with "problem", "solution", "label"; "answer" for --continuations')
    add("--prm", help="process reward model, to judge prm and pure, too; embedded: if not given, a tiny one is made")
    add("--out", type=Path, default=Path("runs/diagnose"), help="folder of the groups, the numbers and the figures")
    add("--html", type=Path, help="a page to write, its tokens shaded by weight")
    add("--samples", type=Path, help="samples.jsonl of a training run: the --html page of that, and nothing else")
    flags, rest = parser.parse_known_args(argv)
    for part in rest:
        if part.split("=")[0] in OURS:
            raise BadInput(f"{part}: diagnose trains nothing and compares all methods; leave it out")
    if flags.continuations is None:
        flags.continuations = 0 if flags.rollouts else 16
    for name, least in (("groups", 1), ("continuations", 0)):
        if getattr(flags, name) < least:
            raise BadInput(f"--{name} {getattr(flags, name)}: must be at least {least}; raise it")
    args = parse_args([*rest, "--out", str(flags.out)])
    if flags.samples and not flags.html:
        raise BadInput(f"--samples {flags.samples}: is for a page; add --html")
    if flags.html and (flags.html.is_dir() or (flags.samples and flags.samples.resolve() == flags.html.resolve())):
        raise BadInput(f"--html {flags.html}: is a folder, or the samples themselves; name a file that ends in .html")
    if flags.html and not flags.html.absolute().parent.is_dir():
        raise BadInput(f"--html {flags.html}: its folder is not there; make it, or name another")
    if flags.rollouts and args.task != "math":
        raise BadInput(f"--rollouts {flags.rollouts}: holds solutions of math problems; add --model, drop --task")
    if not flags.rollouts and flags.groups > args.heldout:
        raise BadInput(f"--groups {flags.groups} exceeds --heldout {args.heldout}; lower it, or raise --heldout")
    return flags, args


def diagnose(flags: argparse.Namespace, args: argparse.Namespace) -> None:
    """From a model to numbers and figures in `--out`."""
    given = read(flags.rollouts, graded=flags.continuations > 0) if flags.rollouts else []
    check_folder(flags, args)
    task, model, tokenizer, judge = prepare_all(flags, args)
    sources = [rows for rows in given if len({row["label"] for row in rows}) == 2] or task.heldout
    groups = collect(flags, args, task, model, tokenizer, sources[: flags.groups])
    mixed = [group for group in groups if group.mixed]
    if not mixed:
        raise BadInput(f"--groups {flags.groups}: none holds right and wrong rollouts, so nothing opposes; raise it")
    results = {"flags": decided(flags, args), "prm": flags.prm, "paper": PAPER, "left_out": []}
    results |= {"groups": len(groups), "mixed_groups": len(mixed)}
    results["fig_10"] = of_verdicts(flags, given, groups)
    policy, shown = Policy(model), max(mixed, key=lambda group: min(2, group.scores.count(1.0)))
    batches, distances, weights = [], [], []
    for group in tqdm(mixed, "hidden states and distances", leave=False, disable=None):
        batch = scored(group, policy, task, tokenizer, args, judge)
        distances.append(distances_of(batch, args))
        weights.append(weights_of("shear", batch, args))
        if group is shown:
            results["fig_11"] = of_pairs(flags, args, task, batch)
        # Hidden states of many groups need much memory: kept where other methods and settings read them again.
        batches.append(batch if task.first_error else dataclasses.replace(batch.light(), source=batch.source))
    if flags.html:
        known = zip(mixed, batches, distances, weights, strict=True)
        pages = [page_rows(*each, args, task, tokenizer) for each in known]
        save_page(flags, page.render(pages, f"SHEAR's weights: {args.model or 'the embedded model, warmed up'}"))
    results |= of_prefixes(flags, table_of(mixed, distances), results["left_out"])
    results["rollout"] = shade(flags, task, tokenizer, batches, weights)
    if task.first_error:
        results |= against_truth(args, task, batches, weights, flags.out, results["left_out"])
    else:
        results["left_out"].append("credit against the truth: this task does not know the first error")
    write_whole(flags.out / "diagnose.json", json.dumps(results, indent=1) + "\n")
    print("\n".join(summary(args, results)))
    print(f"figures and numbers are in {flags.out}/")


# ---- what is on disk ------------------------------------------------------------------------------------------


def decided(flags: argparse.Namespace, args: argparse.Namespace) -> dict:
    """What decides on the samples: both commands' flags, and the content of --rollouts."""
    digest = hashlib.sha256(flags.rollouts.read_bytes()).hexdigest() if flags.rollouts else None
    known = {**vars(args), "continuations": flags.continuations, "digest": digest}
    return {name: known[name] for name in DECIDES.split()}


def check_folder(flags: argparse.Namespace, args: argparse.Namespace) -> None:
    """Refuse a folder of other samples, and one that cannot be made; raises BadInput."""
    path = flags.out / "config.json"
    try:
        flags.out.mkdir(parents=True, exist_ok=True)
        had = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise BadInput(f"--out {flags.out}: cannot be used ({error}); choose another folder") from error
    for name, value in decided(flags, args).items() if had else ():
        if value != had.get(name):
            raise BadInput(
                f"{flag(name)} {value}: the groups in {flags.out} have {had.get(name)}; choose another --out"
            )


def prepare_all(
    flags: argparse.Namespace, args: argparse.Namespace
) -> tuple[Task, torch.nn.Module, object, tuple | None]:
    """Task, model, tokenizer and process reward model; what decides on the samples is written down before any is made.

    What the embedded task makes itself stays in `--out`, and is there the next time.
    """
    ranks, config = Ranks(0, 1, torch.device(args.device)), json.dumps(decided(flags, args), indent=1) + "\n"
    dtype, embedded = getattr(torch, args.dtype), args.task == "embedded"
    judge = prm.load_reward_model(flags.prm, ranks.device, dtype) if flags.prm else None
    is_there = lambda name: (flags.out / name / "tokenizer_config.json").exists()  # noqa: E731 - written last
    made = embedded and not args.model and not is_there("start")
    if flags.rollouts:
        model, tokenizer = load_model(args.model, ranks.device)
        template = choose_template(args.template, args.model, tokenizer)
        ask = lambda row: render(template, row["problem"], INSTRUCTIONS["math"], tokenizer)  # noqa: E731
        task = Task("math", [], [], ask, grader(args))
    else:
        own = dict(model=str(flags.out / "start")) if embedded and not args.model and not made else {}
        task, model, tokenizer, notes, _, _ = set_up(argparse.Namespace(**{**vars(args), **own}), ranks)
        print("\n".join(f"  {note}" for note in notes), flush=True)
    write_whole(flags.out / "config.json", config)
    if made:
        warm_up(model, tokenizer, task, args, flags.out, ranks)
    if embedded and not flags.prm:
        flags.prm = str(flags.out / "prm")
        judge = prm.load_reward_model(flags.prm, ranks.device, torch.float32) if is_there("prm") else None
        judge = judge or own_prm(model, task, args, flags.out, ranks)
    return task, model.eval().to(dtype), tokenizer, judge


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
    known = ~np.isnan(spans["success"])
    spans = {name: values[known] for name, values in spans.items()}
    if not known.any():
        why = "no prefix fits into a rollout; lower --window" if flags.continuations else "they need --continuations"
        left_out.append(f"Figs. 1(a), 1(b), 3, 9: {why}")
        return {}
    with (flags.out / "spans.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([spans, *zip(*spans.values(), strict=True)])
    drawn = {
        "fig_1a": figures.fig_1a_position,
        "fig_1b": figures.fig_1b_changes,
        "fig_3": figures.fig_3_separation,
        "fig_9": figures.fig_9_depth,
    }
    return {"spans": int(known.sum())} | {name: draw(spans, flags.out / f"{name}.png") for name, draw in drawn.items()}


def of_verdicts(flags: argparse.Namespace, given: list[list[dict]], groups: list[Group]) -> dict:
    """Fig. 10, of all groups of --rollouts, or of those sampled."""
    scores = [[row["label"] for row in rows] for rows in given] or [group.scores for group in groups]
    known = [[score for score in each if score is not None] for each in scores]
    accuracies = np.array([np.mean(each) for each in known if each])
    return figures.fig_10_accuracies(accuracies, flags.out / "fig_10.png")


def of_pairs(flags: argparse.Namespace, args: argparse.Namespace, task: Task, batch: Batch) -> dict:
    """Fig. 11: a right rollout against a wrong one, with an error about the middle if known, and another right one."""
    right, wrong = (side.nonzero().flatten().tolist() for side in (batch.correct, batch.rewards == 0))
    starts, middle = errors_in(batch, task)[:, 0].tolist(), batch.rollouts.mask.sum(1).max().item() / 2
    clear = min(wrong, key=lambda row: abs(starts[row] - middle))
    pairs = {"a wrong one": pair(batch, right[0], clear, args, task)}
    if len(right) > 1:
        pairs["another right one"] = pair(batch, right[0], right[1], args, task)
    return figures.fig_11_matrices(pairs, flags.out / "fig_11.png")


def pair(batch: Batch, one: int, other: int, args, task: Task) -> tuple[np.ndarray, list[int], int | None]:
    """Of two rollouts, whatever their verdicts: distances (K, L), where the other's spans end, which has the error.

    nbar and eps are the pair's own.
    """
    rows = [one, other]
    parts = batch.scored.hidden[rows], batch.rollouts.mask[rows], torch.tensor([True, False]).to(batch.correct)
    sides = two_sides(*parts, args.window, args.stride)
    matrix = span_matrix(*sides, settings_of(args))
    ends = [end for _, end in span_bounds(int(batch.rollouts.mask[other].sum()), args.window, args.stride)]
    start = int(errors_in(batch, task)[other, 0])
    seen = [column for column, end in enumerate(ends) if end > start >= 0]
    return matrix.cpu().numpy(), ends, seen[0] if seen else None


def shade(flags, task: Task, tokenizer, batches: list[Batch], weights: list[Tensor]) -> dict:
    """rollout.png: the wrong rollout whose weights rise most at its true first error, if that is about the middle.

    Slips of arithmetic come first, as they need no explanation. Where the truth is not known, the rollout whose
    weights vary most.
    """
    choices = []
    for number, batch in enumerate(batches):
        places = errors_in(batch, task).tolist()  # (G, 2)
        for row in (batch.rewards == 0).nonzero().flatten().tolist():
            own, text = weights[number][row][batch.rollouts.mask[row]], batch.rollouts.texts[row]  # (T_i,)
            start, plain = places[row][0], False
            rise = own.std(correction=0).item() if start < 0 else -1.0
            if 0.3 <= start / len(own) <= 0.6:
                rise = (own[start:].mean() - own[:start].mean()).item()
                plain = task.first_error(batch.source.problems[0], text).kind == "arith"
            choices.append(((plain, rise), -number, -row, own.tolist(), places[row]))
    _, number, row, own, error = max(choices)
    rollouts, problem = batches[-number].rollouts, batches[-number].source.problems[0]
    text, ids = rollouts.texts[-row], rollouts.ids[-row][rollouts.mask[-row]].tolist()
    lines = figures.wrap([tokenizer.decode([id]) for id in ids], own)
    notes = explain(problem, text, lines) if task.first_error else {}
    title = "problem, mod 10:  " + problem["problem"].strip().replace(";", "  ") if task.first_error else ""
    figures.shaded_rollout(lines, error if error[0] >= 0 else None, notes, title, flags.out / "rollout.png")
    return {"group": -number, "row": -row, "text": text, "first_error": error, "weights": own}


def explain(problem: dict, text: str, lines: list[list[tuple[str, float]]]) -> dict[int, str]:
    """What to say beside lines of the embedded task: the mean weight, and what is wrong with the first wrong one."""
    error, count, notes = toy.first_error(problem, text), 0, {}
    for row, line in enumerate(lines):
        notes[row] = f"mean {sum(weight for _, weight in line) / len(line):.2f}"
        if error and count <= error.token < count + len(line):
            said = "".join(part for part, _ in line).replace("\u21b5", "\n")
            notes[row] += f"   true first error: {toy.correction(said) if error.kind == 'arith' else error.kind}"
        count += len(line)
    return notes


def page_rows(group: Group, batch: Batch, distances: list, weights: Tensor, args, task: Task, tokenizer) -> list[dict]:
    """A group as the page shows it, with the distances of its spans."""
    rows = report.sample_rows(0, tokenizer, task, [group.problem], batch, group.verdicts, weights)
    for row, found in zip(rows, distances, strict=True):
        bounds = span_bounds(len(row["tokens"]), args.window, args.stride) if found else []
        spans = [(*bound, round(distance, 4)) for bound, distance in zip(bounds, found, strict=True)]
        row |= {"step": None, "spans": spans}
    return rows


# ---- what is printed ------------------------------------------------------------------------------------------


def summary(args: argparse.Namespace, results: dict) -> list[str]:
    """Our numbers beside the paper's, and what of them cannot be compared."""
    show = lambda value: "-" if value is None else f"{value:.2f}"  # noqa: E731
    body = [["groups with right and wrong rollouts", show(results["fig_10"]["mixed"]), show(PAPER["mixed"])]]
    if "spans" in results:
        aucs = [value for value in results["fig_3"]["auc"] if value is not None] or [None]
        changes, large = results["fig_1b"], results["fig_1b"]["at_least_quarter"]
        p = "-" if changes["p"] is None else f"{changes['p']:.0e}"
        near, far = (f"{show(one)} / {show(other)}" for one, other in
                     ((aucs[0], aucs[-1]), (PAPER["auc_near"], PAPER["auc_far"])))  # fmt: skip
        body += [
            ["Fig. 1(a) success and distance by position: Spearman", show(results["fig_1a"]["spearman"]),
             show(PAPER["position"])],
            [f"Fig. 1(b) {changes['n']} local changes, p {p}: Spearman", show(changes["spearman"]),
             show(PAPER["changes"])],
            [f"  the same of {large['n']} changes of 1/4 and more", show(large["spearman"]), "-"],
            ["Fig. 3 AUC of success in the nearest / farthest bin", near, far],
        ]  # fmt: skip
        parts = {"all positions": results["fig_3"]}
        parts |= {f"tokens {each['from']}-{each['to']}": each for each in results["fig_9"]["bins"]}
        for name, each in parts.items():
            rhos = " / ".join(show(each[f"within_{side}"]["spearman"]) for side in ("right", "wrong"))
            body.append([f"success and distance in right / wrong rollouts, {name}: Spearman", rhos, "-"])
    for name, place in results.get("methods", {}).items():
        pair = f"{show(place['auc'])} / {show(place['auc_step'])}"
        body.append([f"{name}: AUC of weights from the first error on / wrong step alone", pair, "-"])
    if "methods" in results:
        body.append(["position alone: the first of these", show(results["methods"]["grpo"]["auc_position"]), "-"])
        body += [
            [f"half of the rise at this token, {name} pooling (wrong step's last: 0)", str(each["half_risen"]), "-"]
            for name, each in results["pooling"].items()
        ]
    lines = tables.lay_out(["", "here", "paper"], body)
    lines += [f"left out: {each}" for each in results["left_out"]]
    lines.append("The paper's are of MATH500, Qwen2.5-Math-7B, 8 rollouts, spans of 100 tokens every 25.")
    if "fig_1a" in results and args.task == "embedded":
        lines.append(
            "Fig. 1(a) is not comparable: responses are all of one length, and continuations come from the policy that "
            "sampled, so mean success hardly moves with position."
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
