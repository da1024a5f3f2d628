"""What the machine is, and what it could do at best: ceilings to hold beside what `bench` measures.

hardware(device, dtype) -> a line for reports
ceilings(device, dtype) -> rates of a matrix product, of `exp` and of a copy; measured, not read off a data sheet
"""

import datetime
import os
import platform
import time
from statistics import median

import torch
import transformers


def hardware(device: torch.device, dtype: str) -> str:
    """What it was measured on, with what, and when."""
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}, {torch.cuda.mem_get_info(device)[1] / 1e9:.0f} GB"
    else:
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} of {os.cpu_count()} cores"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, python {platform.python_version()}"
    return f"{name}; {dtype}; {versions}; {datetime.date.today()}"


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """FLOP/s of a large matrix product in `dtype`, float32 exponentials/s, bytes/s of a copy, read and written."""
    cuda = device.type == "cuda"
    size = 8192 if cuda else 512
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    numbers = torch.randn(2**22, device=device)
    source = torch.zeros(2**31 if cuda else 2**26, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "matmul": 2 * size**3 / seconds_of(lambda: a @ b, device),
        "exp": len(numbers) / seconds_of(lambda: numbers.exp(), device),
        "copy": 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device),
    }


def seconds_of(call, device: torch.device) -> float:
    """Median seconds of a call, after those that do not count; fewer on a CPU, where nothing is claimed."""
    aside, counted = (3, 10) if device.type == "cuda" else (1, 3)
    seconds = [timed(call, device)[0] for _ in range(aside + counted)]
    return median(seconds[aside:])


def timed(call, device: torch.device) -> tuple[float, object]:
    """Seconds and result of one call."""
    started = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, result
