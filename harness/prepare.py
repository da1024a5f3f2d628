"""From flags to a task, a model and its tokenizer, refusing what would train wrongly.

    set_up(args, ranks)   -> Ready: task, model, tokenizer, ..., and notes for the plan
    make_start, own_prm   -> what the embedded task makes itself: its policy's start, its process reward model
    protocol_of(args)     -> how --eval-every asks its benchmarks
    sampling_of(args, ..) -> how rollouts are generated

What is loaded is checked here, before a folder is made or a step is taken, and what is small before weights are read:
that folders and files are there, that every rank has work, that the model is one that can be trained and sampled as
asked, and that prompts and responses fit its context; then that its folder's weights are complete, and that its
logits are the head of its last hidden state, which `grpo.Policy` builds on.
"""

import argparse
import contextlib
import functools
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from credit import lora, teacher
from credit.reward_model import EXAMPLE, SEPARATOR, ProcessRewardModel, encode
from credit.table import METHODS
from fast import decode
from grpo import hf_generate, layers_of, stop_ids
from harness import evaluation, parallel
from harness.checkpoint import whole_folder
from harness.command import out_of_memory
from harness.config import Protocol, flag
from harness.folders import config_of, settings_in
from harness.parallel import Ranks
from tasks import benchmarks, toy
from tasks.benchmarks import Loaded
from tasks.problems import BadInput, Task, choose_template, grader, load_problems, split, text_task

logging.set_verbosity(logging.CRITICAL)  # transformers' reports would stand beside our one sentence
TEMPLATE_SECONDS = 20  # that a chat template may take
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
    """What is loaded, checked: what tells a model without its weights, then problems, then weights. Raises BadInput."""
    check_ranks(args, ranks)
    if args.model:
        model, tokenizer = load_outline(args.model, args.lora_rank)
    else:
        model, tokenizer = toy.make_model(args.toy_lines, args.seed, args.toy_width), toy.make_tokenizer()
    if args.prm:
        check_reward_tokenizer(args.prm, load_tokenizer("--prm", args.prm))
    compute = "weights and optimizer float32" + ("" if args.dtype == "float32" else f", compute {args.dtype}")
    notes = [f"{ranks.world} rank(s) on {args.device}, {compute}, {torch.get_num_threads()} CPU threads each"]
    notes += check_architecture(args, model.eval())
    task, about = make_task(args, tokenizer, evaluation.context_of(model))
    size = f"{sum(p.numel() for p in model.parameters()):,} parameters, context {evaluation.context_of(model)}"
    notes += [*about, f"model {args.model or 'made here'}: {type(model).__name__}, {size}"]
    notes.append(f"{len(task.train)} problems to train on, {len(task.heldout)} held out")
    sets = load_benchmarks(args, tokenizer)
    notes += [note for loaded in sets for note in loaded.notes]
    if args.model:
        if ranks.main:
            print(f"loading {args.model}", flush=True)
        model, _ = load_model(args.model, ranks.device)
    reward_model = load_reward_model(args.prm, ranks.device, getattr(torch, args.dtype)) if args.prm else None
    model.eval()  # throughout: dropout would make sampler and trainer disagree
    return Ready(task, model, tokenizer, notes, reward_model, sets)


def check_ranks(args: argparse.Namespace, ranks: Ranks) -> None:
    """Refuse more ranks than there is work for, and shards that do not divide them; raises BadInput."""
    for name in ("prompts_per_step", "heldout", "eval_groups"):
        if getattr(args, name) < ranks.world:
            few = f"{flag(name)} {getattr(args, name)}: there are {ranks.world} ranks"
            raise BadInput(f"{few}; raise it, or start fewer ranks")
    if args.shard_over and ranks.world % args.shard_over:
        raise BadInput(f"--shard-over {args.shard_over}: does not divide {ranks.world} ranks; change it")


def check_architecture(args: argparse.Namespace, model) -> list[str]:
    """Notes on how a model, which may be without weights, can be run; raises BadInput where it cannot be as asked."""
    sampling_of(args, model)  # refuses what it cannot be
    if "attention" in METHODS[args.method].needs and not all(hasattr(layer, "self_attn") for layer in layers_of(model)):
        raise BadInput(
            f"--model {args.model}: its layers have no self_attn; choose another --method than {args.method}"
        )
    notes = []
    if args.device == "cuda" and args.decode == "generate" and decode.supported(model):
        notes.append("--decode fast would replay CUDA graphs, several times faster, which no GPU has proved equal yet")
    if not decode.attends_fully(model.config):
        notes.append(f"rollouts are padded to the longest of each pass: {model.config.model_type} is not known to pack")
    return notes


def make_task(args: argparse.Namespace, tokenizer, context: float) -> tuple[Task, list[str]]:
    """Problems whose prompts leave room for a response in the model's `context`; and notes. Raises BadInput."""
    needs = METHODS[args.method].needs
    responses = 1 + ("peer" in needs)  # that must fit in together
    room = context - responses * args.max_tokens  # for the prompt
    if room < 1:
        shared = ", for a response and another in its prompt" if "peer" in needs else ""
        raise BadInput(f"--max-tokens {args.max_tokens}: the model's context is {context} tokens{shared}; lower it")
    told = "hint" in needs  # prompts must fit with their answer, too
    if args.task == "embedded":
        longest = toy.prompt_tokens(args.toy_lines) + toy.HINT_TOKENS * told
        if room < longest:
            reason = f"with a prompt of {longest} tokens it exceeds the model's context of {context}"
            raise BadInput(f"--max-tokens {args.max_tokens}: {reason}; lower it")
        return embedded_task(args, tokenizer), []
    template = choose_template(args.template, args.model, tokenizer)
    problems, about = load_problems(args.task, args.data)
    task = text_task(args.task, template, tokenizer, grader(args.task, args.grade_timeout, args.sandbox))
    limits = dict(heldout=args.heldout, seed=args.seed, max_prompt_tokens=room)
    task, dropped = split(task, problems, tokenizer, told=told, **limits)
    reason = "chosen by model and tokenizer" if args.template == "auto" else "asked for"
    return task, [*about, *dropped, f"template {template} ({reason})"]


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


@contextlib.contextmanager
def opened(option: str, name: str) -> Iterator[dict]:
    """The options with which loaders read a folder or hub id; raises BadInput naming the `option` for what they raise.

    Where the hub is out of reach they would ask it again and again, for half a minute a file.
    """
    remedy = f"give {option} a Hugging Face folder or hub id"
    folder = Path(name)
    is_local = folder.is_dir()
    reason = ""
    if config_of(folder):
        reason = f"it is a run, its model is {folder / 'model'}"
    elif is_local and not (folder / "config.json").is_file():
        reason = "it has no config.json"
    elif is_local and (odd := [path.name for path in folder.iterdir() if not path.is_file() and not path.is_dir()]):
        reason = f"its {odd[0]} is no file"  # a pipe would never end
    elif not is_local and (name.startswith((".", "/", "~")) or name.count("/") > 1):  # which no hub id has
        reason = "no such folder"
    if reason:
        raise BadInput(f"{option} {name}: cannot be loaded ({reason}); {remedy}")
    try:
        # No code of the folder's is trusted; if that were left open, a terminal would be asked.
        yield dict(trust_remote_code=False, local_files_only=is_local or not hub_answers(name))
    except Exception as error:  # loaders raise of every kind; the cause stays attached
        if out_of_memory(error):  # no fault of the folder's
            raise
        reason = str(error).strip().split("\n")[0].rstrip(".")
        if not is_local and isinstance(error, OSError):
            reason = f"no such folder; {reason}"
        raise BadInput(f"{option} {name}: cannot be loaded ({reason}); {remedy}") from error


@functools.cache
def hub_answers(name: str) -> bool:
    """Whether the hub can be asked for a model; it may know none of that name."""
    try:
        huggingface_hub.HfApi().model_info(name, timeout=5)
    except huggingface_hub.errors.HfHubHTTPError:
        return True
    except Exception:  # of every kind: no name server, no route, no time, no wish to ask it
        return False
    return True


def load_outline(name: str, rank: int) -> tuple[torch.nn.Module, object]:
    """The policy without its weights, on the device `meta`, and its tokenizer: quick to load.

    Raises BadInput, also where no adapter of this rank, if it is not 0, can be trained.
    """
    with opened("--model", name) as options:
        config = AutoConfig.from_pretrained(name, **options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    text = config.get_text_config()
    if not (getattr(text, "num_attention_heads", 0) and getattr(text, "num_hidden_layers", 0)):
        raise BadInput(f"--model {name}: {config.model_type} has no attention, which training needs; give another")
    if rank and not lora.fits(model, rank):
        kind = config.model_type
        raise BadInput(f"--model {name}: adapters cannot be merged into a {kind} model; leave --lora-rank out")
    return model, load_tokenizer("--model", name)


def load_tokenizer(option: str, name: str):
    """The tokenizer of a folder or hub id; raises BadInput naming the `option`."""
    with opened(option, name) as options:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    if not tokenizer("1 + 1 =")["input_ids"]:
        raise BadInput(f"{option} {name}: its tokenizer is missing; save it in the folder")
    if tokenizer.chat_template:
        thread = threading.Thread(target=render_turns, args=[tokenizer], daemon=True)
        thread.start()
        thread.join(TEMPLATE_SECONDS)
        if thread.is_alive():
            raise BadInput(f"{option} {name}: its chat template does not end; remove chat_template.jinja")
    return tokenizer


def render_turns(tokenizer) -> None:
    """What is asked of a chat template. One that raises is refused where a prompt is made."""
    turns = [{"role": role, "content": "1 + 1 ="} for role in ("user", "assistant")]
    for count in (1, 2):
        with contextlib.suppress(Exception):
            tokenizer.apply_chat_template(turns[:count], tokenize=False, add_generation_prompt=True)


def load_folder(option: str, name: str, kind: type, dtype, device: torch.device) -> tuple[torch.nn.Module, object]:
    """A model of class `kind` on a device, and its tokenizer; raises BadInput naming the `option` for a broken folder.

    Weights go from their files to the device; the host holds no copy of them.
    """
    tokenizer = load_tokenizer(option, name)
    with opened(option, name) as options:
        options.update(dtype=dtype, device_map=device, output_loading_info=True, ignore_mismatched_sizes=True)
        model, loading = kind.from_pretrained(name, **options)
    names = model.state_dict().keys()
    others = loading["missing_keys"] | {key for key, *_ in loading["mismatched_keys"]}
    others |= {key for key in loading["unexpected_keys"] if re.sub(r"\.\d+\.", ".0.", key, count=1) in names}  # layers
    if others:
        reason = f"its weights are not those of its config.json ({min(others)} and perhaps others)"
        raise BadInput(f"{option} {name}: {reason}; give a complete folder")
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise BadInput(f"{option} {name}: its tokenizer is another model's; save its own in the folder")
    return model, tokenizer


def check_finite(option: str, name: str, model) -> None:
    """Refuse weights that are not finite, also those of tokens that no check's prompt has; raises BadInput."""
    for key, weight in model.named_parameters():
        if not all(value.isfinite() for value in weight.aminmax()):  # NaN if there is one
            raise BadInput(f"{option} {name}: its weights are not finite ({key}); give another model")


def load_model(name: str, device: torch.device) -> tuple[torch.nn.Module, object]:
    """The policy, in the dtype in which it is stored, and its tokenizer; raises BadInput."""
    policy, tokenizer = load_folder("--model", name, AutoModelForCausalLM, "auto", device)
    check_finite("--model", name, policy)
    if (Path(name) / "generation_config.json").exists():
        settings_in(Path(name) / "generation_config.json")  # transformers would do without a damaged one
    try:
        torch.tensor(stop_ids(policy, tokenizer), dtype=torch.long)
    except (TypeError, ValueError) as error:
        raise BadInput(f"--model {name}: its eos_token_id is no number; mend its (generation_)config.json") from error
    ids = tokenizer("1 + 1 =", return_tensors="pt")["input_ids"].to(device)
    with torch.no_grad():
        plain = policy(ids).logits
        ours = policy.get_output_embeddings()(policy.base_model(ids).last_hidden_state)
    if not plain.isfinite().all():
        raise BadInput(f"--model {name}: its weights give logits that are not finite; give another model")
    if not torch.allclose(plain, ours, atol=1e-3, rtol=1e-2):  # caps, scales: `grpo.Policy` would train another model
        raise BadInput(f"--model {name}: its logits are not head(last hidden state); give another architecture")
    return policy, tokenizer


def round_weights(model, dtype: torch.dtype) -> None:
    """In place; not model.to(dtype), which would round the rotary frequencies, too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def load_reward_model(name: str, device: torch.device, dtype: torch.dtype) -> tuple[ProcessRewardModel, object]:
    """A process reward model and its tokenizer; raises BadInput where they cannot score steps."""
    model, tokenizer = load_folder("--prm", name, ProcessRewardModel, dtype, device)
    check_finite("--prm", name, model)
    check_reward_tokenizer(name, tokenizer)
    return model.eval().requires_grad_(False), tokenizer


def check_reward_tokenizer(name: str, tokenizer) -> None:
    """Refuse a process reward model's tokenizer that cannot tell steps; raises BadInput."""
    if tokenizer(SEPARATOR, add_special_tokens=False)["input_ids"] != [tokenizer.get_vocab().get(SEPARATOR)]:
        raise BadInput(f"--prm {name}: {SEPARATOR} is not one token of its tokenizer; give a model like {EXAMPLE}")
    if not tokenizer.chat_template:
        raise BadInput(f"--prm {name}: its tokenizer has no chat template; give a model like {EXAMPLE}")
    encode(tokenizer, "1 + 1 = ?", ["1 + 1 = 2", "It is 2."])  # raises for a template that loses steps


def make_start(model, tokenizer, task: Task, args: argparse.Namespace, folder: Path, ranks: Ranks) -> None:
    """The embedded task's supervised start, on one rank for all."""
    if ranks.main:
        forbidden = {problem["problem"] for problem in task.heldout}
        started = time.perf_counter()
        loss = toy.warm_up(model, args.toy_lines, forbidden, steps=args.warmup_steps, seed=args.seed)
        print(f"warm-up: {args.warmup_steps} steps, loss {loss:.3f}, {time.perf_counter() - started:.0f} s")
        with whole_folder(folder / "start") as draft:
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
    parallel.broadcast(model, ranks)


def own_prm(model, task: Task, args: argparse.Namespace, folder: Path, ranks: Ranks) -> tuple:
    """The embedded task's process reward model, taught by one rank for all; a resumed run has it already."""
    if ranks.main and not args.resume:
        forbidden = {problem["problem"] for problem in task.heldout}
        reward_model, its_tokenizer = teacher.make_prm(model, args.toy_lines, forbidden, seed=args.seed)
        with whole_folder(folder / "prm") as draft:
            reward_model.save_pretrained(draft)
            its_tokenizer.save_pretrained(draft)
    parallel.gather(None, ranks)  # until it is there
    return load_reward_model(str(folder / "prm"), ranks.device, torch.float32)


def load_benchmarks(args: argparse.Namespace, tokenizer) -> list[Loaded]:
    """The sets of --bench, refusing those that the model cannot be asked; raises BadInput."""
    make_embedded = partial(benchmarks.embedded_set, args.toy_lines, args.heldout, args.seed)
    sets = benchmarks.load_sets(args.bench, args.bench_data, args.sandbox, make_embedded, flag="--bench-data")
    for loaded in sets:
        evaluation.as_task(loaded, protocol_of(args), tokenizer, args.model or "the model")
    return sets


def protocol_of(args: argparse.Namespace) -> Protocol:
    """How --bench is asked: as the paper does, with the run's own template, limit and graders."""
    options = dict(template=args.template, grade_timeout=args.grade_timeout, sandbox=args.sandbox)
    return Protocol(max_tokens=args.max_tokens, **options)


def embedded_task(args: argparse.Namespace, tokenizer) -> Task:
    """The embedded task as a `Task`; raises BadInput where there are too few problems, or for another model."""
    if len(tokenizer) != len(toy.SYMBOLS):
        raise BadInput(f"--model {args.model}: not a model of the embedded task; add --task math and --data")
    train, heldout = toy.make_problems(TOY_PROBLEMS, args.heldout, args.toy_lines, args.seed)
    if len(heldout) < args.heldout or len(train) < TOY_PROBLEMS:
        few = f"too few different problems for --heldout {args.heldout}"
        raise BadInput(f"--toy-lines {args.toy_lines}: {few}; raise it")
    return Task(
        "embedded",
        train,
        heldout,
        lambda problem: problem["problem"],
        grader("math", args.grade_timeout, args.sandbox),
        first_error=toy.first_error,
        step_end="\n",
        hint=toy.HINT,
        solved="{}\n",
    )
