"""Bubblewrap around the zygote, on machines that allow namespaces to it and not to everybody.

Workers are forks of a warm interpreter, and bubblewrap starts programs; so where this process may
make namespaces itself, it does (`worker/isolation.py`), and the result is the same. Some systems
forbid that (a hardened kernel, AppArmor's restriction of user namespaces) but have a bubblewrap that is
allowed to. There the whole zygote runs inside one: network, IPC and UTS namespaces, a read-only
system, private and hidden folders. Process ids stay those of the machine, because the judge stops
and kills workers by them; the layers that this leaves out are reported as missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from .worker import isolation

_TRIAL_S = 10.0

LAYERS: dict[str, Any] = {
    **dict.fromkeys(
        ("net_ns", "ipc_ns", "uts_ns", "mount_ns", "read_only_system", "private_folders", "hidden_judge"),
        True,
    ),
    "pid_ns": "bubblewrap runs the zygote: its workers keep the machine's process ids",
    "fresh_proc": "needs a PID namespace",
    "kernel_settings": "bubblewrap runs the zygote: /proc is the machine's",
    "few_devices": "bubblewrap runs the zygote: /dev is the machine's",
    "user_ns": "made by bubblewrap for the zygote, not for each worker",
    "scratch_limit": "bubblewrap runs the zygote: scratch folders lie on the disk",
}  # fmt: skip
"""What it gives to every worker, or why not."""


def namespaces_allowed() -> bool:
    """Whether this process may make the namespaces itself, tried in a fork."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            as_root = os.getuid() == 0
            entered = isolation.enter_namespaces({}, as_root=as_root)
            if not entered and as_root:
                entered = isolation.enter_namespaces({})
            code = 0 if entered else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def works() -> bool:
    """Whether bubblewrap is installed and can make the namespaces."""
    found = shutil.which("bwrap")
    if not found:
        return False
    trial = [found, "--ro-bind", "/", "/", *_NAMESPACES, "true"]
    try:
        return not subprocess.run(trial, capture_output=True, timeout=_TRIAL_S).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def command(scratch: Path, package: Path, hidden: list[str], private: list[str]) -> list[str]:
    """What to put before the zygote's command.

    Args:
        scratch: folder that stays writable.
        package: the worker's code, a copy below `scratch`.
        hidden: folders that appear empty.
        private: folders of which only what interpreter and compilers need is left.
    """
    found = shutil.which("bwrap")
    assert found is not None
    needed = isolation.needed_folders()
    words = [found, "--die-with-parent", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev"]
    words += ["--bind", "/proc", "/proc", *_NAMESPACES]
    covered = []
    for path in private:
        if any(path == other or path.startswith(other + "/") for other in needed):
            continue
        covered.append(path)
        words += ["--tmpfs", path]
        for other in needed:
            if other.startswith(path + "/"):
                words += ["--ro-bind", other, other]
    if os.path.isdir("/dev/shm"):
        words += ["--tmpfs", "/dev/shm"]
    for path in hidden:
        if os.path.isdir(path) and _still_there(path, covered, needed):
            covered.append(path)
            words += ["--tmpfs", path]
    words += ["--bind", str(scratch), str(scratch), "--ro-bind", str(package), str(package)]
    for path in covered:
        words += ["--remount-ro", path]
    return [*words, "--"]


_NAMESPACES = ("--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")


def _still_there(path: str, covered: list[str], needed: list[str]) -> bool:
    """Whether a folder is not gone with a covered one around it."""
    around = [other for other in covered if path.startswith(other + "/")]
    shown = any(path == n or path.startswith(n + "/") or n.startswith(path + "/") for n in needed)
    return shown or not around
