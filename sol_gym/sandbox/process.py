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
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import InfrastructureError
from .worker import wire
from .worker.isolation import descendants

_WORKER_PACKAGE = Path(__file__).parent / "worker"
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
_KEPT_VARIABLES = (
    "PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "LANG", "LC_ALL",
    "CC", "CXX", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE",
)  # fmt: skip
_START_TIMEOUT_S = 120.0
_FORK_TIMEOUT_S = 30.0
_LOG_BYTES = 8192
_SCRATCH = "sol_gym-judge-"
_GIB = 1 << 30


@dataclass(frozen=True)
class Limits:
    """What a worker may use. Memory is host memory; device memory is limited by the device."""

    wall_s: float = 300.0
    memory_bytes: int = 16 * _GIB
    address_space_bytes: int | None = None
    file_bytes: int = 4 * _GIB
    open_files: int = 4096
    shm_bytes: int = 2 * _GIB
    namespaces: bool = True
    """Whether to use namespaces where the machine allows them (tests switch them off)."""

    def without_cuda(self) -> Limits:
        """With a limit of the address space too, which CUDA reserves by the terabyte."""
        if self.address_space_bytes is not None:
            return self
        return replace(self, address_space_bytes=4 * self.memory_bytes + (8 << 30))


class Zygote:
    """A warm interpreter that forks workers."""

    def __init__(self, *, on_gpu: bool):
        ours, theirs = socket.socketpair()
        environment = {k: os.environ[k] for k in _KEPT_VARIABLES if k in os.environ}
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
                sys.executable,
                "-I",
                "-u",
                "-c",
                _BOOT,
                str(_WORKER_PACKAGE),
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
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
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
    _log: bytearray = field(default_factory=bytearray)
    _log_thread: threading.Thread | None = None
    _tree: list[int] = field(default_factory=list)

    @classmethod
    def spawn(
        cls, zygote: Zygote, limits: Limits, *, hidden: list[str], environment: dict[str, str],
        cpus: list[int], scratch_base: Path, arena_fd: int | None = None, prepare: Any = None,
    ) -> Worker:  # fmt: skip
        """Fork a worker and wait for its greeting.

        `prepare(scratch)` puts files into the new scratch folder before anything runs there.
        """
        scratch = Path(tempfile.mkdtemp(prefix="eval-", dir=scratch_base))
        try:
            if prepare:
                prepare(scratch)
            return cls._spawn(zygote, limits, hidden, environment, cpus, scratch, arena_fd)
        except BaseException:
            remove_tree(scratch)
            raise

    @classmethod
    def _spawn(
        cls, zygote: Zygote, limits: Limits, hidden: list[str], environment: dict[str, str],
        cpus: list[int], scratch: Path, arena_fd: int | None,
    ) -> Worker:  # fmt: skip
        control, control_theirs = socket.socketpair()
        status, status_theirs = socket.socketpair()
        log_read, log_write = os.pipe()
        page, page_fd = wire.Page.create()
        fds = [control_theirs.fileno(), status_theirs.fileno(), log_write, page_fd]
        if arena_fd is not None:
            fds.append(arena_fd)
        rlimits = {"FSIZE": limits.file_bytes, "NOFILE": limits.open_files}
        if limits.address_space_bytes:
            rlimits["AS"] = limits.address_space_bytes
        request = {
            "namespaces": limits.namespaces,
            "scratch": str(scratch),
            "hidden": hidden,
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
            worker = cls(control, status, page, scratch, supervisor, cpus)
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
        worker._log_thread = threading.Thread(target=worker._drain, args=(log_read,), daemon=True)
        worker._log_thread.start()
        try:
            worker.root = int(wire.receive(status, _FORK_TIMEOUT_S)["pid"])
            hello = wire.receive(control, _FORK_TIMEOUT_S)
            worker.layers = hello.get("layers", {})
        except (wire.Closed, wire.Timeout, wire.ProtocolError) as error:
            log = worker.kill()
            raise InfrastructureError(
                f"a worker did not start: {type(error).__name__} {error} {log}"
            ) from None
        return worker

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

    # -- life and death -----------------------------------------------------------------------

    def ended(self) -> bool:
        """Whether the supervisor has reported the end (or vanished)."""
        return self.exit is not None or bool(select.select([self.status], [], [], 0)[0])

    def wait_exit(self, timeout_s: float) -> Exit:
        """How it ended, waiting for the supervisor's report."""
        if self.exit is None:
            try:
                message = wire.receive(self.status, timeout_s)
                self.exit = Exit(int(message.get("code", 1)), str(message.get("reason", "")))
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
        while any(_state(pid) not in "TtZX?" for pid in tree) and time.monotonic() < deadline:
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


def remove_tree(path: Path) -> None:
    """Remove a folder a candidate wrote into, whatever modes it set."""
    import shutil

    def retry(function: Any, name: str, _: Any) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(name), 0o700)
            os.chmod(name, 0o700)
            function(name)

    shutil.rmtree(path, onerror=retry)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return chr(file.read().rsplit(b")", 1)[1].split()[0][0])
    except (OSError, IndexError):
        return "?"


def make_scratch() -> Path:
    """A folder for workers' scratch folders; those that killed processes left behind are removed."""
    remove_abandoned_scratch()
    return Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-")).resolve()


def remove_abandoned_scratch() -> None:
    """Remove scratch folders of processes that were killed before they could do so themselves."""
    for path in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        pid = path.name.removeprefix(_SCRATCH).split("-")[0]
        with contextlib.suppress(OSError):
            if (
                pid.isdigit()
                and not Path("/proc", pid).exists()
                and path.lstat().st_uid == os.getuid()
            ):
                remove_tree(path)
