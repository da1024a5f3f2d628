"""Loading a run: its task, its model and tokenizer, refusing what would train wrongly.

    load_run(config, ranks)  -> Run, with problems and the whole model, which one rank could run
    give_lessons(run)        teaches the model the lessons of its task, or takes a taught one

What is loaded is checked here, before a step is taken, and what is small before weights are read:
that folders and files are there, that every rank has work, that the model is one that can be
trained and sampled as asked, that it fits, and that prompts and responses fit its context.
"""

import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from credit import lora, teacher
from credit.reward_model import RewardModel
from credit.table import Need
from grpo import Policy
from harness import evaluation, files, fsdp, memory, models
from harness.config import TrainConfig, flag, flat, with_values
from harness.evaluation import context_of
from harness.run import Ranks, Run, make_context
from tasks import benchmarks, lessons, problems, toy, words
from tasks.benchmarks import Loaded
from tasks.errors import BadInput
from tasks.problems import SmokeTask, Task, digest_of, split
from tasks.settings import TASKS

# (settings, grading, seed, tokenizer, the model's name) -> the task, and notes.
_MAKE_TASK: dict[str, Callable[..., tuple[Task, list[str]]]] = {
    "embedded": toy.task,
    "words": words.task,
    "math": partial(problems.task, "math"),
    "code": partial(problems.task, "code"),
    "own": partial(problems.task, "math"),
}
LESSONS = "lessons.json"  # beside a taught model: the digest of what it was taught


def load_run(config: TrainConfig, ranks: Ranks) -> Run:
    """Load and check a model without its weights, then problems, then the weights.

    Sizes that were not given fit the data. Raises BadInput, on all ranks alike.
    """
    with fsdp.together(ranks):
        if config.model:
            model, tokenizer = models.load_outline(config.model)
        else:
            problems = config.problems
            model = toy.make_model(problems.toy_lines, config.seed, problems.toy_width)
            tokenizer = toy.make_tokenizer(problems.toy_lines)
        config, task, task_notes = make_task(config, tokenizer, context_of(model))
        check_ranks(config, ranks)
        prompts = map(task.prompt, task.train + task.heldout)
        models.check_embedded("--model", config.model or "", model, tokenizer, prompts)
        sets = load_benchmarks(config, model, tokenizer)
        notes = describe(config, ranks, task, model, sets) + task_notes
        if config.smoke:
            task = SmokeTask(**vars(task))
        prm = None
        if config.credit.prm:
            dtype = getattr(torch, config.machine.dtype)
            prm = models.load_reward_model(config.credit.prm, ranks.device, dtype)
        if not config.machine.generate_batch:
            batch = choose_batch_of_run(config, ranks, task, model, tokenizer, prm)
            config = with_values(config, {"generate_batch": batch})
        if ranks.device.type == "cuda" or not TASKS[config.task].makes_model:
            notes += memory.plan(model, config, ranks)
        if config.model:
            if ranks.main:
                print(f"loading {config.model}", flush=True)
            model = models.load_model(config.model, ranks.device, tokenizer)
        model.eval()  # throughout: dropout would make sampler and trainer disagree
        context = make_context(config, Policy(model), tokenizer, task, prm)
        return Run(config, ranks, context, sets, notes)


def describe(
    config: TrainConfig, ranks: Ranks, task: Task, model: PreTrainedModel, sets: list[Loaded]
) -> list[str]:
    """The plan's lines on device, number formats and threads, on model, problems and benchmarks."""
    numbers = f"weights and optimizer float32, compute {config.machine.dtype}"
    threads = f"{torch.get_num_threads()} CPU threads each"
    device: str = config.machine.device
    if device == "cpu" and torch.backends.mps.is_available():
        device = "cpu (not mps, which has no float64)"
    size = f"{model.num_parameters():,} parameters, context {context_of(model)}"
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
    for loaded in sets:
        notes += loaded.notes
    if config.smoke:
        notes.append("smoke test: verdicts alternate, whatever a response says")
    return notes


def choose_batch_of_run(
    config: TrainConfig,
    ranks: Ranks,
    task: Task,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prm: RewardModel | None,
) -> int:
    """The default of --generate-batch, which config.json keeps: the samples depend on it."""
    resident = memory.predict(model, config, ranks.world)["resident"]
    room = memory.room_gb(ranks.device) - resident - (memory.gb_of(prm[0]) if prm else 0)
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
    needs = config.credit.entry.needs
    responses = 1 + (Need.PEER in needs)  # how many must fit into the context together
    size = Sizes(config)
    if not TASKS[config.task].makes_model and responses * config.sampling.max_tokens >= context:
        most = int(context // (1 + responses))
        size.shrink("max_tokens", most, f"the model's context is {context}")
    max_tokens = size.config.sampling.max_tokens
    room = context - responses * max_tokens  # tokens left for the prompt
    name = files.origin_of(config.model or "made here")
    make = _MAKE_TASK[config.task]
    task, notes = make(config.problems, config.grading, config.seed, tokenizer, name)
    if task.heldout:  # the embedded task, whose prompts all have one length
        problem = task.informed(task.heldout[0]) if Need.HINT in needs else task.heldout[0]
        longest = len(tokenizer(task.prompt(problem))["input_ids"])
        if longest > room:
            raise BadInput(
                f"--max-tokens {max_tokens}: with a prompt of {longest} tokens it exceeds the "
                f"model's context of {context}; lower it"
            )
    else:
        task, dropped = hold_out(size, task, tokenizer, room)
        notes += [*size.notes, *dropped]
    if config.problems.warmup_steps and not task.lessons:
        raise BadInput(
            f"--warmup-steps {config.problems.warmup_steps}: no row that is trained on has a "
            f'"solution" in --data {config.problems.data}; leave it out'
        )
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
        with_answer=Need.HINT in config.credit.entry.needs,  # prompts must fit with their answer
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
    made, task, _ = make_task(config, tokenizer, context_of(model))
    if config.digest and made.digest != config.digest:
        raise BadInput(
            f"--model {path}: config.json of its run, or --data {config.problems.data}, says other "
            "problems than the run had; restore it"
        )
    return config, task


def load_benchmarks(
    config: TrainConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[Loaded]:
    """The sets of --bench, refusing those that the model cannot be asked; raises BadInput."""
    make_embedded = partial(
        benchmarks.embedded_set, config.problems.toy_lines, config.problems.heldout, config.seed
    )
    sets = benchmarks.load_sets(
        list(config.evaluation.bench),
        list(config.evaluation.bench_data),
        {"embedded": make_embedded},
        flag="--bench-data",
    )
    protocol = evaluation.protocol_of(config)
    origin = files.origin_of(config.model or "the model")
    for loaded in sets:
        task = evaluation.as_task(loaded, protocol, tokenizer, origin)
        prompts = map(task.prompt, loaded.problems)
        models.check_embedded("--model", config.model or "", model, tokenizer, prompts)
    return sets


# ---- lessons -------------------------------------------------------------------------------------


def give_lessons(run: Run) -> None:
    """Teach the model the lessons of its task, and the reward model if the method needs one.

    Lessons are left out where `needs_lessons` is false.
    """
    if needs_lessons(run):
        run.context.policy = Policy(teach_policy(run))
    if Need.PRM in run.config.credit.entry.needs and not run.context.prm:
        run.context.prm = own_prm(run)


def needs_lessons(run: Run) -> bool:
    """Whether a run begins with lessons.

    It does where there are some, unless it is resumed or its model is that of a run with the task's
    own ones.
    """
    config = run.config
    if (
        config.checkpoints.resume
        or not config.problems.warmup_steps
        or not run.context.task.lessons
    ):
        return False
    kind = TASKS[config.task]
    if kind.makes_model:
        return not config.model
    was_taught = files.run_of(config.model or "").get("task") == config.task
    return not (kind.makes_problems and was_taught)


def teach_policy(run: Run) -> PreTrainedModel:
    """The policy after its lessons, in float32: `start/` in the run's folder.

    Lessons are taught once: a run takes the taught model of an earlier run in `--out` whose lessons
    were the same.
    """
    context = run.context
    start = run.folder / "start"
    if run.ranks.main and not start.exists():
        digest = digest_of_lessons(run)
        earlier = find_taught(Path(run.config.out), digest)
        with files.whole_folder(start) as draft:
            if earlier:
                print(f"warm-up: as in {earlier}, whose lessons were the same")
                shutil.copytree(earlier, draft, dirs_exist_ok=True)
            else:
                is_whole = give_warm_up(run)
                lora.save_merged(context.policy.model, context.tokenizer, draft)
                if is_whole:
                    files.write_json(draft / LESSONS, {"digest": digest})
        if not (start / LESSONS).exists():
            raise KeyboardInterrupt
    fsdp.gather(None, run.ranks)  # until it is there
    return models.load_model(str(start), run.ranks.device, context.tokenizer).eval()


def give_warm_up(run: Run) -> bool:
    """Teach the policy, in float32, and print how long it took.

    Returns False where Ctrl-C ended the lessons early.
    """
    context = run.context
    assert context.task.lessons  # `needs_lessons`
    model = context.policy.model.float()
    steps = run.config.problems.warmup_steps
    began = time.perf_counter()
    try:
        loss = context.task.lessons(model, forbidden=heldout_prompts(context.task), steps=steps)
    except KeyboardInterrupt:
        return False
    seconds = time.perf_counter() - began
    print(f"warm-up: {steps} steps, loss {loss:.3f}, {seconds:.0f} s")
    return True


def digest_of_lessons(run: Run) -> str:
    """A digest of all that the taught model depends on, to the bit.

    That is the model before its lessons, the problems that they may not show, their seed and
    number, the code that makes and gives them, and how this machine computes.
    """
    config = run.config
    weights = 0
    for number, parameter in enumerate(run.context.policy.model.parameters()):
        weights += int(fsdp.checksum(parameter, number))
    facts = [config.task, config.seed, config.problems.warmup_steps, config.digest, weights]
    facts += [problem.get("solution") for problem in run.context.task.train]
    facts += [config.machine.device, torch.get_num_threads(), torch.__version__]
    digest = hashlib.sha256(repr(facts).encode())
    for path in sorted(Path(lessons.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def find_taught(out: Path, digest: str) -> Path | None:
    """The folder of a model in `out` that was taught these lessons."""
    for path in sorted(out.glob(f"*/start/{LESSONS}")):
        if files.read_settings(path).get("digest") == digest:
            return path.parent
    return None


def own_prm(run: Run) -> RewardModel:
    """The embedded task's process reward model, `prm/` in the run's folder.

    It is taught unless it is there. Raises BadInput if a resumed run lacks it.
    """
    config = run.config
    context = run.context
    folder = run.folder / "prm"
    if run.ranks.main and not config.checkpoints.resume and not folder.exists():
        model, tokenizer = teacher.make_prm(
            context.policy.model,
            config.problems.toy_lines,
            heldout_prompts(context.task),
            seed=config.seed,
        )
        with files.whole_folder(folder) as draft:
            lora.save_merged(model, tokenizer, draft)
    fsdp.gather(None, run.ranks)  # until it is there
    return models.load_reward_model(str(folder), run.ranks.device, torch.float32)


def heldout_prompts(task: Task) -> set[str]:
    """The problems that no lesson may show."""
    return {problem["problem"] for problem in task.heldout}
