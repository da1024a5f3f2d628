"""Refuse settings of `train.py` that contradict each other or would have no effect.

    check(config)    raises BadInput, as far as it shows before anything is loaded

A flag that is given has an effect, or is refused: EFFECTS has what each flag needs. The flags of
SHEAR's spans and distances are accepted with every method, because comparisons share a command
line. A value of the wrong type or out of bounds never comes here: the parser refuses it.

Left out: what depends on the model, the data or the number of ranks (`harness/load.py`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from credit.rules import find
from harness.config import TrainConfig, flag, flat
from tasks.errors import BadInput
from tasks.plug import look_up, options_of
from tasks.settings import TASKS


class Effect(NamedTuple):
    """What a flag needs to have an effect."""

    flag: str
    need: str  # ends the sentence "has an effect only with ..."
    is_met: Callable[[TrainConfig], bool]


def makes_model(config: TrainConfig) -> bool:
    """Whether the run makes its own model."""
    return TASKS[config.task].makes_model and not config.model


def writes_prompts(config: TrainConfig) -> bool:
    """Whether a prompt of the run follows --template."""
    return config.task != "embedded"


def runs_programs(config: TrainConfig) -> bool:
    """Whether programs may be graded."""
    return config.task == "code"


EFFECTS = (
    Effect("toy_lines", "--task embedded", lambda config: config.task == "embedded"),
    Effect("toy_width", "--task embedded, without --model", makes_model),
    Effect(
        "warmup_steps",
        "lessons; --task embedded has none for --model",
        lambda config: config.task != "embedded" or makes_model(config),
    ),
    Effect(
        "data",
        "--task own, math or code, and --model",
        lambda config: not TASKS[config.task].makes_problems,
    ),
    Effect(
        "reward",
        "--task own, math or code, and --model",
        lambda config: config.task != "embedded",
    ),
    Effect("template", "--task own, math or code", writes_prompts),
    Effect("sandbox", "--task code", runs_programs),
)


def check(config: TrainConfig) -> None:
    """Raise BadInput for settings that contradict each other or would have no effect."""
    values = flat(config)

    def refusal(name: str, reason: str) -> BadInput:
        value = values[name]
        text = " ".join(map(str, value)) if isinstance(value, tuple) else value
        return BadInput(f"{flag(name)} {text}: {reason}")

    look_up(TASKS, "tasks", "--task", config.task)
    rule = find(config.credit.method)
    options_of(rule.credit, config.credit.method_option, f"--method {config.credit.method}")
    for effect in EFFECTS:
        if effect.flag in config.given and not effect.is_met(config):
            raise refusal(effect.flag, f"has an effect only with {effect.need}; leave it out")
    folder = Path(config.out) / (config.name or "")
    if config.name and not config.checkpoints.resume and folder.exists():
        raise refusal("name", f"{folder} exists already; choose another name")
    if config.sampling.prompts_per_step % config.optimisation.prompts_per_update:
        raise refusal("prompts_per_step", "must be a multiple of --prompts-per-update")
    if config.shear.stride > config.shear.window:
        raise refusal("stride", "exceeds --window, which leaves tokens uncovered; lower it")
    if config.checkpoints.keep_models % config.checkpoints.save_every:
        raise refusal("keep_models", "must be a multiple of --save-every")
    is_nbar = config.shear.eps_unit == "nbar" and "eps_unit" not in config.given
    if config.shear.eps > 1 and is_nbar:
        raise refusal(
            "eps", "is large in units of nbar; add --eps-unit raw (the distances' unit) or nbar"
        )
    if not TASKS[config.task].makes_model:
        if not config.model:
            raise refusal("task", "needs --model; give a Hugging Face folder or hub id")
        if config.task == "own" and not config.problems.data:
            raise refusal("task", "needs --data; give a file of problems")
        if not config.sampling.max_tokens:
            raise refusal("max_tokens", "only --task embedded has a fixed length; raise it")
