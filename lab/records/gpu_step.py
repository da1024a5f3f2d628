r"""Seconds and memory of a training step, phase by phase, with random weights.

    python -m lab.records.gpu_step 1.5B --prompts-per-step 32 --use lab.fast
    python -m lab.records.gpu_step 7B --prompts-per-step 16 --max-tokens 500 \
        --use lab.fast --use lab.tools.lora:rank=16

Other flags are those of train.py, such as `--use lab.fast`. Half of the responses end within a
fifth of `--max-tokens`. The step is the second one; the first, with few and short responses, warms
up.
"""

import copy
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import transformers

import train
from grpo import Policy
from harness import fsdp, log
from harness.models import stop_ids
from harness.run import Hooks, Loaded, make_context, make_task, start_run, use
from lab.records import random_model
from lab.studies.needs import settings_of_run
from lab.tools import plan

shape, *flags = sys.argv[1:]
folder = Path(tempfile.mkdtemp())
random_model.write_problems(folder / "problems.jsonl")
words = f"--model random-{shape} --data {folder / 'problems.jsonl'} --heldout 4 --eval-groups 4"
words += " --template qwen-math --prompts-per-update 8 --generate-batch 256"
config = settings_of_run([*words.split(), *flags])
ranks = fsdp.join(config.device)
model = random_model.make_model(shape, ranks.device, config.max_tokens / 5)
tokenizer = random_model.make_tokenizer(shape)
config, task, _ = make_task(config, tokenizer, model.config.max_position_embeddings)
hooks = Hooks()
use(hooks, config.use)
context = make_context(config, Policy(model), tokenizer, task, hooks.shear)
batch_tokens = (config.generate_batch or 512) * (plan.PROMPT + config.max_tokens)
loaded = Loaded(config, ranks, context, hooks, stop_ids(model, tokenizer), batch_tokens, [])
predicted = plan.peaks_gb(model, config, 1)
run = start_run(loaded, folder)
del model
peaks = {}  # GB, by phase
lap = log.Clock.lap


def lap_with_peak(clock: log.Clock, name: str) -> None:
    """End a phase, and note the largest memory that tensors held in it."""
    lap(clock, name)
    if ranks.device.type == "cuda":
        peaks[name] = max(peaks.get(name, 0.0), torch.cuda.max_memory_allocated() / 1e9)
        torch.cuda.reset_peak_memory_stats()


log.Clock.lap = lap_with_peak
few = {"prompts_per_step": 4, "prompts_per_update": 4, "max_tokens": 32}
small = copy.copy(run)
small.config = replace(config, **few)
train.train_step(small, 0)
peaks.clear()
metrics, _ = train.train_step(run, 1)
device = torch.cuda.get_device_name(ranks.device) if peaks else "CPU"
print(f"{device}, torch {torch.__version__}, transformers {transformers.__version__}")
rows = config.prompts_per_step * config.rollouts_per_prompt
print(f"{shape}: {rows} responses, mean length {metrics['length']:.0f}")
for phase, seconds in metrics["seconds"].items():
    print(f"{phase:9} {seconds:8.2f} s   peak {peaks.get(phase, 0.0):6.1f} GB")
others = sum(metrics["seconds"].values()) - metrics["seconds"]["weights"]
print(f"SHEAR's weights add {metrics['seconds']['weights'] / others:.2%}")
for part, gb in zip(("sampling", "training"), predicted, strict=True):
    print(f"predicted, {part}: {gb:.1f} GB")
print(f"mean |log ratio| {metrics['abs_log_ratio']:.1g}, mixed {1 - metrics['equal_groups']:.0%}")
