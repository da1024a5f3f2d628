"""From flags to a task, a model and its tokenizer, refusing what would train wrongly.

    set_up(config, ranks)   -> Ready: task, model, tokenizer, ..., and notes for the plan
    make_start, own_prm   -> what the embedded task makes itself: its policy's start, its process
                          reward model

What is loaded is checked here, before a step is taken, and what is small before weights are read:
that folders and files are there, that every rank has work, that the model is one that can be
trained and sampled as asked, that it fits, and that prompts and responses fit its context.
"""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from credit import teacher
from credit.reward_model import RewardModel
from credit.table import METHODS
from fast.packing import attends_fully
from grpo import layers_of
from harness import evaluation, files, memory, models, parallel
from harness.config import TrainConfig, changed, flag, flat
from harness.evaluation import context_of
from harness.parallel import Ranks
from tasks import benchmarks, toy, words
from tasks.benchmarks import Loaded
from tasks.problems import (
    BadInput,
    Task,
    choose_template,
    digest_of,
    grader,
    load_problems,
    split,
    text_task,
)

# to train on; a number that does not depend on --steps, so that a resumed run draws the same
MADE_PROBLEMS = 640


class Ready(NamedTuple):
    """What a run starts from."""

    task: Task
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    notes: list[str]  # for the user, about what was loaded
    prm: RewardModel | None  # --prm, loaded
    sets: list[Loaded]  # of --bench
    predicted: dict[str, float]  # GB of a rank's memory by part
    config: TrainConfig  # sizes that were not given fit the data now


def set_up(config: TrainConfig, ranks: Ranks) -> Ready:
    """What is loaded, checked: what tells a model without its weights, then problems, then weights.
    Raises BadInput.
    """
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    room = memory.room_gb(ranks.device)
    if not config.model:
        problems = config.problems
        model = toy.make_model(problems.toy_lines, config.seed, problems.toy_width)
        tokenizer = toy.make_tokenizer()
    else:
        model, tokenizer = models.load_outline(config.model)
        predicted = memory.predict(model.config, config, ranks.world, room)
        memory.refuse_what_cannot_fit(predicted, config, ranks)
    if config.credit.prm:
        models.load_reward_tokenizer(config.credit.prm)
    compute = "weights and optimizer float32"
    if config.machine.dtype != "float32":
        compute += f", compute {config.machine.dtype}"
    threads = f"{torch.get_num_threads()} CPU threads each"
    notes = [f"{ranks.world} rank(s) on {config.machine.device}, {compute}, {threads}"]
    notes += check_architecture(config, model.eval())
    config, task, about = make_task(config, tokenizer, context_of(model))
    check_ranks(config, ranks)
    size = f"{sum(p.numel() for p in model.parameters()):,} parameters, context {context_of(model)}"
    notes += [*about, f"model {config.model or 'made here'}: {type(model).__name__}, {size}"]
    notes.append(f"{len(task.train)} problems to train on, {len(task.heldout)} held out")
    if config.problems.data:
        steps = -(-len(task.train) // config.sampling.prompts_per_step)
        rate = f"--lr is {config.optimisation.lr:g}, and models below 1B need 1e-5 to 1e-4"
        notes.append(f"a pass over --data takes {steps} step(s); {rate}")
    sets = load_benchmarks(config, tokenizer)
    notes += [note for loaded in sets for note in loaded.notes]
    if config.smoke:
        notes.append("smoke test: rewards in training are drawn, whatever a response says")
    if config.model:
        if ranks.main:
            print(f"loading {config.model}", flush=True)
        model = models.load_model(config.model, ranks.device, tokenizer)
    prm = None
    if config.credit.prm:
        dtype = getattr(torch, config.machine.dtype)
        prm = models.load_reward_model(config.credit.prm, ranks.device, dtype)
    model.eval()  # throughout: dropout would make sampler and trainer disagree
    predicted = memory.predict(model.config, config, ranks.world, room)
    return Ready(task, model, tokenizer, notes, prm, sets, predicted, config)


def check_ranks(config: TrainConfig, ranks: Ranks) -> None:
    """Refuse more ranks than there is work for, and shards that do not divide them; raises
    BadInput.
    """
    sizes = flat(config)
    for name in ("prompts_per_step", "heldout", "eval_groups"):
        if sizes[name] < ranks.world:
            few = f"{flag(name)} {sizes[name]}: there are {ranks.world} ranks"
            raise BadInput(f"{few}; raise it, or start fewer ranks")
    shard_over = config.machine.shard_over
    if shard_over and ranks.world % shard_over:
        raise BadInput(f"--shard-over {shard_over}: does not divide {ranks.world} ranks; change it")


def check_architecture(config: TrainConfig, model: PreTrainedModel) -> list[str]:
    """Notes on how a model, which may be without weights, can be run; raises BadInput where it
    cannot be as asked.
    """
    needs = METHODS[config.credit.method].needs
    if "attention" in needs and not all(hasattr(layer, "self_attn") for layer in layers_of(model)):
        reason = "its layers have no self_attn; choose another --method than"
        raise BadInput(f"--model {config.model}: {reason} {config.credit.method}")
    notes = []
    if not attends_fully(model.config):
        notes.append(
            f"rollouts are padded to the longest of each pass: {model.config.model_type} is not "
            "known to pack"
        )
    return notes


def make_task(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, context: float
) -> tuple[TrainConfig, Task, list[str]]:
    """Problems whose prompts leave room for a response in the model's `context`; the configuration
    with the sizes that fit them, and notes. Raises BadInput.
    """
    needs = METHODS[config.credit.method].needs
    responses = 1 + ("peer" in needs)  # that must fit in together
    size = Sizes(config)
    if config.task != "embedded" and responses * config.sampling.max_tokens >= context:
        most = int(context // (1 + responses))
        size.shrink("max_tokens", most, f"the model's context is {context}")
    max_tokens = size.config.sampling.max_tokens
    room = context - responses * max_tokens  # for the prompt
    if room < 1:
        shared = ", for a response and another in its prompt" if "peer" in needs else ""
        raise BadInput(
            f"--max-tokens {max_tokens}: the model's context is {context} tokens{shared}; lower it"
        )
    if config.task == "embedded":
        longest = toy.prompt_tokens(config.problems.toy_lines)
        if "hint" in needs:  # the prompt must fit with its answer, too
            longest += toy.HINT_TOKENS
        if room < longest:
            raise BadInput(
                f"--max-tokens {max_tokens}: with a prompt of {longest} tokens it exceeds the "
                f"model's context of {context}; lower it"
            )
        return config, embedded_task(config, tokenizer), []
    assert config.model  # the embedded task alone does without
    template = choose_template(config.problems.template, files.origin_of(config.model), tokenizer)
    kind = "math" if config.task == "words" else config.task
    grade = grader(kind, config.grading.grade_timeout, config.grading.sandbox)
    task = text_task(kind, template, tokenizer, grade)
    about: list[str] = []
    if config.task == "words":
        problems = words.make_problems(MADE_PROBLEMS + config.problems.heldout, config.seed)
        task = replace(
            task,
            name="words",
            first_error=words.first_error,
            rephrase=words.rephrase,
            step_end="\n",
        )
    else:
        problems, about = load_problems(kind, config.problems.data)
    task, notes = hold_out(size, task, problems, tokenizer, room)
    reason = "chosen by model and tokenizer" if config.problems.template == "auto" else "asked for"
    return size.config, task, [*about, *notes, f"template {template} ({reason})"]


def hold_out(
    size: "Sizes",
    task: Task,
    problems: list[dict],
    tokenizer: PreTrainedTokenizerBase,
    room: float,
) -> tuple[Task, list[str]]:
    """The task with problems to train on and held out, sizes that fit them, and notes. A prompt
    has at most `room` tokens.
    """
    config = size.config
    there_are = f"there are {len(problems)} problems"
    heldout = size.shrink("heldout", max(1, len(problems) // 5), there_are)
    left = max(1, len(problems) - heldout)  # to train on
    groups = config.optimisation.prompts_per_update
    if "prompts_per_step" not in config.given:  # else it would be no multiple
        groups = size.shrink("prompts_per_update", left, there_are)
    size.shrink("prompts_per_step", max(1, left // groups) * groups, there_are)
    task, dropped = split(
        task,
        problems,
        tokenizer,
        heldout=heldout,
        seed=config.seed,
        max_prompt_tokens=room,
        told="hint" in METHODS[config.credit.method].needs,  # prompts must fit with their answer
    )
    return task, [*size.notes, *dropped]


class Sizes:
    """A configuration whose sizes shrink to the data, unless they were given or are a saved
    run's, and the notes that say so.
    """

    def __init__(self, config: TrainConfig):
        self.config = config
        self.notes: list[str] = []

    def shrink(self, name: str, most: int, reason: str) -> int:
        """A size becomes `most` where it is larger; returns what it is."""
        size = flat(self.config)[name]
        if name in self.config.given or self.config.checkpoints.resume or size <= most:
            return size
        self.config = changed(self.config, {name: most})
        self.notes.append(f"{flag(name)} {most}, not {size}: {reason}")
        return most


def embedded_task(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The embedded task as a `Task`; raises BadInput where there are too few problems, or for
    another model.
    """
    if len(tokenizer) != len(toy.SYMBOLS):
        raise BadInput(
            f"--model {config.model}: not a model of the embedded task; add --task math and --data"
        )
    train, heldout = toy.make_problems(
        MADE_PROBLEMS, config.problems.heldout, config.problems.toy_lines, config.seed
    )
    if len(heldout) < config.problems.heldout or len(train) < MADE_PROBLEMS:
        few = f"too few different problems for --heldout {config.problems.heldout}"
        raise BadInput(f"--toy-lines {config.problems.toy_lines}: {few}; raise it")
    return Task(
        "embedded",
        train,
        heldout,
        lambda problem: problem["problem"],
        grader("math", config.grading.grade_timeout, config.grading.sandbox),
        first_error=toy.first_error,
        rephrase=toy.rephrase,
        step_end="\n",
        hint=toy.HINT,
        solved="{}\n",
    )


def check_problems(path: str, run: dict) -> None:
    """Refuse a model whose embedded run had other problems than its config.json says by now; raises
    BadInput.
    """
    if run.get("task") == "embedded" and run.keys() >= {"seed", "heldout", "digest"}:
        train, heldout = toy.make_problems(
            MADE_PROBLEMS, run["heldout"], run["toy_lines"], run["seed"]
        )
        if digest_of(train + heldout) != run["digest"]:
            raise BadInput(
                f"--model {path}: the config.json of its run says other problems than the run had "
                "(seed, toy_lines or heldout was changed); restore it"
            )


def load_benchmarks(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> list[Loaded]:
    """The sets of --bench, refusing those that the model cannot be asked; raises BadInput."""
    make_embedded = partial(
        benchmarks.embedded_set, config.problems.toy_lines, config.problems.heldout, config.seed
    )
    sets = benchmarks.load_sets(
        list(config.evaluation.bench),
        list(config.evaluation.bench_data),
        config.grading.sandbox,
        make_embedded,
        flag="--bench-data",
    )
    protocol = evaluation.protocol_of(config)
    origin = files.origin_of(config.model or "the model")
    for loaded in sets:
        evaluation.as_task(loaded, protocol, tokenizer, origin)
    return sets


def needs_start(config: TrainConfig) -> bool:
    """Whether a run begins with lessons: on a task that has them, unless its model is a run's of
    that task.
    """
    if config.checkpoints.resume or not config.problems.warmup_steps:
        return False
    if config.task == "embedded":
        return not config.model
    return config.task == "words" and files.run_of(config.model or "").get("task") != "words"


def make_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    config: TrainConfig,
    folder: Path,
    ranks: Ranks,
) -> None:
    """A made task's supervised start, on one rank for all."""
    model.float()  # on every rank: rank 0's weights are copied into theirs
    if ranks.main:
        forbidden = {problem["problem"] for problem in task.heldout}
        steps = config.problems.warmup_steps
        seed = config.seed
        started = time.perf_counter()
        if config.task == "embedded":
            lines = config.problems.toy_lines
            loss = toy.warm_up(model, lines, forbidden, steps=steps, seed=seed)
        else:
            prompt = task.prompt
            loss = words.warm_up(model, tokenizer, prompt, forbidden, steps=steps, seed=seed)
        seconds = time.perf_counter() - started
        print(f"warm-up: {steps} steps, loss {loss:.3f}, {seconds:.0f} s")
        with files.whole_folder(folder / "start") as draft:
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
    parallel.broadcast(model, ranks)


def own_prm(
    model: PreTrainedModel,
    task: Task,
    config: TrainConfig,
    folder: Path,
    ranks: Ranks,
    *,
    load_only: bool,
) -> RewardModel:
    """The embedded task's process reward model, taught by one rank for all; with `load_only` the
    folder has it already.
    """
    if ranks.main and not load_only:
        forbidden = {problem["problem"] for problem in task.heldout}
        lines = config.problems.toy_lines
        reward_model, its_tokenizer = teacher.make_prm(model, lines, forbidden, seed=config.seed)
        with files.whole_folder(folder / "prm") as draft:
            reward_model.save_pretrained(draft)
            its_tokenizer.save_pretrained(draft)
    parallel.gather(None, ranks)  # until it is there
    return models.load_reward_model(str(folder / "prm"), ranks.device, torch.float32)
