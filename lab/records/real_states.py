"""SHEAR's weights on the states of pretrained models: the tables of lab/records/real-states.md.

    python -m lab.tools.weights qwen2.5-coder-0.5b models/qwen2.5-coder-0.5b
    python -m lab.records.real_states published models/qwen2.5-coder-0.5b rollouts.jsonl
    python -m lab.records.real_states solutions problems.jsonl evals/NAME own.jsonl
    python -m lab.records.real_states own models/qwen2.5-coder-0.5b own.jsonl
    python -m lab.records.real_states verdicts evals/NAME evals/OTHER
    python -m lab.records.real_states      # real-states.jsonl -> the tables

A line of rollouts.jsonl is a solution: "group", "level", "problem", "solution", "label" (1 if
right). `solutions` writes such lines of the model's own responses, which eval.py sampled to the
problems of a file. `verdicts` keeps the verdicts of such folders in own-verdicts.jsonl, and nothing
else. Rows are added to real-states.jsonl as they are made, and what is there is not made again. A
row is a group: its nbar, the weights by each eps, the wording that right and wrong responses share,
and, at the default eps, what solvers need on pairs of its spans.

Seconds are of one thread's CPU time. Of the solvers, the race finds the minima of the whole group
from its finished costs. The others solve a sample of pairs of full spans; their seconds are scaled
to all pairs. Errors are relative, against float64 to a marginal error of 1e-7.

Left out: groups without right and wrong responses, whose row has no weights; the stop token of a
response.
"""

from lab.records.help import show_help

show_help(__doc__)

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from credit.batch import Context
from credit.settings import Shear
from eval import GENERATIONS
from grpo import Policy, Rollouts, to_padded, token_ids
from harness import files, log, models
from lab.fast.distances import token_distances
from lab.fast.packing import packing_of
from lab.fast.race import race
from lab.studies import bench
from lab.studies.advantages import half_width
from lab.studies.energy import quarter_of
from lab.studies.gradients import table_line
from shear import EPS, STRIDE, WINDOW, Side, mean_norm, shear_weights, span_bounds, two_sides
from sinkhorn import sinkhorn
from tasks.rows import read_rows
from tasks.task import choose_template, grader, text_task

ROWS = Path(__file__).with_name("real-states.jsonl")
ENERGY = Path(__file__).with_name("own-energy.jsonl")  # of lab.studies.energy
GRADIENTS = Path(__file__).with_name("own-gradients.jsonl")  # of lab.studies.gradients
VERDICTS = Path(__file__).with_name("own-verdicts.jsonl")
SETTINGS = [(0.01, "nbar"), (0.03, "nbar"), (EPS, "nbar"), (0.08, "nbar"), (4.52, "raw")]
PAPER_EARLY = 0.67  # mean distances of (A1), in the first quarter of a response and in the last
PAPER_LATE = 0.75
CUT = 700  # tokens of a response
RUN = 8  # tokens of a run of words that two responses may share
# Pairs of a group that solvers get; a loop over pairs and the reference get fewer.
SAMPLED = 156
LOOPED = 16
CHECKED = 4
# Of a group: the solvers beside the race, and the columns of their seconds, iterations and errors.
OTHERS = {
    "every pair, `sinkhorn`": ("sinkhorn_s", "iterations", "value_error"),
    "POT `ot.batch.solve_batch`, 50 iterations": ("pot_batch_s", None, "pot_batch_error"),
    "POT `ot.solve`, a loop": ("pot_solve_s", None, None),
}


# ---- rollouts ------------------------------------------------------------------------------------


class Group(NamedTuple):
    """A problem and its responses."""

    number: int
    level: int
    problem: dict
    responses: list[str]
    labels: list[int]  # 1 if right
    truncated: list[int]  # 1 if the response was cut by whoever sampled it

    @property
    def mixed(self) -> bool:
        """Whether there are right and wrong responses."""
        return 0 < sum(self.labels) < len(self.labels)


def groups_in(path: Path) -> list[Group]:
    """The groups of a file of solutions, the shortest first."""
    groups = []
    for number, rows in pd.DataFrame(read_rows(path)).groupby("group"):
        group = Group(
            number=int(number),
            level=int(rows["level"].iloc[0][-1]),  # "Level 3"
            problem={"problem": rows["problem"].iloc[0]},
            responses=rows["solution"].tolist(),
            labels=rows["label"].tolist(),
            truncated=rows["truncated"].tolist() if "truncated" in rows else [0] * len(rows),
        )
        groups.append(group)
    return sorted(groups, key=lambda group: len("".join(group.responses)))


def write_solutions(problems: Path, folder: Path, path: Path) -> None:
    """Write the responses in eval.py's folder, to the problems of a file, as lines of solutions."""
    asked = list(read_rows(problems))
    lines = []
    for row in files.read_lines(folder / GENERATIONS):
        place = int(row["problem"].partition(" ")[0]) - 1  # "1 ID" is the first problem
        problem = asked[place]
        line = {
            "group": problem["id"],
            "level": f"Level {problem['level']}",
            "problem": problem["problem"],
            "solution": row["response"],
            "label": int(row["score"] == 1),
            "truncated": int(row["reason"] == "truncated"),
        }
        lines.append(line)
    files.write_rows(path, lines)


def write_verdicts(folders: list[Path]) -> None:
    """Write the verdicts of the responses in eval.py's folders, without the responses."""
    kept = []
    for folder in folders:
        for row in files.read_lines(folder / GENERATIONS):
            verdict = {
                "set": row["set"],
                "model": Path(row["model"]).name,
                "problem": row["problem"].partition(" ")[2],  # its id
                "sample": row["sample"],
                "reason": row["reason"],
                "tokens": row["tokens"],
            }
            kept.append(verdict)
    files.write_rows(VERDICTS, kept)


def as_rollouts(prompt: str, responses: list[str], tokenizer: PreTrainedTokenizerBase) -> Rollouts:
    """Responses to one prompt, of at most `CUT` tokens each, as if they had been sampled."""
    encoded = tokenizer(responses, add_special_tokens=False)["input_ids"]
    rows = [torch.tensor(ids[:CUT]) for ids in encoded]
    ids = pad_sequence(rows, batch_first=True)  # (G, T)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).bool()  # (G, T)
    prompt_ids = torch.tensor(token_ids(tokenizer, [prompt])).expand(len(rows), -1)  # (G, P)
    prompt_mask = torch.ones_like(prompt_ids, dtype=torch.bool)  # (G, P)
    truncated = torch.tensor([len(ids) > CUT for ids in encoded])  # (G,)
    return Rollouts(prompt_ids, prompt_mask, ids, mask, truncated, responses)


@torch.no_grad()
def states_of(policy: Policy, rollouts: Rollouts) -> Tensor:
    """The last hidden states (G, T, d) of the responses' tokens; the prompt is read once."""
    ids, is_response, model_kwargs = policy.layout.lay_out(rollouts)
    output = policy.model.base_model(input_ids=ids, use_cache=False, **model_kwargs)
    return to_padded(output.last_hidden_state[is_response], rollouts.mask)


# ---- a group's row -------------------------------------------------------------------------------


def quarters_of(omega: Tensor, mask: Tensor) -> Tensor:
    """The mean weight of each quarter of each response: omega and mask (G, T) -> (G, 4)."""
    quarter = quarter_of(mask)  # (G, T)
    means = []
    for number in range(4):
        own = mask & (quarter == number)  # (G, T)
        means.append((omega * own).sum(1) / own.sum(1))
    return torch.stack(means, 1)


def weights_row(omega: Tensor, mask: Tensor, correct: Tensor) -> dict:
    """How the weights (G, T) of a group lie: by quarter, and their spread."""
    quarters = quarters_of(omega, mask)  # (G, 4)
    spreads = [(omega[row][own].std() / omega[row][own].mean()) for row, own in enumerate(mask)]
    low, high = omega[mask].quantile(torch.tensor([0.1, 0.9])).tolist()
    return {
        "quarters": quarters.nanmean(0).tolist(),  # NaN in a response of fewer than four tokens
        "quarters_right": quarters[correct].nanmean(0).tolist(),
        "quarters_wrong": quarters[~correct].nanmean(0).tolist(),
        "mean": omega[mask].mean().item(),
        "spread": torch.stack(spreads).nanmean().item(),
        "p10": low,
        "p90": high,
    }


def shared_runs(responses: list[list[int]], labels: list[int]) -> list[Tensor]:
    """Which runs of `RUN` tokens a response with the other verdict has, too.

    Each response has a tensor (R,) bool, of the runs by their first token.
    """
    runs = []
    of_side: dict[int, set] = {0: set(), 1: set()}
    for ids, label in zip(responses, labels, strict=True):
        runs.append([tuple(ids[start : start + RUN]) for start in range(len(ids) - RUN + 1)])
        of_side[label].update(runs[-1])
    shared = []
    for own, label in zip(runs, labels, strict=True):
        shared.append(torch.tensor([run in of_side[1 - label] for run in own], dtype=torch.bool))
    return shared


def shared_by_quarter(shared: list[Tensor]) -> list[float]:
    """The share of shared runs among those that start in each quarter, a mean over responses."""
    shares = []
    for is_shared in shared:  # (R,)
        quarter = 4 * torch.arange(len(is_shared)) // max(1, len(is_shared))  # (R,)
        own = [is_shared[quarter == number].float().mean().item() for number in range(4)]
        shares.append(own)
    return pd.DataFrame(shares).mean().tolist()  # without NaN, of a quarter without runs


def weights_of_wording(shared: list[Tensor], mask: Tensor) -> Tensor:
    """SHEAR's weights with words in place of states: no model is asked; mask (G, T) -> (G, T).

    A span's distance is the share of its tokens that are in no shared run. A token has the largest
    distance of its spans, as in Eq. (6).
    """
    weights = torch.zeros(mask.shape)  # (G, T)
    for row, is_shared in enumerate(shared):
        is_new = torch.ones(mask.shape[1])  # (T,)
        for start in is_shared.nonzero().flatten().tolist():
            is_new[start : start + RUN] = 0.0
        for start, end in span_bounds(int(mask[row].sum()), WINDOW, STRIDE):
            of_span = weights[row, start:end]  # a view
            of_span.clamp_min_(is_new[start:end].mean())
    return weights


def timed(solve: Callable) -> tuple:
    """What a call returns, and its seconds of CPU time."""
    began = time.process_time()
    result = solve()
    return result, time.process_time() - began


def weigh(hidden: Tensor, mask: Tensor, correct: Tensor, wording: Tensor) -> dict:
    """The row of a group of states (G, T, d): weights by every eps, and the solvers' work.

    `wording` (G, T) has other weights, whose rank correlation with each is taken.
    """
    sides = two_sides(hidden, mask, correct, WINDOW, STRIDE)
    assert sides is not None  # the group is mixed
    right, wrong = sides
    costs = token_distances(right.states, wrong.states)  # (N+, N-)
    nbar = mean_norm(hidden[mask])
    weights = []
    for eps, unit in SETTINGS:
        weighed = shear_weights(
            hidden,
            mask,
            correct,
            eps=eps,
            eps_unit=unit,
            distances=lambda *_: costs,
            closest=race,
        )
        row = {"eps": eps, "unit": unit, "eps_over_nbar": eps if unit == "nbar" else eps / nbar}
        row |= weights_row(weighed.omega, mask, correct)
        row["wording"] = stats.spearmanr(weighed.omega[mask], wording[mask]).statistic
        weights.append(row)
    solvers = solvers_row(costs / nbar, right, wrong)
    return {"nbar": nbar, "weights": weights, "solvers": solvers}


def solvers_row(costs: Tensor, right: Side, wrong: Side) -> dict:
    """Iterations, errors and seconds at the default eps; costs (N+, N-) are in units of nbar."""
    raced, race_s = timed(lambda: race(costs, right, wrong, EPS))
    total = len(right.spans.mass) * len(wrong.spans.mass)
    row = {"pairs": total, "race_s": race_s}
    row["race_iterations"] = raced.iterations.float().mean().item()
    full = (right.spans.mass > 0).all(1)[:, None] & (wrong.spans.mass > 0).all(1)  # (K+, K-)
    places = full.nonzero()  # (pairs, 2)
    if len(places) < LOOPED:
        return row
    generator = torch.Generator().manual_seed(0)
    k, l = places[torch.randperm(len(places), generator=generator)[:SAMPLED]].unbind(1)  # noqa: E741
    blocks = costs[right.spans.tokens[k][:, :, None], wrong.spans.tokens[l][:, None]]  # (P, n, m)
    pairs = bench.Pairs(blocks, right.spans.mass[k], wrong.spans.mass[l])
    solved = []

    def plain(some: bench.Pairs) -> Tensor:
        """`sinkhorn`, whose iterations and errors are kept."""
        solved.append(sinkhorn(some.costs, some.a, some.b, eps=EPS))
        return solved[-1].value

    few = pairs.take(slice(LOOPED))
    values, plain_s = timed(lambda: bench.in_batches(plain, pairs))
    of_pot, pot_s = timed(lambda: bench.in_batches(bench.pot_batch, pairs))
    _, loop_s = timed(lambda: bench.one_by_one(bench.pot_solve, few))
    iterations = torch.cat([batch.iterations for batch in solved]).float()  # (P,)
    error = torch.cat([batch.error for batch in solved])  # (P,)
    truth = bench.true_values(pairs.take(slice(CHECKED)))
    row["sinkhorn_s"] = plain_s * total / len(k)
    row["iterations"] = iterations.mean().item()
    row["stopped_at_100"] = (iterations == 100).float().mean().item()
    row["marginal_error"] = error.max().item()
    row["value_error"] = (values[:CHECKED] / truth - 1).abs().max().item()
    row["pot_batch_s"] = pot_s * total / len(k)
    row["pot_batch_error"] = (of_pot[:CHECKED] / truth - 1).abs().max().item()
    row["pot_solve_s"] = loop_s * total / len(few.costs)
    return row


def load(name: str) -> Context:
    """The model of a folder, with what sampling, grading and scoring need."""
    tokenizer = models.load_tokenizer("--model", name)
    model = models.load_model(name, torch.device("cpu"), tokenizer)
    template = choose_template("auto", name, tokenizer)
    task = text_task("math", template, tokenizer, grader("math", None, "auto"))
    return Context(
        Policy(model, packing_of(model)),
        tokenizer,
        task,
        Shear(),
        seed=0,
        temperature=1.0,
        micro_tokens=4096,
    )


def make_rows(source: str, name: str, groups: list[Group]) -> None:
    """Add a row for each group that has none."""
    torch.set_num_threads(1)  # CPU time adds up the threads, waiting ones included
    model = Path(name).name
    done = {(row["source"], row["model"], row["group"]) for row in rows_so_far()}
    context = load(name)
    for group in groups:
        if (source, model, group.number) in done:
            continue
        prompt = context.task.prompt(group.problem)
        rollouts = as_rollouts(prompt, group.responses, context.tokenizer)
        correct = torch.tensor(group.labels) > 0  # (G,)
        row: dict = {"source": source, "model": model, "group": group.number}
        row["level"] = group.level
        row["right"] = int(correct.sum())
        row["tokens"] = rollouts.mask.sum(1).tolist()
        is_cut = rollouts.truncated | torch.tensor(group.truncated).bool()  # (G,)
        row["truncated"] = int(is_cut.sum())
        if group.mixed:
            ids = [
                ids[mask].tolist() for ids, mask in zip(rollouts.ids, rollouts.mask, strict=True)
            ]
            shared = shared_runs(ids, group.labels)
            row["shared"] = shared_by_quarter(shared)
            hidden = states_of(context.policy, rollouts)  # (G, T, d)
            row |= weigh(hidden, rollouts.mask, correct, weights_of_wording(shared, rollouts.mask))
        files.append_rows(ROWS, [row])
        print(source, model, group.number, row["right"], row.get("nbar"), flush=True)


def rows_so_far() -> list[dict]:
    """The rows that there are."""
    return files.read_lines(ROWS) if ROWS.exists() else []


# ---- tables --------------------------------------------------------------------------------------


def with_range(values: pd.Series, form: str = ".2f") -> str:
    """The mean of values over groups, and their lowest and highest."""
    return f"{values.mean():{form}} ({values.min():{form}} to {values.max():{form}})"


def weights_table(groups: pd.DataFrame) -> list[dict]:
    """A line for each eps: weights by quarter of a response, and how they spread."""
    lines = []
    for place, (eps, unit) in enumerate(SETTINGS):
        weights = pd.DataFrame([row[place] for row in groups["weights"]])
        quarters = pd.DataFrame(weights["quarters"].tolist())
        over_nbar = weights["eps_over_nbar"]
        line = {"eps": f"{eps} {unit}"}
        line["eps / nbar"] = f"{over_nbar.mean():.3f}"
        line["floor"] = f"{over_nbar.mean() * math.log(WINDOW):.2f}"
        line["first quarter"] = with_range(quarters[0])
        line["second"] = f"{quarters[1].mean():.2f}"
        line["third"] = f"{quarters[2].mean():.2f}"
        line["last"] = with_range(quarters[3])
        line["last / first"] = f"{(quarters[3] / quarters[0]).mean():.2f}"
        line["spread"] = f"{weights['spread'].mean():.2f}"
        line["10% to 90%"] = f"{weights['p10'].mean():.2f} to {weights['p90'].mean():.2f}"
        lines.append(line)
    return lines


def eps_of(groups: pd.DataFrame, quarter: int, wanted: float) -> float:
    """The eps in units of nbar at which a quarter's mean weight is as wanted, interpolated."""
    curve = []
    for place in range(len(SETTINGS)):
        weights = pd.DataFrame([row[place] for row in groups["weights"]])
        quarters = pd.DataFrame(weights["quarters"].tolist())
        mean = quarters[quarter].mean()
        curve.append({"weight": mean, "eps": weights["eps_over_nbar"].mean()})
    points = pd.DataFrame(curve).sort_values("weight")
    eps = np.interp(wanted, points["weight"], points["eps"], left=math.nan, right=math.nan)
    return float(eps)


def solvers_table(solvers: pd.DataFrame) -> list[dict]:
    """A line for each solver: seconds over the race's in the same group, iterations, errors."""
    lines = [
        {
            "solver": "race",
            "seconds": f"{solvers['race_s'].mean():.2f}",
            "times the race": "1",
            "iterations": f"{solvers['race_iterations'].mean():.1f}",
        }
    ]
    for name, (seconds, iterations, error) in OTHERS.items():
        line = {"solver": name, "seconds": f"{solvers[seconds].mean():.1f}"}
        line["times the race"] = with_range(solvers[seconds] / solvers["race_s"], ".0f")
        if iterations:
            line["iterations"] = f"{solvers[iterations].mean():.0f}"
        if error:
            line["largest error"] = f"{solvers[error].max():.0e}"
        lines.append(line)
    return lines


def print_sides(groups: pd.DataFrame) -> None:
    """At the default eps: in how many groups weights rise, and the last quarter of each side."""
    default = SETTINGS.index((EPS, "nbar"))
    weights = pd.DataFrame([row[default] for row in groups["weights"]])
    quarters = pd.DataFrame(weights["quarters"].tolist())
    right = pd.DataFrame(weights["quarters_right"].tolist())[3]
    wrong = pd.DataFrame(weights["quarters_wrong"].tolist())[3]
    rising = (quarters[3] > quarters[0]).sum()
    print(f"the last quarter is above the first in {rising} of {len(groups)} groups")
    larger = f"larger in {(wrong > right).sum()} groups"
    print(
        f"last quarter of right ones {right.mean():.2f}, of wrong ones {wrong.mean():.2f}, {larger}"
    )


def print_shared(groups: pd.DataFrame) -> None:
    """How the default weights of quarters go with the words that both sides share."""
    default = SETTINGS.index((EPS, "nbar"))
    weights = pd.DataFrame([row[default]["quarters"] for row in groups["weights"]])
    shared = pd.DataFrame(groups["shared"].tolist())
    shares = ", ".join(f"{share:.0%}" for share in shared.mean())
    print(f"runs of {RUN} tokens that the other side has, too, by quarter: {shares}")
    of_all = stats.spearmanr(shared.to_numpy().ravel(), weights.to_numpy().ravel()).statistic
    of_each = [stats.spearmanr(shared[number], weights[number]).statistic for number in range(4)]
    each = ", ".join(f"{rank:.2f}" for rank in of_each)
    print(f"Spearman of share and weight: {of_all:.2f}; of one quarter each: {each}")
    ranks = pd.Series([row[default]["wording"] for row in groups["weights"]])
    print(f"of the tokens' weights and those of wording: {with_range(ranks)}")


def print_tables(source: str, model: str, rows: pd.DataFrame) -> None:
    """What the rows of a model say, as the record has it."""
    groups = rows[rows["weights"].notna()] if "weights" in rows else rows[:0]
    lengths = pd.Series([tokens for row in rows["tokens"] for tokens in row])
    responses = rows["tokens"].map(len).sum()
    print(f"\n{source}, {model}: {len(rows)} groups, {len(groups)} of them mixed")
    print(f"right {rows['right'].sum() / responses:.0%}, {lengths.mean():.0f} tokens on average")
    print(f"truncated {rows['truncated'].sum() / responses:.0%} of {responses} responses")
    if groups.empty:
        return
    print(f"nbar {with_range(groups['nbar'], '.0f')}")
    print("\n".join(log.markdown(weights_table(groups))))
    print_sides(groups)
    print_shared(groups)
    early = eps_of(groups, 0, PAPER_EARLY)
    late = eps_of(groups, 3, PAPER_LATE)
    if not math.isnan(early + late):  # else no eps that was tried is as small
        print(
            f"first quarter {PAPER_EARLY} at eps {early:.3f} nbar, last {PAPER_LATE} at {late:.3f}"
        )
    solvers = pd.DataFrame(groups["solvers"].tolist())
    if "iterations" not in solvers:  # no group had enough pairs of full spans
        return
    print("\n".join(log.markdown(solvers_table(solvers))))
    print(f"stopped at 100 iterations: {solvers['stopped_at_100'].mean():.0%} of pairs")
    print(f"largest marginal error {solvers['marginal_error'].max():.1e}")


def print_verdicts(name: str, model: str, rows: pd.DataFrame) -> None:
    """How many responses to a set of problems got which verdict."""
    problems = rows["problem"].nunique()
    print(f"\nverdicts, {name}, {model}: {len(rows)} responses to {problems} problems")
    lines = []
    for reason, count in rows["reason"].value_counts().items():
        tokens = rows.loc[rows["reason"] == reason, "tokens"].mean()
        line = {"verdict": reason, "responses": str(count), "share": f"{count / len(rows):.0%}"}
        lines.append(line | {"tokens": f"{tokens:.0f}"})
    print("\n".join(log.markdown(lines)))


def energy_table(rows: pd.DataFrame) -> list[dict]:
    """A line for each quarter: its share of the gradient's energy, and what weights make of it."""
    of_arm = {arm: own.set_index("part") for arm, own in rows.groupby("arm")}
    lines = []
    for part, row in of_arm["grpo"].iterrows():
        line = {"quarter": part, "tokens": f"{row['tokens']:.0f}", "energy": f"{row['energy']:.1f}"}
        line["share, %"] = f"{row['share']:.1f}"
        for arm in ("shear", "position"):
            own = of_arm[arm].loc[part]
            line[f"{arm}: weight"] = f"{own['weight']:.2f}"
            line[f"{arm}: share of w² n, %"] = f"{own['w2 share']:.1f}"
        lines.append(line)
    return lines


def print_all() -> None:
    """The tables of all rows, by source and model, then verdicts, energies and gradients."""
    table = pd.DataFrame(rows_so_far())
    for (source, model), rows in table.groupby(["source", "model"], sort=False):
        print_tables(source, model, rows)
    verdicts = pd.DataFrame(files.read_lines(VERDICTS))
    for (name, model), rows in verdicts.groupby(["set", "model"], sort=False):
        print_verdicts(name, model, rows)
    energies = pd.DataFrame(files.read_lines(ENERGY))
    print("\nenergy, own", *log.markdown(energy_table(energies)), sep="\n")
    arms = [table_line(row) for row in pd.read_json(GRADIENTS, lines=True).to_dict("records")]
    print("\ngradient test, own", *log.markdown(arms), sep="\n")
    batches = pd.read_json(GRADIENTS.with_suffix(".batches.jsonl"), lines=True)
    usual = batches.loc[batches["arm"] == "grpo", "cos"]
    print(f"cos of grpo {usual.mean():.3f} ± {half_width(usual):.3f}, of {len(usual)} batches")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["solutions", problems, folder, path]:
            write_solutions(Path(problems), Path(folder), Path(path))
        case ["published", name, path]:
            mixed = [group for group in groups_in(Path(path)) if group.mixed]
            make_rows("published", name, mixed)
        case ["own", name, path]:
            make_rows("own", name, groups_in(Path(path)))
        case ["verdicts", *folders]:
            write_verdicts([Path(folder) for folder in folders])
        case []:
            print_all()
        case words:
            sys.exit(f"{' '.join(words)}: not one of the commands above; see --help")
