"""transformers' `generate` as a rollout server of verl's: `name=hf`.

verl itself has vLLM, SGLang and TensorRT.
"""

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput


class Server:
    """An actor that samples for one replica."""

    def __init__(self, folder: str, most: int):
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.most = most

    async def generate(self, request_id, *, prompt_ids, sampling_params, **others) -> TokenOutput:
        ids = torch.tensor([prompt_ids])
        sampled = dict(
            do_sample=True,
            top_k=0,
            temperature=sampling_params["temperature"],
            max_new_tokens=self.most,
        )
        output = self.model.generate(ids, **sampled, pad_token_id=0)
        step = {"global_steps": self.step}  # of training, whose weights these are
        return TokenOutput(
            token_ids=output[0, ids.shape[1] :].tolist(), stop_reason="completed", extra_fields=step
        )

    async def load(self, weights: dict, step: int) -> None:
        size = sum(weight.double().abs().sum() for weight in weights.values())
        self.model.load_state_dict(weights, strict=False)  # a tied head is sent once
        self.step = step
        print(f"weights {size:.9f}", flush=True)

    async def nothing(self, *inputs, **named) -> None:
        pass

    sleep = wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    abort_all_requests = resume_generation = nothing


class Replica(RolloutReplica):
    """Its server, by a name that the trainer's ranks know."""

    async def launch_servers(self) -> None:
        kind = ray.remote(Server).options(name=f"hf-{self.replica_rank}", num_cpus=0)
        self._server_handle = kind.remote(self.model_config.path, self.config.response_length)
        self.servers, self._server_address = [self._server_handle], f"hf-{self.replica_rank}"


class Adapter(base.BaseRollout):
    """Each rank has a replica, to which it sends the weights."""

    async def update_weights(
        self, weights, wire_format="named_tensors", global_steps=0, **others
    ) -> None:
        server = ray.get_actor(f"hf-{torch.distributed.get_rank()}")
        await server.load.remote(
            {name: weight.detach().cpu() for name, weight in weights}, global_steps
        )

    async def resume(self, tags) -> None:
        pass

    async def release(self) -> None:
        pass


RolloutReplicaRegistry.register("hf", lambda: Replica)
base._ROLLOUT_REGISTRY["hf", "async"] = f"{__name__}.Adapter"
