"""Work in other processes: a command that can be killed, and two ranks.

They are forked where no GPU forbids it, so that they need not import what this one has imported.
"""

import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import torch
from torch.multiprocessing import get_context, start_processes

METHOD = "spawn" if torch.cuda.is_available() else "fork"


def in_another_process(command: Callable[..., int], argv: list[str]) -> BaseProcess:
    """A process that runs a command, whose output is discarded; it has been started."""
    process = get_context(METHOD).Process(target=_run_silently, args=(command, argv))
    process.start()
    return process


def _run_silently(command: Callable[..., int], argv: list[str]) -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    sys.exit(command(argv))


def on_two(work: Callable[..., None], folder, *inputs, meanwhile=None) -> None:
    """Run `work(folder, *inputs)` on two ranks over gloo, and `meanwhile()` in this process."""
    arguments = (work, folder, *inputs)
    ranks = start_processes(_as_rank, arguments, nprocs=2, join=False, start_method=METHOD)
    if meanwhile:
        meanwhile()
    while not ranks.join():  # True once both have ended
        pass


def _as_rank(rank: int, work: Callable[..., None], folder, *inputs) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["OMP_NUM_THREADS"] = "1"  # otherwise accelerate gives each rank threads, which spin
    # torch reads these, but does not use them
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "none"}
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    work(folder, *inputs)
    if torch.distributed.is_initialized():  # a command leaves the group itself
        torch.distributed.destroy_process_group()
