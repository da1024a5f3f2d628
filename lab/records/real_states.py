"""SHEAR's weights on the states of pretrained models: the tables of lab/records/real-states.md.

    python -m lab.tools.weights qwen2.5-coder-0.5b models/qwen2.5-coder-0.5b
    python -m lab.records.real_states published models/qwen2.5-coder-0.5b rollouts.jsonl
    python -m lab.records.real_states own models/qwen2.5-coder-0.5b problems.jsonl 6
    python -m lab.records.real_states      # real-states.jsonl -> the tables

`published` reads solutions that were published, a line each: "group", "problem", "solution",
"label" (1 if right). `own` samples 8 responses to each of the first problems of levels 1 to 3 of
which a line has "id", "problem", "answer", "level"; the last word is their number. Rows are added to
real-states.jsonl as they are made, and what is there is not made again. A row is a group: its nbar,
the weights by each eps, and, at the default eps, what solvers need on pairs of its spans.

Seconds are of the process's CPU time. Of the solvers, the race finds the minima of the whole group
from its finished costs. The others solve a sample of pairs of full spans; their seconds are scaled
to all pairs. Errors are relative, against float64 to a marginal error of 1e-7.

Left out: groups without right and wrong responses, whose row has no weights.
"""

from lab.records.help import show_help

show_help(__doc__)

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo import Rollouts, rollout, to_padded
from harness import files, log, models
from lab.fast.distances import token_distances
from lab.fast.generate import fast_generate
from lab.fast.packing import packing_of
from lab.fast.race import race
from lab.studies import bench
from shear import EPS, STRIDE, WINDOW, mean_norm, shear_weights, two_sides
from sinkhorn import sinkhorn
from tasks.rows import read_rows
from tasks.task import Task, choose_template, grader, text_task

ROWS = Path(__file__).with_name("real-states.jsonl")
SETTINGS = [(0.01, "nbar"), (0.03, "nbar"), (EPS, "nbar"), (0.08, "nbar"), (4.52, "raw")]
PAPER_EARLY = 0.67  # mean distances of (A1), in the first quarter of a response and in the last
PAPER_LATE = 0.75
CUT = 700  # tokens of a published solution
LEVELS = (1, 2, 3)
SAMPLING = {"max_tokens": 384, "temperature": 1.0}
GROUP_SIZE = 8
# Pairs of a group that solvers get; a loop over pairs and the reference get fewer.
SAMPLED = 208
LOOPED = 24
CHECKED = 8


# ---- rollouts ------------------------------------------------------------------------------------


def published_groups(path: Path, task: Task, tokenizer) -> Iterator[tuple[dict, Callable]]:
    """For each mixed group of solutions: the beginning of its row, and what makes its rollouts."""
    table = pd.DataFrame(read_rows(path))
    for group, rows in table.groupby("group"):
        right = int(rows["label"].sum())
        if not 0 < right < len(rows):
            continue
        about = {"group": int(group), "level": int(str(rows["level"].iloc[0])[-1])}
        prompt = task.prompt({"problem": rows["problem"].iloc[0]})

        def make(rows=rows, prompt=prompt) -> tuple[Rollouts, Tensor]:
            texts = rows["solution"].tolist()
            return as_rollouts(prompt, texts, tokenizer), torch.tensor(rows["label"].tolist()) > 0

        yield about, make


def as_rollouts(prompt: str, responses: list[str], tokenizer) -> Rollouts:
    """Responses to one prompt, of at most `CUT` tokens each, as if they had been sampled."""
    encoded = tokenizer(responses, add_special_tokens=False)["input_ids"]
    rows = [torch.tensor(ids[:CUT]) for ids in encoded]
    ids = pad_sequence(rows, batch_first=True)  # (G, T)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).bool()  # (G, T)
    prompt_ids = torch.tensor(tokenizer(prompt)["input_ids"]).expand(len(rows), -1)  # (G, P)
    prompt_mask = torch.ones_like(prompt_ids, dtype=torch.bool)  # (G, P)
    truncated = torch.tensor([len(ids) > CUT for ids in encoded])  # (G,)
    return Rollouts(prompt_ids, prompt_mask, ids, mask, truncated, responses)


def own_groups(
    path: Path, count: int, task: Task, model, tokenizer
) -> Iterator[tuple[dict, Callable]]:
    """The same for the first problems of the levels, to which the model responds."""
    wanted = [row for row in read_rows(path) if row["level"] in LEVELS]
    for problem in wanted[:count]:

        def make(problem=problem) -> tuple[Rollouts, Tensor]:
            torch.manual_seed(problem["id"])
            rollouts = rollout(
                model,
                tokenizer,
                [task.prompt(problem)],
                GROUP_SIZE,
                stops=models.stop_ids(model, tokenizer),
                generate=fast_generate,
                **SAMPLING,
            )
            verdicts = task.verdicts([problem], rollouts)
            return rollouts, torch.tensor([verdict.score == 1 for verdict in verdicts])

        yield {"group": problem["id"], "level": problem["level"]}, make


@torch.no_grad()
def states_of(model, rollouts: Rollouts) -> Tensor:
    """The last hidden states (G, T, d) of the responses' tokens; the prompt is read once."""
    ids, is_response, model_kwargs = packing_of(model).lay_out(rollouts)
    output = model.base_model(input_ids=ids, use_cache=False, **model_kwargs)
    return to_padded(output.last_hidden_state[is_response], rollouts.mask)


# ---- a group's row -------------------------------------------------------------------------------


def quarters_of(omega: Tensor, mask: Tensor) -> Tensor:
    """The mean weight of each quarter of each response: omega and mask (G, T) -> (G, 4)."""
    lengths = mask.sum(1, keepdim=True)  # (G, 1)
    quarter = 4 * torch.arange(mask.shape[1]) // lengths  # (G, T)
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
        "quarters": quarters.mean(0).tolist(),
        "quarters_right": quarters[correct].mean(0).tolist(),
        "quarters_wrong": quarters[~correct].mean(0).tolist(),
        "mean": omega[mask].mean().item(),
        "spread": torch.stack(spreads).mean().item(),
        "p10": low,
        "p90": high,
    }


def timed(solve: Callable) -> tuple:
    """What a call returns, and its seconds of CPU time."""
    began = time.process_time()
    result = solve()
    return result, time.process_time() - began


def weigh(hidden: Tensor, mask: Tensor, correct: Tensor) -> dict:
    """The row of a group of states (G, T, d): weights by every eps, and the solvers' work."""
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
        weights.append(row | weights_row(weighed.omega, mask, correct))
    solvers = solvers_row(costs / nbar, right, wrong)
    return {"nbar": nbar, "weights": weights, "solvers": solvers}


def solvers_row(costs: Tensor, right, wrong) -> dict:
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
    row["pot_batch_s"] = pot_s * total / len(k)
    row["pot_solve_s"] = loop_s * total / len(few.costs)
    row["iterations"] = iterations.mean().item()
    row["stopped_at_100"] = (iterations == 100).float().mean().item()
    row["marginal_error"] = error.max().item()
    row["value_error"] = (values[:CHECKED] / truth - 1).abs().max().item()
    row["pot_batch_error"] = (of_pot[:CHECKED] / truth - 1).abs().max().item()
    return row


def make_rows(source: str, name: str, path: Path, count: int) -> None:
    """Add a row for each group that has none; a group's states exist while it is weighed."""
    done = [(row["source"], row["model"], row["group"]) for row in rows_so_far()]
    tokenizer = models.load_tokenizer("--model", name)
    model = models.load_model(name, torch.device("cpu"), tokenizer)
    template = choose_template("auto", name, tokenizer)
    task = text_task("math", template, tokenizer, grader("math", None, "auto"))
    if source == "own":
        groups = own_groups(path, count, task, model, tokenizer)
    else:
        groups = published_groups(path, task, tokenizer)
    for about, make in groups:
        key = (source, Path(name).name, about["group"])
        if key in done:
            continue
        (rollouts, correct), sample_s = timed(make)
        row = {"source": source, "model": key[1], **about, "right": int(correct.sum())}
        row["tokens"] = rollouts.mask.sum(1).tolist()
        row["truncated"] = int(rollouts.truncated.sum())
        row["sample_s"] = sample_s
        if 0 < row["right"] < len(correct):
            hidden, row["states_s"] = timed(lambda: states_of(model, rollouts))
            row |= weigh(hidden, rollouts.mask, correct)
        files.append_rows(ROWS, [row])
        print(*key, row["right"], row.get("nbar"), flush=True)


def rows_so_far() -> list[dict]:
    """The rows that there are."""
    return files.read_lines(ROWS) if ROWS.exists() else []


if sys.argv[1:]:
    source, name, path, *count = sys.argv[1:]
    make_rows(source, name, Path(path), int(count[0]) if count else 0)
