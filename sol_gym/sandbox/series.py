"""One workload in one worker: correctness rounds, timed batches, single requests.

This is the timing protocol of docs/design.md as code. Both backends run it; a CPU has shared
memory and eager calls where a GPU has IPC and captured graphs.
"""

from __future__ import annotations

from .batches import Batches
from .calls import Calls
from .correctness import Comparison
from .reference import Reference
from .rounds import Rounds
from .schedule import Turn
from .singles import Singles
from .timing import Calibration, Measured, Plan
from .verification import Verification

_SLOW_CALL_S = 0.5
"""Calls this long (interpreted Triton on a CPU) are repeated twice only."""


class Series:
    """Checks and measures one workload of one solution in one worker."""

    def __init__(
        self, calls: Calls, reference: Reference, plan: Plan, *, strict: Turn | None = None
    ):
        self.calls, self.plan = calls, plan
        self.verification = Verification(calls, reference, strict)
        self.rounds = Rounds(calls, self.verification, plan)

    @property
    def comparison(self) -> Comparison:
        """The record of what was compared."""
        return self.verification.comparison

    def check(self) -> None:
        """Correctness rounds on fresh inputs; raises `Verdict` at the first failure."""
        self.rounds.check()

    def measure(self, *, graph: bool, calibration: Calibration) -> Measured:
        """Timed batches and single requests.

        Raises:
            Verdict: an output of a batch is wrong, or the protocol was broken.
            NotCapturable: a graph was wanted and the solution cannot be captured.
            WorkedWhileStopped: the worker is dead; was it to blame?
        """
        calls, plan = self.calls, self.plan
        calls.mode = "graph" if graph else "eager"
        batches = Batches(calls, self.verification, plan, calibration)
        most = calls.most_sets()
        with calls.stages.timed("capture"):
            per_call = batches.settle(self.rounds.call_s, most)
        measured = Measured(n_sets=calls.used, mode=calls.mode_name())
        with calls.stages.timed("batches"):
            slow = per_call >= _SLOW_CALL_S
            batches.repeat(measured, min(2, plan.repeats) if slow else plan.repeats)
        with calls.stages.timed("singles"):
            if per_call < plan.single_below_s and most > 1:
                Singles(calls, self.verification, plan).measure(
                    measured, per_call, most, calibration
                )
            self.unmap()
            calls.ask({"cmd": "release"})
        return measured

    def unmap(self) -> None:
        """Let go of all of the worker's memory."""
        self.calls.unmap()
