"""Evaluate models on the paper's ten benchmarks, or on what a run of train.py held out.

    python eval.py --model runs/NAME                                   # its own held-out problems
    python eval.py --model Qwen/Qwen2.5-Math-7B --bench math           # the five sets of math
    python eval.py --model BASE runs/NAME --bench code                 # two models, side by side
    python eval.py --model runs/NAME/start runs/NAME                   # before and after training
    python eval.py --model PATH --bench math500 --data math500=FILE    # a local copy of a set
    python eval.py --model runs/A/checkpoints/*/model --bench math     # models of --keep-models
    python eval.py --from evals/NAME                                   # the saved table again

**Protocol** (App. J): temperature 0.1, 3,000 tokens, templates and instruction as in training; no
top-p, although Sec. 5.2 has one. A truncated response scores 0, as in training. If prompt and limit
exceed the model's context, the problem is still asked, with a lower limit, and a warning says so.

**Resuming.** `--out` gets generations.jsonl: every response and its verdict, a block of problems at
a time (`harness/generations.py`). The same command samples the blocks that the file lacks. Whatever
changes, a problem, a flag, or the model at its path, is sampled anew. Random numbers depend only on
(seed, set, block) and on how many responses are generated at a time, not on the number of
processes.

**Numbers.** avg@k averages first over the samples of a problem, then over problems. Its standard
error is clustered, since samples of one problem are alike: the standard deviation of the problems'
means, divided by the root of their number. Pooled samples would give an error too small by up to
the root of k. Gains are paired by problem. Responses that could not be graded are in no number.

Left out: serving engines (`python -m lab.tools.replay` grades their responses), pass@k and the
paper's numbers (`lab.tools.tables`), tensor parallelism, few-shot prompts, majority votes,
OlympiadBench's tolerance (a single problem has one), continuing within a block.
"""

import itertools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from base.config import (
    Machine,
    Sandbox,
    Template,
    Texts,
    check_bounds,
    end_on_mistakes,
    read_flags,
    refuse_twice,
)
from base.errors import BadInput, printable


@dataclass(frozen=True)
class EvalConfig(Machine):
    """Evaluate models on the paper's benchmarks; the defaults are its protocol."""

    # Hugging Face folders, hub ids, or runs of train.py, whose last model is evaluated.
    model: tuple[str, ...] = ()
    # heldout (what the model's run held out), math (aime24, aime25, amc23, math500, olympiadbench),
    # code (humaneval, humaneval+, mbpp, mbpp+, livecodebench), or some of these by name; default:
    # heldout for a run on other problems than the paper's, otherwise math.
    bench: tuple[str, ...] = ()
    data: tuple[str, ...] = ()  # NAME=FILE: a local file for a benchmark.
    # Folder for generations; default: evals/, then models and benchmarks by name.
    out: str | None = None
    # Instead of --model: print the table of the generations in this folder.
    saved: Annotated[str | None, tyro.conf.arg(name="from")] = None
    # MODULE[:NAME=VALUE,...], whose `use` replaces how responses are generated (repeatable).
    use: Texts = ()
    seeds: tuple[int, ...] = (0,)  # Seeds; the responses of all are averaged.
    temperature: float = 0.1  # Sampling temperature; 0: greedy.
    max_tokens: int = 3000  # Maximum response length in tokens.
    samples: int = 0  # Responses per problem; 0: the paper's k for the benchmark.
    # Prompt template, as in train.py; auto: for a model of a run that of the run.
    template: Template = "auto"
    block: int = 128  # Number of responses that are sampled, graded and saved together.
    # Time limit per response in seconds; default: the benchmark's.
    grade_timeout: float | None = None
    sandbox: Sandbox = "auto"  # Sandbox for generated programs.


def parse_eval(argv: Sequence[str] | None = None) -> EvalConfig:
    """The flags of an evaluation; raises BadInput."""
    words = sys.argv[1:] if argv is None else argv
    if argv is None:
        refuse_twice(words)
    config: EvalConfig = read_flags(EvalConfig, words, prog="python eval.py")
    check_bounds(config, "temperature samples ranks threads generate_batch".split())
    if bool(config.model) == bool(config.saved):
        raise BadInput("give --model or --from")
    return config


if __name__ == "__main__":
    end_on_mistakes(parse_eval)  # the imports below take seconds

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from base import files
from grpo import HIDE_BAR, hf_generate, rollout, token_ids
from harness import fsdp, models
from harness.command import run_command
from harness.fsdp import Ranks
from harness.generations import (
    GENERATIONS,
    KEY,
    finished,
    identity_of,
    key_of,
    newest,
    read_generations,
)
from harness.log import markdown, mean_and_error, percent
from harness.run import Hooks, task_of_run, template_of, use
from rewards import Verdict
from tasks.benchmarks import EvalSet, load_sets
from tasks.reward import digest_of_reward
from tasks.task import Task, digest_of, grader, text_task


@run_command
def main(argv: list[str] | None = None) -> int | None:
    """Run the command."""
    config = parse_eval(argv)
    if config.saved:
        print_table(newest(read_generations(Path(config.saved))))
        return None
    config = fsdp.on_machine(config)
    if fsdp.processes(config) > 1:
        return fsdp.launch(fsdp.processes(config), __file__, argv)
    evaluate_models(config, fsdp.join(config.device, config.threads))
    return None


def evaluate_models(config: EvalConfig, ranks: Ranks) -> None:
    """Evaluate every model on every set, into `--out`; then print the table."""
    paths = model_paths(config.model)
    with fsdp.raise_together(ranks):  # an error here comes before any weights are loaded
        generate = generator(config)
        outlines = {path: models.load_outline(path) for path in paths}
        names = config.bench or [default_set(paths)]
        sets = load_sets(names, config.data, partial(heldout_set, paths))
        blocks = {path: blocks_of(path, *outlines[path], sets, config) for path in paths}
    if ranks.main:
        for note in itertools.chain.from_iterable(loaded.notes for loaded in sets):
            print(printable(note), flush=True)
    label = "-".join([*paths, *config.bench]).replace("/", "_")[:120]
    folder = Path(config.out or f"evals/{label}")
    with ExitStack() as at_end:
        with fsdp.raise_together(ranks):
            if ranks.main:
                at_end.enter_context(files.locked_folder(folder))
            done = finished(folder) if ranks.main else set()
        done = fsdp.from_main(done, ranks)
        for path in paths:
            todo = [block for block in blocks[path] if block.key not in done]
            sample_blocks(path, todo, config, generate, ranks, folder)
        if ranks.main:
            print(printable(f"{folder}/"))
            asked = {block.key for block in itertools.chain.from_iterable(blocks.values())}
            print_table([row for row in read_generations(folder) if key_of(row) in asked])


def generator(config: EvalConfig) -> Callable[..., Tensor]:
    """The function that generates; raises BadInput for a --use that replaces others."""
    hooks = Hooks()
    use(hooks, config.use)
    if config.use and hooks.generate is hf_generate:
        raise BadInput(f"--use {' '.join(config.use)}: changes no evaluation; leave it out")
    return hooks.generate


# ---- what is asked -------------------------------------------------------------------------------


class Prompted(NamedTuple):
    """A problem in the template of a model."""

    problem: dict
    prompt: str
    length: int  # of the prompt, in tokens


class Block(NamedTuple):
    """Some problems of a set, which are sampled, graded and saved together."""

    asked: list[Prompted]
    task: Task  # which grades
    tokenizer: PreTrainedTokenizerBase
    head: dict  # what all its rows have in common

    @property
    def key(self) -> str:
        """What tells its rows from those of other blocks."""
        return key_of(self.head)


def model_paths(names: Sequence[str]) -> list[str]:
    """The paths of the models, each once; a run stands for its last model."""
    paths = []
    for name in names:
        paths.append(str(Path(name) / "model") if files.config_of(Path(name)) else name)
    return list(dict.fromkeys(paths))


def default_set(paths: list[str]) -> str:
    """What --bench is if it is not given."""
    for run in map(files.run_of, paths):
        if run.get("data") or run.get("task") not in (None, "math", "code"):
            return "heldout"
    return "math"


def heldout_set(paths: list[str]) -> EvalSet:
    """The problems that the models' run held out, with its grader, and its limit of a response.

    Raises BadInput if there is no such run, if its problems are not there any more, or if runs hold
    out different ones.
    """
    runs = [task_of_run(path) for path in paths if files.run_of(path)]
    digests = {digest_of(task.heldout) for _, task in runs}
    if len(digests) != 1:
        raise BadInput(
            f"--bench heldout: needs models of one run of train.py, these are of {len(digests)}, "
            "with other problems; name another set"
        )
    config, task = runs[0]
    is_embedded = task.name == "embedded"
    return EvalSet(
        "embedded" if is_embedded else "heldout",
        "math" if task.reference == "answer" else "code",
        4 if is_embedded else 8,
        [{"id": str(number)} | row for number, row in enumerate(task.heldout, 1)],
        max_tokens=config.max_tokens,
        task=task,
        reward=config.reward and f"{config.reward} {digest_of_reward(config.reward)}",
    )


def blocks_of(
    path: str,
    outline: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sets: list[EvalSet],
    config: EvalConfig,
) -> list[Block]:
    """All blocks of what the model at `path` is asked, in the order of their rows.

    The graders are those of training. Raises BadInput.
    """
    weights = identity_of(path)
    if not weights:
        raise BadInput(f"--model {path}: the hub's cache does not tell its commit")
    template = template_of(config.template, path, tokenizer)
    blocks = []
    for loaded, seed in itertools.product(sets, dict.fromkeys(config.seeds)):
        settings = settings_of(loaded, template, config)
        task = task_of(loaded, template, tokenizer, config)
        prompts = [task.prompt(problem) for problem in loaded.problems]
        models.check_embedded("--model", path, outline, tokenizer, prompts)
        lengths = map(len, token_ids(tokenizer, prompts))
        asked = list(map(Prompted, loaded.problems, prompts, lengths))
        size = max(1, config.block // settings["k"])
        for number, start in enumerate(range(0, len(asked), size)):
            part = asked[start : start + size]
            values = path, weights, loaded.name, settings, seed, number
            head = dict(zip(KEY, values, strict=True)) | {"of": len(part) * settings["k"]}
            blocks.append(Block(part, task, tokenizer, head))
    return blocks


def settings_of(loaded: EvalSet, template: Template, config: EvalConfig) -> dict:
    """What decides responses and verdicts, but for the model and the seed."""
    reward = {"reward": loaded.reward} if loaded.reward else {}
    return reward | {
        "digest": digest_of(loaded.problems),
        "problems": len(loaded.problems),
        "k": config.samples or loaded.k,
        "temperature": config.temperature,
        "max_tokens": int(min(config.max_tokens, loaded.max_tokens)),
        "template": template,
        "block": config.block,
        "grade_timeout": config.grade_timeout or loaded.timeout_s,
        "sandbox": config.sandbox,
        "dtype": config.dtype,
        "use": list(config.use),
    }


def task_of(
    loaded: EvalSet, template: Template, tokenizer: PreTrainedTokenizerBase, config: EvalConfig
) -> Task:
    """The prompts and the grader of a set.

    Problems that a run held out keep its grader, and the embedded task its prompt.
    """
    grade = grader(loaded.kind, config.grade_timeout or loaded.timeout_s, config.sandbox)
    task = text_task(loaded.kind, template, tokenizer, grade)
    if loaded.task:
        prompt = loaded.task.prompt if loaded.name == "embedded" else task.prompt
        task = replace(loaded.task, prompt=prompt)
    return task


# ---- generations ---------------------------------------------------------------------------------


def sample_blocks(
    path: str,
    todo: list[Block],
    config: EvalConfig,
    generate: Callable[..., Tensor],
    ranks: Ranks,
    folder: Path,
) -> None:
    """Sample and grade blocks of a model, one per rank at a time; rank 0 appends their rows."""
    if not todo:
        return
    with fsdp.raise_together(ranks):
        model = models.load_model(path, ranks.device, todo[0].tokenizer).eval()
    models.round_weights(model, getattr(torch, config.dtype))
    for first in tqdm(range(0, len(todo), ranks.world), path, leave=False, disable=HIDE_BAR):
        rows = []
        for block in todo[first + ranks.rank :][:1]:
            rows = sample_block(block, model, config, generate)
        rows = fsdp.gather_items(rows, ranks)
        if ranks.main:
            files.append_rows(folder / GENERATIONS, rows)


def sample_block(
    block: Block, model: PreTrainedModel, config: EvalConfig, generate: Callable[..., Tensor]
) -> list[dict]:
    """The rows of a block, problem by problem.

    Problems with equal limits are sampled together; one whose prompt alone fills the context has
    truncated responses. A problem with a "fault", such as unusable tests, gets no scores, even for
    truncated responses.
    """
    settings = block.head["settings"]
    key = [block.head["seed"], block.head["block"], *block.head["set"].encode()]
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
    by_limit = defaultdict(list)  # limit in tokens -> places of problems
    for place, asked in enumerate(block.asked):
        room = max(0, models.context_of(model) - asked.length)
        by_limit[int(min(settings["max_tokens"], room))].append(place)
    rows = {}
    for limit, places in sorted(by_limit.items()):
        group = [block.asked[place] for place in places]
        answers = [("", 0, Verdict(0.0, "truncated"))] * (len(group) * settings["k"])
        if limit:
            answers = respond(block, group, limit, model, config, generate)
        for number, (text, tokens, verdict) in enumerate(answers):
            part, sample = divmod(number, settings["k"])
            if "fault" in group[part].problem:
                verdict = Verdict(None, "infra_error")
            rows[places[part], sample] = block.head | {
                "problem": group[part].problem["id"],
                "sample": sample,
                "score": verdict.reward,
                "reason": verdict.reason,
                "tokens": tokens,
                "limit": limit,
                "response": text,
            }
    return [rows[place] for place in sorted(rows)]


def respond(
    block: Block,
    group: list[Prompted],
    limit: int,
    model: PreTrainedModel,
    config: EvalConfig,
    generate: Callable[..., Tensor],
) -> list[tuple[str, int, Verdict]]:
    """Text, length and verdict of each response to some problems of a block."""
    room = models.room_gb(model.device) - model.get_memory_footprint() / 1e9
    longest = max(asked.length for asked in group)
    batch = models.choose_batch(model.config, config, room, longest, limit)
    rollouts = rollout(
        model,
        block.tokenizer,
        [asked.prompt for asked in group],
        block.head["settings"]["k"],
        max_tokens=limit,
        temperature=config.temperature,
        stops=models.stop_ids(model, block.tokenizer),
        batch_tokens=batch * (longest + limit),
        generate=generate,
    )
    verdicts = block.task.verdicts([asked.problem for asked in group], rollouts)
    return list(zip(rollouts.texts, rollouts.mask.sum(1).tolist(), verdicts, strict=True))


# ---- numbers -------------------------------------------------------------------------------------


def scores_of(rows: list[dict]) -> dict[str, float]:
    """Problem -> the mean score of its samples, without those that could not be graded."""
    scores = defaultdict(list)
    for row in rows:
        if row["score"] is not None:
            scores[row["problem"]].append(row["score"])
    return {problem: float(np.mean(values)) for problem, values in scores.items()}


def average(results: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The mean over sets, weighted equally as in the paper, and its standard error.

    The error holds for independent sets. HumanEval and HumanEval+ ask the same problems, as do MBPP
    and MBPP+: on code the error is too small.
    """
    means, errors = zip(*results, strict=True)
    return float(np.mean(means)), math.hypot(*errors) / len(errors)


def print_table(rows: list[dict]) -> None:
    """Print how the sets were asked, and a row of avg@k ± error for each model, in percent.

    Below each model but the first is its gain over the first. Raises BadInput without rows.
    """
    if not rows:
        raise BadInput("there are no generations to show; evaluate a model")
    by_set: dict[str, dict[str, list[dict]]] = defaultdict(dict)  # set -> model -> rows
    for row in rows:
        by_set[row["set"]].setdefault(row["model"], []).append(row)
    for name, by_model in by_set.items():
        print_notes(name, by_model)
    first = rows[0]["model"]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        scores = {}
        gains = {}
        for name, by_model in by_set.items():
            own, base = (scores_of(by_model.get(each, [])) for each in (model, first))
            scores[name] = list(own.values())
            gains[name] = [own[problem] - base[problem] for problem in own if problem in base]
        lines.append({"avg@k ± SE, %": model} | cells_of(scores))
        if model != first:
            lines.append({"avg@k ± SE, %": "gain"} | cells_of(gains))
    print("\n".join(["", *markdown(lines)]))


def cells_of(numbers: dict[str, list[float]]) -> dict[str, str]:
    """The mean and error of each set's numbers, and the average of several, "-" if one has none."""
    results = {name: mean_and_error(np.array(values))[:2] for name, values in numbers.items()}
    if len(results) > 1:
        results["average"] = average(results.values())
    return {name: percent(*result) for name, result in results.items()}


def print_notes(name: str, by_model: dict[str, list[dict]]) -> None:
    """Print how a set was asked, and each model's kinds of responses, with warnings."""
    before: dict = {}  # the settings of the model before
    for model, rows in by_model.items():
        settings = rows[0]["settings"]
        if settings != before:
            print(printable(f"{name}: " + " ".join(f"{key}={settings[key]}" for key in settings)))
        reasons = Counter(row["reason"] for row in rows).most_common()
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons)
        print(printable(f"  {model}: {len(rows)} responses: {counts}"))
        if before and settings != before:
            print("    WARNING: it was asked otherwise than the model before")
        before = settings
        seeds = {row["seed"] for row in rows}
        short = {row["problem"] for row in rows if row["limit"] < settings["max_tokens"]}
        missing = settings["problems"] * settings["k"] * len(seeds) - len(rows)
        ungraded = sum(row["score"] is None for row in rows)
        for count, text in (
            (missing, "responses are missing; the same command makes them"),
            (ungraded, "could not be graded, and are in no number"),
            (len(short), "problems had a lower limit, to fit the context"),
        ):
            if count:
                print(f"    WARNING: {count} {text}")


if __name__ == "__main__":
    sys.exit(main())
