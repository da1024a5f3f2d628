"""Memory and hours of a run on GPUs that are not here; reads no weights.

python -m lab.tools.plan H100 8 --model Qwen/Qwen2.5-Math-7B      # 8 of them; flags of train.py
"""

import sys

from harness import log
from harness.config import TrainConfig, parse_train, with_values
from harness.memory import PROMPT, choose_batch, memory_lines, predict
from harness.models import load_shapes
from tasks.errors import BadInput

SAMPLING, TRAINING = 0.01, 0.3  # shares of the peak FLOP/s that were reached on one H200
# Memory in GB and peak TFLOP/s in bfloat16, for --plan.
GPUS = {"A100": (80, 312), "H100": (80, 989), "H200": (141, 989)}


def foresee(gpu: str, world: int, config: TrainConfig) -> list[str]:
    """Lines on the memory and the hours of a run on --ranks GPUs of --plan; reads no weights.

    The hours are those of responses that are all as long as they may be. Raises BadInput.
    """
    if not config.model:
        raise BadInput(f"lab.tools.plan {gpu}: needs --model; give a folder or hub id")
    room, peak = GPUS[gpu]
    model = load_shapes(config.model)
    config = with_values(config, {"device": "cuda", "dtype": "bfloat16"})
    left = room - predict(model, config, world)["resident"]
    sampling = config.sampling
    batch = choose_batch(model.config, config.machine, left, PROMPT, sampling.max_tokens)
    gb = predict(model, with_values(config, {"generate_batch": batch}), world)
    rollouts = config.optimisation.steps * sampling.prompts_per_step * sampling.rollouts_per_prompt
    # FLOPs per token and parameter: 2 to sample, 2 to score, 6 to train, 2 to recompute
    flops = (2 / SAMPLING + 10 / TRAINING) * rollouts * sampling.max_tokens * model.num_parameters()
    hours = flops / (world * peak * 1e12) / 3600
    note = (
        f"about {hours:,.0f} hours on {world} {gpu} if all {rollouts:,} responses have "
        f"{sampling.max_tokens} tokens, fewer if they are shorter; assumes {SAMPLING:.0%} of the "
        f"peak FLOP/s in sampling and {TRAINING:.0%} in scoring and training"
    )
    return [*memory_lines(gb, room), note]


if __name__ == "__main__":
    print(
        "\n".join(map(log.wrap, foresee(sys.argv[1], int(sys.argv[2]), parse_train(sys.argv[3:]))))
    )
