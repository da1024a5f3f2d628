"""Evaluate models on the paper's ten benchmarks, or on what a run of train.py held out.

    python eval.py --model runs/NAME                                   # its own held-out problems
    python eval.py --model Qwen/Qwen2.5-Math-7B --bench math           # the five sets of math
    python eval.py --model BASE runs/NAME --bench code                 # two models, side by side
    python eval.py --model runs/NAME/start runs/NAME                   # before and after training
    python eval.py --model PATH --bench math500 --data math500=FILE    # a local copy of a set
    python eval.py --model runs/A/checkpoints/*/model --bench math     # models of --keep-models
    python eval.py --from evals/NAME                                   # the saved table again

**Protocol** (Sec. 5.2, App. J): temperature 0.1, no top-p, 3,000 tokens, templates and instruction
as in training. A truncated response scores 0, as in training. If prompt and limit exceed the
model's context, the problem is still asked, with a lower limit, and a warning says so.

**Resuming.** `--out` gets generations.jsonl: every response and its verdict, a block of problems at
a time. A row has all that decides it: the model and the identity of its files, the set, the
settings, the seed and the block, and of how many rows the block is. The same command samples the
blocks that the file lacks. Whatever changes, a problem, a flag, or the model at its path, is
sampled anew, and rows of another key are not in the table. Random numbers depend only on (seed,
set, block) and on how many responses are generated at a time, not on the number of processes.

**Numbers.** avg@k averages first over the samples of a problem, then over problems. Its standard
error is clustered, since samples of one problem are alike: the standard deviation of the problems'
means, divided by the root of their number. Pooled samples would give an error too small by up to
the root of k. Gains are paired by problem. Responses that could not be graded are in no number.

Left out: serving engines (`python -m lab.tools.replay` grades their responses), pass@k and the
paper's numbers (`lab.tools.tables`), tensor parallelism, few-shot prompts, majority votes,
OlympiadBench's tolerance (a single problem has one), continuing within a block.
"""

import hashlib
import itertools
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from harness.config import Machine, Texts, check_bounds, end_on_mistakes, read_flags
from tasks.errors import BadInput, bad_input_on_error, printable
from tasks.settings import Sandbox, Template

LISTS = "--model", "--bench", "--data", "--seeds"  # flags with several values


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
    words = [word.partition("=")[0] for word in (sys.argv[1:] if argv is None else argv)]
    for name in LISTS:
        if words.count(name) > 1:  # the last would count alone
            raise BadInput(f"{name}: is there twice; give all its values after one")
    config: EvalConfig = read_flags(EvalConfig, argv, prog="python eval.py")
    check_bounds(config, "temperature samples ranks threads generate_batch".split())
    if bool(config.model) == bool(config.saved):
        raise BadInput("give --model or --from")
    return config


if __name__ == "__main__":
    end_on_mistakes(parse_eval)  # the imports below take seconds

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo import hf_generate, rollout, token_ids
from harness import files, fsdp, memory, models
from harness.command import on_machine, run_command
from harness.load import task_of_run, template_of
from harness.log import markdown, mean_and_error, percent
from harness.run import Parts, Ranks
from harness.sampling import sample_step
from rewards import Verdict
from tasks.benchmarks import Loaded, load_sets
from tasks.plug import use
from tasks.task import Task, digest_of, grader, text_task

GENERATIONS = "generations.jsonl"


@run_command
def main(argv: list[str] | None = None) -> int | None:
    """Run the command."""
    config = parse_eval(argv)
    if config.saved:
        print_table(newest(read_generations(Path(config.saved))))
        return None
    config = on_machine(config)
    if fsdp.processes(config) > 1:
        return fsdp.launch(fsdp.processes(config), __file__, argv)
    evaluate_models(config, fsdp.join(config.device, config.threads))
    return None


# ---- what is asked -------------------------------------------------------------------------------


class Asked(NamedTuple):
    """A set as it is asked of a model."""

    name: str
    problems: list[dict]
    task: Task  # which grades
    tokenizer: PreTrainedTokenizerBase
    prompts: list[str]
    lengths: list[int]  # of the prompts, in tokens
    settings: dict  # what decides responses and verdicts, but for the seed


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


def heldout_set(paths: list[str]) -> Loaded:
    """The problems that the models' run held out, with its grader, and its limit of a response.

    Raises BadInput if there is no such run, if its problems are not there any more, or if runs hold
    out different ones.
    """
    sets = {}  # digest of the problems -> the set
    for path in filter(files.run_of, paths):
        config, task = task_of_run(path)
        is_embedded = task.name == "embedded"
        sets[digest_of(task.heldout)] = Loaded(
            "embedded" if is_embedded else "heldout",
            "math" if task.reference == "answer" else "code",
            4 if is_embedded else 8,
            [{"id": str(number)} | row for number, row in enumerate(task.heldout, 1)],
            max_tokens=config.max_tokens,
            task=task,
        )
    if len(sets) != 1:
        raise BadInput(
            f"--bench heldout: needs models of one run of train.py, these are of {len(sets)}; name "
            "another set"
        )
    return sets.popitem()[1]


def ask(
    loaded: Loaded,
    path: str,
    outline: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: EvalConfig,
) -> Asked:
    """A set in the template of the model at `path`, with the graders of training.

    Problems that a run held out keep its grader, and the embedded task its prompt. Raises BadInput.
    """
    template = template_of(config.template, path, tokenizer)
    timeout = config.grade_timeout or loaded.timeout_s
    grade = grader(loaded.kind, timeout, config.sandbox)
    task = text_task(loaded.kind, template, tokenizer, grade)
    if loaded.task:
        prompt = loaded.task.prompt if loaded.name == "embedded" else task.prompt
        task = replace(loaded.task, prompt=prompt)
    prompts = [task.prompt(problem) for problem in loaded.problems]
    models.check_embedded("--model", path, outline, tokenizer, prompts)
    settings = {
        "digest": digest_of(loaded.problems),
        "problems": len(loaded.problems),
        "k": config.samples or loaded.k,
        "temperature": config.temperature,
        "max_tokens": int(min(config.max_tokens, loaded.max_tokens)),
        "template": template,
        "block": config.block,
        "grade_timeout": timeout,
        "sandbox": config.sandbox,
        "dtype": config.dtype,
        "use": list(config.use),
    }
    lengths = [len(ids) for ids in token_ids(tokenizer, prompts)]
    return Asked(loaded.name, loaded.problems, task, tokenizer, prompts, lengths, settings)


def identity_of(path: str) -> str:
    """What tells the model from another one at the same path: the sizes and times of its files.

    Of a hub id it is the commit in the hub's cache; it is empty where there is no such model.
    """
    if not Path(path).is_dir():
        with suppress(HFValidationError):  # a folder that is gone may have no name of the hub's
            cached = try_to_load_from_cache(path, "config.json")
            return Path(cached).parent.name if isinstance(cached, str) else ""
        return ""
    facts = []
    for file in sorted(filter(Path.is_file, Path(path).iterdir())):
        facts.append((file.name, file.stat().st_size, file.stat().st_mtime_ns))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


# ---- generations ---------------------------------------------------------------------------------


class Block(NamedTuple):
    """Some problems of a set, which are sampled, graded and saved together."""

    asked: Asked
    places: range  # of the problems in the set
    head: dict  # what all its rows have in common


PLACE = itemgetter("model", "weights", "set", "seed", "block")


def key_of(row: dict) -> tuple:
    """What tells a block's rows from those of others."""
    return *PLACE(row), json.dumps(row["settings"])


def evaluate_models(config: EvalConfig, ranks: Ranks) -> None:
    """Evaluate every model on every set, into `--out`; then print the table."""
    paths = model_paths(config.model)
    asked: dict[str, list[Asked]] = defaultdict(list)  # of each model
    with fsdp.together(ranks):  # an error here comes before any weights are loaded
        generate = generator(config)
        outlines = {path: models.load_outline(path) for path in paths}
        names = config.bench or [default_set(paths)]
        sets = load_sets(names, config.data, partial(heldout_set, paths))
        for path, loaded in itertools.product(paths, sets):
            asked[path].append(ask(loaded, path, *outlines[path], config))
    for loaded in sets if ranks.main else []:
        for note in loaded.notes:
            print(printable(note))
    label = "-".join([*paths, *config.bench]).replace("/", "_")[:120]
    folder = Path(config.out or f"evals/{label}")
    keys = set()
    with ExitStack() as at_end:
        with fsdp.together(ranks):
            if ranks.main:
                at_end.enter_context(files.locked_folder(folder))
            done = finished(folder) if ranks.main else set()
        done = fsdp.from_main(done, ranks)
        for path in paths:
            weights = fsdp.from_main(identity_of(path), ranks)
            if not weights:
                raise BadInput(f"--model {path}: the hub's cache does not tell its commit")
            blocks = blocks_of(path, weights, asked[path], config.seeds)
            keys |= {key_of(block.head) for block in blocks}
            todo = [block for block in blocks if key_of(block.head) not in done]
            if todo:
                sample_blocks(todo, config, generate, ranks, folder)
        if ranks.main:
            print(printable(f"{folder}/"))
            print_table([row for row in read_generations(folder) if key_of(row) in keys])


def generator(config: EvalConfig) -> Callable[..., torch.Tensor]:
    """The function that generates; raises BadInput for a --use that replaces others."""
    parts = Parts(sample_step)
    use(parts, config.use)
    if config.use and parts.generate is hf_generate:
        raise BadInput(f"--use {' '.join(config.use)}: changes no evaluation; leave it out")
    return parts.generate


def read_generations(folder: Path) -> list[dict]:
    """The rows of a folder's generations.jsonl; raises BadInput."""
    path = folder / GENERATIONS
    rows = files.read_lines(path)
    with bad_input_on_error(str(path), "give a folder of this version"):
        for row in rows:
            key_of(row)
    return rows


def finished(folder: Path) -> set[tuple]:
    """The keys of the blocks that a folder has whole; rows of others are removed from it."""
    if not (folder / GENERATIONS).exists():
        return set()
    rows = read_generations(folder)
    counts = Counter(map(key_of, rows))
    rows = [row for row in rows if counts[key_of(row)] == row["of"]]
    files.write_rows(folder / GENERATIONS, rows)
    return set(map(key_of, rows))


def blocks_of(path: str, weights: str, sets: list[Asked], seeds: Sequence[int]) -> list[Block]:
    """All blocks of what a model is asked, in the order of their rows."""
    blocks = []
    for asked, seed in itertools.product(sets, dict.fromkeys(seeds)):
        count = asked.settings["problems"]
        size = max(1, asked.settings["block"] // asked.settings["k"])
        for number, start in enumerate(range(0, count, size)):
            places = range(start, min(start + size, count))
            head = {
                "model": path,
                "weights": weights,
                "set": asked.name,
                "settings": asked.settings,
                "seed": seed,
                "block": number,
                "of": len(places) * asked.settings["k"],
            }
            blocks.append(Block(asked, places, head))
    return blocks


def sample_blocks(
    todo: list[Block],
    config: EvalConfig,
    generate: Callable[..., torch.Tensor],
    ranks: Ranks,
    folder: Path,
) -> None:
    """Sample and grade blocks of a model, one per rank at a time; rank 0 appends their rows."""
    path = todo[0].head["model"]
    with fsdp.together(ranks):
        model = models.load_model(path, ranks.device, todo[0].asked.tokenizer).eval()
    models.round_weights(model, getattr(torch, config.dtype))
    for first in tqdm(range(0, len(todo), ranks.world), path, leave=False, disable=None):
        rows = []
        for block in todo[first + ranks.rank :][:1]:
            rows = sample_block(block, model, config, generate)
        rows = fsdp.gather_items(rows, ranks)
        if ranks.main:
            files.append_rows(folder / GENERATIONS, rows)


def sample_block(
    block: Block, model: PreTrainedModel, config: EvalConfig, generate: Callable[..., torch.Tensor]
) -> list[dict]:
    """The rows of a block, problem by problem.

    Problems with equal limits are sampled together. A problem with a "fault", such as unusable
    tests, gets no scores, even for truncated responses.
    """
    asked, places, head = block
    key = [head["seed"], head["block"], *asked.name.encode()]
    torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
    by_limit = defaultdict(list)  # limit in tokens -> places of problems
    for place in places:
        room = max(0, models.context_of(model) - asked.lengths[place])
        by_limit[int(min(asked.settings["max_tokens"], room))].append(place)
    rows = {}
    for limit, of_limit in sorted(by_limit.items()):
        answers = iter(answer(asked, of_limit, limit, model, config, generate))
        for place, sample in itertools.product(of_limit, range(asked.settings["k"])):
            text, tokens, verdict = next(answers)
            problem = asked.problems[place]
            if "fault" in problem:
                verdict = Verdict(None, "infra_error")
            rows[place, sample] = head | {
                "problem": problem["id"],
                "sample": sample,
                "score": verdict.reward,
                "reason": verdict.reason,
                "tokens": tokens,
                "limit": limit,
                "response": text,
            }
    return [rows[key] for key in sorted(rows)]


def answer(
    asked: Asked,
    places: list[int],
    limit: int,
    model: PreTrainedModel,
    config: EvalConfig,
    generate: Callable[..., torch.Tensor],
) -> Iterable[tuple[str, int, Verdict]]:
    """Text, length and verdict of each response to the problems at some places of a set."""
    k = asked.settings["k"]
    if not limit:  # the prompts alone fill the context
        return [("", 0, Verdict(0.0, "truncated"))] * (len(places) * k)
    batch = config.generate_batch
    if not batch:
        room = memory.room_gb(model.device) - model.get_memory_footprint() / 1e9
        longest = max(asked.lengths[place] for place in places)
        batch = memory.choose_batch(model.config, config, room, longest, limit)
    rollouts = rollout(
        model,
        asked.tokenizer,
        [asked.prompts[place] for place in places],
        k,
        max_tokens=limit,
        temperature=config.temperature,
        stops=models.stop_ids(model, asked.tokenizer),
        batch_size=batch,
        generate=generate,
    )
    verdicts = asked.task.verdicts([asked.problems[place] for place in places], rollouts)
    return zip(rollouts.texts, rollouts.mask.sum(1).tolist(), verdicts, strict=True)


# ---- numbers -------------------------------------------------------------------------------------


def newest(rows: list[dict]) -> list[dict]:
    """The rows of each model's last weights, and of its last settings for each set.

    A model that was rewritten since is left out, with a warning.
    """
    weights = {row["model"]: row["weights"] for row in rows}
    for model, last in list(weights.items()):
        if last and identity_of(model) not in ("", last):
            print(printable(f"WARNING: {model} was rewritten since: evaluate it again"))
            del weights[model]
    rows = [row for row in rows if row["weights"] == weights.get(row["model"])]
    settings = {(row["model"], row["set"]): row["settings"] for row in rows}
    return [row for row in rows if settings[row["model"], row["set"]] == row["settings"]]


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
        warnings = warnings_of(rows)
        if settings != before:
            print(printable(f"{name}: " + " ".join(f"{key}={settings[key]}" for key in settings)))
            if before:
                warnings.append("it was asked otherwise than the model before")
        before = settings
        reasons = Counter(row["reason"] for row in rows).most_common()
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons)
        print(printable(f"  {model}: {len(rows)} responses: {counts}"))
        for warning in warnings:
            print(f"    WARNING: {warning}")


def warnings_of(rows: list[dict]) -> list[str]:
    """What the table does not show of a model's rows on a set."""
    settings = rows[0]["settings"]
    seeds = {row["seed"] for row in rows}
    short = {row["problem"] for row in rows if row["limit"] < settings["max_tokens"]}
    whole = settings["problems"] * settings["k"] * len(seeds)
    counts = {
        "responses are missing; the same command makes them": whole - len(rows),
        "could not be graded, and are in no number": sum(row["score"] is None for row in rows),
        "problems had a lower limit, to fit the context": len(short),
    }
    return [f"{count} {text}" for text, count in counts.items() if count]


if __name__ == "__main__":
    sys.exit(main())
