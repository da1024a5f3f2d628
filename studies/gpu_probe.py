"""Where does the time go on a GPU? Timings that `studies.bench` does not take, with random weights and states.

    python -m studies.gpu_probe decode  # a step of `fast.decode` in the 7B's shape, by rows, columns and backend
    python -m studies.gpu_probe attention  # the attention of such a step, in several ways
    python -m studies.gpu_probe passes  # training passes over ragged rollouts, padded and packed
    python -m studies.gpu_probe race  # SHEAR's token distances, its race, and the kernel beside it
    python -m studies.gpu_probe step --size 7b ...  # `bench --step` with cuDNN's attention, which training turns off

A case that fails prints FAIL and its reason, and costs the others nothing; the exit status is then 1. `DEVICE=cpu`
rehearses with tiny shapes. `studies/gpu_day.sh` runs all of it.
"""

import sys
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from fast import decode, packing
from fast.distances import token_distances
from fast.kernel import fused_race
from fast.race import race
from grpo import Policy, Rollouts
from shear import EPS, mean_norm, two_sides
from studies import bench
from studies.gpu_checks import CUDA, DEVICE, rollouts_of
from studies.machine import ceilings, seconds_of, timed
from studies.states import synthetic

HALF = dict(device=DEVICE, dtype=torch.bfloat16)
PROMPT = 150 if CUDA else 8  # tokens
# Rows, and columns of the cache that a decoding step reads.
CASES = [(64, 512), (64, 1024), (256, 512), (256, 1280), (512, 1280), (64, 3152), (8, 3152)] if CUDA else [(4, 64)]
PROFILED = 64, 1024
failures = []


def report(name: str, case: Callable[..., str], *args) -> None:
    """Print what a case says, or why it fails."""
    try:
        print(f"{name}: {case(*args)}", flush=True)
    except Exception as error:  # most often memory; the next case may fit
        failures.append(name)
        print(f"FAIL {name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
    if CUDA:
        torch.cuda.empty_cache()


def model_of(layers: int):
    """Some layers of the 7B, or of a tiny model in a rehearsal."""
    config = bench.architecture("7b" if CUDA else "tiny")
    config.num_hidden_layers = layers
    config.layer_types = ["full_attention"] * layers
    with DEVICE:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def probe_decode() -> None:
    """All of CASES, with cuDNN and without."""
    model, copied = model_of(28 if CUDA else 2), ceilings(**HALF)["copy"]
    for rows, columns in CASES:
        for cudnn in (True, False):
            name = f"decode, {rows} rows, {columns} columns, cuDNN {cudnn}"
            report(name, decoding_time, model, rows, columns, cudnn, copied)


@torch.no_grad()
def decoding_time(model, rows: int, columns: int, cudnn: bool, copied: float) -> str:
    """A step of `rows` rows that reads `columns` of the cache; `copied` bytes/s are its ceiling."""
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    ids = torch.randint(1, model.config.vocab_size, (rows, PROMPT), device=DEVICE)
    with decode._attention(model, "grouped"):
        batch = decode.Decoding(model, ids, torch.ones_like(ids).bool(), columns - PROMPT, 1.0, [], 0)
        batch.slot += max(0, columns - PROMPT - 20)  # as if so many tokens were there
        advance = decode.Replay(batch) if CUDA else batch.step
        captured, _ = timed(lambda: advance(columns), DEVICE)
        seconds = seconds_of(lambda: advance(columns), DEVICE)
        if CUDA and (rows, columns) == PROFILED:
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                timed(lambda: advance(columns), DEVICE)
            print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=60))
    moved = 2 * model.num_parameters() + rows * columns * decode.token_bytes(model.config, 2)
    speed = f"{rows / seconds:,.0f} tokens/s, {moved / copied / seconds:.0%} of the copy"
    return f"{1e3 * seconds:.2f} ms, {speed}; first step and capture {captured:.2f} s"


def probe_attention() -> None:
    """All of CASES, in the shape of the 7B: 4 key-value heads, each for 7 query heads, and one new token a row."""
    for rows, columns in CASES:
        boolean = torch.ones(rows, 1, 7, columns, device=DEVICE, dtype=torch.bool)
        added = torch.zeros(rows, 1, 7, columns, **HALF)
        ways = ("boolean mask, cuDNN", boolean), ("boolean mask", boolean), ("added mask", added), ("no mask", None)
        for way, mask in ways:
            torch.backends.cuda.enable_cudnn_sdp("cuDNN" in way)
            report(f"attention, {rows} rows, {columns} columns, {way}", attention_time, rows, columns, mask)


def attention_time(rows: int, columns: int, mask: torch.Tensor | None) -> str:
    """One layer's share of 28 calls in a row, over a cache with 640 columns more than are read."""
    query = torch.randn(rows, 4, 7, 128, **HALF)
    key, value = torch.randn(2, rows, 4, columns + 640, 128, **HALF)[:, :, :, :columns]
    inputs = query, key, value, mask
    seconds = seconds_of(lambda: [scaled_dot_product_attention(*inputs) for _ in range(28)], DEVICE)
    return f"{1e6 * seconds / 28:.0f} us a layer"


def probe_passes() -> None:
    """Forward and backward of 4 layers over 32 rollouts of log-normal lengths."""
    factors = torch.randn(32, generator=torch.Generator().manual_seed(0)).mul(0.7).exp().tolist()
    lengths = [min(3000, 1 + int((600 if CUDA else 8) * factor)) for factor in factors]
    for way in ("padded", "packed"):
        report(f"training passes, {way}", passes_time, way, rollouts_of([PROMPT] * 32, lengths))


def passes_time(way: str, rollouts: Rollouts) -> str:
    """All micro-batches of 16,384 tokens, layers recomputed: the first time, when all shapes are new, and later."""
    model = model_of(4 if CUDA else 2)
    hooks = packing.packing_of(model) if way == "packed" else {}
    policy = Policy(model, True, **hooks)
    micro_batches = policy.pack(range(32), rollouts.lengths, 16_384)

    def passes() -> None:
        for rows in micro_batches:
            policy(rollouts.take(rows), 1.0).sum().backward()

    first, _ = timed(passes, DEVICE)
    seconds, tokens = seconds_of(passes, DEVICE), sum(rollouts.lengths)
    return f"{tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} a second; the first time {first:.2f} s"


def probe_race() -> None:
    """Groups of 8 random walks in the 7B's width."""
    for tokens in (1000, 3000) if CUDA else (150,):
        report(f"race, {tokens} tokens a rollout", race_time, tokens)


def race_time(tokens: int) -> str:
    """Milliseconds of token distances, of `race`, and of `fused_race`, whose distances are those of `race` to 1e-3."""
    states = synthetic(8, tokens, 3584 if CUDA else 32, DEVICE)
    right, wrong = two_sides(*states[1:4], states.window, states.stride)
    costs = token_distances(right.states, wrong.states)
    group = costs, right.spans, wrong.spans, EPS * mean_norm(states.hidden[states.mask])
    times = {"distances": seconds_of(lambda: token_distances(right.states, wrong.states), DEVICE)}
    times["race"] = seconds_of(lambda: race(*group), DEVICE)
    if CUDA:
        times["kernel"] = seconds_of(lambda: fused_race(*group), DEVICE)
        for ours, expected in zip(fused_race(*group), race(*group), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-3, atol=0)
    pairs = len(right.spans.tokens) * len(wrong.spans.tokens)
    return f"{pairs:,} pairs; " + ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in times.items())


def main(name: str, *flags: str) -> int:
    """The exit status: 1 if a case failed, or that of `bench`."""
    if name == "step":
        torch.backends.cuda.enable_cudnn_sdp = lambda enabled: None  # `parallel.join` would turn it off
        return bench.main(["--step", *flags])
    probes = dict(decode=probe_decode, attention=probe_attention, passes=probe_passes, race=probe_race)
    probes[name]()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
