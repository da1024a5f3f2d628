"""The inside of the sandbox: a process that `sandbox.py` starts for each response.

The supervisor has no environment and no expected outputs. It reads a job and forks a cell for it: a
keeper, which isolates itself, forks the program, waits for it and ends every process that the
program has started. A script gets a cell for each input. Tests written as code take two cells with
a socket between them: the program's, forked before the tests are read, and the tests' own
(`judge.py`). A third cell may follow, with both. `sandbox.py` says what protects whom from what.

It must start in milliseconds, hence plain imports, and numbers in place of `signal` and
`subprocess`. Standard library only. Linux only.
"""

import atexit
import builtins
import fcntl
import gc
import io
import marshal
import os
import resource
import select
import sys
import time
import types
from _collections_abc import Callable, Iterator  # without `collections`, which is slow to import

import isolation
from isolation import PR_SET_DUMPABLE, SIGKILL, libc

MEMORY = 2**30  # bytes of address space for each process
PROCESSES = 64  # and threads, of one cell
FILES = 64  # open at a time
FILE = 2**24  # bytes, the largest file
OUTPUT = 2**23  # bytes of standard output
STACK = 2**28  # bytes, if the hard limit allows; honest programs recurse deeply
RECURSION = 10_000  # depth that a program gets without asking for more
STRANGER = 10**9  # plus the keeper's process id: the id of a user that does not exist
M_ARENA_MAX = -8
LIFELINE, REPORT = 8, 9  # file descriptors of a keeper
# from the grader; with a buffer of one byte nothing is read ahead
MESSAGES = io.BufferedReader(io.FileIO(0), 1)

# Exit statuses of a program's process. A program can forge them, so they only tell failures apart.
UNREADABLE, OUT_OF_MEMORY, RAISED = 65, 66, 67
SIGXCPU = 24
REASONS = {
    UNREADABLE: "parse_error",
    OUT_OF_MEMORY: "memory",
    RAISED: "crashed",
    128 + SIGXCPU: "timeout",
}


# ---- the supervisor ------------------------------------------------------------------------------


def main() -> None:
    """Read a job and write the replies."""
    libc.prctl(PR_SET_DUMPABLE, 0)  # no other process of this user may look into this one
    libc.mallopt(M_ARENA_MAX, 2)  # otherwise each thread takes 64 MB of address space
    gc.freeze()  # a program's garbage collection does not visit the objects made so far
    try:
        job = read_message()
        deadline = time.monotonic() + job["timeout_s"]
        run_job = run_inputs if "inputs" in job else run_judge
        for reason, data in run_job(job, deadline):
            reply(reason, data)
    except (BrokenPipeError, EOFError):
        return  # the grader has gone
    except OSError as error:
        reply("sandbox", str(error).encode())


def read_message() -> dict:
    """Read one message of the grader, and not a byte of the next one.

    A cell is a copy of this process, so a program may find what is in memory here. Raises EOFError
    if the grader has gone.
    """
    size = int.from_bytes(MESSAGES.read(8))
    return marshal.loads(MESSAGES.read(size))


def reply(reason: str, data: bytes) -> None:
    """Write a line with the reason and the data's length, then the data."""
    # not os.write, which stops short where this process is paused
    with open(1, "wb", closefd=False) as file:
        file.write(f"{reason} {len(data)}\n".encode() + data)


def run_inputs(job: dict, deadline: float) -> Iterator[tuple[str, bytes]]:
    """Yield (reason, output) of a cell for each input, until one fails."""
    for text in job["inputs"]:
        # a file, as programs may ask for its size, seek in it or map it
        stdin = os.memfd_create("stdin")
        os.write(stdin, text.encode("utf-8", "replace"))
        os.lseek(stdin, 0, os.SEEK_SET)
        reason, data = run_cell(
            lambda: run(job["program"], "__main__"), {0: stdin}, 1, job, deadline
        )
        os.close(stdin)
        yield reason, data
        if reason != "ok":
            return


def run_judge(job: dict, deadline: float) -> Iterator[tuple[str, bytes]]:
    """Yield (reason, its cause) once, of tests in one cell and the program in another.

    The tests' cell is forked when the program's is ready. After a pass, or a failure with a cause,
    one cell with both follows if the job says so, and its failure counts. It has as much time
    again.
    """
    import socket  # slow to import, and not needed for scripts

    import judge
    import proxy

    inside, outside = socket.socketpair()
    helpers = judge.HEADER if job["helpers"] else ""

    def connection() -> io.BufferedRWPair:
        return socket.socket(fileno=3).makefile("rwb")

    def serve_program() -> None:
        sys.stdout = io.TextIOWrapper(io.BytesIO(), "utf-8", "replace", newline="")
        module = run(job["program"], "program", helpers)
        proxy.Inside(connection(), module, sys.stdout).serve()

    def run_across() -> None:
        os.write(4, " ".join(judge.across(connection(), tests)).encode())

    def run_beside() -> None:
        os.write(4, judge.beside(run(job["program"], "program"), tests).encode())

    program = Cell(serve_program, {3: inside.fileno()}, job)
    inside.close()
    tests = read_message()
    ended, data = run_cell(run_across, {3: outside.fileno()}, 4, job, deadline, secret=True)
    outside.close()
    status = program.stop()
    reason, _, cause = data.decode().partition(" ")
    reason = reason or "crashed" if ended == "ok" else ended
    if reason == "crashed":
        reason = REASONS.get(status, reason)
    passed = reason == "correct"
    in_doubt = passed or (cause and reason != "infra_error")
    if in_doubt and job["beside"]:
        # a second more than the first run had, which may have used all its time
        deadline = time.monotonic() + job["timeout_s"] + 1
        ended, data = run_cell(run_beside, {}, 4, job, deadline)
        if data not in (b"correct", b"unsupported"):
            reason = "wrong" if ended == "ok" else ended
        elif not passed:
            reason = "unsupported"
    yield "infra_error" if reason == "unsupported" else reason, cause.encode()


def run_cell(
    target: Callable,
    files: dict[int, int],
    report: int,
    job: dict,
    deadline: float,
    secret: bool = False,
) -> tuple[str, bytes]:
    """Why a new cell ended or was ended, and what it wrote to its descriptor `report`.

    Exits if the grader hangs up.
    """
    output, pipe = os.pipe()
    cell = Cell(target, {**files, report: pipe}, job, secret)
    os.close(pipe)
    data = bytearray()
    reason = ""
    while not reason:
        ready = select.select([output, 0], [], [], max(0.0, deadline - time.monotonic()))[0]
        if 0 in ready:
            cell.stop()
            sys.exit()
        if not ready or time.monotonic() > deadline:
            reason = "timeout"
        else:
            chunk = os.read(output, 2**16)
            if not chunk:
                break
            data += chunk
            reason = "output" if len(data) > OUTPUT else ""
    os.close(output)
    status = cell.stop()
    return reason or REASONS.get(status) or ("crashed" if status > 128 else "ok"), bytes(data)


class Cell:
    """A process that runs `target()`, and its keeper.

    `files` are its descriptors: {number there: number here}. `secret`: no other process of this
    user may look into it. Raises OSError if the cell cannot be made.
    """

    def __init__(
        self, target: Callable, files: dict[int, int], job: dict, secret: bool = False
    ) -> None:
        # when it closes, for whatever reason, the keeper ends the cell
        lifeline, self.lifeline = os.pipe()
        ready, report = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            keep(target, {**files, LIFELINE: lifeline, REPORT: report}, job, secret)
        os.close(lifeline)
        os.close(report)
        with open(ready, "rb") as file:
            state = file.read().decode()
        if state != "ready":
            self.stop()
            raise OSError(state or "a keeper died")

    def stop(self) -> int:
        """End every process of the cell and wait for it; returns the program's exit status.

        The status is a number as `exit_status` gives it.
        """
        os.close(self.lifeline)
        return exit_status(os.waitpid(self.pid, 0)[1])


def exit_status(status: int) -> int:
    """The status of a process as a shell gives it: 128 + the number of the signal that ended it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


# ---- in a cell -----------------------------------------------------------------------------------


def keep(target: Callable, files: dict[int, int], job: dict, secret: bool) -> None:
    """The keeper: isolate, fork, wait until the program ends, kill the rest, exit.

    It also stops waiting when the lifeline closes. Never returns.
    """
    try:
        place(files)
        os.setsid()  # no terminal, and no group to signal but its own
        isolation.leave_keys()
        strict = job["level"] == "strict"
        stranger = STRANGER + os.getpid() if os.geteuid() == 0 else None
        if strict:
            libc.prctl(PR_SET_DUMPABLE, 1)  # otherwise its id maps cannot be written
            # the next fork is process 1; all but root need a new space of users, and are root there
            spaces = isolation.CLONE_ALL + isolation.CLONE_USER * (stranger is None)
            isolation.unshare(spaces, root=True)
        else:
            folder = isolation.enter_folder(stranger)
        child = os.fork()
        if child == 0:
            inside(target, job, strict, stranger, secret)
        os.close(REPORT)
        select.select([LIFELINE, os.pidfd_open(child)], [], [])
        # strict: process 1 of its name space; waiting for it waits for all in there
        os.kill(child, SIGKILL)
        status = exit_status(os.waitpid(child, 0)[1])
        if not strict:
            isolation.clean_up(folder, stranger)
        os._exit(status)
    except BaseException as error:  # the supervisor gets the cause
        give_up(error)


def give_up(error: BaseException) -> None:
    """End a process in which the sandbox, not the program, has failed.

    The supervisor gets the cause.
    """
    try:
        os.write(REPORT, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(RAISED)


def place(files: dict[int, int]) -> None:
    """Have exactly these file descriptors: {number there: number here}.

    Those of 0, 1 and 2 that are not given become the null device.
    """
    null = os.open(os.devnull, os.O_RDWR)
    # copies above all numbers in use, so that none overwrites another
    high = {
        there: fcntl.fcntl(here, fcntl.F_DUPFD, 64)
        for there, here in ({0: null, 1: null, 2: null} | files).items()
    }
    os.closerange(0, 64)
    for there, here in high.items():
        os.dup2(here, there)
    os.closerange(64, 1024)


def inside(target: Callable, job: dict, strict: bool, stranger: int | None, secret: bool) -> None:
    """Set file system, limits and rights, then run `target()`; never returns."""
    try:
        os.close(LIFELINE)
        os.setsid()  # a name space of processes does not keep kill(0) from the keeper's group
        if not secret:
            libc.prctl(PR_SET_DUMPABLE, 1)
            # when memory is short, the kernel kills it first
            isolation.write("/proc/self/oom_score_adj", "1000")
        if strict:
            isolation.build_root(job["site"])
        limit(job["timeout_s"], strict or stranger is not None)
        isolation.give_up_rights(stranger, strict)
        # /dev/stdin needs it, and changing the user cleared it
        libc.prctl(PR_SET_DUMPABLE, int(not secret))
        child = os.fork() if strict else 0
        if child == 0:
            os.write(REPORT, b"ready")
        os.close(REPORT)
    except BaseException as error:  # the supervisor gets the cause
        give_up(error)
    while child:  # process 1 collects orphans; when it exits, all others end
        process, status = os.wait()
        if process == child:
            os._exit(exit_status(status))
    os.environ.clear()
    os.environ.update(
        HOME=os.getcwd(), TMPDIR=os.getcwd(), PATH="/usr/bin:/bin", OMP_NUM_THREADS="1"
    )
    sys.setrecursionlimit(RECURSION)
    sys.set_int_max_str_digits(0)
    sys.path[-1:] = job["site"]  # in place of this folder, which `sandbox.py` has appended
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as `site` would
    os.cpu_count = lambda: 4  # a program that starts a worker for each core stays below PROCESSES
    sys.argv = ["program.py"]
    names = vars(sys)
    sys.executable = names["_base_executable"]  # that of a virtual environment is not here
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        names[name] = names[f"__{name}__"] = open(
            number, "w" if number else "r", encoding="utf-8", errors="replace"
        )
    status = RAISED
    try:
        target()
        if "threading" in sys.modules:  # what the interpreter does at its end
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.modules.pop("__main__", None)
        gc.collect()  # open files are flushed, `__del__` is called
        for name in ("stdout", "__stdout__"):
            try:
                names[name].flush()
            except Exception:  # the program closed or replaced it; the interpreter ignores that
                pass
        status = 0
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        os._exit(status)


def run(source: str, name: str, helpers: str = "") -> types.ModuleType:
    """Run a source as the module `name`, and return it.

    The names of the source `helpers` are built in, but for those of builtins. A script is
    `__main__`. Another name leaves out what stands behind `if __name__ == "__main__"`.
    """
    module = type(sys)(name)
    names: dict = {}
    exec(helpers, names)
    # not module.__dict__: the tests would call heapq's merge for that of a Solution
    vars(builtins).update(names | vars(builtins))
    module.__file__ = os.path.abspath("program.py")
    try:
        with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(source)
    except OSError:  # a full disk; only tracebacks and `inspect` read the file
        pass
    sys.modules[name] = module
    try:
        code = compile(source, "program.py", "exec")
    except Exception:  # also RecursionError and MemoryError, of what is nested too deeply
        os._exit(UNREADABLE)
    try:
        exec(code, module.__dict__)
    except SystemExit:
        pass
    return module


def limit(seconds: float, few_processes: bool) -> None:
    """Set the limits of this process and of those that it starts."""
    limits = dict(
        CPU=int(seconds) + 2,
        AS=MEMORY,
        FSIZE=FILE,
        NPROC=PROCESSES + (0 if few_processes else isolation.count_processes()),
        NOFILE=FILES,
        CORE=1,  # bytes; at 0 the kernel still starts a program that collects cores
        STACK=STACK,
    )
    for name, soft in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        highest = resource.getrlimit(kind)[1]
        hard = soft + 1  # of CPU time: the signal at the soft limit tells the reason
        if name == "STACK":
            hard = highest  # honest programs ask for more; the address space limits it, too
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(kind, (soft, hard))
