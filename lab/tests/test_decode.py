"""lab/fast/decode.py: its samples are those of transformers' loop, and a step can be captured.

On a GPU steps are captured; on a CPU the same code runs as it is, or from a tape.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
from builders.rollouts import random_prompts
from builders.simulated_gpu import CUDA, Cuda, mark
from builders.small_models import FAMILIES, family_model, small_gpt2
from scipy.stats import chi2_contingency
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo import Policy, Rollouts, hf_generate, score
from harness.memory import row_bytes
from harness.run import Parts
from harness.sampling import sample_step
from lab.fast import decode
from lab.fast.generate import fast_generate
from lab.fast.packing import packing_of
from tasks.plug import use

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
        ],
    ),
]
LIMITS = dict(max_tokens=16, temperature=0.0, stops=[1, 2, 3, 4, 5, 6, 7, 8], pad=0)
WAITS = "_local_scalar_dense lift_fresh nonzero _unique2 unique_consecutive unique_dim masked_select equal"


class Tape(TorchDispatchMode):
    """A stand-in for a CUDA graph: the same calls of torch on the same tensors, without Python.

    Recording raises AssertionError for calls that wait for a GPU, or copy a number to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name.removeprefix("aten::") not in WAITS.split(), func
        result = func(*args, **kwargs or {})
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # it is neither a view nor changed in place
                    old.copy_(new)


def taped(step):
    """`decode.captured` with a tape: the first step runs as it is, the second is recorded."""
    step()
    yield
    tape = Tape()
    with tape:
        step()
    while True:
        yield
        tape.replay()


@pytest.fixture
def small(monkeypatch):
    """Caches that grow and batches that shrink within a few steps."""
    sizes = dict(EVERY=3, LENGTH=8, SMALLEST=2)
    for name, value in sizes.items():
        monkeypatch.setattr(decode, name, value)


@pytest.fixture
def pairs(monkeypatch) -> list[tuple[int, int]]:
    """The rows and columns of each static cache that is made."""
    made = []
    copy = decode.copy_to_static

    def noted(config, cache, rows, used, length):
        made.append((len(rows), length))
        return copy(config, cache, rows, used, length)

    monkeypatch.setattr(decode, "copy_to_static", noted)
    return made


def unlike_prompts(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve prompts of four kinds, padded on the left."""
    ids, mask = random_prompts([3, 9, 1, 6])
    rows = [0] * 5 + [1] + [2] * 4 + [3] * 2
    return ids[rows].to(device), mask[rows].to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(family, device, small, pairs):
    """Greedy tokens are those of transformers' loop, while caches grow and batches shrink.

    So they are without stop ids, for prompts that are read once, for those of one token, and for a
    model that packs.
    """
    model = family_model(family).to(device)
    packing_of(model)
    shared, mask = unlike_prompts(device)
    ids = shared.clone()
    ids[:, -1] = torch.arange(6, 18)  # otherwise equal prompts have equal responses
    expected = hf_generate(model, ids, mask, **LIMITS)
    assert torch.equal(decode.sample(model, ids, mask, **LIMITS).ids, expected)
    rows, columns = zip(*pairs, strict=True)
    assert rows[0] == 12 and rows[-1] < 12 and columns[-1] > columns[0]
    assert model.config._attn_implementation == "packed"
    endless = LIMITS | {"stops": []}
    cases = [(shared, mask, endless), (shared, mask, LIMITS), (ids[:, -1:], mask[:, -1:], LIMITS)]
    for prompts, used, limits in cases:
        expected = hf_generate(model, prompts, used, **limits)
        assert torch.equal(decode.sample(model, prompts, used, **limits).ids, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_sampled_tokens_are_of_the_same_distribution(device, monkeypatch):
    """Of 4,096 responses there are as many of each kind as transformers' loop draws.

    They have at most three of four tokens; chi-square test.
    """
    monkeypatch.setattr(decode, "EVERY", 1)
    model = family_model(vocab_size=4, spread=0.3).to(device)
    ids = torch.tensor([[1, 2]], device=device).expand(4096, 2)
    mask = torch.ones_like(ids, dtype=torch.bool)
    limits = dict(max_tokens=3, temperature=1.0, stops=[2, 3], pad=0)
    torch.manual_seed(1)
    counts = []
    for found in (
        decode.sample(model, ids, mask, **limits).ids,
        hf_generate(model, ids, mask, **limits),
    ):
        kinds = (found * torch.tensor([16, 4, 1], device=device)).sum(1)
        counts.append(kinds.bincount(minlength=64).cpu())
    table = torch.stack(counts)
    table = table[:, table.sum(0) >= 20]  # kinds too rare to be tested
    assert table.shape[1] > 8 and chi2_contingency(table).pvalue > 0.01


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_the_scoring_pass(family, device, small):
    """In float32 they agree with `score` of the same tokens up to rounding.

    A seed gives the same tokens again.
    """
    model = family_model(family).to(device)
    ids, mask = unlike_prompts(device)
    limits = LIMITS | {"temperature": 0.8}
    torch.manual_seed(0)
    found = decode.sample(model, ids, mask, log_probs=True, **limits)
    torch.manual_seed(0)
    assert torch.equal(decode.sample(model, ids, mask, **limits).ids, found.ids)
    is_stop = torch.isin(found.ids, torch.tensor(limits["stops"], device=device))
    inside = is_stop.cumsum(1) - is_stop.long() == 0
    rollouts = Rollouts(ids, mask, found.ids, inside, ~is_stop.any(1), [""] * len(ids))
    scored = score(Policy(model), rollouts, temperature=0.8, micro_tokens=200)
    assert found.log_probs.min() < -1  # of tokens that are not certain
    assert_close(found.log_probs, scored.log_probs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_step_repeats_without_python(temperature, small, monkeypatch):
    """A step's calls, repeated from a tape on the same tensors, give the same responses.

    A call that waits for a GPU, and so cannot be captured, raises.
    """
    model = family_model()
    ids, mask = unlike_prompts("cpu")
    found = []
    for in_turn in decode.plain, taped:
        monkeypatch.setattr(decode, "plain", in_turn)
        torch.manual_seed(0)
        limits = LIMITS | {"temperature": temperature}
        found.append(decode.sample(model, ids, mask, log_probs=True, **limits))
    assert torch.equal(found[0].ids, found[1].ids)
    assert_close(found[0].log_probs, found[1].log_probs)


def test_nothing_is_on_another_device(small, monkeypatch):
    """Every tensor of the loop is on the prompts' device: a simulated GPU finds others."""
    monkeypatch.setattr(decode, "captured", decode.plain)
    model = family_model()
    ids, mask = unlike_prompts("cpu")
    with Cuda():
        mark([*model.parameters(), *model.buffers(), ids, mask], CUDA)
        found = decode.sample(model, ids, mask, log_probs=True, **LIMITS | {"temperature": 1.0})
        assert found.ids.is_cuda and found.log_probs.is_cuda


def test_logits_that_are_not_finite_end_it():
    """As with transformers' loop, sampling from a broken model raises; so does greedy decoding."""
    model = family_model()
    with torch.no_grad():
        model.get_output_embeddings().weight[7] = torch.nan
    for temperature in 0.0, 1.0:
        with pytest.raises(RuntimeError, match="contains either `inf`, `nan`"):
            decode.sample(model, *unlike_prompts("cpu"), **LIMITS | {"temperature": temperature})


@pytest.mark.parametrize("make", [family_model, small_gpt2])
def test_what_is_not_captured_is_sampled_as_before(make, capsys):
    """On a CPU, and for unknown families, samples are those of `fast_generate`; one line says so."""
    decode.say_once.cache_clear()
    model = make()
    ids, mask = random_prompts([3, 9])
    ids.clamp_(max=28)
    generate = partial(decode.graph_generate, model, ids, mask, **LIMITS | {"temperature": 1.0})
    found = []
    for function in generate, generate, partial(fast_generate, *generate.args, **generate.keywords):
        torch.manual_seed(0)
        found.append(function())
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])
    line = f"sampling from {model.config.model_type}: lab/fast/generate.py"
    assert capsys.readouterr().out.count(line) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_no_cache_outlives_a_call(device, small, monkeypatch):
    """Caches are gone when a call ends, though Python's garbage is not collected."""
    model = family_model().to(device)
    copy = decode.copy_to_static
    made = []

    def noted(*inputs):
        cache = copy(*inputs)
        made.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(decode, "copy_to_static", noted)
    gc.disable()
    try:
        decode.sample(model, *unlike_prompts(device), **LIMITS | {"stops": []})
        assert len(made) > 2 and not any(cache() for cache in made)
    finally:
        gc.enable()


def test_it_is_an_option():
    """`lab.fast` samples by it only where it is asked for."""
    parts = Parts(sample_step)
    use(parts, ["lab.fast"])
    assert parts.generate is fast_generate
    use(parts, ["lab.fast:decode=yes"])
    assert parts.generate is decode.graph_generate


@pytest.mark.parametrize("heads", [2, 4])
def test_the_plan_counts_static_caches(heads, monkeypatch):
    """`harness.memory.row_bytes` has room for the largest cache, the layer that is copied and logits.

    While a cache is replaced, the rows of one layer that stay exist twice.
    """
    monkeypatch.setattr(decode, "LENGTH", 8)
    model = family_model(num_attention_heads=heads, max_position_embeddings=256)
    ids, mask = random_prompts([30] * 16)
    held = []  # bytes of keys and values after each change of the cache
    copy = decode.copy_to_static

    def noted(*inputs):
        cache = copy(*inputs)
        layers = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
        held.append(sum(layers) + max(layers))
        return cache

    monkeypatch.setattr(decode, "copy_to_static", noted)
    decode.sample(model, ids, mask, **LIMITS | {"max_tokens": 90, "stops": []})
    assert len(held) > 9
    logits = 4 * 4 * model.config.vocab_size
    assert max(held) / 16 + logits <= row_bytes(model.config, ids.shape[1], 90, 4)
