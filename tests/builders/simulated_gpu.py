"""A simulated GPU: finds tensors left on the CPU on a machine that has no GPU.

    with simulated_gpu.Cuda():
        ids = torch.arange(3, device="cuda")  # the CPU computes; `ids.device` is cuda:0
        ids + torch.arange(3)                 # RuntimeError, as on a GPU

Every call of torch marks the tensors that it returns with the device on which they would be, and
refuses tensors of both devices. As on a GPU, a CPU tensor without dimensions is a number, and a CPU
index or a copy from the CPU is fine.

Not found: what a CUDA kernel lacks or computes otherwise; memory, streams and races; mistakes
inside one call of torch, among them `backward` with what is computed anew there.
"""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def device_of(tensor: Tensor) -> torch.device:
    """Where a tensor would be."""
    return CUDA if "is_simulated" in tensor.__dict__ else CPU


def tensors_in(value) -> list[Tensor]:
    """The tensors of nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def mark(value, device: torch.device):
    """The same value, its tensors marked as being on the device."""
    for tensor in tensors_in(value):
        tensor.__dict__.pop("is_simulated", None)
        if device.type == "cuda":
            tensor.__dict__["is_simulated"] = True
    return value


class Cuda(TorchFunctionMode):
    """Lets the CPU compute every call; checks and answers as if there were a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.__name__
        tensors = tensors_in((args, kwargs))
        if func == Tensor.device.__get__:
            return device_of(args[0])
        if name in ("to", "cpu") and tensors:
            return self.move(name, *args, **kwargs)
        device = CUDA if CUDA in map(device_of, tensors) else CPU
        if kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            kwargs["device"] = CPU
        elif name in ("__getitem__", "__setitem__", "copy_"):
            device = device_of(args[0])
            indices = [] if name == "copy_" else tensors_in(args[1])
            self.check(name, device, indices if device == CPU else tensors_in(args[2:]))
        elif device == CUDA:
            self.check(name, device, tensors)
        result = func(*args, **kwargs)
        return result if any(result is tensor for tensor in tensors) else mark(result, device)

    def check(self, name: str, device: torch.device, tensors: list[Tensor]) -> None:
        """Raises what a call on this device raises for tensors of the other."""
        for tensor in tensors:
            if device_of(tensor) != device and (tensor.dim() or device == CPU):
                raise RuntimeError(f"{name}: Expected all tensors to be on the same device")
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def move(self, name: str, tensor: Tensor, *args, copy: bool = False, **kwargs) -> Tensor:
        """`to` and `cpu`: a copy where the device changes."""
        here = device_of(tensor)
        device = CPU
        dtype = None
        if name == "to":
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        device = device or here
        result = tensor.to(dtype, copy=copy or device.type != here.type)
        return result if result is tensor else mark(result, device)
