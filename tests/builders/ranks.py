"""Two ranks on one machine."""

import os
from collections.abc import Callable

import torch
from torch.multiprocessing import start_processes


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
