"""A make-believe GPU: finds device mistakes on a machine that has none.

    with make_believe.cuda():
        ids = torch.arange(3, device="cuda")  # the CPU computes; `ids.device` is cuda:0
        ids + torch.arange(3)                 # RuntimeError, as on a GPU

Every call of torch marks the tensors that it returns with the device on which they would be, and refuses

    - tensors of both devices, but for a CPU tensor without dimensions, which CUDA takes as a number;
    - a CPU tensor indexed by a CUDA tensor, a CUDA tensor given to NumPy, a CPU generator for CUDA's random numbers;
    - devices, dtypes and shapes that `varlen_attn` does not take; its result is SDPA's, in float32.

Not found: what a CUDA kernel lacks or computes otherwise; memory, streams and races; pinned memory; mistakes inside
one call of torch; CPU tensors without dimensions where CUDA refuses these, too, as in `cat`. A tensor that autograd
hands to a hook of Python counts as the CPU's.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SET_DATA = Tensor.data.__set__  # `tensor.data = other`, which moves the tensor
UNCHECKED = (SET_DATA, torch._has_compatible_shallow_copy_type)


def device_of(tensor: Tensor) -> torch.device:
    """Where a tensor would be."""
    return CUDA if "is_believed" in tensor.__dict__ else CPU


def tensors_in(value) -> list[Tensor]:
    """The tensors of nested lists, tuples, sets and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | set):
        return []
    tensors = []
    for item in value:
        tensors += tensors_in(item)
    return tensors


def mark(value, device: torch.device):
    """The same value, its tensors marked as being on the device."""
    for tensor in tensors_in(value):
        if device.type == "cuda":
            tensor.__dict__["is_believed"] = True
        else:
            tensor.__dict__.pop("is_believed", None)
    return value


class Cuda(TorchFunctionMode):
    """Lets the CPU compute every call; checks and answers as if there were a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in PROPERTIES:
            return PROPERTIES[func](args[0], device_of(args[0]))
        kwargs = dict(kwargs or {})
        name = func.__name__
        tensors = tensors_in(args) + tensors_in(kwargs)
        on_cuda = any(device_of(tensor) == CUDA for tensor in tensors)
        device = CUDA if on_cuda else CPU
        if func is Tensor.backward:
            func = torch.autograd.backward
            kwargs["grad_tensors"] = kwargs.pop("gradient")
        if func in (torch.autograd.backward, torch.autograd.grad):
            # Not one call: hooks, and what is computed anew for the backward pass, are checked, too.
            with self, mock.patch.object(torch.autograd, "has_torch_function", lambda tensors: False):
                return mark(func(*args, **kwargs), device)
        if name in ("to", "cpu", "cuda") and tensors:
            return self.move(name, *args, **kwargs)
        if kwargs.get("device") is not None:
            device = self.asked_for(name, kwargs)
        elif name in ("__getitem__", "__setitem__", "copy_"):
            device = device_of(args[0])
            self.check_parts(name, device, args)
        elif on_cuda and func not in UNCHECKED:
            self.check(name, tensors)
        if on_cuda and name == "mm" and "out_dtype" in kwargs:  # which only CUDA has
            dtype = kwargs.pop("out_dtype")
            args = [tensor.to(dtype) for tensor in args]
        result = func(*args, **kwargs)
        if func == SET_DATA:
            mark(args[0], device_of(args[1]))
        elif device != CPU and not any(result is tensor for tensor in tensors):
            mark(result, device)
        return result

    def move(self, name: str, tensor: Tensor, *args, **kwargs) -> Tensor:
        """`to`, `cpu` and `cuda`: a copy where the device changes."""
        device, dtype = {"cpu": CPU, "cuda": CUDA}.get(name), None
        copy = kwargs.pop("copy", False)
        like = args[0] if args else kwargs.get("other")
        if isinstance(like, Tensor):
            device, dtype = device_of(like), like.dtype
        elif name == "to":
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if tensor.is_meta and device is None:
            return tensor.to(dtype)
        if device is None or device.type == device_of(tensor).type:
            device = device_of(tensor)
        else:
            copy = True
        if tensor.is_meta or device.type == "meta":
            return tensor.to(device, dtype)
        result = tensor.to(dtype, copy=copy)
        return result if result is tensor else mark(result, device)

    def asked_for(self, name: str, kwargs: dict) -> torch.device:
        """The argument `device`, which becomes the CPU."""
        device = torch.device(kwargs["device"])
        if device.type == "cuda":
            kwargs["device"] = CPU
            if kwargs.get("generator") is not None:
                raise RuntimeError(f"{name}: Expected a 'cuda' device type for generator but found 'cpu'")
        return device

    def check(self, name: str, tensors: list[Tensor]) -> None:
        """A call with a CUDA tensor."""
        if any(device_of(tensor) == CPU and tensor.dim() for tensor in tensors):
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found cuda:0 and cpu")
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def check_parts(self, name: str, device: torch.device, args: tuple) -> None:
        """An index may be on the CPU, and so may what is copied, unless it is put where tensors point to."""
        indices = [] if name == "copy_" else tensors_in(args[1])
        if any(device == CPU and device_of(tensor) == CUDA for tensor in indices):
            raise RuntimeError(f"{name}: indices should be either on cpu or on the same device as the indexed tensor")
        for values in tensors_in(args[2:]):
            if indices and values.dim() and device_of(values) != device:
                raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found cuda:0 and cpu")


PROPERTIES = {
    Tensor.device.__get__: lambda tensor, device: torch.device("meta") if tensor.is_meta else device,
    Tensor.is_cuda.__get__: lambda tensor, device: device == CUDA,
    Tensor.is_cpu.__get__: lambda tensor, device: device == CPU and not tensor.is_meta,
    Tensor.get_device: lambda tensor, device: 0 if device == CUDA else -1,
}


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)) -> Tensor:
    """Causal attention of segments, each to itself: query, key, value (N, H, w) in half precision -> (N, H, w)."""
    given = query, key, value, cu_seq_q, cu_seq_k
    assert all(device_of(tensor) == CUDA for tensor in given), "varlen_attn runs on CUDA"
    assert query.dtype == key.dtype == value.dtype and query.dtype in (torch.float16, torch.bfloat16), query.dtype
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32, cu_seq_q.dtype
    assert query.shape == key.shape == value.shape and query.dim() == 3, (query.shape, key.shape, value.shape)
    assert window_size == (-1, 0), f"{window_size}: only causal attention is made believe"
    bounds = cu_seq_q.tolist()
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    assert bounds == cu_seq_k.tolist() and bounds[0] == 0 and bounds[-1] == len(query), bounds
    assert max_q == max_k == max(lengths) and type(max_q) is type(max_k) is int, (max_q, max_k)
    outputs = []
    for start, end in itertools.pairwise(bounds):
        q, k, v = (tensor[start:end].transpose(0, 1).float() for tensor in (query, key, value))  # (H, n, w)
        outputs.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale))
    return torch.cat(outputs, 1).transpose(0, 1).to(query.dtype)


@contextlib.contextmanager
def cuda() -> Iterator[None]:
    """One make-believe GPU, `cuda:0`, of 80 GB."""
    make_subclass, init_process_group = Tensor._make_subclass, dist.init_process_group

    def make_marked(kind, data, *args, **options):  # a Parameter, which is made by no call that a mode sees
        return mark([make_subclass(kind, data, *args, **options)], device_of(data))[0]

    def init_gloo(backend, **options):
        init_process_group("gloo", **options)

    def same_shape(tensor):
        return tensor.shape, tensor.dtype

    answers = dict(
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        **dict(device_count=lambda: 1, current_device=lambda: 0),
        mem_get_info=lambda *args: (70 * 10**9, 80 * 10**9),
        max_memory_allocated=lambda *args: 0,
        **dict.fromkeys(("Stream", "Event"), lambda *args, **options: mock.MagicMock()),
        stream=contextlib.nullcontext,
    )
    nothing = "set_device synchronize current_stream empty_cache reset_peak_memory_stats manual_seed manual_seed_all"
    with (
        mock.patch.multiple(torch.cuda, **answers, **{name: mock.MagicMock() for name in nothing.split()}),
        mock.patch.object(Tensor, "_make_subclass", make_marked),
        mock.patch.object(dist, "init_process_group", init_gloo),
        mock.patch("fast.packing.varlen_attn", varlen_attn),
        # Threads of transformers would load weights, and a mode is one thread's.
        mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"),
        # Autograd's hooks see tensors without marks, so what is computed anew cannot be compared by its device.
        mock.patch.dict(checkpoint._allowed_determinism_checks_to_fns, default=same_shape),
        Cuda(),
    ):
        yield
