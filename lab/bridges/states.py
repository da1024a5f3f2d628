"""The last layer's states of a causal LM, taken from a forward pass of another trainer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def keep_states(model: Any, keep: Callable[[Tensor], None]) -> Iterator[None]:
    """Within the block, `keep` gets the last layer's states of each pass, after the final norm.

    They are (b, P + T, d), prompts and padding included, or (1, N, d) if rollouts are packed. The
    model may be PEFT's. Left out: models whose `base_model` is the model itself.
    """

    def hook(module: torch.nn.Module, inputs: tuple, output: dict[str, Tensor]) -> None:
        keep(output["last_hidden_state"])

    if hasattr(model, "get_base_model"):  # PEFT's
        model = model.get_base_model()
    handle = model.base_model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
