"""Cases of several test files: tokenizers, small models and their folders, rollouts, batches, and
what they share.
"""

import os
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Tokenizer,
)

from credit import lora
from credit.batch import Batch
from credit.methods import assign_credit
from grpo import Rollouts, group_advantages, pad_left
from harness import files
from harness.config import TrainConfig, changed, parse_train
from harness.launch import resolve
from harness.parallel import Ranks
from harness.run import credit_context
from tasks import toy

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WITHOUT_LINUX = ROOT / "tests" / "without_linux"  # on PYTHONPATH, it makes believe another system
ALONE = Ranks(0, 1, torch.device("cpu"))
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Flags of a short run of the embedded task.
RUN = "--task embedded --toy-lines 1 --prompts-per-step 4 --rollouts-per-prompt 4 --prompts-per-update 2 ".split()
RUN += "--heldout 8 --eval-groups 4".split()
SMALL = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
)


def byte_tokenizer(
    *special: str, more=(), merges=(), eos_token="<|endoftext|>", extra_special_tokens=()
):
    """Qwen2's: <|endoftext|>, the `special` tokens, a token a byte, and `more` that
    `merges` make.
    """
    symbols = ["<|endoftext|>", *special, *sorted(ByteLevel.alphabet()), *more]
    tokens = dict(
        eos_token=eos_token,
        pad_token="<|endoftext|>",
        extra_special_tokens=list(extra_special_tokens),
    )
    return Qwen2Tokenizer(
        vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=list(merges), **tokens
    )


def turns_tokenizer(*special: str, template: str | None = CHAT):
    """`byte_tokenizer` with the turns of Qwen's chat models, and further special tokens."""
    turns = dict(eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>", *special])
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>", **turns)
    tokenizer.chat_template = template
    return tokenizer


def small_gpt2():
    """A model whose positions are absolute."""
    ids = dict(vocab_size=29, bos_token_id=1, eos_token_id=1)
    return GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=4, **ids)).eval()


def small_mixtral():
    """A model with experts, for the embedded task's vocabulary."""
    ids = dict(vocab_size=29, bos_token_id=None, eos_token_id=None)
    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **SMALL, **ids)).eval()


def made_batch(rewards, rollouts, group_size: int, **parts) -> Batch:
    """A `Batch` of these rewards (B,), with Eq. (1)'s advantages; `parts` are what it holds
    besides.
    """
    usual = dict(problems=[{}] * (len(rewards) // group_size), reasons=["drawn"] * len(rewards))
    return Batch(
        rollouts, rewards, group_advantages(rewards, group_size), group_size, **usual | parts
    )


def drawn_batch(rewards: list[list[float]], *, shared: int = 0) -> Batch:
    """Groups of 5 to 10 tokens of random probabilities, entropies and states, which share the first
    `shared` ones.
    """
    generator = torch.Generator().manual_seed(0)
    rewards = torch.tensor(rewards)  # (groups, G), NaN for no verdict and no token
    groups, size = rewards.shape
    mask = torch.arange(10) < torch.randint(
        5, 11, (groups * size, 1), generator=generator
    )  # (B, T)
    mask &= ~rewards.view(-1, 1).isnan()
    log_probs, entropies = (
        -6 * torch.rand(mask.shape, generator=generator),
        torch.rand(mask.shape, generator=generator),
    )
    hidden = torch.rand(groups, size, 10, 6, generator=generator)
    hidden[:, :, :shared] = hidden[:, :1, :shared]
    parts = dict(log_probs=log_probs, entropies=entropies, hidden=hidden.flatten(0, 1)[mask])
    return made_batch(rewards.flatten(), without_text(mask), size, **parts)


def configured(argv: list[str]) -> TrainConfig:
    """The configuration of a run with these flags."""
    return resolve(parse_train(argv))


def flags(**changes) -> TrainConfig:
    """The recipe's, and `changes`."""
    return changed(configured([]), changes)


def credit_by(config: TrainConfig, batch: Batch) -> torch.Tensor:
    """Token advantages by the configuration's method, which needs no policy of its own."""
    context = credit_context(config, None, None, None, 0)
    return assign_credit(batch, context, config.credit)


def saved(folder, model, tokenizer=None) -> str:
    """A folder with the model and its tokenizer, the embedded task's if none is given; its name."""
    model.save_pretrained(folder)
    (tokenizer or toy.make_tokenizer()).save_pretrained(folder)
    return str(folder)


def adapted(model, rank: int = 2, std: float = 0.3):
    """The model with an adapter that has learned something."""
    lora.add(model, rank, seed=0)
    return learned(model, std)


def learned(model, std: float = 0.3):
    """The model, whose adapter has learned something by now."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    return model


def with_a_stop(tokenizer, prompts: list[str], texts: list[str]) -> Rollouts:
    """`Rollouts` of these texts as if they had been sampled, each with its stop token."""
    ids, mask = pad_left(tokenizer(prompts)["input_ids"], 0, "cpu")
    rows = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    response, inside = pad_left([row[::-1] for row in rows], 0, "cpu")
    return Rollouts(
        ids, mask, response.flip(1), inside.flip(1), torch.zeros(len(texts)).bool(), texts
    )


def without_text(mask) -> Rollouts:
    """`Rollouts` of which only the mask (B, T) matters; each token is its rollout's number."""
    ids = torch.arange(len(mask))[:, None].expand(mask.shape)
    return Rollouts(None, None, ids, mask, torch.ones(len(mask)).bool(), [""] * len(mask))


class Numbers:
    """A tokenizer whose tokens are numbers."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(str, ids))


def widened(rollouts: Rollouts, left: int, right: int) -> Rollouts:
    """The same rollouts with more padding on both sides; what stands in it must not matter."""
    pad = torch.nn.functional.pad
    masks = dict(
        prompt_mask=pad(rollouts.prompt_mask, (left, 0)), mask=pad(rollouts.mask, (0, right))
    )
    prompt_ids = torch.cat(
        [torch.randint(0, 20, (len(rollouts.texts), left)), rollouts.prompt_ids], 1
    )
    ids = torch.cat([rollouts.ids, torch.randint(0, 20, (len(rollouts.texts), right))], 1)
    return replace(rollouts, prompt_ids=prompt_ids, ids=ids, **masks)


def filled(text: str, places: dict) -> str:
    """The text with paths in the place of their names."""
    for name, place in places.items():
        text = text.replace(name, str(place))
    return text


def assert_same_run(one, other) -> None:
    """Weights, metrics but seconds, and samples, to the bit."""
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = (files.rows(run / "metrics.jsonl") for run in (one, other))
    assert [row | {"seconds": 0} for row in ours] == [row | {"seconds": 0} for row in theirs]
    assert (one / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()


class Hostile:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def interrupt(*parts, **options):
    """Ctrl-C, in place of what would be done here."""
    raise KeyboardInterrupt
