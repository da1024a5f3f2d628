"""Runs of TRL's trainer and of ours, on one process and on two."""

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from builders.rollouts import batch_of
from builders.runs import credit_by, recipe_with
from datasets import Dataset
from huggingface_hub import constants
from peft import LoraConfig
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from grpo import Policy, Rollouts, cat_padded, score
from lab.bridges import trl_shear
from lab.bridges.trl_shear import ShearGRPOTrainer
from tasks import toy

constants.HF_HUB_DISABLE_TELEMETRY = True  # a trainer of TRL's tells the hub that it was made
GROUP = 4
# Rollouts on each of two processes: whole groups of 4, or the second of three groups is split.
WHOLE = 8
SPLIT = 6
SIZES = dict(window=6, stride=3, eps=0.2)  # tokens, tokens, nbar
TOGETHER = dict(
    gradient_accumulation_steps=2,
    num_iterations=2,
    mask_truncated_completions=True,
    nones=True,
    max_steps=2,
)
LEFT_OUT = dict(nones=True, mask_truncated_completions=True)  # rollouts that are on neither side


def parity(completions: list[str], **columns) -> list[float]:
    """Right or wrong by the text alone."""
    return [1.0 if len(text) % 2 else 0.25 for text in completions]


def parity_or_none(completions: list[str], **columns) -> list[float | None]:
    """Some have no verdict."""
    return [None if len(text) % 5 == 0 else parity([text])[0] for text in completions]


def praise(completions: list[str], **columns) -> list[float | None]:
    """A second reward, the same for all, which is no verdict."""
    return [None if score is None else 1.0 for score in parity_or_none(completions)]


def tools(batch: dict) -> dict:
    """As if a tool had written every third token of TRL's batch."""
    ours = torch.arange(batch["completion_mask"].shape[1]) % 3 != 2
    return batch | {"tool_mask": ours.long().expand_as(batch["completion_mask"])}


def make_trainer(
    kind: type, rows: int = WHOLE, *, nones: bool = False, peft: bool = False, **changes
):
    """A trainer for three steps of an untrained model of the embedded task.

    `rows` is the number of rollouts per pass and process.
    """
    problems, _ = toy.make_problems(60, 0, 2, seed=0)
    usual = dict(
        output_dir=tempfile.gettempdir(),
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        per_device_train_batch_size=rows,
        num_generations=GROUP,
        max_completion_length=24,
        bf16=False,
        learning_rate=1e-3,
        max_steps=3,
    )
    config = GRPOConfig(**usual | changes)
    trainer = kind(
        toy.make_model(2, seed=1),
        [parity_or_none, praise] if nones else parity,
        config,
        Dataset.from_list([{"prompt": problem["problem"]} for problem in problems]),
        processing_class=toy.make_tokenizer(),
        peft_config=LoraConfig(r=2, init_lora_weights=False) if peft else None,
        **(SIZES if issubclass(kind, ShearGRPOTrainer) else {}),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def trained(kind: type, rows: int, case: dict) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """The whole weights after training, and the logged numbers without times.

    With ZeRO-3 rank 0 alone has the weights.
    """
    trainer = make_trainer(kind, rows, **case)
    trainer.train()
    logged = trainer.state.log_history[:-1]
    for entry in logged:
        entry.pop("step_time")
        entry.pop("shear/weight", None)
    return trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}, logged


def differences(rows: int, case: dict) -> list[str]:
    """What differs, to the bit, between TRL's trainer and ours with weights of 1."""
    weights, logged = trained(GRPOTrainer, rows, case)
    equal = patch.object(
        trl_shear, "token_advantages", lambda ones, states, mask, *_, **sizes: mask.float()
    )
    with equal:
        our_weights, our_logged = trained(ShearGRPOTrainer, rows, case)
    assert logged and any(entry["grad_norm"] > 0 for entry in logged)  # or nothing is compared
    names = [name for name in weights if not torch.equal(weights[name], our_weights[name])]
    return names + [
        f"step {i}" for i in range(len(logged)) if str(logged[i]) != str(our_logged[i])
    ]  # nan is "nan"


def first_batch(rows: int, case: dict) -> dict:
    """The batch that ours makes of the first generation for TRL's loss.

    It also has "omega" and "verdicts" of its rollouts.
    """
    batches = []

    class WithTools(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return tools(super()._generate_and_score_completions(inputs))

    class Recorded(ShearGRPOTrainer, WithTools):
        def _token_weights(self, mask):
            omega = super()._token_weights(mask)
            begin = self.accelerator.process_index * len(omega)
            batches.append({"omega": omega, "verdicts": self._verdicts[begin : begin + len(omega)]})
            return omega

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            batches[-1].update(batch)
            return batch

    make_trainer(Recorded, rows, max_steps=1, **case).train()
    return batches[0]


def trl_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """(B,), with TRL's delta of 1e-4; 0 without a verdict."""
    groups = rewards.view(-1, GROUP)
    counts = (~groups.isnan()).sum(1, keepdim=True)
    centred = groups - groups.nanmean(1, keepdim=True)
    std = (centred.square().nansum(1, keepdim=True) / (counts - 1)).sqrt()
    return (centred / (std + 1e-4)).nan_to_num(0.0).flatten()


def check_omega(batches: list[dict]) -> float:
    """The largest error of omega and of the loss's advantages.

    It is against those of `credit` on the same token ids.
    """

    def joined(name: str, left: bool = False) -> torch.Tensor:
        return cat_padded([batch[name] for batch in batches], left=left)

    verdicts = torch.cat([batch["verdicts"] for batch in batches])  # (B,)
    completions = joined("completion_mask").bool()  # (B, T)
    mask = completions & joined("tool_mask").bool()  # (B, T)
    inside = mask & ~verdicts.isnan()[:, None]
    # a truncated one, and one without a verdict
    assert (~mask).all(1).any() and verdicts.isnan().any()
    prompts = joined("prompt_ids", left=True), joined("prompt_mask", left=True).bool()
    rollouts = Rollouts(
        *prompts, joined("completion_ids"), completions, verdicts.isnan(), [""] * len(verdicts)
    )
    scored = score(
        Policy(toy.make_model(2, seed=1)), rollouts, temperature=1.0, micro_tokens=10_000
    )
    batch = batch_of(verdicts, replace(rollouts, mask=inside), GROUP)
    batch.advantages = torch.ones_like(verdicts)
    batch.hidden = scored.hidden[inside[completions]]
    expected = credit_by(recipe_with(**SIZES), batch)
    assert ((expected > 0) & (expected != 1)).any()
    omega = joined("omega")
    assert (omega[mask & ~inside] == 1).all()  # no verdict, no weight
    advantages = trl_advantages(verdicts)[:, None] * omega
    errors = [
        (omega - expected)[inside].abs().max(),
        (joined("advantages") - advantages)[mask].abs().max(),
    ]
    return max(errors).item()


def leave_batches(folder: Path) -> None:
    """What test_trl.py wants of one of two processes, which rank 0 leaves in a folder."""
    PartialState._reset_state()  # of a process that was alone
    seen = {"differences": differences(SPLIT, TOGETHER)}
    seen["batches"] = gather_object([first_batch(SPLIT, LEFT_OUT)])
    if torch.distributed.get_rank() == 0:
        torch.save(seen, folder / "seen.pt")
