"""Loading a run: its task, its model and tokenizer, refusing what would train wrongly.

    load_run(config, ranks)  -> Run, with problems and the whole model, which one rank could run
    give_lessons(run)        teaches the model the lessons of its task

What is loaded is checked here, before a step is taken, and what is small before weights are read:
that folders and files are there, that every rank has work, that the model is one that can be
trained and sampled as asked, that it fits, and that prompts and responses fit its context.
"""

import importlib
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo import Policy
from harness import files, fsdp, memory, models
from harness.config import TrainConfig, flag, flat, with_values
from harness.run import Parts, Ranks, Run, lessons_of_task, make_context, save_pretrained
from harness.sampling import sample_step
from tasks import toy
from tasks.errors import BadInput
from tasks.plug import look_up, use
from tasks.problems import Task, digest_of, split
from tasks.settings import TASKS

LESSONS = "lessons.json"  # beside a model whose lessons were given to their end


def load_run(config: TrainConfig, ranks: Ranks) -> Run:
    """Load and check a model without its weights, then problems, then the weights.

    Sizes that were not given fit the data. Raises BadInput, on all ranks alike.
    """
    with fsdp.together(ranks):
        parts = Parts(sample_step)
        use(parts, config.use)  # other functions in place of the core's
        if config.model:
            model, tokenizer = models.load_outline(config.model)
        else:
            problems = config.problems
            model = toy.make_model(problems.toy_lines, config.seed, problems.toy_width)
            tokenizer = toy.make_tokenizer(problems.toy_lines)
        config, task, task_notes = make_task(config, tokenizer, models.context_of(model))
        check_ranks(config, ranks)
        prompts = map(task.prompt, task.train + task.heldout)
        models.check_embedded("--model", config.model or "", model, tokenizer, prompts)
        notes = describe(config, ranks, task, model) + task_notes
        if config.model:
            parts.adapt(
                model, config.seed
            )  # the outline, so that memory is that of what is trained
        if not config.machine.generate_batch:
            batch = choose_batch_of_run(config, ranks, task, model, tokenizer)
            config = with_values(config, {"generate_batch": batch})
        if ranks.device.type == "cuda" or not TASKS[config.task].makes_model:
            notes += memory.plan(model, config, ranks)
        if config.model:
            if ranks.main:
                print(f"loading {config.model}", flush=True)
            model = models.load_model(config.model, ranks.device, tokenizer)
        model.eval()  # throughout: dropout would make sampler and trainer disagree
        run = make_run(config, ranks, model, tokenizer, task, parts)
        run.notes = notes
        return run


def make_run(
    config: TrainConfig,
    ranks: Ranks,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    parts: Parts | None = None,
) -> Run:
    """A run whose model is loaded; its parts are the core's if none are given."""
    parts = parts or Parts(sample_step)
    context = make_context(config, Policy(model), tokenizer, task, parts.hooks)
    return Run(config, ranks, context, parts)


def describe(config: TrainConfig, ranks: Ranks, task: Task, model: PreTrainedModel) -> list[str]:
    """The plan's lines on device, number formats and threads, on model and problems."""
    numbers = f"weights and optimizer float32, compute {config.machine.dtype}"
    threads = f"{torch.get_num_threads()} CPU threads each"
    device: str = config.machine.device
    if device == "cpu" and torch.backends.mps.is_available():
        device = "cpu (not mps, which has no float64)"
    size = f"{model.num_parameters():,} parameters, context {models.context_of(model)}"
    notes = [
        f"{ranks.world} rank(s) on {device}, {numbers}, {threads}",
        f"model {config.model or 'made here'}: {type(model).__name__}, {size}",
        f"{len(task.train)} problems to train on, {len(task.heldout)} held out",
    ]
    if config.problems.data:
        steps = -(-len(task.train) // config.sampling.prompts_per_step)
        notes.append(f"a pass over --data takes {steps} step(s)")
        if config.task == "math" and device != "cuda":
            notes.append("sizes and --lr are the paper's; --task own has some for a CPU")
    return notes


def choose_batch_of_run(
    config: TrainConfig,
    ranks: Ranks,
    task: Task,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> int:
    """The default of --generate-batch, which config.json keeps: the samples depend on it."""
    resident = memory.predict(model, config, ranks.world)["resident"]
    room = memory.room_gb(ranks.device) - resident
    prompt = memory.longest_prompt(task, task.train + task.heldout, tokenizer)
    return memory.choose_batch(
        model.config, config.machine, room, prompt, config.sampling.max_tokens
    )


def check_ranks(config: TrainConfig, ranks: Ranks) -> None:
    """Raise BadInput for more ranks than there is work for, or shards that do not divide them."""
    sizes = flat(config)
    for name in ("prompts_per_step", "heldout", "eval_groups"):
        if sizes[name] < ranks.world:
            raise BadInput(
                f"{flag(name)} {sizes[name]}: there are {ranks.world} ranks; raise it, or start "
                "fewer ranks"
            )
    shard_over = config.machine.shard_over
    if shard_over and ranks.world % shard_over:
        raise BadInput(f"--shard-over {shard_over}: does not divide {ranks.world} ranks; change it")


def make_task(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, context: float
) -> tuple[TrainConfig, Task, list[str]]:
    """Make the task; its prompts leave room for a response in the model's `context`.

    Returns the configuration, with sizes that fit the problems and their digest, the task, and
    notes. Raises BadInput.
    """
    size = Sizes(config)
    if not TASKS[config.task].makes_model and config.sampling.max_tokens >= context:
        most = int(context // 2)
        size.shrink("max_tokens", most, f"the model's context is {context}")
    max_tokens = size.config.sampling.max_tokens
    room = context - max_tokens  # tokens left for the prompt
    name = files.origin_of(config.model or "made here")
    module, _, function = look_up(TASKS, "tasks", "--task", config.task).make.partition(":")
    make = getattr(importlib.import_module(module), function)
    task, notes = make(config.problems, config.grading, config.seed, tokenizer, name)
    if task.heldout:  # the embedded task, whose prompts all have one length
        longest = len(tokenizer(task.prompt(task.heldout[0]))["input_ids"])
        if longest > room:
            raise BadInput(
                f"--max-tokens {max_tokens}: with a prompt of {longest} tokens it exceeds the "
                f"model's context of {context}; lower it"
            )
    else:
        task, dropped = hold_out(size, task, tokenizer, room)
        notes += [*size.notes, *dropped]
    digest = digest_of(task.train + task.heldout)
    if config.checkpoints.resume and config.digest != digest:
        raise BadInput(
            f"--resume {config.checkpoints.resume}: --data {config.problems.data} or the "
            "checkpoint's complete.json says other problems now; restore it"
        )
    return replace(size.config, digest=digest), task, notes


def hold_out(
    size: "Sizes",
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    room: float,
) -> tuple[Task, list[str]]:
    """Hold out problems of a task, and fit the sizes to them; returns the task and notes.

    A prompt has at most `room` tokens.
    """
    config = size.config
    there_are = f"there are {len(task.train)} problems"
    heldout = size.shrink("heldout", max(1, len(task.train) // 5), there_are)
    left = max(1, len(task.train) - heldout)  # problems left for training
    groups = config.optimisation.prompts_per_update
    if "prompts_per_step" not in config.given:  # a given one may be no multiple of a smaller size
        groups = size.shrink("prompts_per_update", left, there_are)
    size.shrink("prompts_per_step", max(1, left // groups) * groups, there_are)
    return split(
        task,
        tokenizer,
        heldout=heldout,
        seed=config.seed,
        max_prompt_tokens=room,
    )


class Sizes:
    """A configuration whose sizes shrink to the data, and the notes that say so.

    Sizes that were given, and those of a saved run, do not shrink.
    """

    def __init__(self, config: TrainConfig):
        self.config = config
        self.notes: list[str] = []

    def shrink(self, name: str, most: int, reason: str) -> int:
        """Lower a size that may shrink to `most` where it is larger; returns the size."""
        size = flat(self.config)[name]
        if name in self.config.given or self.config.checkpoints.resume or size <= most:
            return size
        self.config = with_values(self.config, {name: most})
        self.notes.append(f"{flag(name)} {most}, not {size}: {reason}")
        return most


def task_of_run(path: str) -> tuple[TrainConfig, Task]:
    """The configuration and the task of the run that the model at `path` is from.

    Raises BadInput if the run's problems are not those that it had.
    """
    config = files.read_config(files.run_of(path))
    model, tokenizer = models.load_outline(path)
    made, task, _ = make_task(config, tokenizer, models.context_of(model))
    if config.digest and made.digest != config.digest:
        raise BadInput(
            f"--model {path}: config.json of its run, or --data {config.problems.data}, says other "
            "problems than the run had; restore it"
        )
    return config, task


# ---- lessons -------------------------------------------------------------------------------------


def give_lessons(run: Run) -> None:
    """Teach the model lessons where `needs_lessons` says so.

    Raises BadInput for steps without lessons, and for lessons without steps.
    """
    config = run.config
    has_steps = config.problems.warmup_steps or config.checkpoints.resume
    if run.parts.lessons is not lessons_of_task and not has_steps:
        raise BadInput(f"--use {' '.join(config.use)}: gives lessons; add --warmup-steps")
    if not needs_lessons(config):
        return
    lessons = run.parts.lessons(run.context)
    if not lessons:
        steps = run.config.problems.warmup_steps
        raise BadInput(f"--warmup-steps {steps}: the task has no lessons; leave it out")
    run.context.policy = Policy(teach_policy(run, lessons))


def needs_lessons(config: TrainConfig) -> bool:
    """Whether a run begins with lessons.

    It does with `--warmup-steps`, unless it is resumed or its model is that of a run with the
    task's own lessons.
    """
    if config.checkpoints.resume or not config.problems.warmup_steps:
        return False
    kind = TASKS[config.task]
    if kind.makes_model:
        return not config.model
    was_taught = files.run_of(config.model or "").get("task") == config.task
    return not (kind.makes_problems and was_taught)


def teach_policy(run: Run, lessons: Callable[..., float]) -> PreTrainedModel:
    """The policy after its lessons, in float32: `start/` in the run's folder."""
    context = run.context
    start = run.folder / "start"
    if run.ranks.main and not start.exists():
        with files.whole_folder(start) as draft:
            is_whole = give_warm_up(run, lessons)
            save_pretrained(context.policy.model, context.tokenizer, draft)
            if is_whole:
                files.write_json(draft / LESSONS, {"steps": run.config.problems.warmup_steps})
        if not (start / LESSONS).exists():
            raise KeyboardInterrupt
    fsdp.gather(None, run.ranks)  # until it is there
    return models.load_model(str(start), run.ranks.device, context.tokenizer).eval()


def give_warm_up(run: Run, lessons: Callable[..., float]) -> bool:
    """Teach the policy, in float32, and print how long it took.

    Returns False where Ctrl-C ended the lessons early.
    """
    context = run.context
    model = context.policy.model.float()
    steps = run.config.problems.warmup_steps
    began = time.perf_counter()
    try:
        loss = lessons(model, forbidden=heldout_prompts(context.task), steps=steps)
    except KeyboardInterrupt:
        return False
    seconds = time.perf_counter() - began
    print(f"warm-up: {steps} steps, loss {loss:.3f}, {seconds:.0f} s")
    return True


def heldout_prompts(task: Task) -> set[str]:
    """The problems that no lesson may show."""
    return {problem["problem"] for problem in task.heldout}
