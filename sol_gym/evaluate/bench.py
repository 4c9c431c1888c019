"""Judge, analyzer and baselines together: what one evaluation consists of."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sol_gym

from ..device import Device, calibrate_cpu
from ..evaluation import Evaluation, Provenance, Status, WorkloadResult
from ..problem import Problem
from ..sandbox import doctor
from ..sandbox.judge import Judge
from ..sandbox.request import Outcome, Request
from ..sandbox.worker.isolation import missing
from ..score import overall_status, problem_score, score_workload
from ..solution import Solution
from .baseline import Baselines, BaselineTimes
from .bounds import BoundSet, BoundTime, bound_times


class Bench:
    """Everything the judge's process does, on one device."""

    def __init__(
        self, device: Device, cache: Path, hidden: list[str], lock_clock_mhz: int | None = None
    ):
        self.device = device
        cache.mkdir(parents=True, exist_ok=True)
        self.judge = Judge(device, cache=cache, hidden=hidden, lock_clock_mhz=lock_clock_mhz)
        self.baselines = Baselines(device, cache)

    def close(self) -> None:
        """End the judge."""
        self.judge.close()

    def describe(self, *, examine: bool = False) -> dict[str, Any]:
        """Device, versions, isolation layers and calibrated overheads; with `examine` also what came
        of trying to break out of a worker (seconds)."""
        layers = self.judge.probe()
        attempts = [f.to_json() for f in doctor.examine(self.judge)] if examine else None
        calibration = self.judge.calibration
        return {
            "device": self.device.model_dump(mode="json"),
            "versions": self._versions(),
            "isolation": layers,
            "missing": missing(layers),
            "attempts": attempts,
            "state": self.judge.backend.state(),
            "idle_check": self.judge.backend.idle_check,
            "overhead_ms": calibration.overhead_s * 1e3,
            "handshake_us": calibration.handshake_s * 1e6,
        }

    def evaluate(
        self,
        problem: Problem,
        solution: Solution,
        *,
        inputs_profile: str,
        seed: int | None,
        timing: bool,
        scoring: bool,
        bound_set: BoundSet,
        timeout_s: float,
        strict_isolation: bool = False,
        on_progress: Callable[[str, int, int], None],
        cancelled: Callable[[], bool],
    ) -> Evaluation:
        """Judge, bound, compare with the baseline, score."""
        start = time.perf_counter()
        outcome = self.judge.evaluate(
            Request(
                problem, solution, seed=seed, inputs_profile=inputs_profile, timing=timing,
                timeout_s=timeout_s, strict_isolation=strict_isolation,
                on_progress=on_progress, cancelled=cancelled,
            )
        )  # fmt: skip
        results, baseline_set = outcome.results, None
        stages = outcome.stages_s
        if outcome.status is None and all(r.status is Status.PASSED for r in results) and scoring:
            with stages.timed("bounds"):
                bounds = bound_times(problem, self.device, bound_set)
            with stages.timed("baseline"):
                times = self.baselines.times(problem, self.judge, on_progress)
            scored = _scored(results, bounds, times)
            if self.device.calibrated and any(r.status is Status.BELOW_SOL for r in scored):
                # Calibrated while the machine was busy: its peaks are higher than we knew.
                self.device = calibrate_cpu(force=True)
                again = bound_times(problem, self.device, bound_set)
                scored = _scored(results, again, times)
            results, baseline_set = scored, times.source
        status = outcome.status or overall_status(results)
        stages["total"] = time.perf_counter() - start
        return Evaluation(
            problem=problem.id,
            solution=solution.name,
            status=status,
            score=_score(status, results, scoring),
            message=outcome.message
            or next((r.message for r in results if r.status is status and r.message), ""),
            log=outcome.log,
            results=results,
            provenance=self._provenance(
                problem, solution, outcome, inputs_profile, bound_set, baseline_set, seed, stages
            ),
        )

    def _versions(self) -> dict[str, str]:
        return {"sol_gym": sol_gym.__version__, **self.judge.backend.versions()}

    def _provenance(
        self, problem: Problem, solution: Solution, outcome: Outcome, inputs_profile: str, bound_set: str,
        baseline_set: str | None, seed: int | None, stages: dict[str, float],
    ) -> Provenance:  # fmt: skip
        return Provenance(
            device=self.device.key,
            device_name=self.device.name,
            profile=problem.profile,
            inputs_profile=inputs_profile,
            bound_set=bound_set,
            baseline_set=baseline_set,
            problem_hash=problem.content_hash,
            solution_hash=solution.content_hash,
            isolation=outcome.isolation,
            versions=self._versions(),
            seeded=seed is not None,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            stages_s={k: round(v, 4) for k, v in stages.items()},
        )


def _scored(
    results: list[WorkloadResult], bounds: list[BoundTime | None], times: BaselineTimes
) -> list[WorkloadResult]:
    scored = []
    for result, bound, t_b_ms in zip(results, bounds, times.t_b_ms, strict=True):
        t_sol_ms, bound_by = bound or (None, None)
        scored.append(
            score_workload(
                result.model_copy(
                    update={"t_sol_ms": t_sol_ms, "bound_by": bound_by, "t_b_ms": t_b_ms}
                )
            )
        )
    return scored


def _score(status: Status, results: list[WorkloadResult], scoring: bool) -> float | None:
    if status in (Status.INFRA_ERROR, Status.INVALID_REFERENCE):
        return None
    if status is not Status.PASSED:
        return 0.0
    return problem_score(results) if scoring else None
