"""What commands share: the exit status, Ctrl-C, and what is checked before torch is imported.

    @run_command         decorates a command's `main`, which then returns the exit status
    interruptible(run)   Ctrl-C ends the run after the step that is being taken
    check_inputs()       a run's flags and its file of --data

The status is 0, 1 if the command cannot continue or the disk is full, 2 for bad input, 130 after
Ctrl-C. Any other error shows Python's traceback. This file imports no torch, so that flags are read
at once.
"""

import errno
import functools
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from base.config import parse_train, rank_of_torchrun
from base.errors import BadInput, RunFailed, printable
from tasks.problems import load_problems

NO_MEMORY = "out of memory: lower --micro-tokens, --generate-batch or --max-tokens"


# ---- running a command ---------------------------------------------------------------------------


def run_command(main: Callable[..., int | None]) -> Callable[..., int]:
    """Decorate a command's `main(argv)`: it returns the exit status, and its errors are printed.

    `main` returns its exit status, or None for 0.
    """

    @functools.wraps(main)
    def command(argv: list[str] | None = None) -> int:
        # blocks of memory that can grow, as the cache of a batch does; PyTorch reads it once
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        import torch  # late: see above

        rank = rank_of_torchrun()
        set_up_process()
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
        except Exception as error:
            if not is_of_a_full_disk(error):
                raise
            print(printable(f"error: {error}: free some disk, then go on"), file=sys.stderr)
            return 1  # this rank's alone, so the launcher ends the others
        if sentence and not rank:
            print(printable(sentence), file=sys.stderr)
        # not after other errors, which one rank alone may have
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return status

    return command


def is_of_a_full_disk(error: Exception) -> bool:
    """Whether there was no space left to write to; safetensors has an error of its own for it."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_full or f"(os error {errno.ENOSPC})" in str(error)


def set_up_process() -> None:
    """Set up a command's messages and output."""
    import transformers  # late: it imports torch

    # an error is one sentence, without transformers' reports
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    # One process saves and loads as it should; torch warns each time that it is alone.
    alone = "torch.distributed is disabled, unavailable or uninitialized"
    warnings.filterwarnings("ignore", message=alone)
    # Line by line, so that a log file shows each step at once; "?" for characters that a terminal
    # cannot show.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, errors="replace")


class Interruptible(Protocol):
    """What Ctrl-C ends after its step, such as a `Run`."""

    interrupted: bool


@contextmanager
def interruptible(run: Interruptible) -> Iterator[None]:
    """Inside, Ctrl-C or SIGTERM sets `run.interrupted`: the step is finished and saved.

    A second Ctrl-C ends the step at once. A rank leaves SIGTERM as it is, as its launcher ends it
    by that.
    """

    def finish_first(signum: int, frame: object) -> None:
        if run.interrupted and signum == signal.SIGINT:
            raise KeyboardInterrupt
        run.interrupted = True
        if not rank_of_torchrun():
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


def check_inputs() -> None:
    """Check a run's flags and file of problems before torch is imported; raises BadInput.

    Ranks leave the file for later, as each of them would hold all problems twice.
    """
    config = parse_train()
    if config.data and rank_of_torchrun() is None:
        load_problems("code" if config.task == "code" else "math", config.data)
