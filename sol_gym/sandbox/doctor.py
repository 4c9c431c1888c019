"""Whether the sandbox holds on this machine, found out by trying to break it from inside.

`examine` puts out bait (a file, a port, sockets, a process, a shared segment), has real workers
attack it (`worker/attempts.py`), and looks afterwards whether the bait was taken. What can be held by
layers other than the namespaces is tried a second time without them, because a machine may not
allow namespaces and because one layer must not be the only one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .limits import Limits
from .process import KEPT_VARIABLES, Worker, WorkerGone
from .worker import wire
from .worker.isolation import descendants

if TYPE_CHECKING:
    from .judge import Judge

_ANSWER_S = 30.0
_MIB = 1 << 20

LAYERS: dict[str, tuple[str, ...]] = {
    "write_system": ("read_only_system", "landlock"),
    "write_temporary": ("private_folders", "read_only_system", "landlock"),
    "read_project": ("hidden_judge",),
    "import_judge": ("hidden_judge",),
    "read_temporary": ("private_folders",),
    "open_devices": ("few_devices",),
    "change_kernel_settings": ("kernel_settings", "landlock (CPU)", "other_user"),
    "read_init_memory": ("pid_ns",),
    "connect_tcp": ("net_ns", "seccomp", "landlock"),
    "connect_abstract": ("net_ns", "seccomp", "landlock"),
    "connect_path": ("private_folders", "seccomp"),
    "find_interfaces": ("net_ns", "seccomp"),
    "raw_socket": ("no_capabilities", "seccomp"),
    "signal_outside": ("pid_ns", "landlock"),
    "see_processes": ("pid_ns", "fresh_proc"),
    "ptrace_sibling": ("seccomp",),
    "read_sibling": ("seccomp",),
    "write_sibling": ("seccomp",),
    "shared_memory": ("ipc_ns",),
    "change_user": ("user_ns", "no_capabilities"),
    "change_owner": ("no_capabilities",),
    "make_device": ("no_capabilities",),
    "raise_limit": ("no_capabilities", "rlimits"),
    "run_real_time": ("no_capabilities", "rlimits"),
    "mount": ("no_capabilities", "seccomp"),
    "unmount": ("no_capabilities", "seccomp"),
    "change_root": ("no_capabilities", "seccomp"),
    "unshare_user": ("seccomp",),
    "clone_user": ("seccomp",),
    "clone3_user": ("seccomp",),
    "set_hostname": ("uts_ns", "no_capabilities", "seccomp"),
    "perf_events": ("seccomp",),
    "bpf": ("seccomp",),
    "userfaultfd": ("seccomp",),
    "io_uring": ("seccomp",),
    "keyring": ("seccomp",),
    "kernel_module": ("no_capabilities", "seccomp"),
    "kernel_log": ("no_capabilities", "seccomp"),
    "new_kernel": ("no_capabilities", "seccomp"),
    "terminal_input": ("few_devices", "landlock", "seccomp"),
    "descriptors": ("closed_descriptors",),
    "environment": ("clean_environment",),
    "leave_group": ("read_only_system", "landlock"),
    "exhaust_memory": ("memory limit", "cgroup"),
    "exhaust_shared_memory": ("memory limit", "cgroup"),
    "exhaust_memory_files": ("memory limit", "cgroup"),
    "exhaust_segments": ("seccomp",),
    "exhaust_processes": ("rlimits", "process limit", "cgroup"),
    "exhaust_scratch": ("scratch_limit",),
    "exhaust_file_size": ("rlimits",),
    "exhaust_descriptors": ("rlimits",),
    "leave_daemon": ("pid_ns", "supervisor"),
    "count_for_ever": ("stopping",),
}
"""Attempt -> what is meant to hold it, any of them alone. A layer is one of
`isolation.REQUIRED`/`OPTIONAL`, or something the supervisor or the judge does."""

_WATCHED_FROM_OUTSIDE = frozenset(
    {"exhaust_memory", "exhaust_shared_memory", "exhaust_memory_files"}
)
"""The supervisor counts memory with or without namespaces: once is enough."""

_NEED_NAMESPACES = frozenset(
    name for name, layers in LAYERS.items()
    if all(layer.endswith("_ns") or layer in ("hidden_judge", "private_folders", "fresh_proc", "scratch_limit", "few_devices") for layer in layers)
)  # fmt: skip


@dataclass(frozen=True)
class LayerFinding:
    """What came of one attempt."""

    attempt: str
    layers: tuple[str, ...]
    """What is meant to hold it; any of them alone does."""
    held: bool
    detail: str
    held_without_namespaces: bool | None = None
    """The same with namespaces left out; None where only they can hold it, or have no part in it."""

    def to_json(self) -> dict[str, Any]:
        """JSON-safe dictionary."""
        return asdict(self) | {"layers": list(self.layers)}


def examine(judge: Judge) -> list[LayerFinding]:
    """Make every attempt in workers of this judge. Takes a few seconds.

    Raises:
        InfrastructureError: workers cannot be started at all.
    """
    with bait(judge) as about:
        full = attack(judge, judge.limits, about, list(LAYERS))
        bare = attack(
            judge, replace(judge.limits, namespaces=False), about,
            [name for name in LAYERS if name not in _NEED_NAMESPACES | _WATCHED_FROM_OUTSIDE],
        )  # fmt: skip
    return [
        LayerFinding(
            name, layers, full[name][0], full[name][1],
            bare[name][0] if name in bare else None,
        )
        for name, layers in LAYERS.items()
    ]  # fmt: skip


def attack(
    judge: Judge, limits: Limits, about: dict[str, Any], names: list[str]
) -> dict[str, tuple[bool, str]]:
    """Make attempts in workers with these limits: whether each was held, and what happened.

    Args:
        about: of `bait`.
        names: of `LAYERS`.
    """
    found: dict[str, tuple[bool, str]] = {}
    alone = [name for name in names if name in _ALONE]
    worker: Worker | None = None
    try:
        for name in names:
            if name in _ALONE:
                continue
            if worker is None or worker.ended():
                if worker is not None:
                    worker.kill()
                worker = judge.spawn(limits, None, lambda scratch: None)
            found[name] = _ask(worker, name, about, megabytes=64)
    finally:
        if worker is not None:
            worker.kill()
    taken = about["taken"]()
    for name, reason in taken.items():
        if name in found:
            found[name] = (False, reason)
    for name in alone:
        found[name] = _ALONE[name](judge, limits, about)
    return found


def _ask(worker: Worker, name: str, about: dict[str, Any], **more: Any) -> tuple[bool, str]:
    told = {k: v for k, v in about.items() if not callable(v)} | more
    try:
        reply = worker.ask({"cmd": "attempt", "name": name, "about": told}, _ANSWER_S)
    except WorkerGone as gone:
        return True, str(gone)
    except (wire.Timeout, wire.ProtocolError) as error:
        return False, f"no clear answer: {type(error).__name__} {error}"
    if reply.get("ok") is not True:
        return False, f"the attempt failed by itself: {reply.get('message')}"
    return reply.get("broke") is not True, str(reply.get("detail"))


@contextlib.contextmanager
def bait(judge: Judge) -> Iterator[dict[str, Any]]:
    """Things outside the sandbox that attempts aim at, and `taken`, which says what they reached."""
    name = f"sol_gym-bait-{secrets.token_hex(4)}"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sol_gym-bait-")))
        folder.chmod(0o755)
        file = folder / "file"
        file.write_text("bait")
        file.chmod(0o666)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        abstract.bind("\0" + name)
        path = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        path.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o666)
        for listener in (abstract, path):
            listener.listen(8)
        for listener in (tcp, abstract, path):
            listener.setblocking(False)
        # SIGUSR1 ends it; its command line carries the bait's name.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", name],
            stdin=subprocess.DEVNULL,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        segment = libc.shmget(0, 4096, 0o1666)  # IPC_PRIVATE, IPC_CREAT
        stack.callback(libc.shmctl, segment, 0, None)  # IPC_RMID

        def taken() -> dict[str, str]:
            reached = {}
            for attempt, listener in (
                ("connect_tcp", tcp), ("connect_abstract", abstract), ("connect_path", path),
            ):  # fmt: skip
                with contextlib.suppress(BlockingIOError):
                    listener.accept()[0].close()
                    reached[attempt] = "a connection arrived"
            if file.read_text() != "bait":
                reached["write_temporary"] = f"{file} was changed"
                file.write_text("bait")
            if process.poll() is not None:
                reached["signal_outside"] = "the process was ended by a signal"
            return reached

        yield {
            "name": name, "bait_file": str(file), "port": tcp.getsockname()[1], "abstract": name,
            "socket_path": str(folder / "socket"), "pid": process.pid, "shm": segment,
            "hidden_file": str(Path(__file__).with_name("judge.py")),
            "variables": [*KEPT_VARIABLES, *_WORKER_VARIABLES, *judge.backend.environment()],
            "taken": taken,
        }  # fmt: skip


_WORKER_VARIABLES = (
    "HOME", "TMPDIR", "PYTHONPATH", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "USER", "LOGNAME", "TRITON_INTERPRET", "LC_CTYPE",
    "TORCHINDUCTOR_COMPILE_THREADS", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK",
    "CUDA_MODULE_LOADING", "PYTORCH_NVML_BASED_CUDA_CHECK",
)  # fmt: skip


def _quantity(attempt: str, limits: dict[str, Any], **more: Any) -> Any:
    def run(judge: Judge, base: Limits, about: dict[str, Any]) -> tuple[bool, str]:
        worker = judge.spawn(replace(base, **limits), None, lambda scratch: None)
        try:
            held, detail = _ask(worker, attempt, about, **more)
            if held and worker.exit is not None and not worker.exit.reason:
                return False, f"ended by itself: {detail}"
            return held, detail
        finally:
            worker.kill()

    return run


def _daemon(judge: Judge, limits: Limits, about: dict[str, Any]) -> tuple[bool, str]:
    """Whether a process in a session of its own outlives its worker."""
    worker = judge.spawn(limits, None, lambda scratch: None)
    try:
        _ask(worker, "leave_daemon", about)
        time.sleep(0.05)
        tree = descendants(worker.root)
    finally:
        worker.kill()
    deadline = time.monotonic() + 2.0
    while any(os.path.exists(f"/proc/{pid}") for pid in tree) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = [pid for pid in tree if os.path.exists(f"/proc/{pid}")]
    return not left, f"{len(tree)} processes ended with the worker" if not left else f"left: {left}"


_COUNTERS = (100, 101, 102, 103)
"""Words of the shared page in which `count_for_ever` counts."""


def _stopping(judge: Judge, limits: Limits, about: dict[str, Any]) -> tuple[bool, str]:
    """Whether anything of a stopped worker runs on the CPU."""
    worker = judge.spawn(limits, None, lambda scratch: None)
    try:
        held, detail = _ask(worker, "count_for_ever", about)
        if not held:
            return held, detail
        words = worker.page.words
        deadline = time.monotonic() + 5.0
        while not all(words[i] for i in _COUNTERS) and time.monotonic() < deadline:
            time.sleep(0.005)
        if not all(words[i] for i in _COUNTERS):
            return False, "the counting processes did not start"
        for _ in range(5):
            worker.stop()
            before = [words[i] for i in _COUNTERS]
            time.sleep(0.02)
            moved = sum(words[i] for i in _COUNTERS) - sum(before)
            worker.resume()
            if moved:
                return False, f"{moved} steps were made while stopped"
            time.sleep(0.01)
        return True, "three processes and their threads stood still"
    finally:
        worker.kill()


_ALONE: dict[str, Any] = {
    **{
        name: _quantity(name, {"memory_bytes": 384 * _MIB}, megabytes=1024)
        for name in ("exhaust_memory", "exhaust_shared_memory", "exhaust_memory_files")
    },
    "exhaust_processes": _quantity("exhaust_processes", {"tasks": 48}, most=400),
    "exhaust_scratch": _quantity("exhaust_scratch", {"scratch_bytes": 16 * _MIB}, megabytes=32),
    "exhaust_file_size": _quantity("exhaust_file_size", {"file_bytes": 8 * _MIB}, megabytes=9),
    "exhaust_descriptors": _quantity("exhaust_descriptors", {"open_files": 64}, most=64),
    "leave_daemon": _daemon,
    "count_for_ever": _stopping,
}
"""Attempts that need a worker of their own."""
