"""The model that `first_errors` and `prompt_once` measure: SmolLM2, taught on word problems.

`python train.py --model smollm2 --task words` makes it, in runs/words-shear-1/start.
"""

from harness import parallel
from harness.config import parse_train
from harness.launch import resolve
from harness.prepare import Parts, load_parts


def load_start() -> Parts:
    """The model, its tokenizer and the task."""
    config = resolve(parse_train("--model runs/words-shear-1/start --task words".split()))
    return load_parts(config, parallel.join("cpu"))
