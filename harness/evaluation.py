"""Evaluating a model on the sets of `tasks/benchmarks.py`.

    evaluate(sampler, loaded, Protocol(), ranks)  # a row a generation, with its verdict

**Protocol** (Sec. 5.2, App. J): temperature 0.1, no top-p, 3,000 tokens, templates and instruction as in training.
A response that is cut off scores 0, as in training. Where prompt and limit exceed the model's context, the limit of
that problem is lower (each row says its own); it is not left out.

**Order.** Problems go in blocks, and random numbers depend on (seed, benchmark, block) alone: not on what ran
before, and not on the number of processes, which take the blocks in turn. So whole blocks are what is kept.

Left out: few-shot prompts, majority votes, OlympiadBench's tolerance (one row has one), half-finished blocks.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from grpo import rollout
from harness import parallel, tables
from harness.config import Protocol
from harness.folders import append
from harness.parallel import Ranks
from rewards import Verdict
from tasks import toy
from tasks.benchmarks import Loaded
from tasks.problems import BadInput, Task, choose_template, digest_of, grader, text_task


class Sampler(NamedTuple):
    """Who answers, and how fast: what is evaluated."""

    model: torch.nn.Module
    tokenizer: object
    name: str  # of the model, which tells its template
    options: dict  # of `grpo.rollout`, as `prepare.sampling_of` returns them


def evaluate(
    sampler: Sampler,
    loaded: Loaded,
    protocol: Protocol,
    ranks: Ranks,
    *,
    seeds: Sequence[int] = (0,),
    done: Iterable[dict] = (),
    write: Callable[[list[dict]], None] | None = None,
) -> list[dict]:
    """Generations with their verdicts, on every rank: those of the blocks in `done`, and the others, made now.

    `write` gets the rows of some blocks as soon as they are made, on rank 0.
    """
    task = as_task(loaded, protocol, sampler.tokenizer, sampler.name)
    benchmark, blocks, rows = loaded.benchmark.name, blocks_of(loaded, protocol), list(done)
    have = {(row["seed"], row["block"]) for row in rows}
    wanted = itertools.product(seeds, range(len(blocks)))
    todo = [place for place in wanted if place not in have]
    total = len(loaded.problems) * samples_of(loaded, protocol) * len(seeds)
    bar = tqdm(total=total, initial=len(rows), desc=benchmark, unit="response", leave=False, disable=None)
    with bar:
        for start in range(0, len(todo), ranks.world):  # a block a rank
            made = []
            if start + ranks.rank < len(todo):
                seed, number = todo[start + ranks.rank]
                state = np.random.SeedSequence([seed, number, *benchmark.encode()])
                torch.manual_seed(int(state.generate_state(1)[0]))
                for row in graded_block(sampler, task, loaded, blocks[number], protocol):
                    made.append({"benchmark": benchmark, "seed": seed, "block": number, **row})
            made = parallel.gather_items(made, ranks)
            if write and ranks.main:
                write(made)
            rows += made
            bar.update(len(made))
            bar.set_postfix_str("score " + tables.percent(*tables.avg_at_k(rows)))
    return rows


def evaluate_all(
    sampler: Sampler, sets: list[Loaded], protocol: Protocol, ranks: Ranks, *, seed: int, path: Path
) -> dict[str, dict]:
    """The numbers of a table on each of several sets; generations go to the file `path`, which is begun anew."""
    if ranks.main:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    results = {}
    for loaded in sets:
        rows = evaluate(sampler, loaded, protocol, ranks, seeds=[seed], write=partial(append, path))
        source = {"revision": loaded.revision, "window": loaded.window}
        results[loaded.benchmark.name] = {**tables.summarise(rows), **source}
    return results


def blocks_of(loaded: Loaded, protocol: Protocol) -> list[list[dict]]:
    """The problems, as many together as make about `block` responses."""
    size = max(1, protocol.block // samples_of(loaded, protocol))
    return [loaded.problems[start : start + size] for start in range(0, len(loaded.problems), size)]


def samples_of(loaded: Loaded, protocol: Protocol) -> int:
    """Responses to a problem."""
    return protocol.samples or loaded.benchmark.k


def about(loaded: Loaded, protocol: Protocol) -> dict:
    """What settings.json says of a set, and what must not change."""
    return {
        "k": samples_of(loaded, protocol),
        "limit": min(protocol.max_tokens, loaded.max_tokens),
        "problems": len(loaded.problems),
        "source": loaded.source,
        "digest": digest_of(loaded.problems),
        "revision": loaded.revision,
        "window": loaded.window,
    }


def as_task(loaded: Loaded, protocol: Protocol, tokenizer, name: str) -> Task:
    """The benchmark as training sees problems: prompts, and verdicts by the same graders. Raises BadInput.

    The template is that of the model `name`.
    """
    kind = loaded.benchmark.kind
    timeout_s = protocol.grade_timeout or loaded.benchmark.timeout_s
    grade = grader(kind, timeout_s, protocol.sandbox)
    if kind == "embedded":
        if len(tokenizer) != len(toy.SYMBOLS):
            remedy = f"{name} is not a model of the embedded task; give other benchmarks"
            raise BadInput(f"--bench embedded: {remedy}")
        return Task(kind, [], [], lambda problem: problem["problem"], grade)
    template = choose_template(protocol.template, name, tokenizer)
    return text_task(kind, template, tokenizer, grade)


def context_of(model) -> float:
    """Tokens of prompt and response that the model was made for."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf


def graded_block(sampler: Sampler, task: Task, loaded: Loaded, problems: list[dict], protocol: Protocol) -> list[dict]:
    """Graded responses to each problem of a block, in order; problems with one length limit are sampled together."""
    samples = samples_of(loaded, protocol)
    encoded = sampler.tokenizer([task.prompt(problem) for problem in problems], add_special_tokens=False)["input_ids"]
    by_limit = {}  # tokens of a response -> places of problems
    for place, ids in enumerate(encoded):
        room = context_of(sampler.model) - len(ids)
        limit = max(0, int(min(protocol.max_tokens, loaded.max_tokens, room)))
        by_limit.setdefault(limit, []).append(place)
    rows = [[] for _ in problems]
    for limit, places in sorted(by_limit.items()):
        together = [problems[place] for place in places]
        count = len(places) * samples
        texts, lengths, verdicts = [""] * count, [0] * count, [Verdict(0.0, "truncated")] * count
        if limit:  # else the prompt alone fills the context
            prompts = [task.prompt(problem) for problem in together]
            options = dict(max_tokens=limit, temperature=protocol.temperature, **sampler.options)
            rollouts = rollout(sampler.model, sampler.tokenizer, prompts, samples, **options)
            texts, lengths = rollouts.texts, rollouts.mask.sum(1).tolist()
            verdicts = task.verdicts(together, rollouts)
        for number, text in enumerate(texts):
            place = places[number // samples]
            generation = problems[place], number % samples, text, verdicts[number], lengths[number], limit
            rows[place].append(row_of(*generation))
    return [row for of_problem in rows for row in of_problem]


def row_of(problem: dict, sample: int, text: str, verdict: Verdict, tokens: int, limit: int) -> dict:
    """A generation, for a file; without a verdict where the problem has no tests, even if it was cut off."""
    verdict = Verdict(None, "infra_error") if problem.get("fault") else verdict
    return {
        "problem": problem["id"],
        "sample": sample,
        "score": verdict.reward,
        "reason": verdict.reason,
        "tokens": tokens,
        "limit": limit,
        "response": text,
    }
