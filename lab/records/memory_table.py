"""The table of docs/hardware.md: predicted GB of sampling, of training, and resident in both.

Run: `python -m lab.records.memory_table`.
"""

from dataclasses import replace

from base.config import Config
from harness import models as memory
from harness.models import outline_of
from lab.records.random_model import LARGE, SMALL
from lab.tools import lora, plan

for shape, gpus, lora_rank in (
    (LARGE, 8, 0),
    (SMALL, 8, 0),
    (SMALL, 1, 0),
    (SMALL, 1, 16),
    (LARGE, 1, 16),
):
    model = outline_of(shape)
    if lora_rank:
        lora.add(model, seed=0, rank=lora_rank)
    config = Config(device="cuda", dtype="bfloat16")
    stay = memory.resident_gb(model, config, gpus)
    batch = memory.choose_batch(shape, config, 80 - stay, plan.PROMPT, 3000)
    peaks = plan.peaks_gb(model, replace(config, generate_batch=batch), gpus)
    print(" | ".join(f"{gb:.1f}" for gb in (*peaks, stay)))
