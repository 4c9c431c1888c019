"""Layers that keep a worker in: namespaces, private folders, limits, Landlock, seccomp. libc alone.

Every layer is attempted and reported; what a machine does not allow is recorded as the reason, so
that an evaluation can say under which protection it ran. docs/security.md says what each is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import resource
import shutil
import signal
import sys
import sysconfig
from typing import Any

from . import landlock, seccomp

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}.get(platform.machine(), -1)
_CAPABILITY_V3 = 0x20080522
_SCRATCH_FILES = 200_000
_KERNEL_SETTINGS = (
    "/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/acpi", "/proc/scsi",
)  # fmt: skip
"""Writable for the user root even without any capability (kernel.core_pattern names a program that
the kernel runs)."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "shm", "mqueue")
_GPU_DEVICES = ("nvidia", "dri", "kfd", "dxg", "infiniband")

Layers = dict[str, Any]
"""Layer -> True, or the reason why it is not there."""

REQUIRED = (
    "user_ns", "pid_ns", "net_ns", "ipc_ns", "uts_ns", "mount_ns", "fresh_proc", "kernel_settings", "hidden_judge",
    "private_folders", "few_devices", "read_only_system", "scratch_limit", "landlock", "seccomp", "no_new_privs",
    "no_capabilities", "rlimits", "closed_descriptors", "clean_environment",
)  # fmt: skip
"""What strict isolation insists on."""

OPTIONAL = ("other_user", "cgroup")
"""Further layers, for which another one stands in: user namespace and dropped capabilities for a
user of its own, rlimits and the supervisor's watch for a control group."""


def missing(layers: Layers) -> dict[str, str]:
    """Required layers that do not hold, with the reason."""
    return {name: str(layers.get(name, "off")) for name in REQUIRED if layers.get(name) is not True}


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


def be_unreadable() -> None:
    """Forbid other processes of the user to look into this one's memory."""
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def enter_namespaces(layers: Layers, *, as_root: bool = False) -> bool:
    """Move to fresh network, IPC and UTS namespaces; children will be in a fresh PID one.

    With a user namespace around them, which needs no privilege; with `as_root` without one, which
    lets the caller arrange mounts with real privileges and become another user afterwards. The
    mount namespace is made by the child (`arrange_mounts`): the caller keeps its own /proc, in
    which it sees the children. Returns whether all of this holds; `layers` says what was reached.
    """
    every = {
        "pid_ns": CLONE_NEWPID,
        "net_ns": CLONE_NEWNET,
        "ipc_ns": CLONE_NEWIPC,
        "uts_ns": CLONE_NEWUTS,
    }
    flags = 0 if as_root else CLONE_NEWUSER
    for flag in every.values():
        flags |= flag
    uid, gid = os.getuid(), os.getgid()
    try:
        unshare(flags)
    except OSError as error:
        for name in ("user_ns", "mount_ns", *every):
            layers[name] = f"not permitted: {error.strerror}"
        return False
    for name in every:
        layers[name] = True
    if as_root:
        return True
    layers["user_ns"] = _map_ids(uid, gid)
    return layers["user_ns"] is True


def _map_ids(uid: int, gid: int) -> bool | str:
    try:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    except OSError as error:
        return f"not permitted: mapping ids: {error.strerror}"
    return True


def can_become(uid: int) -> bool:
    """Whether root may become another user here, tried in a fork (which tells through a pipe)."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.write(tell, b"y")
        os._exit(0)
    os.close(tell)
    try:
        return os.read(told, 1) == b"y"
    finally:
        os.close(told)


def become(uid: int, layers: Layers) -> None:
    """From root to another user for good, in a user namespace of its own (which counts its processes)."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # Cleared by the change; /proc/self needs it.
    die_with_parent()  # Cleared too.
    layers["other_user"] = True
    try:
        unshare(CLONE_NEWUSER)
        layers["user_ns"] = _map_ids(uid, uid)
    except OSError as error:
        layers["user_ns"] = f"not permitted: {error.strerror}"


def arrange_mounts(
    scratch: str, scratch_bytes: int, owner: int, hidden: list[str], private: list[str],
    needed: list[str], shm_bytes: int, layers: Layers, leave_out: list[str],
) -> None:  # fmt: skip
    """In a mount namespace of one's own: fresh /proc, read-only system, private and hidden folders.

    Args:
        scratch: becomes a file system in memory of `scratch_bytes` that belongs to user `owner`;
            what lay there is copied in.
        hidden: folders that appear empty.
        private: folders of which only `needed` ones are left.
        shm_bytes: size of a /dev/shm of its own.
    """
    unshare(CLONE_NEWNS)
    layers["mount_ns"] = True
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    layers["fresh_proc"] = True
    if "kernel_settings" in leave_out:
        layers["kernel_settings"] = "left out"
    else:
        for path in filter(os.path.exists, _KERNEL_SETTINGS):
            _mount(path, path, None, MS_BIND | MS_REC)  # Stays read-only below.
    writable = ["/proc", scratch]
    before = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if "few_devices" in leave_out:
            layers["few_devices"] = "left out"
        else:
            layers["few_devices"] = _private_devices()
        if "private_folders" in leave_out:
            layers["private_folders"] = "left out"
        else:
            failed = [path for path in private if not _make_private(path, [*needed, scratch])]
            layers["private_folders"] = True if not failed else f"not private: {', '.join(failed)}"
        try:
            _mount(
                "tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV,
                f"size={scratch_bytes},nr_inodes={_SCRATCH_FILES},mode=700,uid={owner},gid={owner}",
            )  # fmt: skip
            layers["scratch_limit"] = True
            shutil.copytree(f"/proc/self/fd/{before}", scratch, dirs_exist_ok=True)
            if owner != os.getuid():
                give(scratch, owner)
        except OSError as error:
            if layers.get("scratch_limit") is True:
                raise
            layers["scratch_limit"] = f"not permitted: {error.strerror}"
            _mount(scratch, scratch, None, MS_BIND)
    finally:
        os.close(before)
    unhidden = [path for path in hidden if not _hide(path)]
    layers["hidden_judge"] = True if not unhidden else f"not hidden: {', '.join(unhidden)}"
    if os.path.isdir("/dev/shm"):
        _mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"size={shm_bytes},mode=1777")
        writable.append("/dev/shm")
    try:
        _set_read_only("/", True, recursive=True)
        for path in writable:
            _set_read_only(path, False, recursive=False)
        layers["read_only_system"] = True
        layers.setdefault("kernel_settings", True)
    except OSError as error:
        layers["read_only_system"] = f"not permitted: {error.strerror}"
        layers.setdefault("kernel_settings", layers["read_only_system"])


def _private_devices() -> bool | str:
    """In /dev what a container would have there: the harmless nodes and those of GPUs, no disks."""
    names = [
        name for name in os.listdir("/dev") if name in _DEVICES or name.startswith(_GPU_DEVICES)
    ]
    if not _make_private("/dev", [f"/dev/{name}" for name in names]):
        return "not permitted"
    for name, target in {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}.items():
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    return True


def give(path: str, owner: int) -> None:
    """Make a folder and what is in it belong to a user."""
    for folder, _, files in os.walk(path):
        for name in ("", *files):
            os.chown(os.path.join(folder, name), owner, owner, follow_symlinks=False)


def private_folders() -> list[str]:
    """Folders in which other programs of this user or this machine keep files and sockets.

    A socket can be connected to on a read-only file system: whoever reaches a session bus, an agent
    or a container daemon there is out of the sandbox.
    """
    folders = ["/tmp", "/var/tmp", "/run", "/var/run", "/dev/mqueue"]
    home = os.environ.get("HOME", "")
    with contextlib.suppress(ImportError, KeyError):
        import pwd

        folders.append(pwd.getpwuid(os.getuid()).pw_dir)
    folders += [home] if os.path.isabs(home) else []
    real = {os.path.realpath(folder) for folder in folders if os.path.isdir(folder)}
    return sorted(real - {"/"})


@functools.cache
def needed_folders() -> list[str]:
    """Folders that interpreter, packages, compilers and drivers live in (as seen at the first call)."""
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sys.path}
    found |= {sysconfig.get_paths()["include"], os.path.dirname(os.path.realpath(sys.executable))}
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):  # Packages installed in place say where they are.
            found |= set(getattr(module, "MAPPING", {}).values())
    for name in ("CUDA_HOME", "CUDA_PATH", "CUTLASS_DIR"):
        found.add(os.environ.get(name, ""))
    for name in ("LD_LIBRARY_PATH", "CPATH", "LIBRARY_PATH"):
        found |= set(os.environ.get(name, "").split(":"))
    tools = [os.environ.get("CC"), os.environ.get("CXX"), "gcc", "g++", "cc", "c++", "nvcc"]
    for tool in filter(None, tools):
        if path := shutil.which(tool):
            found.add(os.path.dirname(os.path.dirname(os.path.realpath(path))))
    for parent in ("/run", "/tmp"):
        with contextlib.suppress(OSError):  # Sockets and files of NVIDIA's driver services.
            found |= {f"{parent}/{n}" for n in os.listdir(parent) if n.startswith("nvidia")}
    real = {os.path.realpath(path) for path in found if os.path.isabs(path)}
    return sorted(path for path in real if os.path.exists(path) and path != "/")


def unreadable_for(uid: int, needed: list[str], private: list[str]) -> str | None:
    """A needed path that another user could not read once `private` folders are arranged, or None.

    Folders between a private one and what it still shows are made anew and open to all; all
    others keep their modes.
    """
    for path in needed:
        at, wanted = path, 0o005
        while at != "/":
            with contextlib.suppress(FileNotFoundError):
                info = os.stat(at)
                bits = wanted if os.path.isdir(at) else 0o004
                if info.st_mode & bits != bits and info.st_uid != uid:
                    return at
            wanted = 0o001
            outermost = not any(at.startswith(other + "/") for other in needed)
            if outermost and any(at.startswith(folder + "/") for folder in private):
                break
            at = os.path.dirname(at)
    return None


def confine(
    scratch: str, limits: dict[str, int], layers: Layers, *, on_gpu: bool, leave_out: list[str]
) -> None:
    """The layers that need no privilege, in the order in which they do not hinder each other."""
    limit(limits, layers)
    drop_privileges(layers)
    if "landlock" in leave_out:
        layers["landlock"] = "left out"
    else:
        layers["landlock"] = landlock.restrict(_rules(scratch, on_gpu))
    if "seccomp" in leave_out:
        layers["seccomp"] = "left out"
    else:
        layers["seccomp"] = seccomp.install(unix_sockets=on_gpu)


def _rules(scratch: str, on_gpu: bool) -> list[tuple[str, int]]:
    rules = [("/", landlock.READ), (scratch, landlock.EVERYTHING)]
    rules.append(("/dev/shm", landlock.EVERYTHING))
    if on_gpu:  # With less, CUDA does not start (error 304).
        return [*rules, ("/dev", landlock.EVERYTHING), ("/proc", landlock.EVERYTHING)]
    return rules + [(f"/dev/{name}", landlock.WRITE) for name in ("null", "zero", "full")]


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
    for name, value in {"CORE": 0, "RTPRIO": 0, "NICE": 0, **limits}.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (wanted, wanted))
    layers["rlimits"] = True
    with contextlib.suppress(OSError):  # A hint for the kernel, not a protection.
        _write("/proc/self/oom_score_adj", "1000")


def counts_processes_by_namespace() -> bool:
    """Whether RLIMIT_NPROC looks at a user namespace's own processes (Linux 5.14), not at all of
    the user's, which would punish whoever has many."""
    numbers = platform.release().split(".")
    with contextlib.suppress(ValueError, IndexError):
        return (int(numbers[0]), int(numbers[1])) >= (5, 14)
    return False


def tasks(pids: list[int]) -> int:
    """How many threads the processes have together."""
    count = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            count += len(os.listdir(f"/proc/{pid}/task"))
    return count


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


def memory_bytes(pids: list[int], arena_bytes: int, most: int) -> int:
    """Memory that processes have of their own: what is private, and what is shared beyond the arena.

    Shared memory counts too, because nothing but its author's honesty says with whom it is shared.
    Resident sizes are quick to read and count pages that forks share once a process. Only where
    they exceed `most` are the exact ones asked for, which takes the kernel milliseconds.
    """
    total = _own_bytes(pids, [_QUICK], arena_bytes)
    return total if total <= most else _own_bytes(pids, [_EXACT, _QUICK], arena_bytes)


_QUICK = ("status", b"RssAnon:", b"RssShmem:")
_EXACT = ("smaps_rollup", b"Pss_Anon:", b"Pss_Shmem:")


def _own_bytes(pids: list[int], sources: list[tuple[str, bytes, bytes]], arena: int) -> int:
    private = shared = 0
    for pid in pids:
        for name, anonymous, common in sources:
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    text = file.read()
            except OSError:
                continue
            private += _status_bytes(text, anonymous)
            shared += _status_bytes(text, common)
            break
    return private + max(0, shared - arena)


def _status_bytes(text: bytes, name: bytes) -> int:
    _, found, rest = text.partition(b"\n" + name)
    return int(rest.split(None, 1)[0]) << 10 if found else 0


def memory_file_bytes(pids: list[int], known: set[int]) -> int:
    """Memory in anonymous files that processes hold open, mapped or not, but for `known` inodes."""
    sizes: dict[int, int] = {}
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{name}").startswith("/memfd:"):
                    info = os.stat(f"{folder}/{name}")
                    sizes[info.st_ino] = info.st_blocks * 512
    return sum(size for inode, size in sizes.items() if inode not in known)


def _make_private(path: str, needed: list[str]) -> bool:
    """Cover a folder with an empty one in which only the needed folders and files show through."""
    if not os.path.isdir(path) or any(
        path == other or path.startswith(other + "/") for other in needed
    ):
        return True  # It went with a folder around it, or is needed as a whole.
    inside = [other for other in needed if other.startswith(path + "/")]
    # The outermost are enough.
    inside = [p for p in inside if not any(p.startswith(q + "/") for q in inside)]
    held = {other: os.open(other, os.O_PATH) for other in inside}
    try:
        _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
        for other, descriptor in held.items():
            source = f"/proc/self/fd/{descriptor}"
            if os.path.isdir(source):
                os.makedirs(other, exist_ok=True)
            else:
                os.makedirs(os.path.dirname(other), exist_ok=True)
                os.close(os.open(other, os.O_CREAT | os.O_WRONLY))
            _mount(source, other, None, MS_BIND | MS_REC)
    except OSError:
        return False
    finally:
        for descriptor in held.values():
            os.close(descriptor)
    return True


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
