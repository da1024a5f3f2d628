"""A run: loading it, its warm-up, and what every step of it needs.

    resolve(config)               the configuration on this machine
    load_run(config, ranks)       -> Loaded: problems and the whole model, which one rank could run
    warm_up_policy(loaded, ...)   supervised steps before training
    start_run(loaded, folder)     -> Run: what is trained, what samples, and the optimizer
    sample(run, problems, ...)    responses of the policy
    check_verdicts, check_policy  end a run that cannot go on
    Hooks                         the functions that a module of `--use` may replace

What is loaded is checked here, before a step is taken, and what is small before weights are read:
that folders and files are there, that every rank has work, that the model is one that can be
trained and sampled as asked, and that prompts and responses fit its context.
"""

import hashlib
import importlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from base import files
from base.config import TASKS, Config, Template, defaults_of, flag, ignored_by, read_config, refusal
from base.errors import BadInput, RunFailed
from base.options import look_up, module_of, options_of
from credit.batch import Batch, Context
from credit.rules import Rule, with_options
from grpo import PADDED, Layout, Policy, Rollouts, hf_generate, rollout, token_ids
from harness import fsdp, models
from harness.fsdp import Ranks
from rewards import NoVerdict, Verdict
from tasks import toy
from tasks.reward import digest_of_reward, load_reward
from tasks.task import Task, choose_template, digest_of, split

EVALUATION = 2**31  # instead of a step, before and after training alike
ASSIGNS_TASK = re.compile(r"^\s*(?:\w+\.)*TASKS\[.+\] = ", re.M)
MOST_THREADS = 4  # of a rank on the embedded task, whose model is tiny


def save_pretrained(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Save model and tokenizer as any tool loads them."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass
class Hooks:
    """The functions of a run that a module of `--use` may replace.

    Its `use(hooks, NAME=VALUE, ...)` is called before anything is loaded, and only assigns
    functions: the model is warmed up, adapted and sharded later, in this order. eval.py calls
    `generate` alone.
    """

    generate: Callable[..., Tensor] = hf_generate
    # of a step's rollouts; evaluations have the task's own
    verdicts: Callable[[Task, list[dict], Rollouts], list[Verdict]] = Task.verdicts
    layout: Callable[[PreTrainedModel], Layout] | None = None  # None: padded rows
    warm_up: Callable[[Context], Callable[..., float]] | None = None  # None: that of the task
    # of a model in place, before it is sharded; None: all its weights are trained
    adapt: Callable[[PreTrainedModel, int], None] | None = None
    save_model: Callable[[PreTrainedModel, PreTrainedTokenizerBase, Path], None] = save_pretrained
    # "cost", "measure", "closest" and "pool": arguments of `shear.shear_weights`
    shear: dict[str, Callable] = field(default_factory=dict)


@dataclass
class Loaded:
    """A run before its first step: its policy is the whole model."""

    config: Config
    ranks: Ranks
    # Its policy samples and scores: a whole copy of the weights, in the dtype of compute.
    context: Context
    hooks: Hooks
    stops: list[int]  # the ids that end a response
    batch_tokens: int  # that are generated at a time: --generate-batch of the longest prompt
    notes: list[str]  # for the user, about what was loaded


@dataclass
class Run(Loaded):
    """A run that can take steps."""

    folder: Path
    rule: Rule
    # float32 weights, sharded over the ranks; the context's policy itself on one rank in float32
    trained: Policy
    optimizer: torch.optim.Optimizer
    interrupted: bool = False  # by Ctrl-C: this step is the last


def make_context(
    config: Config,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    hooks: dict[str, Callable],
) -> Context:
    """What credit methods see of a run with this configuration, before its first step."""
    return Context(
        policy=policy,
        tokenizer=tokenizer,
        task=task,
        shear=config,
        seed=config.seed,
        temperature=config.temperature,
        micro_tokens=config.micro_tokens,
        hooks=hooks,
    )


def seed_of(seed: int, step: int = EVALUATION, rank: int = 0) -> int:
    """A seed that depends on seed, step and rank alone: methods see the same random numbers."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])


# ---- loading -------------------------------------------------------------------------------------


def use(hooks: Hooks, modules: Sequence[str]) -> None:
    """Let the modules of `--use` replace `hooks`, in their order; raises BadInput."""
    for text in modules:
        module = module_of(text)
        change = getattr(module, "use", None)
        if not change and not enters_something(module):
            reason = "has no function use(hooks), and enters no rule or task"
            raise BadInput(f"--use {text}: {reason}; leave it out")
        change = change or replace_nothing
        given = filter(None, text.partition(":")[2].split(","))
        change(hooks, **options_of(change, given, f"--use {text}"))


def enters_something(module: ModuleType) -> bool:
    """Whether importing a module enters a rule or a task: it has `rule`, or assigns to TASKS."""
    file = getattr(module, "__file__", None) or ""
    text = Path(file).read_text(encoding="utf-8") if file.endswith(".py") else ""
    return "rule" in vars(module) or ASSIGNS_TASK.search(text) is not None


def replace_nothing(hooks: Hooks) -> None:
    """The `use` of a module that enters rules or tasks, which importing it has done."""


def resolve(config: Config) -> Config:
    """The configuration on this machine; raises BadInput for an unknown rule, option or reward."""
    with_options(config, config.use)
    if config.reward:
        load_reward(config.reward)  # what is wrong with it shows before a model is loaded
        digest = digest_of_reward(config.reward)
        if config.resume and digest != config.reward_digest:
            raise refusal(config, "reward", "its file has changed since the run began; restore it")
        config = replace(config, reward_digest=digest)
    if not config.max_tokens:  # a full response of the embedded task
        config = replace(config, max_tokens=toy.response_tokens(config.toy_lines))
    makes_model = TASKS[config.task].makes_model
    config = fsdp.on_machine(config, half=not makes_model)
    check_shares(config, fsdp.processes(config))
    if makes_model and (config.resume or not config.threads):  # perhaps on more ranks than before
        most = config.threads or MOST_THREADS
        config = replace(config, threads=min(most, torch.get_num_threads()))
    return config


def check_shares(config: Config, ranks: int) -> None:
    """Raise BadInput where a rank would have no problem of a step or an evaluation."""
    for name in ("prompts_per_step", "heldout", "eval_groups"):
        if getattr(config, name) < ranks:
            reason = f"there are {ranks} ranks; raise it, or start fewer ranks"
            raise refusal(config, name, reason)


def load_run(config: Config, ranks: Ranks) -> Loaded:
    """Load and check a model without its weights, then problems, then the weights.

    Sizes that were not given fit the data. A run that is resumed takes the model, its tokenizer and
    its settings from the checkpoint. Raises BadInput, on all ranks alike.
    """
    with fsdp.raise_together(ranks):
        source = config.model
        if config.resume and source:
            source = str(files.find_checkpoint(Path(config.resume))[0] / "model")
        with fsdp.main_first(ranks):
            hooks = Hooks()
            use(hooks, config.use)  # other functions in place of the core's
            if source:
                model, tokenizer = models.load_outline(source)
            else:
                model = toy.make_model(config.toy_lines, config.seed, config.toy_width)
                tokenizer = toy.make_tokenizer(config.toy_lines)
            config, task, notes = make_task(config, tokenizer, models.context_of(model))
        check_shares(config, ranks.world)
        prompts = token_ids(tokenizer, list(map(task.prompt, task.train + task.heldout)))
        models.check_embedded("--model", source or "", model, tokenizer, prompts)
        config = check_tokens(config, prompts)
        if source and hooks.adapt:  # the outline, so that memory is that of what is trained
            hooks.adapt(model, config.seed)
        longest = max(map(len, prompts))
        room = models.room_gb(ranks.device) - models.resident_gb(model, config, ranks.world)
        batch = models.choose_batch(model.config, config, room, longest, config.max_tokens)
        config = replace(config, generate_batch=batch)  # kept, as the samples depend on it
        if ranks.device.type == "cuda" or source:
            notes += models.memory_notes(model, config, ranks.world, ranks.device)
        if source:
            if ranks.main:
                print(f"loading {source}", flush=True)
            model = models.load_model(source, ranks.device, tokenizer)
        model.eval()  # throughout: dropout would make sampler and trainer disagree
        context = make_context(config, Policy(model), tokenizer, task, hooks.shear)
        stops = models.stop_ids(model, tokenizer)
        batch_tokens = batch * (longest + config.max_tokens)
        return Loaded(config, ranks, context, hooks, stops, batch_tokens, notes)


def check_tokens(config: Config, prompts: list[list[int]]) -> Config:
    """The configuration with the digest of the prompts' token ids.

    Raises BadInput for a resumed run whose tokenizer encodes them otherwise than it did.
    """
    digest = hashlib.sha256(repr(prompts).encode()).hexdigest()[:12]
    if config.resume and digest != config.token_digest:
        raise BadInput(
            f"--resume {config.resume}: the tokenizer in model/ encodes the prompts otherwise than "
            "the run had them; restore it"
        )
    return replace(config, token_digest=digest)


def make_task(
    config: Config, tokenizer: PreTrainedTokenizerBase, context: float
) -> tuple[Config, Task, list[str]]:
    """Make the task; its prompts leave room for a response in the model's `context`.

    Returns the configuration, with sizes that fit the problems and their digest, the task, and
    notes. Raises BadInput.
    """
    spec = look_up(TASKS, "tasks", "--task", config.task, config.use)
    name = config.model or "made here"
    if "template" not in ignored_by(spec, config):
        template = template_of(config.template, name, tokenizer)
        config = replace(config, template=template)
    notes: list[str] = []
    if not spec.makes_model and config.max_tokens >= context:
        reason = f"the model's context is {context}"
        config = lower(config, notes, reason, max_tokens=int(context // 2))
    room = context - config.max_tokens  # tokens left for the prompt
    module, _, function = spec.make.partition(":")
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


# ---- from loading to the first step --------------------------------------------------------------


def warm_up_policy(loaded: Loaded, folder: Path) -> None:
    """Give the policy the warm-up of its task; `start/` in the run's folder has it then.

    Raises BadInput for steps without a warm-up, and for a warm-up without steps.
    """
    config = loaded.config
    context = loaded.context
    hook = loaded.hooks.warm_up
    if hook and not (config.warmup_steps or config.resume):
        raise BadInput(f"--use {' '.join(config.use)}: gives a warm-up; add --warmup-steps")
    if not needs_warm_up(config):
        return
    teach = hook(context) if hook else context.task.warm_up
    if not teach:
        raise refusal(config, "warmup_steps", "the task has no warm-up; leave it out")
    start = folder / "start"
    if loaded.ranks.main and not start.exists():
        with files.whole_folder(start) as draft:
            began = time.perf_counter()
            # in float32, and no held-out problem
            forbidden = heldout_prompts(context.task)
            loss = teach(
                context.policy.model.float(), forbidden=forbidden, steps=config.warmup_steps
            )
            seconds = time.perf_counter() - began
            print(f"warm-up: {config.warmup_steps} steps, loss {loss:.3f}, {seconds:.0f} s")
            save_pretrained(context.policy.model, context.tokenizer, draft)
    fsdp.gather(None, loaded.ranks)  # until it is there
    taught = models.load_model(str(start), loaded.ranks.device, context.tokenizer)
    context.policy = Policy(taught.eval())


def needs_warm_up(config: Config) -> bool:
    """Whether a run begins with a warm-up.

    It does with `--warmup-steps`, unless it is resumed or its model is that of a run with the
    task's own warm-up.
    """
    if config.resume or not config.warmup_steps:
        return False
    spec = TASKS[config.task]
    if spec.makes_model:
        return not config.model
    was_taught = files.run_of(config.model or "").get("task") == config.task
    return not (spec.makes_problems and was_taught)


def heldout_prompts(task: Task) -> set[str]:
    """The problems that no warm-up may show."""
    return {problem["problem"] for problem in task.heldout}


def start_run(loaded: Loaded, folder: Path) -> Run:
    """The run that a loaded model begins; raises BadInput, on all ranks, if its rule refuses it."""
    config = loaded.config
    context = loaded.context
    model = context.policy.model
    rule = prepare_rule(loaded, folder)
    if loaded.hooks.adapt:
        loaded.hooks.adapt(model, config.seed)
    torch.nn.Module.to(model, loaded.ranks.device)
    layout = loaded.hooks.layout(model) if loaded.hooks.layout else PADDED
    trained, context.policy, optimizer = fsdp.shard(model, layout, config, loaded.ranks)
    check_sampler(loaded)
    return Run(**vars(loaded), folder=folder, rule=rule, trained=trained, optimizer=optimizer)


def check_sampler(loaded: Loaded) -> None:
    """Raise BadInput, on all ranks, where functions of --use sample or score another model.

    The plain ones are compared when a model is loaded (`models.computes_as_ours`).
    """
    generate = loaded.hooks.generate
    context = loaded.context
    model = context.policy.model
    layout = context.policy.layout
    if generate is hf_generate and layout is PADDED:
        return
    ids = context.tokenizer("1 + 1 =")["input_ids"]
    long = (64 * ids)[: int(min(64, models.context_of(model) // 2))]
    prompts = [long, long, ids[:3]]  # two rollouts of one prompt, which a layout may read once
    with fsdp.raise_together(loaded.ranks):
        if not models.samples_as_it_scores(
            model, context.tokenizer, prompts, generate, layout, context.temperature
        ):
            raise BadInput(
                f"--use {' '.join(loaded.config.use)}: the log-probabilities of sampling and of "
                "scoring differ; leave it out"
            )


def prepare_rule(loaded: Loaded, folder: Path) -> Rule:
    """The credit rule, which has loaded or made in the run's folder what it needs.

    Raises BadInput, on all ranks.
    """
    rule = with_options(loaded.config)
    if rule.prepare:
        with fsdp.raise_together(loaded.ranks):
            rule.prepare(loaded, folder)
    return rule


# ---- what a step needs ---------------------------------------------------------------------------


def sample(run: Loaded, problems: list[dict], count: int, temperature: float) -> Rollouts:
    """`count` responses of the policy to each problem, those to one problem adjacent."""
    context = run.context
    return rollout(
        context.policy.model,
        context.tokenizer,
        [context.task.prompt(problem) for problem in problems],
        count,
        max_tokens=run.config.max_tokens,
        temperature=temperature,
        stops=run.stops,
        batch_tokens=run.batch_tokens,
        generate=run.hooks.generate,
    )


def check_verdicts(batch: Batch, verdicts: list[Verdict], step: int, ranks: Ranks) -> None:
    """Raise RunFailed, on all ranks, if no complete response of a step has a verdict.

    `batch` holds the rollouts of all ranks, `verdicts` are this rank's. The message has the first
    cause.
    """
    rewards = batch.rewards[~batch.rollouts.truncated]  # (n,); those that are cut off are wrong
    if len(rewards) and rewards.isnan().all():
        own = [verdict.cause for verdict in verdicts if isinstance(verdict, NoVerdict)]
        causes = [*fsdp.gather_items(own, ranks), "the reward gave no verdict"]
        raise RunFailed(f"step {step + 1}: no response could be graded: {causes[0]}")


@torch.no_grad()
def check_policy(run: Run, step: int) -> None:
    """Raise RunFailed if the policy's logits are not finite after a step's updates.

    Such a policy could not sample any more.
    """
    context = run.context
    prompt = context.task.prompt(context.task.train[0])
    ids = context.tokenizer(prompt, return_tensors="pt")["input_ids"]  # (1, P)
    if not context.policy.model(ids.to(run.ranks.device)).logits.isfinite().all():
        raise RunFailed(
            f"step {step + 1}: the policy's logits are not finite after its updates; lower --lr"
        )
