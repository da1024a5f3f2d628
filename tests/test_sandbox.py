"""grading/sandbox.py at every level that works here: limits, what a program reaches and leaves.

Programs that fill or fork stay bounded even if the sandbox fails.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import isolation
import pytest
from builders.case_files import cases
from builders.levels import usable

from grading import sandbox
from grading.sandbox import Output, SandboxError, run_program


@pytest.fixture(scope="module", params=sandbox.LEVELS)
def level(request) -> str:
    return usable(request.param)


@pytest.fixture
def strict() -> str:
    """The level with name spaces."""
    return usable("strict")


def run(program: str, level: str, *inputs: str, timeout_s: float = 60) -> list[Output]:
    """All outputs of a program; the limit of time is far off, as the machine may be busy."""
    return list(run_program(program, list(inputs or [""]), timeout_s=timeout_s, level=level))


def sleeping(level: str) -> Iterator[Output]:
    """The outputs of a program that is quick with its first input and slow with its second."""
    program = "import time; print(1); time.sleep(int(input()))"
    return run_program(program, ["0", "600"], timeout_s=600, level=level)


def supervisors() -> list[int]:
    """The processes of this process's sandboxes: all that are forked keep one's command line."""
    mark = f"import jail; jail.main()\0{os.getpid()}\0".encode()
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if mark in path.read_bytes():
                pids.append(int(path.parent.name))
    return pids


def test_a_program_gets_its_input_and_gives_its_output(level, monkeypatch):
    """Each input gets a fresh process, in order, and no input follows a failed one.

    A supervisor's grace begins after its time limit.
    """
    monkeypatch.setattr(sandbox, "GRACE", 0)
    outputs = run("print(int(input()) + 1)", level, "1", "2\n", "3\r\n")
    assert outputs == [Output("ok", "2\n"), Output("ok", "3\n"), Output("ok", "4\n")]
    outputs = run("print(1 / int(input()))", level, "1", "0", "1")
    assert [output.reason for output in outputs] == ["ok", "crashed"]


NESTED = dict(program="(" * 10_000 + ")" * 10_000, reason="parse_error", timeout_s=30)


@pytest.mark.parametrize("case", [*cases("ends.jsonl"), NESTED])
def test_how_a_program_ends(case, level):
    """The reason names the limit or the failure, and a program's own exit status decides nothing.

    Two programs test limits: of files to 16 MB, and of processes to 64.
    """
    outputs = run(case["program"], level, timeout_s=case["timeout_s"])
    assert outputs[0].reason == case["reason"]


def test_the_environment_is_empty_and_the_user_powerless(level, monkeypatch):
    """A program has no secret of the parent, lacks its rights and cannot regain them."""
    monkeypatch.setenv("TOKEN", "secret")
    program = "print('secret' in open('/proc/self/environ').read())"
    assert run(program, level) == [Output("ok", "False\n")]
    if os.geteuid() == 0:
        assert int(run("import os; print(os.getuid())", level)[0].text) >= 10**9
        assert run("import os; os.setuid(0)", level)[0].reason == "crashed"


def test_a_strict_program_sees_nothing_of_the_machine(strict, tmp_path):
    """A program sees no file of others, no process and no network, and cannot mount."""
    (tmp_path / "answer").write_text("42")
    os.chmod(tmp_path, 0o777)
    server = socket.create_server(("127.0.0.1", 0))
    program = f"""
import ctypes, os, socket
print(os.path.exists({str(tmp_path)!r}), os.path.exists({__file__!r}), os.path.exists("/etc/passwd"))
print(sorted(name for name in os.listdir("/proc") if name.isdigit()))
try: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 1); print("connected")
except OSError: print("no network")
for path in ("/usr/x", "/x", "/dev/x", "/proc/sys/kernel/x"):
    try: open(path, "w"); print("wrote")
    except OSError: pass
libc = ctypes.CDLL(None)
print(libc.mount(b"none", b"/", None, 32 | 4096, None), libc.umount2(b"/tmp", 2), libc.sethostname(b"x", 1))
"""
    with server:
        text = run(program, strict)[0].text
    assert text == "False False False\n['1', '2']\nno network\n-1 -1 -1\n"


def test_a_program_has_its_own_group_and_keys(level):
    """`kill(0)` reaches only the program's own processes, and no session keyring is used twice."""
    ask = (isolation.KEYCTL, 0, -3, 0)  # KEYCTL_GET_KEYRING_ID
    program = f"import ctypes, os; print(ctypes.CDLL(None).syscall{ask}, os.getpgrp(), os.getpid())"
    keyrings = {isolation.libc.syscall(*ask)}
    for output in run(program, level, "", ""):
        keyring, group, pid = map(int, output.text.split())
        assert group in (1, pid)
        keyrings.add(keyring)
    assert len(keyrings) == 3 or max(keyrings) < 0


@pytest.mark.skipif(os.geteuid() != 0, reason="older kernels let only root forbid it")
def test_a_strict_program_has_no_system_v_objects(strict):
    """A program makes no System V memory, messages or semaphores, which no limit counts."""
    calls = "libc.shmget(0, 4096, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600)"
    program = f"import ctypes; libc = ctypes.CDLL(None); print({calls})"
    assert run(program, strict) == [Output("ok", "-1 -1 -1\n")]


def test_inputs_share_nothing(level):
    """A file or a daemon of one run is gone in the next."""
    program = """
import os, time
print(os.listdir())
open('left', 'w')
if os.fork() == 0: time.sleep(600)
"""
    assert [output.text for output in run(program, level, "", "")] == ["['program.py']\n"] * 2


def test_nothing_is_left(level):
    """No daemon, no process that ignores signals and no file that forbids its removal is left."""
    before = set(Path("/tmp").glob("program-*"))
    daemon = """
import os, signal, time
signal.signal(15, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(600)
    os._exit(0)
os.makedirs('a/b'); os.chmod('a', 0)
print(1)
"""
    assert run(daemon, level) == [Output("ok", "1\n")]
    assert run(daemon + "time.sleep(600)", level, timeout_s=1)[0].reason == "timeout"
    assert not supervisors()
    for folder in set(Path("/tmp").glob("program-*")) - before:  # of other processes that still run
        assert Path("/proc", folder.name.split("-")[1]).exists() or not folder.exists()


def test_a_pause_cuts_no_reply():
    """A reply is whole after a pause, such as that of a container, or of a laptop that sleeps."""
    command = [sys.executable, "-c", "import jail; jail.reply('ok', bytes(2**20))"]
    inside = Path(isolation.__file__).parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=inside) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        process.send_signal(signal.SIGCONT)
        assert len(process.stdout.read()) > 2**20


def test_closing_the_iterator_ends_the_program(level):
    """The rest of the program does not run once nobody waits for its outputs."""
    outputs = sleeping(level)
    assert next(outputs) == Output("ok", "1\n")
    outputs.close()
    assert not supervisors()


def test_the_end_of_the_supervisor_ends_the_program(level):
    """A supervisor that was killed gives no verdict (strict) or a failure, and nothing outlives it."""
    outputs = sleeping(level)
    next(outputs)
    os.kill(min(supervisors()), signal.SIGKILL)
    if level == "strict":
        with pytest.raises(SandboxError, match="supervisor died"):
            next(outputs)
    else:
        assert next(outputs).reason == "crashed"
    deadline = time.monotonic() + 120
    while supervisors():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_program_cannot_end_its_supervisor(strict):
    """A program ends neither its parent nor its group nor all processes that it can see."""
    for target in ("os.getppid()", "0", "-1", "1"):
        # bounded if the sandbox fails
        program = f"import os\nassert os.getpid() < 9\nos.kill({target}, 9)\nprint(1)"
        outputs = run(program, strict, "", "")
        assert [output.reason for output in outputs] in (["crashed"], ["ok", "ok"])


def test_a_reply_that_is_cut_off_is_no_output(tmp_path, monkeypatch):
    """A supervisor that is killed while it replies, here one that ends there, gives no verdict."""
    (tmp_path / "python").write_text("#!/bin/sh\nprintf 'ok 9\\n1'\n")
    os.chmod(tmp_path / "python", 0o755)
    monkeypatch.setattr(sandbox.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SandboxError, match="supervisor died"):
        run("print(1)", "strict")


def test_the_strongest_level_that_works_is_taken(monkeypatch, capsys):
    """`auto` tries name spaces twice, then says what is not covered without; `strict` refuses."""

    def choose(wanted: str, failures: int) -> str:
        """The level, where the first attempts at name spaces fail."""
        left = [SandboxError("name spaces: Operation not permitted")] * failures

        def supervise(job, tests=None):
            if job["level"] == "strict" and left:
                raise left.pop()
            yield Output("ok", "1\n")

        monkeypatch.setattr(sandbox, "supervise", supervise)
        return sandbox._try_levels.__wrapped__(wanted)

    assert choose("auto", failures=1) == "strict"
    assert capsys.readouterr().err == ""
    assert choose("auto", failures=2) == "process"
    assert "can use the network" in capsys.readouterr().err
    with pytest.raises(SandboxError, match=r"strict: name spaces: Operation not permitted"):
        choose("strict", failures=2)
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="the sandbox needs Linux"):
        choose("auto", failures=0)
