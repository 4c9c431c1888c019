"""Plans and figures of the timing protocol; no process is touched here.

T_k is never taken on the worker's word. Per repeat it is the larger of what the worker's own clock
says and what the judge's clock says less the largest overhead that an honest worker has ever
caused on this machine; so an honest time is never raised by the judge's clock, and a lie gains at
most overhead / batch. A second series asks for input sets one at a time, in a secret order; its
median round trip, less the calibrated hand-shake and a margin, is a further lower limit.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from ..evaluation import Timing


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: int = 3
    """Correctness rounds on fresh inputs, before any timing."""
    repeats: int = 5
    """Timed batches, each on fresh inputs."""
    single_budget_s: float = 0.01
    """Wall time for the one-at-a-time series."""
    max_asks: int = 16
    min_asks: int = 3
    single_below_s: float = 0.05
    """Calls that take longer are not asked for one at a time."""
    single_margin: float = 0.03
    max_retries: int = 3
    """Repeats done again because clocks throttled."""

    def asks(self, per_call_s: float, pool: int) -> int:
        """How many sets to ask for one by one: within the budget, and a part of the pool only."""
        wanted = int(self.single_budget_s / max(per_call_s, 1e-7))
        return max(1, min(max(wanted, self.min_asks), self.max_asks, max(pool // 2, 1)))


@dataclass(frozen=True)
class Calibration:
    """What honest workers cost on this machine, in seconds."""

    overhead_s: float = 0.0
    """Largest (judge's clock - worker's clock) of a batch, outliers left out."""
    handshake_s: float = 0.0
    """Median round trip of single requests less the kernel's time in a batch; the largest seen."""

    @classmethod
    def from_honest(cls, measured: list[Measured]) -> Calibration:
        """From measurements of trusted workers, taken without calibration."""
        overheads = [
            judge - own
            for m in measured
            for judge, own in zip(m.judge_s, m.reported_s, strict=True)
        ]
        handshakes = [
            statistics.median(m.singles_s) - statistics.median(m.reported_s) / m.n_sets
            for m in measured
            if m.singles_s
        ]
        # One hiccup of a busy machine must not become everybody's allowance.
        largest = min(
            max(overheads), _OUTLIER_FACTOR * statistics.median(overheads) + _OUTLIER_SLACK_S
        )
        return cls(
            overhead_s=max(0.0, largest),
            handshake_s=max(0.0, *handshakes) if handshakes else 0.0,
        )


@dataclass
class Measured:
    """Raw clocks of one workload."""

    n_sets: int
    mode: str
    judge_s: list[float] = field(default_factory=list)
    """Per repeat: whole batch by the judge's clock."""
    reported_s: list[float] = field(default_factory=list)
    """Per repeat: whole batch by the worker's clock."""
    singles_s: list[float] = field(default_factory=list)
    """Round trips of single requests."""
    sm_clock_mhz: int | None = None
    clock_locked: bool = False
    marks: list[str] = field(default_factory=list)


_OUTLIER_FACTOR, _OUTLIER_SLACK_S = 2.0, 1e-4
_SINGLE_FLOOR_S = 0.5e-6
_DISAGREE, _DISAGREE_SLACK_S = 1.03, 0.3e-6


def timing_from(measured: Measured, calibration: Calibration, plan: Plan, batch_s: float) -> Timing:
    """The candidate's time and everything it was derived from."""
    n = measured.n_sets
    by_judge = [max(0.0, clock - calibration.overhead_s) / n for clock in measured.judge_s]
    by_worker = [clock / n for clock in measured.reported_s]
    repeats = [max(pair) for pair in zip(by_judge, by_worker, strict=True)]
    t_k = statistics.median(repeats)
    marks = list(measured.marks)

    single: float | None = None
    if measured.singles_s:
        single = max(0.0, statistics.median(measured.singles_s) - calibration.handshake_s)
        margin = max(_SINGLE_FLOOR_S, plan.single_margin * single)
        if single - margin > t_k:
            marks.append("single calls are slower than the batch: they count")
            t_k = single - margin
    judge, worker = statistics.median(by_judge), statistics.median(by_worker)
    if judge > _DISAGREE * worker + _DISAGREE_SLACK_S + calibration.overhead_s / n:
        marks.append("clocks disagree: the judge's counts")
    if statistics.median(measured.judge_s) < 0.8 * batch_s:
        marks.append(f"batch shorter than {batch_s * 1e3:g} ms")
    t_k = max(t_k, 1e-9)
    return Timing(
        t_k_ms=t_k * 1e3,
        batch_ms=judge * 1e3,
        reported_ms=worker * 1e3,
        single_ms=None if single is None else single * 1e3,
        mode=measured.mode,
        n_sets=n,
        repeats=len(repeats),
        spread=(max(repeats) - min(repeats)) / max(statistics.median(repeats), 1e-12),
        overhead_ms=calibration.overhead_s * 1e3,
        sm_clock_mhz=measured.sm_clock_mhz,
        clock_locked=measured.clock_locked,
        marks=marks,
    )


def sets_for(per_call_s: float, batch_s: float, most: int) -> int:
    """How many calls make a batch of `batch_s`, at most `most`."""
    return max(1, min(most, math.ceil(batch_s / max(per_call_s, 1e-7))))
