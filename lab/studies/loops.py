"""A training step of this project beside one of TRL's, phase by phase, by turns in one process.

    python -m lab.studies.loops --task embedded --model runs/NAME/start                # SHEAR in both
    python -m lab.studies.loops --task embedded --model runs/NAME/start --method grpo  # GRPO in both
    python -m lab.studies.loops --model PATH --data problems.jsonl                     # other problems

Other flags are those of train.py.

Both train a copy of one model on the same prompts in the same order, with as many rollouts,
response tokens and updates at most, one grader and one precision. An update of TRL's is one forward
and backward of all its rollouts, padded to the longest of them; ours are packed, in passes of
`--micro-tokens`. TRL's takes SHEAR's eps in units of nbar alone. The first turn counts for neither.
Ratios are TRL's seconds over ours in the same turn, so that a drift of the machine affects both:
median (lowest-highest).

Left out: several processes, and vLLM. What is timed is `train.train_step` and, between its
generations, `ShearGRPOTrainer`, or TRL's `GRPOTrainer` for `--method grpo`.
"""

import sys
from dataclasses import dataclass
from typing import Annotated

from harness.config import parse_study
from tasks.settings import number


@dataclass(frozen=True)
class Loops:
    """Seconds of a training step here and in TRL, phase by phase.

    Other flags are those of train.py; --model, --method shear or grpo among them.
    """

    turns: Annotated[int, number(int, 2)] = 21
    """Generations of each, the first not counted."""


if __name__ == "__main__":
    parse_study(Loops)  # --help and wrong flags end here: the imports below take seconds

import copy
import datetime
import json
import tempfile
import warnings
from collections.abc import Callable
from functools import partial

import pandas as pd
import torch
import trl
from datasets import Dataset
from huggingface_hub import constants
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

from harness import fsdp, tables
from harness.command import resolve, run_command
from harness.config import parse_train, refuse_flags
from harness.load import load_run
from harness.log import Clock
from harness.run import Run
from lab.bridges.trl_rewards import scores, without_bos
from lab.bridges.trl_shear import ShearGRPOTrainer
from tasks.errors import BadInput
from train import train_step

PHASES = {  # TRL's methods: what has taken the time until each begins, and until it ends
    "_generate_single_turn": ("update", "generate"),
    "_calculate_rewards": ("score", "grade"),
    "_token_weights": ("score", "weights"),
}
NAMES = ["generate", "grade", "score", "weights", "update"]
constants.HF_HUB_DISABLE_TELEMETRY = True  # a trainer of TRL's tells the hub that it was made


@run_command(memory="lower --micro-tokens or --prompts-per-update", interrupted="interrupted")
def main(argv: list[str] | None = None) -> None:
    """Take the turns and print a table."""
    flags, others = parse_study(Loops, argv)
    config = parse_train(others)
    untimed = "steps ranks dynamic_sampling lora_rank eps_unit"
    refuse_flags(config.given, untimed, "is not timed here")
    config = resolve(config)
    method = config.credit.method
    if not config.model or method not in ("shear", "grpo"):
        raise BadInput(f"--model {config.model} --method {method}: give a model, and shear or grpo")
    # transformers says that TRL names a flag as it was named before
    warnings.simplefilter("ignore")
    ranks = fsdp.join(config.machine.device, config.machine.threads)
    run = load_run(config, ranks)
    model = copy.deepcopy(run.context.policy.model)  # for TRL; `shard` may wrap the layers of ours
    fsdp.shard(run)
    versions = f"trl {trl.__version__}, torch {torch.__version__}"
    print(f"{versions}, {torch.get_num_threads()} CPU threads, {datetime.date.today()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl_trainer(run, model, flags.turns, folder)
        turns = Turns(run, trainer)
        trainer.train()
    print("\n".join(phase_table(turns.ours[1:], turns.theirs[1:])))


def trl_trainer(run: Run, model: PreTrainedModel, turns: int, folder: str) -> GRPOTrainer:
    """TRL's trainer of a model, with the run's recipe."""
    task = run.context.task
    sampling = run.config.sampling
    optimisation = run.config.optimisation
    problems = []
    for turn in range(turns):
        problems += task.draw(turn, sampling.prompts_per_step, run.config.seed)
    prompts = without_bos(run.context.tokenizer, map(task.prompt, problems))
    # text: a table has one type per column
    references = [json.dumps(problem[task.reference]) for problem in problems]
    dataset = Dataset.from_dict({"prompt": prompts, "reference": references})

    def reward(
        completions: list[str], reference: list[str], **columns: object
    ) -> list[float | None]:
        return scores(task.grade, completions, list(map(json.loads, reference)))

    updates = sampling.prompts_per_step // optimisation.prompts_per_update  # of a generation
    grpo_config = GRPOConfig(
        folder,
        max_steps=turns * updates,
        steps_per_generation=updates,
        per_device_train_batch_size=optimisation.prompts_per_update * sampling.rollouts_per_prompt,
        num_generations=sampling.rollouts_per_prompt,
        max_completion_length=sampling.max_tokens,
        temperature=sampling.temperature,
        learning_rate=optimisation.lr,
        lr_scheduler_type="constant",
        max_grad_norm=optimisation.max_grad_norm,
        epsilon=optimisation.clip_low,
        epsilon_high=optimisation.clip_high,
        gradient_checkpointing=run.config.machine.recompute,
        bf16=run.config.machine.dtype == "bfloat16",
        use_cpu=run.config.machine.device == "cpu",
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",  # which would clear the metrics
        disable_tqdm=True,
        seed=run.config.seed,
    )
    shear = run.config.shear
    make_trainer: Callable[..., GRPOTrainer] = GRPOTrainer
    if run.config.credit.method == "shear":
        make_trainer = partial(
            ShearGRPOTrainer, window=shear.window, stride=shear.stride, eps=shear.eps
        )
    trainer = make_trainer(
        model, reward, grpo_config, train_dataset=dataset, processing_class=run.context.tokenizer
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Turns(TrainerCallback):
    """Takes a step of ours after each of TRL's last updates of a generation.

    `ours` and `theirs` have the seconds by phase.
    """

    def __init__(self, run: Run, trainer: GRPOTrainer) -> None:
        self.run = run
        self.trainer = trainer
        self.ours: list[dict[str, float]] = []
        self.theirs: list[dict[str, float]] = []
        self.clock = Clock(run.ranks.device)
        for name, phases in PHASES.items():
            if hasattr(trainer, name):
                setattr(trainer, name, self.timed(getattr(trainer, name), phases))
        trainer.add_callback(self)

    def timed(self, method: Callable, phases: tuple[str, str]) -> Callable:
        """The same method; the time until it begins, and until it ends, is that of two phases."""

        before, during = phases

        def call(*args: object, **kwargs: object) -> object:
            self.clock.lap(before)
            result = method(*args, **kwargs)
            self.clock.lap(during)
            return result

        return call

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: object,
    ) -> None:
        """An update of TRL's is done."""
        assert isinstance(args, GRPOConfig) and args.steps_per_generation
        if state.global_step % args.steps_per_generation:
            return
        self.clock.lap("update")
        tokens = self.trainer._metrics["train"]["completions/mean_length"][-1]
        self.theirs.append(self.clock.laps | {"tokens": tokens})
        metrics, _ = train_step(self.run, len(self.ours))
        seconds = metrics["seconds"]
        self.ours.append(seconds | {"update": seconds["train"], "tokens": metrics["length"]})
        self.clock = Clock(self.run.ranks.device)


def phase_table(ours: list[dict], theirs: list[dict]) -> list[str]:
    """A table with a row per phase, one for their sum, and one for the responses' mean length.

    The length is shown because the work grows with it.
    """
    here = seconds_by_phase(ours)
    there = seconds_by_phase(theirs)
    rows = []
    for name in here:
        row = {"": name, "ours": f"{here[name].median():.3g}", "TRL": f"{there[name].median():.3g}"}
        if (here[name] * there[name]).all():  # both have it
            ratios = there[name] / here[name]
            row["TRL / ours"] = f"{ratios.median():.2f} ({ratios.min():.2f}-{ratios.max():.2f})"
        rows.append(row)
    return tables.markdown(rows)


def seconds_by_phase(turns: list[dict]) -> pd.DataFrame:
    """A row per turn: the seconds of each phase, their sum, and the tokens; 0 for what is not."""
    table = pd.DataFrame(turns, columns=[*NAMES, "a step", "tokens"], dtype=float).fillna(0.0)
    table["a step"] = table[NAMES].sum(axis=1)
    return table


if __name__ == "__main__":
    sys.exit(main())
