"""The gradient test: what a credit rule does to the policy gradient, before training.

    python -m lab.studies.gradients                           # shear, the embedded task
    python -m lab.studies.gradients --model runs/NAME/model --arms grpo shear oracle
    python -m lab.studies.gradients --model PATH --data problems.jsonl --arms grpo shear \
        "punish less: scaled --method-option negative=.12"
    python -m lab.studies.gradients --model PATH --rollouts solutions.jsonl --layers 4
    torchrun --nproc_per_node 8 -m lab.studies.gradients --model PATH ... # batches shared to ranks

An arm is written as in `lab.studies.compare`, and all arms see the same batches. A batch is one
sampling phase: `--prompts-per-step` problems with `--rollouts-per-prompt` rollouts each. An arm's
gradient of it is that of the first update, where policy and sampler are one: the mean over the
tokens of the token advantage times the gradient of log pi. The reference is the mean gradient of
other batches with leave-one-out advantages, r_i minus the mean of the group's other rewards. It
estimates the gradient of the expected reward without bias. On the tasks of `lab.tools.noise` it is
the gradient of the chance of a right answer, which is known there.

A large model's rollouts cost more than their gradients. A line of `--rollouts` is {"problem",
"solution", "label"}, as in `lab.studies.diagnose`. A batch is then one group of right and wrong
solutions: the first ones are the reference's. (Other groups have no gradient.) With `--layers N`
gradients are those of the parameters of the last N layers.

The table has for each arm:
    cos         mean cosine of one batch's gradient with the reference; noise lowers all alike
    D           cos minus that of `grpo`, paired by batch
    half        half the width of D's 90% interval (Student's t), for the noise of the batches and
                of the reference (jackknife)
    adam 1      D of AdamW's step: the cosine of its first step with the reference less that of
                `grpo`. It is what the objective gains per length of the step. Each arm has moments
                of its own
    adam 4, 10  the same for the fourth and the tenth step, of as many batches in a row; the policy
                stays as it is. "-" where gradients are projected, or fewer than two such rows fit
                into `--batches`
    snr         |mean|^2 over the variance of one batch's gradient, both without bias; negative
                where noise hides the mean
    direction   cosine of the expected gradients of the arm and of `grpo`, from products of
                different batches, so that noise cancels: 1 means no bias; "-" where noise hides
                one of them
    rollouts    how many times GRPO's rollouts the arm needs for GRPO's snr; "-" where noise hides
                the arm's signal, so that no number can be told

Gradients of more than `--numbers` parameters are projected to as many numbers at random: each
parameter is added, with a random sign, to one of them. Dot products keep their mean, and cosines
change by about 1 / sqrt(numbers). A row per arm goes to `--rows`, the cosines of each batch to the
file ending in .batches.jsonl as soon as they are known.

Left out: a policy that moves; off-policy updates; arms that train an adapter; FSDP: each rank
holds the whole model.
"""

import copy
import math
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from base.errors import BadInput
from lab.studies.flags import parse_study

COLUMNS = {"cos": ".3f", "D": "+.3f", "half": ".3f"}  # of the table, with their formats
COLUMNS |= {"adam 1": "+.3f", "adam 4": "+.3f", "adam 10": "+.3f"}
COLUMNS |= {"snr": ".3f", "direction": ".3f", "rollouts": ".1f"}
ADAM_STEPS = 1, 4, 10  # after so many batches AdamW's step is compared
ARMS_HELP = 'Arms beside grpo: a method, or "NAME: METHOD FLAGS".'


@dataclass(frozen=True)
class Gradients:
    """Compare credit rules by their policy gradients, before training.

    Flags of train.py can be added.
    """

    arms: Annotated[tuple[str, ...], tyro.conf.arg(help=ARMS_HELP)] = ("shear",)
    batches: int = 20
    """Batches that every arm's gradient is taken of."""
    reference: int = 32
    """Other batches, for the reference."""
    rollouts: str | None = None
    """JSON lines of labelled solutions, which are read instead of samples."""
    layers: int | None = None
    """Last layers that gradients are taken of; all parameters if not given."""
    numbers: int = 2**20
    """Numbers kept of each gradient."""
    rows: Path = Path("runs/gradients.jsonl")
    """File that the rows are added to."""


if __name__ == "__main__":
    parse_study(Gradients)  # --help and wrong flags end here: the imports below take seconds

import torch
from torch import Tensor
from tqdm import tqdm

from base import files
from base.config import Config, Credit, Shear
from credit.batch import Batch, Context
from credit.rules import assign_credit, with_options
from grpo import Policy, cat_padded
from harness import fsdp, log
from harness.command import run_command
from harness.fsdp import Ranks
from harness.models import round_weights
from harness.run import Loaded, load_run, prepare_rule, seed_of
from harness.run import sample as draw_rollouts
from lab.studies.compare import allowed_arms, name_of, settings_of
from lab.studies.needs import graded, settings_of_run, teach
from lab.studies.prefixes import as_batch, context_at_start, load_with_solutions
from lab.studies.stats import cosine_of_means, cosines, gain_of_cosine, signal_to_noise
from lab.tools import noise
from lab.tools.moments import above_others


@run_command
def main(argv: list[str] | None = None) -> None:
    """Take the gradients, write a row per arm and print the table."""
    flags, others = parse_study(Gradients, argv)
    if flags.rollouts:
        others = [*others, "--task", "math"]
    config = settings_of_run(others)
    for name in ("batches", "reference"):
        if getattr(flags, name) < 2:
            raise BadInput(f"--{name} {getattr(flags, name)}: a variance needs two; raise it")
    settings = arms_of_credit(flags.arms, others, config)
    flags.rows.parent.mkdir(parents=True, exist_ok=True)
    ranks = fsdp.join(config.device, config.threads)
    run, batch_of = read(flags, config, ranks) if flags.rollouts else sample(config, ranks)
    run.context = context_at_start(run)
    if flags.layers:
        hold_all_but(flags.layers, run.context.policy)
    arms = prepared(run, settings)
    about = {
        "task": config.task,
        "toy_lines": config.toy_lines,
        "model": config.model,
        "seed": config.seed,
        "generate_batch": config.generate_batch,
    }
    references = take_references(run, batch_of, flags)
    gradients = take_gradients(run, batch_of, arms, references, flags, about)
    if ranks.main:
        rows = arm_rows(list(arms), references, gradients, is_whole(run, references))
        files.append_rows(flags.rows, [about | row for row in rows])
        print("\n".join(log.markdown(list(map(table_line, rows)))))


def sample(config: Config, ranks: Ranks) -> tuple[Loaded, Callable[[int], Batch]]:
    """The run before training, and the batch of each sampling phase; raises BadInput."""
    run = load_run(config, ranks)
    refuse_adapter(run)
    if ranks.main:
        print("\n".join(run.notes), flush=True)
    teach(run)
    round_weights(run.context.policy.model, getattr(torch, config.dtype))
    return run, partial(sample_batch, run)


def read(flags: Gradients, config: Config, ranks: Ranks) -> tuple[Loaded, Callable[[int], Batch]]:
    """A run with the model, and the mixed groups of `--rollouts` as batches; raises BadInput."""
    assert flags.rollouts
    run, groups = load_with_solutions(flags.rollouts, config, ranks)
    refuse_adapter(run)
    batches = [as_batch(group, ranks.device) for group in groups if group.mixed]
    needed = flags.reference + flags.batches
    if len(batches) < needed:
        raise BadInput(
            f"--rollouts {flags.rollouts}: {len(batches)} groups have right and wrong solutions, "
            f"and --reference and --batches take {needed}; lower them"
        )
    return run, batches.__getitem__


def refuse_adapter(run: Loaded) -> None:
    """Raise BadInput if a part of the run would train an adapter in place of the model."""
    if run.hooks.adapt:
        raise BadInput(f"--use {' '.join(run.config.use)}: one trains an adapter; leave it out")


def hold_all_but(count: int, policy: Policy) -> None:
    """Leave gradients to the last layers; embedding, head and the final norm are held, too."""
    policy.requires_grad_(False)
    layers = policy.model.base_model.get_submodule("layers")
    for layer in list(layers.children())[-count:]:
        layer.requires_grad_(True)


def arms_of_credit(names: Sequence[str], others: list[str], config: Config) -> dict[str, Config]:
    """The settings of arms, which share a run's batches: other flags than credit's are BadInput."""
    arms = {}
    for arm in allowed_arms(names, others):
        arms[arm] = settings_of(arm, others)
        if not differs_in_credit_alone(arms[arm], config):
            raise BadInput(f"--arms {arm}: may have flags of credit alone; leave out the others")
    return arms


def differs_in_credit_alone(settings: Config, config: Config) -> bool:
    """Whether an arm's settings are the run's but for those of credit and of SHEAR."""
    others = {field.name for field in fields(Config)}
    others -= {field.name for part in (Credit, Shear) for field in fields(part)}
    return all(getattr(settings, name) == getattr(config, name) for name in others)


class Arm(NamedTuple):
    """A credit rule with its settings, and what it may use."""

    settings: Config
    context: Context


def prepared(run: Loaded, settings: dict[str, Config]) -> dict[str, Arm]:
    """The arms of these settings, whose rules have loaded what they need; raises BadInput."""
    arms = {}
    for name, own in settings.items():
        of_arm = copy.copy(run)
        of_arm.config = own
        of_arm.context = replace(run.context, shear=own, kept={})
        with tempfile.TemporaryDirectory() as folder:
            prepare_rule(of_arm, Path(fsdp.from_main(folder, run.ranks)))
            fsdp.gather(None, run.ranks)  # until all ranks have read it
        arms[name] = Arm(own, of_arm.context)
    return arms


# ---- gradients -----------------------------------------------------------------------------------


def take_references(run: Loaded, batch_of: Callable[[int], Batch], flags: Gradients) -> Tensor:
    """The gradients (M, K) of the reference's batches, with leave-one-out advantages."""
    own = fsdp.share(list(range(flags.reference)), run.ranks)
    taken = []
    began = time.perf_counter()
    for number in tqdm(own, "reference", leave=False, disable=None):
        batch = batch_of(number)
        if run.config.task in noise.CELLS:
            batch, credit = noise.exact_credit(batch, run.context)
        else:
            credit = leave_one_out(batch)  # (B, T)
        (gradient,) = gradients_of(run, batch, credit[None], flags.numbers)
        taken.append(gradient.cpu())  # where the table is made
        if len(taken) == 1 and run.ranks.main:
            left = log.duration(len(own) * (time.perf_counter() - began))
            print(f"the reference takes about {left}; {flags.batches} batches of each arm follow")
    return torch.stack(fsdp.gather_items(taken, run.ranks))


def is_whole(run: Loaded, gradients: Tensor) -> bool:
    """Whether gradients (M, K) have a number for each trained parameter, and are not projected."""
    trained = filter(attrgetter("requires_grad"), run.context.policy.parameters())
    return sum(parameter.numel() for parameter in trained) == gradients.shape[1]


def take_gradients(
    run: Loaded,
    batch_of: Callable[[int], Batch],
    arms: dict[str, Arm],
    references: Tensor,
    flags: Gradients,
    about: dict,
) -> Tensor:
    """Each arm's gradient of every batch, (arms, N, K); the cosines are written at once."""
    own = fsdp.share(list(range(flags.batches)), run.ranks)
    path = flags.rows.with_suffix(".batches.jsonl")
    taken = []
    for number in tqdm(own, "batches", leave=False, disable=None):
        batch = batch_of(flags.reference + number)
        credit = credit_by_arm(batch, arms.values())  # (arms, B, T)
        gradients = gradients_of(run, batch, credit, flags.numbers).cpu()  # (arms, K)
        taken.append(gradients)
        rows = []
        for arm, cosine in zip(arms, cosines(gradients, references.mean(0)), strict=True):
            rows.append(about | {"batch": number, "arm": name_of(arm), "cos": cosine.item()})
        files.append_rows(path, rows)
    return torch.stack(fsdp.gather_items(taken, run.ranks), 1)


def sample_batch(run: Loaded, index: int) -> Batch:
    """The batch of a sampling phase; seed, `index` and `--generate-batch` decide the samples."""
    torch.manual_seed(seed_of(run.config.seed, index))
    task = run.context.task
    problems = task.draw(index, run.config.prompts_per_step, run.config.seed)
    rollouts = draw_rollouts(run, problems, run.config.rollouts_per_prompt, run.config.temperature)
    return graded(rollouts, run.hooks.verdicts(task, problems, rollouts), problems)


def leave_one_out(batch: Batch) -> Tensor:
    """Token advantages (B, T) of r_i minus the mean of the group's other rewards."""
    gaps = above_others(batch.rewards, batch.group_size)  # (B,)
    return gaps[:, None] * batch.mask


def credit_by_arm(batch: Batch, arms: Collection[Arm]) -> Tensor:
    """Each arm's token advantages (arms, B, T), whose random draws do not depend on the others."""
    first = next(iter(arms)).context
    credit = []
    for block in batch.blocks():
        block.log_probs, block.entropies, block.hidden = first.score(block.rollouts)
        for settings, context in arms:
            with torch.random.fork_rng():
                credit.append(assign_credit(with_options(settings), block, context))
    return torch.stack([cat_padded(credit[arm :: len(arms)]) for arm in range(len(arms))])


def gradients_of(run: Loaded, batch: Batch, credit: Tensor, count: int) -> Tensor:
    """The gradients of the batch's objective by each credit (arms, B, T): `count` numbers of each.

    Raises BadInput where no group has right and wrong rollouts.
    """
    policy = run.context.policy
    weights = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    learning = credit.any(0).any(1).nonzero().flatten().tolist()  # rows with credit
    if not learning:
        raise BadInput("a batch has no group of right and wrong rollouts; raise --prompts-per-step")
    sums = torch.zeros(())
    limit = run.config.micro_tokens
    for rows in policy.layout.pack(learning, batch.rollouts.lengths, limit):
        micro_batch = batch.rollouts.take(rows)
        log_probs = policy(micro_batch, run.context.temperature).log_probs  # (b, t)
        parts = []
        for token_advantages in credit[:, rows, : log_probs.shape[1]]:  # (b, t)
            objective = (token_advantages * log_probs).sum() / batch.mask.sum()
            gradient = torch.autograd.grad(objective, weights, retain_graph=True)
            parts.append(project(gradient, count))
        sums = sums.to(log_probs.device) + torch.stack(parts)  # (arms, K)
    return sums


def project(gradient: Sequence[Tensor], count: int) -> Tensor:
    """A gradient (P,) itself, or its random projection to (count,) where P is larger.

    Every entry is added with a random sign to a random one of the `count` numbers (a count sketch).
    The same entries always go to the same numbers.
    """
    whole = torch.cat([part.flatten().float() for part in gradient])  # (P,)
    if len(whole) <= count:
        return whole
    generator = torch.Generator(whole.device).manual_seed(0)
    places = torch.randint(2 * count, whole.shape, generator=generator, device=whole.device)  # (P,)
    sums = whole.new_zeros(2 * count).index_add_(0, places, whole)
    return sums[:count] - sums[count:]  # a place has a number and a sign


# ---- what is said of them ------------------------------------------------------------------------


def arm_rows(
    arms: list[str], references: Tensor, gradients: Tensor, whole: bool
) -> list[dict[str, Any]]:
    """A row per arm, the largest D first, from gradients (M, K) and (arms, N, K).

    The first arm is `grpo`. AdamW's steps are NaN unless the gradients are `whole`.
    """
    usual = gradients[0]
    rows = []
    for arm, batches in zip(arms, gradients, strict=True):
        difference, half = gain_of_cosine(batches, usual, references)
        row = {
            "arm": name_of(arm),
            "flags": arm,
            "cos": cosines(batches, references.mean(0)).mean().item(),
            "D": difference,
            "half": half,
            "snr": signal_to_noise(batches),
            "direction": cosine_of_means(batches, usual),
            "rollouts": signal_to_noise(usual) / signal_to_noise(batches),
        }
        for count in ADAM_STEPS:
            gain = math.nan, math.nan
            if whole and len(batches) >= 2 * count:
                ours = adam_steps(batches, count)  # (N / count, K)
                gain = gain_of_cosine(ours, adam_steps(usual, count), references)
            row[f"adam {count}"], row[f"half {count}"] = gain
        rows.append(row)
    return sorted(rows, key=lambda row: -row["D"])


def adam_steps(gradients: Tensor, count: int) -> Tensor:
    """AdamW's last step of each `count` gradients in a row: (N, K) -> (N // count, K), up to lr.

    The moments begin at 0 for each row, and have PyTorch's default betas and eps.
    """
    betas = 0.9, 0.999
    rows = len(gradients) // count
    mean = gradients.new_zeros(rows, gradients.shape[1])
    square = torch.zeros_like(mean)
    # (count, rows, K)
    for gradient in gradients[: rows * count].unflatten(0, (rows, count)).transpose(0, 1):
        mean.lerp_(gradient, 1 - betas[0])
        square.lerp_(gradient.square(), 1 - betas[1])
    unbiased = (square / (1 - betas[1] ** count)).sqrt()
    return mean / (1 - betas[0] ** count) / (unbiased + 1e-8)


def table_line(row: dict) -> dict[str, str]:
    """A row as it is printed."""
    cells = {name: format(row[name], form) for name, form in COLUMNS.items()}
    if row["snr"] <= 0 or row["rollouts"] <= 0:
        cells["rollouts"] = "-"
    halves = {"D": "half"} | {f"adam {count}": f"half {count}" for count in ADAM_STEPS}
    for name, half in halves.items():
        if name != "D":
            cells[name] += f" \u00b1 {row[half]:.3f}"
        if abs(row[name]) <= row[half] > 0:
            cells[name] += " not told from 0"
    cells |= {name: "-" for name in COLUMNS if math.isnan(row[name])}
    return {"arm": row["arm"]} | cells


if __name__ == "__main__":
    main()
