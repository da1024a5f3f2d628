"""Running a command: its exit status, Ctrl-C, and one sentence for what can go wrong.

    @run_command(memory=...)  decorates a command's `main`, which then returns the exit status
    resolve(config)           completes the configuration of train.py for this machine
    interruptible(run)        Ctrl-C ends the run after the step that is being taken

The status is 0, 1 if the command cannot continue, 2 for bad input, 130 after Ctrl-C.
"""

import errno
import functools
import io
import logging
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
import transformers
from huggingface_hub.utils import enable_progress_bars
from tqdm import tqdm

from harness import checkpoint, fsdp
from harness.config import Machine, TrainConfig, rank_of_torchrun, with_values
from harness.models import out_of_memory
from harness.refusals import check
from harness.run import Run
from tasks import toy
from tasks.errors import BadInput, RunFailed, printable
from tasks.reward import load_reward
from tasks.settings import TASKS

AnyMachine = TypeVar("AnyMachine", bound=Machine)
# Messages of Linux, which safetensors repeats: a full disk, a quota, `ulimit -f`.
DISK_FULL = ("No space left on device", "Disk quota exceeded", "File too large")
# Errors of a path that the user gave: a file in a folder's place, a name that is too long.
BAD_PATH = errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG
STREAMS = 1, 2  # file descriptors of standard output and standard error
INTERRUPTS = signal.SIGINT, signal.SIGTERM  # from Ctrl-C and from Slurm
GOES_ON = "interrupted: the same command continues from what is on disk"  # after Ctrl-C


def resolve(config: TrainConfig) -> TrainConfig:
    """The configuration of a run on this machine, or of the one to resume; raises BadInput.

    `harness.load.Sizes` shrinks sizes further once the data is known.
    """
    if config.checkpoints.resume:
        config = checkpoint.resume(config, config.checkpoints.resume)
    if "prompts_per_update" not in config.given:
        groups = min(config.optimisation.prompts_per_update, config.sampling.prompts_per_step)
        config = with_values(config, {"prompts_per_update": groups})
    check(config)
    if config.grading.reward:
        load_reward(config.grading.reward)  # what is wrong with it shows before a model is loaded
    if not config.sampling.max_tokens:  # a full response of the embedded task
        max_tokens = toy.response_tokens(config.problems.toy_lines)
        config = with_values(config, {"max_tokens": max_tokens})
    machine = resolve_machine(config.machine, half=not TASKS[config.task].makes_model)
    return replace(config, machine=machine)


def resolve_machine(machine: AnyMachine, half: bool = True) -> AnyMachine:
    """Replace `auto` by this machine's device and dtype: bfloat16 on a GPU if `half`.

    Raises BadInput for a missing GPU.
    """
    device = machine.device
    dtype = machine.dtype
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: torch sees no CUDA device; use --device cpu")
    if device == "cuda" and machine.ranks > torch.cuda.device_count():
        raise BadInput(
            f"--ranks {machine.ranks}: torch sees {torch.cuda.device_count()} GPUs; lower it"
        )
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" and half else "float32"
    return replace(machine, device=device, dtype=dtype)


def run_command(*, memory: str, interrupted: str = GOES_ON) -> Callable:
    """Decorate a command's `main(argv)`, so that an error becomes a sentence and an exit status.

    `main` returns its exit status, or None for 0. `memory` tells how to use less memory;
    `interrupted` is printed after Ctrl-C.
    """

    def decorate(
        main: Callable[[list[str] | None], int | None],
    ) -> Callable[[list[str] | None], int]:
        @functools.wraps(main)
        def command(argv: list[str] | None = None) -> int:
            rank = rank_of_torchrun()
            set_up_process(rank)
            sentence = ""
            try:
                status = main(argv) or 0
            except (BadInput, RunFailed) as error:  # all ranks raise these
                status = 2 if isinstance(error, BadInput) else 1
                sentence = f"error: {error}"
            except KeyboardInterrupt:  # a rank that fails would make the launcher end the others
                status = 0 if rank else 130
                sentence = "" if reader_left() else interrupted
            except Exception as error:  # perhaps on one rank only, so no `fsdp.leave`
                if isinstance(error, BrokenPipeError) and reader_left():
                    return 130  # as after Ctrl-C, where the launcher prints nothing either
                trouble = known_trouble(error)
                if out_of_memory(error):
                    trouble = f"rank {rank or 0}: out of memory; {memory}"
                if not trouble:
                    raise
                print(printable(f"error: {trouble}"), file=sys.stderr)
                return 2 if getattr(error, "errno", None) in BAD_PATH else 1
            if sentence and not rank:
                print(printable(sentence), file=sys.stderr)
            fsdp.leave()
            return status

        return command

    return decorate


def set_up_process(rank: int | None) -> None:
    """Set up a command's messages, progress bars, output and signals."""
    # an error is one sentence, without transformers' reports
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    # One process saves and loads as it should; torch warns each time that it is alone.
    alone = "torch.distributed is disabled, unavailable or uninitialized"
    warnings.filterwarnings("ignore", message=alone)
    transformers.utils.logging.disable_progress_bar()
    if rank:  # only rank 0 shows progress bars, whatever their own `disable` says
        init = tqdm.__init__
        tqdm.__init__ = lambda bar, *words, **options: init(
            bar, *words, **options | {"disable": True}
        )
    elif sys.stderr.isatty():
        enable_progress_bars()  # for downloads only, which may take an hour
    # Line by line, so that a log file shows each step at once; "?" for characters that a terminal
    # cannot show.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
    # SIGTERM acts as Ctrl-C, except where a launcher ends its ranks by it or a parent ignored it.
    if rank is None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def reader_left() -> bool:
    """Whether the reader of the output is gone, as after `| head -1`.

    If so, further output is discarded, so that closing the streams cannot fail.
    """
    poll = select.poll()
    for number in STREAMS:
        poll.register(number, 0)  # report errors only
    gone = [number for number, event in poll.poll(0) if event & select.POLLERR]
    for number in gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return bool(gone)


def known_trouble(error: Exception) -> str | None:
    """A sentence for a full disk, an unusable file and a ruined model; None for any other error."""
    if "probability tensor contains" in str(error):  # torch's multinomial
        return "the model's probabilities are not finite; lower --lr, or give another model"
    if any(mark in str(error) for mark in DISK_FULL):
        return "the disk is full, or a quota or `ulimit -f` is reached; free space, then continue"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; choose a place that can be read and written"
    return None


@contextmanager
def interruptible(run: Run) -> Iterator[None]:
    """Inside, Ctrl-C or SIGTERM sets `run.interrupted`: the step is finished and saved.

    A second Ctrl-C ends the step at once. A process that was started to ignore Ctrl-C keeps
    ignoring it.
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

    heard = [
        number for number in INTERRUPTS if signal.getsignal(number) is signal.default_int_handler
    ]
    for number in heard:
        signal.signal(number, finish_first)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.default_int_handler)
