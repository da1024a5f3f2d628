"""SHEAR in verl's V1 trainer with FSDP.

    python -m verl.trainer.main_ppo trainer.v1.trainer_mode=shear algorithm.adv_estimator=grpo ...

Everything that verl scales by (Ray, FSDP, vLLM, many nodes) is left to verl, which imports this
module by the entry-point group `verl.plugins`. Two of its classes are extended, nothing is copied:

  1. `ShearEngine`, on each rank: a hook on the base model takes the last-layer states in the pass
     for old log-probabilities. Once the states of all rollouts of a prompt are there, their weights
     are made and the states are dropped. So no states leave the rank, only weights, as the column
     `shear_weights` of verl's TransferQueue.
  2. `ShearTrainer`, on the controller: gives each rank whole prompts, and multiplies verl's
     advantages by omega.

A rollout is right if its reward, or the field `verdict` of what the reward function returned, is
above `threshold`. States are in the training dtype, after the final norm.

Refused: another estimator than GRPO, `bypass_mode`, `geo_mean`, models without a
`base_model_prefix`, batches that ranks and mini-batches do not divide, steps without all rollouts
of each prompt. verl itself knows no such engine for Megatron.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import get_group_balanced_partitions, log_seqlen_unbalance
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from lab.bridges.shear_credit import shear_omega
from lab.bridges.states import keep_states
from shear import EPS, STRIDE, WINDOW, span_bounds

MODEL_TYPE = "shear_language_model"


@dataclass
class VerlSettings:
    """SHEAR's settings, in verl's config as `+trainer.v1.shear.NAME=VALUE`."""

    window: int = WINDOW  # tokens
    stride: int = STRIDE  # tokens
    eps: float = EPS  # in units of nbar
    # a field of the reward function's dict, such as acc; the reward itself if None
    verdict: str | None = None
    threshold: float = 0.5  # above it a rollout is right
    mean1: bool = False  # whether the weights of a prompt are divided by their mean


@EngineRegistry.register(
    model_type=MODEL_TYPE, backend=["fsdp", "fsdp2"], device=["cuda", "npu", "cpu"]
)
class ShearEngine(FSDPEngineWithLMHead):
    """verl's engine; on request, its scoring pass also returns the token weights.

    A pass whose data has `shear`, the settings, returns `shear_weights`, nested (B, response).
    """

    _groups: "Groups | None" = None  # of the pass under way

    def _build_module(self) -> torch.nn.Module:
        self.model_config.model_type = "language_model"  # verl builds only this and value models
        module = super()._build_module()
        if module.base_model is module:  # its output has logits, and no states
            raise ValueError(
                f"actor_rollout_ref.model.path: the base_model_prefix of {type(module).__name__} "
                "names no part of it, so SHEAR finds no states; set that in the model's code"
            )
        return module

    def infer_batch(self, data: TensorDict, loss_function: Callable | None = None) -> dict:
        """verl's pass, with the weights on request.

        Then data must hold all rollouts of each prompt.
        """
        settings = tu.get_non_tensor_data(data, "shear", default=None)
        if settings is None:
            return super().infer_batch(data, loss_function)
        groups = Groups(data, **settings)
        self._groups = groups
        data["row"] = torch.arange(len(data))
        with keep_states(self.module, self._keep):
            outputs = super().infer_batch(data, loss_function)
        self._groups = None
        weights = [groups.omega[row] for row in range(len(data))]
        outputs["model_output"]["shear_weights"] = torch.nested.as_nested_tensor(
            weights, layout=torch.jagged
        )  # in verl's layout
        return outputs

    def _keep(self, states: Tensor) -> None:
        # of the micro-batch, packed (1, N, d) or padded (b, P + T, d)
        self._states = states

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool
    ) -> tuple:
        """verl's step; then hands the states to their groups.

        verl's autocast, in which distances would be rounded, has ended by then.
        """
        result = super().forward_step(micro_batch, loss_function, forward_only)
        if self._groups is not None:
            lengths = micro_batch["input_ids"].offsets().diff().tolist()  # P + T
            if tu.get_non_tensor_data(micro_batch, "use_remove_padding", default=True):
                packed = self._gather_and_unpad_packed(self._states[0], 0)  # of all Ulysses ranks
                rows = packed[: sum(lengths)].split(lengths)
            else:
                rows = [row[:length] for row, length in zip(self._states, lengths, strict=True)]
            del self._states
            for row, states in zip(micro_batch["row"].tolist(), rows, strict=True):
                self._groups.add(row, states)
        return result


class Groups:
    """The weights of a rank's rollouts, made prompt by prompt from their states."""

    def __init__(
        self,
        data: TensorDict,
        *,
        verdict: str | None,
        window: int,
        stride: int,
        eps: float,
        threshold: float = 0.5,
        mean1: bool = False,
    ) -> None:
        self.weights_of = partial(shear_omega, window=window, stride=stride, eps=eps, mean1=mean1)
        self.masks = data["response_mask"].unbind()
        self.correct = verdicts(data, verdict) > threshold  # (B,)
        self.omega: dict[int, Tensor] = {}  # row -> (T,), once its group is complete
        self.states: dict[int, Tensor] = {}  # row -> (T, d), until then
        self.uids = [str(uid) for uid in tu.get(data, "uid")]

    def add(self, row: int, states: Tensor) -> None:
        """Take a rollout's states (P + T, d); the last one of a prompt completes its group."""
        start = len(states) - len(self.masks[row])
        self.states[row] = states[start:].clone()  # a view would keep the whole micro-batch's
        group = [i for i, uid in enumerate(self.uids) if uid == self.uids[row]]
        if not self.states.keys() >= set(group):
            return
        hidden = pad_sequence([self.states.pop(i) for i in group], batch_first=True)  # (G, T, d)
        mask = pad_sequence([self.masks[i] for i in group], batch_first=True)  # (G, T)
        correct = self.correct[group].to(hidden.device)
        omega = self.weights_of(hidden, mask.to(hidden.device), correct)
        for i, weights in zip(group, omega, strict=True):
            self.omega[i] = weights[: len(self.masks[i])]


def verdicts(data: TensorDict, field: str | None) -> Tensor:
    """The reward of each rollout, or a field of what the reward function returned: (B,).

    Raises ValueError if there is no such field.
    """
    if field is None:
        return torch.stack([scores.sum() for scores in data["rm_scores"].unbind()])
    rewards = [extra["reward_extra_info"] for extra in tu.get(data, "extra_fields")]
    if field not in rewards[0]:
        raise ValueError(
            f"trainer.v1.shear.verdict={field}: the reward has no such field, but "
            f"{sorted(rewards[0])}"
        )
    return torch.tensor([float(reward[field]) for reward in rewards])


@register_trainer("shear")
class ShearTrainer(PPOTrainerSync):
    """verl's synchronous trainer, with SHEAR's token weights.

    Raises ValueError for what it refuses.
    """

    def __init__(self, config: DictConfig) -> None:
        refuse(config)
        settings = OmegaConf.merge(
            OmegaConf.structured(VerlSettings), config.trainer.v1.get("shear", {})
        )
        span_bounds(0, settings.window, settings.stride)  # raises for these
        with open_dict(config):
            # all of them, for verl's log
            config.trainer.v1.shear = OmegaConf.to_container(settings)
            config.trainer.v1.trainer_mode = "sync"  # verl asks for its own modes by name
            config.actor_rollout_ref.model.model_type = MODEL_TYPE
        super().__init__(config)

    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict,
        logging_prefix: str = "global_seqlen",
        **kwargs: object,
    ) -> KVBatchMeta:
        """verl's balancing, after which whole prompts move; rollouts of a prompt are adjacent."""
        batch = super()._balance_batch(batch, metrics, logging_prefix, **kwargs)
        batch.reorder(sorted(range(len(batch)), key=batch.keys.__getitem__))
        prompts = prompts_of(batch)
        sizes = set(Counter(prompts).values())
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        n = self.config.actor_rollout_ref.rollout.n
        if sizes != {n} or len(prompts) // n % ranks:
            raise ValueError(
                "SHEAR needs all rollouts of a prompt on one rank, but a step has "
                f"{len(set(prompts))} prompts of {sorted(sizes)} rollouts on {ranks} ranks; see "
                "verl's log for rollouts that failed"
            )
        lengths = [tag["seq_len"] for tag in batch.tags]
        partitions = get_group_balanced_partitions(lengths, prompts, ranks)
        batch.reorder([i for partition in partitions for i in partition])
        metrics.update(log_seqlen_unbalance(lengths, partitions, logging_prefix))
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """verl's scoring, whose pass also leaves the weights.

        Where groups fit into a micro-batch, they are not split.
        """
        rollout = self.config.actor_rollout_ref.rollout
        extra = dict(shear=OmegaConf.to_container(self.config.trainer.v1.shear))
        tokens: Counter[str] = Counter()
        for prompt, tag in zip(prompts_of(batch), batch.tags, strict=True):
            tokens[prompt] += tag["seq_len"]
        if (
            rollout.log_prob_use_dynamic_bsz
            and max(tokens.values()) <= rollout.log_prob_max_token_len_per_gpu
        ):
            extra["force_group_size"] = rollout.n
        batch.extra_info.update(extra)
        scored = super()._compute_old_log_prob(batch, metrics)
        for name in extra:  # further passes are verl's
            batch.extra_info.pop(name, None)
            scored.extra_info.pop(name, None)
        return scored

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """verl's advantages, times omega."""
        batch = super()._compute_advantage(batch, metrics)
        data = tq.kv_batch_get(
            keys=batch.keys,
            partition_id=batch.partition_id,
            select_fields=["advantages", "shear_weights", "response_mask"],
        )
        advantages = data["advantages"].values()  # (N,), all rollouts end to end
        omega = data["shear_weights"].values()  # (N,)
        counts = data["response_mask"].values().bool() & (advantages != 0)
        metrics["shear/weight"] = omega[counts].mean().item() if counts.any() else 0.0
        products = torch.nested.nested_tensor_from_jagged(
            advantages * omega, data["advantages"].offsets()
        )  # Alg. 1 line 18
        fields = TensorDict({"advantages": products}, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def prompts_of(batch: KVBatchMeta) -> list[str]:
    """The uid of each rollout's prompt; a key is UID_SESSION_OUTPUT."""
    return [key.rsplit("_", 2)[0] for key in batch.keys]


def refuse(config: DictConfig) -> None:
    """Raises ValueError where weights cannot be made, or would be lost."""
    estimator = config.algorithm.adv_estimator
    actor = config.actor_rollout_ref.actor
    if estimator != AdvantageEstimator.GRPO:
        raise ValueError(
            f"algorithm.adv_estimator={estimator}: SHEAR multiplies GRPO's advantages; give grpo"
        )
    if config.algorithm.rollout_correction.bypass_mode:
        raise ValueError(
            "algorithm.rollout_correction.bypass_mode=true skips the pass that has the states; "
            "give false"
        )
    if actor.policy_loss.loss_mode == "geo_mean":
        raise ValueError(
            "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean averages a rollout's "
            "advantages and discards their credit; give vanilla"
        )
    batch = config.data.train_batch_size
    mini_batch = actor.ppo_mini_batch_size
    n = config.actor_rollout_ref.rollout.n
    split = max(
        actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size
    )
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node // split
    if batch % ranks or batch % mini_batch or mini_batch * n % ranks:
        raise ValueError(
            f"data.train_batch_size={batch} must be a multiple of the {ranks} data-parallel ranks "
            f"and of actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}, and that times "
            f"actor_rollout_ref.rollout.n={n} a multiple of the ranks"
        )
