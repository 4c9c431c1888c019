"""Which strict sets of an evaluation are compared, and how long that may take.

A float64 run of the reference can be far slower than the candidate, so there is a budget. Its parts:

- On every workload at least one variant is compared, and over an evaluation every variant, whatever
  it costs. Which variant is due on which workload is secret and new in every evaluation.
- The others are compared too while time is left: so much a workload, and in the whole evaluation a
  share of what everything else takes. Small workloads (milliseconds a set) get all of them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable

__all__ = ["Schedule", "Turn"]

_WORKLOAD_S = 1.0
_EVALUATION_S = 1.5
_SHARE = 0.5
_random = secrets.SystemRandom()


class Schedule:
    """The strict sets of one evaluation.

    Args:
        variants: names of the problem's variants.
        workloads: how many workloads there are.
    """

    def __init__(self, variants: Iterable[str], workloads: int):
        self.variants = tuple(variants)
        self.workloads = workloads
        self.uncovered = set(self.variants)
        """Variants that have been compared on no workload yet."""
        self.spent_s = 0.0
        self._begin = time.perf_counter()

    def turn(self, index: int) -> Turn:
        """What is due on a workload; the last ones take what is uncovered."""
        left = max(1, self.workloads - index)
        candidates = sorted(self.uncovered) or list(self.variants)
        count = -(-len(self.uncovered) // left) or min(1, len(candidates))
        return Turn(self, index, _random.sample(candidates, count))

    def allowed_s(self, index: int) -> float:
        """Seconds that strict sets may have taken by the end of a workload."""
        others = time.perf_counter() - self._begin - self.spent_s
        return max(_EVALUATION_S * min(1.0, (index + 1) / self.workloads), _SHARE * others)


class Turn:
    """The strict sets of one workload."""

    def __init__(self, schedule: Schedule, index: int, due: list[str]):
        self.variants = schedule.variants
        self._schedule, self._index, self._due = schedule, index, due
        self._spent_s = self._longest_s = 0.0
        self._compared = False

    def order(self, variants: Iterable[str]) -> list[str]:
        """Those that are due first, the others in a secret order."""
        given = list(variants)
        _random.shuffle(given)
        return sorted(given, key=lambda variant: variant not in self._due)

    def admits(self, variant: str) -> bool:
        """Whether the variant is to be compared: it is due, none has been, or there is time."""
        if variant in self._due or not self._compared:
            return True
        next_s = self._longest_s
        return (
            self._spent_s + next_s <= _WORKLOAD_S
            and self._schedule.spent_s + next_s <= self._schedule.allowed_s(self._index)
        )

    def spend(self, seconds: float) -> None:
        """Count time that strict sets took."""
        self._spent_s += seconds
        self._schedule.spent_s += seconds

    def record(self, variant: str, seconds: float, compared: bool) -> None:
        """Count a set, and its variant as covered if it could be judged by."""
        self.spend(seconds)
        self._longest_s = max(self._longest_s, seconds)
        if compared:
            self._compared = True
            self._schedule.uncovered.discard(variant)
