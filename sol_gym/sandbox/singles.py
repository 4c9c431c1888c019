"""Single requests: sets asked for one by one in a secret order, a second limit of the time."""

from __future__ import annotations

import secrets
import time
from functools import partial

from ..evaluation import Status
from .calls import Calls
from .timing import Calibration, Measured, Plan, SingleRound, singles_would_count
from .verdict import OutOfMemory, Verdict, accepted
from .verification import Verification, insist_unchanged, taken_at
from .worker import wire

_random = secrets.SystemRandom()


class Singles:
    """Single requests of one workload."""

    def __init__(self, calls: Calls, verification: Verification, plan: Plan):
        self.calls, self.verification, self.plan = calls, verification, plan

    def measure(
        self, measured: Measured, per_call: float, most: int, calibration: Calibration
    ) -> None:
        """Ask for sets one by one; if that would count against the batch, ask again to be sure."""
        pool, asks = self.plan.singles(per_call, most)
        pool = self._prepare(pool)
        while True:
            # How many are asked for is not to be foreseen, so nobody knows which one is the last.
            fewer = min(asks, pool // 2)
            fewer -= _random.randrange(1 + fewer // 4)
            measured.rounds.append(self._round(pool, fewer))
            enough = len(measured.rounds) >= self.plan.single_rounds
            if enough or not singles_would_count(measured, calibration, self.plan):
                return
            if self.calls.varying:
                pool = self._prepare(pool)

    def _prepare(self, pool: int) -> int:
        """One graph a set, for `pool` sets or fewer; returns for how many.

        Graphs of their own share no memory for intermediates. Where even two do not fit, the calls
        are eager: slower, but a candidate cannot get out of the single requests by asking for memory.
        """
        calls = self.calls
        for sets, mode in ((pool, calls.mode), (2, calls.mode), (2, "eager")):
            calls.use(sets)
            prepare = partial(calls.prepare, "prepare_singles", mode, sets)
            try:
                if calls.varying:
                    calls.renew_scalars(prepare)
                else:
                    prepare()
                break
            except OutOfMemory:
                continue
        return sets

    def _round(self, pool: int, asks: int) -> SingleRound:
        """Ask for `asks` sets in a secret order; sets never asked for must stay poisoned."""
        calls, verification = self.calls, self.verification
        words, worker = calls.worker.page.words, calls.worker
        words[wire.ASK] = words[wire.ANSWER] = 0
        calls.ask({"cmd": "singles"})
        calls.set_stage()
        order = _random.sample(range(pool), asks)
        chosen = (
            [_random.choice(order)] if verification.slow else [order[-1], _random.choice(order)]
        )
        privates = {index: verification.private(index) for index in chosen}
        snapshots = verification.snapshot_plan(order[-1:])
        calls.backend.flush()
        calls.backend.synchronize()
        worker.resume()

        clock, sleep_s = time.perf_counter_ns, calls.backend.poll_sleep_s
        answers_s, end = [], 0
        for number, index in enumerate(order, 1):
            request = number << 20 | index
            begin = clock()
            words[wire.ASK] = request
            end = worker.wait_word(wire.ANSWER, request, calls.left(), sleep_s=sleep_s)
            answers_s.append((end - begin) / 1e9)
        # Whatever was put off until after its answer is done, or missing, when the sample arrives.
        taken = taken_at(snapshots)
        calls.backend.synchronize()
        tail_s = (clock() - end) / 1e9
        words[wire.ASK] = (asks + 1) << 20 | wire.ASK_STOP
        accepted(worker.receive(calls.left()))
        for index, private in privates.items():
            verification.verify(index, private)
        insist_unchanged(
            snapshots,
            taken,
            "outputs changed after the answer to a single request: it came before the work",
        )
        self._insist_untouched(sorted({*range(pool)} - {*order}))
        return SingleRound(answers_s, tail_s)

    def _insist_untouched(self, idle: list[int]) -> None:
        """Raises `Verdict` if some of the sets that were not asked for have been worked on."""
        calls = self.calls
        for index in _random.sample(idle, min(3, len(idle))):
            slots = calls.layout.outputs.values()
            for slot, raw in zip(slots, calls.raw_outputs(index), strict=True):
                if raw.numel() and not bool((raw == calls.poison.byte(slot.dtype)).all()):
                    raise Verdict(
                        Status.REWARD_HACK,
                        "an output was written that nobody had asked for: calls are worked off ahead of time",
                    )
