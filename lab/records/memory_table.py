"""The table of docs/hardware.md: predicted GB of sampling, of training, and resident in both.

Run: `python -m lab.records.memory_table`.
"""

from harness import memory
from harness.config import PAPER_RECIPE, with_values
from harness.models import outline_of
from lab.records.random_model import LARGE, SMALL
from lab.tools import lora

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
    config = with_values(PAPER_RECIPE, {"device": "cuda", "dtype": "bfloat16"})
    room = 80 - memory.predict(model, config, gpus)["resident"]
    batch = memory.choose_batch(shape, config.machine, room, memory.PROMPT, 3000)
    gb = memory.predict(model, with_values(config, {"generate_batch": batch}), gpus)
    print(" | ".join(f"{gb[name]:.1f}" for name in ("sampling", "training", "resident")))
