"""verl on a CPU, for which it has no platform: VERL_PLATFORM=cpu, and this imported."""

import contextlib
import types

import torch
import verl.utils.distributed
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

LACKING = (
    "memory_allocated memory_reserved max_memory_allocated max_memory_reserved empty_cache "
    "set_device"
)
LACKING = dict.fromkeys(LACKING.split(), lambda *inputs: 0)  # of torch.cpu
LACKING["mem_get_info"] = lambda *inputs: (0, 1)
LACKING["get_device_name"] = lambda *inputs: "cpu"
LACKING["get_device_properties"] = lambda *inputs: types.SimpleNamespace(total_memory=1)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """What FSDP's engine asks for. Ray's GPUs are logical ones."""

    device_name = vendor_name = "cpu"
    device_module = types.SimpleNamespace(**vars(torch.cpu) | LACKING)

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def get_device_capability(self, device_id: int = 0) -> tuple[None, None]:
        return None, None

    def is_ipc_supported(self) -> bool:
        return False

    def nvtx_range(self, message: str):
        return contextlib.nullcontext()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def _nothing(self, *inputs) -> None:
        pass

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    manual_seed_all = manual_seed


# verl asks for "cpu:gloo,DEVICE:BACKEND", which torch refuses for the same device twice.
verl.utils.distributed.get_device_name = lambda: "cuda"
