"""What holds a program in its cell.

At the level `strict` these are Linux name spaces; at the level `process`, where those are
forbidden, a folder, a user and signals. `sandbox.py` says what each covers.

The calls go through ctypes, because `os.unshare` exists from Python 3.12 on and mount(2) is not in
Python at all. Name spaces need Linux 5.12 (one call makes all mounts read-only), and either root or
a kernel and a container that let users make them. Used by `jail.py`, hence plain imports only.

`stranger` is the id of the program's user, None if the grader is not root and cannot change it.
"""

import ctypes
import errno
import os
import stat
import struct
import sys
import time
from _collections_abc import Callable  # without `collections`, which is slow to import

DISK = 2**26  # bytes, all files in /tmp together
HOME = "/tmp/program"
SIGKILL = 9
KILLING = 2  # seconds that the killing of processes may take

CLONE_MOUNT, CLONE_USER = 0x00020000, 0x10000000
# and name spaces of the host name, IPC, processes and the network
CLONE_ALL = CLONE_MOUNT + 0x04000000 + 0x08000000 + 0x20000000 + 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY = 442, -100, 0x8000, 1
# numbers of system calls, which differ by processor
PIVOT_ROOT, KEYCTL = {"x86_64": (155, 250), "aarch64": (41, 219)}.get(os.uname().machine, (-1, -1))
KEYCTL_JOIN_SESSION_KEYRING = 1
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 36, 38
libc = ctypes.CDLL(None, use_errno=True)


# ---- at both levels ------------------------------------------------------------------------------


def check(result: int, what: str) -> None:
    """Raise OSError if a call of the C library failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def write(path: str, text: str) -> None:
    """Write a file of /proc: a setting of the kernel or of this process."""
    with open(path, "w") as file:
        file.write(text)


def leave_keys() -> None:
    """Join a new session keyring.

    A program then neither reads the grader's keys nor leaves any for the next program.
    """
    result = libc.syscall(KEYCTL, KEYCTL_JOIN_SESSION_KEYRING, None)
    # where there are no keys, there are none to hide
    if ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        check(result, "a keyring")


def give_up_rights(stranger: int | None, strict: bool) -> None:
    """Give up root's identity, and the rights that a name space of users gave.

    Root becomes `stranger`, a user that does not exist.
    """
    if stranger is not None:
        if stat.S_ISFIFO(os.fstat(1).st_mode):
            os.fchown(1, stranger, stranger)  # so that /dev/stdout can be opened
        os.setgroups([])
        os.setresgid(stranger, stranger, stranger)
        os.setresuid(stranger, stranger, stranger)
        libc.prctl(PR_SET_DUMPABLE, 1)  # the change of user cleared it; what follows needs it
    if strict:
        forbid_name_spaces()
        check(libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)), "rights")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new rights")


# ---- strict --------------------------------------------------------------------------------------


def unshare(spaces: int, root: bool) -> None:
    """unshare(2).

    In a new name space of users this process is root if `root`, otherwise it keeps its ids.
    """
    user, group = os.geteuid(), os.getegid()
    check(libc.unshare(spaces), "name spaces")
    if spaces & CLONE_USER:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{0 if root else user} {user} 1")
        write("/proc/self/gid_map", f"{0 if root else group} {group} 1")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    result = libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode())
    check(result, f"mounting {target}")


def change_mounts(path: str, add: int = 0, remove: int = 0, flags: int = 0) -> None:
    """mount_setattr(2)."""
    changes = struct.pack("4Q", add, remove, 0, 0)
    check(
        libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, changes, len(changes)),
        f"changing {path}",
    )


def build_root(site: list[str]) -> None:
    """Replace the root by one that holds little more than Python and the system's libraries.

    These are read-only. There are also a few devices, its own /proc and an empty /tmp.
    """
    new = "/proc"  # a directory that exists everywhere and that nothing below needs
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", new, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    os.mkdir(f"{new}/tmp")  # before the others, as Python may lie in there
    mount(
        "tmpfs",
        f"{new}/tmp",
        "tmpfs",
        MS_NOSUID | MS_NODEV,
        f"mode=1777,size={DISK},nr_inodes=4096",
    )
    for path in (
        "/usr",
        "/lib",
        "/lib64",
        "/bin",
        "/sbin",
        "/etc/alternatives",
        sys.base_prefix,
        *site,
    ):
        if os.path.islink(path) and not os.path.lexists(new + path):
            os.symlink(os.readlink(path), new + path)
        elif os.path.isdir(path) and not os.path.exists(new + path):
            os.makedirs(new + path)
            mount(path, new + path, "", MS_BIND | MS_REC)
    os.mkdir(f"{new}/dev")
    os.makedirs(f"{new}/etc", exist_ok=True)
    for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/etc/ld.so.cache"):
        if os.path.exists(path):
            os.close(os.open(new + path, os.O_CREAT))
            mount(path, new + path, "", MS_BIND)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{new}/dev/{name}")
    os.symlink("/tmp", f"{new}/dev/shm")
    os.mkdir(f"{new}/proc")
    mount("proc", f"{new}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    change_mounts(new, add=ATTR_RDONLY, flags=AT_RECURSIVE)
    for path in ("tmp", "proc"):
        change_mounts(f"{new}/{path}", remove=ATTR_RDONLY)
    forbid_system_v(f"{new}/proc/sys/kernel")
    os.chdir(new)
    # on top of the old one, which the next call detaches
    check(libc.syscall(PIVOT_ROOT, b".", b"."), "a new root")
    check(libc.umount2(b".", 2), "leaving the old root")
    os.mkdir(HOME)
    os.chmod(HOME, 0o777)
    os.chdir(HOME)


def forbid_system_v(folder: str) -> None:
    """No System V memory, messages and semaphores, which no limit of a process counts."""
    for name, text in (("shmmni", "0"), ("msgmni", "0"), ("sem", "0 0 0 0")):
        try:
            write(f"{folder}/{name}", text)
        except OSError:  # older kernels let only root change these
            continue


def forbid_name_spaces() -> None:
    """Forbid further name spaces, inotify and fanotify, and writing in /proc.

    In a further name space a program could mount file systems of any size. inotify and fanotify
    show when others open the files of /usr.
    """
    try:
        unshare(CLONE_USER + CLONE_MOUNT, root=False)
        for name in ("user_namespaces", "inotify_instances", "fanotify_groups"):
            path = f"/proc/sys/user/max_{name}"
            # the last one is missing where the kernel leaves fanotify to root
            if os.path.exists(path):
                write(path, "0")
        change_mounts("/proc", add=ATTR_RDONLY)
    except OSError:
        return  # users may not make or use name spaces here, and so the program may not, either


# ---- process -------------------------------------------------------------------------------------


def enter_folder(stranger: int | None) -> str:
    """Make a temporary directory, work in it, and return its path.

    It belongs to the program's group, so that the program can neither rename nor open it to others.
    Orphans of the program become this process's children.
    """
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1), "subreaper")
    folder = f"/tmp/program-{os.getpid()}-{time.time_ns()}"
    os.mkdir(folder, 0o700)
    if stranger is not None:
        os.chown(folder, -1, stranger)
        os.chmod(folder, 0o770)
    os.chdir(folder)
    return folder


def clean_up(folder: str, stranger: int | None) -> None:
    """Kill the program's processes and remove its directory as far as its rights reach.

    The verdict stands, even if this fails.
    """
    try:
        kill_rest(stranger)
        # the program may have forbidden or deeply nested its directories
        remove = 'chmod -R u+rwx "$0"; rm -rf "$0"'
        run_as(stranger, lambda: os.execl("/bin/sh", "sh", "-c", remove, folder))
        os.rmdir(folder)  # the program's user can only empty it
    except OSError:  # no process can be forked, or the folder is gone already, or left behind
        return


def kill_rest(stranger: int | None) -> None:
    """End every process that a program has left.

    Orphans become children of this process, so that killing its children reaches all. If the grader
    is not root, this needs a kernel with CONFIG_PROC_CHILDREN, which distributions have.
    """
    deadline = time.monotonic() + KILLING
    while time.monotonic() < deadline:
        if stranger is None:
            with open("/proc/thread-self/children") as file:
                for process in file.read().split():
                    os.kill(int(process), SIGKILL)
        else:
            run_as(stranger, lambda: os.kill(-1, SIGKILL))  # all processes of this user at once
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def run_as(stranger: int | None, act: Callable) -> None:
    """Call `act()` in a process with the program's rights only, and wait for it."""
    child = os.fork()
    if child == 0:
        try:
            if stranger is not None:
                os.setresgid(stranger, stranger, stranger)
                os.setresuid(stranger, stranger, stranger)
            act()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


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
