"""Evaluating a model on a benchmark: graded generations, and statistics of their scores.

    evaluate_benchmark(sampler, ...)  a row per generation, with its verdict
    finished_blocks(path, ...)        what an evaluation that continues need not repeat
    summarise(rows)                   one model on one benchmark: mean, error and shares
    paired_difference(rows, others)   two models' mean difference on problems that both answered
    average(results)                  one model's mean over benchmarks

**Protocol** (Sec. 5.2, App. J): temperature 0.1, no top-p, 3,000 tokens, templates and instruction
as in training. A truncated response scores 0, as in training. If prompt and limit exceed the
model's context, the problem is still asked, with a lower limit; each row has its own "limit".

**Order.** Problems are sampled in blocks. Random numbers depend only on (seed, benchmark, block)
and --generate-batch, not on earlier blocks or the number of processes. So finished blocks can be
kept when an evaluation continues. The default of --generate-batch is decided once per model, and
kept in settings.json.

**Numbers.** A row has "problem", "seed", "score" (1, 0, or None where it could not be graded) and
"reason".
  - avg@k averages first over the samples of a problem, then over problems. Its standard error is
    clustered, since samples of one problem are alike: the standard deviation of the problems'
    means, divided by the root of their number. Pooled samples would give an error too small by up
    to the root of k. The error includes the noise of sampling.
  - pass@k is the unbiased estimator 1 - C(n - c, k) / C(n, k), for c right samples of n.
  - Several seeds also give the mean and the standard deviation (ddof 1) of the seeds' own avg@k.
  - Samples that could not be graded are left out of all means and counted separately.

Left out: few-shot prompts, majority votes, OlympiadBench's tolerance (a single problem has one),
continuing within a block, bootstrap, corrections for multiple comparisons.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.special import comb
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo import hf_generate, rollout
from harness import files, fsdp, memory, models
from harness.config import Machine
from harness.eval_config import Protocol
from harness.models import stop_ids
from harness.run import Ranks
from rewards import Verdict
from tasks import toy
from tasks.benchmarks import Loaded
from tasks.errors import BadInput
from tasks.problems import Task, choose_template, digest_of, grader, text_task

KEY = itemgetter("model", "benchmark", "seed", "block")  # tells a row's block from the others


class Sampler(NamedTuple):
    """A model that answers, with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str  # where the model is
    generate_batch: int  # rollouts generated together
    generate: Callable[..., Tensor] = hf_generate


# ---- sampling and grading ------------------------------------------------------------------------


def evaluate_benchmark(
    sampler: Sampler,
    loaded: Loaded,
    protocol: Protocol,
    ranks: Ranks,
    path: Path,
    seeds: Sequence[int] = (0,),
    done: Collection[tuple] = (),
) -> list[dict]:
    """Sample and grade the blocks of one benchmark that are left; return their rows on every rank.

    Blocks in `done`, as `finished_blocks` returns them, are left out. Rank 0 appends the rows to
    the file `path` as they are made.
    """
    task = as_task(loaded, protocol, sampler.tokenizer, sampler.name)
    benchmark = loaded.benchmark.name
    blocks = blocks_of(loaded, protocol)
    todo = []
    for seed, number in itertools.product(seeds, range(len(blocks))):
        key = {"model": sampler.name, "benchmark": benchmark, "seed": seed, "block": number}
        if KEY(key) not in done:
            todo.append(key)
    rows = []
    # one block per rank
    for start in tqdm(range(0, len(todo), ranks.world), benchmark, leave=False, disable=None):
        own = []
        if start + ranks.rank < len(todo):
            key = todo[start + ranks.rank]
            state = np.random.SeedSequence([key["seed"], key["block"], *benchmark.encode()])
            torch.manual_seed(int(state.generate_state(1)[0]))
            graded = grade_block(sampler, task, loaded, blocks[key["block"]], protocol)
            own = [key | row for row in graded]
        new = fsdp.gather_items(own, ranks)
        if ranks.main:
            files.append_rows(path, new)
        rows += new
    return rows


def blocks_of(loaded: Loaded, protocol: Protocol) -> list[list[dict]]:
    """The problems in blocks of about `protocol.block` responses."""
    size = max(1, protocol.block // samples_of(loaded, protocol))
    return [loaded.problems[start : start + size] for start in range(0, len(loaded.problems), size)]


def samples_of(loaded: Loaded, protocol: Protocol) -> int:
    """How many responses each problem gets."""
    return protocol.samples or loaded.benchmark.k


def finished_blocks(path: Path, sets: list[Loaded], protocol: Protocol) -> set[tuple]:
    """Remove unfinished blocks from a file of generations; return the keys of those that are left.

    A key is (model, benchmark, seed, number of the block). Blocks of benchmarks that are not in
    `sets` count as finished. Raises BadInput.
    """
    if not path.exists():
        return set()
    sizes = {}  # rows of a whole block
    for loaded in sets:
        for number, block in enumerate(blocks_of(loaded, protocol)):
            sizes[loaded.benchmark.name, number] = len(block) * samples_of(loaded, protocol)
    rows = files.read_lines(path)
    finished = set()
    for key, count in Counter(map(KEY, rows)).items():
        _, benchmark, _, number = key
        if count == sizes.get((benchmark, number), count):
            finished.add(key)
    files.write_rows(path, [row for row in rows if KEY(row) in finished])
    return finished


def describe_set(loaded: Loaded, protocol: Protocol) -> dict:
    """A set's entry in settings.json, which must not change when an evaluation continues."""
    return {
        "k": samples_of(loaded, protocol),
        "limit": min(protocol.max_tokens, loaded.max_tokens),
        "problems": len(loaded.problems),
        "source": loaded.source,
        "digest": digest_of(loaded.problems),
        "revision": loaded.revision,
        "window": loaded.benchmark.window,
    }


def as_task(
    loaded: Loaded, protocol: Protocol, tokenizer: PreTrainedTokenizerBase, name: str
) -> Task:
    """The benchmark as a training task, with the same graders.

    Held-out problems of a run keep its grader. Prompts are in the template of the model at `name`.
    Raises BadInput if the embedded set is asked of a model that is not the embedded task's.
    """
    kind = loaded.benchmark.kind
    grade = grader(kind, protocol.grade_timeout or loaded.benchmark.timeout_s, protocol.sandbox)
    if kind != "embedded":
        task = text_task(kind, template_of(protocol, name, tokenizer), tokenizer, grade)
        return replace(loaded.task, prompt=task.prompt) if loaded.task else task
    lines = max((problem["problem"].count(";") for problem in loaded.problems), default=1)
    if len(tokenizer) != len(toy.symbols_of(lines)):
        raise BadInput(
            f"--bench embedded: {name} is not a model of the embedded task; give other benchmarks"
        )
    return Task(kind, [], [], lambda problem: problem["problem"], grade)


def template_of(protocol: Protocol, name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The template of the model at `name`; auto: its run's, as far as that says one."""
    template = protocol.template
    if template == "auto":
        template = files.run_of(name).get("template", template)
    return choose_template(template, files.origin_of(name), tokenizer)


def choose_batch_of_model(
    sampler: Sampler, sets: Sequence[Loaded], protocol: Protocol, machine: Machine
) -> int:
    """How many responses a model generates at a time by default, also with the longest prompt."""
    model, tokenizer, name, *_ = sampler
    prompts = []
    for loaded in sets:
        task = as_task(loaded, protocol, tokenizer, name)
        prompts.append(memory.longest_prompt(task, loaded.problems, tokenizer))
    room = memory.room_gb(model.device) - memory.gb_of(model)
    return memory.choose_batch(model.config, machine, room, max(prompts), protocol.max_tokens)


def grade_block(
    sampler: Sampler, task: Task, loaded: Loaded, problems: list[dict], protocol: Protocol
) -> list[dict]:
    """Graded responses to each problem of a block, in order.

    Problems with equal limits are sampled together. A problem with a "fault", such as unusable
    tests, gets no scores, even for truncated responses.
    """
    samples = samples_of(loaded, protocol)
    prompts = [task.prompt(problem) for problem in problems]
    by_limit = defaultdict(list)  # limit in tokens -> indices of problems
    for place, ids in enumerate(sampler.tokenizer(prompts, add_special_tokens=False)["input_ids"]):
        room = models.context_of(sampler.model) - len(ids)
        by_limit[max(0, int(min(protocol.max_tokens, loaded.max_tokens, room)))].append(place)
    rows: list[list[dict]] = [[] for _ in problems]
    for limit, places in sorted(by_limit.items()):
        # text, length and verdict of each response; at limit 0 the prompt alone fills the context
        answers: Iterable = [("", 0, Verdict(0.0, "truncated"))] * (len(places) * samples)
        if limit:
            rollouts = rollout(
                sampler.model,
                sampler.tokenizer,
                [prompts[place] for place in places],
                samples,
                max_tokens=limit,
                temperature=protocol.temperature,
                stops=stop_ids(sampler.model, sampler.tokenizer),
                batch_size=sampler.generate_batch,
                generate=sampler.generate,
            )
            verdicts = task.verdicts([problems[place] for place in places], rollouts)
            answers = zip(rollouts.texts, rollouts.mask.sum(1).tolist(), verdicts, strict=True)
        for number, (text, length, verdict) in enumerate(answers):
            place = places[number // samples]
            problem = problems[place]
            if "fault" in problem:
                verdict = Verdict(None, "infra_error")
            row = {
                "problem": problem["id"],
                "sample": number % samples,
                "score": verdict.reward,
                "reason": verdict.reason,
                "tokens": length,
                "limit": limit,
                "response": text,
            }
            rows[place].append(row)
    return list(itertools.chain.from_iterable(rows))


# ---- estimators ----------------------------------------------------------------------------------


def scores_by_problem(rows: list[dict]) -> pd.Series:
    """Problem -> the mean score of its samples, without those that could not be graded."""
    table = pd.DataFrame(rows).astype({"score": float})  # NaN for None
    return table.groupby("problem")["score"].mean().dropna()


def pass_at_k(right: pd.Series, samples: pd.Series, k: int) -> pd.Series:
    """By problem, the chance that k samples drawn without replacement include a right one."""
    return 1 - pd.Series(comb(samples - right, k) / comb(samples, k))


def summarise(rows: list[dict], passes: Sequence[int] = ()) -> dict:
    """Statistics of one model on one benchmark, for tables.

    `passes` are the k of pass@k, each over the problems with at least k samples.
    """
    scores = scores_by_problem(rows)
    graded = pd.DataFrame(rows).dropna(subset="score").astype({"score": float})
    result = {
        "mean": scores.mean(),
        "error": scores.sem(),
        "problems": len(scores),
        "samples": len(graded),
        "right": graded["score"].sum(),
        "infra_errors": len(rows) - len(graded),
        "truncated": (graded["reason"] == "truncated").mean(),
        "no_answer": (graded["reason"] == "no_answer").mean(),
    }
    counts = graded.groupby("problem")["score"].agg(right="sum", samples="count")
    for k in passes:
        enough = counts[counts["samples"] >= k]
        chances = pass_at_k(enough["right"], enough["samples"], k)
        result[f"pass@{k}"] = chances.mean()
        result[f"pass@{k} error"] = chances.sem()
    # avg@k of each seed: the mean over problems of the mean over a problem's samples
    by_seed = graded.groupby(["seed", "problem"])["score"].mean().groupby("seed").mean()
    if len(by_seed) > 1:
        result["seeds"] = by_seed.rename(index=str).to_dict()  # JSON's keys are text
        result["seed_mean"] = by_seed.mean()
        result["seed_std"] = by_seed.std()
    return result


def paired_difference(rows: list[dict], others: list[dict]) -> dict:
    """How much higher `others` score than `rows`, paired by problem, where both have scores."""
    gaps = (scores_by_problem(others) - scores_by_problem(rows)).dropna()
    return {"mean": gaps.mean(), "error": gaps.sem(), "problems": len(gaps)}


def average(results: dict[str, dict]) -> dict[str, float]:
    """The mean over benchmarks, weighted equally as in the paper, and its standard error.

    The error holds for independent sets. HumanEval and HumanEval+ ask the same problems, as do MBPP
    and MBPP+: on code the error is too small.
    """
    mean = float(np.mean([result["mean"] for result in results.values()]))
    variance = sum(result["error"] ** 2 for result in results.values())
    return {"mean": mean, "error": math.sqrt(variance) / len(results)}
