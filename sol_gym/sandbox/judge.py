"""The judge: takes a problem and a solution, returns what came of every workload.

It owns a backend (a device), a zygote and the calibration of the machine. One evaluation runs at a
time. An evaluation uses one worker, or one more where a solution cannot be captured in a CUDA
graph (a failed capture can leave a process unusable).
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch

from ..device import Device
from ..errors import InfrastructureError, ProblemError
from ..evaluation import Correctness, Status, Timing, WorkloadResult
from ..inputs import InputMaker
from ..problem import AxisConst, Definition, Problem, RandomInput, ScalarInput, TensorSpec, Workload
from ..solution import Solution
from ..strict import other_shape, variants_for
from . import bubblewrap, replies
from .backend import backend_for
from .build import BuildCache, FlagRefused, binding_of, checked_flags
from .calls import Calls
from .cgroup import Groups
from .correctness import Comparison
from .fallback import layers_in_the_way
from .hints import with_hint
from .process import (
    WORKER_PACKAGE,
    Limits,
    TrustedCodeFailed,
    Worker,
    WorkerGone,
    Zygote,
    make_scratch,
)
from .reference import InvalidReference, Reference
from .schedule import Schedule
from .series import Series
from .stages import Stages
from .timing import Calibration, Measured, Plan, timing_from
from .verdict import NotCapturable, Verdict, WorkedWhileStopped, accepted, decide
from .worker import wire
from .worker.isolation import missing, private_folders

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
_BUILD_TIMEOUT_S = 240.0
_REASON_CHARS = 300


@dataclass
class Outcome:
    """What the judge found; bounds, baselines and scores are added elsewhere."""

    results: list[WorkloadResult] = field(default_factory=list)
    status: Status | None = None
    """Set where the whole solution failed before any workload."""
    message: str = ""
    log: str = ""
    isolation: dict[str, Any] = field(default_factory=dict)
    stages_s: Stages = field(default_factory=Stages)


@dataclass(frozen=True)
class Request:
    """What to judge, and how."""

    problem: Problem
    solution: Solution
    seed: int | None = None
    """Fixes all draws, for whoever wants to repeat a run; None takes entropy."""
    inputs_profile: str = "compatible"
    timing: bool = True
    timeout_s: float = 300.0
    strict_isolation: bool = False
    """Refuse to run anything (`InfrastructureError`) where a layer is missing."""
    plan: Plan | None = None
    on_progress: Progress = lambda *_: None
    cancelled: Callable[[], bool] = lambda: False


class Cancelled(Exception):
    """The client is gone."""


class Judge:
    """Judges solutions on one device.

    Args:
        device: model of hardware that is present.
        cache: folder for build artifacts.
        hidden: folders that workers must not see (besides sol_gym's own).
        lock_clock_mhz: hold the GPU's SM clock there until `close` (needs the right to set clocks).
        bubblewrapped: whether the zygote runs inside bubblewrap; None does so where this process may
            not make namespaces and bubblewrap may.
    """

    def __init__(
        self, device: Device, *, cache: Path, hidden: list[str] | None = None,
        limits: Limits | None = None, plan: Plan | None = None, lock_clock_mhz: int | None = None,
        bubblewrapped: bool | None = None,
    ):  # fmt: skip
        self.plan = plan or Plan()
        self.limits = limits or Limits()
        if device.key == "cpu":
            self.limits = self.limits.without_cuda()
        self.hidden = sorted({*own_folders(), str(cache), *(hidden or ())})
        self.scratch = make_scratch()
        self.zygote = self._zygote(device.key != "cpu", bubblewrapped)
        try:
            self.groups = Groups()
            self.backend = backend_for(device, lock_clock_mhz)
        except BaseException:
            self.zygote.close()
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise
        self.builds = BuildCache(cache / "build")
        self.trusted = calibration_problem(self.backend.kind)
        """Problem and solution to calibrate with, and to find out whether layers are in the way."""
        self.left_out: dict[str, str] = {}
        """Layers that trusted code does not get through here, with the reason."""
        self._calibration: Calibration | None = None
        self.triton_seed: Path | None = None
        """Triton's driver and launcher stubs, compiled once by a trusted worker."""

    def _zygote(self, on_gpu: bool, bubblewrapped: bool | None) -> Zygote:
        """Plain where this process may make namespaces, else inside bubblewrap where that may."""
        if bubblewrapped is None:
            wanted = self.limits.namespaces and not bubblewrap.namespaces_allowed()
            bubblewrapped = wanted and bubblewrap.works()
        if not bubblewrapped:
            return Zygote(on_gpu=on_gpu)
        package = self.scratch / "worker"
        shutil.copytree(WORKER_PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        around = bubblewrap.command(self.scratch, package, self.hidden, private_folders())
        return Zygote(on_gpu=on_gpu, around=around, layers=bubblewrap.LAYERS, package=package)

    def close(self) -> None:
        """End the zygote, release memory, remove the scratch folder."""
        self.zygote.close()
        self.backend.close()
        self.groups.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    # -- calibration --------------------------------------------------------------------------

    @property
    def calibration(self) -> Calibration:
        """Overheads of honest workers on this machine (zero until the first timed evaluation)."""
        return self._calibration or Calibration()

    def _calibrate(self) -> Calibration:
        return Calibration.from_honest(
            self._run_trusted(repeats=10) + self._run_trusted(repeats=10)
        )

    def _run_trusted(self, repeats: int) -> list[Measured]:
        """Measure the trusted solution in a fresh worker; raises `TrustedCodeFailed`.

        Every batch is preceded by a check of the device. If that finds fault with a trusted kernel,
        the check is of no use on this machine and is switched off.
        """
        problem, solution = self.trusted
        request = Request(
            problem, solution, plan=replace(self.plan, repeats=repeats), timeout_s=120.0
        )
        measured: list[Measured] = []

        def keep(series: Series) -> None:
            measured.append(
                series.measure(graph=self.backend.kind == "cuda", calibration=Calibration())
            )

        try:
            outcome = self._run(request, keep)
        except WorkedWhileStopped:
            self.backend.idle_check = "off: it took a trusted kernel's device for busy"
            return self._run_trusted(repeats)
        except NotCapturable as error:
            raise TrustedCodeFailed(f"a trusted kernel cannot be captured: {error}") from None
        if not outcome.results or any(r.status is not Status.PASSED for r in outcome.results):
            detail = outcome.message or next((r.message for r in outcome.results if r.message), "")
            last = detail.strip().rpartition("\n")[2]
            raise TrustedCodeFailed(f"a trusted kernel failed: {last}\n{detail}\n{outcome.log}")
        return measured

    def _through_the_layers(self, work: Callable[[], T]) -> T:
        """Do `work`. If trusted code fails in it, find the layers in its way and do it without them.

        Every worker starts with trusted code, so on a machine where all is well nothing is tried
        that would not have been done anyway.

        Raises:
            InfrastructureError: it is not because of the layers.
        """
        try:
            return work()
        except TrustedCodeFailed:
            self._leave_out(layers_in_the_way(self._trial))
            return work()

    def _trial(self, layers: frozenset[str]) -> str | None:
        whole = self.limits
        self.limits = replace(whole, leave_out=whole.leave_out | layers)
        try:
            self._run_trusted(repeats=1)
        except TrustedCodeFailed as error:
            return str(error).partition("\n")[0][:_REASON_CHARS]
        finally:
            self.limits = whole
        return None

    def _leave_out(self, layers: dict[str, str]) -> None:
        self.left_out |= layers
        self.limits = replace(self.limits, leave_out=self.limits.leave_out | layers.keys())

    # -- evaluation ---------------------------------------------------------------------------

    def evaluate(self, request: Request) -> Outcome:
        """Judge a solution on all workloads of a problem.

        A failing solution is an `Outcome`, never an exception.

        Raises:
            ProblemError: the inputs cannot be made. InfrastructureError: the machine failed.
            Cancelled: the client is gone.
        """
        if request.timing and self._calibration is None:
            request.on_progress("calibrating", 0, 1)
            self._calibration = self._through_the_layers(self._calibrate)
        return self._through_the_layers(lambda: self._run(request, None))

    def _run(self, request: Request, keep: Callable[[Series], None] | None) -> Outcome:
        run = _Run(self, request, keep)
        try:
            return run()
        finally:
            run.close()

    def probe(self) -> dict[str, Any]:
        """Isolation layers of a fresh worker that has started its device."""
        return self._through_the_layers(self._started_layers)

    def _started_layers(self) -> dict[str, Any]:
        arena = self.backend.arena()
        worker = None
        try:
            worker = self.spawn(self.limits, arena.fd, lambda scratch: None)
            self.start(worker, arena)
            return worker.layers
        finally:
            if worker is not None:
                worker.kill()
            self.backend.release_arena(arena)

    def spawn(
        self, limits: Limits, arena_fd: int | None, prepare: Callable[[Path], None]
    ) -> Worker:
        """A fresh worker."""
        worker = Worker.spawn(
            self.zygote, limits, hidden=self.hidden, environment=self.backend.environment(),
            cpus=self.backend.worker_cpus(), scratch_base=self.scratch, arena_fd=arena_fd, prepare=prepare,
            groups=self.groups,
        )  # fmt: skip
        for name in self.left_out.keys() & limits.leave_out:
            worker.layers[name] = self.left_out[name]
        return worker

    def start(self, worker: Worker, arena: Any) -> None:
        """Have a fresh worker start its device and map the arena; raises `TrustedCodeFailed`."""
        worker.start(self.backend.kind, len(self.backend.worker_cpus()), arena.attach())


class _Run:
    """One evaluation: its arena, its worker, its stages."""

    def __init__(self, judge: Judge, request: Request, keep: Callable[[Series], None] | None):
        self.judge, self.request, self.keep = judge, request, keep
        self.problem, self.solution = request.problem, request.solution
        self.plan = request.plan or judge.plan
        self.deadline = time.monotonic() + request.timeout_s
        self.outcome = Outcome()
        self.worker: Worker | None = None
        self.arena: Any = None
        self.dps = False
        self.watch = keep is not None
        """Whether the device is looked at before every batch."""
        self.accused = False
        self.graph = judge.backend.kind == "cuda"
        self.library: Path | None = None
        self.binding = binding_of(request.solution)
        self.strict = (
            Schedule(variants_for(self.problem), len(self.problem.workloads), request.seed)
            if request.inputs_profile == "strict"
            else None
        )

    def __call__(self) -> Outcome:
        outcome = self.outcome
        try:
            reference = Reference(self.problem)
        except InvalidReference as error:
            outcome.status, outcome.message = Status.INVALID_REFERENCE, str(error)
            return outcome
        try:
            with self.outcome.stages_s.timed("build"):
                self._build()
            self._load()
        except (FlagRefused, Verdict, WorkerGone, wire.Timeout, wire.ProtocolError) as error:
            refused = isinstance(error, FlagRefused)
            outcome.status, outcome.message = (
                (Status.COMPILE_ERROR, str(error)) if refused else decide(error)
            )
            if outcome.status is Status.COMPILE_ERROR:
                outcome.message = with_hint(outcome.message)
            return outcome
        failed = False
        for index, workload in enumerate(self.problem.workloads):
            self._check_cancelled()
            self.request.on_progress("workload", index, len(self.problem.workloads))
            result = self._workload(
                workload, index, reference, timing=self.request.timing and not failed
            )
            outcome.results.append(result)
            failed |= result.status is not Status.PASSED
            if failed and not self._can_go_on(result):
                break
        if not failed and self.strict and self.keep is None:
            self._other_shape(reference, self.strict.random)
        return outcome

    def _other_shape(self, reference: Reference, choose: Random) -> None:
        """Correctness at a size that is not listed; what fails there fails the listed workload."""
        found = other_shape(self.problem, choose)
        if found is None:
            return
        workload, source = found
        try:
            result = self._workload(workload, len(self.problem.workloads), reference, timing=False)
        except ProblemError:
            return  # The problem's own generator does not serve this size.
        if result.status in (Status.PASSED, Status.INVALID_REFERENCE, Status.INFRA_ERROR):
            return
        changed = {
            k: v for k, v in workload.axes.items() if v != self.problem.workloads[source].axes[k]
        }
        at = ", ".join(f"{axis} = {value}" for axis, value in changed.items())
        self.outcome.results[source] = self.outcome.results[source].model_copy(
            update={
                "status": result.status, "timing": None, "correctness": result.correctness,
                "message": f"at {at}, a size that is not listed: {result.message}",
            }
        )  # fmt: skip

    def close(self) -> None:
        """End the worker, then give the arena back (it is scrubbed when nothing can map it)."""
        try:
            self._end_worker()
        finally:
            if self.arena is not None:
                self.judge.backend.release_arena(self.arena)

    # -- the worker ---------------------------------------------------------------------------

    def _limits(self) -> Limits:
        left = max(1.0, self.deadline - time.monotonic())
        return replace(self.judge.limits, wall_s=left + 5.0)

    def _build(self) -> None:
        if self.binding == "python":
            return
        flags = checked_flags(self.solution)
        judge = self.judge
        key = judge.builds.key(self.solution, judge.backend.build_stack())
        self.library = judge.builds.get(key)
        if self.library:
            return
        self.request.on_progress("building", 0, 1)
        with self.outcome.stages_s.timed("fork"):
            builder = judge.spawn(self._limits(), None, self._write_sources)
        try:
            self._insist_on_layers(builder)
            reply = builder.ask(
                {
                    "cmd": "build", "dir": str(builder.scratch), "binding": self.binding,
                    "sources": [s.path for s in self.solution.sources],
                    "device": judge.backend.kind, "arch_flags": judge.backend.arch_flags(),
                    "timeout_s": min(_BUILD_TIMEOUT_S, self._left()), **flags,
                },
                self._left(),
            )  # fmt: skip
            name = replies.library_name(accepted(reply), str(builder.scratch / "build"))
            builder.stop()
            self.library = judge.builds.put(key, name, builder.open_file(f"build/{name}"))
        finally:
            self.outcome.log = builder.kill()

    def _write_sources(self, scratch: Path) -> None:
        for source in self.solution.sources:
            path = scratch / "src" / source.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source.content)
        if self.library:
            shutil.copy(self.library, scratch / self.library.name)
        if self.judge.triton_seed:
            shutil.copytree(self.judge.triton_seed, scratch / "cache" / "triton")

    def _load(self) -> None:
        """A fresh worker with the solution loaded."""
        judge = self.judge
        if self.arena is None:
            self.arena = judge.backend.arena()
        with self.outcome.stages_s.timed("fork"):
            self.worker = judge.spawn(self._limits(), self.arena.fd, self._write_sources)
        self.outcome.isolation = self.worker.layers
        self._insist_on_layers(self.worker)
        spec = self.solution.spec
        definition = self.problem.definition
        with self.outcome.stages_s.timed("start"):
            judge.start(self.worker, self.arena)
        with self.outcome.stages_s.timed("load"):
            self.request.on_progress("loading", 0, 1)
            reply = self.worker.ask(
                {
                    "cmd": "load", "device": judge.backend.kind,
                    "dir": str(self.worker.scratch / "src"), "entry_file": spec.entry_file,
                    "entry_function": spec.entry_function, "binding": self.binding,
                    "library": str(self.worker.scratch / self.library.name) if self.library else None,
                    "dps": spec.destination_passing_style,
                    "inputs": list(definition.inputs), "outputs": list(definition.outputs),
                },
                self._left(),
            )  # fmt: skip
            if reply.get("ok") is not True and reply.get("kind") == "raised":
                reply["kind"] = "load"
            self.dps = replies.destination_passing(accepted(reply))

    def _insist_on_layers(self, worker: Worker) -> None:
        """Under strict isolation nothing of a candidate is loaded or compiled without every layer."""
        lacking = missing(worker.layers) if self.request.strict_isolation else {}
        if lacking:
            names = "; ".join(f"{name} ({reason})" for name, reason in lacking.items())
            raise InfrastructureError(
                f"strict isolation: this machine does not give {names}; see `sol-gym doctor`, "
                "or evaluate without strict isolation"
            )

    def _end_worker(self) -> None:
        if self.worker is not None:
            worker, self.worker = self.worker, None
            self.outcome.log = worker.kill() or self.outcome.log

    # -- workloads ----------------------------------------------------------------------------

    def _workload(
        self, workload: Workload, index: int, reference: Reference, timing: bool
    ) -> WorkloadResult:
        series: Series | None = None
        comparison: Comparison | None = None
        record: Timing | None = None
        status, message = Status.PASSED, ""
        try:
            series = self._series(workload, index, reference)
            comparison = series.comparison
            series.check()
            if self.keep:
                self.keep(series)
                self._take_triton_seed()
            elif timing:
                measured, series = self._measure(series, workload, index, reference)
                comparison = series.comparison
                if self.judge.backend.idle_check is not True:
                    measured.marks.append(
                        f"no check that the GPU is idle ({self.judge.backend.idle_check})"
                    )
                record = timing_from(
                    measured, self.judge.calibration, self.plan, self.judge.backend.batch_s
                )
        except InvalidReference as error:
            status, message = Status.INVALID_REFERENCE, str(error)
        except (ProblemError, InfrastructureError, Cancelled):
            raise
        except torch.OutOfMemoryError as error:
            status, message = (
                Status.INFRA_ERROR,
                f"the judge ran out of device memory: {str(error)[:300]}",
            )
        except Exception as error:
            status, message = decide(error)
        finally:
            if series is not None:
                series.unmap()
        correctness: Correctness | None = (
            comparison.result() if comparison and comparison.rounds else None
        )
        if status is Status.PASSED and self.request.timing and not timing:
            message = "correct; not timed, because another workload failed"
        return WorkloadResult(
            uuid=workload.uuid, axes=workload.axes, status=status, message=message,
            correctness=correctness, timing=record,
        )  # fmt: skip

    def _series(self, workload: Workload, index: int, reference: Reference) -> Series:
        assert self.worker is not None
        backend = self.judge.backend
        seed = self.request.seed
        seed = None if seed is None else seed * 1_000_003 + index
        maker = InputMaker(
            self.problem,
            workload,
            backend.torch_device,
            seed=seed,
            profile=self.request.inputs_profile,
        )
        calls = Calls(
            backend, self.arena, self.worker, self.problem, workload, maker, self.deadline, self.dps,
            self.outcome.stages_s, watch=self.watch,
        )  # fmt: skip
        return Series(
            calls, reference, self.plan, strict=self.strict.turn(index) if self.strict else None
        )

    def _measure(
        self, series: Series, workload: Workload, index: int, reference: Reference
    ) -> tuple[Measured, Series]:
        """Measured, in a fresh worker if the device was not idle before a batch; returns whose series
        it is in the end. Twice in one evaluation is a verdict."""
        try:
            return self._measure_once(series, workload, index, reference)
        except WorkedWhileStopped as error:
            if self.accused:
                raise Verdict(Status.REWARD_HACK, str(error)) from None
        series.unmap()
        self.accused = self.watch = True
        self._end_worker()
        self._load()
        again = self._series(workload, index, reference)
        try:
            again.check()
            measured, again = self._measure(again, workload, index, reference)
        except BaseException:
            again.unmap()
            raise
        measured.marks.append("the GPU was busy while inputs were written; measured again")
        return measured, again

    def _measure_once(
        self, series: Series, workload: Workload, index: int, reference: Reference
    ) -> tuple[Measured, Series]:
        calibration = self.judge.calibration
        if not self.graph:
            return series.measure(graph=False, calibration=calibration), series
        try:
            return series.measure(graph=True, calibration=calibration), series
        except NotCapturable as error:
            reason = f"not captured in a CUDA graph: {error}"
        except Verdict as verdict:
            # The eager rounds passed and the captured batch is wrong: work was launched outside
            # the captured stream, or state was frozen into the graph. Eager calls will tell.
            if verdict.status is not Status.INCORRECT_NUMERICAL:
                raise
            reason = "a captured graph does not reproduce the calls; run eagerly"
        series.unmap()
        self.graph = False
        self._end_worker()
        self._load()
        again = self._series(workload, index, reference)
        again.check()
        measured = again.measure(graph=False, calibration=calibration)
        measured.marks.append(reason)
        return measured, again

    def _take_triton_seed(self) -> None:
        """Keep what Triton compiled for the trusted kernel: every worker would compile it again."""
        assert self.worker is not None
        compiled = Path(f"/proc/self/fd/{self.worker.scratch_fd}/cache/triton")
        if self.judge.triton_seed is None and compiled.is_dir():
            self.judge.triton_seed = self.judge.scratch / "triton-seed"
            shutil.copytree(compiled, self.judge.triton_seed)

    def _can_go_on(self, result: WorkloadResult) -> bool:
        """Whether further workloads may be tried in this worker (for the author's sake)."""
        return (
            result.status
            in (Status.INCORRECT_NUMERICAL, Status.INCORRECT_SHAPE, Status.INCORRECT_DTYPE)
            and self.worker is not None
            and not self.worker.ended()
            and time.monotonic() < self.deadline
        )

    def _left(self) -> float:
        return max(0.05, self.deadline - time.monotonic())

    def _check_cancelled(self) -> None:
        if self.request.cancelled():
            raise Cancelled


def own_folders() -> list[str]:
    """Folders of this project: its code, references and results are no business of a candidate."""
    core = Path(__file__).resolve().parent.parent
    folders = {core}
    for name in ("envs", "agents", "problems", "baselines"):
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(f"sol_gym.{name}")
            if found and found.origin:
                folders.add(Path(found.origin).resolve().parent)
    checkout = core.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "sol_gym") == core:
        folders |= {checkout / name for name in ("tests", "docs", "benchmarks", "tools", ".git")}
    return sorted(str(folder) for folder in folders)


_CALIBRATION_REFERENCE = "import torch\n\ndef run(x, rounds):\n    return torch.add(x, 1.0)\n"
_CALIBRATION_TRITON = """
import torch, triton
import triton.language as tl

@triton.jit
def add_one(x, y, n, rounds, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    for _ in range(rounds):  # Takes time and changes nothing: no value is that large.
        value = tl.where(value > 1e30, value * 0.5, value)
    tl.store(y + at, value + 1.0, mask=at < n)

def run(x, rounds):
    y = torch.empty_like(x)
    add_one[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), rounds, BLOCK=1024)
    return y
"""


def calibration_problem(kind: str) -> tuple[Problem, Solution]:
    """A trusted kernel whose launch, flags and outputs cost what an honest worker's cost.

    On a GPU once a short one (launches only) and once one that fills a whole batch: an honest
    overhead grows a little with the length of the batch.
    """
    rounds = [2, 8000] if kind == "cuda" else [2]
    definition = Definition(
        name="calibration",
        axes={"numel": AxisConst(value=1 << 16 if kind == "cuda" else 1 << 18)},
        inputs={
            "x": TensorSpec(shape=["numel"], dtype="float32"),
            "rounds": TensorSpec(shape=None, dtype="int32"),
        },
        outputs={"y": TensorSpec(shape=["numel"], dtype="float32")},
        reference=_CALIBRATION_REFERENCE,
    )
    workloads = tuple(
        Workload(
            uuid=f"calibration-{n}",
            axes={},
            inputs={"x": RandomInput(), "rounds": ScalarInput(value=n)},
        )
        for n in rounds
    )
    problem = Problem(id="calibration", definition=definition, workloads=workloads)
    source = _CALIBRATION_TRITON if kind == "cuda" else _CALIBRATION_REFERENCE
    return problem, Solution.from_text(source, name="calibration")
