"""The judge's handles on other processes: the zygote, and one worker at a time.

A `Worker` is stopped, resumed and killed as a whole tree. Whatever happens, `Worker.kill` leaves
no process and closes every descriptor.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import site
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InfrastructureError
from .cgroup import Group, Groups
from .limits import Limits, worker_uid
from .scratch import open_beneath, remove_tree
from .worker import wire
from .worker.isolation import descendants, private_folders

WORKER_PACKAGE = Path(__file__).parent / "worker"
_BOOT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "_sol_gym_worker", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]])
package = importlib.util.module_from_spec(spec)
sys.modules["_sol_gym_worker"] = package
spec.loader.exec_module(package)
from _sol_gym_worker import zygote
zygote.main(int(sys.argv[2]), sys.argv[3].split(","))
"""
KEPT_VARIABLES = (
    "PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUTLASS_DIR", "CUDA_VISIBLE_DEVICES", "LANG", "LC_ALL",
    "CPATH", "LIBRARY_PATH", "CC", "CXX", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE",
)  # fmt: skip
_START_TIMEOUT_S = 120.0
_FORK_TIMEOUT_S = 30.0
_DEVICE_TIMEOUT_S = 60.0
_LOG_BYTES = 8192
_HALTED = "TtZX?"


def import_roots() -> list[str]:
    """Folders besides the interpreter's own from which packages (torch among them) are imported.

    Those of `PYTHONPATH`, and the user's own packages where this interpreter takes them.
    """
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [os.path.abspath(folder) for folder in folders if folder and os.path.isdir(folder)]


class Zygote:
    """A warm interpreter that forks workers.

    Args:
        on_gpu: whether workers use CUDA.
        around: a command to run it with (see `bubblewrap`), and the layers that this gives.
        package: where the worker's code lies.
    """

    def __init__(
        self, *, on_gpu: bool, around: list[str] | None = None, layers: dict[str, Any] | None = None,
        package: Path = WORKER_PACKAGE,
    ):  # fmt: skip
        self.on_gpu = on_gpu
        self.layers = layers or {}
        self.private = private_folders()
        ours, theirs = socket.socketpair()
        environment = {k: os.environ[k] for k in KEPT_VARIABLES if k in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(import_roots())
        warm = [
            "numpy",
            "torch",
            "triton",
            "triton.language",
            "triton.compiler",
            "triton.runtime.build",
        ]
        if on_gpu:
            warm += [
                "triton.backends.nvidia.compiler",
                "triton.backends.nvidia.driver",
                "triton.experimental.gluon.nvidia",
            ]
        else:
            environment["TRITON_INTERPRET"] = "1"
        self._process = subprocess.Popen(
            [
                *(around or ()),
                sys.executable,
                "-P",
                "-s",
                "-u",
                "-c",
                _BOOT,
                str(package),
                str(theirs.fileno()),
                ",".join(warm),
            ],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._socket = ours
        self._ready = False

    def wait_ready(self) -> None:
        """Block until the imports are done."""
        if self._ready:
            return
        try:
            wire.receive(self._socket, _START_TIMEOUT_S)
        except (wire.Closed, wire.Timeout) as error:
            self.close()
            raise InfrastructureError(
                f"the zygote did not start: {type(error).__name__} {error}"
            ) from None
        self._ready = True

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """Fork a worker's supervisor; returns its pid."""
        self.wait_ready()
        try:
            line = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(self._socket, [line], fds)
            self._socket.sendall(line[sent:])
            return int(wire.receive(self._socket, _FORK_TIMEOUT_S)["pid"])
        except (OSError, wire.Closed, wire.Timeout) as error:
            raise InfrastructureError(f"the zygote is gone: {error}") from None

    def close(self) -> None:
        """End the zygote and everything it forked."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


@dataclass
class Exit:
    """How a worker ended."""

    code: int
    reason: str = ""
    """Set when the supervisor ended it: which limit was exceeded."""

    def __str__(self) -> str:
        if self.reason:
            return f"the worker was ended: {self.reason}"
        number = -self.code if self.code < 0 else self.code - 128
        if self.code < 0 or self.code > 128:
            try:
                return f"the worker died of {signal.Signals(number).name}"
            except ValueError:
                pass
        return f"the worker exited with code {self.code}"


class TrustedCodeFailed(InfrastructureError):
    """Something of ours failed in a worker: the machine's fault, or a layer's, and no solution's."""


class WorkerGone(Exception):
    """The worker ended while the judge was waiting for it."""

    def __init__(self, exit_: Exit):
        super().__init__(str(exit_))
        self.exit = exit_


@dataclass
class Worker:
    """One untrusted process tree."""

    control: socket.socket
    status: socket.socket
    page: wire.Page
    scratch: Path
    supervisor: int
    cpus: list[int]
    root: int = 0
    """Pid of the worker's outermost untrusted process, as the judge sees it."""
    layers: dict[str, Any] = field(default_factory=dict)
    exit: Exit | None = None
    scratch_fd: int = -1
    """The scratch folder as the worker sees it: a file system of its own that no path leads to."""
    group: Group | None = None
    _log: bytearray = field(default_factory=bytearray)
    _log_thread: threading.Thread | None = None
    _tree: list[int] = field(default_factory=list)

    @classmethod
    def spawn(
        cls, zygote: Zygote, limits: Limits, *, hidden: list[str], environment: dict[str, str],
        cpus: list[int], scratch_base: Path, arena_fd: int | None = None, prepare: Any = None,
        groups: Groups | None = None, shown: list[str] | None = None,
    ) -> Worker:  # fmt: skip
        """Fork a worker and wait for its greeting.

        `prepare(scratch)` puts files into the new scratch folder before anything runs there.
        `shown` are files and folders that it may read although they lie in a private folder.
        """
        scratch = Path(tempfile.mkdtemp(prefix="eval-", dir=scratch_base))
        try:
            if prepare:
                prepare(scratch)
            return cls._spawn(
                zygote, limits, hidden, environment, cpus, scratch, arena_fd, groups, shown or []
            )  # fmt: skip
        except BaseException:
            remove_tree(scratch)
            raise

    @classmethod
    def _spawn(
        cls, zygote: Zygote, limits: Limits, hidden: list[str], environment: dict[str, str],
        cpus: list[int], scratch: Path, arena_fd: int | None, groups: Groups | None, shown: list[str],
    ) -> Worker:  # fmt: skip
        control, control_theirs = socket.socketpair()
        status, status_theirs = socket.socketpair()
        log_read, log_write = os.pipe()
        page, page_fd = wire.Page.create()
        fds = [control_theirs.fileno(), status_theirs.fileno(), log_write, page_fd]
        if arena_fd is not None:
            fds.append(arena_fd)
        rlimits = {
            "FSIZE": limits.file_bytes, "NOFILE": limits.open_files,
            "CPU": int(limits.wall_s * max(1, len(cpus))) + 10,
        }  # fmt: skip
        if limits.address_space_bytes:
            rlimits["AS"] = limits.address_space_bytes
        group = None
        note = "left out"
        if groups is not None and "cgroup" not in limits.leave_out:
            everything = limits.memory_bytes + limits.shm_bytes + limits.scratch_bytes
            group = groups.make(scratch.name, everything, limits.tasks)
            note = groups.note
        request = {
            "namespaces": limits.namespaces and not zygote.layers,
            "layers": zygote.layers,
            "leave_out": sorted(limits.leave_out),
            "on_gpu": zygote.on_gpu,
            "uid": None
            if zygote.layers or "other_user" in limits.leave_out
            else worker_uid(on_gpu=zygote.on_gpu),
            "cgroup": str(group.path) if group else None,
            "cgroup_note": note,
            "scratch": str(scratch),
            "scratch_bytes": limits.scratch_bytes,
            "tasks": limits.tasks,
            "hidden": hidden,
            "private": zygote.private,
            "shown": shown,
            "shm_bytes": limits.shm_bytes,
            "wall_s": limits.wall_s,
            "memory_bytes": limits.memory_bytes,
            "rlimits": rlimits,
            "environment": environment,
            "cpus": cpus,
        }
        worker = None
        try:
            supervisor = zygote.fork(request, fds)
            worker = cls(control, status, page, scratch, supervisor, cpus, group=group)
        finally:
            control_theirs.close()
            status_theirs.close()
            os.close(log_write)
            os.close(page_fd)
            if worker is None:
                control.close()
                status.close()
                os.close(log_read)
                page.close()
                if group:
                    group.remove()
        worker._log_thread = threading.Thread(target=worker._drain, args=(log_read,), daemon=True)
        worker._log_thread.start()
        try:
            worker.root = int(wire.receive(status, _FORK_TIMEOUT_S)["pid"])
            worker.scratch_fd = _receive_fd(status)
            hello = wire.receive(control, _FORK_TIMEOUT_S)
            worker.layers = hello.get("layers", {})
        except (wire.Closed, wire.Timeout, wire.ProtocolError) as error:
            log = worker.kill()
            raise TrustedCodeFailed(
                f"a worker did not start: {type(error).__name__} {error} {log}"
            ) from None
        return worker

    def start(self, device: str, threads: int, arena: dict[str, Any] | None) -> None:
        """Have it get its device ready and map the arena, before anything of a candidate is in it.

        Args:
            device: "cpu" or "cuda".
            threads: for operations on the CPU.
            arena: what `attach` of the arena says.

        Raises:
            TrustedCodeFailed: it cannot. WorkerGone: its wall time is over.
        """
        message = {"cmd": "start", "device": device, "threads": threads, "arena": arena}
        try:
            reply = self.ask(message, _DEVICE_TIMEOUT_S)
        except WorkerGone as gone:
            if gone.exit.reason.startswith("wall time"):
                raise
            raise TrustedCodeFailed(f"{device} did not start: {gone}") from None
        except (wire.Timeout, wire.ProtocolError) as error:
            fault = f"{type(error).__name__} {error}"
            raise TrustedCodeFailed(f"{device} did not start in a worker: {fault}") from None
        if reply.get("ok") is not True:
            raise TrustedCodeFailed(f"{device} did not start in a worker: {reply.get('message')}")

    # -- talking ------------------------------------------------------------------------------

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises:
            WorkerGone: it ended. wire.Timeout: no reply in time. wire.ProtocolError: nonsense.
        """
        try:
            wire.send(self.control, message)
            return wire.receive(self.control, timeout_s)
        except wire.Closed:
            raise WorkerGone(self.wait_exit(5.0)) from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Wait for a further reply; raises as `ask` does."""
        try:
            return wire.receive(self.control, timeout_s)
        except wire.Closed:
            raise WorkerGone(self.wait_exit(5.0)) from None

    def wait_word(self, index: int, value: int, timeout_s: float, *, sleep_s: float = 0.0) -> int:
        """Wait until a word of the shared page has `value`; returns the clock (ns) when it was seen.

        With `sleep_s` 0 it spins (a GPU judge has cores to spare), else it sleeps between looks.
        """
        words, clock = self.page.words, time.perf_counter_ns
        deadline = clock() + int(timeout_s * 1e9)
        while True:
            for _ in range(1 if sleep_s else 2000):
                if words[index] == value:
                    return clock()
            if sleep_s:
                time.sleep(sleep_s)
            if clock() > deadline:
                raise wire.Timeout
            if self.ended():
                if words[index] == value:
                    return clock()
                raise WorkerGone(self.wait_exit(5.0))

    # -- files --------------------------------------------------------------------------------

    def open_file(self, path: str) -> int:
        """Descriptor of a regular file in the scratch folder, whatever the worker has put there.

        Raises:
            wire.ProtocolError: there is none of that name, or links or other folders are on the way.
        """
        try:
            descriptor = open_beneath(self.scratch_fd, path)
        except OSError as error:
            raise wire.ProtocolError(f"{path}: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise wire.ProtocolError(f"{path} is not a regular file")
        return descriptor

    # -- life and death -----------------------------------------------------------------------

    def ended(self) -> bool:
        """Whether the supervisor has reported the end (or vanished)."""
        return self.exit is not None or bool(select.select([self.status], [], [], 0)[0])

    def wait_exit(self, timeout_s: float) -> Exit:
        """How it ended, waiting for the supervisor's report."""
        if self.exit is None:
            try:
                message = wire.receive(self.status, timeout_s)
                reason = str(message.get("reason", ""))
                if not reason and self.group and self.group.out_of_memory():
                    reason = "memory limit of its control group"
                self.exit = Exit(int(message.get("code", 1)), reason)
            except (wire.Closed, wire.Timeout, wire.ProtocolError):
                self.exit = Exit(1, "its supervisor vanished or it closed its channel")
        return self.exit

    def stop(self) -> None:
        """SIGSTOP the whole tree, until no new process appears in it."""
        stopped: set[int] = set()
        while True:
            tree = [self.root, *descendants(self.root)]
            fresh = [pid for pid in tree if pid not in stopped]
            if not fresh:
                break
            for pid in fresh:
                _signal(pid, signal.SIGSTOP)
                stopped.add(pid)
        self._tree = tree
        # SIGSTOP takes effect at the next return to user space: wait until it has.
        deadline = time.monotonic() + 1.0
        while not all(_halted(pid) for pid in tree) and time.monotonic() < deadline:
            time.sleep(0.0001)

    def resume(self) -> None:
        """SIGCONT what `stop` stopped."""
        for pid in self._tree:
            _signal(pid, signal.SIGCONT)

    def kill(self) -> str:
        """End everything, remove the scratch folder; returns the tail of what was printed."""
        if self.root:
            _signal(self.root, signal.SIGKILL)
        if self.exit is None:
            self.wait_exit(10.0)
        _signal(self.supervisor, signal.SIGKILL)
        self.control.close()
        self.status.close()
        if self._log_thread:
            self._log_thread.join(2.0)
        with contextlib.suppress(BufferError):
            self.page.close()
        if self.scratch_fd >= 0:
            os.close(self.scratch_fd)
            self.scratch_fd = -1
        if self.group:
            self.group.remove()
        remove_tree(self.scratch)
        return self._log.decode(errors="replace")

    def _drain(self, fd: int) -> None:
        """Keep the head and tail of the output; read everything, so that no writer ever blocks."""
        os.sched_setaffinity(0, self.cpus)  # Not on the core where the judge spins.
        head, tail = bytearray(), bytearray()
        total = 0
        with open(fd, "rb", buffering=0) as pipe:
            while chunk := pipe.read(1 << 16):
                total += len(chunk)
                room = _LOG_BYTES - len(head)
                head += chunk[:room]
                tail = (tail + chunk[room:])[-_LOG_BYTES:]
                cut = total - len(head) - len(tail)
                note = f"\n... {cut} bytes left out ...\n".encode() if cut else b""
                self._log = head + note + tail


def _receive_fd(sock: socket.socket) -> int:
    """The descriptor that a new worker sends when its mounts are arranged."""
    sock.settimeout(_FORK_TIMEOUT_S)
    try:
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    except TimeoutError:
        raise wire.Timeout from None
    if not descriptors:
        raise wire.Closed("it ended while its mounts were arranged")
    return descriptors[0]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _halted(pid: int) -> bool:
    """Whether a process is stopped or gone. One whose first thread has left looks gone and may run on."""
    state = _state(f"/proc/{pid}/stat")
    if state != "Z":
        return state in _HALTED
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    return all(_state(f"/proc/{pid}/task/{thread}/stat") in _HALTED for thread in threads)


def _state(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return chr(file.read().rsplit(b")", 1)[1].split()[0][0])
    except (OSError, IndexError):
        return "?"
