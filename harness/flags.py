"""What flags are made of: one parser whose errors are one sentence, and the types of their values.

    Parser                  --help shows a command's common flags, --help-all all of them
    positive, natural, ...  numbers within bounds
    add_machine_flags       where to compute, and in which pieces
    answer(name, parse)     help and mistakes, before a command imports what takes seconds
    refuse_other_settings   raises BadInput where a folder's files were made with other settings

Nothing here, in `harness/recipe.py` and in `harness/protocol.py` imports torch: `--help` and a typo answer at once.
"""

import argparse
import difflib
import itertools
import math
import os
import re
import signal
import sys
from collections.abc import Callable

from tasks.rows import SURROGATE, BadInput


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something, and N for a number."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default in (None, []) or action.default is False:
            return action.help
        return super()._get_help_string(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "N" if action.type else super()._get_default_metavar_for_optional(action)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence; if flags are `common`, `--help` shows these and `--help-all` all."""

    def __init__(self, common: str = "", **options):
        super().__init__(add_help=not common, usage="%(prog)s [flags]", formatter_class=Defaults, **options)
        self.common = common.split()
        if common:
            add = self.add_argument_group("help").add_argument
            add("-h", "--help", action="store_true", default=argparse.SUPPRESS, help="the usual flags")
            add("--help-all", action="store_true", default=argparse.SUPPRESS, help="all flags")

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        for before, word in itertools.pairwise(["", *words]):
            if not word or re.fullmatch("--[a-z-]+=", word):  # most often a shell's variable that is not set
                raise BadInput(f"{(word or before).rstrip('=')}: is empty; give a value, or leave it out")
            if word.endswith("=--"):  # argparse would drop it, and give an empty list
                self.error(f"{word}: -- is no value")
            if SURROGATE.search(word):
                self.error(f"{word.encode(errors='replace').decode()}: is not UTF-8; rename it")
        return super().parse_known_args(args, namespace)

    def help_if_asked(self, args: argparse.Namespace) -> None:
        """Print the help, with the defaults of now, and end the process."""
        if "help_all" not in args and "help" not in args:
            return
        if "help_all" not in args:
            self.epilog = None
            for action in self._actions:
                if action.dest not in (*self.common, "help", "help_all"):
                    action.help = argparse.SUPPRESS
        self.print_help()
        sys.exit(0)

    def error(self, message: str):
        message = re.sub(r"^argument (\S+): (?=\S+: must be)", r"\1 ", message)  # --lr 0: must be ...
        message = message.removeprefix("argument ")
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        unknown = re.match(r"unrecognized arguments: ([^ =]+)", message)
        near = []
        if choice:
            near = difflib.get_close_matches(choice[1], re.findall(r"[\w.-]+", choice[2]), 1)
        elif unknown:
            near = difflib.get_close_matches(unknown[1], self._option_string_actions, 1)
        if near:
            message += f"; did you mean {near[0]}?"
        raise BadInput(f"{message}; see {self.prog} --help")

    def parse_with_others(self, argv: list[str] | None, refused: str, reason: str) -> tuple[argparse.Namespace, list]:
        """This command's flags, and those of train.py as they are; raises BadInput for `refused` ones of these."""
        flags, others = self.parse_known_args(argv)
        for word in others:
            if word.split("=")[0] in refused.split():
                raise BadInput(f"{word}: {reason}; leave it out")
        return flags, others


def number(kind: type, low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """The type of a flag: a finite number of this kind from `low` to `high`; it exceeds `low` if it must be `above`."""
    bounds = f"above {low}" if above else f"at least {low}"
    if high < math.inf:
        bounds += f" and at most {high}"

    def convert(text: str) -> float:
        value = kind(text)
        inside = low < value <= high if above else low <= value <= high  # False for NaN
        if not inside or abs(value) == math.inf:
            raise argparse.ArgumentTypeError(f"{text}: must be {'finite' if abs(value) == math.inf else bounds}")
        return value

    convert.__name__ = kind.__name__  # argparse says "invalid int value: 'x'"
    return convert


positive_int = number(int, 1, 10**6)
natural = number(int, 0, 10**6)
random_seed = number(int, 0, 2**32 - 1)
positive = number(float, 0, 1e30, above=True)
not_negative = number(float, 0, 1e30)
temperature = number(float, 0.001, 1000)
fraction = number(float, 0, 1)
seconds = number(float, 0, 86_400, above=True)  # a day at most


def add_machine_flags(parser: Parser):
    """Flags that say where to compute and in which pieces; returns the function that adds others to their group."""
    add = parser.add_argument_group("machine").add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of compute; auto: bfloat16 on cuda")
    add("--ranks", type=number(int, 0, 4096), default=0, help="processes to start, unless torchrun has; 0: one a GPU")
    add("--threads", type=number(int, 0, 4096), default=0, help="CPU threads, 0: torch's default")
    add("--generate-batch", type=natural, default=0, help="rollouts at a time; 0: what memory holds, 512 on CPU")
    add(
        "--decode",
        choices=("generate", "fast"),
        default="generate",
        help="fast: CUDA graphs; no GPU has proved them yet",
    )
    return add


def flag(name: str) -> str:
    """The command-line spelling of an argument's name."""
    return "--" + name.replace("_", "-")


def refuse_other_settings(wanted: dict, had: dict, holder: str, remedy: str) -> None:
    """Raise BadInput where a setting that is `wanted` differs from what a folder's files were made with, `had`."""
    for name, value in wanted.items():
        if value != had.get(name):
            raise BadInput(f"{flag(name)} {value}: {holder} {had.get(name)}; {remedy}")


def answer(name: str, parse: Callable[[], object]) -> None:
    """Help, and mistakes in the flags, of the command of this `__name__`, before it imports what takes seconds."""
    if name != "__main__":
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of imports; `guarded` hears Ctrl-C again
    try:
        parse()
    except BadInput as error:
        if os.environ.get("RANK", "0") == "0":  # all ranks were given the same
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
