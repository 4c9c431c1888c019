"""One evaluation: build, load, then workload by workload, in one worker where all goes well."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InfrastructureError, ProblemError
from ..evaluation import Correctness, Status, Timing, WorkloadResult
from ..inputs import InputMaker
from ..problem import Workload
from ..strict import other_shape, variants_for
from . import replies
from .build import FlagRefused, binding_of, checked_flags
from .calls import Calls
from .correctness import Comparison
from .hints import with_hint
from .limits import Limits
from .process import Worker, WorkerGone
from .reference import InvalidReference, Reference
from .request import Cancelled, Outcome, Request
from .schedule import Schedule
from .series import Series
from .timing import Measured, timing_from
from .verdict import NotCapturable, Verdict, WorkedWhileStopped, accepted, decide
from .worker import wire
from .worker.isolation import missing

if TYPE_CHECKING:
    from .judge import Judge

_BUILD_TIMEOUT_S = 240.0


class Run:
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
            reason = (
                "a captured graph does not reproduce the calls (kernels launched on the default stream "
                "and not on torch's current one, or state kept between calls?), so they ran eagerly"
            )
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
