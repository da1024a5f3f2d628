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
    frozen = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    config = with_values(PAPER_RECIPE, {"device": "cuda", "dtype": "bfloat16"})
    moments = 8 * frozen / gpus / 1e9  # GB, which `predict` counts for all weights
    gradients = 4 * frozen / gpus / 1e9
    room = 80 - memory.predict(model, config, gpus)["resident"] + moments
    batch = memory.choose_batch(shape, config.machine, room, memory.PROMPT, 3000)
    gb = memory.predict(model, with_values(config, {"generate_batch": batch}), gpus)
    numbers = (
        gb["sampling"] - moments,
        gb["training"] - moments - gradients,
        gb["resident"] - moments,
    )
    print(" | ".join(f"{number:.1f}" for number in numbers))
