"""Layers that keep a worker in: namespaces, a read-only system, limits. Built on libc alone.

Every layer is attempted and reported; what a machine does not allow is recorded as the reason, so
that an evaluation can say under which protection it ran.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 1, 36, 38, 24
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_SYS_CAPSET, _CAPABILITY_V3 = 126, 0x20080522

Layers = dict[str, Any]


def unshare(flags: int) -> None:
    """Leave the given namespaces; OSError if not allowed."""
    if _libc.unshare(flags):
        _raise("unshare")


def die_with_parent() -> None:
    """Be killed when the parent process dies."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent exits, so that they can be found."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def enter_namespaces(layers: Layers) -> bool:
    """Move to fresh user, network, IPC and UTS namespaces; children will be in a fresh PID one.

    The mount namespace is made by the child (`arrange_mounts`): the caller keeps its own /proc, in
    which it sees the children. Returns whether all of this holds; `layers` says what was reached.
    """
    uid, gid = os.getuid(), os.getgid()
    every = {
        "pid_ns": CLONE_NEWPID,
        "net_ns": CLONE_NEWNET,
        "ipc_ns": CLONE_NEWIPC,
        "uts_ns": CLONE_NEWUTS,
    }
    flags = CLONE_NEWUSER
    for flag in every.values():
        flags |= flag
    try:
        unshare(flags)
    except OSError as error:
        for name in ("user_ns", "mount_ns", *every):
            layers[name] = f"not permitted: {error.strerror}"
        return False
    try:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    except OSError as error:
        layers["user_ns"] = f"not permitted: mapping ids: {error.strerror}"
        return False
    for name in ("user_ns", *every):
        layers[name] = True
    return True


def arrange_mounts(scratch: str, hidden: list[str], shm_bytes: int, layers: Layers) -> None:
    """In a mount namespace of one's own: fresh /proc, read-only system, hidden folders.

    `scratch` stays writable; each folder in `hidden` appears empty.
    """
    unshare(CLONE_NEWNS)
    layers["mount_ns"] = True
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    layers["fresh_proc"] = True
    _mount(scratch, scratch, None, MS_BIND)
    missing = [path for path in hidden if not _hide(path)]
    layers["hidden_judge"] = True if not missing else f"not hidden: {', '.join(missing)}"
    writable = ["/proc", scratch]
    if os.path.isdir("/dev/shm"):
        _mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"size={shm_bytes}")
        writable.append("/dev/shm")
    try:
        _set_read_only("/", True, recursive=True)
        for path in writable:
            _set_read_only(path, False, recursive=False)
        layers["read_only_system"] = True
    except OSError as error:
        layers["read_only_system"] = f"not permitted: {error.strerror}"


def drop_privileges(layers: Layers) -> None:
    """Give up every capability for good and forbid gaining any through exec."""
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_V3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    failed = _libc.syscall(_SYS_CAPSET, header, nothing)
    layers["no_new_privs"] = True
    layers["no_capabilities"] = "not permitted" if failed else True


def limit(limits: dict[str, int], layers: Layers) -> None:
    """Apply rlimits by their names, e.g. {"AS": bytes, "NOFILE": 4096}."""
    for name, value in {"CORE": 0, **limits}.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (wanted, wanted))
    layers["rlimits"] = True
    with contextlib.suppress(OSError):  # A hint for the kernel, not a protection.
        _write("/proc/self/oom_score_adj", "1000")


def descendants(pid: int) -> list[int]:
    """All live descendants of a process (this process's view)."""
    found, queue = [], [pid]
    while queue:
        parent = queue.pop()
        children = _children(parent)
        if children is None:  # The kernel has no /proc/PID/task/TID/children.
            return _descendants_by_scan(pid)
        found += children
        queue += children
    return found


def _children(pid: int) -> list[int] | None:
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/task/{thread}/stat"):
                return None
        except OSError:
            continue
    return found


def _descendants_by_scan(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    fields = file.read().rsplit(b")", 1)[1].split()
            except (OSError, IndexError):
                continue
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        for child in children.get(queue.pop(), ()):
            found.append(child)
            queue.append(child)
    return found


def private_bytes(pids: list[int]) -> int:
    """Resident memory of processes that is not shared with files or other processes' mappings."""
    pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                _, resident, shared, *_ = file.read().split()
        except (OSError, ValueError):
            continue
        pages += int(resident) - int(shared)
    return pages * resource.getpagesize()


def _hide(path: str) -> bool:
    if not os.path.isdir(path):
        return True
    try:
        _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV | MS_RDONLY, "size=4k,mode=555")
    except OSError:
        return False
    return True


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    code = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    )
    if code:
        _raise(f"mount {target}")


def _set_read_only(path: str, read_only: bool, *, recursive: bool) -> None:
    set_, clear = (_MOUNT_ATTR_RDONLY, 0) if read_only else (0, _MOUNT_ATTR_RDONLY)
    attributes = (ctypes.c_uint64 * 4)(set_, clear, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    if _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, ctypes.sizeof(attributes)
    ):
        _raise(f"mount_setattr {path}")


def _raise(what: str) -> None:
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
