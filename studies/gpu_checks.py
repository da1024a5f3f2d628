"""Is this installation right on its GPU? PASS or FAIL, the check's name, and what was found.

    python -m studies.gpu_checks backends  # attention against float64
    python -m studies.gpu_checks decode  # replayed graphs against steps
    python -m studies.gpu_checks packing  # rollouts end to end against one rollout at a time
    python -m studies.gpu_checks fsdp  # one rank in bfloat16: its log-ratio, a checkpoint, --resume
    python -m studies.gpu_checks methods  # every credit method but `oracle-value` takes a step

One check a process, because an error of CUDA stays with its process; the exit status is 1 if it fails. The tests
have cases for a GPU as well, and what these cover is not repeated here. `DEVICE=cpu` rehearses the checks.
`studies/gpu_day.sh` runs all of it.
"""

import contextlib
import copy
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2ForCausalLM

import train
from credit.table import METHODS
from fast import decode, packing
from grpo import Policy, Rollouts, pad_left, policy_loss
from studies import bench

DEVICE = torch.device(os.environ.get("DEVICE", "cuda"))
CUDA = DEVICE.type == "cuda"
LONGEST = 1100 if CUDA else 50  # tokens of a sampled response
LOG_RATIO = 1e-2  # mean |log-ratio| before the first update, in bfloat16
EMBEDDED = f"--task embedded --smoke --device {DEVICE.type} --decode fast"


def model_of(dtype: torch.dtype) -> Qwen2ForCausalLM:
    """Two layers with grouped heads of 128, and random weights so large that tokens differ."""
    config = bench.architecture("tiny")
    config.hidden_size = 512
    config.initializer_range = 0.1
    torch.manual_seed(1)
    return Qwen2ForCausalLM(config).eval().to(DEVICE, dtype)


def rows_of(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Random tokens of these lengths, padded on the left: ids (B, P) and mask (B, P)."""
    rows = [torch.randint(1, 512, (length,)).tolist() for length in lengths]
    return pad_left(rows, 0, DEVICE)


def rollouts_of(prompts: list[int], responses: list[int]) -> Rollouts:
    """Random rollouts of these lengths."""
    ids, mask = rows_of(responses)
    truncated = torch.zeros(len(prompts), dtype=torch.bool, device=DEVICE)
    return Rollouts(*rows_of(prompts), ids.flip(1), mask.flip(1), truncated, [""] * len(prompts))


def relative(ours: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    return ((ours.double() - expected.double()).norm() / expected.double().norm()).item()


def run_train(flags: str, run: Path) -> list[dict]:
    """The steps' metrics after `train.py` in this process; raises AssertionError, with its last words, if it fails."""
    with tempfile.TemporaryFile("w+") as printed:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            status = train.main(flags.split())
        printed.seek(0)
        assert status == 0, f"train.py {flags}: status {status}: {printed.read()[-300:]}"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "step" in row]


def masked_attention() -> str:
    """A decoding step's attention with ragged masks in bfloat16 is that of float64 up to 2%, with cuDNN and without."""
    worst = {True: 0.0, False: 0.0}
    starts = torch.tensor([0, 1, 3, 5, 2, 7], device=DEVICE)
    for length in (8, 192, 520, 704, 1024, 3152):
        query = torch.randn(6, 4, 7, 128, device=DEVICE, dtype=torch.bfloat16)
        key, value = torch.randn(2, 6, 4, 4096, 128, device=DEVICE, dtype=torch.bfloat16)[:, :, :, :length]
        mask = (torch.arange(length, device=DEVICE) >= starts[:, None])[:, None, None].expand(-1, -1, 7, -1)
        scores = (query.double() @ key.double().mT / 128**0.5).masked_fill(~mask, -torch.inf)
        for cudnn in worst:
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            ours = scaled_dot_product_attention(query, key, value, attn_mask=mask)
            worst[cudnn] = max(worst[cudnn], relative(ours, scores.softmax(-1) @ value.double()))
    found = f"relative error {worst[True]:.1e} with cuDNN, {worst[False]:.1e} without"
    assert max(worst.values()) < 0.02, found
    return found


def replays_are_steps() -> str:
    """Over buckets and dropped rows two runs with graphs agree, greedy ones also with a run without; memory returns."""
    model, held = model_of(torch.bfloat16), []
    decode.BUCKET = 64  # many graphs
    ids, mask = rows_of([3 + 7 * row % 90 for row in range(48 if CUDA else 6)])
    stops = list(range(40, 50))  # each row says one sooner or later
    for temperature in (0.0, 1.0, 1.0):
        runs = []
        for capture_on in ((), ("cuda",), ("cuda",)):
            torch.manual_seed(7)
            decode.CAPTURE_ON = capture_on
            options = dict(max_tokens=LONGEST, temperature=temperature, stops=stops, pad=0)
            runs.append(decode.decode(model, ids, mask, **options))
        assert torch.equal(runs[1], runs[2]), f"temperature {temperature}: two runs with graphs differ"
        # Sampled, the noise is drawn in the same order, but not from the same offsets.
        assert temperature or torch.equal(runs[0], runs[1]), "greedy: graphs differ from steps"
        if CUDA:
            torch.cuda.empty_cache()
            held.append(torch.cuda.memory_reserved() / 2**20)
    assert not held or held[-1] <= held[1] + 4, f"graphs keep memory, MiB: {held}"
    return f"up to {runs[0].shape[1]} tokens"


def packed_is_one_at_a_time() -> str:
    """Packed log-probabilities, states and gradients are those of one rollout at a time in float32.

    In float32 they differ by 1e-3 at most. In bfloat16 their error is at most twice that of bfloat16 with padding.
    """
    rollouts = rollouts_of([5, 60, 33, 150, 1, 99, 17, 8], [300, 2, 128, 129, 1, 640, 77, 255])
    singly = [rollouts.take(torch.tensor([row])) for row in range(len(rollouts.texts))]
    half = model_of(torch.bfloat16)
    model = copy.deepcopy(half).float()
    expected = passes(Policy(copy.deepcopy(model)), singly)
    padded = passes(Policy(copy.deepcopy(half), recompute=True), [rollouts])
    packed = passes(Policy(model, True, **packing.packing_of(model)), [rollouts])
    packed_half = passes(Policy(half, True, **packing.packing_of(half)), [rollouts])
    found = []
    for name, values in expected.items():
        exact, error, usual = (relative(of[name], values) for of in (packed, packed_half, padded))
        found.append(f"{name}: float32 {exact:.0e}, bfloat16 {error:.1e}, padded {usual:.1e}")
        assert exact < 1e-3 and error < 2 * usual + 1e-3, found[-1]
    return "relative errors of " + "; ".join(found)


def passes(policy: Policy, micro_batches: list[Rollouts]) -> dict[str, Tensor]:
    """Log-probabilities (N,) and states (N, d) of all response tokens, and the gradient of a loss over them."""
    log_probs, states = [], []
    for micro_batch in micro_batches:
        with torch.no_grad():
            states.append(policy(micro_batch, 1.0, details=True)[2])
        logp = policy(micro_batch, 1.0)  # (b, t)
        advantages = torch.arange(logp.shape[1], device=DEVICE).sin().expand_as(logp)
        loss, _ = policy_loss(logp, logp.detach() - 0.1, advantages, micro_batch.mask, n_tokens=1000)
        loss.backward()
        log_probs.append(logp.detach()[micro_batch.mask])
    gradients = torch.cat([parameter.grad.float().flatten() for parameter in policy.parameters()])
    return {"log-probabilities": torch.cat(log_probs), "states": torch.cat(states), "gradients": gradients}


def one_rank_of_fsdp() -> str:
    """In bfloat16 the log-ratio before each step's first update is about 0, and --resume repeats the steps it lost."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        steps = run_train(f"{EMBEDDED} --dtype bfloat16 --lr 1e-3 --out {folder} --name run", run)
        again = run_train(f"--resume {run}/checkpoints/step-000002 --device {DEVICE.type}", run)
    ratio = max(step["abs_log_ratio"] for step in steps + again)
    apart = abs(again[2]["entropy"] / steps[2]["entropy"] - 1)
    found = f"log-ratio {ratio:.1e}; the resumed step's entropy differs by {apart:.1e}"
    assert len(steps) == len(again) == 4 and ratio < LOG_RATIO and apart < 0.05, found
    assert len({step["checksum"] for step in steps}) == 4, "an update has not reached the sampling copy"
    return found


def every_method_takes_a_step() -> str:
    """One step of training with each credit method, and with SHEAR's kernel."""
    failed = []
    variants = [*METHODS, "shear --fused"] if CUDA else list(METHODS)
    variants[variants.index("arca")] += " --lora-rank 2"
    variants.remove("oracle-value")  # for another kind of problems
    for variant in variants:
        try:
            with tempfile.TemporaryDirectory() as folder:
                sizes = f"--warmup-steps 1 --steps 1 --out {folder} --name run"
                run_train(f"{EMBEDDED} {sizes} --method {variant}", Path(folder, "run"))
        except Exception as error:  # the other methods have their turn
            traceback.print_exc()
            failed.append(f"{variant}: {str(error)[-200:]}")
    assert not failed, "; ".join(failed)
    return f"{len(variants)} runs"


CHECKS = {
    "backends": masked_attention,
    "decode": replays_are_steps,
    "packing": packed_is_one_at_a_time,
    "fsdp": one_rank_of_fsdp,
    "methods": every_method_takes_a_step,
}


def main(name: str) -> int:
    """Run a check; returns the exit status."""
    torch.manual_seed(0)
    started = time.perf_counter()
    try:
        found = CHECKS[name]()
    except Exception as error:
        print(f"FAIL {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        traceback.print_exc()
        return 1
    print(f"PASS {name}: {found} ({time.perf_counter() - started:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
