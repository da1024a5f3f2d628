"""fast/decode.py: the same tokens as `generate` when greedy, the exact softmax when not, and nothing left behind."""

import itertools
import math
import types

import pytest
import torch
from cases import SMALL, small_gpt2
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from fast import decode as subject
from fast.decode import Decoding, decode, grouped_attention, rows_that_fit, supported

FAMILIES = {"qwen2": {}, "llama": {}, "qwen3": dict(head_dim=16), "mistral": dict(sliding_window=None)}
PAD = 39


def make(family="qwen2", spread=0.5, **options):
    """A small model with weights far from zero: its choices hang on every position and every mask."""
    shape = dict(vocab_size=40, max_position_embeddings=128, initializer_range=spread)
    shape |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | SMALL | dict(intermediate_size=48)
    config = AutoConfig.for_model(family, **{**shape, **FAMILIES[family], **options})
    return AutoModelForCausalLM.from_config(config).eval()


def prompts(lengths, extra=0, seed=1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of these lengths, padded left with random tokens, `extra` columns more than needed."""
    lengths = torch.tensor(lengths)
    width = int(lengths.max()) + extra
    ids = torch.randint(0, 40, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    return ids, torch.arange(width) >= width - lengths[:, None]


def generated(model, ids, mask, max_tokens, stops) -> torch.Tensor:
    """Greedy tokens of `generate`, filled up to (B, max_tokens) with PAD."""
    ends = dict(max_new_tokens=max_tokens, eos_token_id=stops or None, pad_token_id=PAD)
    config = GenerationConfig(do_sample=False, num_beams=1, **ends)
    out = model.generate(ids, attention_mask=mask.long(), generation_config=config)[:, ids.shape[1] :]
    return torch.nn.functional.pad(out, (0, max_tokens - out.shape[1]), value=PAD)


def greedy(model, ids, mask, max_tokens, stops) -> torch.Tensor:
    """Greedy tokens of `decode`, filled up alike."""
    out = decode(model, ids, mask, max_tokens=max_tokens, temperature=0.0, stops=stops, pad=PAD)
    return torch.nn.functional.pad(out, (0, max_tokens - out.shape[1]), value=PAD)


@pytest.fixture
def small(monkeypatch):
    """Borders that a short response crosses: buckets of 8 columns, a look every 4 steps, prefill of 20 tokens."""
    for name, value in (("BUCKET", 8), ("CHECK", 4), ("PREFILL", 20)):
        monkeypatch.setattr(subject, name, value)


@pytest.fixture
def seen():
    """Shapes (rows, queries, columns) of all attention masks, and whether each query saw a column at all."""

    def watch(model):
        def note(module, args, kwargs):
            mask = kwargs["attention_mask"]
            shapes.append((mask.shape[0], mask.shape[2], mask.shape[3]))
            assert mask.any(-1).all(), "a query that sees nothing is 0 / 0"

        shapes = []
        handles.append(model.base_model.register_forward_pre_hook(note, with_kwargs=True))
        return shapes

    handles = []
    yield watch
    for handle in handles:
        handle.remove()


@pytest.fixture
def poisoned():
    """Memory that nobody wrote holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_generate_s(family, small, seen):
    """Token by token, for prompts of 1 to 11 tokens, over five borders of a bucket, with two stop ids."""
    model = make(family)
    ids, mask = prompts([11, 1, 4, 7, 11, 2], extra=3)
    free = generated(model, ids, mask, 40, [])
    assert torch.equal(greedy(model, ids, mask, 40, []), free)
    stops = [int(free[0, 20]), int(free[2, 9])]
    expected = generated(model, ids, mask, 40, stops)
    assert not torch.equal(expected, free)
    shapes = seen(model)
    assert torch.equal(greedy(model, ids, mask, 40, stops), expected)
    chunks = [shape for shape in shapes if shape[1] > 1]
    assert sum(rows for rows, _, _ in chunks) == 6 and {shape[1:] for shape in chunks} == {(11, 11)}
    assert max(rows * columns for rows, columns, _ in chunks) <= 20


def test_a_step_reads_the_cache_up_to_its_bucket(small, seen):
    """Step t has 11 + t columns written; it reads a multiple of 8, less than 8 too many."""
    model = make()
    shapes = seen(model)
    greedy(model, *prompts([11]), 40, [])
    steps = [columns for _, queries, columns in shapes if queries == 1]
    written = range(12, 11 + 40)
    assert len(steps) == len(written)
    assert all(0 <= read - used < 8 for used, read in zip(written, steps, strict=True))
    assert set(steps[:-8]) <= set(range(0, 100, 8))


def uneven(model, rows=16, max_tokens=40):
    """Prompts, two stops and the responses of `generate`: of the pairs of ids, the one with most distinct lengths."""
    ids, mask = prompts([3 + i % 5 for i in range(rows)])
    free = generated(model, ids, mask, max_tokens, [])  # (rows, max_tokens)
    first = [(free == token).int().cumsum(1).eq(0).sum(1) for token in range(PAD)]  # (rows,) each, where it is said
    pairs = itertools.combinations(range(PAD), 2)
    stops = max(pairs, key=lambda pair: len(torch.minimum(first[pair[0]], first[pair[1]]).unique()))
    return ids, mask, list(stops), generated(model, ids, mask, max_tokens, list(stops))


def test_rows_that_go_on_say_what_they_would_alone(small, poisoned, seen):
    """Sixteen rows, most of which end early: the cache shrinks at least twice, and no survivor notices."""
    model = make()
    ids, mask, stops, expected = uneven(model)
    shapes = seen(model)
    ours = greedy(model, ids, mask, 40, stops)
    sizes = [rows for rows, queries, _ in shapes if queries == 1]
    assert torch.equal(ours, expected)
    assert len(set(sizes)) >= 3 and sizes == sorted(sizes, reverse=True)
    assert all(before == after or after <= before // 2 for before, after in itertools.pairwise(sizes))
    survivors = (expected != PAD).sum(1).argsort(descending=True)[:2]
    for row in survivors.tolist():
        assert torch.equal(greedy(model, ids[row, None], mask[row, None], 40, stops)[0], ours[row])


def test_decoding_ends_soon_after_the_last_row(small, seen):
    """With every token a stop, each response has length 1 and no more steps run than up to the next look."""
    model = make()
    shapes = seen(model)
    out = decode(model, *prompts([3, 5]), max_tokens=40, temperature=1.0, stops=list(range(40)), pad=PAD)
    assert out.shape == (2, 1) and len([s for s in shapes if s[1] == 1]) < 4


@pytest.mark.parametrize("pad", [PAD, 0])
def test_stops_are_kept_and_pads_follow(small, pad):
    """Sampled rows: everything up to the first stop is real, everything after is `pad`; as wide as the longest."""
    out = decode(make(), *prompts([4] * 60), max_tokens=24, temperature=3.0, stops=[0, 7], pad=pad)
    is_stop = (out == 0) | (out == 7)
    ends = set()
    longest = 0
    for row, stop in zip(out.tolist(), is_stop, strict=True):
        length = int(stop.nonzero()[0]) + 1 if stop.any() else 24
        assert all(token == pad for token in row[length:])
        ends.add(row[length - 1] if stop.any() else None)
        longest = max(longest, length)
    assert ends == {0, 7, None} and out.shape == (60, longest) and longest == 24 and out.dtype == torch.long
    only = decode(make(), *prompts([4] * 3), max_tokens=1, temperature=1.0, stops=[], pad=pad)
    assert only.shape == (3, 1)


def chi_square(counts, expected) -> None:
    """Cells that expect at least 5, the rest as one: within five deviations of the mean."""
    large = expected >= 5
    counts, expected = (torch.cat([x[large], x[~large].sum()[None]]) for x in (counts.double(), expected))
    cells = expected > 0
    degrees = int(cells.sum()) - 1
    value = ((counts - expected)[cells] ** 2 / expected[cells]).sum().item()
    assert degrees > 8 and value < degrees + 5 * math.sqrt(2 * degrees), (value, degrees)


def test_tokens_are_drawn_from_the_softmax():
    """First token, second token, and the two together, against exact products at temperature 0.7."""
    model, draws, count = make(spread=0.12, vocab_size=16), 20_000, 16
    ids, mask = prompts([3, 2])
    ids = ids % count
    many = ids[1].repeat(draws, 1), mask[1].repeat(draws, 1)
    out = decode(model, *many, max_tokens=2, temperature=0.7, stops=[], pad=0)
    prompt = ids[1, 1:]
    pairs = torch.cat([prompt.repeat(count, 1), torch.arange(count)[:, None]], 1)  # (16, 3) all
    with torch.no_grad():
        log_probs = (model(pairs).logits[:, -2:] / 0.7).log_softmax(-1).double()  # (16, 2, 16)
    first, second = log_probs[0, 0].exp(), log_probs[:, 1].exp()
    joint = first[:, None] * second  # (16, 16)
    assert first.max() > 2 * first.min() and (second[0] - second[1]).abs().max() > 0.02
    chi_square(out[:, 0].bincount(minlength=count), draws * first)
    chi_square(out[:, 1].bincount(minlength=count), draws * joint.sum(0))
    chi_square((out[:, 0] * count + out[:, 1]).bincount(minlength=count**2), draws * joint.flatten())


@pytest.mark.parametrize("queries", [1, 6])
def test_grouped_attention_is_attention(queries):
    """Against heads repeated by hand and a plain softmax, to 1e-5; masks differ between rows."""
    module = types.SimpleNamespace(num_key_value_groups=3, is_causal=True)
    query, key, value = torch.randn(2, 6, queries, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.rand(2, 1, queries, 9) > 0.4
    mask[..., 0] = True
    ours, _ = grouped_attention(module, query, key, value, mask, scaling=0.3, dropout=0.0)
    keys, values = (x.repeat_interleave(3, 1) for x in (key, value))
    weights = (0.3 * query @ keys.mT).masked_fill(~mask, -math.inf).softmax(-1)
    torch.testing.assert_close(ours, (weights @ values).transpose(1, 2), atol=1e-5, rtol=0)


def test_a_model_set_to_grouped_gives_the_same_logits():
    """With the library's own masks and cache: a padded prompt, then one token."""
    model = make("llama")
    ids, mask = prompts([6, 3])
    outputs = []
    for name in ("sdpa", "grouped"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            whole = model(ids[:, :-1], attention_mask=mask[:, :-1].long())
            last = model(ids[:, -1:], attention_mask=mask.long(), past_key_values=whole.past_key_values)
        outputs.append(torch.cat([whole.logits, last.logits], 1)[mask])
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


YARN = dict(rope_type="yarn", factor=2.0, rope_theta=10_000.0, original_max_position_embeddings=64)
DYNAMIC = dict(rope_type="dynamic", factor=2.0, rope_theta=10_000.0)


@pytest.mark.parametrize(
    "yes, family, options",
    [
        *[(True, family, {}) for family in FAMILIES],
        (True, "qwen2", dict(sliding_window=8, use_sliding_window=False)),
        (True, "llama", dict(rope_parameters=YARN)),
        (False, "llama", dict(rope_parameters=DYNAMIC)),
        (False, "qwen2", dict(num_key_value_heads=4)),
        (False, "qwen2", dict(layer_types=["full_attention", "chunked_attention"])),
        (False, "mistral", dict(sliding_window=8)),
        (False, "qwen2", dict(sliding_window=8, use_sliding_window=True, max_window_layers=1)),
        (False, "qwen3", dict(sliding_window=8, use_sliding_window=True, max_window_layers=1)),
    ],
)
def test_supported_models(yes, family, options):
    """Grouped heads and full attention only; anything else raises instead of giving other tokens."""
    model = make(family, **options)
    assert supported(model) == yes
    assert not supported(model.base_model) and not supported(model.train())
    if not yes:
        with pytest.raises(ValueError, match="generate"):
            greedy(model.eval(), *prompts([3]), 4, [])


def test_gpt2_is_not_supported():
    assert not supported(small_gpt2())


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_the_model_s_own_attention_comes_back(name):
    """After a call, and after an exception in the middle of one; during the call it is the grouped one."""
    model = make()
    model.set_attn_implementation(name)
    during = []
    hook = model.lm_head.register_forward_hook(lambda *_: during.append(model.config._attn_implementation))
    greedy(model, *prompts([3]), 4, [])
    assert set(during) == {"grouped"} and model.config._attn_implementation == name
    hook.remove()
    hook = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        greedy(model, *prompts([3]), 4, [])
    assert model.config._attn_implementation == name


def test_rows_that_fit_by_hand():
    """2 (keys, values) * 2 layers * 2 heads * 8 wide * 4 bytes = 256 bytes a token; 40 logits are 640 bytes more."""
    model = make()
    row = 104 * 256 + 640  # 100 columns are 104 after rounding up to 8
    assert rows_that_fit(model, 100, int(7.01 * row / 0.8)) == 7
    assert rows_that_fit(model, 100, int(6.99 * row / 0.8)) == 6
    assert rows_that_fit(model, 100, 0) == 1
    assert rows_that_fit(model.bfloat16(), 100, int(7.01 * (104 * 128 + 640) / 0.8)) == 7
    assert rows_that_fit(make("qwen3"), 100, int(7.01 * (104 * 512 + 640) / 0.8)) == 7  # its heads are 16 wide
    # transformers' own loop: 2 * 4 heads * 8 wide a column beside, or 6 * 32 + 3 * 48 numbers a token of the prompt
    assert rows_that_fit(model.float(), 100, int(7.01 * (row + 4 * 100 * 64) / 0.8), prompt=10) == 7
    assert rows_that_fit(model, 100, int(7.01 * (row + 4 * 90 * 336) / 0.8), prompt=90) == 7
    cache = Decoding(make("qwen3"), *prompts([60]), 40, 0.0, [], PAD).cache
    assert sum(buffer.nbytes for buffers in cache.layers for buffer in buffers) == 104 * 512
