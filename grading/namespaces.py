"""The sandbox's level `strict`: Linux name spaces, called through the C library.

    leave_keys()                      an empty session keyring, at every level
    unshare(new_user)                 new name spaces of users, mounts, processes, network, IPC and
                                      host name
    build_root(site)                  in process 1 of them: a read-only root with Python in it, an
                                      almost empty /tmp
    give_up_rights(stranger, strict)  drop every right, for good

The calls go through ctypes, because `os.unshare` exists from Python 3.12 on and mount(2) is not in
Python at all. They need Linux 5.12 (one call makes all mounts read-only), and either root or a
kernel and a container that let users make name spaces. Used by `jail.py`, hence plain imports only.
"""

import ctypes
import errno
import os
import stat
import struct
import sys

DISK = 2**26  # bytes, all files in /tmp together
HOME = "/tmp/program"

CLONE = dict(mount=0x00020000, uts=0x04000000, ipc=0x08000000, pid=0x20000000, net=0x40000000)
CLONE_USER = 0x10000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY = 442, -100, 0x8000, 1
PIVOT_ROOT, KEYCTL = {"x86_64": (155, 250), "aarch64": (41, 219)}.get(os.uname().machine, (-1, -1))
KEYCTL_JOIN_SESSION_KEYRING = 1
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 36, 38
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError if a call of the C library failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def write(path: str, text: str) -> None:
    """Set something of the kernel's, or of this process's, in /proc."""
    with open(path, "w") as file:
        file.write(text)


def leave_keys() -> None:
    """Join a new session keyring: a program neither reads the grader's keys nor leaves any for the
    next program.
    """
    result = libc.syscall(KEYCTL, KEYCTL_JOIN_SESSION_KEYRING, None)
    if ctypes.get_errno() not in (
        errno.ENOSYS,
        errno.EPERM,
    ):  # where there are no keys, there are none to hide
        check(result, "a keyring")


def unshare(new_user: bool) -> None:
    """Move this process into new name spaces, where its next fork is process 1. All but root need
    `new_user`.
    """
    user, group = os.geteuid(), os.getegid()
    check(libc.unshare(sum(CLONE.values()) + CLONE_USER * new_user), "name spaces")
    if new_user:
        map_user(f"0 {user} 1", f"0 {group} 1")


def map_user(users: str, groups: str) -> None:
    """Say which user and group this process is in its new name space of users."""
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", users)
    write("/proc/self/gid_map", groups)


def forbid_name_spaces() -> None:
    """Forbid further name spaces, where a program could mount file systems of any size, and writing
    in /proc.

    Also inotify and fanotify, which show when others open the files of /usr.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        check(libc.unshare(CLONE_USER | CLONE["mount"]), "name spaces")
        map_user(f"{user} {user} 1", f"{group} {group} 1")
        for name in ("user_namespaces", "inotify_instances", "fanotify_groups"):
            path = f"/proc/sys/user/max_{name}"
            if os.path.exists(
                path
            ):  # the last one is missing where the kernel leaves fanotify to root
                write(path, "0")
        change_mounts("/proc", add=ATTR_RDONLY)
    except OSError:
        return  # users may not make or use name spaces here, and so the program may not, either


def mount(
    source: str, target: str, kind: str | None = None, flags: int = 0, options: str = ""
) -> None:
    """mount(2)."""
    kind_bytes = kind.encode() if kind else None
    check(
        libc.mount(source.encode(), target.encode(), kind_bytes, flags, options.encode()),
        f"mounting {target}",
    )


def change_mounts(path: str, add: int = 0, remove: int = 0, flags: int = 0) -> None:
    """mount_setattr(2)."""
    changes = struct.pack("4Q", add, remove, 0, 0)
    check(
        libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, changes, len(changes)),
        f"changing {path}",
    )


def build_root(site: list[str]) -> None:
    """Replace the root: Python and the system's libraries read-only, a few devices, its own /proc,
    an empty /tmp.
    """
    new = "/proc"  # a directory that exists everywhere and that nothing below needs
    mount("none", "/", None, MS_REC | MS_PRIVATE)
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
            mount(path, new + path, None, MS_BIND | MS_REC)
    os.mkdir(f"{new}/dev")
    os.makedirs(f"{new}/etc", exist_ok=True)
    for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/etc/ld.so.cache"):
        if os.path.exists(path):
            os.close(os.open(new + path, os.O_CREAT))
            mount(path, new + path, None, MS_BIND)
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
    check(
        libc.syscall(PIVOT_ROOT, b".", b"."), "a new root"
    )  # on top of the old one, which the next call detaches
    check(libc.umount2(b".", 2), "leaving the old root")
    os.mkdir(HOME, 0o777)
    os.chmod(HOME, 0o777)
    os.chdir(HOME)


def forbid_system_v(folder: str) -> None:
    """No System V memory, messages and semaphores, which no limit of a process counts."""
    for name, text in (("shmmni", "0"), ("msgmni", "0"), ("sem", "0 0 0 0")):
        try:
            write(f"{folder}/{name}", text)
        except OSError:  # older kernels let only root change these
            continue


def give_up_rights(stranger: int | None, strict: bool) -> None:
    """Root becomes a user that does not exist; any user loses the rights that a name space of users
    gave.
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
        check(
            libc.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", 0, 0, 0, 0, 0, 0)),
            "rights",
        )
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new rights")
