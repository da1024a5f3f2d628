"""Runs an untrusted program in a process of its own, with limits and nothing of value in reach.

    run_program(program, inputs, timeout_s=10, level="strict")  -> Output(reason, text) per input
    run_tests(program, tests, timeout_s=10, level="strict")     -> Output(reason, cause)

Each call starts a supervisor (`jail.py`), which forks the program into a cell. Expected outputs are
never sent there. Tests written as code run in a second cell (`judge.py`), and only plain data
crosses between the two (`proxy.py`). When both cells are gone, a third one may hold program and
tests together: its failure counts, its pass proves nothing. These files stand in `inside/`, the one
folder of ours on the supervisor's path. The verdict never depends on an exit status, and a missing
or malformed reply is never a pass.

At every level: wall and CPU time, memory, number of processes, size of files and of output are
limited. The environment is empty. The working directory is temporary. The whole tree of processes
is killed and waited for. The levels differ in what a program can reach:

    strict    The program has its own user, mount, pid, network, IPC and host name spaces
              (`isolation.py`), whether root starts it or not. It has no network and no System V
              memory, sees and signals no other process, gets 64 MB of disk, and reads no file but
              Python's own, its packages and the system's libraries. Root's programs run as a user
              that does not exist.
    process   For kernels and containers that forbid name spaces. Root's programs still run as a
              user that does not exist. There is no third cell, as a program could leave what it
              has seen there. Not covered: a program can use the network, read what
              everybody may read, write where everybody may write, fill the disk and leave System V
              memory behind, and keys in its user's keyrings. If the grader is not root, a program
              can also do to your files and processes what you can, and its keyrings are yours.

Even `strict` does not cover: holes in the kernel; answers inside an installed Python package; what
shared time and caches reveal; locks on the shared files of /usr and Python, which others must not
wait for, and by which a program in a third cell could tell another, at the same time, what it sees;
which of these files others open (dnotify; inotify and fanotify, too, where a program's
name spaces cannot be limited); a virtual machine's own sockets (AF_VSOCK); many processes that each
use memory up to the limit, although the kernel is asked to kill these first when memory is short.
If the grader is not root: a program can use up its user's quota of keys while it runs, and on older
kernels System V memory is not limited.

Left out: cgroups (they need a delegated tree), seccomp filters, languages other than Python,
systems other than Linux (5.3; strict: 5.12, without root 5.14). Standard library only.
"""

import contextlib
import functools
import marshal
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from typing import NamedTuple

LEVELS = ("strict", "process")
GRACE = 10  # seconds beyond its time limits after which a supervisor counts as broken
UNCOVERED = "A program can use the network and what everybody may read or write" + (
    "." if os.geteuid() == 0 else ", and your files and processes; run as root for more."
)


class SandboxError(RuntimeError):
    """The sandbox itself failed, which says nothing about the program."""


class Output(NamedTuple):
    """A program's output for one input, or the verdict of tests with its cause as `text`.

    `reason` is "ok", "timeout", "memory", "crashed", "output" or "parse_error"; of tests, one of
    `judge.py` in place of "ok".
    """

    reason: str
    text: str


def run_program(
    program: str, inputs: list[str], *, timeout_s: float, level: str
) -> Generator[Output, None, None]:
    """Run a program as a script on each input in turn, within `timeout_s` seconds for all.

    The first output that is not "ok" is the last. Closing the iterator ends the program. Raises
    SandboxError.
    """
    return supervise({"program": program, "inputs": inputs, "timeout_s": timeout_s, "level": level})


def run_tests(program: str, tests: dict, *, timeout_s: float, level: str) -> Output:
    """Run tests against a program's names; returns the reason and its cause.

    The reason is one of `judge.py`, or the limit that was reached; each of two runs has `timeout_s`
    seconds, the second one a second more. Raises SandboxError.
    """
    calls = "fn_name" in tests
    job = {
        "program": program,
        "helpers": calls,
        # the third cell knows what is expected, so it must leave nothing behind
        "beside": level == "strict" and not calls,
        "timeout_s": timeout_s,
        "level": level,
    }
    (output,) = supervise(job, tests)
    return output


def supervise(job: dict, tests: dict | None = None) -> Generator[Output, None, None]:
    """Start a supervisor and yield its replies.

    Raises SandboxError if it fails.
    """
    job["site"] = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    folder = os.path.dirname(__file__) + "/inside"
    # a module is compiled only once
    start = f"import sys; sys.path.append({folder!r}); import jail; jail.main()"
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", start, str(os.getpid())],  # `ps` shows whose it is
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")},
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"no supervisor can be started ({error})") from error
    assert process.stdin and process.stdout  # they are pipes
    guard = threading.Timer(2 * job["timeout_s"] + GRACE, process.kill)  # tests run twice
    guard.daemon = True
    guard.start()
    due = len(job.get("inputs", [""]))  # replies; none follows one that is not "ok"
    try:
        with contextlib.suppress(BrokenPipeError):  # it has ended; its reply may say why
            for message in [job, tests] if tests else [job]:
                # a list that stands in two places is two: a program may empty its arguments
                data = marshal.dumps(message, 2)
                process.stdin.write(len(data).to_bytes(8) + data)
            process.stdin.flush()
        for header in process.stdout:
            reason, size = header.decode().split()
            data = process.stdout.read(int(size))
            if len(data) < int(size):
                break  # it was killed while it replied
            if reason == "sandbox":
                raise SandboxError(data.decode())
            due = due - 1 if reason == "ok" else 0
            yield Output(reason, data.decode("utf-8", "replace"))
    finally:
        with contextlib.suppress(BrokenPipeError):  # it has ended before it read all
            process.stdin.close()  # tells the supervisor to stop
        process.stdout.close()
        process.wait()
        guard.cancel()
    if due:
        if job["level"] == "strict":
            raise SandboxError("the supervisor died")
        yield Output("crashed", "")  # at this level the program may have killed it


def choose_level(wanted: str = "auto") -> str:
    """The level to run at: `wanted`, or for "auto" the strongest that works here.

    Prints once what the level "process" does not cover. Raises SandboxError if no level works.
    """
    # the first of many threads tries the levels, the others find the result in the cache
    with _lock:
        return _try_levels(wanted)


_lock = threading.Lock()


@functools.cache
def _try_levels(wanted: str) -> str:
    if sys.platform != "linux":
        raise SandboxError("the sandbox needs Linux")
    failures = {}  # in order and without repeats
    # a first failure may be chance
    levels = ("strict", "strict", "process") if wanted == "auto" else (wanted, wanted)
    for level in levels:
        try:
            outputs = list(
                run_program(
                    "import decimal\nprint(decimal.Decimal(1))", [""], timeout_s=GRACE, level=level
                )
            )
            if outputs != [Output("ok", "1\n")]:
                raise SandboxError(
                    f"a program that prints 1 gave {outputs}; can other users read "
                    f"{sys.base_prefix}?"
                )
        except SandboxError as error:
            failures[f"{level}: {error}"] = True
            continue
        if level != "strict":
            print(
                f"sandbox level {level}: {'; '.join(failures) or 'asked for'}. {UNCOVERED}",
                file=sys.stderr,
            )
        return level
    raise SandboxError(f"programs cannot be run in the sandbox here ({'; '.join(failures)})")
