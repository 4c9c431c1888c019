"""Attempts to break out of the sandbox, made by `sol-gym doctor` and the tests from inside a worker.

Each function tries for real. It raises (mostly OSError) or returns None where it got nowhere, and
returns what it reached where it got through. `about` tells it what the judge has put out as bait:
paths, ports, process ids. None does lasting harm if it succeeds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

from . import seccomp

About = dict[str, Any]
_libc = ctypes.CDLL(None, use_errno=True)
_SYSCALL = {"x86_64": 0, "aarch64": 1}.get(platform.machine(), 0)


def run(name: str, about: About) -> tuple[bool, str]:
    """Make an attempt; whether it got through, and what happened."""
    try:
        reached = ATTEMPTS[name](about)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"[:300]
    return reached is not None, (reached or "got nowhere")[:300]


# -- files ----------------------------------------------------------------------------------------


def write_system(about: About) -> str | None:
    folders = ["/", "/usr", "/etc", "/var", "/usr/local", os.path.dirname(sys.prefix), "/run"]
    refused = []
    for folder in folders:
        path = os.path.join(folder, about["name"])
        try:
            with open(path, "w"):
                pass
        except OSError as error:
            refused.append(error.strerror or "")
            continue
        with contextlib.suppress(OSError):
            os.unlink(path)
        return f"wrote {path}"
    raise OSError(", ".join(sorted(set(refused))))


def write_temporary(about: About) -> str | None:
    with open(about["bait_file"], "a") as file:
        file.write("owned")
    return f"changed {about['bait_file']}"


def read_project(about: About) -> str | None:
    with open(about["hidden_file"]) as file:
        file.read(1)
    return f"read {about['hidden_file']}"


def import_judge(about: About) -> str | None:
    __import__("sol_gym.sandbox.judge")
    return "imported the judge"


def read_temporary(about: About) -> str | None:
    with open(about["bait_file"]) as file:
        return f"read {file.read(20)!r} in {about['bait_file']}"


def open_devices(about: About) -> str | None:
    harmless = ("null", "zero", "full", "random", "urandom", "tty")
    for folder, _, names in os.walk("/dev"):
        for name in names:
            path = os.path.join(folder, name)
            gpu = path.startswith(
                ("/dev/nvidia", "/dev/dri/", "/dev/kfd", "/dev/dxg", "/dev/infiniband/")
            )
            if name in harmless or gpu:
                continue
            with contextlib.suppress(OSError):
                mode = os.lstat(path).st_mode
                if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                    return f"opened {path}"
    return None


def change_kernel_settings(about: About) -> str | None:
    for path in (
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/sys/kernel/uevent_helper",
    ):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY))
            return f"opened {path} for writing"
    raise PermissionError("kernel settings could not be opened for writing")


def read_init_memory(about: About) -> str | None:
    with open("/proc/1/mem", "rb") as file:
        file.read(0)
    return "opened the memory of the namespace's init process"


# -- network and sockets --------------------------------------------------------------------------


def connect_tcp(about: About) -> str | None:
    with socket.create_connection(("127.0.0.1", about["port"]), timeout=2):
        return "reached a port of this machine"


def connect_abstract(about: About) -> str | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect("\0" + about["abstract"])
        return "reached an abstract socket"


def connect_path(about: About) -> str | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(about["socket_path"])
        return f"reached {about['socket_path']}"


def find_interfaces(about: About) -> str | None:
    found = [name for _, name in socket.if_nameindex() if name != "lo"]
    return f"found interfaces {found}" if found else None


def raw_socket(about: About) -> str | None:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    return "opened a raw socket"


# -- other processes ------------------------------------------------------------------------------


def signal_outside(about: About) -> str | None:
    os.kill(about["pid"], signal.SIGUSR1)
    return f"signalled process {about['pid']}"


def see_processes(about: About) -> str | None:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if about["name"].encode() in file.read():
                found.append(pid)
    return f"saw process {found[0]}" if found else None


def ptrace_sibling(about: About) -> str | None:
    with _sibling() as pid:
        # PTRACE_SEIZE, which does not stop the process.
        if _libc.ptrace(0x4206, pid, 0, 0) == 0:
            return "traced another process"
        raise _last()


def read_sibling(about: About) -> str | None:
    secret = ctypes.create_string_buffer(b"secret")
    into = ctypes.create_string_buffer(6)
    with _sibling() as pid:
        vector = (ctypes.c_uint64 * 2)(ctypes.addressof(into), 6)
        remote = (ctypes.c_uint64 * 2)(ctypes.addressof(secret), 6)
        if _libc.process_vm_readv(pid, vector, 1, remote, 1, 0) == 6:
            return "read another process's memory"
        raise _last()


def write_sibling(about: About) -> str | None:
    secret = ctypes.create_string_buffer(b"secret")
    with _sibling() as pid:
        vector = (ctypes.c_uint64 * 2)(ctypes.addressof(secret), 6)
        if _libc.process_vm_writev(pid, vector, 1, vector, 1, 0) == 6:
            return "wrote another process's memory"
        raise _last()


def shared_memory(about: About) -> str | None:
    _libc.shmat.restype = ctypes.c_void_p
    address = _libc.shmat(about["shm"], None, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise _last()
    return f"read {ctypes.string_at(address, 4)!r} in the judge's shared memory"


# -- privileges -----------------------------------------------------------------------------------


def change_user(about: About) -> str | None:
    for uid in {0, 1, 1000, 65534} - {os.getuid()}:
        with contextlib.suppress(OSError):
            os.setuid(uid)
            return f"became user {uid}"
    raise PermissionError("setuid was refused")


def change_owner(about: About) -> str | None:
    with open("owned", "w"):
        pass
    os.chown("owned", 1234, 1234)
    return "gave a file to another user"


def make_device(about: About) -> str | None:
    os.mknod("device", 0o20666, os.makedev(1, 1))
    return "made a device node"


def raise_limit(about: About) -> str | None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard + 1, hard + 1))
    return "raised a limit"


def run_real_time(about: About) -> str | None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return "ran with real-time priority"


def mount(about: About) -> str | None:
    if _libc.mount(b"none", os.getcwd().encode(), b"tmpfs", ctypes.c_ulong(0), None):
        raise _last()
    return "mounted a file system"


def unmount(about: About) -> str | None:
    if _libc.umount2(os.path.dirname(about["hidden_file"]).encode(), 2):
        raise _last()
    return "took the cover off a hidden folder"


def change_root(about: About) -> str | None:
    os.chroot(".")
    return "changed the root"


def unshare_user(about: About) -> str | None:
    return _in_child(lambda: _libc.unshare(0x10000000), "made a user namespace")


def clone_user(about: About) -> str | None:
    number = (56, 220)[_SYSCALL]
    pid = _libc.syscall(number, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid < 0:
        raise _last()
    os.waitpid(pid, 0)
    return "cloned into a user namespace"


def clone3_user(about: About) -> str | None:
    arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, signal.SIGCHLD)
    pid = _libc.syscall(435, arguments, ctypes.sizeof(arguments))
    if pid == 0:
        os._exit(0)
    if pid < 0:
        raise _last()
    os.waitpid(pid, 0)
    return "cloned into a user namespace"


def set_hostname(about: About) -> str | None:
    if _libc.sethostname(b"owned", 5):
        raise _last()
    return "changed the host's name"


# -- kernel interfaces ----------------------------------------------------------------------------


def perf_events(about: About) -> str | None:
    attributes = (ctypes.c_uint32 * 32)(1, 128)  # Software event, user space only.
    attributes[10] = 0x60
    return _descriptor("perf_event_open", attributes, 0, -1, -1, 0)


def bpf(about: About) -> str | None:
    return _descriptor("bpf", 0, (ctypes.c_uint32 * 32)(2, 4, 4, 1), 128)


def userfaultfd(about: About) -> str | None:
    return _descriptor("userfaultfd", 1)


def io_uring(about: About) -> str | None:
    number = seccomp.ABSENT["io_uring_setup"][_SYSCALL]
    found = _libc.syscall(number, 1, (ctypes.c_uint32 * 64)())
    if found < 0:
        raise _last()
    os.close(found)
    return "set up an io_uring"


def keyring(about: About) -> str | None:
    return _called("keyctl", 0, -2, 1)


def kernel_module(about: About) -> str | None:
    return _called("init_module", b"", 0, b"", wanted=errno.EPERM)


def kernel_log(about: About) -> str | None:
    return _called("syslog", 3, ctypes.create_string_buffer(64), 64)


def new_kernel(about: About) -> str | None:
    return _called("kexec_load", 0, 0, None, 0, wanted=errno.EPERM)


def terminal_input(about: About) -> str | None:
    import fcntl
    import termios

    ours, theirs = os.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSTI, b"x")
    finally:
        os.close(ours)
        os.close(theirs)
    return "typed into a terminal"


# -- leftovers of the judge -----------------------------------------------------------------------


def descriptors(about: About) -> str | None:
    strange = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if int(name) > 2 and not target.startswith(
                ("socket:", "/memfd:sol_gym", "/proc/", "anon_inode:")
            ):
                strange.append(target)
    return f"inherited {strange}" if strange else None


def environment(about: About) -> str | None:
    known = set(about["variables"])
    strange = sorted(name for name in os.environ if name not in known)
    return f"found variables {strange}" if strange else None


def leave_group(about: About) -> str | None:
    with open("/proc/self/mounts") as file:
        mounted = [line.split()[1] for line in file if line.split()[2] in ("cgroup2", "cgroup")]
    for folder in mounted:
        with contextlib.suppress(OSError):
            with open(os.path.join(folder, "cgroup.procs"), "w") as file:
                file.write("0")
            return f"moved to {folder}"
    raise PermissionError("no control group could be joined")


# -- quantities: these may end the worker ---------------------------------------------------------


def exhaust_memory(about: About) -> str | None:
    hoard = [b"x" * (1 << 20) for _ in range(about["megabytes"])]
    time.sleep(0.5)
    return f"held {len(hoard)} MiB"


def exhaust_shared_memory(about: About) -> str | None:
    hoard = []
    for _ in range(about["megabytes"]):
        block = mmap.mmap(-1, 1 << 20)
        block.write(b"x" * (1 << 20))
        hoard.append(block)
    time.sleep(0.5)
    return f"held {len(hoard)} MiB"


def exhaust_memory_files(about: About) -> str | None:
    hoard = []
    for _ in range(about["megabytes"]):
        hoard.append(os.memfd_create("large"))
        os.write(hoard[-1], b"x" * (1 << 20))
    time.sleep(0.5)
    return f"held {len(hoard)} MiB in files without names"


def exhaust_segments(about: About) -> str | None:
    segment = _libc.shmget(0, about["megabytes"] << 20, 0o1600)
    if segment < 0:
        raise _last()
    _libc.shmctl(segment, 0, None)
    return "made a segment that no limit counts"


def exhaust_processes(about: About) -> str | None:
    children = 0
    try:
        while children <= about["most"]:
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
            children += 1
    except OSError as error:
        raise OSError(f"{error.strerror} after {children} processes") from None
    time.sleep(0.5)
    return f"started {children} processes"


def exhaust_scratch(about: About) -> str | None:
    with open("large", "wb") as file:
        for _ in range(about["megabytes"]):
            file.write(b"x" * (1 << 20))
    return f"wrote {about['megabytes']} MiB"


def exhaust_file_size(about: About) -> str | None:
    with open("sparse", "wb") as file:
        file.truncate(about["megabytes"] << 20)
    return f"made a file of {about['megabytes']} MiB"


def exhaust_descriptors(about: About) -> str | None:
    held = []
    try:
        for _ in range(about["most"] + 1):
            held.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in held:
            os.close(descriptor)
    return f"opened {len(held)} files"


def leave_daemon(about: About) -> str | None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    return None  # Whether it outlived the worker is for the judge to see.


def count_for_ever(about: About) -> str | None:
    """Threads and child processes that count in the shared page for as long as they run."""
    import threading

    words = about["page"].words

    def count(word: int) -> None:
        while True:
            words[word] += 1

    if os.fork() == 0:
        threading.Thread(target=count, args=(101,), daemon=True).start()
        count(100)
    if os.fork() == 0:  # A process without its first thread: to others it looks like a dead one.
        threading.Thread(target=count, args=(103,), daemon=True).start()
        _libc.syscall((60, 93)[_SYSCALL], 0)
    threading.Thread(target=count, args=(102,), daemon=True).start()
    return None  # Whether they run while stopped is for the judge to see.


ATTEMPTS: dict[str, Callable[[About], str | None]] = {
    function.__name__: function
    for function in (
        write_system, write_temporary, read_project, import_judge, read_temporary, open_devices,
        change_kernel_settings, read_init_memory,
        connect_tcp, connect_abstract, connect_path, find_interfaces, raw_socket, signal_outside,
        see_processes, ptrace_sibling, read_sibling, write_sibling, shared_memory, change_user,
        change_owner, make_device, raise_limit, run_real_time, mount, unmount, change_root,
        unshare_user, clone_user, clone3_user, set_hostname, perf_events, bpf, userfaultfd, io_uring,
        keyring, kernel_module, kernel_log, new_kernel, terminal_input, descriptors, environment,
        leave_group, exhaust_memory, exhaust_shared_memory, exhaust_memory_files, exhaust_segments,
        exhaust_processes, exhaust_scratch, exhaust_file_size,
        exhaust_descriptors, leave_daemon, count_for_ever,
    )
}  # fmt: skip


# -- tools ----------------------------------------------------------------------------------------


def _last() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@contextlib.contextmanager
def _sibling() -> Any:
    """A process of the same user, for the attempt to attack."""
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _in_child(call: Callable[[], int], reached: str) -> str:
    pid = os.fork()
    if pid == 0:
        os._exit(ctypes.get_errno() or 255 if call() else 0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise OSError(code, os.strerror(code))
    return reached


def _number(name: str) -> int:
    number = seccomp.REFUSED[name][_SYSCALL]
    assert number is not None
    return number


def _descriptor(name: str, *arguments: Any) -> str:
    found = _libc.syscall(_number(name), *arguments)
    if found < 0:
        raise _last()
    os.close(found)
    return f"got a descriptor from {name}"


def _called(name: str, *arguments: Any, wanted: int | None = None) -> str:
    """Fails if the call does; with `wanted`, any other error means that the kernel looked at it."""
    found = _libc.syscall(_number(name), *arguments)
    number = ctypes.get_errno()
    if found < 0 and (wanted is None or number == wanted):
        raise _last()
    return f"{name} was carried out"
