"""Running a command: its exit status, Ctrl-C, and one sentence for bad input.

    @run_command            decorates a command's `main`, which then returns the exit status
    on_machine(config)      completes the configuration for this machine
    interruptible(run)      Ctrl-C ends the run after the step that is being taken

The status is 0, 1 if the command cannot continue, 2 for bad input, 130 after Ctrl-C. Any other
error shows Python's traceback.
"""

import functools
import io
import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
import transformers
from tqdm import tqdm

from harness import fsdp
from harness.config import Machine, rank_of_torchrun
from harness.run import Run
from tasks.errors import BadInput, RunFailed, printable

AnyMachine = TypeVar("AnyMachine", bound=Machine)
NO_MEMORY = "out of memory: lower --micro-tokens, --generate-batch or --max-tokens"


def run_command(main: Callable[..., int | None]) -> Callable[..., int]:
    """Decorate a command's `main(argv)`: it returns the exit status, and its errors are printed.

    `main` returns its exit status, or None for 0.
    """

    @functools.wraps(main)
    def command(argv: list[str] | None = None) -> int:
        rank = rank_of_torchrun()
        set_up_process(rank)
        try:
            status = main(argv) or 0
            sentence = ""
        except (BadInput, RunFailed) as error:  # all ranks raise these
            status = 2 if isinstance(error, BadInput) else 1
            sentence = f"error: {error}"
        except KeyboardInterrupt:  # a rank that fails would make the launcher end the others
            status = 0 if rank else 130
            sentence = "interrupted"
        except torch.OutOfMemoryError:
            print(NO_MEMORY, file=sys.stderr)
            raise
        if sentence and not rank:
            print(printable(sentence), file=sys.stderr)
        fsdp.leave()  # not after other errors, which one rank alone may have
        return status

    return command


def set_up_process(rank: int | None) -> None:
    """Set up a command's messages, progress bars and output."""
    # an error is one sentence, without transformers' reports
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    # One process saves and loads as it should; torch warns each time that it is alone.
    alone = "torch.distributed is disabled, unavailable or uninitialized"
    warnings.filterwarnings("ignore", message=alone)
    if rank:  # only rank 0 shows progress bars, whatever their own `disable` says
        init = tqdm.__init__
        tqdm.__init__ = lambda bar, *words, **options: init(
            bar, *words, **options | {"disable": True}
        )
    # Line by line, so that a log file shows each step at once; "?" for characters that a terminal
    # cannot show.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, errors="replace")


def on_machine(config: AnyMachine, half: bool = True) -> AnyMachine:
    """Replace `auto` by this machine's device and dtype: bfloat16 on a GPU if `half`.

    Raises BadInput for GPUs that are not there.
    """
    gpus = torch.cuda.device_count()
    device = config.device
    dtype = config.dtype
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and gpus < max(1, config.ranks):
        raise BadInput(f"--device cuda: torch sees {gpus} GPUs; use --device cpu or fewer --ranks")
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" and half else "float32"
    return replace(config, device=device, dtype=dtype)


@contextmanager
def interruptible(run: Run) -> Iterator[None]:
    """Inside, Ctrl-C or SIGTERM sets `run.interrupted`: the step is finished and saved.

    A second Ctrl-C ends the step at once. A rank leaves SIGTERM as it is, as its launcher ends it
    by that.
    """

    def finish_first(signum: int, frame: object) -> None:
        if run.interrupted and signum == signal.SIGINT:
            raise KeyboardInterrupt
        run.interrupted = True
        if run.ranks.main:
            print(
                "\ninterrupted: this step is finished first; another Ctrl-C ends at once",
                file=sys.stderr,
            )

    heard = [signal.SIGINT]
    if rank_of_torchrun() is None:
        heard.append(signal.SIGTERM)
    former = {number: signal.signal(number, finish_first) for number in heard}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
