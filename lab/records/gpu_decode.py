"""What `--use lab.fast:decode=yes` gains on a GPU, with random weights, beside transformers' loop.

    python -m lab.records.gpu_decode ROWS.jsonl                        # all of these, in this order
    python -m lab.records.gpu_decode ROWS.jsonl large small log-probs tests step batch

    large      7.6B, 256 responses of 512 tokens each: captured steps, then `generate`
    small      the same at 1.5B, with log-normal lengths of up to 3,000 tokens
    log-probs  1.5B: log-probabilities of sampled tokens against those of the scoring pass, of both
    tests      `pytest -m gpu`
    step       phases of a training step of the 1.5B model, with peak memory and the plan's: plain,
               `lab.fast`, and `lab.fast` with captured steps
    batch      transformers' continuous batching (`generate_batch`)

Each row is written as soon as it is measured. Without a GPU a tiny model rehearses it, with few and
short responses, and without captured steps; its numbers mean nothing.
"""

from lab.records.help import show_help

show_help(__doc__)

import math
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from grpo import Policy, Rollouts, hf_generate, score
from harness import fsdp
from harness.files import append_rows
from lab.fast import decode
from lab.fast.packing import packing_of
from lab.records import random_model


class Sizes(NamedTuple):
    """What is measured: as planned on a GPU, tiny in a rehearsal."""

    large: str
    small: str
    prompts: int  # each is sampled eight times
    prompt: int  # tokens
    fixed: int  # tokens of responses of one length
    longest: int  # tokens of responses of unlike lengths
    checked: int  # tokens of responses whose log-probabilities are compared
    step: str  # flags of lab.records.gpu_step
    batch: str  # words of lab.records.gpu_sampling


STEP = "--prompts-per-step 32"
TINY_STEP = "--prompts-per-step 2 --prompts-per-update 2 --rollouts-per-prompt 4 --max-tokens 60"
# Continuous batching takes most of a machine's memory for its cache, so it is not rehearsed.
BATCH, TINY_BATCH = "150 batch transformers", "6 transformers"
ON_GPU = Sizes("7B", "1.5B", 32, 200, 512, 3000, 128, STEP, BATCH)
REHEARSAL = Sizes("tiny", "tiny", 2, 20, 24, 40, 24, TINY_STEP, TINY_BATCH)
SIZES = ON_GPU if torch.cuda.is_available() else REHEARSAL
STOP = 7  # the id that ends responses of unlike lengths
# Lengths are log-normal, as in lab/records/padding.py.
LOG_MEDIAN = 6.5
SPREAD = 0.8
PLAIN = "lab.fast:race=no,distances=no,packing=no,generate=no"
LOOPS: dict[str, Callable] = {"captured steps": decode.sample, "generate": hf_generate}

ranks = fsdp.join("cuda" if torch.cuda.is_available() else "cpu")
device = ranks.device
on_gpu = device.type == "cuda"


def write(what: str, **numbers: object) -> None:
    """Add a row to the file, and print it."""
    machine = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    row = {"what": what, **numbers, "machine": machine, **versions}
    row["time"] = time.strftime("%Y-%m-%d %H:%M")
    append_rows(Path(sys.argv[1]), [row])
    print(row, flush=True)


def make_prompts(count: int) -> tuple[Tensor, Tensor]:
    """Random prompts of one length, eight times each: ids (8 count, P) and mask."""
    ids = torch.randint(1000, 2000, (count, SIZES.prompt), device=device).repeat_interleave(8, 0)
    return ids, torch.ones_like(ids, dtype=torch.bool)


def end_log_normally(model: PreTrainedModel) -> None:
    """Let responses end with STOP after log-normal numbers of tokens.

    After t tokens the next one is STOP with the probability that such a length is t + 1 if it is
    more than t. All other logits are near 0.
    """
    log_length = NormalDist(LOG_MEDIAN + math.log(SIZES.longest / 3000), SPREAD)
    logits = []
    for t in range(SIZES.longest):
        reached = log_length.cdf(math.log(t)) if t else 0.0
        ends = (log_length.cdf(math.log(t + 1)) - reached) / (1 - reached)
        ends = min(max(ends, 1e-9), 1 - 1e-9)
        logits.append(math.log(model.config.vocab_size) + math.log(ends) - math.log(1 - ends))
    of_stop = torch.tensor(logits, device=device, dtype=model.dtype)  # (T,)

    def set_stop(module: object, inputs: object, options: dict, outputs: object) -> None:
        drawn = options["position_ids"][:, -1] - (SIZES.prompt - 1)  # (b,)
        outputs.logits[:, -1, STOP] = of_stop[drawn]

    model.register_forward_hook(set_stop, with_kwargs=True)


def time_loops(what: str, shape: str, limit: int, *, stops: list[int]) -> None:
    """Tokens per second of both loops."""
    model = random_model.make_model(shape, device, limit / 5)
    packing_of(model)  # sets the attention that training sets
    if stops:
        end_log_normally(model)
    ids, mask = make_prompts(SIZES.prompts)
    for name, loop in LOOPS.items():
        sample = partial(loop, model, ids, mask, temperature=1.0, stops=stops, pad=0)
        sample(max_tokens=8)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        began = time.perf_counter()
        found = sample(max_tokens=limit)
        response = found if isinstance(found, Tensor) else found.ids  # (B, T)
        ends = torch.isin(response, torch.tensor(stops, device=device, dtype=response.dtype))
        lengths = ((ends.cumsum(1) - ends.long()) == 0).sum(1).tolist()  # waits for the GPU
        seconds = time.perf_counter() - began
        write(
            f"{what}: {name}",
            shape=shape,
            responses=len(lengths),
            mean_length=sum(lengths) / len(lengths),
            longest=max(lengths),
            seconds=seconds,
            tokens_per_s=sum(lengths) / seconds,
            ms_per_step=1000 * seconds / max(lengths),
            peak_gb=torch.cuda.max_memory_allocated() / 1e9,  # 0 without a GPU
        )


def sample_with_log_probs(
    model: PreTrainedModel, ids: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Responses of transformers' loop and their log-probabilities, (b, T) both."""
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=SIZES.checked)
    config.pad_token_id = 0
    config.output_scores = True
    config.return_dict_in_generate = True
    model.generation_config = GenerationConfig()  # without its stop ids
    output = model.generate(ids, attention_mask=mask.long(), generation_config=config)
    response = output.sequences[:, ids.shape[1] :]  # (b, T)
    log_probs = []
    for tokens, scores in zip(response.unbind(1), output.scores, strict=True):
        log_probs.append(scores.log_softmax(1).gather(1, tokens[:, None]))
    return response, torch.cat(log_probs, 1)


def compare_log_probs() -> None:
    """Log-probabilities while sampling, less those of the scoring pass, of both loops."""
    model = random_model.make_model(SIZES.small, device, SIZES.longest)
    policy = Policy(model, packing_of(model))
    ids, mask = make_prompts(max(1, SIZES.prompts // 4))
    limits = dict(max_tokens=SIZES.checked, temperature=1.0, stops=[], pad=0)
    captured = decode.sample(model, ids, mask, log_probs=True, **limits)
    both = {"captured steps": captured, "generate": sample_with_log_probs(model, ids, mask)}
    for name, (response, log_probs) in both.items():
        inside = torch.ones_like(response, dtype=torch.bool)
        texts = [""] * len(response)
        rollouts = Rollouts(ids, mask, response, inside, inside[:, 0], texts)
        scored = score(policy, rollouts, temperature=1.0, micro_tokens=16_384, keep_hidden=False)
        difference = log_probs - scored.log_probs  # (b, T)
        write(
            f"log-probs: {name}",
            shape=SIZES.small,
            tokens=difference.numel(),
            mean_absolute=difference.abs().mean().item(),
            mean=difference.mean().item(),
        )


def run_command(what: str, command: str) -> None:
    """Run another command, and write its status and the end of its output."""
    if on_gpu:
        torch.cuda.empty_cache()
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = done.stdout.splitlines()[-12:]
    seconds = time.perf_counter() - began
    write(what, command=command, status=done.returncode, seconds=seconds, output=lines)


def time_steps() -> None:
    """Phases of a training step in three ways."""
    for use in PLAIN, "lab.fast", "lab.fast:decode=yes":
        command = f"lab.records.gpu_step {SIZES.small} {SIZES.step} --use {use}"
        run_command(f"step: {use}", command)


STAGES: dict[str, Callable[[], None]] = {
    "large": partial(time_loops, "large", SIZES.large, SIZES.fixed, stops=[]),
    "small": partial(time_loops, "small", SIZES.small, SIZES.longest, stops=[STOP]),
    "log-probs": compare_log_probs,
    "tests": partial(run_command, "tests", "pytest -m gpu tests lab/tests"),
    "step": time_steps,
    "batch": partial(run_command, "batch", f"lab.records.gpu_sampling {SIZES.batch}"),
}
if len(sys.argv) < 2 or not STAGES.keys() >= {*sys.argv[2:]}:
    sys.exit(f"give a file for the rows, and of {', '.join(STAGES)} what is to be measured")
for stage in sys.argv[2:] or STAGES:
    STAGES[stage]()
