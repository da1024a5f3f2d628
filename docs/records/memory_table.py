"""The table of docs/hardware.md: predicted GB of sampling, of training, and resident in both.

Run: `python -m docs.records.memory_table`.
"""

from transformers import Qwen2Config

from harness import memory
from harness.config import PAPER, with_values

large = Qwen2Config(
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18_944,
    hidden_size=3584,
    vocab_size=152_064,
    tie_word_embeddings=False,
)
small = Qwen2Config(
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    intermediate_size=8960,
    hidden_size=1536,
    vocab_size=151_936,
    tie_word_embeddings=True,
)
for model, gpus, lora_rank in (
    (large, 8, 0),
    (small, 8, 0),
    (small, 1, 0),
    (small, 1, 16),
    (large, 1, 16),
):
    values = {"device": "cuda", "dtype": "bfloat16", "lora_rank": lora_rank}
    config = with_values(PAPER, values)
    room = 80 - memory.predict(model, config, gpus)["resident"]
    batch = memory.choose_batch(model, config.machine, room, memory.PROMPT, 3000)
    gb = memory.predict(model, with_values(config, {"generate_batch": batch}), gpus)
    print(" | ".join(f"{gb[phase]:.1f}" for phase in ("sampling", "training", "resident")))
