"""Which strict sets of an evaluation are compared, and how long that may take.

A float64 run of the reference can be far slower than the candidate, so there is a budget:

- On every workload at least one variant is *due*: it is compared whatever it takes. Over the
  workloads all variants are. Which is due where is secret and new in every evaluation.
- On one workload, secretly chosen, a call of a timed batch on its compatible inputs is compared as
  well: a kernel that tells strict sets from others and is less exact in what is timed shows there.
- The others are compared too while time is left: so much a workload, and over the evaluation a
  share of what everything else takes. Small workloads (milliseconds a set) get all of them.
- Where even the sets that are due take longer than everything else, most of them are left out.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from random import Random

__all__ = ["TIMED", "Schedule", "Turn"]

TIMED = "timed"
"""Compatible inputs of a timed batch, in the place of a variant's name."""

_WORKLOAD_S = 1.0
_EVALUATION_S = 1.5
_SHARE = 0.5
_DUE_S = 20.0
"""Seconds that sets may have taken before one that is due is left out."""
_DUE_CHANCE = 0.25


class Schedule:
    """The strict sets of one evaluation.

    Args:
        variants: names of the problem's variants.
        workloads: how many workloads there are.
        seed: makes what is chosen repeatable (not how far time reaches); None is secret.
    """

    def __init__(self, variants: Iterable[str], workloads: int, seed: int | None = None):
        self.variants = tuple(variants)
        self.workloads = workloads
        self.random = secrets.SystemRandom() if seed is None else Random(seed)
        self.uncovered = set(self.variants)
        """Variants that have been compared on no workload yet."""
        self.timed_on = self.random.randrange(max(1, workloads))
        """The workload on which a timed call is compared."""
        self.spent_s = 0.0
        self._begin = time.perf_counter()

    def turn(self, index: int) -> Turn:
        """What is compared on a workload, by its number; the last one takes all uncovered ones."""
        left = max(1, self.workloads - index)
        candidates = sorted(self.uncovered or self.variants)
        due = self.random.sample(candidates, max(-(-len(self.uncovered) // left), candidates != []))
        return Turn(self, index, due)

    def has_time(self, index: int, next_s: float) -> bool:
        """Whether a set that takes `next_s` fits into what sets up to this workload may take."""
        pace = _EVALUATION_S * min(1.0, (index + 1) / self.workloads)
        return self.spent_s + next_s <= max(pace, _SHARE * self._others_s)

    @property
    def due_is_too_slow(self) -> bool:
        """Whether strict sets take more time than everything else, and much."""
        return self.spent_s > max(_DUE_S, self._others_s)

    @property
    def _others_s(self) -> float:
        """Seconds that everything but strict sets has taken."""
        return time.perf_counter() - self._begin - self.spent_s


class Turn:
    """The strict sets of one workload."""

    def __init__(self, schedule: Schedule, index: int, due: list[str]):
        others = [variant for variant in schedule.variants if variant not in due]
        schedule.random.shuffle(others)
        self.variants = (*due, *others)
        """In the order to ask for them."""
        self._schedule, self._index, self._due = schedule, index, set(due)
        self._spent_s = self._longest_s = 0.0
        self._compared = False
        self._forgone = schedule.due_is_too_slow and schedule.random.random() > _DUE_CHANCE
        self.timed = index == schedule.timed_on and not self._forgone
        """Whether a call of a timed batch is compared."""
        self.why_not = "left out to save time"
        """Why a variant that is not admitted is not."""

    def rounds(self, compatible: int) -> list[str | None]:
        """The variants with so many compatible sets (None) at random places among them."""
        kinds: list[str | None] = [*self.variants]
        for _ in range(compatible):
            kinds.insert(self._schedule.random.randrange(len(kinds) + 1), None)
        return kinds

    def admits(self, variant: str) -> bool:
        """Whether a variant is to be compared: it is due, none has been yet, or there is time."""
        if variant in self._due or not self._compared:
            return not self._forgone
        next_s = self._longest_s
        in_time = self._spent_s + next_s <= _WORKLOAD_S
        return in_time and self._schedule.has_time(self._index, next_s)

    def forgo(self, why: str) -> None:
        """Admit nothing any more: no set of this workload can be judged by."""
        self._forgone, self.timed, self.why_not = True, False, why

    def spend(self, seconds: float) -> None:
        """Count time that strict sets took."""
        self._spent_s += seconds
        self._schedule.spent_s += seconds

    def record(self, variant: str, seconds: float, compared: bool) -> None:
        """Count a set, and its variant as covered if the candidate could be judged by it."""
        self.spend(seconds)
        self._longest_s = max(self._longest_s, seconds)
        if compared:
            self._compared = True
            self._schedule.uncovered.discard(variant)
