"""The inside of the sandbox, a process that `sandbox.py` starts anew for each response.

A supervisor, without environment and without answers, reads a job and forks a cell for it: a keeper, which
isolates and then forks the program, waits, and ends all that the program has started. A script gets a cell for
each input. For tests written as code there are two cells with a socket between them: the program's, forked
before the tests are read, and that of the tests (`judge.py`). What protects whom from what, `sandbox.py` says.

It must start in milliseconds, hence the plain imports and the numbers in place of `signal` and `subprocess`.
Standard library only. Linux only.
"""

import atexit
import builtins
import fcntl
import gc
import marshal
import os
import resource
import select
import struct
import sys
import time

import namespaces
from namespaces import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, check, libc

MEMORY = 2**30  # bytes of address space for each process
PROCESSES = 64  # and threads, of one cell
FILES = 64  # open at a time
FILE = 2**24  # bytes, the largest file
OUTPUT = 2**23  # bytes of standard output
STACK = 2**28  # bytes, as far as the kernel left room; deep recursion is honest
RECURSION = 10_000  # depth that a program has without asking for more
STRANGER = 10**9  # first user id of those that do not exist; the keeper's process id is added
M_ARENA_MAX = -8
LIFELINE, REPORT = 8, 9  # descriptors of a keeper

# Exit statuses of a program's process; what they say is believed only of failures.
UNREADABLE, OUT_OF_MEMORY, RAISED = 65, 66, 67
SIGKILL, SIGXCPU = 9, 24
REASONS = {UNREADABLE: "parse_error", OUT_OF_MEMORY: "memory", RAISED: "crashed", 128 + SIGXCPU: "timeout"}


class Failure(Exception):
    """The sandbox itself failed: says nothing about the program."""


# ---- the supervisor -------------------------------------------------------------------------------------------


def main() -> None:
    """Read a job, write the replies."""
    libc.prctl(PR_SET_DUMPABLE, 0)  # no other process of this user may look into this one
    libc.mallopt(M_ARENA_MAX, 2)  # else each thread takes 64 MB of address space
    gc.freeze()  # what is here now is not looked through when a program's garbage is collected
    try:
        job = read_message()
        deadline = time.monotonic() + job["timeout_s"]
        for reason, data in run_inputs(job, deadline) if "inputs" in job else run_judge(job, deadline):
            reply(reason, data)
    except BrokenPipeError:
        return  # the grader has heard enough
    except (Failure, OSError) as error:
        reply("sandbox", str(error).encode())


def read_message() -> dict:
    """A message of the grader, and not a byte of the next one: what is in memory here, a program may find."""
    (size,) = struct.unpack(">Q", read_exactly(8))
    return marshal.loads(read_exactly(size))


def read_exactly(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            sys.exit()  # the grader has gone
        data += part
    return bytes(data)


def reply(reason: str, data: bytes) -> None:
    """A line with the reason and the data's length, then the data."""
    with open(1, "wb", closefd=False) as file:
        file.write(f"{reason} {len(data)}\n".encode() + data)


def run_inputs(job: dict, deadline: float):
    """(reason, output) of a cell for each input, until one fails."""
    for text in job["inputs"]:
        # A file without a name, not a pipe: it can be read in every way, also by its size and by seeking.
        stdin = os.memfd_create("stdin")
        with open(stdin, "wb", closefd=False) as file:
            file.write(text.encode("utf-8", "replace"))
        os.lseek(stdin, 0, os.SEEK_SET)
        out, into = os.pipe()
        cell = Cell(lambda: run_script(job["program"]), {0: stdin, 1: into}, job)
        os.close(stdin)
        os.close(into)
        reason, data = collect(out, cell, deadline)
        yield reason, data
        if reason != "ok":
            return


def run_judge(job: dict, deadline: float):
    """(reason, its cause) of a cell for the program and, forked once it is there, one for the tests."""
    import socket  # not needed for inputs, which should start fast

    import judge
    import proxy

    inside, outside = socket.socketpair()
    helpers = judge.LEETCODE if job["helpers"] else ""
    program = Cell(
        lambda: proxy.serve(socket.socket(fileno=3), load(job["program"], helpers)), {3: inside.fileno()}, job
    )
    inside.close()
    tests = read_message()
    verdict, into = os.pipe()

    def run_tests():
        os.write(4, " ".join(judge.judge(socket.socket(fileno=3), tests)).encode())

    tester = Cell(run_tests, {3: outside.fileno(), 4: into}, job, secret=True)
    outside.close()
    os.close(into)
    reason, data = collect(verdict, tester, deadline)
    status = program.stop()
    cause = b""
    if reason == "ok":
        said, _, cause = data.partition(b" ")
        reason = said.decode() or "crashed"
    yield REASONS.get(status, reason) if reason == "crashed" else reason, cause


def collect(out: int, cell: "Cell", deadline: float) -> tuple[str, bytes]:
    """Why a cell ended or had to, and what it wrote until then; ends with everything if the grader hangs up."""
    poll = select.poll()
    poll.register(out, select.POLLIN)
    poll.register(0, select.POLLIN)
    data, reason = bytearray(), ""
    while not reason:
        events = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if 0 in events:
            cell.stop()
            sys.exit()
        if not events or time.monotonic() > deadline:
            reason = "timeout"
        elif part := os.read(out, 2**16):
            data += part
            reason = "output" if len(data) > OUTPUT else ""
        else:
            break
    os.close(out)
    status = cell.stop()
    return reason or REASONS.get(status) or ("crashed" if status > 128 else "ok"), bytes(data)


class Cell:
    """A forked process, kept by another one, that runs `target()` with the descriptors `files`, {there: here}.

    `secret`: no other process of this user may look into it. Raises Failure where it cannot be made.
    """

    def __init__(self, target, files: dict[int, int], job: dict, secret: bool = False):
        lifeline, self.lifeline = os.pipe()  # the keeper ends the cell when this closes, for whatever reason
        ready, report = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            keep(target, {**files, LIFELINE: lifeline, REPORT: report}, job, secret)
        os.close(lifeline)
        os.close(report)
        with open(ready, "rb") as file:
            said = file.read().decode()
        if said != "ready":
            self.stop()
            raise Failure(said or "a keeper died")

    def stop(self) -> int:
        """End every process of the cell and wait for them; the program's exit status, 128 + a signal's number."""
        os.close(self.lifeline)
        return exit_status(os.waitpid(self.pid, 0)[1])


def exit_status(status: int) -> int:
    """As a shell gives it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


# ---- in a cell ------------------------------------------------------------------------------------------------


def keep(target, files: dict[int, int], job: dict, secret: bool) -> None:
    """The keeper: isolates, forks, waits until the program ends or the lifeline closes, kills the rest, exits."""
    try:
        place(files)
        os.setsid()  # no terminal, and no group to signal but its own
        strict = job["level"] == "strict"
        stranger = STRANGER + os.getpid() if os.geteuid() == 0 else None
        if strict:
            libc.prctl(PR_SET_DUMPABLE, 1)  # else its id maps cannot be written
            namespaces.unshare(stranger is None)
        else:
            check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1), "subreaper")  # orphans come to the keeper
            home = make_home(stranger)
            os.chdir(f"{home}/home")
        child = os.fork()
        if child == 0:
            inside(target, job, strict, stranger, secret)
        os.close(REPORT)
        poll = select.poll()
        poll.register(LIFELINE, select.POLLIN)
        poll.register(os.pidfd_open(child), select.POLLIN)
        poll.poll()
        os.kill(child, SIGKILL)  # strict: the init of its name space; waiting for it waits for all in there
        status = exit_status(os.waitpid(child, 0)[1])
        if not strict:
            try:
                kill_rest(stranger)
                remove(home, stranger)
            except OSError:  # no more processes, say: what it leaves is no fault of the program's
                pass
        os._exit(status)
    except BaseException as error:
        give_up(error)


def give_up(error: BaseException) -> None:
    """End a process in which the sandbox, not the program, has failed."""
    try:
        os.write(REPORT, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(RAISED)


def place(files: dict[int, int]) -> None:
    """Have exactly these descriptors, and the null device for what lacks of 0, 1 and 2."""
    null = os.open(os.devnull, os.O_RDWR)
    files = {0: null, 1: null, 2: null, **files}
    high = {there: fcntl.fcntl(here, fcntl.F_DUPFD, 64) for there, here in files.items()}
    os.closerange(0, 64)
    for there, here in high.items():
        os.dup2(here, there)
    os.closerange(64, 1024)


def inside(target, job: dict, strict: bool, stranger: int | None, secret: bool) -> None:
    """Up to the program: file system, limits, rights; then `target()`. Never returns."""
    try:
        os.close(LIFELINE)
        if not secret:
            libc.prctl(PR_SET_DUMPABLE, 1)
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # when memory is short, the kernel takes it first
        if strict:
            namespaces.build_root(job["site"])
        limit(job["timeout_s"], strict or stranger is not None)
        namespaces.give_up_rights(stranger, strict)
        libc.prctl(PR_SET_DUMPABLE, int(not secret))  # changing the user cleared it; /dev/stdin needs it
        child = os.fork() if strict else 0
        if child == 0:
            os.write(REPORT, b"ready")
        os.close(REPORT)
    except BaseException as error:
        give_up(error)
    while child:  # process 1 collects orphans, and with it all others end
        process, status = os.wait()
        if process == child:
            os._exit(exit_status(status))
    os.environ.clear()
    os.environ.update(HOME=os.getcwd(), PATH="/usr/bin:/bin", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    sys.setrecursionlimit(RECURSION)
    sys.set_int_max_str_digits(0)
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)] + job["site"]
    builtins.exit = builtins.quit = sys.exit  # as `site` would
    os.cpu_count = lambda: 4  # who starts a worker a core does not run into the limit of processes
    sys.argv, sys.executable = ["program.py"], sys._base_executable  # which is there to be run
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="replace")
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="replace")
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="replace")
    status = RAISED
    try:
        target()
        if "threading" in sys.modules:  # what the interpreter does at its end
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.modules.pop("__main__", None)
        gc.collect()  # open files are flushed, `__del__` is called
        for stream in (sys.stdout, sys.__stdout__):
            try:
                stream.flush()
            except Exception:  # closed or replaced by the program: as the interpreter does, leave it
                pass
        status = 0
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        os._exit(status)


def run_script(source: str) -> None:
    """Run a program as Python runs a script."""
    try:
        run(source, type(sys)("__main__"))
    except SystemExit:
        pass


def load(source: str, helpers: str) -> dict:
    """The names of a program that is not the main one, so that `if __name__ == "__main__"` stays out."""
    module = type(sys)("program")
    exec(helpers, module.__dict__)
    try:
        run(source, module)
    except SystemExit:
        pass
    return module.__dict__


def run(source: str, module) -> None:
    """Execute a source in a module of its own."""
    module.__file__ = os.path.abspath("program.py")
    with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(source)
    sys.modules[module.__name__] = module
    try:
        code = compile(source, "program.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        os._exit(UNREADABLE)
    exec(code, module.__dict__)


def limit(seconds: float, few_processes: bool) -> None:
    """The limits of the process and of those that it starts."""
    cpu = int(seconds) + 2
    for what, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NPROC, PROCESSES + (0 if few_processes else count_processes())),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_CORE, 1),  # bytes; at 0 the kernel still starts a program that collects cores
        (resource.RLIMIT_STACK, STACK),
    ):
        hard = resource.getrlimit(what)[1]
        room = float("inf") if hard == resource.RLIM_INFINITY else hard
        later = value + (what == resource.RLIMIT_CPU)  # first the signal that says why
        resource.setrlimit(what, (min(value, room), min(later, room)))


def count_processes() -> int:
    """Processes and threads of this user, who shares one count with all of them."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has just ended
            continue
    return count


# ---- without name spaces --------------------------------------------------------------------------------------


def make_home(stranger: int | None) -> str:
    """A temporary directory, in which `home` belongs to the program's user: root's cannot be renamed by it."""
    folder = f"/tmp/program-{os.getpid()}-{time.time_ns()}"
    os.mkdir(folder, 0o711)
    os.mkdir(f"{folder}/home", 0o700)
    if stranger is not None:
        os.chown(f"{folder}/home", stranger, stranger)
    return folder


def remove(folder: str, stranger: int | None) -> None:
    """Remove it, with the program's rights and no others; it can forbid its directories and make them very deep."""
    remover = os.fork()
    if remover == 0:
        if stranger is not None:
            os.setresuid(stranger, stranger, stranger)
        os.execl("/bin/sh", "sh", "-c", 'cd "$0" && chmod -R u+rwx home; rm -rf home', folder)
    os.waitpid(remover, 0)
    for path in (f"{folder}/home", folder):  # as a stranger's, `home` itself could not be removed by it
        try:
            os.rmdir(path)
        except OSError:  # removed already, or it resists and is left: the verdict stands
            pass


def kill_rest(stranger: int | None) -> None:
    """End every process that a program has left, for two seconds at most: the keeper is the parent of orphans."""
    end = time.monotonic() + 2
    while time.monotonic() < end:
        if stranger is None:
            for process in descendants(os.getpid()):
                signal_it(process)
        elif killer := os.fork():
            os.waitpid(killer, 0)
        else:
            os.setresuid(stranger, stranger, stranger)
            signal_it(-1)  # all of this user, at one moment
            os._exit(0)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def signal_it(process: int) -> None:
    """Kill a process, if it is still there."""
    try:
        os.kill(process, SIGKILL)
    except ProcessLookupError:
        pass


def descendants(root: int) -> list[int]:
    """The processes below `root`."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        children.setdefault(parent, []).append(int(name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found[1:]
