"""Takes Linux away from every Python that has this folder on its PYTHONPATH.

Gone are the platform's name, the kernel's files, and the calls and the limit of memory that other
systems lack.
"""

import errno
import os
import platform
import resource
import sys
import sysconfig

import psutil  # noqa: F401  (accelerate's; it refuses to be imported under an unknown name)

KERNEL = ("/proc", "/sys")
CALLS = {"prctl", "unshare", "mount", "capset", "mallopt"}

sysconfig.get_config_vars()  # kept from here on; they stand in a file named by the platform
sys.platform = "other"
platform.system = lambda: "Other"
os.process_cpu_count = os.cpu_count  # as where the next function is missing
del os.sched_getaffinity, os.memfd_create, os.pidfd_open, resource.prlimit


def refuse(event: str, arguments: tuple) -> None:
    """Fail as another system would."""
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(KERNEL):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])
    if event == "ctypes.dlsym" and arguments[1] in CALLS:
        raise AttributeError(arguments[1])
    if event == "resource.setrlimit" and arguments[0] == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")


sys.addaudithook(refuse)
