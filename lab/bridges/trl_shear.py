"""SHEAR in TRL's GRPOTrainer.

    ShearGRPOTrainer(model, math_reward, GRPOConfig(...), train_dataset, window=100, stride=25)

Everything that TRL scales by (DeepSpeed, FSDP, vLLM, many nodes) is left to TRL. TRL's loss takes
token advantages (B, T), but nothing in TRL makes them. So three methods are wrapped, none is
copied:

  1. `_calculate_rewards` returns the rewards of all processes. The first reward function gives the
     verdict: a rollout is right above `threshold`. Further functions only shape the reward.
  2. `_get_per_token_logps_and_entropies` is TRL's scoring forward, for FSDP, ZeRO-3, autocast and
     PEFT alike. A hook on the base model keeps the last-layer states. Where TRL scores its rollouts
     anyway (vLLM with importance correction, several updates per generation), this costs no further
     pass; elsewhere it costs one.
  3. `_generate_and_score_completions` multiplies TRL's advantages (B,) by omega (B, T); not in
     evaluation.

The rollouts of a group are adjacent in the global order of rollouts. A process that holds whole
groups needs no other one. Where groups are split over processes, states are gathered, one rollout
of each process at a time.

A rollout without a verdict (None), and a truncated one that TRL masks, is on neither side; its
weights are 1.

Refused: images, context and sequence parallelism, and one importance ratio per sequence.
"""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

try:
    from trl import GRPOTrainer
    from trl.models.utils import disable_gradient_checkpointing
except ImportError as error:
    raise ImportError("ShearGRPOTrainer needs TRL: pip install 'trl >= 1.16, < 2'") from error
from accelerate.utils import gather, pad_across_processes

from lab.bridges.shear_credit import token_advantages
from lab.bridges.states import keep_states
from shear import EPS, STRIDE, WINDOW, span_bounds

Theirs = Any  # an argument of TRL's own methods, which is handed through; TRL gives it no type


class ShearGRPOTrainer(GRPOTrainer):
    """TRL's trainer, with SHEAR's token weights.

    `window` and `stride` are in tokens, `eps` in units of nbar. A rollout is right if its first
    reward is above `threshold`. `mean1` divides the weights of a group by their mean. Raises
    ValueError for what it refuses.
    """

    _states: list[Tensor]  # (b, T, d) each, of this process's rollouts

    def __init__(
        self,
        *args: Theirs,
        window: int = WINDOW,
        stride: int = STRIDE,
        eps: float = EPS,
        threshold: float = 0.5,
        mean1: bool = False,
        **kwargs: Theirs,
    ) -> None:
        span_bounds(0, window, stride)  # raises for these
        self.window = window
        self.threshold = threshold
        self._weights_of_groups = partial(
            token_advantages, window=window, stride=stride, eps=eps, mean1=mean1
        )
        self._keep_next_pass = False
        self._warned = False
        super().__init__(*args, **kwargs)
        # With one ratio per sequence, the gradient sees only the sum of a rollout's weights.
        if self.importance_sampling_level != "token":
            raise ValueError(
                f"importance_sampling_level={self.importance_sampling_level!r} gives all tokens of "
                "a rollout one ratio and discards their credit; use 'token'"
            )
        parallelism = self.accelerator.parallelism_config
        if parallelism and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ValueError(
                "parallelism_config: cp_size and sp_size must be 1; SHEAR compares whole rollouts"
            )
        if self._is_vlm:
            raise ValueError(
                "model: SHEAR's scoring pass takes no images; give a model of text alone"
            )

    def _calculate_rewards(self, *args: Theirs, **kwargs: Theirs) -> Tensor:
        """TRL's rewards (rollouts of all processes, reward functions); keeps the verdicts."""
        rewards = super()._calculate_rewards(*args, **kwargs)
        self._verdicts = rewards[:, 0]  # NaN where the function returned None
        return rewards

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Theirs,
        **kwargs: Theirs,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL's scoring; the policy's first pass after sampling leaves its states.

        They are (b, T, d), chunk by chunk, on the CPU.
        """
        forward = super()._get_per_token_logps_and_entropies
        inputs = (model, input_ids, attention_mask, logits_to_keep, *args)
        if not self._keep_next_pass or model is not self.model:
            return forward(*inputs, **kwargs)
        self._keep_next_pass = False
        self._states = []

        def keep(states: Tensor) -> None:
            self._states.append(states[:, -logits_to_keep:].detach().cpu())

        with keep_states(self.accelerator.unwrap_model(model), keep):
            return forward(*inputs, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        """TRL's batch, in training with advantages (B, T)."""
        model: Theirs = self.model
        self._keep_next_pass = model.training
        batch = super()._generate_and_score_completions(inputs)
        if not model.training:
            return batch
        # A pass over the rollouts, unless the policy has scored them (PEFT's reference may have).
        if "old_per_token_logps" not in batch:
            self._keep_next_pass = True
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            width = batch["completion_ids"].shape[1]
            checkpointing: Theirs = self.args.gradient_checkpointing_kwargs
            with torch.no_grad(), disable_gradient_checkpointing(model, checkpointing):
                self._get_per_token_logps_and_entropies(
                    model, ids, attended, width, self.args.per_device_train_batch_size
                )
        mask = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()  # (B, T)
        length = mask.sum(1).median()
        if not self.state.global_step and length <= self.window:
            warnings.warn(
                f"the median response, {length} tokens, is one span, whose weights are equal; "
                f"lower window {self.window}",
                stacklevel=2,
            )
        if not self._warned and not (self._verdicts > self.threshold).any():
            self._warned = True
            warnings.warn(
                f"no rollout is right: no first reward is above threshold={self.threshold}, so all "
                "weights are 1, as in GRPO; lower threshold if right rollouts get less",
                stacklevel=2,
            )
        omega = self._token_weights(mask)
        self._states = []
        counts = mask & (batch["advantages"] != 0)[:, None]  # (B, T)
        sums = gather(torch.stack([omega[counts].sum(), counts.sum()])[None]).sum(0)
        self._metrics["train"]["shear/weight"].append((sums[0] / sums[1].clamp_min(1)).item())
        batch["advantages"] = batch["advantages"][:, None] * omega  # Alg. 1 line 18
        # TRL has logged A. Its log holds one generation, which the means of A omega displace.
        means = (batch["advantages"] * mask).sum(1) / mask.sum(1).clamp_min(1)  # (B,)
        logged: Theirs = self._logs["advantages"]
        logged.extend(gather(means).tolist())
        return batch

    def _token_weights(self, mask: Tensor) -> Tensor:
        """omega (B, T) of this process's rollouts, from the whole groups that they belong to."""
        size = self.num_generations  # G
        assert size  # GRPOConfig sets it
        rows, width = mask.shape
        begin = self.accelerator.process_index * rows  # index of this process's first rollout
        start = begin // size * size  # where its first group starts
        end = -(-(begin + rows) // size) * size
        states = torch.cat(self._states)  # (B, T, d), on the CPU
        masks = mask
        if rows % size:  # the same on all processes, so all gather or none does
            states = gather_rows(states, start, end, mask.device)
            masks = gather_rows(mask, start, end, mask.device).to(mask.device)
        verdicts = self._verdicts[start:end]  # (B,)
        inside = masks & ~verdicts.isnan()[:, None]  # (B, T), on either side
        ones = torch.ones_like(verdicts)  # in place of A
        omega = self._weights_of_groups(
            ones, states, inside, verdicts > self.threshold, group_size=size
        )
        return torch.where(inside, omega, 1.0)[begin - start :][:rows, :width]


def gather_rows(local: Tensor, start: int, end: int, device: torch.device) -> Tensor:
    """Rows [start, end) in the global order, on the CPU; `local` has this process's rows.

    One row of each process travels at a time, padded to the longest.
    """
    rows = {}
    for i in range(len(local)):
        row = pad_across_processes(local[i : i + 1].to(device), dim=1)
        for process, values in enumerate(gather(row)):
            index = process * len(local) + i
            if start <= index < end:
                rows[index] = values.cpu()
    return torch.stack([rows[index] for index in range(start, end)])
