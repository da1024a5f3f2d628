"""The table of docs/hardware.md: predicted GB of sampling, of training, and resident in both.

Run: `python -m docs.records.memory_table`.
"""

from docs.records.random_model import LARGE, SMALL
from harness import memory
from harness.config import PAPER, with_values

for model, gpus, lora_rank in (
    (LARGE, 8, 0),
    (SMALL, 8, 0),
    (SMALL, 1, 0),
    (SMALL, 1, 16),
    (LARGE, 1, 16),
):
    values = {"device": "cuda", "dtype": "bfloat16", "lora_rank": lora_rank}
    gb = memory.predict(model, with_values(PAPER, values), gpus, room=80)
    print(" | ".join(f"{gb[phase]:.1f}" for phase in ("sampling", "training", "resident")))
