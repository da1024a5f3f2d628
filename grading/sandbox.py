"""Runs a stranger's program: in a process of its own, under limits, with nothing in reach that is worth finding.

    for output in run_program(program, inputs, timeout_s=10, level="strict"):   # Output(reason, text) of each input
    run_tests(program, tests, timeout_s=10, level="strict")                     # why the tests ended

Each call starts a supervisor (`jail.py`) which forks the program into a cell. No expected output is ever sent
there; tests written as code go to a second cell (`judge.py`), and plain data between the two (`proxy.py`). The
verdict never hangs on an exit status, and what is missing or malformed is never a pass.

Always: wall and CPU time, memory and number of processes, size of files and of output are limited; the environment
is emptied; a temporary directory, removed afterwards, is the working directory; the whole tree of processes is
killed and waited for. Then, by level:

    strict    user, mount, pid, network, IPC and host name spaces of its own (`namespaces.py`), for root and for
              others: no network, no other process to see or signal, 64 MB of disk, no file but Python's own, its
              packages and the system's libraries, read-only. root's programs run as a user that does not exist.
    process   where the kernel or a container forbids that. As root, the program still runs as a user that does
              not exist. Not covered then: it can use the network, read what everybody may read, write where
              everybody may write, fill the disk and leave System V memory behind; not run by root, it can also do
              to your files and processes what you can.

What even `strict` does not cover: holes in the kernel; answers that lie in an installed Python package; what can be
learnt from shared time and caches; a virtual machine's own sockets (AF_VSOCK); many processes that use up to the
memory limit each, though the kernel is asked to kill them first when memory is short.

Left out: cgroups (they need a delegated tree), seccomp filters, languages other than Python, systems other than
Linux (5.3; strict: 5.12, not as root 5.14). Standard library only.
"""

import contextlib
import functools
import marshal
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

LEVELS = ("strict", "process")
GRACE = 10  # seconds that a supervisor may take above its time limit before it counts as broken
UNCOVERED = "A program can use the network, read what everybody may read and write where everybody may write" + (
    "." if os.geteuid() == 0 else ", and do to your files and processes what you can; run as root for more."
)


class SandboxError(RuntimeError):
    """The sandbox itself failed: says nothing about the program."""


class Output(NamedTuple):
    """What a program did with one input: "ok" or why not (timeout, memory, crashed, output, parse_error)."""

    reason: str
    text: str


def run_program(program: str, inputs: list[str], *, timeout_s: float, level: str) -> Iterator[Output]:
    """Run a program as a script on each input in turn; `timeout_s` seconds for all. Raises SandboxError.

    Stop early by closing the iterator. After the first output that is not "ok" no other follows.
    """
    job = {"program": program, "inputs": inputs, "timeout_s": timeout_s, "level": level}
    for reason, data in supervise(job):
        yield Output(reason, data.decode("utf-8", "replace"))


def run_tests(program: str, tests: dict, *, timeout_s: float, level: str) -> Output:
    """Load a program and run tests against its names: the reason is `judge.judge`'s or a limit's, the text its cause.

    Raises SandboxError.
    """
    job = {"program": program, "helpers": "fn_name" in tests, "timeout_s": timeout_s, "level": level}
    ((reason, data),) = supervise(job, tests)
    return Output(reason, data.decode("utf-8", "replace"))


def supervise(job: dict, tests: dict | None = None) -> Iterator[tuple[str, bytes]]:
    """Start a supervisor and yield its replies. Raises SandboxError where it fails."""
    job["site"] = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    folder = os.path.dirname(os.path.abspath(__file__))
    start = f"import sys; sys.path.append({folder!r}); import jail; jail.main()"  # as a module: it is compiled once
    command = [sys.executable, "-I", "-S", "-c", start]
    keep = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process = subprocess.Popen(command, **pipes, env=keep, cwd="/", start_new_session=True)
    except OSError as error:
        raise SandboxError(f"no supervisor can be started ({error})") from error
    guard = threading.Timer(job["timeout_s"] + GRACE, process.kill)
    guard.daemon = True
    guard.start()
    reasons = []
    try:
        with contextlib.suppress(BrokenPipeError):  # it has ended, and has perhaps said why
            for message in (job, tests) if tests else (job,):
                data = marshal.dumps(message)
                process.stdin.write(struct.pack(">Q", len(data)) + data)
            process.stdin.flush()
        while header := process.stdout.readline():
            reason, size = header.decode().split()
            data = process.stdout.read(int(size))
            if len(data) < int(size):
                break  # it was killed in mid-reply
            if reason == "sandbox":
                raise SandboxError(data.decode())
            reasons.append(reason)
            yield reason, data
    finally:
        with contextlib.suppress(BrokenPipeError):  # what was not flushed, to one that has ended
            process.stdin.close()  # tells the supervisor to stop
        process.stdout.close()
        process.wait()
        guard.cancel()
    if set(reasons) <= {"ok"} and len(reasons) < len(job.get("inputs", [None])):
        if job["level"] == "strict":
            raise SandboxError("the supervisor died")
        yield "crashed", b""  # at this level its program can have killed it


def choose_level(wanted: str = "auto") -> str:
    """The level to run at: "strict", "process", or "auto" for the stronger one that works here.

    Says so, once, if that is the weaker one. Raises SandboxError where `wanted` does not work.
    """
    with _lock:  # the first of many threads tries it
        return _try_levels(wanted)


_lock = threading.Lock()


@functools.cache
def _try_levels(wanted: str) -> str:
    failures = []
    for level in ("strict", *LEVELS) if wanted == "auto" else (wanted, wanted):  # a failure may have been a chance one
        try:
            outputs = list(run_program("import decimal\nprint(decimal.Decimal(1))", [""], timeout_s=GRACE, level=level))
            if outputs != [Output("ok", "1\n")]:
                raise SandboxError(f"a program that prints 1 gave {outputs}; can other users read {sys.base_prefix}?")
        except SandboxError as error:
            failures.append(f"{level}: {error}")
            continue
        failures = list(dict.fromkeys(failures))
        if level != "strict":
            print(f"sandbox level {level}: {'; '.join(failures) or 'asked for'}. {UNCOVERED}", file=sys.stderr)
        return level
    raise SandboxError(f"programs cannot be run in the sandbox here ({'; '.join(dict.fromkeys(failures))})")
