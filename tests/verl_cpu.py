"""verl on a CPU, for which it has neither a platform nor a sampler: Hugging Face's `generate` stands in for vLLM.

VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu python -m verl.trainer.main_ppo ... rollout.name=cpu
"""

import contextlib

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """What FSDP's engine asks for. Ray's GPUs are logical ones."""

    device_name = vendor_name = "cpu"
    device_module = torch.cpu

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


class Server:
    """A model that samples, in a process of Ray's."""

    def __init__(self, path: str, length: int):
        self.model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
        self.length = length
        self.steps = 0

    def load(self, weights: dict[str, torch.Tensor], steps: int | None) -> None:
        self.model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
        self.steps = steps or 0

    def generate(self, request_id, prompt_ids: list[int], sampling_params: dict, **unused) -> TokenOutput:
        ids = torch.tensor([prompt_ids])
        out = self.model.generate(ids, do_sample=True, top_k=0, max_new_tokens=self.length)[0, len(prompt_ids) :]
        return TokenOutput(token_ids=out.tolist(), stop_reason="completed", extra_fields={"global_steps": self.steps})


class Replica(RolloutReplica):
    """One server a rank."""

    async def launch_servers(self) -> None:
        server = ray.remote(Server).options(name=f"cpu_server_{self.replica_rank}")
        self._server_handle = server.remote(self.model_config.path, self.config.response_length)
        self._server_address = f"cpu:{self.replica_rank}"

    async def wake_up(self) -> None:
        pass

    sleep = wake_up


class Adapter(base.BaseRollout):
    """Sends the weights that a rank has trained to its server."""

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights, global_steps: int | None = None, **unused) -> None:
        server = ray.get_actor(f"cpu_server_{torch.distributed.get_rank()}")
        await server.load.remote({name: weight.cpu() for name, weight in weights}, global_steps)


def compute_score(data_source, solution_str: str, ground_truth: str, extra_info=None, **unused) -> float:
    """A reward function: right or wrong by the text alone."""
    return float(len(solution_str) % 2)


RolloutReplicaRegistry.register("cpu", lambda: Replica)
base._ROLLOUT_REGISTRY["cpu", "async"] = "verl_cpu.Adapter"
