"""The zygote: torch and triton imported once, CUDA never initialised, one fork per evaluation.

    judge ── zygote ── supervisor ── init (PID 1 of a fresh namespace) ── worker ── its children

The supervisor stays outside the namespaces: it watches memory and wall time, and says how the
worker ended. The init process exists so that one kill takes everything with it: when PID 1 of a
namespace ends, the kernel kills the rest. Without namespaces the supervisor adopts orphans and
kills them itself.

Started by the judge as ``python -I -c ...`` with the file descriptor of its socket; see
`sol_gym.sandbox.process`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import time
from typing import Any

from . import isolation, wire

_WATCH_INTERVAL_S = 0.02
_FILES_INTERVAL_S = 0.2
"""Looking through open files costs more than reading counters."""


def main(fd: int, warm: list[str]) -> None:
    """Serve spawn requests on socket `fd` until the judge is gone."""
    isolation.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in warm:
        with contextlib.suppress(ImportError):
            __import__(module)
    # Loaded before the forks: a worker cannot read this folder any more.
    from . import attempts, cuda, worker  # noqa: F401

    _warm_triton()
    if os.environ.get("TRITON_INTERPRET") == "1":
        from . import interpreter

        interpreter.correct_interpreter()
    _block_judge_imports()
    isolation.needed_folders()  # Looked for once, not in every fork.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Supervisors are reaped by the kernel.
    judge = socket.socket(fileno=fd)
    wire.send(judge, {"event": "ready"})
    while True:
        data, fds, _, _ = socket.recv_fds(judge, 1 << 16, 8)
        if not data:
            return
        request = json.loads(data)
        request["user_note"] = _other_user(
            request
        )  # Found out here, so that it is known next time.
        if request["user_note"]:
            request["uid"] = None
        pid = os.fork()
        if pid == 0:
            judge.close()
            code = 1
            try:
                _supervise(request, fds)
                code = 0
            finally:
                os._exit(code)
        for descriptor in fds:
            os.close(descriptor)
        wire.send(judge, {"event": "forked", "pid": pid})


def _build_lightly(
    name: str, source: str, folder: str, library_dirs: list[str], include_dirs: list[str | None],
    libraries: list[str], *_: Any,
) -> str:  # fmt: skip
    """Compile Triton's launcher stubs without optimising: half the time, once per signature.

    What a stub does is a few dozen instructions a launch, and nothing at all in a captured graph.
    """
    import shutil
    import subprocess
    import sysconfig

    variable, known = ("CC", "gcc") if source.endswith(".c") else ("CXX", "g++")
    compiler = os.environ.get(variable) or shutil.which(known) or shutil.which("clang")
    if compiler is None:
        raise RuntimeError(f"Triton needs a C compiler: install {known} or set {variable}")
    library = os.path.join(folder, name + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))
    headers = [folder, sysconfig.get_path("include", "posix_prefix"), *filter(None, include_dirs)]
    linked = [
        f"-l:{lib}" if ".so" in lib or lib.endswith(".a") else f"-l{lib}" for lib in libraries
    ]
    subprocess.run(
        [
            compiler, source, "-O0", "-shared", "-fPIC", "-w", "-o", library,
            *linked, *(f"-L{d}" for d in library_dirs), *(f"-I{d}" for d in headers),
        ],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return library


def _warm_triton() -> None:
    """Do once, here, what every fork would do again for its first kernel.

    Triton hashes its own installation (0.7 s), and loads and initialises its compiler (a kernel is
    compiled for a GPU architecture; no GPU is touched). Failing only costs that time in each worker.
    """
    with contextlib.suppress(Exception):
        import tempfile

        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.cache import triton_key

        triton_key()
        if os.environ.get("TRITON_INTERPRET") == "1":
            return
        from . import warming

        triton.knobs.build.impl = _build_lightly
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder
            signature = {"x": "*bf16", "y": "*bf16", "n": "i32", "BLOCK": "constexpr"}
            source = ASTSource(warming.scale_rows, signature=signature, constexprs={"BLOCK": 128})
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
        del os.environ["TRITON_CACHE_DIR"]


def _block_judge_imports() -> None:
    """Make `import sol_gym` fail in workers: its code is of no use to a candidate."""

    class Blocked:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name == "sol_gym" or name.startswith("sol_gym."):
                raise ImportError("sol_gym cannot be imported inside the sandbox")

    sys.meta_path[:] = [f for f in sys.meta_path if "sol_gym" not in getattr(f, "__module__", "")]
    sys.meta_path.insert(0, Blocked)  # type: ignore[arg-type]


def _supervise(request: dict[str, Any], fds: list[int]) -> None:
    control_fd, status_fd, log_fd, *shared = fds
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    isolation.die_with_parent()
    isolation.adopt_orphans()
    status = socket.socket(fileno=status_fd)
    layers: isolation.Layers = dict(request["layers"])
    if request["user_note"]:
        layers["other_user"] = request["user_note"]
    uid = request["uid"]
    contained = False
    if request["namespaces"]:
        contained = isolation.enter_namespaces(layers, as_root=uid is not None)
        if not contained and uid is not None and isolation.enter_namespaces(layers):
            contained, uid = True, None
            layers["other_user"] = "not permitted: namespaces need a user namespace here"
    gate_read, gate_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gate_write)
        try:
            _start(request, layers, contained, uid, control_fd, log_fd, status, shared, gate_read)
        finally:
            os._exit(70)
    os.close(gate_read)
    for descriptor in (control_fd, log_fd):
        os.close(descriptor)
    wire.send(status, {"event": "started", "pid": child, "contained": contained})
    os.write(gate_write, b"go")
    os.close(gate_write)
    code, reason = _watch(child, request, shared)
    for pid in isolation.descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(wire.Closed, wire.Timeout):
        wire.send(status, {"event": "exit", "code": code, "reason": reason})


def _other_user(request: dict[str, Any]) -> str | None:
    """Why a worker cannot be run as the user asked for, or None if it can."""
    uid = request["uid"]
    if os.getuid():
        return "only root can become another user"
    if uid is None:
        return "not asked for (SOL_GYM_WORKER_UID)"
    private = tuple(request["private"] if request["namespaces"] else ())
    return _reason_against(uid, tuple(_readable(request)), private)


def _readable(request: dict[str, Any]) -> list[str]:
    return sorted({*isolation.needed_folders(), *request["shown"]})


@functools.cache
def _reason_against(uid: int, needed: tuple[str, ...], private: tuple[str, ...]) -> str | None:
    closed = isolation.unreadable_for(uid, list(needed), list(private))
    if closed is not None:
        return f"not possible: {closed} cannot be read by other users"
    return None if isolation.can_become(uid) else f"not permitted: becoming user {uid}"


def _watch(child: int, request: dict[str, Any], shared: list[int]) -> tuple[int, str]:
    """Wait for the child's end, enforcing memory, tasks and wall time; returns exit code and reason."""
    start = time.monotonic()
    most = request["memory_bytes"]
    me = os.getpid()
    known = {os.fstat(descriptor).st_ino for descriptor in shared}
    files, looked, over = 0, start, 0
    while True:
        pid, code = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(code), ""
        reason = ""
        tree, now = isolation.descendants(me), time.monotonic()
        arena = sum(os.fstat(descriptor).st_size for descriptor in shared)
        if now - looked > _FILES_INTERVAL_S:
            files, looked = isolation.memory_file_bytes(tree, known), now
        # Twice in a row: while a process starts another, its memory is seen as both of theirs.
        heavy = most and isolation.memory_bytes(tree, arena, most - files) + files > most
        over = over + 1 if heavy else 0
        if now - start > request["wall_s"]:
            reason = f"wall time limit of {request['wall_s']:.0f} s"
        elif over > 1:
            reason = f"memory limit of {most / 2**30:.2f} GiB"
        elif isolation.tasks(tree) > request["tasks"]:
            reason = f"process limit of {request['tasks']}"
        if reason:
            os.kill(child, signal.SIGKILL)
            _, code = os.waitpid(child, 0)
            return os.waitstatus_to_exitcode(code), reason
        time.sleep(_WATCH_INTERVAL_S)


def _start(
    request: dict[str, Any],
    layers: isolation.Layers,
    contained: bool,
    uid: int | None,
    control_fd: int,
    log_fd: int,
    status: socket.socket,
    shared: list[int],
    gate: int,
) -> None:
    """In the new process: finish the isolation, then become the worker (or its init)."""
    isolation.die_with_parent()
    if os.read(gate, 2) != b"go":
        os._exit(70)
    os.close(gate)
    scratch = request["scratch"]
    _join_group(request, layers)
    if contained:
        try:
            isolation.arrange_mounts(
                scratch, request["scratch_bytes"], os.getuid() if uid is None else uid,
                request["hidden"], request["private"], _readable(request),
                request["shm_bytes"], layers, request["leave_out"],
            )  # fmt: skip
        except OSError as error:
            layers["mount_ns"] = f"mounts failed: {error}"
    if uid is not None:
        if layers.get("scratch_limit") is not True:
            isolation.give(scratch, uid)
        isolation.become(uid, layers)
    folder = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    socket.send_fds(status, [b"S"], [folder])
    os.close(folder)
    status.close()
    limits = dict(request["rlimits"])
    if layers.get("user_ns") is True and isolation.counts_processes_by_namespace():
        limits["NPROC"] = request["tasks"]
    isolation.confine(
        scratch, limits, layers, on_gpu=request["on_gpu"], leave_out=request["leave_out"]
    )
    if contained:
        worker_pid = os.fork()
        if worker_pid:
            isolation.be_unreadable()
            os.close(control_fd)
            os.close(log_fd)
            _init(worker_pid)
        isolation.die_with_parent()
    os.setsid()
    keep = sorted({control_fd, log_fd, *shared})
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    _close_all_but({0, 1, 2, *keep} - {log_fd})
    layers["closed_descriptors"] = True
    os.sched_setaffinity(0, request["cpus"])
    _clean_environment(request)
    layers["clean_environment"] = True
    os.chdir(scratch)
    from . import worker

    code = 1
    try:
        code = worker.serve(socket.socket(fileno=control_fd), shared, layers)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _join_group(request: dict[str, Any], layers: isolation.Layers) -> None:
    """Move into the control group that the judge made for this worker."""
    group = request["cgroup"]
    layers["cgroup"] = request["cgroup_note"]
    if group:
        try:
            with open(os.path.join(group, "cgroup.procs"), "w") as file:
                file.write("0")
            layers["cgroup"] = True
        except OSError as error:
            layers["cgroup"] = f"not permitted: {error.strerror}"


def _init(worker_pid: int) -> None:
    """PID 1: reap until the worker ends, then end with its code (which ends everything else)."""
    while True:
        pid, status = os.wait()
        if pid == worker_pid:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _close_all_but(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _clean_environment(request: dict[str, Any]) -> None:
    scratch = request["scratch"]
    for name in ("home", "tmp", "cache"):
        os.makedirs(os.path.join(scratch, name), exist_ok=True)
    cache = os.path.join(scratch, "cache")
    os.environ.update(
        HOME=os.path.join(scratch, "home"),
        TMPDIR=os.path.join(scratch, "tmp"),
        XDG_CACHE_HOME=cache,
        TRITON_CACHE_DIR=os.path.join(cache, "triton"),
        TORCHINDUCTOR_CACHE_DIR=os.path.join(cache, "inductor"),
        TORCH_EXTENSIONS_DIR=os.path.join(cache, "extensions"),
        CUDA_CACHE_PATH=os.path.join(cache, "cuda"),
        USER="worker",
        LOGNAME="worker",
        **request["environment"],
    )
    import tempfile

    tempfile.tempdir = None
