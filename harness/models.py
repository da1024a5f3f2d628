"""Load models and tokenizers from folders and the hub; refuse what trains wrongly or does not fit.

    load_outline(name)             a causal LM without its weights, and its tokenizer: quick to load
    load_tokenizer(flag, name)     a tokenizer alone
    load_model(name, device, ...)  a causal LM with its weights
    stop_ids(model, tokenizer)     every token that ends a response
    choose_batch(shape, ...)       as many rollouts as are generated together
    memory_notes(model, ...)       the plan's lines on memory and disk

A folder's own code is never run. A model is refused (BadInput) if weights are missing, not finite
or not of the shapes of its config.json, if a prompt has a token without an embedding, if no token
ends a response, or if the sampler's logits are not those of `grpo.Policy`.

**Memory.** Weights and AdamW's moments are float32 and spread over the ranks; each rank also has a
whole copy of the weights, in the dtype of compute, which samples. Left out: activations, the layers
that FSDP holds whole, the memory of a credit method (SHEAR's states and distances, a process reward
model), the warm-up (16 bytes per parameter, on rank 0), CUDA's and NCCL's own memory (1-2 GB),
fragmentation (about a tenth).
"""

import contextlib
import copy
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from base.config import Config, Machine
from base.errors import BadInput, cause
from base.files import config_of
from grpo import PADDED, Layout, hf_generate, rollout, token_ids
from tasks.task import render

# A folder's own code is never run. False, and not unset: transformers would ask on the terminal.
NO_CODE = {"trust_remote_code": False}
LARGE = 1e6  # times the logits, where caps show
# Parameters of a model that is checked in float32, in a copy of 8 GB. Training holds more.
EXACT = 2e9
# How far logits may differ, as a share of the largest: 0.01 nat where that is 30. In float32 the
# families of transformers differ by 1e-5 at most, and SmolLM2 in bfloat16 by 0.02.
ROUNDING = {torch.float32: 3e-4}
ROUNDING_HALF = 5e-2
# Share of a GPU's room for rollouts generated together; the rest is for what `row_bytes` omits.
SHARE = 0.8
ON_CPU = 512  # rollouts generated together on a CPU
CUDA = 2.0  # GB, at most, that CUDA and NCCL take for themselves


@contextlib.contextmanager
def loading(flag: str, name: str) -> Iterator[None]:
    """Inside, any error but too little memory becomes a BadInput, as loaders raise of any class.

    `name` is the value of the command's `flag`: a folder or a hub id.
    """
    try:
        if config_of(Path(name)):
            raise ValueError(f"it is a run, its model is {name}/model")
        yield
    except (BadInput, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = cause(error)
        if not Path(name).exists():
            reason = f"no such folder; {reason}; docs/scaling.md lists what a run downloads"
        raise BadInput(
            f"{flag} {name}: cannot be loaded ({reason}); give a Hugging Face folder or hub id"
        ) from error


def load_outline(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The policy without its weights, on the device `meta`, and its tokenizer.

    This is quick, as no weights are read. Raises BadInput for what cannot be loaded, and for a
    model without attention.
    """
    model = load_shapes(name)
    text = model.config.get_text_config()  # of its language model, if it also reads images
    if not (getattr(text, "num_attention_heads", 0) and getattr(text, "num_hidden_layers", 0)):
        raise BadInput(
            f"--model {name}: {model.config.model_type} has no attention, which training needs; "
            "give another"
        )
    return model, load_tokenizer("--model", name)


def load_shapes(name: str) -> PreTrainedModel:
    """The model that config.json describes, without weights; raises BadInput."""
    with loading("--model", name):
        return outline_of(AutoConfig.from_pretrained(name, **NO_CODE))


def outline_of(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration without its weights, on the device `meta`."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **NO_CODE)


def load_tokenizer(flag: str, name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that a flag names; raises BadInput."""
    with loading(flag, name):
        tokenizer = AutoTokenizer.from_pretrained(name, **NO_CODE)
        if not tokenizer("1 + 1 =")["input_ids"]:  # transformers makes an empty one without files
            raise ValueError("its tokenizer is missing")
    return tokenizer


def load_weights(
    flag: str, name: str, kind: Any, dtype: torch.dtype | str, device: torch.device
) -> PreTrainedModel:
    """Load a model of a class of transformers onto a device.

    `dtype` "auto" is that of the files. Weights in safetensors go to the device without a copy in
    the host's memory. Raises BadInput for weights that config.json does not describe.
    """
    with loading(flag, name):
        model, found = kind.from_pretrained(
            name,
            dtype=dtype,
            device_map=device,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **NO_CODE,
        )
        wrong = found["missing_keys"] | {key for key, *_ in found["mismatched_keys"]}
        if wrong:
            raise ValueError(f"its weights are not those of its config.json: {min(wrong)}")
    return model


def check_embedded(
    flag: str,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[str | list[int]],
) -> None:
    """Raise BadInput for a prompt, a text or its ids, with a token that has no embedding.

    A tokenizer may have more tokens than its model, such as an image's, or be another model's.
    """
    count = len(model.get_input_embeddings().get_parameter("weight"))
    if len(tokenizer) <= count:
        return
    for ids in token_ids(tokenizer, list(prompts)):
        last = max(ids, default=0)
        if last >= count:
            raise BadInput(
                f"{flag} {name}: has no embedding for {tokenizer.convert_ids_to_tokens(last)!r}, "
                "which a prompt or its template has; remove it there, or give another model"
            )


def check_finite(flag: str, name: str, model: PreTrainedModel) -> None:
    """Raise BadInput for weights that are not finite.

    A forward pass would not find all of them: it reads the embeddings of its own tokens only.
    """
    for key, weight in model.named_parameters():
        if not all(value.isfinite() for value in weight.aminmax()):  # both are NaN if any weight is
            raise BadInput(f"{flag} {name}: its weights are not finite: {key}; give another model")


def load_model(
    name: str, device: torch.device, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """The policy, in the dtype of its files; raises BadInput for one that would train wrongly."""
    policy = load_weights("--model", name, AutoModelForCausalLM, "auto", device)
    check_finite("--model", name, policy)
    ids = tokenizer("1 + 1 =")["input_ids"]
    prompts = [ids]
    if tokenizer.chat_template:
        with contextlib.suppress(BadInput):  # for a template that fails; it may not be asked for
            prompts.append(render("chat", "1 + 1 =", "", tokenizer))
    check_embedded("--model", name, policy, tokenizer, prompts)
    with loading("--model", name):  # models raise exceptions of any class
        if not computes_as_ours(policy, tokenizer, ids):
            raise ValueError(
                "its logits are not head(last state), or left padding and a cache change them"
            )
        count = len(policy.get_input_embeddings().get_parameter("weight"))
        if min(stop_ids(policy, tokenizer), default=count) >= count:
            raise ValueError(
                "no token ends a response; name one as eos_token_id in generation_config.json"
            )
    return policy


@torch.no_grad()
def computes_as_ours(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int]
) -> bool:
    """Whether the sampler's logits are the head's output on the last hidden state of scoring.

    `grpo.Policy` would leave out a cap or a scale of the logits, and so train another model. It
    pads on the right, and the sampler on the left, with a cache: a model that looks ahead, or
    counts its positions from the padding on, would be another one to each.
    """
    if policy.base_model is policy:  # there is none under the name that its class gives
        return False
    if policy.dtype != torch.float32 and policy.num_parameters() <= EXACT:
        policy = copy.deepcopy(policy).float()
    # an odd number of pads, which are no whole block of tokens that a model may compress
    prompts = [2 * ids, ids[:3]]
    return samples_as_it_scores(policy, tokenizer, prompts, hf_generate, PADDED, 0.0)


@torch.no_grad()
def samples_as_it_scores(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    generate: Callable[..., torch.Tensor],
    layout: Layout,
    temperature: float,
) -> bool:
    """Whether a sampler's logits of two tokens for each prompt are those of scoring in a layout.

    The prompts come longest first, the order in which `rollout` generates them. A sampler that does
    not call the policy cannot be asked, and counts as right.
    """
    head = policy.get_output_embeddings()
    sampled = []  # the logits of each token, (b, V)
    hooks = [
        # a cap hardly changes small logits
        head.register_forward_hook(lambda module, inputs, logits: LARGE * logits.float()),
        policy.register_forward_hook(
            lambda module, inputs, output: sampled.append(output.logits[:, -1])
        ),
    ]
    try:
        rollouts = rollout(
            policy,
            tokenizer,
            prompts,
            1,
            max_tokens=2,
            temperature=temperature,
            stops=[],
            generate=generate,
        )
        ids, is_response, model_kwargs = layout.lay_out(rollouts)  # (b, S), (b, S)
        states = policy.base_model(
            input_ids=ids, use_cache=False, **model_kwargs
        ).last_hidden_state  # (b, S, d)
        ours = head(states[:, :-1][is_response[:, 1:]])  # (2 b, V)
    finally:
        for hook in hooks:
            hook.remove()
    if len(sampled) != 2:
        return True
    difference = (torch.stack(sampled, 1).flatten(0, 1) - ours).abs().max()
    bound = ROUNDING.get(policy.dtype, ROUNDING_HALF)
    return bool(difference <= bound * ours.abs().max())  # false if any is NaN


def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round all parameters in place; model.to(dtype) would also round the rotary frequencies."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token id that ends a response.

    The model's folder, its tokenizer and its chat template name them. A base model may name none
    but <|endoftext|> and yet be prompted with turns, which end with <|im_end|>: without that stop
    it would continue and answer a question of its own.
    """
    ids = {tokenizer.eos_token_id, tokenizer.added_tokens_encoder.get("<|im_end|>")}
    for config in (model.generation_config, model.config):
        named = getattr(config, "eos_token_id", None)
        ids.update(named if isinstance(named, list) else [named])
    if tokenizer.chat_template:
        reply = "words of the assistant"
        turns = [
            {"role": "user", "content": "words of the user"},
            {"role": "assistant", "content": reply},
        ]
        with contextlib.suppress(Exception):  # a template may refuse any conversation
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            assert isinstance(text, str)  # a list only for several conversations
            _, found, after = text.rpartition(reply)
            if found:
                # the token that the template puts after the assistant's words
                follows = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"][:1]
                added = tokenizer.added_tokens_decoder
                ids.update(id for id in follows if id in added and added[id].special)
    return sorted(ids - {None})


def context_of(model: PreTrainedModel) -> float:
    """The most tokens that the model can read: prompt and response together."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf


# ---- memory --------------------------------------------------------------------------------------


def resident_gb(model: PreTrainedModel, config: Config, world: int) -> float:
    """GB (1e9 bytes) that stay on each of `world` GPUs; of `model` only the shapes are read."""
    total = model.num_parameters()  # tied ones once
    trained = model.num_parameters(only_trainable=True)  # fewer with an adapter
    size = getattr(torch, config.dtype).itemsize
    # With one rank in float32 `fsdp.shard` makes no copy: the trained model itself samples.
    has_copy = world > 1 or size == 2
    return ((4 * total + 8 * trained) / world + size * total * has_copy) / 1e9


def choose_batch(
    shape: PreTrainedConfig, machine: Machine, room: float, prompt: int, response: int
) -> int:
    """How many rollouts of the longest prompt are generated together; at least 1.

    That is --generate-batch, or on a GPU as many as fit into `room` GB, with this many tokens. The
    sampled tokens depend on the number, so `room` is what a command leaves of the whole GPU, not
    what is free at the time.
    """
    if machine.generate_batch:
        return machine.generate_batch
    if machine.device == "cpu":
        return ON_CPU
    row = row_bytes(shape, prompt, response, getattr(torch, machine.dtype).itemsize)
    return max(1, int(SHARE * (room - CUDA) * 1e9 / row))


def row_bytes(shape: PreTrainedConfig, prompt: int, response: int, itemsize: int) -> int:
    """Bytes per rollout in `generate`, with numbers of `itemsize` bytes.

    They are its cache for `prompt` and `response` tokens, four float32 copies of one token's
    logits, and the working memory of one layer. A layer works with the prompt's activations at
    first, then with keys and values that are copied for every query head; the larger of the two
    counts.
    """
    text = shape.get_text_config()
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    head = 2 * (prompt + response) * head_width  # numbers in the keys and values of one head
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    cache = text.num_hidden_layers * kv_heads * head
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    prefill = prompt * (6 * text.hidden_size + 3 * wide)  # counted on Qwen2
    layer = max(prefill, text.num_attention_heads * head)
    return itemsize * (cache + layer) + 4 * 4 * text.vocab_size


def memory_notes(
    model: PreTrainedModel, config: Config, world: int, device: torch.device
) -> list[str]:
    """The plan's lines on memory and disk, with warnings where one is too small."""
    stay = resident_gb(model, config, world)
    gradients = 4 * model.num_parameters(only_trainable=True) / world / 1e9
    room = room_gb(device)
    disk = checkpoint_gb(model, config)
    free = free_gb(Path(config.out))
    notes = [
        f"memory per rank: {stay:.1f} GB stay, {stay + gradients:.1f} GB and activations in "
        f"training, of {room:.0f} GB; a checkpoint takes {disk:.3g} GB of the disk's {free:.0f} GB"
    ]
    if stay + gradients > room:
        notes.append("WARNING: memory is too small; use more GPUs, or a smaller model")
    if (config.keep + 1) * disk > free:  # one more while it is written
        notes.append("WARNING: the disk is too small; free space, or choose another --out")
    return notes


def checkpoint_gb(model: PreTrainedModel, config: Config) -> float:
    """GB of a checkpoint: the weights, those of the sampling copy, the moments."""
    size = getattr(torch, config.dtype).itemsize
    trained = model.num_parameters(only_trainable=True)
    return ((4 + size) * model.num_parameters() + 8 * trained) / 1e9


def room_gb(device: torch.device) -> float:
    """GB of the GPU's memory; without a GPU, of each rank's share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] / 1e9
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return size / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def free_gb(folder: Path) -> float:
    """Free GB on the disk of a folder, which may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / 1e9
