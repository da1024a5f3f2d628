"""LoRA (Hu et al. 2021, arXiv 2106.09685) through peft: a small adapter beside frozen weights.

    add(model, seed, rank)           adapters on every linear layer but the head
    with off(model): ...             the model as it was before training
    merged_weights(model)            its weights, to which the adapter is added, without one
    save_merged(model, ..., folder)  a plain Hugging Face folder, the adapter added to the weights

Experts get adapters, too, where peft knows the model's layout. After `add` nothing else is trained.
`--use lab.tools.lora` works with every rule. ARCA needs it, as it compares the model with and
without its adapter. An adapter starts as nothing (B = 0), and is scaled by 1. A model saved in
bfloat16 differs from the sampler by the rounding of W + B A. Left out: dropout, other targets,
adapters saved by themselves.
"""

import warnings
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from base.errors import BadInput, cause
from lab.tools.command import packages

if TYPE_CHECKING:
    from harness.run import Hooks


def use(hooks: "Hooks", *, rank: int = 16) -> None:
    """Train an adapter of this rank instead of all weights: `--use lab.tools.lora:rank=16`."""
    hooks.adapt = partial(add, rank=rank)
    hooks.save_model = save_merged


def add(model: PreTrainedModel, seed: int, rank: int) -> None:
    """Add adapters to `model`, in place, drawn from the seed: all ranks have the same.

    Raises BadInput if PEFT refuses the model's layers.
    """
    with packages():
        from peft import LoraConfig, get_peft_model  # imported late: slow, and few runs need it

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
    # PEFT warns of transformers' old names and of experts' layouts
    with warnings.catch_warnings(action="ignore"):
        try:
            adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:  # PEFT refuses some layers of Mamba
            raise BadInput(f"--use lab.tools.lora: {cause(error)}; leave it out") from error
    vars(model)["peft"] = adapted  # not as a submodule, which would contain itself


def off(model: PreTrainedModel) -> AbstractContextManager:
    """A context in which the model runs without its adapter."""
    return vars(model)["peft"].disable_adapter()


def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the model by the names that they have without an adapter: W + B A for each W.

    The sums are made one at a time and lie on the CPU, where there is room: a second copy of the
    model may not fit on its GPU. Other weights are the model's own.
    """
    if "peft" not in vars(model):
        return model.state_dict()
    weights = {}
    for name, weight in model.state_dict().items():
        if ".lora_" not in name:
            weights[name.replace(".base_layer", "")] = weight
    for path, layer in model.named_modules():
        if hasattr(layer, "get_delta_weight"):  # B A
            parameter = getattr(layer, "parameter_name", "weight")  # that of experts has a name
            name = f"{path}.{parameter}".replace(".base_layer", "")
            weight = weights[name]
            weights[name] = (weight + layer.get_delta_weight("default")).to("cpu", weight.dtype)
    return weights


def save_merged(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save model and tokenizer as any tool loads them, an adapter merged into the weights."""
    model.save_pretrained(folder, state_dict=merged_weights(model))
    tokenizer.save_pretrained(folder)
