"""Timed batches: many calls on distinct inputs, between two stamps of the judge's clock."""

from __future__ import annotations

import secrets
import time
from functools import partial

from . import replies
from .calls import Calls
from .rounds import FIRST_SETS
from .schedule import TIMED
from .timing import Calibration, Measured, Plan, sets_for
from .verdict import accepted
from .verification import Verification, insist_unchanged, taken_at
from .worker import wire

_random = secrets.SystemRandom()


class Batches:
    """Batches of one workload."""

    def __init__(
        self, calls: Calls, verification: Verification, plan: Plan, calibration: Calibration
    ):
        self.calls, self.verification = calls, verification
        self.plan, self.calibration = plan, calibration
        self._ticket = secrets.randbits(32)

    def settle(self, call_s: float, most: int) -> float:
        """Prepare a batch that is long enough, of at most `most` sets; returns seconds per call.

        A first batch is small and tells how long a call takes, which eager calls do not. Its last
        batch is not counted: it warms up, and is verified like the others.
        """
        calls = self.calls
        batch_s = self.calibration.batch_s(calls.backend.batch_s)
        n = min(FIRST_SETS, sets_for(call_s, batch_s, most))
        while True:
            calls.use(n)
            calls.prepare("prepare", calls.mode, n)
            judge, own = self._batch()
            per_call = max(judge - self.calibration.overhead_of(judge), own) / n
            wanted = sets_for(per_call, batch_s, most)
            if wanted <= 1.3 * n or n > FIRST_SETS:
                return per_call
            n = wanted

    def repeat(self, measured: Measured, repeats: int) -> None:
        """Counted batches; those during which clocks throttled are done again, a few times."""
        retries = 0
        strict = _random.randrange(repeats)
        while len(measured.judge_s) < repeats:
            judge, own = self._batch(strict=len(measured.judge_s) == strict)
            state = self.calls.backend.state()
            if state["throttled"] and retries < self.plan.max_retries:
                retries += 1
                continue
            measured.judge_s.append(judge)
            measured.reported_s.append(own)
            measured.sm_clock_mhz, measured.clock_locked = state["sm_clock_mhz"], state["locked"]
        if retries:
            measured.marks.append(f"{retries} repeats done again: clocks throttled")

    def _batch(self, *, strict: bool = False) -> tuple[float, float]:
        """One timed batch: seconds by the judge's clock and by the worker's.

        With `strict`, and if the profile is, a call is also held to the strict yardstick.
        """
        calls, verification = self.calls, self.verification
        worker, n = calls.worker, calls.used
        if calls.varying:
            calls.renew_scalars(partial(calls.prepare, "prepare", calls.mode, n))
        self._ticket += 1
        ticket, words = self._ticket, worker.page.words
        words[wire.DONE] = 0
        calls.ask({"cmd": "batch", "ticket": ticket})
        calls.set_stage()
        chosen = verification.choose(n)
        privates = {index: verification.private(index) for index in chosen}
        snapshots = verification.snapshot_plan(chosen)
        calls.backend.flush()
        calls.backend.synchronize()

        # The flag is up before the worker may run and the clock starts before it is resumed: the
        # cost of waking it is part of the calibrated overhead.
        words[wire.GO] = ticket
        begin = time.perf_counter_ns()
        worker.resume()
        worker.wait_word(wire.DONE, ticket, calls.left(), sleep_s=calls.backend.poll_sleep_s)
        # The end stamp is when a sample of the outputs has reached the judge: work still running
        # after the answer either delays it or is missing from it.
        taken = taken_at(snapshots)
        calls.backend.synchronize()
        judge_s = (time.perf_counter_ns() - begin) / 1e9

        own_s = replies.seconds(accepted(worker.receive(calls.left())))
        for index in chosen:
            verification.verify(index, privates[index])
        turn = verification.strict
        if strict and turn is not None and turn.timed:
            verification.compare_strictly(TIMED, chosen[0], privates[chosen[0]])
            calls.release_cached()
        insist_unchanged(
            snapshots, taken, "outputs changed after the answer: work was left running"
        )
        return judge_s, own_s
