"""The judge: takes a problem and a solution, returns what came of every workload.

It owns a backend (a device), a zygote and the calibration of the machine. One evaluation runs at a
time. An evaluation uses one worker, or one more where a solution cannot be captured in a CUDA
graph (a failed capture can leave a process unusable).
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ..device import Device
from ..evaluation import Status
from . import bubblewrap
from .backend import backend_for
from .build import BuildCache
from .cgroup import Groups
from .fallback import layers_in_the_way
from .limits import Limits
from .process import WORKER_PACKAGE, TrustedCodeFailed, Worker, Zygote
from .request import Outcome, Request
from .run import Run
from .scratch import make_scratch
from .series import Series
from .timing import Calibration, Measured, Plan
from .trusted import calibration_problem
from .verdict import NotCapturable, WorkedWhileStopped
from .worker.isolation import private_folders

T = TypeVar("T")
_REASON_CHARS = 300


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
        run = Run(self, request, keep)
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
