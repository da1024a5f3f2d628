"""FSDP: several processes, one model; work is shared, weights are sharded, the sampler follows.

    launch    starts one process per GPU, by torch's own launcher
    join      this process's place among them, `Ranks`: rank, number of ranks, device
    share     the whole groups that a rank samples, grades and credits;
              `own_micro_batches` those of an optimizer step that it computes
    gather    what every rank made, to all of them; `raise_together`: a rank's bad input, too;
              `main_first`: rank 0 downloads before the others look
    shard     FSDP, `fully_shard`, one unit per decoder layer: float32 weights and optimizer spread
              over the ranks, compute in bfloat16 (or float32), gradients reduced in float32
    refresh   the sharded weights into the whole copy that samples, checked by a checksum

A rank samples from a whole copy of the weights, so no rank waits for another while tokens are
decoded; ranks meet again in `gather`. There every rank gets the rollouts of all (ids and token
advantages: megabytes), so an optimizer step means the same rollouts on one rank and on eight, dealt
out evenly.

One rank that computes in float32 is the plain model, which then samples, too. One rank in bfloat16
uses FSDP's mixed precision over a mesh of itself; nothing is split. Ranks on several nodes need a
file system that all of them see. A rank that fails is seen by the launcher, which ends the others;
TIMEOUT is only for ranks that wait for slow ones.

Left out: tensor, pipeline and context parallelism, offloading.
"""

import copy
import ctypes
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from base.config import Config, Machine, rank_of_torchrun
from base.errors import BadInput
from grpo import Layout, Policy

Value = TypeVar("Value")
AnyMachine = TypeVar("AnyMachine", bound=Machine)
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}  # by device
TIMEOUT = timedelta(hours=2)  # ranks finish sampling at different times


@dataclass(frozen=True)
class Ranks:
    """This process's place among all."""

    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        """The one that writes and prints."""
        return self.rank == 0


def on_machine(config: AnyMachine, half: bool = True) -> AnyMachine:
    """Replace `auto` by this machine's device and dtype: bfloat16 on a GPU if `half`.

    Raises BadInput for GPUs that are not there, and for many more processes than cores.
    """
    gpus = torch.cuda.device_count()
    device = config.device
    dtype = config.dtype
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and gpus < max(1, config.ranks):
        raise BadInput(f"--device cuda: torch sees {gpus} GPUs; use --device cpu or fewer --ranks")
    cores = os.cpu_count() or 1
    if device == "cpu" and config.ranks > max(8, cores):
        raise BadInput(f"--ranks {config.ranks}: this machine has {cores} cores; lower it")
    if config.threads > max(64, cores):
        raise BadInput(f"--threads {config.threads}: this machine has {cores} cores; lower it")
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" and half else "float32"
    return replace(config, device=device, dtype=dtype)


def processes(machine: Machine) -> int:
    """How many processes this command has to start.

    1 means none: this process is enough, or is one of torchrun's.
    """
    if rank_of_torchrun() is not None:
        return 1
    return machine.ranks or (torch.cuda.device_count() if machine.device == "cuda" else 1)


def launch(count: int, script: str, argv: Sequence[str] | None) -> int:
    """Run `python script argv` in `count` processes, as torchrun would; returns the exit status.

    The first process that fails ends the others, and its status is returned, or 1 if a signal ended
    it. All of them get Ctrl-C; SIGTERM acts as Ctrl-C.
    """
    print(f"starting {count} processes on this machine, one a rank", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        run_id=f"{os.getpid()}",
        max_restarts=0,
        signals_to_handle="SIGINT",
    )
    if hasattr(config, "shutdown_timeout"):  # torch 2.11 lacks it
        # seconds from Ctrl-C until ranks are killed: they may be finishing a step
        config.shutdown_timeout = 24 * 3600
    try:
        elastic_launch(config, sys.executable)(
            "-u", script, *(sys.argv[1:] if argv is None else argv)
        )
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    except (SignalException, KeyboardInterrupt):
        return 130
    return 0


def join(device: str, threads: int = 0) -> Ranks:
    """Take this process's place among those that torchrun started, or in the caller's own group.

    Without either the process is alone. `run_command` ends it.
    """
    if threads:
        torch.set_num_threads(threads)
    place = torch.device(device)
    if device == "cuda":
        place = torch.device(device, dist.get_node_local_rank(fallback_rank=0))
        torch.cuda.set_device(place)
        # cuDNN's attention, torch's first choice on Hopper, builds a plan for every new shape; ours
        # are nearly always new.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        # otherwise ranks would run on, and hold their GPUs, when their launcher is killed
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
        dist.init_process_group(BACKENDS[device], timeout=TIMEOUT)
    if not dist.is_initialized():
        return Ranks(0, 1, place)
    # what is wrong with a network shows at once, and its buffers come before sampling's cache
    for where in sorted({"cpu", device}):
        dist.all_reduce(torch.zeros(1, device=where))
    return Ranks(dist.get_rank(), dist.get_world_size(), place)


def share(items: list[Value], ranks: Ranks) -> list[Value]:
    """This rank's part of a list: consecutive items, as many as other ranks have to within one."""
    start = len(items) * ranks.rank // ranks.world
    end = len(items) * (ranks.rank + 1) // ranks.world
    return items[start:end]


def own_micro_batches(
    rows: Sequence[int],
    lengths: Sequence[int],
    tokens: int,
    ranks: Ranks,
    pack: Callable[..., list[Tensor]],
) -> list[tuple[Tensor, bool]]:
    """This rank's part of a mini-batch, as micro-batches, and whether each is a filler.

    `rows` are the mini-batch's, `lengths` those of all rollouts. `pack` makes the micro-batches;
    those that the ranks run together are about equally full. Every rank gets equally many, as
    sharded ranks must run in step: one that has no work left gets the shortest rollout, which must
    not count.
    """
    micro_batches = pack(rows, lengths, tokens, ranks.world)
    rounds = max(1, -(-len(micro_batches) // ranks.world))
    mine = [(micro_batch, False) for micro_batch in micro_batches[ranks.rank :: ranks.world]]
    shortest = min(range(len(lengths)), key=lambda row: lengths[row])
    return mine + [(torch.tensor([shortest]), True)] * (rounds - len(mine))


def gather(value: Value, ranks: Ranks) -> list[Value]:
    """Every rank's value, in the order of the ranks, tensors on this rank's device."""
    if ranks.world == 1:
        return [value]
    buffer = io.BytesIO()
    torch.save(value, buffer)  # not pickled as it is: a CUDA tensor would go to its old GPU
    saved = [b""] * ranks.world
    dist.all_gather_object(saved, buffer.getvalue())
    values = []
    for data in saved:
        values.append(torch.load(io.BytesIO(data), ranks.device, weights_only=False))
    return values


def gather_items(items: list[Value], ranks: Ranks) -> list[Value]:
    """The items of every rank's list, in the order of the ranks."""
    return [item for of_rank in gather(items, ranks) for item in of_rank]


def from_main(value: Value, ranks: Ranks) -> Value:
    """Rank 0's value, on all ranks."""
    return gather(value, ranks)[0]


@contextmanager
def raise_together(ranks: Ranks) -> Iterator[None]:
    """A BadInput that any rank raises inside is raised by all ranks.

    Otherwise the others would wait for that rank.
    """
    problem: BadInput | None = None
    try:
        yield
    except BadInput as error:
        problem = error
    messages = gather_items([str(problem)] if problem else [], ranks)
    if messages:
        raise BadInput(messages[0]) from problem


@contextmanager
def main_first(ranks: Ranks) -> Iterator[None]:
    """Rank 0 does what is inside before the others do, who find what it has downloaded."""
    if not ranks.main:
        gather(None, ranks)
    try:
        yield
    finally:
        if ranks.main:
            gather(None, ranks)


def total(sums: dict[str, float], ranks: Ranks) -> dict[str, float]:
    """Each number's sum over the ranks."""
    of_ranks = gather(sums, ranks)
    return {name: sum(part[name] for part in of_ranks) for name in sums}


class Sharded(NamedTuple):
    """A model that is ready to be trained."""

    trained: Policy  # float32 weights, spread over the ranks
    sampler: Policy  # a whole copy in the dtype of compute; the trained one itself on one rank
    optimizer: torch.optim.Optimizer


def shard(model: PreTrainedModel, layout: Layout, config: Config, ranks: Ranks) -> Sharded:
    """Make what a run trains, what it samples with (perhaps the same), and its optimizer.

    Trained weights are float32, whatever the model's dtype was; `--dtype` is that of the
    computation. The model must be on the rank's device: the machine's memory would hold two copies
    for each rank.
    """
    dtype = getattr(torch, config.dtype)
    if ranks.world == 1 and dtype == torch.float32:
        trained = sampler = Policy(model.float(), layout)
    else:
        sampler = Policy(rounded_copy(model, dtype), layout)
        # After the copy, which would otherwise take over the wrapped layers of `model`.
        trained = Policy(model, layout)
        split_weights(trained, ranks, dtype)
    if config.recompute:
        for policy in {trained, sampler}:
            recompute_layers(policy)
    # Adam's step is lr whatever the gradient's size, so token weights that shrink all advantages
    # alike change little.
    optimizer = torch.optim.AdamW(
        [weights for weights in trained.parameters() if weights.requires_grad],
        lr=config.lr,
        weight_decay=0.0,
        fused=ranks.device.type == "cuda",
    )
    return Sharded(trained, sampler, optimizer)


def rounded_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of a model with parameters of this dtype.

    Not by `to(dtype)`, which would round the rotary frequencies, too.
    """
    rounded: dict = {}
    for parameter in model.parameters():
        copied = parameter.detach().to(dtype, copy=True)
        rounded[id(parameter)] = torch.nn.Parameter(copied, parameter.requires_grad)
    return copy.deepcopy(model, rounded)  # which takes these instead of its parameters


def split_weights(policy: Policy, ranks: Ranks, dtype: torch.dtype) -> None:
    """Split a policy's weights over the ranks, one FSDP unit per decoder layer."""
    device = ranks.device.type
    if not dist.is_initialized():  # a mesh of one
        dist.init_process_group(BACKENDS[device], store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device, (ranks.world,))
    compute = None if dtype == torch.float32 else dtype
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in layers_of(policy.model):  # one at a time to float32: only shards of it stay
        fully_shard(layer.float(), mesh=mesh, mp_policy=precision)
    fully_shard(policy.float(), mesh=mesh, mp_policy=precision)


def full(value: Tensor) -> Tensor:
    """A tensor that may be sharded, whole. All ranks must call it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@torch.no_grad()
def refresh(trained: Policy, sampler: Policy, ranks: Ranks) -> int | None:
    """Copy the trained weights into the policy that samples; returns the checksum of both.

    Returns None if the two are one. Raises RuntimeError if a rank's copy differs from the trained
    weights: a sampler that lags behind would otherwise go unnoticed.
    """
    if sampler is trained:
        return None
    copies = dict(sampler.model.named_parameters())
    sums = torch.zeros(2, dtype=torch.int64, device=ranks.device)  # of a shard, of the copy
    for number, (name, master) in enumerate(trained.model.named_parameters()):
        rounded = master.to(copies[name].dtype)
        assert isinstance(rounded, DTensor)  # FSDP has made it so
        copies[name].copy_(rounded.full_tensor())
        sums[0] += checksum(rounded.to_local(), number)
    for number, values in enumerate(copies.values()):
        sums[1] += checksum(values, number)
    of_shards, copied = zip(*gather(sums.tolist(), ranks), strict=True)  # by rank
    expected = sum(of_shards)
    if any((value - expected) % 2**64 for value in copied):
        raise RuntimeError(f"sampling and trained weights differ: {copied} by rank, {expected}")
    return copied[0]


def checksum(values: Tensor, number: int) -> Tensor:
    """Sum of the bit patterns, int64, modulo 2^64, which can be summed over shards in any order.

    `number` tells equal tensors at different places apart.
    """
    bits = values.contiguous().view({2: torch.int16, 4: torch.int32}[values.element_size()])
    return bits.sum(dtype=torch.int64) * (2 * number + 1)


# ---- layers that run again in the backward pass --------------------------------------------------


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder layers."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_layers(model: torch.nn.Module) -> None:
    """Let each decoder layer keep only its input, and run again in the backward pass."""
    for layer in layers_of(model):
        layer.forward = recomputed(layer.forward)


def recomputed(forward: Callable[..., object]) -> Callable[..., object]:
    """A layer's forward that keeps only its input.

    transformers' own switch needs train(), which turns dropout on.
    """

    def run(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            partial(forward, **kwargs), *args, use_reentrant=False, preserve_rng_state=False
        )

    return run
