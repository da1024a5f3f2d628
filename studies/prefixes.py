"""Prefixes of rollouts, their continuations and their distances (Sec. 2 of arXiv 2604.23318).

    collect(...)         -> Prefixes of each problem with their continuations' verdicts, on disk
    read_solutions(...)  -> Prefixes of solutions from a file, without continuations
    score_group(...)     -> the group as a `Batch`, with hidden states
    span_table(...)      -> all prefixes with their local distances, which `figures.py` takes

What makes it right, and is easy to get wrong:
  - A prefix is continued from its token ids: encoded again, a text cut between two tokens may
    become other tokens.
  - Continuations come from the policy, the temperature and the length limit (of the whole response)
    of the rollouts.
  - A prefix ends where a span does, so its last window of tokens is a span, and has that span's
    distance.
  - No prefix holds all of the reasoning before the answer's box, let alone the box: nothing would
    be left to get right. (So on the embedded task no prefix holds the last line, whose result is
    the answer.)
  - Random numbers depend on the seed and the group's number alone: a run that was cut continues
    with the same groups.

Left out: the texts of continuations; only their verdicts are kept.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from credit.batch import Batch, Context
from credit.salience import answer_places
from credit.settings import Shear
from credit.shear_settings import ClosestSpan
from fast.packing import packing_of
from fast.rollout import fast_rollout
from grpo import (
    Policy,
    Rollouts,
    cat_padded,
    decode,
    pad_id,
    pad_left,
    score,
    stop_ids,
)
from harness import files
from harness.prepare import Parts
from harness.run import credit_context, seed_of
from rewards import Verdict
from shear import span_bounds
from tasks.problems import Task, is_text
from tasks.rows import BadInput, bad_input_on_error, read_rows

SPANS = "rollout", "number", "right", "end", "distance", "success"  # columns of `span_table`


@dataclass(frozen=True)
class Prefixes:
    """The rollouts to one problem and their prefixes; what a file in `--out` holds."""

    problem: dict
    prompt: list[int]  # ids
    responses: list[list[int]]  # ids, as sampled
    texts: list[str]
    truncated: list[bool]
    scores: list[float | None]
    reasons: list[str]  # of the scores
    ends: list[list[int]]  # lengths of each rollout's prefixes
    continued: list[list[list[float | None]]]  # scores per prefix; empty where none were made

    @property
    def mixed(self) -> bool:
        """Whether there is a right and a wrong rollout."""
        return {0.0, 1.0} <= set(self.scores)


# ---- sampling ------------------------------------------------------------------------------------


def collect(parts: Parts, count: int, continuations: int, out: Path) -> list[Prefixes]:
    """The groups of the first `count` held-out problems, with their continuations' verdicts.

    They are read from the folder `out`; those that lack there are made and saved one by one. Raises
    BadInput for a damaged file.
    """
    groups = []
    problems = parts.task.heldout[:count]
    for number, problem in enumerate(tqdm(problems, "groups", leave=False, disable=None)):
        path = out / f"group-{number:04d}.json"
        if not path.exists():
            torch.manual_seed(seed_of(parts.config.seed, number))
            group = sample_group(parts, problem)
            if group.mixed and continuations:
                group = continue_prefixes(parts, group, continuations)
            files.write_whole(path, files.as_json(dataclasses.asdict(group)))
        groups.append(Prefixes(**files.read_settings(path)))
    return groups


def sample_group(parts: Parts, problem: dict) -> Prefixes:
    """G rollouts to a problem, graded."""
    config = parts.config
    rollouts = fast_rollout(
        parts.model,
        parts.tokenizer,
        [parts.task.prompt(problem)],
        config.sampling.rollouts_per_prompt,
        max_tokens=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        generate_batch=config.machine.generate_batch,
    )
    verdicts = parts.task.verdicts([problem], rollouts)
    return as_group(config.shear, parts.tokenizer, problem, rollouts, verdicts)


def as_rollouts(
    prompt: list[int],
    responses: list[list[int]],
    texts: list[str],
    truncated: list[bool],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> Rollouts:
    """Ids as padded tensors."""
    pad = pad_id(tokenizer)
    prompt_ids, prompt_mask = pad_left([prompt] * len(responses), pad, device)  # (B, P), (B, P)
    rows = [torch.tensor([ids], device=device) for ids in responses]
    ids = cat_padded(rows, fill=pad)  # (B, T)
    mask = cat_padded([torch.ones_like(row, dtype=torch.bool) for row in rows])  # (B, T)
    return Rollouts(
        prompt_ids, prompt_mask, ids, mask, torch.tensor(truncated, device=device), texts
    )


def as_group(
    shear: Shear,
    tokenizer: PreTrainedTokenizerBase,
    problem: dict,
    rollouts: Rollouts,
    verdicts: list[Verdict],
) -> Prefixes:
    """Rollouts as plain lists, with the lengths of their prefixes.

    A prefix ends where a full span within the reasoning does.
    """
    responses = []
    ends = []
    answers = answer_places(tokenizer, rollouts)
    for row, mask in enumerate(rollouts.mask):
        ids = rollouts.ids[row][mask].tolist()
        # without a box: all tokens but the last
        reasoning = answers[row].reasoning if row in answers else len(ids)
        spans = span_bounds(len(ids), shear.window, shear.stride)
        responses.append(ids)
        ends.append([end for _, end in spans if end < reasoning])
    return Prefixes(
        problem=problem,
        prompt=rollouts.prompt_ids[0][rollouts.prompt_mask[0]].tolist(),
        responses=responses,
        texts=rollouts.texts,
        truncated=rollouts.truncated.tolist(),
        scores=[verdict.reward for verdict in verdicts],
        reasons=[verdict.reason for verdict in verdicts],
        ends=ends,
        continued=[],
    )


def continue_prefixes(parts: Parts, group: Prefixes, count: int) -> Prefixes:
    """Complete every prefix `count` times from its sampled ids, and grade the completions.

    Prefixes of one length are continued together.
    """
    config = parts.config
    stops = stop_ids(parts.model, parts.tokenizer)
    scores: list[list[list[float | None]]] = [[] for _ in group.ends]
    lengths = sorted(set(itertools.chain.from_iterable(group.ends)))  # as each rollout's ascend
    for end in lengths:
        rows = [row for row, ends in enumerate(group.ends) if end in ends]
        prefixes = [group.responses[row][:end] for row in rows]
        prompts = [group.prompt + prefix for prefix in prefixes]
        rollouts = fast_rollout(
            parts.model,
            parts.tokenizer,
            prompts,
            count,
            max_tokens=config.sampling.max_tokens - end,
            temperature=config.sampling.temperature,
            generate_batch=config.machine.generate_batch,
        )
        texts = []
        for place, ids in enumerate(rollouts.ids):
            continuation = [id for id in ids[rollouts.mask[place]].tolist() if id not in stops]
            texts.append(decode(parts.tokenizer, prefixes[place // count] + continuation))
        verdicts = parts.task.verdicts(
            [group.problem] * len(rows), dataclasses.replace(rollouts, texts=texts)
        )
        for place, row in enumerate(rows):
            own = verdicts[place * count : (place + 1) * count]
            scores[row].append([verdict.reward for verdict in own])
    return dataclasses.replace(group, continued=scores)


# ---- solutions from a file -----------------------------------------------------------------------


def read_solutions(
    file: str, shear: Shear, task: Task, tokenizer: PreTrainedTokenizerBase, context: float
) -> list[Prefixes]:
    """The solutions of `--rollouts`, encoded once: a group per problem, without continuations.

    A line of the file is {"problem", "solution", "label"}, label 0 or 1. Raises BadInput for one
    that is not, and for solutions that do not fit the model's `context`.
    """
    blame = f"--rollouts {file}"
    by_problem: dict[str, list[dict]] = {}
    with bad_input_on_error(blame, "give JSON lines"):
        table = read_rows(Path(file))
    for number, row in enumerate(table, 1):
        texts = is_text(row.get("problem")) and is_text(row.get("solution"))
        if not texts or row.get("label") not in (0, 1):
            needs = 'needs "problem" and "solution", both text, and "label", 0 or 1'
            raise BadInput(f"{blame}, row {number}: {needs}; give these")
        by_problem.setdefault(row["problem"], []).append(row)
    groups = []
    for text, rows in by_problem.items():
        problem = {"problem": text, task.reference: rows[0].get("answer")}
        prompt = tokenizer(task.prompt(problem), add_special_tokens=False)["input_ids"]
        solutions = [row["solution"] for row in rows]
        responses = tokenizer(solutions, add_special_tokens=False)["input_ids"]
        needed = len(prompt) + max(map(len, responses))
        if needed > context:
            size = f"a problem and its solutions need {needed} tokens"
            raise BadInput(f"{blame}: {size}, the model's context is {context}; leave it out")
        truncated = [False] * len(rows)
        device = torch.device("cpu")
        rollouts = as_rollouts(prompt, responses, solutions, truncated, tokenizer, device)
        verdicts = [Verdict(float(row["label"]), "label") for row in rows]
        groups.append(as_group(shear, tokenizer, problem, rollouts, verdicts))
    return groups


# ---- hidden states and distances -----------------------------------------------------------------


def context_at_start(parts: Parts) -> Context:
    """What a credit method may use before the first step."""
    policy = Policy(parts.model, layout=packing_of(parts.model))
    return credit_context(parts.config, policy, parts.tokenizer, parts.task, 0, parts.prm)


def score_group(group: Prefixes, context: Context) -> Batch:
    """A group as credit methods see it, with the policy's hidden states."""
    device = context.policy.model.device
    rollouts = as_rollouts(
        group.prompt, group.responses, group.texts, group.truncated, context.tokenizer, device
    )
    verdicts = list(map(Verdict, group.scores, group.reasons))
    batch = Batch.of(rollouts, verdicts, [group.problem])
    batch.log_probs, batch.entropies, batch.hidden = score(
        context.policy,
        batch.rollouts,
        temperature=context.temperature,
        micro_tokens=context.micro_tokens,
    )
    return batch


@contextmanager
def up_to(layer: int, model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model ends after that many decoder layers; its final norm stays."""
    base = model.base_model
    layers = base.layers
    assert isinstance(layers, torch.nn.ModuleList)
    base.layers = layers[:layer]
    try:
        yield
    finally:
        base.layers = layers


def span_table(groups: list[Prefixes], closest: list[list[list[ClosestSpan]]]) -> pd.DataFrame:
    """A row per prefix with the float64 columns SPANS.

    Success is NaN without continuations. `closest` has the spans of each group's rollouts.
    """
    rows = []
    rollouts = 0
    for number, group in enumerate(groups):
        for row, right in enumerate(group.scores):
            rollouts += 1
            if right is None:
                continue
            for k, end in enumerate(group.ends[row]):
                scores = group.continued[row][k] if group.continued else []
                graded = [score for score in scores if score is not None]
                success = statistics.mean(graded) if graded else np.nan
                rows.append((rollouts, k, right, end, closest[number][row][k].distance, success))
    return pd.DataFrame(rows, columns=SPANS, dtype=float)
