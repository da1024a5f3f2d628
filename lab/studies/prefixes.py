"""Prefixes of rollouts, their continuations and their distances (Sec. 2 of arXiv 2604.23318).

    collect(...)            -> Prefixes of each problem with their continuations' verdicts, on disk
    sample_group(...)       -> Prefixes of one problem's rollouts, without continuations
    continue_prefixes(...)  -> the same Prefixes with their continuations' verdicts
    load_with_solutions(..) -> a run, and Prefixes of solutions from a file, without continuations
    score_group(...)        -> the group as a `Batch`, with hidden states
    span_table(...)         -> all prefixes with their local distances, which `figures.py` takes

What is easy to get wrong:
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

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from base import files
from base.config import Config, Shear
from base.errors import bad_input_on_error
from credit.batch import Batch, Context
from grpo import AT_ONCE, PADDED, Policy, Rollouts, cat_padded, decode, pad_left, rollout
from harness.fsdp import Ranks
from harness.models import load_model, load_tokenizer, round_weights, stop_ids
from harness.run import Hooks, Loaded, make_context, seed_of, template_of, use
from lab.studies.needs import graded
from lab.tools.salience import answer_places
from rewards import Verdict
from shear import span_bounds
from tasks.rows import read_rows
from tasks.task import Task, math_task

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
    ends: list[list[int]] = field(default_factory=list)  # lengths of each rollout's prefixes
    # scores by rollout, prefix and continuation; empty where no prefix was continued
    continued: list[list[list[float | None]]] = field(default_factory=list)

    @property
    def mixed(self) -> bool:
        """Whether there is a right and a wrong rollout."""
        return {0.0, 1.0} <= set(self.scores)


# ---- sampling ------------------------------------------------------------------------------------


def collect(run: Loaded, count: int, continuations: int, folder: Path) -> list[Prefixes]:
    """The groups of the first `count` held-out problems, with their continuations' verdicts.

    They are read from the folder; those that are not there are made and saved one by one.
    Raises BadInput for a damaged file.
    """
    groups = []
    problems = run.context.task.heldout[:count]
    for number, problem in enumerate(tqdm(problems, "groups", leave=False, disable=None)):
        path = folder / f"group-{number:04d}.json"
        if not path.exists():
            torch.manual_seed(seed_of(run.config.seed, number))
            group = sample_group(run, problem)
            if group.mixed and continuations:
                group = continue_prefixes(run, group, continuations)
            files.write_rows(path, [asdict(group)])
        groups.append(Prefixes(**files.read_json(path)))
    return groups


def sample_group(run: Loaded, problem: dict) -> Prefixes:
    """G rollouts to a problem, graded."""
    count = run.config.rollouts_per_prompt
    rollouts = sample(run, [run.context.task.prompt(problem)], count)
    verdicts = run.context.task.verdicts([problem], rollouts)
    group = Prefixes(
        problem=problem,
        prompt=rollouts.prompt_ids[0][rollouts.prompt_mask[0]].tolist(),
        responses=[ids[rollouts.mask[row]].tolist() for row, ids in enumerate(rollouts.ids)],
        texts=rollouts.texts,
        truncated=rollouts.truncated.tolist(),
        scores=[verdict.reward for verdict in verdicts],
        reasons=[verdict.reason for verdict in verdicts],
    )
    return with_ends(group, run.config, run.context.tokenizer)


def sample(run: Loaded, prompts: Sequence, count: int, used: int = 0) -> Rollouts:
    """`count` rollouts to each prompt, of which `used` tokens of the response are there already."""
    return rollout(
        run.context.policy.model,
        run.context.tokenizer,
        prompts,
        count,
        max_tokens=run.config.max_tokens - used,
        temperature=run.config.temperature,
        stops=run.stops,
        batch_tokens=run.batch_tokens,
        generate=run.hooks.generate,
    )


def as_rollouts(group: Prefixes, device: torch.device) -> Rollouts:
    """A group's rollouts as padded tensors."""
    prompts = [group.prompt] * len(group.responses)
    prompt_ids, prompt_mask = pad_left(prompts, 0, device)  # (B, P), (B, P)
    rows = [torch.tensor([ids], device=device) for ids in group.responses]
    ids = cat_padded(rows)  # (B, T)
    mask = cat_padded([torch.ones_like(row, dtype=torch.bool) for row in rows])  # (B, T)
    truncated = torch.tensor(group.truncated, device=device)  # (B,)
    return Rollouts(prompt_ids, prompt_mask, ids, mask, truncated, group.texts)


def as_batch(group: Prefixes, device: torch.device) -> Batch:
    """A group as a batch; its responses have no stop token, as if they had been cut."""
    rollouts = as_rollouts(replace(group, truncated=[True] * len(group.texts)), device)
    return graded(rollouts, list(map(Verdict, group.scores, group.reasons)), [group.problem])


def with_ends(group: Prefixes, shear: Shear, tokenizer: PreTrainedTokenizerBase) -> Prefixes:
    """The group with the lengths of its prefixes.

    A prefix ends where a full span within the reasoning does.
    """
    answers = answer_places(tokenizer, as_rollouts(group, torch.device("cpu")))
    ends = []
    for row, ids in enumerate(group.responses):
        # without a box: all tokens but the last
        reasoning = answers[row].reasoning if row in answers else len(ids)
        spans = span_bounds(len(ids), shear.window, shear.stride)
        ends.append([end for _, end in spans if end < reasoning])
    return replace(group, ends=ends)


def continue_prefixes(run: Loaded, group: Prefixes, count: int) -> Prefixes:
    """Complete every prefix `count` times from its sampled ids, and grade the completions.

    Prefixes of one length are continued together.
    """
    stops = run.stops
    scores: list[list[list[float | None]]] = [[] for _ in group.ends]
    # ascending, as each rollout's own ends, so that its scores are appended in their order
    for end in sorted(set(itertools.chain.from_iterable(group.ends))):
        rows = [row for row, ends in enumerate(group.ends) if end in ends]
        prefixes = [group.responses[row][:end] for row in rows]
        rollouts = sample(run, [group.prompt + prefix for prefix in prefixes], count, used=end)
        texts = []
        for place, ids in enumerate(rollouts.ids):
            continuation = [id for id in ids[rollouts.mask[place]].tolist() if id not in stops]
            texts.append(decode(run.context.tokenizer, prefixes[place // count] + continuation))
        problems = [group.problem] * len(rows)
        verdicts = run.context.task.verdicts(problems, replace(rollouts, texts=texts))
        for place, row in enumerate(rows):
            own = verdicts[place * count : (place + 1) * count]
            scores[row].append([verdict.reward for verdict in own])
    return replace(group, continued=scores)


def load_with_solutions(file: str, config: Config, ranks: Ranks) -> tuple[Loaded, list[Prefixes]]:
    """A run with the model of `--model` and no problems, and the groups of `--rollouts`."""
    name = config.model
    assert name  # --rollouts is of task math, which needs --model
    tokenizer = load_tokenizer("--model", name)
    config = replace(config, template=template_of(config.template, name, tokenizer))
    task, _ = math_task(config, tokenizer, name, problems=[])
    groups = read_solutions(file, config, task, tokenizer)
    model = load_model(name, ranks.device, tokenizer).eval()
    round_weights(model, getattr(torch, config.dtype))
    hooks = Hooks()
    use(hooks, config.use)
    context = make_context(config, Policy(model), tokenizer, task, hooks.shear)
    return Loaded(config, ranks, context, hooks, stop_ids(model, tokenizer), AT_ONCE, []), groups


def read_solutions(
    file: str, shear: Shear, task: Task, tokenizer: PreTrainedTokenizerBase
) -> list[Prefixes]:
    """The solutions of `--rollouts`, encoded once: a group per problem, without continuations.

    A line of the file is {"problem", "solution", "label"}, label 0 or 1. Raises BadInput.
    """
    remedy = 'give JSON lines with "problem", "solution" and "label", 0 or 1'
    rows_of: dict[str, list[dict]] = {}
    groups = []
    with bad_input_on_error(f"--rollouts {file}", remedy):
        for row in read_rows(Path(file)):
            rows_of.setdefault(row["problem"], []).append(row)
        for text, rows in rows_of.items():
            problem = {"problem": text, task.reference: rows[0].get("answer")}
            solutions = [row["solution"] for row in rows]
            group = Prefixes(
                problem=problem,
                prompt=tokenizer(task.prompt(problem), add_special_tokens=False)["input_ids"],
                responses=tokenizer(solutions, add_special_tokens=False)["input_ids"],
                texts=solutions,
                truncated=[False] * len(rows),
                scores=[{0: 0.0, 1: 1.0}[row["label"]] for row in rows],
                reasons=["label"] * len(rows),
            )
            groups.append(with_ends(group, shear, tokenizer))
    return groups


# ---- hidden states and distances -----------------------------------------------------------------


def context_at_start(run: Loaded) -> Context:
    """What a credit method may use before the first step."""
    model = run.context.policy.model
    layout = run.hooks.layout(model) if run.hooks.layout else PADDED
    return replace(run.context, policy=Policy(model, layout=layout))


def score_group(group: Prefixes, context: Context) -> Batch:
    """A group as credit methods see it, with the policy's hidden states."""
    rollouts = as_rollouts(group, context.policy.model.device)
    verdicts = list(map(Verdict, group.scores, group.reasons))
    batch = graded(rollouts, verdicts, [group.problem])
    batch.log_probs, batch.entropies, batch.hidden = context.score(batch.rollouts)
    return batch


def span_table(groups: list[Prefixes], closest: list) -> pd.DataFrame:
    """A row per prefix of a graded rollout, with the float64 columns SPANS of `figures.py`.

    "success" is NaN without continuations. `closest` has the groups' closest spans.
    """
    rows = []
    rollout = 0
    for group, spans in zip(groups, closest, strict=True):
        for row, right in enumerate(group.scores):
            rollout += 1
            if right is None:
                continue
            for number, end in enumerate(group.ends[row]):
                scores = group.continued[row][number] if group.continued else []
                success = pd.Series(scores, dtype=float).mean()  # without None; NaN for no scores
                rows.append((rollout, number, right, end, spans[row][number].distance, success))
    return pd.DataFrame(rows, columns=SPANS, dtype=float)
