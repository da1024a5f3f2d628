"""What every command does around its work: ranks, and one sentence for everything that can go wrong.

parse_args(argv)       the configuration of a run: the flags of train.py, and what they mean on this machine
resolve_machine(args)  what `auto` means on this machine
guarded(work, ...)     exit status: 0, 1 for a run that cannot go on, 2 for bad input, 130 after Ctrl-C
ranked(args, ...)      start as many processes as there are GPUs, or take this process's place among them
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable

import torch
import transformers
from huggingface_hub.utils import enable_progress_bars

from harness import parallel
from harness.config import parse_train
from harness.parallel import Ranks
from tasks import toy
from tasks.benchmarks import check_sandbox
from tasks.problems import BadInput

NOT_FINITE = "probability tensor contains"  # torch's multinomial
# As torch says it on a CPU, C++, the kernel, and Python of threads.
NO_MEMORY = "DefaultCPUAllocator: can't allocate", "bad_alloc", "Cannot allocate memory", "can't start new thread"
FULL = "No space left on device", "inline_container.cc"  # a full disk, as safetensors says it and as torch.save does
INTERRUPTS = signal.SIGINT, signal.SIGTERM  # Ctrl-C, and what Slurm sends
GOES_ON = "interrupted: the same command goes on from what is on disk"  # after Ctrl-C


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The configuration of a run; raises BadInput."""
    return resolve(parse_train(argv))


def resolve(args: argparse.Namespace) -> argparse.Namespace:
    """The flags of train.py as the configuration of a run on this machine; raises BadInput."""
    if args.task == "embedded" and not args.max_tokens:
        args.max_tokens = toy.response_tokens(args.toy_lines)
    resolve_machine(args, half=args.task != "embedded")
    if args.task == "code":
        check_sandbox(args.sandbox)
    return args


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


class RunFailed(RuntimeError):
    """A run that cannot go on, as its message says; all ranks raise it."""


class RankFailed(RuntimeError):
    """The same of one rank, for which the others may wait."""


def guarded(work: Callable[[], int], *, interrupted: str, memory: str) -> int:
    """The status of `work()`. `interrupted` is said after Ctrl-C; `memory` says how to take less of it."""
    rank = os.environ.get("RANK", "0")
    transformers.utils.logging.disable_progress_bar()
    if rank == "0" and sys.stderr.isatty():
        enable_progress_bars()  # of downloads alone, which may take an hour
    # A log file shows each step when it is done; a terminal that cannot show a character shows "?".
    sys.stdout.reconfigure(line_buffering=True, errors="replace")

    def say(sentence: str) -> None:
        if rank == "0":  # all ranks fail alike
            print(sentence, file=sys.stderr)

    hear()
    try:
        status = work()
    except (BadInput, RunFailed) as error:
        say(f"error: {error}")
        status = 2 if isinstance(error, BadInput) else 1
    except KeyboardInterrupt:
        say(interrupted)
        status = 130 if rank == "0" else 0  # the launcher ends all ranks with the first that fails
    except Exception as error:
        if out_of_memory(error):
            print(f"error: rank {rank}: out of memory; {memory}", file=sys.stderr)
            return 1  # the other ranks wait for this one: nothing can be left together
        if sentence := known_trouble(error):
            print(f"error: {sentence}", file=sys.stderr)
            return 1  # of one rank, perhaps: nothing can be left together
        if "RANK" in os.environ:  # whose traceback this is
            print(f"rank {rank} fails: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise
    parallel.leave()
    return status


def hear() -> None:
    """INTERRUPTS raise KeyboardInterrupt from here on; not SIGTERM in a rank, which its launcher may end by it."""
    if threading.current_thread() is threading.main_thread():
        for number in INTERRUPTS[: 1 if "RANK" in os.environ else 2]:
            if signal.getsignal(number) is signal.SIG_DFL:  # not where the parent had it ignored
                signal.signal(number, signal.default_int_handler)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory does not suffice, of a GPU or of the machine."""
    is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_known or any(mark in str(error) for mark in NO_MEMORY)


def known_trouble(error: Exception) -> str | None:
    """A sentence for a full disk, an unusable file and a ruined model; None for any other error."""
    if isinstance(error, RankFailed):
        return str(error)
    if NOT_FINITE in str(error):
        return "the model's probabilities are not finite; lower --lr, or give another model"
    if any(mark in str(error) for mark in FULL):
        return "the disk is full; free space, then go on"
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
