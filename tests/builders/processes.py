"""Work in other processes: a command that can be killed, a copy of the project, and two ranks.

They are forked where no GPU forbids it, so that they need not import what this one has imported.
"""

import os
import runpy
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from builders.case_files import ROOT
from torch.multiprocessing import get_context, start_processes

METHOD = "spawn" if torch.cuda.is_available() else "fork"


def in_another_process(command: Callable[..., int], argv: list[str]) -> BaseProcess:
    """A process that runs a command, whose output is discarded; it has been started."""
    process = get_context(METHOD).Process(target=_run_silently, args=(command, argv))
    process.start()
    return process


def _run_silently(command: Callable[..., int], argv: list[str]) -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    sys.exit(command(argv))


def run_script(
    folder: Path, script: str, argv: list[str], printed: Path, without: tuple[str, ...] = ()
) -> tuple[int | None, str]:
    """The exit status and the output of `python SCRIPT ARGV` in a folder, kept in a file.

    The folder is this project's or a copy of it. An import of the modules `without` fails.
    """
    inputs = folder, script, argv, printed, without
    process = get_context(METHOD).Process(target=_run_as_main, args=inputs)
    process.start()
    process.join()
    return process.exitcode, printed.read_text(encoding="utf-8")


def _run_as_main(
    folder: Path, script: str, argv: list[str], printed: Path, without: tuple[str, ...]
) -> None:
    """Forget the modules of this project, and run the folder's script as if nothing were imported."""
    places = [ROOT, ROOT / "tests"]
    names = {path.stem for place in places for path in place.iterdir()} | set(without)
    for name in list(sys.modules):
        if name.split(".")[0] in names:
            del sys.modules[name]
    sys.modules |= dict.fromkeys(without)  # an import of None raises ModuleNotFoundError
    places += [ROOT / "lab" / "tests", ROOT / "grading" / "inside"]
    others = [place for place in sys.path if Path(place) not in places]
    sys.path[:] = [str(folder), str(folder / "tests"), *others]
    # a source that changes twice a second would be taken for the one that was compiled
    sys.dont_write_bytecode = True
    os.chdir(folder)
    sys.stdout = sys.stderr = printed.open("w", encoding="utf-8")
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")


def on_two(work: Callable[..., None], folder, *inputs, joins=False) -> None:
    """Run `work(folder, *inputs)` on two ranks over gloo.

    Where the work `joins` the ranks itself, as a command does, it finds torchrun's environment.
    """
    # the store has a port of its own, which no other process can take meanwhile
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    arguments = (store.port, joins, work, folder, *inputs)
    ranks = start_processes(_as_rank, arguments, nprocs=2, join=False, start_method=METHOD)
    while not ranks.join():  # True once both have ended
        pass


def _as_rank(rank: int, port: int, joins: bool, work: Callable[..., None], folder, *inputs) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["OMP_NUM_THREADS"] = "1"  # otherwise accelerate gives each rank threads, which spin
    if not joins:
        torch.distributed.init_process_group("gloo")
    work(folder, *inputs)
    if not joins:
        torch.distributed.destroy_process_group()
