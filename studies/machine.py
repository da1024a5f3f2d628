"""What the machine is, and what it could do at best: ceilings to hold beside what `bench` measures.

They are measured, too, and not read off a data sheet:

    hardware(device, dtype) -> a line for reports
    ceilings(device)        -> rates of a matrix product, of `exp` and of a copy
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


def ceilings(device: torch.device) -> dict[str, float]:
    """FLOP/s of a float32 matrix product, exponentials/s in float32, bytes/s of a copy."""
    numbers = torch.randn(2**22, device=device)
    exponentials = len(numbers) / seconds_of(lambda: numbers.exp(), device)
    return {"matmul": matmul_ceiling(device, torch.float32), "exp": exponentials, "copy": copy_ceiling(device)}


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product."""
    size = 8192 if device.type == "cuda" else 512
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / seconds_of(lambda: a @ b, device)


def copy_ceiling(device: torch.device) -> float:
    """Bytes/s of a copy on the device, those read and those written."""
    source = torch.zeros(2**31 if device.type == "cuda" else 2**26, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)


def seconds_of(call, device: torch.device) -> float:
    """Median seconds of a call, after those that do not count; fewer on a CPU, where nothing is claimed."""
    aside, times = (3, 10) if device.type == "cuda" else (1, 3)
    seconds = []
    for _ in range(aside + times):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds[aside:])
