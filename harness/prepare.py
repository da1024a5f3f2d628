"""From flags to a task, a model and its tokenizer, refusing what would train wrongly.

    set_up(args, ranks)   -> Ready: task, model, tokenizer, ..., and notes for the plan
    make_start, own_prm   -> what the embedded task makes itself: its policy's start, its process
                          reward model

What is loaded is checked here, before a step is taken, and what is small before weights are read:
that folders and files are there, that every rank has work, that the model is one that can be
trained and sampled as asked, that it fits, and that prompts and responses fit its context.
"""

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from credit import teacher
from credit.table import METHODS
from fast.packing import attends_fully
from grpo import layers_of
from harness import evaluation, files, memory, models, parallel
from harness.config import TASKS, flag
from harness.evaluation import context_of
from harness.parallel import Ranks
from tasks import benchmarks, toy, words
from tasks.benchmarks import Loaded
from tasks.problems import BadInput, Task, choose_template, grader, load_problems, split, text_task

# to train on; a number that does not depend on --steps, so that a resumed run draws the same
MADE_PROBLEMS = 640


class Ready(NamedTuple):
    """What a run starts from."""

    task: Task
    model: torch.nn.Module
    tokenizer: object
    notes: list[str]  # for the user, about what was loaded
    prm: tuple | None  # --prm, loaded
    sets: list[Loaded]  # of --bench
    predicted: dict[str, float]  # GB of a rank's memory by part


def set_up(args: argparse.Namespace, ranks: Ranks) -> Ready:
    """What is loaded, checked: what tells a model without its weights, then problems, then weights.
    Raises BadInput.
    """
    if args.model:
        model, tokenizer = models.load_outline(args.model)
    else:
        model, tokenizer = (
            toy.make_model(args.toy_lines, args.seed, args.toy_width),
            toy.make_tokenizer(),
        )
    predict = partial(memory.predict, model.config, args, ranks.world, memory.room_gb(ranks.device))
    if args.model:
        memory.refuse_what_cannot_fit(predict(), args, ranks)
    if args.prm:
        models.load_reward_tokenizer(args.prm)
    compute = "weights and optimizer float32" + (
        "" if args.dtype == "float32" else f", compute {args.dtype}"
    )
    notes = [
        f"{ranks.world} rank(s) on {args.device}, {compute}, {torch.get_num_threads()} CPU threads "
        "each"
    ]
    notes += check_architecture(args, model.eval())
    task, about = make_task(args, tokenizer, context_of(model))
    check_ranks(args, ranks)
    size = f"{sum(p.numel() for p in model.parameters()):,} parameters, context {context_of(model)}"
    notes += [*about, f"model {args.model or 'made here'}: {type(model).__name__}, {size}"]
    notes.append(f"{len(task.train)} problems to train on, {len(task.heldout)} held out")
    if args.data:
        steps = -(-len(task.train) // args.prompts_per_step)
        notes.append(
            f"a pass over --data takes {steps} step(s); --lr is {args.lr:g}, and models below 1B "
            "need 1e-5 to 1e-4"
        )
    sets = load_benchmarks(args, tokenizer)
    notes += [note for loaded in sets for note in loaded.notes]
    if args.smoke:
        notes.append("smoke test: rewards in training are drawn, whatever a response says")
    if args.model:
        if ranks.main:
            print(f"loading {args.model}", flush=True)
        model = models.load_model(args.model, ranks.device, tokenizer)
    prm = (
        models.load_reward_model(args.prm, ranks.device, getattr(torch, args.dtype))
        if args.prm
        else None
    )
    model.eval()  # throughout: dropout would make sampler and trainer disagree
    return Ready(task, model, tokenizer, notes, prm, sets, predict())


def check_ranks(args: argparse.Namespace, ranks: Ranks) -> None:
    """Refuse more ranks than there is work for, and shards that do not divide them; raises
    BadInput.
    """
    for name in ("prompts_per_step", "heldout", "eval_groups"):
        if getattr(args, name) < ranks.world:
            few = f"{flag(name)} {getattr(args, name)}: there are {ranks.world} ranks"
            raise BadInput(f"{few}; raise it, or start fewer ranks")
    if args.shard_over and ranks.world % args.shard_over:
        raise BadInput(
            f"--shard-over {args.shard_over}: does not divide {ranks.world} ranks; change it"
        )


def check_architecture(args: argparse.Namespace, model) -> list[str]:
    """Notes on how a model, which may be without weights, can be run; raises BadInput where it
    cannot be as asked.
    """
    needs = METHODS[args.method].needs
    if "attention" in needs and not all(hasattr(layer, "self_attn") for layer in layers_of(model)):
        reason = "its layers have no self_attn; choose another --method than"
        raise BadInput(f"--model {args.model}: {reason} {args.method}")
    notes = []
    if not attends_fully(model.config):
        notes.append(
            f"rollouts are padded to the longest of each pass: {model.config.model_type} is not "
            "known to pack"
        )
    return notes


def make_task(args: argparse.Namespace, tokenizer, context: float) -> tuple[Task, list[str]]:
    """Problems whose prompts leave room for a response in the model's `context`; and notes. Raises
    BadInput.
    """
    needs = METHODS[args.method].needs
    responses = 1 + ("peer" in needs)  # that must fit in together
    shrunk = []
    if args.task != "embedded" and responses * args.max_tokens >= context:
        shrunk = shrink(
            args, "max_tokens", context // (1 + responses), f"the model's context is {context}"
        )
    room = context - responses * args.max_tokens  # for the prompt
    if room < 1:
        shared = ", for a response and another in its prompt" if "peer" in needs else ""
        raise BadInput(
            f"--max-tokens {args.max_tokens}: the model's context is {context} tokens{shared}; "
            "lower it"
        )
    told = "hint" in needs  # prompts must fit with their answer, too
    if args.task == "embedded":
        longest = toy.prompt_tokens(args.toy_lines) + toy.HINT_TOKENS * told
        if room < longest:
            reason = (
                f"with a prompt of {longest} tokens it exceeds the model's context of {context}"
            )
            raise BadInput(f"--max-tokens {args.max_tokens}: {reason}; lower it")
        return embedded_task(args, tokenizer), []
    template = choose_template(args.template, files.origin_of(args.model), tokenizer)
    kind = "math" if args.task == "words" else args.task
    task = text_task(kind, template, tokenizer, grader(kind, args.grade_timeout, args.sandbox))
    if args.task == "words":
        problems, about = words.make_problems(MADE_PROBLEMS + args.heldout, args.seed), []
        task = replace(
            task,
            name="words",
            first_error=words.first_error,
            rephrase=words.rephrase,
            step_end="\n",
        )
    else:
        problems, about = load_problems(kind, args.data)
    there_are = f"there are {len(problems)} problems"
    shrunk += shrink(args, "heldout", max(1, len(problems) // 5), there_are)
    left = max(1, len(problems) - args.heldout)  # to train on
    if "prompts_per_step" not in args.given:  # else it would be no multiple
        shrunk += shrink(args, "prompts_per_update", left, there_are)
    whole = max(1, left // args.prompts_per_update) * args.prompts_per_update
    shrunk += shrink(args, "prompts_per_step", whole, there_are)
    limits = dict(heldout=args.heldout, seed=args.seed, max_prompt_tokens=room)
    task, dropped = split(task, problems, tokenizer, told=told, **limits)
    reason = "chosen by model and tokenizer" if args.template == "auto" else "asked for"
    return task, [*about, *shrunk, *dropped, f"template {template} ({reason})"]


def shrink(args: argparse.Namespace, name: str, most: int, reason: str) -> list[str]:
    """A size that was not given becomes `most` where it is larger; returns the note that
    says so.
    """
    size = getattr(args, name)
    if name in args.given or args.resume or not size > most:
        return []
    setattr(args, name, most)
    return [f"{flag(name)} {most}, not {size}: {reason}"]


def embedded_task(args: argparse.Namespace, tokenizer) -> Task:
    """The embedded task as a `Task`; raises BadInput where there are too few problems, or for
    another model.
    """
    if len(tokenizer) != len(toy.SYMBOLS):
        raise BadInput(
            f"--model {args.model}: not a model of the embedded task; add --task math and --data"
        )
    train, heldout = toy.make_problems(MADE_PROBLEMS, args.heldout, args.toy_lines, args.seed)
    if len(heldout) < args.heldout or len(train) < MADE_PROBLEMS:
        few = f"too few different problems for --heldout {args.heldout}"
        raise BadInput(f"--toy-lines {args.toy_lines}: {few}; raise it")
    return Task(
        "embedded",
        train,
        heldout,
        lambda problem: problem["problem"],
        grader("math", args.grade_timeout, args.sandbox),
        first_error=toy.first_error,
        rephrase=toy.rephrase,
        step_end="\n",
        hint=toy.HINT,
        solved="{}\n",
    )


def load_benchmarks(args: argparse.Namespace, tokenizer) -> list[Loaded]:
    """The sets of --bench, refusing those that the model cannot be asked; raises BadInput."""
    make_embedded = partial(benchmarks.embedded_set, args.toy_lines, args.heldout, args.seed)
    sets = benchmarks.load_sets(
        args.bench, args.bench_data, args.sandbox, make_embedded, flag="--bench-data"
    )
    for loaded in sets:
        evaluation.as_task(
            loaded,
            evaluation.protocol_of(args),
            tokenizer,
            files.origin_of(args.model or "the model"),
        )
    return sets


def needs_start(args: argparse.Namespace) -> bool:
    """Whether a run begins with lessons: on a task that has them, unless its model is a run's of
    that task.
    """
    if args.task not in TASKS or args.resume or not args.warmup_steps:
        return False
    return not args.model or (
        args.task == "words" and files.run_of(args.model).get("task") != "words"
    )


def make_start(
    model, tokenizer, task: Task, args: argparse.Namespace, folder: Path, ranks: Ranks
) -> None:
    """A made task's supervised start, on one rank for all."""
    model.float()  # on every rank: rank 0's weights are copied into theirs
    if ranks.main:
        forbidden = {problem["problem"] for problem in task.heldout}
        limits = dict(steps=args.warmup_steps, seed=args.seed)
        started = time.perf_counter()
        if args.task == "embedded":
            loss = toy.warm_up(model, args.toy_lines, forbidden, **limits)
        else:
            loss = words.warm_up(model, tokenizer, task.prompt, forbidden, **limits)
        print(
            f"warm-up: {args.warmup_steps} steps, loss {loss:.3f}, "
            f"{time.perf_counter() - started:.0f} s"
        )
        with files.whole_folder(folder / "start") as draft:
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
    parallel.broadcast(model, ranks)


def own_prm(model, task: Task, args: argparse.Namespace, folder: Path, ranks: Ranks) -> tuple:
    """The embedded task's process reward model, taught by one rank for all; a resumed run has it
    already.
    """
    if ranks.main and not args.resume:
        forbidden = {problem["problem"] for problem in task.heldout}
        reward_model, its_tokenizer = teacher.make_prm(
            model, args.toy_lines, forbidden, seed=args.seed
        )
        with files.whole_folder(folder / "prm") as draft:
            reward_model.save_pretrained(draft)
            its_tokenizer.save_pretrained(draft)
    parallel.gather(None, ranks)  # until it is there
    return models.load_reward_model(str(folder / "prm"), ranks.device, torch.float32)
