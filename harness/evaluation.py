"""Evaluating a model on the sets of `tasks/benchmarks.py`.

    evaluate(model, tokenizer, loaded, Protocol(), ranks, name="..")  # a row a generation, with its verdict

**Protocol** (Sec. 5.2, App. J): temperature 0.1, no top-p, 3,000 tokens, templates and instruction as in training.
A response that is cut off scores 0, as in training. Where prompt and limit exceed the model's context, the limit of
that problem is lower (each row says its own); it is not left out.

**Order.** Problems go in blocks, and random numbers depend on (seed, benchmark, block) alone: not on what ran
before, and not on the number of processes, which take the blocks in turn. So whole blocks are what is kept.

Left out: few-shot prompts, majority votes, OlympiadBench's tolerance (one row has one), half-finished blocks.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from grpo import rollout
from harness import parallel, tables
from harness.parallel import Ranks
from rewards import Verdict, grade_code, grade_math
from tasks import toy
from tasks.benchmarks import Loaded
from tasks.problems import INSTRUCTIONS, BadInput, Task, choose_template, render


@dataclass(frozen=True)
class Protocol:
    """How responses are sampled and graded; the defaults are the paper's."""

    temperature: float = 0.1  # 0: greedy
    max_tokens: int = 3000
    samples: int = 0  # a problem; 0: the benchmark's k
    template: str = "auto"
    block: int = 128  # responses that are sampled, graded and kept together
    grade_timeout: float | None = None  # None: the benchmark's
    sandbox: str = "auto"


def evaluate(
    model,
    tokenizer,
    loaded: Loaded,
    protocol: Protocol,
    ranks: Ranks,
    *,
    name: str,
    seeds: Sequence[int] = (0,),
    sampling: dict | None = None,
    done: Iterable[dict] = (),
    write: Callable[[list[dict]], None] | None = None,
) -> list[dict]:
    """Generations with their verdicts, on every rank: those of the blocks in `done`, and the others, made now.

    `name` is the model's, for its template; `sampling` is what `prepare.sampling_of` returns. `write` gets the rows
    of some blocks as soon as they are made, on rank 0.
    """
    task, context = as_task(loaded, protocol, tokenizer, name), context_of(model)
    samples = samples_of(loaded, protocol)
    blocks, rows = blocks_of(loaded, protocol), list(done)
    have = {(row["seed"], row["block"]) for row in rows}
    todo = [(seed, number) for seed in seeds for number in range(len(blocks)) if (seed, number) not in have]
    total = len(loaded.problems) * samples * len(seeds)
    with tqdm(
        total=total, initial=len(rows), desc=loaded.benchmark.name, unit="response", leave=False, disable=None
    ) as bar:
        for start in range(0, len(todo), ranks.world):
            made = []
            if start + ranks.rank < len(todo):
                seed, number = todo[start + ranks.rank]
                torch.manual_seed(block_seed(seed, loaded.benchmark.name, number))
                limits = dict(samples=samples, context=context, sampling=sampling or {})
                made = attempt(model, tokenizer, task, blocks[number], protocol, loaded.max_tokens, **limits)
                made = [{"benchmark": loaded.benchmark.name, "seed": seed, "block": number, **row} for row in made]
            made = [row for part in parallel.gather(made, ranks) for row in part]
            if write and ranks.main:
                write(made)
            rows += made
            bar.update(len(made))
            bar.set_postfix_str("score " + tables.percent(*tables.avg_at_k(rows)))
    return rows


def evaluate_all(
    model,
    tokenizer,
    sets: list[Loaded],
    protocol: Protocol,
    ranks: Ranks,
    *,
    name: str,
    seed: int,
    sampling: dict,
    path: Path,
) -> dict[str, dict]:
    """The numbers of a table on each of several sets; generations go to the file `path`, which is begun anew."""
    if ranks.main:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)

    def write(rows: list[dict]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    results = {}
    for loaded in sets:
        options = dict(name=name, seeds=[seed], sampling=sampling, write=write)
        rows = evaluate(model, tokenizer, loaded, protocol, ranks, **options)
        about = {"revision": loaded.revision, "window": loaded.window}
        results[loaded.benchmark.name] = {**tables.summarise(rows), **about}
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
    text = json.dumps([[p["id"], p["problem"], p.get("answer", p.get("tests"))] for p in loaded.problems])
    return {
        "k": samples_of(loaded, protocol),
        "limit": min(protocol.max_tokens, loaded.max_tokens),
        "problems": len(loaded.problems),
        "source": loaded.source,
        "digest": hashlib.sha256(text.encode()).hexdigest()[:12],
        "revision": loaded.revision,
        "window": loaded.window,
    }


def block_seed(seed: int, name: str, block: int) -> int:
    """Of a block's random numbers."""
    return int(np.random.SeedSequence([seed, block, *name.encode()]).generate_state(1)[0])


def as_task(loaded: Loaded, protocol: Protocol, tokenizer, name: str) -> Task:
    """The benchmark as training sees problems: prompts, and verdicts by the same graders."""
    kind, options = loaded.benchmark.kind, {"timeout_s": protocol.grade_timeout or loaded.benchmark.timeout_s}
    if kind == "code":
        grade, reference = partial(grade_code, level=protocol.sandbox, **options), "tests"
    else:
        grade, reference = partial(grade_math, **options), "answer"
    if kind == "embedded":
        if len(tokenizer) != len(toy.SYMBOLS):
            raise BadInput(f"--bench embedded: {name} is not a model of the embedded task; give other benchmarks")
        return Task(kind, [], loaded.problems, lambda problem: problem["problem"], grade)
    template = choose_template(protocol.template, name, tokenizer)
    prompt = lambda problem: render(template, problem["problem"], INSTRUCTIONS[kind], tokenizer)  # noqa: E731
    return Task(kind, [], loaded.problems, prompt, grade, reference)


def context_of(model) -> float:
    """Tokens of prompt and response that the model was made for."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf


def attempt(
    model, tokenizer, task: Task, problems: list[dict], protocol: Protocol, most: float, *, samples, context, sampling
) -> list[dict]:
    """`samples` graded responses to each problem of a block."""
    lengths = [len(ids) for ids in tokenizer(list(map(task.prompt, problems)), add_special_tokens=False)["input_ids"]]
    limits = [int(min(protocol.max_tokens, most, context - length)) for length in lengths]
    rows = []
    for limit, group in itertools.groupby(sorted(zip(limits, problems, strict=True), key=itemgetter(0)), itemgetter(0)):
        group = [problem for _, problem in group]
        if limit < 1:  # the prompt alone fills the context
            full = Verdict(0.0, "truncated")
            rows += [row_of(problem, s, "", full, 0, 0) for problem in group for s in range(samples)]
            continue
        prompts = [task.prompt(problem) for problem in group]
        options = dict(max_tokens=limit, temperature=protocol.temperature, **sampling)
        rollouts = rollout(model, tokenizer, prompts, samples, **options)
        verdicts, tokens = task.verdicts(group, rollouts), rollouts.mask.sum(1).tolist()
        for place, text in enumerate(rollouts.texts):
            rows.append(row_of(group[place // samples], place % samples, text, verdicts[place], tokens[place], limit))
    order = {problem["id"]: place for place, problem in enumerate(problems)}
    return sorted(rows, key=lambda row: order[row["problem"]])


def row_of(problem: dict, sample: int, text: str, verdict: Verdict, tokens: int, limit: int) -> dict:
    """A generation, for a file; without a verdict where the problem has no tests, even if it was cut off."""
    verdict = Verdict(None, "infra_error") if problem.get("fault") else verdict
    return {
        "problem": problem["id"],
        "sample": sample,
        "score": verdict.score,
        "reason": verdict.reason,
        "tokens": tokens,
        "limit": limit,
        "response": text,
    }
