"""The table of credit methods: a sentence about each, its needs and its options.

Flags and their help, refusals, prompt lengths and the studies all follow from this table. It
imports no torch, so that `--help` answers at once.

To add a method, write a function `f(batch, context, **options)` from a `credit.batch.Batch` and its
`Context` to token advantages (B, T), and enter it here and in `credit.methods.FUNCTIONS`. Then
`--method` accepts its name, and `--method-option` its options.

Left out: the methods' code and sources (`credit.methods`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from tasks.settings import LARGE, one_of, read_number


class Need(Enum):
    """What a method may need, and a task, a model or a machine may lack."""

    STATES = "the last layer's hidden states, which are kept for it"
    PAIRS = "matrices of the distances between states of a group"
    ADAPTER = "a LoRA adapter"
    PRM = "a process reward model"
    BOX = "an answer in a box"
    HINT = "the answer in its prompt"
    PEER = "another response of the group in its prompt"
    FIRST_ERROR = "the true first error"


@dataclass(frozen=True)
class Option:
    """An option of a method: a number within bounds, or one of `choices`.

    If no bounds are given, the number must be positive.
    """

    default: float | str
    about: str
    low: float = 1e-30
    high: float = LARGE
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> float | str:
        """The value in a text.

        Raises ValueError with the bounds or choices.
        """
        if self.choices:
            return one_of(self.choices)(text)
        kind = int if isinstance(self.default, int) else float
        return read_number(kind, self.low, self.high, text)


@dataclass(frozen=True)
class Method:
    """A credit method; `credit.methods.FUNCTIONS` has its function."""

    about: str
    needs: tuple[Need, ...] = ()
    # It multiplies A by weights; otherwise it has its own advantages, whose signs may differ.
    weighs: bool = True
    # The loss is a mean over only those rollouts that get credit.
    drops_uncredited: bool = False
    options: dict[str, Option] = field(default_factory=dict)


SHEAR = {  # the paper's ablations
    "reading": Option(
        "value", "Eq. (10) itself, or only its transport cost", choices=("value", "cost")
    ),
    "distance": Option(
        "w1", "the distance of two spans", choices=("w1", "cosine", "chamfer", "mmd")
    ),
    "normalize": Option("group", "what weights are normalised over", choices=("group", "rollout")),
    "pool": Option("max", "how a token pools the spans that cover it", choices=("max", "mean")),
}
OAR = {
    "quantile": Option(0.25, "share of tokens that are suppressed", 0, 1),
    "beta": Option(1.0, "boost of the most important token", 0),
    "probe": Option("kl", "how the answer's change is measured", choices=("kl", "logp")),
}
LEANING = {
    "mix": Option(0.5, "share of the teacher at the start", 0, 1),
    "steps": Option(50, "steps until it is 0", 1, 10**6),
    "bound": Option(0.2, "weights are within 1 +- bound", 0, 1),
}
METHODS = {
    "grpo": Method("every token gets its rollout's advantage"),
    "shear": Method(
        "weights are distances to the closest span of the opposite outcome",
        (Need.STATES, Need.PAIRS),
        options=SHEAR,
    ),
    "opo": Method(
        "the reward minus the group's mean reward, weighted by squared gradient norms",
        weighs=False,
    ),
    "otb": Method(
        "the same with a baseline for each token, weighted by the norms up to it", weighs=False
    ),
    "opo-shear": Method("opo times shear's weights", (Need.STATES, Need.PAIRS), weighs=False),
    "otb-shear": Method("otb times shear's weights", (Need.STATES, Need.PAIRS), weighs=False),
    "first": Method(
        "the same distances, but only where a wrong rollout first departs",
        (Need.STATES, Need.PAIRS),
        options={
            "threshold": Option(0.03, "distance at which a rollout has gone wrong"),
            "place": Option(
                "onset", "its tokens, or as many at random", choices=("onset", "random")
            ),
        },
    ),
    "entropy": Method(
        "more credit where the policy was unsure",
        options={
            "alpha": Option(0.4, "advantage per nat of entropy"),
            "kappa": Option(2.0, "at most |A| / kappa is added; above 1", 1.000001),
        },
    ),
    "hapo": Method(
        "more credit where the policy was unsure, by standardised entropy",
        options={  # with alpha above phi, advantages could change their sign
            "alpha": Option(0.2, "advantage per standard deviation of entropy", high=1),
            "phi": Option(2.0, "at most |A| / phi standard deviations count", 1),
        },
    ),
    "oar-g": Method(
        "the answer's sensitivity to a token, by gradients",
        (Need.BOX,),
        options=OAR | {"noise": Option(1e-3, "standard deviation of the noise on embeddings")},
    ),
    "oar-p": Method("the answer's sensitivity to a token, by masking", (Need.BOX,), options=OAR),
    "arca": Method(
        "how far a LoRA adapter moves the token's state",
        (Need.STATES, Need.ADAPTER),
        options={"floor": Option(1e-6, "added to every distance")},
    ),
    "dgpo": Method(
        "how far a LoRA adapter moves the next token's distribution, gated by entropy",
        (Need.ADAPTER,),
        options={
            "tau": Option(0.5, "temperature of the softmax over a rollout's tokens"),
            "kappa": Option(1.0, "exponent of the entropy; 0: it does not count", 0),
        },
    ),
    "prm": Method("the score of the token's step by a process reward model", (Need.PRM, Need.BOX)),
    "finepo": Method(
        "the score of the token's step, relative to its rollout's mean",
        (Need.PRM, Need.BOX),
        options={
            "alpha": Option(0.5, "what the best step gains, as a share of A", 0),
            "bound": Option(2.0, "largest weight", 1),
            "scores": Option("prm", "the steps' scores, or a control", choices=("prm", "random")),
        },
    ),
    "pure": Method(
        "a soft minimum of the steps' scores",
        (Need.PRM, Need.BOX),
        weighs=False,
        options={
            "temperature": Option(0.1, "temperature of the soft minimum"),
            "outcome": Option(1.0, "what a right verdict adds", 0),
        },
    ),
    "rlsd": Method(
        "how much likelier the token becomes when the answer is known",
        (Need.BOX, Need.HINT),
        options=LEANING,
    ),
    "serl": Method(
        "how much likelier the token becomes after another right rollout is shown",
        (Need.PEER,),
        options=LEANING,
    ),
    "sdpo": Method(
        "the log-ratio after another right rollout is shown",
        (Need.PEER,),
        weighs=False,
        drops_uncredited=True,
        options={"mix": Option(0.0, "share of A (0.9 for weak models)", 0, 1)},
    ),
    "oracle": Method(
        "control: credit only for the true first wrong step",
        (Need.FIRST_ERROR,),
        options={"mass": Option(0, "1: the step gets the whole rollout's credit", 0, 1)},
    ),
    "cliff": Method(
        "control: 0 before the true first error, A from it on; centred",
        (Need.FIRST_ERROR,),
        weighs=False,
        options={
            "prefix": Option(0.0, "share of a right rollout's advantage before the error", 0, 1)
        },
    ),
    "own-side": Method(
        "control: distance to the closest span of the same side", (Need.STATES, Need.PAIRS)
    ),
    "position": Method("control: later tokens get more"),
    "random": Method("control: weights drawn at random, equal within a window"),
    "shuffle": Method(
        "control: SHEAR's weights in random places", (Need.STATES, Need.PAIRS), options=SHEAR
    ),
}


def methods_needing(need: Need) -> set[str]:
    """The names of the methods that have this need."""
    return {name for name, method in METHODS.items() if need in method.needs}


def options_of(name: str, given: Sequence[str] = ()) -> dict[str, float | str]:
    """The options of a method: those given as "NAME=VALUE", and the defaults of the others.

    Raises ValueError for an unknown option or a bad value.
    """
    options = METHODS[name].options
    values: dict[str, float | str] = {option: options[option].default for option in options}
    for assignment in given:
        option, _, text = assignment.partition("=")
        if option not in options:
            has = ", ".join(options) or "no options"
            raise ValueError(f"{assignment}: {name} has {has}; give NAME=VALUE, or leave it out")
        try:
            values[option] = options[option].read(text)
        except ValueError as error:
            raise ValueError(f"{assignment}: {error}; change it") from error
    return values
