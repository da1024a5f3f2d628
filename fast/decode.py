"""Sampling tokens fast: a decode loop over a static cache, captured as CUDA graphs.

    decode         left-padded prompts -> sampled ids (B, T), as `generate` gives them but faster
    supported      is this a model that `decode` can run? If not, `generate` can
    rows_that_fit  how many rows of a given width the free memory holds

A decode step moves little data and launches many kernels: its ceiling is the memory's bandwidth, weights plus
cache once a token. What keeps a plain loop an order of magnitude below it, and what is done about it here:
  - Attention with grouped heads usually copies each key-value head once for every query head that shares it.
    Here the query heads of a group become the rows of one small query, and the cache is read as it lies.
  - Hundreds of launches a step. On CUDA a step is captured once as a graph and replayed; for that it reads and
    writes the same tensors every time, and nothing of its state lives in Python. On a CPU the same step runs as is.
  - Columns not yet written are not read: a step sees the cache up to a multiple of BUCKET, one graph for each.
  - Rows that are done cost as much as the others: when half are, the rest move together.

What makes it right: a token is drawn from softmax(logits / temperature) and nothing else; attention masks and
position ids are made here from where each prompt starts, so the library's cache and mask classes have no say.

Left out: sharing the prefill of equal prompts, new rows in the place of finished ones, several devices.
"""

import functools
import gc
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # those the tests compare with `generate`
BUCKET = 512  # columns; smaller reads less of the cache and captures more graphs
CHECK = 16  # steps between two looks at which rows are done; each look waits for the device
PREFILL = 16_384  # tokens of prompts in one forward
ALIGN = 8  # columns; attention kernels on CUDA copy a mask whose rows are not aligned
CAPTURE_ON = ("cuda",)  # device types
SHARE = 0.8  # of the free memory for cache and logits; the rest is for activations


def grouped_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options):
    """Attention in the library's signature: query (B, H, q, d), key and value (B, kv, L, d) -> (B, q, H, d), None.

    For one new token the H query heads become kv groups of H / kv rows; heads that share a key-value head are
    adjacent, so this is a view. Prompts are long enough to pay for the copies of the usual way.
    """
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows, heads, _, width = query.shape
    groups = query.reshape(rows, key.shape[1], -1, width)  # (B, kv, H / kv, d)
    if attention_mask is not None:  # (B, 1, 1, L): a row for each query head, as kernels expect, not one for all
        attention_mask = attention_mask.expand(-1, -1, groups.shape[2], -1)  # (B, 1, H / kv, L)
    output = scaled_dot_product_attention(
        groups, key, value, attn_mask=attention_mask, dropout_p=options.get("dropout", 0.0), scale=options["scaling"]
    )  # (B, kv, H / kv, d)
    return output.reshape(rows, 1, heads, width), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)  # or a model set to "grouped" would get no mask at all


def supported(model) -> bool:
    """Grouped heads, full attention in every layer, a separate head, nothing in a step that depends on its values."""
    return (
        attends_fully(model.config)
        and not model.training  # gradient checkpointing would drop the cache without an error
        and model.config.num_key_value_heads < model.config.num_attention_heads
        and model.base_model is not model
        and model.get_output_embeddings() is not None
    )


def attends_fully(config) -> bool:
    """One of FAMILIES, every token of which sees all before it, in every layer."""
    return (
        config.model_type in FAMILIES
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and getattr(config, "sliding_window", None) is None
        and config.rope_parameters["rope_type"] not in ("dynamic", "longrope")  # these look at the longest row
    )


def rows_that_fit(model, width: int, free_bytes: int, prompt: int = 0) -> int:
    """How many rows of `width` tokens (prompt + response) to decode at once; at least 1.

    `prompt` of these, for transformers' own loop, are prefilled by all rows together; 0 for `decode`.
    """
    itemsize = model.dtype.itemsize
    row = row_bytes(model.config, width, itemsize)
    if prompt:
        row += passing_bytes(model.config, prompt, width, itemsize)
    return max(1, int(SHARE * free_bytes) // row)


def passing_bytes(config, prompt: int, width: int, itemsize: int) -> int:
    """What one row holds in a layer of transformers' own loop, beside its cache.

    The larger of the prompt's activations, and of keys and values copied once for every query head.
    """
    text = config.get_text_config()
    copies = 2 * width * text.num_attention_heads * _head_width(text)
    return itemsize * max(prompt * layer_numbers(text), copies)


def layer_numbers(config) -> int:
    """Numbers a token that a layer holds at once where nothing is saved for a backward pass; counted on Qwen2."""
    return 6 * config.hidden_size + 3 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)


def row_bytes(config, width: int, itemsize: int) -> int:
    """Memory of one row of `width` tokens: its cache, and four float32 copies of a token's logits at once."""
    text = config.get_text_config()
    return _round_up(width, ALIGN) * token_bytes(text, itemsize) + 4 * 4 * text.vocab_size


def token_bytes(config, itemsize: int) -> int:
    """Memory of one token's keys and values in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * _head_width(config) * itemsize


@torch.no_grad()  # not inference_mode: autograd would refuse the ids later on
def decode(
    model,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    max_tokens: int,
    temperature: float,
    stops: list[int],
    pad: int,
) -> Tensor:
    """Sample one response to each prompt; temperature 0 is greedy decoding.

    prompt_ids (B, P) int64 and prompt_mask (B, P) bool, padded on the left, at least one token each. Returns ids
    (B, T) int64, T <= max_tokens: everything up to and including the first of `stops`, then `pad`. Rows of
    similar prompt length belong in one call, as all are as wide as the longest. The model is on one device.
    Raises ValueError for a model that is not `supported`.
    """
    if not supported(model):
        raise ValueError(f"decode cannot run this {model.config.model_type} model, use generate")
    longest = int(prompt_mask.sum(1).max())
    prompt_ids, prompt_mask = prompt_ids[:, -longest:], prompt_mask[:, -longest:]  # (B, P), (B, P)
    with _attention(model, "grouped"):
        batch = Decoding(model, prompt_ids, prompt_mask, max_tokens, temperature, stops, pad)
        advance = Replay(batch) if prompt_ids.device.type in CAPTURE_ON else batch.step
        for count in range(1, max_tokens):  # the prefill gave the first token
            if count % CHECK == 0 and not batch.drop_done():
                break
            advance(min(_round_up(longest + count, BUCKET), batch.cache.width))
    is_stop = torch.isin(batch.out, batch.stops)  # (B, max_tokens)
    lengths = torch.where(is_stop.any(1), is_stop.int().argmax(1) + 1, max_tokens)  # (B,) arg max is the first stop
    return batch.out[:, : int(lengths.max())]


class Cache:
    """Keys and values of all layers, each (b, kv, width, d); a model only ever calls `update`."""

    def __init__(self, model, rows: int, width: int, slot: Tensor):
        config = model.config
        shape = (rows, config.num_key_value_heads, width, _head_width(config))
        # Zeros, not empty: a masked column has weight 0, but 0 times a NaN that lay in memory is NaN.
        self.layers = [
            [torch.zeros(shape, dtype=model.dtype, device=slot.device) for _ in range(2)]
            for _ in range(config.num_hidden_layers)
        ]
        self.width = width
        self.slot = slot  # (1,) int64, the column of the next token: on the device, so a graph can move it
        self.length = 0  # columns that the next step reads
        self.prompts: slice | None = None  # the rows a prefill writes; None for a step of one token

    def update(self, key: Tensor, value: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Store keys and values (b, kv, q, d) and return what the queries may attend to."""
        if self.prompts is not None:
            for buffer, new in zip(self.layers[layer], (key, value), strict=True):
                buffer[self.prompts, :, : new.shape[2]] = new
            return key, value
        for buffer, new in zip(self.layers[layer], (key, value), strict=True):
            buffer.index_copy_(2, self.slot, new)
        key, value = (buffer[:, :, : self.length] for buffer in self.layers[layer])  # views
        return key, value

    def keep(self, rows: Tensor) -> None:
        """Only these rows (k,) from now on, one buffer at a time: there is no room for two caches."""
        for buffers in self.layers:
            for i in range(2):
                buffers[i] = buffers[i][rows]


class Decoding:
    """The rows being sampled: a prefill when made, then `step` after `step`, each one token a row.

    `step` only writes into tensors that exist (a graph knows addresses, not names) and never waits for the
    device. `drop_done` does both, between steps.
    """

    def __init__(self, model, prompt_ids: Tensor, prompt_mask: Tensor, max_tokens, temperature, stops, pad):
        self.model, self.temperature, self.pad = model, temperature, pad
        device, (rows, self.prompt) = prompt_ids.device, prompt_ids.shape
        width = _round_up(self.prompt + max_tokens, ALIGN)
        self.stops = torch.tensor(stops, dtype=torch.long, device=device)  # (stops,)
        self.out = torch.full((rows, max_tokens), pad, dtype=torch.long, device=device)  # (B, max_tokens)
        self.columns = torch.arange(width, device=device)  # (width,)
        self.slot = torch.full((1,), self.prompt - 1, device=device)  # (1,) the column last fed, soon to be fed
        # The live rows, b of B: which they are, where their prompts start, what they said last, whether they are done.
        self.rows = torch.arange(rows, device=device)  # (b,)
        self.starts = self.prompt - prompt_mask.sum(1)  # (b,)
        self.token = torch.zeros_like(self.rows)  # (b,)
        self.done = torch.zeros_like(self.rows, dtype=torch.bool)  # (b,)
        self.cache = Cache(model, rows, width, self.slot)
        self._emit(self._prefill(prompt_ids))

    def _prefill(self, prompt_ids: Tensor) -> Tensor:
        """Prompts (B, P) into the cache, some rows at a time; returns the states (B, hidden) at their last tokens."""
        columns = self.columns[: self.prompt]  # (P,)
        causal, itself = columns[:, None] >= columns, columns[:, None] == columns  # (P, P), (P, P)
        states = []
        n = max(1, PREFILL // self.prompt)
        for first in range(0, len(prompt_ids), n):
            self.cache.prompts = slice(first, first + n)
            places = columns - self.starts[self.cache.prompts, None]  # (n, P) negative on padding
            # Padding sees itself: attention to nothing at all is 0 / 0 in some kernels, and NaN spreads by the cache.
            mask = causal & (places >= 0)[:, None] | itself  # (n, P, P)
            states.append(self._states(prompt_ids[self.cache.prompts], mask, places.clamp_min(0)))
        self.cache.prompts = None
        return torch.cat(states)

    def step(self, length: int) -> None:
        """Feed every row's last token and sample its next; the cache is read up to column `length`."""
        self.cache.length = length
        columns = self.columns[:length]  # (L,)
        mask = (columns >= self.starts[:, None]) & (columns <= self.slot)  # (b, L)
        places = self.slot - self.starts  # (b,)
        self._emit(self._states(self.token[:, None], mask[:, None], places[:, None]))

    def _states(self, ids: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        """ids (b, q), mask (b, q, L) bool, places (b, q) -> the last state of each row (b, hidden)."""
        # A mask of four dimensions is taken as it is, and given places nobody asks the cache for its length.
        return self.model.base_model(
            input_ids=ids,
            attention_mask=mask[:, None],  # (b, 1, q, L)
            position_ids=places,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state[:, -1]

    def _emit(self, states: Tensor) -> None:
        """Sample from the states (b, hidden), write the tokens down, move on by one column."""
        logits = self.model.get_output_embeddings()(states).float()  # (b, V)
        token = choose(logits, self.temperature).masked_fill(self.done, self.pad)  # (b,)
        column = (self.slot - (self.prompt - 1)).expand_as(self.rows)  # (b,) of the output
        self.out.index_put_((self.rows, column), token)
        self.done |= (token[:, None] == self.stops).any(1)  # isin may sort, and to sort it waits for the device
        self.token.copy_(token)
        self.slot += 1

    def drop_done(self) -> bool:
        """Forget the rows that are done if they are at least half; False if all are. Waits for the device."""
        alive = (~self.done).nonzero().squeeze(1)  # (k,)
        if 0 < len(alive) <= len(self.done) // 2:
            self.cache.keep(alive)
            self.rows, self.starts, self.token = self.rows[alive], self.starts[alive], self.token[alive]
            self.done = self.done[alive]
        return len(alive) > 0


def choose(logits: Tensor, temperature: float) -> Tensor:
    """One token a row from softmax(logits / temperature): logits (b, V) float32 -> (b,).

    arg max p_i / E_i with independent E_i ~ Exp(1) is a draw from p: the E_i / p_i are waiting times of rates p_i,
    and the first to ring is i with probability p_i. Taken in logs it needs no softmax, and p_i never underflows.
    """
    if not temperature:
        return logits.argmax(-1)
    waiting = torch.empty_like(logits).exponential_()  # (b, V) multinomial would check its input, hence wait
    return (logits / temperature).sub_(waiting.log_()).argmax(-1)  # in place: V is large


class Replay:
    """`batch.step` as a CUDA graph, captured anew for every (rows, length).

    The first step of each kind runs eagerly, as the warm-up that a capture needs (libraries load their kernels and
    allocate work space on first use, which a capture forbids). It is a real step, and a capture only records, so
    nothing is ever undone. The default generator's offset moves on with every replay: no noise comes twice.
    """

    def __init__(self, batch: Decoding):
        self.batch, self.kind, self.graph = batch, None, None
        self.device, self.stream = batch.out.device, _side_stream(batch.out.device)

    def __call__(self, length: int) -> None:
        kind = (len(self.batch.rows), length)
        if kind == self.kind:
            return self.graph.replay()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # a capture is never of the default stream
        with torch.cuda.stream(self.stream):
            self.batch.step(length)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # One graph is replayed at a time and none leaves results in its own memory, so all can use one pool. The
        # old graph lives until the new one is captured: a pool that no graph holds is gone. It is never replayed
        # after its rows have moved, as rows only get fewer and lengths only grow.
        pool = self.graph.pool() if self.graph else None
        # Of this thread only: the one in which NCCL looks after its events may go on doing so.
        with (
            _no_collection(),
            torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"),
        ):
            self.batch.step(length)
        self.kind, self.graph = kind, graph


@functools.cache  # one a device: matrix products keep work space for every stream they ever ran on
def _side_stream(device: torch.device) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)


@contextmanager
def _no_collection():
    """No garbage collection: tensors or graphs freed in the middle of a capture may call what it forbids."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _attention(model, name: str):
    """The model's attention by this name, and afterwards by the one it had."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)


def _head_width(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
