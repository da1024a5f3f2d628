"""What every command does around its work: flags, ranks, and one sentence for everything that can go wrong.

Parser, positive, natural, ...  -> flags whose errors are one sentence
add_machine_flags, resolve_machine  -> the machine's flags, and what `auto` means on this one
refuse_other_settings(...)  -> a folder's files were made with these settings, and with no others
guarded(work, ...)  -> exit status: 0, 1 for a run that cannot go on, 2 for bad input, 130 after Ctrl-C
ranked(args, ...)  -> start as many processes as there are GPUs, or take this process's place among them
"""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable

import torch

from harness import parallel
from harness.parallel import Ranks
from tasks.problems import BadInput

FULL = "No space left on device", "inline_container.cc"  # a full disk, as safetensors says it and as torch.save does
GOES_ON = "interrupted: the same command goes on from what is on disk"  # after Ctrl-C


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence."""

    def error(self, message: str):
        message = re.sub(r"^argument (\S+): (?=\S+: must be)", r"\1 ", message)  # --lr 0: must be ...
        raise BadInput(f"{message.removeprefix('argument ')}; see {self.prog} --help")

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
share = number(float, 0, 1)
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


def resolve_machine(args: argparse.Namespace, half: bool = True) -> None:
    """What `auto` means here: `half` computes in bfloat16 on a GPU. Raises BadInput for a GPU that is not there."""
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: torch sees no CUDA device; use --device cpu")
    if args.device == "cuda" and args.ranks > torch.cuda.device_count():
        raise BadInput(f"--ranks {args.ranks}: torch sees {torch.cuda.device_count()} GPUs; lower it")
    if args.dtype == "auto":
        args.dtype = "bfloat16" if args.device == "cuda" and half else "float32"


def flag(name: str) -> str:
    """The command-line spelling of an argument's name."""
    return "--" + name.replace("_", "-")


def refuse_other_settings(wanted: dict, had: dict, holder: str, remedy: str) -> None:
    """Raise BadInput where a setting that is `wanted` differs from what a folder's files were made with, `had`."""
    for name, value in wanted.items():
        if value != had.get(name):
            raise BadInput(f"{flag(name)} {value}: {holder} {had.get(name)}; {remedy}")


class RunFailed(RuntimeError):
    """A run that cannot go on, as its message says."""


def guarded(work: Callable[[], int], *, interrupted: str, memory: str) -> int:
    """The status of `work()`. `interrupted` is said after Ctrl-C; `memory` says how to take less of it."""
    rank = os.environ.get("RANK", "0")

    def say(sentence: str) -> None:
        if rank == "0":  # all ranks fail alike
            print(sentence, file=sys.stderr)

    try:
        status = work()
    except (BadInput, RunFailed) as error:
        say(f"error: {error}")
        status = 2 if isinstance(error, BadInput) else 1
    except torch.OutOfMemoryError as error:
        print(f"error: rank {rank}: {str(error).split('. ')[0]}; {memory}", file=sys.stderr)
        return 1  # the other ranks wait for this one: nothing can be left together
    except KeyboardInterrupt:
        say(interrupted)
        status = 130
    except Exception as error:
        if sentence := known_trouble(error):
            print(f"error: {sentence}", file=sys.stderr)
            return 1  # of one rank, perhaps: nothing can be left together
        if "RANK" in os.environ:  # whose traceback this is
            print(f"rank {rank} fails: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise
    parallel.leave()
    return status


def known_trouble(error: Exception) -> str | None:
    """A sentence for a full disk, an unusable file and a ruined model; None for any other error."""
    if "probability tensor contains" in str(error):
        return "the model's probabilities are not finite; lower --lr, or give another model"
    if any(mark in str(error) for mark in FULL):
        return "the disk is full; free space, then give the same command again"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; choose a place that can be read and written"
    return None


def ranked(
    args: argparse.Namespace, script: str, argv: list[str] | None, run: Callable[[Ranks], int], grouped: bool
) -> int:
    """`run(ranks)` on this rank; where torchrun has started none and there should be several, in as many processes."""
    count = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 1)
    if count > 1 and "RANK" not in os.environ:
        print(f"starting {count} processes on this machine, one a rank", flush=True)
        return parallel.launch(count, script, sys.argv[1:] if argv is None else argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    return run(parallel.join(args.device, grouped=grouped))
