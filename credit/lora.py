"""LoRA (Hu et al. 2021, arXiv 2106.09685) through peft: train a small adapter beside frozen weights.

    fits(model, rank)               whether adapters can be added and saved, of a model without weights
    add(model, rank, seed)          adapters on every linear layer but the head; nothing else is trained from here on
    with off(model): ...            the model as it was before training
    save_merged(model, ..., folder) an ordinary Hugging Face folder, the adapter added to the weights

`--lora-rank` works with every method. ARCA needs it, as it compares the model with and without its adapter. An adapter
starts as nothing (B = 0), and is scaled by 1. A model saved in bfloat16 differs from the sampler by the rounding of
W + B A. Left out: dropout, other targets, adapters saved by themselves.
"""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor


def fits(model, rank: int) -> bool:
    """Whether `merged` finds a weight for each adapter of a model without weights: peft adapts experts otherwise."""
    adapted = copy.deepcopy(model)
    try:
        with torch.device("meta"):
            add(adapted, rank, seed=0)
    except ValueError:  # of layers that peft knows not to work
        return False
    layers = [name for name, module in adapted.named_modules() if isinstance(module, LoraLayer)]
    return adapted.state_dict().keys() >= {f"{name}.base_layer.weight" for name in layers}


def add(model, rank: int, seed: int) -> None:
    """Adapters into `model`, in place; drawn from the seed, so that all ranks have the same."""
    torch.manual_seed(seed)
    # not model.add_adapter: that would make save_pretrained leave out the model itself
    with warnings.catch_warnings(action="ignore"):  # of experts, which `fits` refuses
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"), model)


@contextlib.contextmanager
def off(model) -> Iterator[None]:
    """The model without its adapter."""
    adapters = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for adapter in adapters:
        adapter.enable_adapters(False)
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enable_adapters(True)


def save_merged(model, tokenizer, folder: Path) -> None:
    """Model and tokenizer as any tool loads them, with or without an adapter."""
    model.save_pretrained(folder, state_dict=merged(model))
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def merged(model) -> dict[str, Tensor]:
    """The weights that act, under the names that they have without adapters: W + B A."""
    weights = {name: value for name, value in model.state_dict().items() if ".lora_" not in name}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            weight = weights[f"{name}.base_layer.weight"]
            change = module.get_delta_weight(module.active_adapters[0])  # B A
            weights[f"{name}.base_layer.weight"] = weight + change.to(weight.dtype)
    return {name.replace(".base_layer.", "."): value for name, value in weights.items()}
