"""Plans and figures of the timing protocol; no process is touched here.

T_k is never taken on the worker's word. Per repeat it is the larger of what the worker's own clock
says and what the judge's clock says less the largest overhead that an honest worker has ever
caused on this machine; so an honest time is never raised by the judge's clock, and a lie gains at
most overhead / batch. That overhead is honoured up to a tenth of the batch, or up to what it costs
on a quiet machine if that is more, and batches are made ten times as long as it where there are
sets for that; so a machine that was busy when it was calibrated is no gift to liars.

A second series asks for input sets one at a time, in a secret order, out of a larger pool. Two lower
limits come from it, each less a margin: the median round trip less the calibrated hand-shake, and
all round trips together, which cannot be less than working off the whole pool ahead of time, less
what a first request has ever cost an honest worker.
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
    pool_budget_s: float = 0.1
    """Time that working off all sets of the pool once may take, where the pool can be that small."""
    single_rounds: int = 3
    """Series of single requests at most: a limit that would count has to be seen in all of them."""
    single_below_s: float = 0.05
    """Calls that take longer are not asked for one at a time."""
    single_margin: float = 0.03
    max_retries: int = 3
    """Repeats done again because clocks throttled."""

    def singles(self, per_call_s: float, most: int) -> tuple[int, int]:
        """How many sets to have ready, and how many of them to ask for one by one.

        The pool is two to four times as large as what is asked for: who works it off ahead of time
        does that many times the work.
        """
        per_call_s = max(per_call_s, 1e-7)
        asks = int(self.single_budget_s / per_call_s)
        asks = max(self.min_asks, min(asks, self.max_asks))
        factor = max(2, min(4, int(self.pool_budget_s / (asks * per_call_s))))
        pool = min(asks * factor, most)
        return pool, max(1, min(asks, pool // 2))


@dataclass(frozen=True)
class Calibration:
    """What honest workers cost on this machine, in seconds."""

    overhead_s: float = 0.0
    """Largest (judge's clock - worker's clock) of a batch, outliers left out."""
    handshake_s: float = 0.0
    """Median round trip of single requests less the kernel's time in a batch; the largest seen."""
    quiet_overhead_s: float = 0.0
    """What a batch's overhead comes to when nothing interferes, from the smallest seen."""
    quiet_handshake_s: float = 0.0
    """The same of the hand-shake."""
    first_request_s: float = math.inf
    """What a series of single requests takes beyond its median round trips (the worker wakes up, and
    a sample of the last output is fetched); the largest seen. Infinite: not known yet."""

    @classmethod
    def from_honest(cls, measured: list[Measured]) -> Calibration:
        """From measurements of trusted workers, taken without calibration."""
        overheads = [
            judge - own
            for m in measured
            for judge, own in zip(m.judge_s, m.reported_s, strict=True)
        ]
        handshakes = [
            r.median_s - statistics.median(m.reported_s) / m.n_sets
            for m in measured
            for r in m.rounds
        ]
        firsts = [r.total_s - len(r.answers_s) * r.median_s for m in measured for r in m.rounds]
        return cls(
            overhead_s=max(0.0, _largest(overheads)),
            handshake_s=max(0.0, *handshakes) if handshakes else 0.0,
            first_request_s=max(0.0, _largest(firsts)) if firsts else math.inf,
            quiet_overhead_s=_quiet(overheads, _OUTLIER_SLACK_S),
            quiet_handshake_s=_quiet(handshakes, _SINGLE_FLOOR_S) if handshakes else 0.0,
        )

    def overhead_of(self, judge_s: float) -> float:
        """How much of a batch that took `judge_s` by the judge's clock may have been overhead."""
        return min(self.overhead_s, max(_ALLOWED_SHARE * judge_s, self.quiet_overhead_s))

    def handshake_of(self, round_trip_s: float) -> float:
        """How much of a single request's round trip may have been hand-shake."""
        return min(self.handshake_s, max(_ALLOWED_SHARE * round_trip_s, self.quiet_handshake_s))

    def batch_s(self, least_s: float) -> float:
        """How long a batch should last: `least_s`, or longer where the overhead is large."""
        return min(max(least_s, self.overhead_s / _ALLOWED_SHARE), _LONGEST * least_s)


def _quiet(values: list[float], slack_s: float) -> float:
    return _QUIET_FACTOR * max(0.0, min(values)) + slack_s


def _largest(seen: list[float]) -> float:
    """The largest; one hiccup of a busy machine must not become everybody's allowance."""
    return min(max(seen), _OUTLIER_FACTOR * statistics.median(seen) + _OUTLIER_SLACK_S)


@dataclass
class SingleRound:
    """Requests for single sets, after the pool was written once."""

    answers_s: list[float]
    """Round trips."""
    tail_s: float = 0.0
    """From the last answer until a sample of its outputs had reached the judge."""

    @property
    def median_s(self) -> float:
        """Median round trip."""
        return statistics.median(self.answers_s)

    @property
    def total_s(self) -> float:
        """All round trips and the tail."""
        return sum(self.answers_s) + self.tail_s


@dataclass
class Measured:
    """Raw clocks of one workload."""

    n_sets: int
    mode: str
    judge_s: list[float] = field(default_factory=list)
    """Per repeat: whole batch by the judge's clock."""
    reported_s: list[float] = field(default_factory=list)
    """Per repeat: whole batch by the worker's clock."""
    rounds: list[SingleRound] = field(default_factory=list)
    """Series of single requests."""
    sm_clock_mhz: int | None = None
    clock_locked: bool = False
    marks: list[str] = field(default_factory=list)


_OUTLIER_FACTOR, _OUTLIER_SLACK_S = 2.0, 1e-4
_QUIET_FACTOR = 1.5
_ALLOWED_SHARE = 0.1
"""Of a measured time, how much may be called overhead (unless a quiet machine has more)."""
_LONGEST = 4.0
"""Batches are made so many times longer at most: a busy machine is slow enough."""
_SINGLE_FLOOR_S = 0.5e-6
_DISAGREE, _DISAGREE_SLACK_S = 1.03, 0.3e-6


def _repeats(measured: Measured, calibration: Calibration) -> tuple[list[float], list[float]]:
    """Seconds per call and repeat by the judge's clock less the overhead, and by the worker's."""
    n = measured.n_sets
    by_judge = [max(0.0, c - calibration.overhead_of(c)) / n for c in measured.judge_s]
    return by_judge, [clock / n for clock in measured.reported_s]


def single_limits(measured: Measured, calibration: Calibration) -> tuple[float, float]:
    """Lower limits of a call by its median round trip and by all round trips together, in seconds.

    The least of the rounds counts: an honest worker is interrupted in one of them at most.
    """
    alone = min(r.median_s for r in measured.rounds)
    together = min(
        (r.total_s - calibration.first_request_s) / len(r.answers_s) for r in measured.rounds
    )
    return alone - calibration.handshake_of(alone), max(
        0.0, together - calibration.handshake_of(together)
    )


def _less_margin(limit_s: float, plan: Plan) -> float:
    return limit_s - max(_SINGLE_FLOOR_S, plan.single_margin * limit_s)


def singles_would_count(measured: Measured, calibration: Calibration, plan: Plan) -> bool:
    """Whether single requests so far say that a call takes longer than in the batch."""
    batch = statistics.median(
        max(pair) for pair in zip(*_repeats(measured, calibration), strict=True)
    )
    return any(_less_margin(s, plan) > batch for s in single_limits(measured, calibration))


def timing_from(measured: Measured, calibration: Calibration, plan: Plan, batch_s: float) -> Timing:
    """The candidate's time and everything it was derived from."""
    n = measured.n_sets
    by_judge, by_worker = _repeats(measured, calibration)
    allowed_s = max(map(calibration.overhead_of, measured.judge_s))
    repeats = [max(pair) for pair in zip(by_judge, by_worker, strict=True)]
    t_k = statistics.median(repeats)
    marks = list(measured.marks)

    single: float | None = None
    if measured.rounds:
        single, together = single_limits(measured, calibration)
        if _less_margin(single, plan) > t_k:
            marks.append("single calls are slower than the batch: they count")
            t_k = _less_margin(single, plan)
        if _less_margin(together, plan) > t_k:
            marks.append("single calls together took longer than the batch: they count")
            t_k = _less_margin(together, plan)
    judge, worker = statistics.median(by_judge), statistics.median(by_worker)
    if judge > _DISAGREE * worker + _DISAGREE_SLACK_S + allowed_s / n:
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
        overhead_ms=allowed_s * 1e3,
        sm_clock_mhz=measured.sm_clock_mhz,
        clock_locked=measured.clock_locked,
        marks=marks,
    )


def sets_for(per_call_s: float, batch_s: float, most: int) -> int:
    """How many calls make a batch of `batch_s`, at most `most`."""
    return max(1, min(most, math.ceil(batch_s / max(per_call_s, 1e-7))))
