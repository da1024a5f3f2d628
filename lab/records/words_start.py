"""The model that `first_errors` and `prompt_once` measure: SmolLM2, taught on word problems.

`python train.py --model models/smollm2 --task words` makes it, in runs/words-shear-1/start.
"""

from harness import fsdp
from harness.config import parse_train
from harness.load import load_run, resolve
from harness.run import Run


def load_start() -> Run:
    """The model, its tokenizer and the task."""
    config = resolve(parse_train("--model runs/words-shear-1/start --task words".split()))
    return load_run(config, fsdp.join("cpu"))
