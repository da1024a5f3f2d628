"""Loading a run: its task, its model and tokenizer, refusing what would train wrongly.

    resolve(config)          the configuration on this machine
    load_run(config, ranks)  -> Run, with problems and the whole model, which one rank could run
    give_lessons(run)        teaches the model the lessons of its task

What is loaded is checked here, before a step is taken, and what is small before weights are read:
that folders and files are there, that every rank has work, that the model is one that can be
trained and sampled as asked, and that prompts and responses fit its context.
"""

import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from credit.rules import find
from grpo import Policy, token_ids
from harness import files, fsdp, memory, models
from harness.command import on_machine
from harness.config import Config, defaults_of, flag, ignored_by, read_config, refusal
from harness.log import smallest_gain
from harness.run import Parts, Ranks, Run, lessons_of_task, make_context, save_pretrained
from harness.sampling import sample_step
from tasks import toy
from tasks.errors import BadInput
from tasks.plug import look_up, options_of, use
from tasks.reward import load_reward
from tasks.settings import TASKS, Template
from tasks.task import Task, choose_template, digest_of, split


def resolve(config: Config) -> Config:
    """The configuration on this machine; raises BadInput for an unknown rule, option or reward."""
    rule = find(config.method, config.use)
    options_of(rule.credit, config.method_option, f"--method {config.method}")
    if config.reward:
        load_reward(config.reward)  # what is wrong with it shows before a model is loaded
    if not config.max_tokens:  # a full response of the embedded task
        config = replace(config, max_tokens=toy.response_tokens(config.toy_lines))
    return on_machine(config, half=not TASKS[config.task].makes_model)


def load_run(config: Config, ranks: Ranks) -> Run:
    """Load and check a model without its weights, then problems, then the weights.

    Sizes that were not given fit the data. Raises BadInput, on all ranks alike.
    """
    with fsdp.together(ranks):
        parts = Parts(sample_step)
        use(parts, config.use)  # other functions in place of the core's
        if config.model:
            model, tokenizer = models.load_outline(config.model)
        else:
            model = toy.make_model(config.toy_lines, config.seed, config.toy_width)
            tokenizer = toy.make_tokenizer(config.toy_lines)
        config, task, task_notes = make_task(config, tokenizer, models.context_of(model))
        for name in ("prompts_per_step", "heldout", "eval_groups"):
            if getattr(config, name) < ranks.world:
                reason = f"there are {ranks.world} ranks; raise it, or start fewer ranks"
                raise refusal(config, name, reason)
        prompts = list(map(task.prompt, task.train + task.heldout))
        models.check_embedded("--model", config.model or "", model, tokenizer, prompts)
        notes = describe(config, ranks, task, model) + task_notes
        if config.model:  # the outline, so that memory is that of what is trained
            parts.adapt(model, config.seed)
        if not config.generate_batch:  # config.json keeps it: the samples depend on it
            longest = max(map(len, token_ids(tokenizer, prompts)))
            room = memory.room_gb(ranks.device) - memory.resident_gb(model, config, ranks.world)
            batch = memory.choose_batch(model.config, config, room, longest, config.max_tokens)
            config = replace(config, generate_batch=batch)
        if ranks.device.type == "cuda" or config.model:
            notes += memory.memory_notes(model, config, ranks)
        if config.model:
            if ranks.main:
                print(f"loading {config.model}", flush=True)
            model = models.load_model(config.model, ranks.device, tokenizer)
        model.eval()  # throughout: dropout would make sampler and trainer disagree
        run = make_run(config, ranks, model, tokenizer, task, parts)
        run.notes = notes
        return run


def make_run(
    config: Config,
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


def describe(config: Config, ranks: Ranks, task: Task, model: PreTrainedModel) -> list[str]:
    """The plan's lines on machine, model and problems."""
    name = config.model or "made here"
    notes = [
        f"{ranks.world} rank(s) on {config.device}, compute {config.dtype}, "
        f"{torch.get_num_threads()} CPU threads each",
        f"model {name}: {type(model).__name__}, {model.num_parameters():,} parameters",
        f"{len(task.train)} problems to train on, {len(task.heldout)} held out",
    ]
    sampled = min(len(task.heldout), config.eval_groups)
    smallest = 100 * smallest_gain(sampled)
    notes.append(f"{sampled} held-out problems show only gains above {smallest:.0f} points")
    if config.data:
        steps = -(-len(task.train) // config.prompts_per_step)
        notes.append(f"a pass over --data takes {steps} step(s)")
    if config.task == "math" and config.device == "cpu":
        notes.append("sizes and --lr are the paper's; --task own has some for a CPU")
    return notes


def make_task(
    config: Config, tokenizer: PreTrainedTokenizerBase, context: float
) -> tuple[Config, Task, list[str]]:
    """Make the task; its prompts leave room for a response in the model's `context`.

    Returns the configuration, with sizes that fit the problems and their digest, the task, and
    notes. Raises BadInput.
    """
    kind = look_up(TASKS, "tasks", "--task", config.task, config.use)
    name = config.model or "made here"
    if "template" not in ignored_by(kind, config):
        template = template_of(config.template, name, tokenizer)
        config = replace(config, template=template)
    notes: list[str] = []
    if not kind.makes_model and config.max_tokens >= context:
        reason = f"the model's context is {context}"
        config = lower(config, notes, reason, max_tokens=int(context // 2))
    room = context - config.max_tokens  # tokens left for the prompt
    module, _, function = kind.make.partition(":")
    make = getattr(importlib.import_module(module), function)
    task, of_task = make(config, tokenizer, name)
    if task.heldout:  # the embedded task, whose prompts all have one length
        longest = len(tokenizer(task.prompt(task.heldout[0]))["input_ids"])
        if longest > room:
            raise BadInput(
                f"--max-tokens {config.max_tokens}: with a prompt of {longest} tokens it exceeds "
                f"the model's context of {context}; lower it"
            )
    else:
        config = fit(config, notes, len(task.train))
        task, dropped = split(
            task, tokenizer, heldout=config.heldout, seed=config.seed, max_prompt_tokens=room
        )
        of_task += dropped
    digest = digest_of(task.train + task.heldout)
    if config.resume and config.digest != digest:
        raise BadInput(
            f"--resume {config.resume}: --data {config.data} or the checkpoint's complete.json "
            "says other problems now; restore it"
        )
    return replace(config, digest=digest), task, notes + of_task


def fit(config: Config, notes: list[str], problems: int) -> Config:
    """The configuration with sizes that so many problems fill, as far as they were not given."""
    reason = f"there are {problems} problems"
    config = lower(config, notes, reason, heldout=max(1, problems // 5))
    left = max(1, problems - config.heldout)  # problems left for training
    # a given step may be no multiple of a smaller update
    if config.prompts_per_step == defaults_of(config.task).prompts_per_step:
        config = lower(config, notes, reason, prompts_per_update=left)
    groups = config.prompts_per_update
    return lower(config, notes, reason, prompts_per_step=max(1, left // groups) * groups)


def lower(config: Config, notes: list[str], reason: str, **most: int) -> Config:
    """The configuration with sizes lowered to `most`, unless they were given; adds to the notes.

    The sizes of a run that is resumed stay.
    """
    default = defaults_of(config.task)
    for name, limit in most.items():
        size = getattr(config, name)
        if size > limit and size == getattr(default, name) and not config.resume:
            lowered: dict[str, Any] = {name: limit}
            config = replace(config, **lowered)
            notes.append(f"{flag(name)} {limit}, not {size}: {reason}")
    return config


def template_of(template: Template, model: str, tokenizer: PreTrainedTokenizerBase) -> Template:
    """The template of a model's prompts; auto: that of the run that made the model."""
    run = files.run_of(model)
    if template == "auto":
        template = run.get("template", template)
    return choose_template(template, run.get("model") or model, tokenizer)


def task_of_run(path: str) -> tuple[Config, Task]:
    """The configuration and the task of the run that the model at `path` is from.

    Raises BadInput if the run's problems are not those that it had.
    """
    config = read_config(files.run_of(path), f"--model {path}")
    model, tokenizer = models.load_outline(path)
    made, task, _ = make_task(config, tokenizer, models.context_of(model))
    if made.digest != config.digest:
        raise BadInput(
            f"--model {path}: config.json of its run, or --data {config.data}, says other problems "
            "than the run had; restore it"
        )
    return config, task


# ---- lessons -------------------------------------------------------------------------------------


def give_lessons(run: Run) -> None:
    """Teach the model the lessons of its task; `start/` in the run's folder has it then.

    Raises BadInput for steps without lessons, and for lessons without steps.
    """
    config = run.config
    context = run.context
    if run.parts.lessons is not lessons_of_task and not (config.warmup_steps or config.resume):
        raise BadInput(f"--use {' '.join(config.use)}: gives lessons; add --warmup-steps")
    if not needs_lessons(config):
        return
    lessons = run.parts.lessons(context)
    if not lessons:
        raise refusal(config, "warmup_steps", "the task has no lessons; leave it out")
    start = run.folder / "start"
    if run.ranks.main and not start.exists():
        with files.whole_folder(start) as draft:
            teach_policy(run, lessons)
            save_pretrained(context.policy.model, context.tokenizer, draft)
    fsdp.gather(None, run.ranks)  # until it is there
    taught = models.load_model(str(start), run.ranks.device, context.tokenizer)
    context.policy = Policy(taught.eval())


def needs_lessons(config: Config) -> bool:
    """Whether a run begins with lessons.

    It does with `--warmup-steps`, unless it is resumed or its model is that of a run with the
    task's own lessons.
    """
    if config.resume or not config.warmup_steps:
        return False
    kind = TASKS[config.task]
    if kind.makes_model:
        return not config.model
    was_taught = files.run_of(config.model or "").get("task") == config.task
    return not (kind.makes_problems and was_taught)


def teach_policy(run: Run, lessons: Callable[..., float]) -> None:
    """Teach the policy, in float32, no held-out problem; print how long it took."""
    context = run.context
    began = time.perf_counter()
    loss = lessons(
        context.policy.model.float(),
        forbidden=heldout_prompts(context.task),
        steps=run.config.warmup_steps,
    )
    seconds = time.perf_counter() - began
    print(f"warm-up: {run.config.warmup_steps} steps, loss {loss:.3f}, {seconds:.0f} s")


def heldout_prompts(task: Task) -> set[str]:
    """The problems that no lesson may show."""
    return {problem["problem"] for problem in task.heldout}
