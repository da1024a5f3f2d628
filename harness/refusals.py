"""Refuse settings of `train.py` that contradict each other or would have no effect.

    check(config)    raises BadInput, as far as it shows before anything is loaded

A flag that is given has an effect, or is refused: EFFECTS has what each flag needs. The flags of
SHEAR's spans and distances are accepted with every method, because comparisons share a command
line. A value of the wrong type or out of bounds never comes here: the parser refuses it.

Left out: what depends on the model, the data or the number of ranks (`harness/load.py`).
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from credit.table import Need, options_of
from harness.config import TrainConfig, flag, flat
from tasks.errors import BadInput
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
    return config.task != "embedded" or bool(config.evaluation.bench)


def runs_programs(config: TrainConfig) -> bool:
    """Whether programs may be graded."""
    return config.task == "code" or bool(config.evaluation.bench)


EFFECTS = (
    Effect("toy_lines", "--task embedded", lambda config: config.task == "embedded"),
    Effect("toy_width", "--task embedded, without --model", makes_model),
    Effect(
        "warmup_steps",
        "--task words, --data, or --task embedded without --model",
        lambda config: config.task == "words" or bool(config.problems.data) or makes_model(config),
    ),
    Effect(
        "data",
        "--task own, math or code, and --model",
        lambda config: not TASKS[config.task].makes_problems,
    ),
    Effect(
        "reward",
        "--task words, own, math or code, and --model",
        lambda config: config.task != "embedded",
    ),
    Effect("template", "--task words, own, math or code, or with --bench", writes_prompts),
    Effect("sandbox", "--task code, or with --bench", runs_programs),
    Effect("bench_data", "--bench", lambda config: bool(config.evaluation.bench)),
    Effect(
        "prm",
        "a --method with a reward model",
        lambda config: Need.PRM in config.credit.entry.needs,
    ),
    Effect("rescale", "a --method that has weights", lambda config: config.credit.entry.weighs),
)


class Provision(NamedTuple):
    """Whether a run provides what a method needs, and what to do where it does not."""

    need: Need
    is_met: Callable[[TrainConfig], bool]
    remedy: str


def provides_prm(config: TrainConfig) -> bool:
    """Whether there is a process reward model; the embedded task trains one."""
    return bool(config.credit.prm) or config.task == "embedded"


PROVISIONS = (
    Provision(Need.ADAPTER, lambda config: config.credit.lora_rank > 0, "give --lora-rank"),
    Provision(Need.PRM, provides_prm, "give --prm, e.g. Qwen/Qwen2.5-Math-PRM-7B"),
    Provision(
        Need.BOX,
        lambda config: config.task != "code",
        "programs have none; choose another method",
    ),
    Provision(
        Need.FIRST_ERROR,
        lambda config: TASKS[config.task].makes_problems,
        "only --task embedded and words know it; choose another method",
    ),
)


def check(config: TrainConfig) -> None:
    """Raise BadInput for settings that contradict each other or would have no effect."""
    values = flat(config)

    def refusal(name: str, reason: str) -> BadInput:
        value = values[name]
        text = " ".join(map(str, value)) if isinstance(value, tuple) else value
        return BadInput(f"{flag(name)} {text}: {reason}")

    check_method(config)
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
    is_nbar = config.shear.eps_unit == "nbar" and "eps_unit" not in config.given
    if config.shear.eps > 1 and is_nbar:
        raise refusal(
            "eps", "is large in units of nbar; add --eps-unit raw (the distances' unit) or nbar"
        )
    if not TASKS[config.task].makes_model:
        if not config.model:
            raise refusal("task", "needs --model; give smollm2, a Hugging Face folder or hub id")
        if config.task == "own" and not config.problems.data:
            raise refusal("task", "needs --data; give a file of problems")
        if not config.sampling.max_tokens:
            raise refusal("max_tokens", "only --task embedded has a fixed length; raise it")
    if bool(config.evaluation.eval_every) != bool(config.evaluation.bench):
        raise refusal("eval_every", "must be above 0 with --bench, and 0 without; give both")
    if config.track and not find_spec(config.track):
        raise refusal("track", "this package is not installed; leave it out")


def check_method(config: TrainConfig) -> None:
    """Raise BadInput for an option that the method does not have, or a need that is not met."""
    credit = config.credit
    try:
        options_of(credit.method, credit.method_option)
    except ValueError as error:
        raise BadInput(f"--method-option {error}") from error
    for need, is_met, remedy in PROVISIONS:
        if need in credit.entry.needs and not is_met(config):
            raise BadInput(f"--method {credit.method}: needs {need.value}; {remedy}")
