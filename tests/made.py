"""What several test files make, and how they run a command.

They make tokenizers, small models and their folders, rollouts, batches, rows of the page, and
groups for SHEAR and its race.
"""

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from torch.multiprocessing import start_processes
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Tokenizer,
)

from credit import lora
from credit.ablations import even_out, every_pair
from credit.batch import Batch
from credit.methods import assign_credit
from credit.settings import Shear
from credit.shear_settings import shear_options
from fast.distances import token_distances
from grpo import Policy, Rollouts, group_advantages, pad_left, rollout
from harness import files
from harness.config import TrainConfig, parse_train, with_values
from harness.launch import resolve
from harness.parallel import Ranks
from harness.prepare import Parts
from harness.run import credit_context
from shear import Weighed, mean_norm, shear_weights, two_sides
from sinkhorn import sinkhorn
from tasks import toy
from tasks.rows import read_rows

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
    """Qwen2's tokenizer, with a token per byte and no others but those asked for.

    These are <|endoftext|>, the `special` tokens, and `more` that `merges` make.
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
    """A `Batch` of these rewards (B,), with the advantages of Eq. (1).

    `parts` are its other fields.
    """
    usual = dict(problems=[{}] * (len(rewards) // group_size), reasons=["drawn"] * len(rewards))
    return Batch(
        rollouts, rewards, group_advantages(rewards, group_size), group_size, **usual | parts
    )


def drawn_batch(rewards: list[list[float]], *, shared: int = 0) -> Batch:
    """Groups of 5 to 10 tokens of random probabilities, entropies and states.

    The rollouts of a group share the first `shared` states.
    """
    generator = torch.Generator().manual_seed(0)
    rewards = torch.tensor(rewards)  # (groups, G), NaN for no verdict and no token
    groups, size = rewards.shape
    # (B, T)
    mask = torch.arange(10) < torch.randint(5, 11, (groups * size, 1), generator=generator)
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
    return with_values(configured([]), changes)


def credit_by(config: TrainConfig, batch: Batch) -> torch.Tensor:
    """Token advantages by the configuration's method, which needs no policy of its own."""
    context = credit_context(Parts(config, None, None, None), None, 0)
    return assign_credit(batch, context, config.credit)


def saved(folder, model, tokenizer=None) -> str:
    """The name of a folder with the model and its tokenizer.

    The tokenizer is the embedded task's if none is given.
    """
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

    def decode(self, ids: list[int], **options: bool) -> str:
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


def assert_same_run(one, other) -> None:
    """Weights, metrics but seconds, and samples, to the bit."""
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = (files.read_lines(run / "metrics.jsonl") for run in (one, other))
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


def words_of(*parts) -> list[str]:
    """A command line of texts, each of which may be several words, and of paths and numbers."""
    return " ".join(map(str, parts)).split()


def text_of(name: str) -> str:
    """A file of tests/cases: what is printed, to the letter."""
    return (ROOT / "tests" / "cases" / name).read_text(encoding="utf-8")


def cases(name: str) -> list[dict]:
    """The rows of a file of tests/cases, which other graders can be tested with, too."""
    return list(read_rows(ROOT / "tests" / "cases" / name))


def table(text: str) -> list[list[str]]:
    """Rows of texts, a line each, with two spaces or more between cells."""
    return [re.split("  +", line.strip()) for line in text.splitlines() if line.strip()]


def failing(error: Exception) -> Mock:
    """A function that raises this error, whatever it is given."""
    return Mock(side_effect=error)


def on_two(work: Callable[..., None], folder, *inputs) -> None:
    """Run `work(folder, *inputs)` on two ranks over gloo.

    Where no GPU forbids it, the ranks are forked: they need not import what this process has
    imported.
    """
    method = "spawn" if torch.cuda.is_available() else "fork"
    start_processes(_as_rank, (work, folder, *inputs), nprocs=2, start_method=method)


def _as_rank(rank: int, work: Callable[..., None], folder, *inputs) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    # torch reads these, but does not use them
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "none"}
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    work(folder, *inputs)
    torch.distributed.destroy_process_group()


def run_well(command: ModuleType, *parts) -> None:
    """Asserts that a command ends with status 0."""
    assert command.main(words_of(*parts)) == 0


def assert_near(ours, expected, apart: float) -> None:
    """Asserts that numbers differ by `apart` at most."""
    assert_close(ours, expected, atol=apart, rtol=0)


# ---- packing -------------------------------------------------------------------------------------


FAMILIES = {
    "qwen2": {},
    "llama": {},
    "qwen3": dict(head_dim=16),
    "mistral": dict(sliding_window=None),
}


def family_model(family="qwen2", spread=0.5, **options):
    """A small model with weights far from zero, whose choices depend on every position and mask."""
    sizes = dict(vocab_size=40, max_position_embeddings=128, initializer_range=spread)
    sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    sizes |= SMALL | {"intermediate_size": 48} | FAMILIES.get(family, {})
    config = AutoConfig.for_model(family, **sizes | options)
    return AutoModelForCausalLM.from_config(config).eval()


def random_prompts(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of these lengths, padded left with random tokens.

    There are two columns more than needed.
    """
    width = max(lengths) + 2
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return torch.randint(0, 40, mask.shape), mask


def unlike_rollouts() -> Rollouts:
    """Eight rollouts of unlike lengths, of which the last is emptied.

    What stands in the padding must not matter.
    """
    prompts = random_prompts([3, 9, 1, 12, 5, 2, 7, 4])
    mask = torch.arange(33) < torch.tensor([17, 1, 30, 8, 23, 2, 11, 0])[:, None]
    ids = torch.randint(0, 40, mask.shape)
    return Rollouts(*prompts, ids, mask, torch.zeros(8).bool(), [""] * 8)


def gradients(policy: Policy, rollouts: Rollouts, pulls: torch.Tensor, at_once: int) -> tuple:
    """Log-probabilities (B, T), and the gradients of their sum weighted by `pulls`.

    Each pass takes `at_once` rollouts.
    """
    logp = torch.zeros_like(pulls)
    policy.zero_grad()
    for rows in torch.arange(len(rollouts.texts)).split(at_once):
        part = rollouts.take(rows)
        width = part.ids.shape[1]
        values = policy(part, 0.7).log_probs
        (values * pulls[rows, :width]).sum().backward()
        logp[rows, :width] = values.detach()
    trained = [weights.grad for weights in policy.parameters() if weights.requires_grad]
    return logp, torch.cat([gradient.flatten() for gradient in trained])


# ---- the page ------------------------------------------------------------------------------------

HOSTILE = [
    "</script><script>document.title='ran'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title='ran'\">",
    "]]>&lt;&amp;&#60;img src=x onerror=alert(1)&#62;",
    "\u2028\u2029\u202e\x00\ud800",
    "{{data}} {{title}} {{script_hash}} %s \\1 \\u003c",
    *("\r\n\t ", ""),
    "javascript:document.title='ran'",
    "<svg onload=\"document.title='ran'\"><use href=x></svg>",
    "<style>*{display:none}</style>",
    "<iframe srcdoc=\"<script>parent.document.title='ran'</script>\"></iframe>",
    *("'\"><a href=//x>&quot;", "${document.title='ran'}`", "__proto__", "constructor"),
]


def page_row(tokens, weights, **other):
    """A row as a run writes it."""
    row = {"step": 1, "problem": "2+2?", "answer": "4", "response": "".join(tokens)}
    row |= {"score": 1.0, "reason": "correct", "first_error": None, "advantage": 0.5}
    return row | {"tokens": tokens, "weights": {"shear": weights}} | other


def long_group():
    """8 rollouts of 3,000 tokens."""
    text = "So $(2n-19)^2 + 35 = 4x^2$.\n\nThen the factors, which have the same sign, make 35. "
    tokens = (re.findall(r" ?\w{1,5}|\s|[^\w\s]", text) * 3000)[:3000]
    weights = [round(0.5 + 0.5 * math.sin(place / 40), 4) for place in range(3000)]
    return [
        page_row(tokens, weights, score=float(place < 3), advantage=0.6 - 0.3 * place)
        for place in range(8)
    ]


GOOD = page_row(["a", "b"], [0.5, 0.5])


# ---- SHEAR ---------------------------------------------------------------------------------------

SPANS = dict(window=6, stride=3)


def group(seed: int = 0, lengths=(17, 12, 4, 20, 9), dim: int = 5, shared: int = 0):
    """Hidden states (G, T, d), mask (G, T) and correct (G,) of a group.

    Rollouts 1 and 3 are right; the first `shared` states are equal.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = 3 * torch.randn(len(lengths), max(lengths), dim, generator=generator)
    hidden[:, :shared] = hidden[:1, :shared]
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    rollouts = torch.arange(len(lengths))
    return hidden, mask, (rollouts == 1) | (rollouts == 3)


def weighed(hidden, mask, correct, **options) -> Weighed:
    """As training weighs a group: by the fast hooks, or an ablation."""
    settings = {name: options.pop(name) for name in vars(Shear()) if name in options}
    evened = options.pop("normalize", "group") == "rollout"
    found = shear_weights(hidden, mask, correct, **shear_options(Shear(**settings), **options))
    return found._replace(omega=even_out(found.omega, mask.bool())) if evened else found


def weights(hidden, mask, correct, **options):
    """(G, T), the weights of `weighed`."""
    return weighed(hidden, mask, correct, **options).omega


def sampled(tiny, group_size=4) -> Rollouts:
    """Rollouts of the untrained model, which stops at random; of two prompts one is padded."""
    prompts = ["a=3-6;b=3+a;b?\n", "a=1*7;a?\n"]
    return rollout(*tiny, prompts, group_size, max_tokens=24, temperature=1.0, batch_size=3)


LIMITS = dict(max_iters=100, tol=1e-3)
RACES = (
    "text clustered identical shared-prefix one-point tiny huge outliers ragged nearly-tied".split()
)


def states_of_a_text(generator, rollouts, length, dim):
    """States (G, T, d) as of a text: few words, each near its own point, and a slow drift.

    They are hard to match in parts.
    """
    points = 3 * torch.randn(12, dim, generator=generator)
    drift = 0.1 * torch.randn(rollouts, length, dim, generator=generator).cumsum(1)
    noise = 0.3 * torch.randn(rollouts, length, dim, generator=generator)
    return points[torch.randint(12, (rollouts, length), generator=generator)] + drift + noise


def race_case(name, seed=0):
    """Hidden states (6, 40, 8), mask and verdicts of one group that could mislead a race."""
    generator = torch.Generator().manual_seed(seed)
    hidden, lengths = states_of_a_text(generator, 6, 40, 8), torch.full((6,), 40)
    if name == "clustered":
        centres = 4 * torch.randn(5, 8, generator=generator)
        hidden = centres[torch.randint(5, (6, 40), generator=generator)] + 1e-3 * hidden
    elif name == "identical":
        hidden = hidden[:1].expand(6, -1, -1).clone()
    elif name == "shared-prefix":
        hidden[:, :25] = hidden[:1, :25]
    elif name == "one-point":
        hidden = torch.ones(6, 40, 8)
    elif name == "tiny":
        hidden = 1e-12 * hidden
    elif name == "huge":
        hidden = 1e12 * hidden
    elif name == "outliers":  # costs of thousands of eps beside small ones
        hidden[:, ::7] *= 1000
    elif name == "ragged":
        lengths = torch.tensor([40, 13, 5, 26, 37, 1])
    elif name == "nearly-tied":  # every wrong rollout is the same but for a breath
        hidden[1::2] = hidden[1:2] + 1e-3 * torch.randn(3, 40, 8, generator=generator)
    mask = torch.arange(40)[None] < lengths[:, None]
    return hidden, mask, torch.tensor([True, False] * 3)


@cache
def race_problem(name, seed=0, window=8, stride=4):
    """The inputs of `race` for a group, and the results for all pairs solved.

    The results are values (K+, K-) and iterations (K+, K-).
    """
    hidden, mask, correct = race_case(name, seed)
    right, wrong = two_sides(hidden, mask, correct, window, stride)
    costs = token_distances(right.states, wrong.states)
    eps = 0.05 * mean_norm(hidden[mask])

    def solve(reading, blocks, a, b):
        return getattr(sinkhorn(blocks, a, b, eps=eps, **LIMITS), reading).float()

    given = costs, right.spans, wrong.spans
    values = every_pair(*given, partial(solve, "value"))
    iterations = every_pair(*given, partial(solve, "iterations"))
    return (costs, right, wrong, eps), values.clamp_min(0.0), iterations.long()


# Flags of a short diagnosis.
DIAGNOSE = "--task embedded --toy-lines 1 --window 4 --stride 4 --heldout 16 --eval-groups 2"
DIAGNOSE += " --max-iters 5"
