"""The caller's side: finds or starts the judge's process and asks it."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sol_gym

from ..device import Device, device_to_judge_on
from ..errors import DeviceError, InfrastructureError, ProblemError, SolutionError
from ..evaluation import Evaluation, Finding, Provenance, Status
from ..paths import runtime_dir
from ..problem import Problem, ProfileName, load_problem
from ..recorded import with_recorded
from ..sandbox import audit as sources_audit
from ..sandbox.worker import wire
from ..solution import Solution, load_solution

if TYPE_CHECKING:
    from .bounds import BoundSet

OnProgress = Callable[[str, int, int], None]
_START_TIMEOUT_S = 180.0
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from sol_gym.evaluate.server import main; main()"
)
_GRACE_S = 600.0
"""Beyond an evaluation's own limit: waiting for other clients, measuring a baseline."""


class Evaluator:
    """A connection to the judge of one device.

    Args:
        device: key of a device model that is present, or "auto".
        audit: read sources with the static audit first (docs/audit.md). A veto is REWARD_HACK
            before any process is started; what else it sees is in `Evaluation.findings`.
        strict_isolation: raise `InfrastructureError` instead of running a solution where a layer of
            isolation is missing; None asks the environment variable SOL_GYM_STRICT_ISOLATION.

    Example:
        >>> with Evaluator() as evaluator:  # doctest: +SKIP
        ...     evaluation = evaluator.evaluate("FIB/021_rmsnorm_h128", source_text)
    """

    def __init__(
        self,
        device: str | Device = "auto",
        *,
        audit: bool = True,
        strict_isolation: bool | None = None,
    ):
        self.audit = audit
        self.strict_isolation = (
            _strict_by_environment() if strict_isolation is None else strict_isolation
        )
        self.device = device if isinstance(device, Device) else device_to_judge_on(device)
        self._socket: socket.socket | None = None
        self._owner = os.getpid()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; the judge ends by itself when its last client is gone."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def evaluate(
        self,
        problem: Problem | str | Path,
        solution: Solution | str | Path,
        *,
        profile: ProfileName | None = None,
        inputs_profile: str = "compatible",
        seed: int | None = None,
        timing: bool = True,
        scoring: bool = True,
        bound_set: BoundSet = "solar",
        timeout_s: float = 300.0,
        blobs: str | Path | None = None,
        on_progress: OnProgress | None = None,
    ) -> Evaluation:
        """Judge a solution on a problem.

        Args:
            problem: a `Problem`, an id of the library, or a folder in the public layout.
            solution: a `Solution`, source text, or the path of a source file or solution.json.
            profile: workload list; None is "smoke" on the CPU where the problem has one, else "full".
            inputs_profile: how inputs are drawn ("compatible": the published rules).
            seed: fixes all draws, so that the run can be repeated; None takes entropy.
            timing: False stops after correctness; then there is no score.
            scoring: False leaves out bounds, baseline and score.
            bound_set: whose T_SOL: ours ("solar") or, on a B200, the published figures.
            timeout_s: wall time for this solution, compiling included.
            blobs: folder of recorded tensors (see `sol_gym.recorded`); None takes `SOL_GYM_BLOBS`.
            on_progress: called with (stage, done, total).

        Returns:
            The evaluation; a failing solution is a status, not an exception.

        Raises:
            ProblemError, SolutionError: they cannot be read.
            InfrastructureError: the judge cannot be started or died. Never turned into a score.
        """
        problem = as_problem(problem, profile, self.device, blobs)
        solution = as_solution(solution)
        if (fault := syntax_fault(solution)) is not None:
            return self._refused(
                problem, solution, inputs_profile, bound_set, Status.COMPILE_ERROR, fault, None
            )
        findings = sources_audit.audit(solution) if self.audit else None
        if vetoes := sources_audit.vetoes(findings or []):
            why = f"refused by the audit of the source: {vetoes[0]}"
            return self._refused(
                problem, solution, inputs_profile, bound_set, Status.REWARD_HACK, why, findings
            )
        message = {
            "cmd": "evaluate",
            "problem": problem.model_dump(mode="json"),
            "root": problem.root,
            "blob_root": problem.blob_root,
            "solution": solution.model_dump(mode="json"),
            "inputs_profile": inputs_profile,
            "seed": seed,
            "timing": timing,
            "scoring": scoring and timing,
            "bound_set": bound_set,
            "timeout_s": timeout_s,
            "strict_isolation": self.strict_isolation,
        }
        evaluation = Evaluation.model_validate(self._request(message, timeout_s, on_progress))
        return evaluation.model_copy(update={"findings": findings})

    def describe(
        self, *, examine: bool = False, on_progress: OnProgress | None = None
    ) -> dict[str, Any]:
        """What the judge runs on: device, versions, isolation layers, calibrated overheads.

        With `examine`, workers also try to break out, and `attempts` says what came of it; that
        takes some seconds.
        """
        return self._request({"cmd": "describe", "examine": examine}, 180.0, on_progress)

    def _refused(
        self, problem: Problem, solution: Solution, inputs_profile: str, bound_set: BoundSet,
        status: Status, message: str, findings: list[Finding] | None,
    ) -> Evaluation:  # fmt: skip
        """An evaluation without a judge: the source itself decides it."""
        return Evaluation(
            problem=problem.id,
            solution=solution.name,
            status=status,
            score=0.0,
            message=message,
            findings=findings,
            provenance=Provenance(
                device=self.device.key,
                device_name=self.device.name,
                profile=problem.profile,
                inputs_profile=inputs_profile,
                bound_set=bound_set,
                problem_hash=problem.content_hash,
                solution_hash=solution.content_hash,
                versions={"sol_gym": sol_gym.__version__},
                date=datetime.now(UTC).isoformat(timespec="seconds"),
            ),
        )

    # -- connection ---------------------------------------------------------------------------

    def _request(
        self, message: dict[str, Any], timeout_s: float, on_progress: OnProgress | None
    ) -> Any:
        sock = self._connected(on_progress)
        deadline = time.monotonic() + timeout_s + _GRACE_S
        try:
            wire.send(sock, message)
            while True:
                reply = wire.receive(sock, max(0.1, deadline - time.monotonic()))
                match reply.get("event"):
                    case "progress":
                        if on_progress:
                            on_progress(
                                str(reply["stage"]), int(reply["done"]), int(reply["total"])
                            )
                    case "result":
                        return reply["value"]
                    case "error":
                        raise _ERRORS.get(str(reply["kind"]), InfrastructureError)(reply["message"])
        except (wire.Closed, wire.Timeout, wire.ProtocolError, OSError) as error:
            self.close()
            raise InfrastructureError(
                f"the judge is gone: {type(error).__name__} {error}{_tail(self.device)}"
            ) from None
        except BaseException as error:
            if not isinstance(
                error, ProblemError | SolutionError | DeviceError | InfrastructureError
            ):
                self.close()  # Interrupted while the judge is at work: hanging up cancels it.
            raise

    def _connected(self, on_progress: OnProgress | None) -> socket.socket:
        if self._socket is not None and self._owner != os.getpid():
            self._socket = None  # A fork's copy: the parent keeps using its own end.
        if self._socket is None:
            self._socket = connect(self.device, on_progress)
            self._owner = os.getpid()
        return self._socket


def _strict_by_environment() -> bool:
    text = os.environ.get("SOL_GYM_STRICT_ISOLATION", "")
    if text.lower() not in ("", "0", "1", "false", "true", "no", "yes"):
        raise InfrastructureError(
            f"SOL_GYM_STRICT_ISOLATION is {text!r}, expected 1 or 0 (or nothing)"
        )
    return text.lower() in ("1", "true", "yes")


_ERRORS: dict[str, type[Exception]] = {
    "problem": ProblemError,
    "solution": SolutionError,
    "device": DeviceError,
    "infrastructure": InfrastructureError,
}


def evaluate(
    problem: Problem | str | Path,
    solution: Solution | str | Path,
    *,
    device: str | Device = "auto",
    **arguments: Any,
) -> Evaluation:
    """Judge one solution; arguments and errors as `Evaluator.evaluate`.

    For several evaluations keep an `Evaluator`: it keeps the judge warm.
    """
    with Evaluator(device) as evaluator:
        return evaluator.evaluate(problem, solution, **arguments)


def as_problem(
    problem: Problem | str | Path,
    profile: ProfileName | None,
    device: Device,
    blobs: str | Path | None = None,
) -> Problem:
    """The problem meant, with the workload profile that suits the device unless one is given, and
    with recorded inputs from `blobs` or `SOL_GYM_BLOBS` where it has some."""
    chosen = problem if isinstance(problem, Problem) else _found(problem)
    if profile is None:
        smoke = device.key == "cpu" and chosen.pack is not None and chosen.pack.smoke is not None
        profile = "smoke" if smoke and chosen.profile == "full" else chosen.profile
    chosen = chosen.with_profile(profile)
    return chosen if chosen.blob_root and not blobs else with_recorded(chosen, blobs)


def _found(name: str | Path) -> Problem:
    if isinstance(name, Path) or os.path.isdir(name) or name.endswith(".json"):
        return load_problem(name)
    from ..problems import load

    return load(name)


def as_solution(solution: Solution | str | Path) -> Solution:
    """The solution meant: text with a line break is source, anything else a path."""
    if isinstance(solution, Solution):
        return solution
    if isinstance(solution, Path):
        return load_solution(solution)
    if "\n" not in solution and len(solution) < 4096 and Path(solution).exists():
        return load_solution(solution)
    return Solution.from_text(solution)


def syntax_fault(solution: Solution) -> str | None:
    """Why a Python source does not parse, with file and line; None if all do."""
    if not solution.spec.is_python:
        return None
    for source in solution.sources:
        if not source.path.endswith(".py"):
            continue
        try:
            ast.parse(source.content, source.path)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            where = (
                f" (line {error.lineno}: {(error.text or '').strip()})"
                if isinstance(error, SyntaxError)
                else ""
            )
            return f"{source.path}: {type(error).__name__}: {error}{where}"
    return None


# -- finding or starting the judge ----------------------------------------------------------------


def socket_path(device: Device) -> Path:
    """Socket of the judge for this device model, installation and user."""
    identity = f"{sol_gym.__version__} {sol_gym.__file__} {sys.executable} {device.model_dump_json()} {_surroundings()}"
    return (
        runtime_dir()
        / f"judge-{device.key}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}.sock"
    )


def connect(device: Device, on_progress: OnProgress | None = None) -> socket.socket:
    """Connect to the device's judge, starting it if there is none.

    Raises:
        InfrastructureError: it does not start; the message holds the end of its log.
    """
    path = socket_path(device)
    if (sock := _try_connect(path)) is not None:
        return sock
    with open(path.with_suffix(".start"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # One client starts it, the others wait here.
        if (sock := _try_connect(path)) is not None:
            return sock
        if on_progress:
            on_progress("starting the judge", 0, 1)
        _start(device, path)
        sock = _try_connect(path)
    if sock is None:
        raise InfrastructureError(f"the judge started but cannot be reached at {path}")
    return sock


def _try_connect(path: Path) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(10.0)
        sock.connect(str(path))
        wire.send(sock, {"cmd": "hello"})
        wire.receive(sock, 10.0)
        return sock
    except (OSError, wire.Closed, wire.Timeout, wire.ProtocolError):
        sock.close()
        return None


def _start(device: Device, path: Path) -> None:
    log_path = path.with_suffix(".log")
    read_end, write_end = os.pipe()
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-P", "-c", _BOOT, _import_root(),
                "--socket", str(path), "--ready-fd", str(write_end),
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[write_end],
            start_new_session=True,
        )  # fmt: skip
    os.close(write_end)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(device.model_dump_json().encode())
        process.stdin.close()
    ready, _, _ = select.select([read_end], [], [], _START_TIMEOUT_S)
    answer = os.read(read_end, 16) if ready else b""
    os.close(read_end)
    if answer != b"ready":
        process.kill()
        process.wait()
        raise InfrastructureError(f"the judge for {device.key} did not start{_tail(device)}")
    _orphaned.append(process)


_orphaned: list[subprocess.Popen] = []
"""Judges started by this process; kept so that they are reaped, never waited for."""


def _import_root() -> str:
    """Where the judge must find the very sol_gym that runs here."""
    return str(Path(sol_gym.__file__).resolve().parent.parent)


def _surroundings() -> list[str]:
    """What a judge takes from the environment of whoever starts it, and others may want otherwise."""
    return [os.environ.get(v, "") for v in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "CUTLASS_DIR")]


def _tail(device: Device) -> str:
    log = socket_path(device).with_suffix(".log")
    with contextlib.suppress(OSError):
        text = log.read_text(errors="replace").strip()
        if text:
            return f"; the end of its log:\n{text[-2000:]}"
    return ""
