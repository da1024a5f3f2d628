"""The sandbox's level `process`, where name spaces are forbidden; `sandbox.py` says what it does
not cover.

    enter(stranger)              work in a temporary directory; orphans of the program become this
                                 process's children
    clean_up(folder, stranger)   end every process that the program has left, and remove the
                                 directory
    count_processes()            processes that share this user's limit

`stranger`: the id of the program's user, None if the grader is not root and cannot change it. Used
by `jail.py`, hence plain imports only.
"""

import os
import time

from namespaces import PR_SET_CHILD_SUBREAPER, check, libc

SIGKILL = 9
KILLING = 2  # seconds that the killing of processes may take


def enter(stranger: int | None) -> str:
    """Make a temporary directory and work in its `home`, which the program's user owns but cannot
    rename.
    """
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1), "subreaper")
    folder = f"/tmp/program-{os.getpid()}-{time.time_ns()}"
    os.mkdir(folder, 0o711)
    os.mkdir(f"{folder}/home", 0o700)
    if stranger is not None:
        os.chown(f"{folder}/home", stranger, stranger)
    os.chdir(f"{folder}/home")
    return folder


def clean_up(folder: str, stranger: int | None) -> None:
    """Kill the program's processes and remove its directory as far as its rights reach; the verdict
    stands anyway.
    """
    try:
        kill_rest(stranger)
        remover = os.fork()
        if remover == 0:
            # with the program's rights only: it may have forbidden or deeply nested its directories
            if stranger is not None:
                os.setresuid(stranger, stranger, stranger)
            os.execl("/bin/sh", "sh", "-c", 'cd "$0" && chmod -R u+rwx home; rm -rf home', folder)
        os.waitpid(remover, 0)
    except OSError:  # for example, no process can be forked
        return
    for path in (f"{folder}/home", folder):  # the program's user could not remove `home` itself
        try:
            os.rmdir(path)
        except OSError:  # removed already, or left behind
            continue


def kill_rest(stranger: int | None) -> None:
    """End every process that a program has left; orphans are children of this process."""
    deadline = time.monotonic() + KILLING
    while time.monotonic() < deadline:
        if stranger is None:
            for process in descendants(os.getpid()):
                try:
                    os.kill(process, SIGKILL)
                except ProcessLookupError:  # it has ended meanwhile
                    continue
        else:
            killer = os.fork()
            if killer == 0:
                try:
                    os.setresuid(stranger, stranger, stranger)
                    os.kill(-1, SIGKILL)  # all processes of this user at once
                finally:
                    os._exit(0)
            os.waitpid(killer, 0)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def descendants(root: int) -> list[int]:
    """The processes below `root`."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
        children.setdefault(parent, []).append(int(name))
    tree = [root]
    for process in tree:  # grows
        tree += children.get(process, [])
    return tree[1:]


def count_processes() -> int:
    """The processes and threads of this user, which all share one limit."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended meanwhile
            continue
    return count
