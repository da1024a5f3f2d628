"""Prefixes of rollouts: completed again and again, and far or near in hidden states (Sec. 2 of arXiv 2604.23318).

    collect(...)       -> a Group a problem: rollouts, verdicts, prefixes, verdicts on their continuations; on disk
    read(path, ...)    -> solutions from a file, as if they had been sampled
    scored(group, ...) -> the group as a `credit.Batch`, with hidden states
    distances_of, table_of -> each prefix's local distance; all prefixes as the table that `figures.py` takes

What makes it right, and is easy to get wrong:
  - A prefix is continued from its token ids: encoded again, a text cut between two tokens may become other tokens.
  - Continuations come from the policy, the temperature and the length limit (of the whole response) of the rollouts.
  - A prefix ends where a span does, so its last window of tokens is a span, and has that span's distance.
  - No prefix holds all of the reasoning before the answer's box, let alone the box: it would have nothing left to get
    right. (So on the embedded task none holds the last line, whose result is the answer.)
  - Random numbers depend on the seed and the group's number alone: a run that was cut goes on to the same groups.

Left out: the texts of continuations, of which only the verdicts are kept.
"""

import argparse
import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from credit.ablations import settings_of, span_distances
from credit.methods import Batch, Source
from credit.salience import answer_places
from grpo import Policy, Rollouts, cat_padded, pad_id, pad_left, rollout, score, stop_ids
from harness.checkpoint import write_whole
from harness.prepare import sampling_of
from harness.run import seed_of
from rewards import Verdict
from shear import span_bounds, two_sides
from tasks.problems import BadInput, Task
from train import as_batch

SPANS = ("group", "rollout", "right", "end", "distance", "success")  # columns of the table that figures take


@dataclass(frozen=True)
class Group:
    """The rollouts to one problem, with what was found out about their prefixes; what a file in `--out` holds."""

    problem: dict
    prompt: list[int]  # ids
    responses: list[list[int]]  # ids, as sampled
    texts: list[str]
    truncated: list[bool]
    scores: list[float | None]
    reasons: list[str]  # of the scores
    ends: list[list[int]]  # lengths of each rollout's prefixes
    continued: list[list[list[float | None]]]  # scores of each prefix's continuations; empty where none were made

    @property
    def verdicts(self) -> list[Verdict]:
        """Of each rollout."""
        return [Verdict(*each) for each in zip(self.scores, self.reasons, strict=True)]

    @property
    def mixed(self) -> bool:
        """Whether there is a right and a wrong rollout."""
        return {0.0, 1.0} <= set(self.scores)


# ---- solutions from a file ------------------------------------------------------------------------------------


def read(path: Path, graded: bool) -> list[list[dict]]:
    """The groups of a JSON-lines file, by problem; raises BadInput where none holds right and wrong solutions.

    Rows are {"problem", "solution", "label"}, label 0 or 1; with `graded` also "answer" (or "gold"), for continuations.
    """
    groups = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--rollouts {path}: cannot be read ({error}); give a UTF-8 JSON-lines file") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise BadInput(f"--rollouts {path}, line {number}: not an object of JSON ({error}); mend it") from error
        row["answer"] = row.get("answer", row.get("gold"))
        for name in ("problem", "solution", *["answer"] * graded):
            if not isinstance(row.get(name), str) or not row[name].strip():
                raise BadInput(f'--rollouts {path}, line {number}: "{name}" is not a text; give one')
        if row.get("label") not in (0, 1):
            raise BadInput(f'--rollouts {path}, line {number}: "label" is {row.get("label")!r}; give 0 or 1')
        groups.setdefault(row["problem"], []).append(row)
    if all(len({row["label"] for row in rows}) == 1 for rows in groups.values()):
        raise BadInput(f"--rollouts {path}: no problem has a right and a wrong solution; give another file")
    return list(groups.values())


# ---- sampling -------------------------------------------------------------------------------------------------


def collect(flags, args, task: Task, model, tokenizer, sources: list) -> list[Group]:
    """The groups, from `--out` where they are there, else made and saved one by one."""
    groups = []
    for number, source in enumerate(tqdm(sources, "groups", leave=False, disable=None)):
        path = flags.out / f"group-{number:04d}.json"
        if not path.exists():
            torch.manual_seed(seed_of(args.seed, number))
            make = given if flags.rollouts else sampled
            group = make(args, task, model, tokenizer, source)
            if group.mixed and flags.continuations:
                group = continued(group, flags.continuations, args, task, model, tokenizer)
            write_whole(path, json.dumps(dataclasses.asdict(group)) + "\n")
        try:
            groups.append(Group(**json.loads(path.read_text())))
        except (ValueError, TypeError) as error:
            raise BadInput(f"--out {flags.out}: {path.name} is damaged ({error}); delete it") from error
    return groups


def sampled(args, task: Task, model, tokenizer, problem: dict) -> Group:
    """G rollouts to a problem, graded."""
    rollouts = rollout(
        model, tokenizer, [task.prompt(problem)], args.group, max_tokens=args.max_tokens,
        temperature=args.temperature, **sampling_of(args, model),
    )  # fmt: skip
    return as_group(args, tokenizer, problem, rollouts, task.verdicts([problem], rollouts))


def given(args, task: Task, model, tokenizer, rows: list[dict]) -> Group:
    """Solutions that are there already, encoded once, as if they had been sampled."""
    problem = {name: rows[0][name] for name in ("problem", "answer")}
    prompt = tokenizer(task.prompt(problem), add_special_tokens=False)["input_ids"]
    texts = [row["solution"] for row in rows]
    responses = tokenizer(texts, add_special_tokens=False)["input_ids"]
    longest, context = len(prompt) + max(map(len, responses)), context_of(model)
    if longest > context:
        raise BadInput(f"--rollouts: one has {longest} tokens, the model's context is {context}; leave its problem out")
    rollouts = as_rollouts(prompt, responses, texts, [False] * len(rows), tokenizer, model.device)
    return as_group(args, tokenizer, problem, rollouts, [Verdict(float(row["label"]), "label") for row in rows])


def context_of(model) -> float:
    """The most tokens that a model takes."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf


def as_rollouts(prompt: list[int], responses: list[list[int]], texts, truncated, tokenizer, device) -> Rollouts:
    """Ids as padded tensors."""
    pad = pad_id(tokenizer)
    prompts = pad_left([prompt] * len(responses), pad, device)  # (B, P), (B, P)
    parts = [torch.tensor([ids], device=device) for ids in responses]
    mask = cat_padded([torch.ones_like(part, dtype=torch.bool) for part in parts])  # (B, T)
    return Rollouts(*prompts, cat_padded(parts, fill=pad), mask, torch.tensor(truncated, device=device), texts)


def as_group(args, tokenizer, problem: dict, rollouts: Rollouts, verdicts: list[Verdict]) -> Group:
    """Rollouts as plain lists, with the lengths of their prefixes."""
    responses = [row[inside].tolist() for row, inside in zip(rollouts.ids, rollouts.mask, strict=True)]
    reasoning = [answer.reasoning if answer else None for answer in answer_places(tokenizer, rollouts)]
    ends = [
        prefix_ends(len(ids), known, args.window, args.stride) for ids, known in zip(responses, reasoning, strict=True)
    ]
    prompt = rollouts.prompt_ids[0][rollouts.prompt_mask[0]].tolist()
    scores, reasons = [verdict.score for verdict in verdicts], [verdict.reason for verdict in verdicts]
    return Group(problem, prompt, responses, rollouts.texts, rollouts.truncated.tolist(), scores, reasons, ends, [])


def prefix_ends(length: int, reasoning: int | None, window: int, stride: int) -> list[int]:
    """Where the prefixes of a response end: with its spans (full ones, as none is its last), before its reasoning does.

    `reasoning` tokens come before the answer's box; without a box all of them but the last.
    """
    limit = length if reasoning is None else reasoning
    return [end for _, end in span_bounds(length, window, stride) if end < limit]


def continued(group: Group, count: int, args, task: Task, model, tokenizer) -> Group:
    """`count` completions of every prefix, graded: those of one length together, from the sampled ids.

    Raises BadInput for solutions from a file that the limits leave no room to complete.
    """
    longest, context = max(map(len, group.responses)), context_of(model)
    if longest > args.max_tokens:
        raise BadInput(f"--max-tokens {args.max_tokens}: a solution has {longest} tokens; raise it")
    if (asked := len(group.prompt)) + args.max_tokens > context:
        raise BadInput(
            f"--max-tokens {args.max_tokens}: with a prompt of {asked} tokens it exceeds the model's context "
            f"of {context}; lower it"
        )
    stops, verdicts = set(stop_ids(model, tokenizer)), [[[] for _ in ends] for ends in group.ends]
    for end in sorted({end for ends in group.ends for end in ends}):
        rows = [row for row, ends in enumerate(group.ends) if end in ends]
        prompts = [group.prompt + group.responses[row][:end] for row in rows]
        rollouts = rollout(
            model, tokenizer, prompts, count, max_tokens=args.max_tokens - end,
            temperature=args.temperature, **sampling_of(args, model),
        )  # fmt: skip
        whole = []
        for place, (ids, inside) in enumerate(zip(rollouts.ids, rollouts.mask, strict=True)):
            said = [id for id in ids[inside].tolist() if id not in stops]
            whole.append(tokenizer.decode(group.responses[rows[place // count]][:end] + said))
        graded = task.verdicts([group.problem] * len(rows), dataclasses.replace(rollouts, texts=whole))
        for place, row in enumerate(rows):
            scores = [verdict.score for verdict in graded[place * count : (place + 1) * count]]
            verdicts[row][group.ends[row].index(end)] = scores
    return dataclasses.replace(group, continued=verdicts)


# ---- hidden states and distances ------------------------------------------------------------------------------


def scored(group: Group, policy: Policy, task: Task, tokenizer, args, judge=None) -> Batch:
    """A group as credit methods see it, with hidden states."""
    parts = group.prompt, group.responses, group.texts, group.truncated
    rollouts = as_rollouts(*parts, tokenizer, policy.model.device)
    limits = dict(temperature=args.temperature, micro_tokens=args.micro_tokens)
    source = Source(policy, tokenizer, task, [group.problem], 0, args.steps, **limits, prm=judge)
    batch = as_batch(rollouts, group.verdicts, len(group.texts), source)
    return dataclasses.replace(batch, scored=score(policy, batch.rollouts, **limits))


def distances_of(batch: Batch, args: argparse.Namespace) -> list[list[float]]:
    """Of each rollout, each span's distance to the closest opposing one, in units of nbar."""
    settings, sizes = settings_of(args), (args.window, args.stride)
    sides = two_sides(batch.scored.hidden, batch.rollouts.mask, batch.correct, *sizes)
    rows = [[] for _ in range(batch.group_size)]
    for side, distances in zip(sides, span_distances(*sides, settings), strict=True):
        rest = iter(distances.tolist())
        for row, length in enumerate(side.inside.sum(1).tolist()):
            rows[row] = rows[row] or [next(rest) for _ in span_bounds(length, *sizes)]
    return rows


def table_of(groups: list[Group], distances: list[list[list[float]]]) -> dict[str, np.ndarray]:
    """A row a prefix, a column (n,) float64 each of SPANS; success is NaN without continuations."""
    rows, rollouts = [], 0
    for number, (group, found) in enumerate(zip(groups, distances, strict=True)):
        for row, (right, ends) in enumerate(zip(group.scores, group.ends, strict=True)):
            rollouts += 1
            for k, end in enumerate(ends if right is not None else []):
                known = [each for each in group.continued[row][k] if each is not None] if group.continued else []
                success = statistics.mean(known) if known else np.nan
                rows.append((number, rollouts, right, end, found[row][k], success))
    return dict(zip(SPANS, np.array(rows, dtype=float).reshape(-1, len(SPANS)).T, strict=True))
