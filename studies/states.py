"""Hidden states of rollout groups to measure: made at random, of the embedded model, or from a file.

    synthetic(size, tokens, width, device)   a random walk for each rollout
    embedded_states(path, device)            what a training step of the embedded model has
    real(path, device)                       the groups of a safetensors file, checked

Each gives States: rollouts of a group are adjacent, and their states padded.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from credit.batch import Batch
from credit.shear_settings import Settings
from fast.packing import packing_of
from grpo import Policy, spread
from harness.launch import parse_args
from harness.parallel import Ranks
from harness.prepare import make_start, set_up
from studies import prefixes
from tasks.problems import BadInput
from tasks.rows import regular

SEED = 0


class States(NamedTuple):
    """Rollout groups that are measured together."""

    name: str
    hidden: Tensor  # (B, T, d)
    mask: Tensor  # (B, T) bool
    correct: Tensor  # (B,) bool
    group_size: int  # G; rollouts of a group are adjacent
    window: int = Settings.window
    stride: int = Settings.stride


def synthetic(size: int, tokens: int, width: int, device: torch.device) -> States:
    """Random walks of norm sqrt(d), half of them right; bfloat16 on a GPU, as a model's states are there."""
    generator = torch.Generator().manual_seed(SEED)
    hidden = torch.randn(size, tokens, width, generator=generator).mul_(0.3).cumsum_(1)  # (G, T, d)
    hidden += torch.randn(size, 1, width, generator=generator)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.nn.functional.rms_norm(hidden, (width,)).to(device, dtype)
    mask = torch.ones(size, tokens, dtype=torch.bool, device=device)  # (G, T)
    correct = torch.arange(size, device=device) % 2 == 0  # (G,)
    return States(f"random walks, G {size}, T {tokens:,}, d {width:,}", hidden, mask, correct, size)


def embedded_states(path: str | None, device: torch.device) -> States:
    """As many groups of the embedded model as a training step has, with the task's own spans; raises BadInput."""
    args = parse_args(["--task", "embedded"] + (["--model", path] if path else []))
    args.device = device.type
    ranks = Ranks(0, 1, device)
    ready = set_up(args, ranks)
    task, tokenizer = ready.task, ready.tokenizer
    if not path:
        print(f"warming up the embedded model, {args.warmup_steps} steps", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            make_start(ready.model, tokenizer, task, args, Path(folder), ranks)
    model = ready.model.eval().to(device)
    torch.manual_seed(SEED)
    problems = task.heldout[: args.prompts_per_step]
    sampled = [prefixes.sampled(args, task, model, tokenizer, problem) for problem in problems]
    if not any(group.mixed for group in sampled):
        raise BadInput(f"--model {path}: none of its groups holds right and wrong rollouts; give another")
    policy = Policy(model, **packing_of(model))
    batch = Batch.cat([prefixes.scored(group, policy, task, tokenizer, args) for group in sampled])
    mask = batch.rollouts.mask  # (B, T)
    hidden = spread(batch.hidden, mask)  # (B, T, d)
    sizes = f"a step of {len(mask)} rollouts, G {args.rollouts_per_prompt}, T {mask.shape[1]}, d {hidden.shape[-1]}"
    return States(
        f"the embedded model, {sizes}", hidden, mask, batch.correct, args.rollouts_per_prompt, args.window, args.stride
    )


def real(path: Path, device: torch.device) -> Iterator[States]:
    """The groups of --states; raises BadInput."""
    of_groups = defaultdict(lambda: ([], []))  # states (T, d) and verdicts of a group's rollouts
    try:
        with safe_open(regular(path), "pt", device=str(device)) as file:
            for name in sorted(file.keys()):
                group, _, side = name.split(".")
                rollouts, verdicts = of_groups[group]
                rollouts.append(file.get_tensor(name))
                verdicts.append({"right": True, "wrong": False}[side])
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).split("\n")[0]
        raise BadInput(f"--states {path}: {reason}; name tensors groupN.rolloutK.right or .wrong") from error
    if not of_groups:
        raise BadInput(f"--states {path}: holds no tensors; name them groupN.rolloutK.right or .wrong")
    for group, (rollouts, verdicts) in of_groups.items():
        size, right = len(verdicts), sum(verdicts)
        if not are_states(rollouts):
            wanted = "(T, d) of one width d, floats of 16 bits or more, finite, not all equal"
            raise BadInput(f"--states {path}: {group} holds something else than states {wanted}; leave it out")
        lengths = torch.tensor([len(states) for states in rollouts], device=device)  # (G,)
        if right in (0, size) or not lengths.all():
            raise BadInput(f"--states {path}: {group} holds an empty rollout, or those of one side only; leave it out")
        hidden = torch.nn.utils.rnn.pad_sequence(rollouts, batch_first=True)  # (G, T, d)
        mask = torch.arange(hidden.shape[1], device=device) < lengths[:, None]  # (G, T)
        name = f"{path.name} {group}, {right} right, {size - right} wrong, T {mask.shape[1]:,}"
        yield States(name, hidden, mask, torch.tensor(verdicts, device=device), size)


def are_states(rollouts: list[Tensor]) -> bool:
    """Whether tensors of a file are the hidden states of rollouts, and finite in float32."""
    for states in rollouts:
        is_float = states.dtype.is_floating_point and states.dtype.itemsize > 1
        if not is_float or states.ndim != 2 or not 0 < states.shape[1] == rollouts[0].shape[1]:
            return False
    states = torch.cat(rollouts).float()  # (all tokens, d)
    distinct = not len(states) or bool((states != states[0]).any())  # else GeomLoss has no scale to anneal from
    return distinct and bool(states.norm(dim=1).sum().isfinite())
