"""A decoding step without Python: the hook `generate` of `grpo.rollout`, by CUDA graphs.

    rollout(..., generate=graph_generate)        --use lab.fast:decode=yes
    sample(model, prompt_ids, prompt_mask, ...)  the loop itself, also on a CPU

transformers' loop starts some thousand kernels per token from Python, which takes longer than the
GPU needs to run them (docs/hardware.md). A CUDA graph records the kernels of one step once and
starts them all at a time. A replay runs the same kernels on the same addresses, so everything that
differs between two steps is in a tensor that the step itself changes in place:

  - Keys and values lie in a `StaticCache`, whose rows have all `length` columns from the start. A
    tensor says which column is written next, and a mask hides the columns that are not used yet.
  - Sampling is part of the step: the newest tokens are its input and its output.
  - Which rows have ended is a tensor, too. Python reads it every EVERY steps.

A step reads all columns of its cache and all rows of its batch. So the caches grow by LENGTH
columns at a time, and the batch is halved when at most half of its rows are live. Each pair of a
length and a number of rows has caches and a graph of its own. Its first step runs from Python, its
second is captured. The length only grows and the batch only shrinks, so what an earlier pair had is
freed. Nothing outlives a call: a graph that was kept would hold its caches during training, and a
new one costs one more pass through Python.

One new token per row attends to the cache by `grouped_attention`. The prompts are read before that,
each distinct one once, by the model's own attention.

Traps:
  - Nothing in a step may wait for the GPU, or read a number back: no `multinomial`, whose check
    does, no `nonzero`, no `isin` with many ids. A number of Python is frozen as it was.
  - Masked columns must hold finite numbers: 0 x NaN is NaN. So caches begin as zeros.
  - The step before the capture must run on the capture's stream, where libraries allocate what they
    keep; otherwise that memory would belong to the graph.
  - Another thread, such as NCCL's watchdog, may ask the GPU something while a step is captured. The
    mode "thread_local" allows it.
  - torch moves the seed of its random numbers between replays. Other generators would have to be
    registered with the graph.

Left out: families other than `packing.FAMILIES`, and models that do not pass `attends_fully`, which
take `fast_generate`; refilling the batch with other prompts; a compiled step.

The captured path has not run on a GPU so far, so it is an option that is off by default.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm
from transformers import AttentionInterface, Cache, PreTrainedConfig, PreTrainedModel, StaticCache

from lab.fast.generate import distinct, fast_generate, read
from lab.fast.packing import attends_fully

EVERY = 16  # steps from one look at which rows have ended to the next
LENGTH = 512  # columns by which caches grow
SMALLEST = 8  # rows: no smaller batch would be faster, as a step reads all weights
ALIGNED = 16  # columns: attention pads a mask of any other length in every layer


class Sampled(NamedTuple):
    """Responses, padded after a stop token."""

    ids: Tensor  # (b, T) int64
    log_probs: Tensor | None  # (b, T) float32 of each token, 0 in the padding; None: not asked for


def graph_generate(
    model: PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor, **options: Any
) -> Tensor:
    """Sample as `grpo.hf_generate` does, whose `options` these are: (b, P) -> (b, T) ids.

    On a CPU, and for families that are not known, it is `fast_generate`; a line says so.
    """
    kind = model.config.model_type
    is_known = attends_fully(model.config)
    if is_known and prompt_ids.is_cuda:
        say_once(f"sampling from {kind}: captured steps, lab/fast/decode.py")
        return sample(model, prompt_ids, prompt_mask, **options).ids
    reason = "steps are captured on CUDA alone" if is_known else "it is no family of decode.py"
    say_once(f"sampling from {kind}: lab/fast/generate.py, as {reason}")
    return fast_generate(model, prompt_ids, prompt_mask, **options)


@cache
def say_once(line: str) -> None:
    """Print an indented line, once, on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        tqdm.write(f"  {line}")


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    max_tokens: int,
    temperature: float,
    stops: list[int],
    pad: int,
    log_probs: bool = False,
) -> Sampled:
    """Sample a response to each prompt (b, P), padded on the left.

    Temperature 0 is greedy decoding. Raises RuntimeError if a logit is NaN or a row's largest is
    not finite. The model must pass `attends_fully`.
    """
    decoding = Decoding(
        model,
        prompt_ids,
        prompt_mask,
        max_tokens=max_tokens,
        temperature=temperature,
        stops=stops,
        pad=pad,
    )
    if log_probs:
        decoding.log_probs = torch.zeros(decoding.ids.shape, device=prompt_ids.device)
    in_turn = captured if prompt_ids.is_cuda else plain
    with attention(model, "grouped"):
        live = len(prompt_ids)
        steps = in_turn(decoding.draw)
        while live and decoding.used < decoding.limit:
            if decoding.make_fit(live):
                steps = in_turn(decoding.draw)  # frees the graph of the pair before
            for _ in range(decoding.steps_ahead()):
                next(steps)
                decoding.used += 1
            if not decoding.finite:  # as `torch.multinomial` and `grpo.refuse_unknown` say it
                raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
            live = int((~decoding.ended).sum())
    return decoding.result()


class Decoding:
    """Responses to prompts (B, P) in the making, of which b rows are still computed.

    `draw` changes the tensors in place, `make_fit` replaces those of b rows. The cache has a column
    per token of the prompts, padding included, and of the responses. A prompt's last token is not
    in it yet: the first step reads that token, as each step reads the one that was drawn before.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        *,
        max_tokens: int,
        temperature: float,
        stops: list[int],
        pad: int,
    ) -> None:
        count, width = prompt_ids.shape
        device = prompt_ids.device
        self.model = model
        self.temperature = temperature
        self.pad = pad
        self.start = width - 1  # columns of the cache before the first step's
        self.used = self.start  # columns that are written
        self.limit = self.start + max_tokens  # columns that will be written at most
        self.is_stop = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=device)  # (V,)
        self.is_stop[[stop for stop in stops if stop < len(self.is_stop)]] = True
        self.ids = torch.full((count, max_tokens), pad, device=device)  # (B, T)
        self.log_probs: Tensor | None = None  # (B, T) if asked for
        self.finite = torch.tensor(True, device=device)  # all largest logits so far
        self.drawn = torch.zeros(1, dtype=torch.int64, device=device)  # tokens per response so far
        # of the rows that are computed
        self.row = torch.arange(count, device=device)  # (b,) which of the B
        self.first = width - prompt_mask.sum(1)  # (b,) the column of its first token
        self.newest = prompt_ids[:, -1:].clone()  # (b, 1) the token that the next step reads
        self.ended = torch.zeros(count, dtype=torch.bool, device=device)  # (b,)
        prompts, prompt_of_row = distinct(prompt_ids, prompt_mask)
        cache = read(model, prompts) if width > 1 else None
        self.set_cache(cache, prompt_of_row)

    @property
    def length(self) -> int:
        """The columns of the cache, written or not."""
        return len(self.columns)

    def fitting_length(self) -> int:
        """The fewest columns, of the lengths that caches have, with room for another token."""
        longest = ALIGNED * math.ceil(self.limit / ALIGNED)
        return min(LENGTH * (self.used // LENGTH + 1), longest)

    def set_cache(self, cache: Cache | None, rows: Tensor) -> None:
        """Copy rows (b,) of a cache, which is freed, to a static one that has room."""
        length = self.fitting_length()
        self.columns = torch.arange(length, device=rows.device)  # (L,)
        self.cache = copy_to_static(self.model.config, cache, rows, self.used, length)

    def steps_ahead(self) -> int:
        """The steps until rows may have to leave, caches to grow, or responses to end."""
        return min(EVERY, self.length - self.used, self.limit - self.used)

    def make_fit(self, live: int) -> bool:
        """Halve the batch while its live rows allow it, and give caches room for another token.

        Returns whether anything was replaced. Rows that have ended fill what live ones leave empty.
        """
        size = len(self.row)
        while size >= 2 * SMALLEST and live <= size // 2:
            size //= 2
        if size == len(self.row) and self.used < self.length:
            return False
        rows = self.ended.int().argsort(stable=True)[:size]  # (b,) live ones first
        self.row = self.row[rows]
        self.first = self.first[rows]
        self.newest = self.newest[rows]
        self.ended = self.ended[rows]
        self.set_cache(self.cache, rows)
        return True

    def draw(self) -> None:
        """One decoding step: read each row's newest token, draw the next one.

        On CUDA this is what a graph holds.
        """
        column = self.start + self.drawn  # (1,)
        seen = (self.columns >= self.first[:, None]) & (self.columns <= column)  # (b, L)
        hidden = torch.zeros_like(seen, dtype=self.model.dtype).masked_fill_(~seen, -math.inf)
        logits = self.model(
            self.newest,
            attention_mask=hidden[:, None, None],  # (b, 1, 1, L), four dimensions: taken as it is
            position_ids=(column - self.first)[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]  # (b, V)
        scores = logits.float()
        if self.temperature:
            scores = scores / self.temperature
        self.finite.logical_and_(scores.amax(1).isfinite().all())
        tokens = choose(scores, greedy=not self.temperature)  # (b,)
        places = self.row, self.drawn.expand_as(self.row)  # in (B, T)
        if self.log_probs is not None:
            chosen = scores.gather(1, tokens[:, None]).squeeze(1)  # (b,)
            self.log_probs[places] = chosen - scores.logsumexp(1)
        tokens = tokens.masked_fill(self.ended, self.pad)
        self.ids[places] = tokens
        self.newest.copy_(tokens[:, None])
        self.ended.logical_or_(self.is_stop[tokens])
        self.drawn.add_(1)

    def result(self) -> Sampled:
        """The responses, as many columns as the longest has."""
        is_stop = self.is_stop[self.ids].long()  # (B, T)
        inside = is_stop.cumsum(1) - is_stop == 0  # (B, T) up to and including the stop token
        longest = int(inside.sum(1).max())
        log_probs = self.log_probs
        if log_probs is not None:
            log_probs = log_probs.masked_fill(~inside, 0.0)[:, :longest]
        return Sampled(self.ids[:, :longest], log_probs)


def choose(scores: Tensor, *, greedy: bool) -> Tensor:
    """The largest of each row (b, V), or a token drawn from its softmax: (b,).

    The draw is that of `torch.multinomial`, without its check: the token of the largest score minus
    the logarithm of exponential noise.
    """
    if greedy:
        return scores.argmax(1)
    noise = torch.empty_like(scores).exponential_().log_()  # (b, V)
    return (scores - noise).argmax(1)


def copy_to_static(
    config: PreTrainedConfig, cache: Cache | None, rows: Tensor, used: int, length: int
) -> StaticCache:
    """Rows (b,) of a cache, with room for `length` columns, of which the first `used` are copied.

    The old cache is freed layer by layer, so that both never exist at the same time.
    """
    static = StaticCache(config, max_cache_len=length)
    if cache is None:
        return static
    layers: Any = zip(static.layers, cache.layers, strict=True)  # all hold keys and values
    for layer, old in layers:
        keys = old.keys[:, :, :used].index_select(0, rows)  # (b, kv, used, w)
        values = old.values[:, :, :used].index_select(0, rows)
        old.keys = old.values = None
        layer.update(keys, values)
    return static


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of one new token per row to a cache, in the library's signature.

    query (b, H, 1, w), key and value (b, kv, L, w), attention_mask (b, 1, 1, L) -> (b, 1, H, w),
    None. The H / kv query heads that share a key-value head become as many positions of one head,
    so the cache is read once and is not copied for each query head. transformers 5.17 copied it,
    5.23 groups the heads, too.
    """
    groups = query.squeeze(2).unflatten(1, (key.shape[1], -1))  # (b, kv, H / kv, w)
    attended = scaled_dot_product_attention(groups, key, value, attention_mask, scale=scaling)
    return attended.flatten(1, 2)[:, None], None


AttentionInterface.register("grouped", grouped_attention)


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:  # the model is typed for another checker
    """Let the model attend by the function of this name; afterwards by its own, as before."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def plain(step: Callable[[], None]) -> Iterator[None]:
    """Each `next` takes a step."""
    while True:
        step()
        yield


def captured(step: Callable[[], None]) -> Iterator[None]:
    """Each `next` takes a step on CUDA: the first runs as it is, the others are replays."""
    stream = capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    yield
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()  # recorded, not run
    while True:
        graph.replay()
        yield


@cache
def capture_stream() -> torch.cuda.Stream:
    """The stream on which steps are captured: one, as libraries keep memory for each."""
    return torch.cuda.Stream()
