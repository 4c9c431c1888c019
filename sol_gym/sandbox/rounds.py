"""Correctness rounds: a call on each of a few fresh input sets, before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence

from . import replies
from .calls import Calls
from .memory import Layout
from .timing import Plan
from .verification import Verification

FIRST_SETS = 16
"""Sets of the first layout, so that a first batch fits into it."""


class Rounds:
    """Rounds of one workload.

    Strict sets, where the profile has them, take the place of one compatible round and come in a
    secret order among them.
    """

    def __init__(self, calls: Calls, verification: Verification, plan: Plan):
        self.calls, self.verification, self.plan = calls, verification, plan
        self.strict = verification.strict
        self.call_s = 0.0
        """Seconds a call took at best, by the worker's word."""

    def check(self) -> None:
        """All rounds; raises `Verdict` at the first failure."""
        calls = self.calls
        with calls.stages.timed("correctness"):
            calls.layout = Layout.plan(calls.problem, calls.workload, 1)
            most = calls.most_sets()
            kinds = self._kinds(most)
            sets = min(most, max(len(kinds), FIRST_SETS))
            while kinds:
                chunk, kinds = kinds[:most], kinds[most:]
                self._check_some(chunk, sets)
                kinds = [k for k in kinds if k is None or self.verification.admitted(k)]
            if self.strict is not None:
                calls.restore_numbers()
                calls.release_cached()

    def _kinds(self, most: int) -> list[str | None]:
        """Strict variants (None for compatible sets) of the rounds, in order."""
        rounds = self.plan.rounds
        if self.strict is None or not self.strict.variants:
            return [None] * max(1, min(rounds, most))
        return self.strict.rounds(max(1, rounds - 1))

    def _check_some(self, kinds: Sequence[str | None], sets: int) -> None:
        """One call of the worker for each kind of set, all in a layout of `sets` sets."""
        calls, verification = self.calls, self.verification
        calls.bind(sets, draw=len(kinds), kinds=kinds)
        calls.poison_outputs()
        privates = [verification.private(i) for i in range(len(kinds))]
        calls.backend.synchronize()
        reply = calls.ask({"cmd": "call", "sets": list(range(len(kinds)))})
        self.call_s = min(replies.seconds_list(reply, len(kinds)))
        for index, kind in enumerate(kinds):
            if kind is None:
                verification.verify(index, privates[index])
        if self.strict is None:
            return
        self.strict.spend(calls.maker.hardening_s)
        for index, variant in enumerate(kinds):
            if variant is not None and verification.admitted(variant):
                verification.compare_strictly(variant, index, privates[index])
