"""From flags to a task, a model and its tokenizer, refusing what would train wrongly.

    set_up(args, ranks)   -> Ready: task, model, tokenizer, ..., and notes for the plan
    warm_up, own_prm      -> what the embedded task makes itself: its policy's start, its process reward model
    protocol_of(args)     -> how --eval-every asks its benchmarks
    sampling_of(args, ..) -> how rollouts are generated

What is loaded is checked here, before a folder is made or a step is taken: that prompts and responses fit the
model's context, that every rank has work, that the folder's weights are complete and its tokenizer its own, and
that its logits are the head of its last hidden state, which `grpo.Policy` builds on.
"""

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from credit import prm, teacher
from fast import decode
from grpo import hf_generate, layers_of
from harness import evaluation, parallel
from harness.evaluation import Protocol
from harness.parallel import Ranks
from rewards import grade_code, grade_math
from tasks import benchmarks, toy
from tasks.benchmarks import Loaded
from tasks.problems import BadInput, Task, file_task

DECODERS = {"generate": hf_generate, "fast": decode.decode}  # of --decode
TOY_PROBLEMS = 640  # to train on; a number that does not depend on --steps, so that a resumed run draws the same


class Ready(NamedTuple):
    """What a run starts from."""

    task: Task
    model: torch.nn.Module
    tokenizer: object
    notes: list[str]  # for the user, about what was loaded
    prm: tuple | None  # --prm, loaded
    sets: list[Loaded]  # of --bench


def set_up(args: argparse.Namespace, ranks: Ranks) -> Ready:
    """Everything that is loaded, checked; raises BadInput, on all ranks alike."""
    ready = problem = None
    try:
        ready = _set_up(args, ranks)
    except BadInput as error:
        problem = error
    problems = [str(each) for each in parallel.gather(problem, ranks) if each]
    if problems:
        raise BadInput(problems[0]) from problem
    return ready


def _set_up(args: argparse.Namespace, ranks: Ranks) -> Ready:
    """`set_up` on one rank."""
    compute = "weights and optimizer float32" + ("" if args.dtype == "float32" else f", compute {args.dtype}")
    notes = [f"{ranks.world} rank(s) on {args.device}, {compute}, {torch.get_num_threads()} CPU threads each"]
    if args.model:
        if ranks.main:
            print(f"loading {args.model}", flush=True)
        model, tokenizer = load_model(args.model, ranks.device)
    else:
        model, tokenizer = toy.make_model(args.toy_lines, args.seed), toy.make_tokenizer()
    model.eval()  # throughout: dropout would make sampler and trainer disagree
    sampling_of(args, model)  # refuses what it cannot be
    if args.device == "cuda" and args.decode == "generate" and decode.supported(model):
        notes.append("--decode fast would replay CUDA graphs, several times faster, which no GPU has proved equal yet")
    for name, count in (
        ("batch", args.batch // args.group),
        ("heldout", args.heldout),
        ("eval-groups", args.eval_groups),
    ):
        if count < ranks.world:
            raise BadInput(f"--{name}: {count} problem(s) for {ranks.world} ranks; raise it, or start fewer ranks")
    if args.shard_over and ranks.world % args.shard_over:
        raise BadInput(f"--shard-over {args.shard_over}: does not divide {ranks.world} ranks; change it")
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    room = context - args.max_tokens  # for the prompt
    if room < 1:
        raise BadInput(f"--max-tokens {args.max_tokens}: the model's context is {context} tokens; lower it")
    told = args.method == "rlsd"  # prompts must fit with their answer, too
    if args.method == "attention" and not all(hasattr(layer, "self_attn") for layer in layers_of(model)):
        raise BadInput(f"--model {args.model}: its layers have no self_attn; choose another --method than attention")
    if args.task == "embedded":
        longest = toy.prompt_tokens(args.toy_lines) + toy.HINT_TOKENS * told
        if room < longest:
            raise BadInput(
                f"--max-tokens {args.max_tokens}: with a prompt of {longest} tokens it "
                f"exceeds the model's context of {context}; lower it"
            )
        task = embedded_task(args, tokenizer)
    else:
        sizes = dict(heldout=args.heldout, seed=args.seed, max_prompt_tokens=room)
        names = dict(template=args.template, model_name=args.model, told=told)
        task, about = file_task(args.task, args.data, tokenizer, grader(args), **names, **sizes)
        notes += about
    size = sum(p.numel() for p in model.parameters())
    notes.append(f"model {args.model or 'made here'}: {type(model).__name__}, {size:,} parameters, context {context}")
    notes.append(f"{len(task.train)} problems to train on, {len(task.heldout)} held out")
    sets = load_benchmarks(args, tokenizer) if args.bench else []
    notes += [note for loaded in sets for note in loaded.notes]
    judge = prm.load_reward_model(args.prm, ranks.device, getattr(torch, args.dtype)) if args.prm else None
    return Ready(task, model, tokenizer, notes, judge, sets)


def sampling_of(args: argparse.Namespace, model) -> dict:
    """The options of `grpo.rollout` that change speed alone; raises BadInput for a model that --decode cannot run."""
    if args.decode == "fast" and not decode.supported(model):
        raise BadInput(f"--decode fast: cannot run this {model.config.model_type} model; leave it out")
    options = dict(generate=DECODERS[args.decode])
    if args.generate_batch:
        options["batch_size"] = args.generate_batch
    elif model.device.type == "cuda":
        options["batch_size"] = partial(rows_at_a_time, model, args.decode)
    return options


def rows_at_a_time(model, decoder: str, prompt: int, response: int) -> int:
    """How many rollouts of so many tokens the free memory of this rank's GPU holds."""
    torch.cuda.empty_cache()  # or what training has cached counts as taken
    free, _ = torch.cuda.mem_get_info()
    return decode.rows_that_fit(model, prompt + response, free, 0 if decoder == "fast" else prompt)


def load_model(name: str, device: torch.device) -> tuple[torch.nn.Module, object]:
    """Model, as it is stored, and tokenizer; raises BadInput for a folder that is broken or of another kind."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        policy, loading = AutoModelForCausalLM.from_pretrained(name, dtype="auto", output_loading_info=True)
    except Exception as error:  # loaders raise of every kind; the cause stays attached
        reason = str(error).strip().split("\n")[0]
        raise BadInput(f"--model {name}: cannot be loaded ({reason}); give a Hugging Face folder or hub id") from error
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])[0]
        raise BadInput(f"--model {name}: lacks weights ({missing} and perhaps others); give a complete folder")
    ids = tokenizer("1 + 1 =", return_tensors="pt")["input_ids"]
    if not ids.numel() or len(tokenizer) > policy.get_input_embeddings().num_embeddings:
        raise BadInput(f"--model {name}: its tokenizer is missing or another model's; save it in the folder")
    policy, ids = policy.to(device), ids.to(device)
    with torch.no_grad():
        plain = policy(ids).logits
        ours = policy.get_output_embeddings()(policy.base_model(ids).last_hidden_state)
    if not torch.allclose(plain, ours, atol=1e-3, rtol=1e-2):  # caps, scales: `grpo.Policy` would train another model
        raise BadInput(f"--model {name}: its logits are not head(last hidden state); give another architecture")
    return policy, tokenizer


def warm_up(model, tokenizer, task: Task, args: argparse.Namespace, folder: Path, ranks: Ranks) -> None:
    """The embedded task's supervised start, on one rank for all."""
    if ranks.main:
        forbidden = {problem["problem"] for problem in task.heldout}
        started = time.perf_counter()
        loss = toy.warm_up(model, args.toy_lines, args.toy_kind, forbidden, steps=args.warmup_steps, seed=args.seed)
        print(f"warm-up: {args.warmup_steps} steps, loss {loss:.3f}, {time.perf_counter() - started:.0f} s")
        model.save_pretrained(folder / "start")
        tokenizer.save_pretrained(folder / "start")
    parallel.broadcast(model, ranks)


def own_prm(model, task: Task, args: argparse.Namespace, folder: Path, ranks: Ranks) -> tuple:
    """The embedded task's process reward model, taught by one rank for all; a resumed run has it already."""
    if ranks.main and not args.resume:
        forbidden = {problem["problem"] for problem in task.heldout}
        for part in teacher.make_prm(model, args.toy_lines, args.toy_kind, forbidden, seed=args.seed):
            part.save_pretrained(folder / "prm")
    parallel.gather(None, ranks)  # until it is there
    return prm.load_reward_model(str(folder / "prm"), ranks.device, torch.float32)


def load_benchmarks(args: argparse.Namespace, tokenizer) -> list[Loaded]:
    """The sets of --bench, refusing those that the model cannot be asked; raises BadInput."""
    names = benchmarks.names_of(args.bench)
    files = benchmarks.files_of(args.bench_data, names, "--bench-data")
    benchmarks.check_sandbox(names, args.sandbox)
    made = (args.toy_lines, args.toy_kind, args.heldout, args.seed)
    sets = [
        benchmarks.embedded(*made) if name == "embedded" else benchmarks.load_benchmark(name, files.get(name, ()))
        for name in names
    ]
    for loaded in sets:
        evaluation.as_task(loaded, protocol_of(args), tokenizer, args.model or "the model")
    return sets


def protocol_of(args: argparse.Namespace) -> Protocol:
    """How --bench is asked: as the paper does, with the run's own template, limit and graders."""
    options = dict(template=args.template, grade_timeout=args.grade_timeout, sandbox=args.sandbox)
    return Protocol(max_tokens=args.max_tokens, **options)


def grader(args: argparse.Namespace):
    """`grade(response, reference)` of the task, with the flags' limits."""
    options = {"timeout_s": args.grade_timeout} if args.grade_timeout else {}
    return partial(grade_code, level=args.sandbox, **options) if args.task == "code" else partial(grade_math, **options)


def embedded_task(args: argparse.Namespace, tokenizer) -> Task:
    """The embedded task as a `Task`; raises BadInput where there are too few problems, or for another model."""
    if len(tokenizer) != len(toy.SYMBOLS):
        raise BadInput(f"--model {args.model}: not a model of the embedded task; add --task math and --data")
    train, heldout = toy.make_problems(TOY_PROBLEMS, args.heldout, args.toy_lines, args.toy_kind, args.seed)
    if len(heldout) < args.heldout or len(train) < TOY_PROBLEMS:
        raise BadInput(
            f"--toy-lines {args.toy_lines}: too few different problems for --heldout {args.heldout}; raise it"
        )
    return Task(
        "embedded",
        train,
        heldout,
        lambda problem: problem["problem"],
        grader(args),
        first_error=toy.first_error,
        step_end="\n",
        hint=toy.HINT,
    )
