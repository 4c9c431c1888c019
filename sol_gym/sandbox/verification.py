"""Outputs held to the reference: which calls are looked at, and how they are compared."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import torch

from ..evaluation import Status
from .calls import Calls
from .correctness import HARD_CAP, Comparison
from .oracle import OracleUnsupported
from .precision import Yardstick
from .reference import InvalidReference, Reference
from .schedule import Turn
from .verdict import Verdict

_SNAPSHOT_BYTES = 2048
_SLOW_REFERENCE_S = 0.02
_random = secrets.SystemRandom()

Snapshots = list[list[tuple[torch.Tensor, torch.Tensor]]]
"""For each of some calls its outputs' bytes, and random positions in them."""


@dataclass
class Private:
    """The judge's own copy of one input set."""

    arguments: list[Any]
    tensors: dict[str, torch.Tensor]


class Verification:
    """Compares outputs of `calls` with the reference's; keeps the record of one workload.

    Args:
        strict: this workload's share of the strict sets, None with compatible inputs.
    """

    def __init__(self, calls: Calls, reference: Reference, strict: Turn | None):
        self.calls, self.reference, self.strict = calls, reference, strict
        pack = calls.problem.pack
        # Where a selection decides, an element may honestly be anything.
        capped = strict is not None and not (pack and pack.selects)
        self.comparison = Comparison(calls.workload.tolerance, HARD_CAP if capped else None)
        self.reference_s = 0.0
        """Seconds that the reference took the last time."""

    @property
    def slow(self) -> bool:
        """Whether running the reference once more is a matter of time."""
        return self.reference_s > _SLOW_REFERENCE_S

    def private(self, index: int) -> Private:
        """The judge's copy of set `index`, out of the worker's reach."""
        calls = self.calls
        tensors = {
            name: slot.one(calls.arena.bytes, index).clone()
            for name, slot in calls.layout.inputs.items()
        }
        arguments = [
            calls.scalars[index][name] if spec.is_scalar else tensors[name]
            for name, spec in calls.problem.definition.inputs.items()
        ]
        return Private(arguments, tensors)

    def verify(self, index: int, private: Private, variant: str | None = None) -> None:
        """Compare call `index`'s outputs, read in place, with the reference on the judge's copy."""
        calls = self.calls
        for name, slot in calls.layout.inputs.items():
            ours = private.tensors[name].view(-1).view(torch.uint8) if slot.nbytes else None
            if ours is not None and not torch.equal(slot.raw(calls.arena.bytes, index), ours):
                raise Verdict(
                    Status.INCORRECT_NUMERICAL,
                    f"run() changed its input {name!r}; inputs must be left as they are",
                )
        calls.backend.synchronize()
        with calls.stages.timed("verify"):
            self.comparison.rounds += 1
            if variant is None:
                start = time.perf_counter()
                expected = self.reference(private.arguments, calls.output_specs)
                calls.backend.synchronize()
                self.reference_s = time.perf_counter() - start
                slots = calls.layout.outputs.values()
                for slot, got, right in zip(slots, calls.outputs(index), expected, strict=True):
                    self.comparison.add(slot.name, right if got is None else got, right)
            else:
                self._verify_strict(index, private, variant)
        if self.comparison.failed:
            text = "; ".join(self.comparison.reasons)
            if self.comparison.mismatch:
                text += f"; first: {self.comparison.mismatch}"
            raise Verdict(Status.INCORRECT_NUMERICAL, text)

    def _verify_strict(self, index: int, private: Private, variant: str) -> None:
        """Compare by the error that the declared precision itself makes on this set."""
        assert self.strict is not None
        try:
            yardstick = Yardstick(
                self.calls.problem, self.reference, private.arguments, self.calls.output_specs
            )
            got = [
                right if output is None else output
                for output, right in zip(self.calls.outputs(index), yardstick.expected, strict=True)
            ]
            self.comparison.add_strict(variant, yardstick, got)
            return
        except (InvalidReference, OracleUnsupported) as error:
            why = str(error)
        except torch.OutOfMemoryError:
            why = "no memory for float64 on this device"
            self.strict.forgo(why)
        self.comparison.skipped.append(f"{variant}: {why}")

    def admitted(self, variant: str) -> bool:
        """Whether a variant is to be compared; the record says so if it is not."""
        assert self.strict is not None
        admitted = self.strict.admits(variant)
        if not admitted:
            self.comparison.skipped.append(f"{variant}: {self.strict.why_not}")
        return admitted

    def compare_strictly(self, variant: str, index: int, private: Private) -> None:
        """Verify call `index` by the strict yardstick, and charge its time to the budget."""
        assert self.strict is not None
        with self.calls.stages.timed("strict"):
            start, before = time.perf_counter(), self.comparison.strict_rounds
            self.verify(index, private, variant)
            compared = self.comparison.strict_rounds > before
            self.strict.record(variant, time.perf_counter() - start, compared)

    def choose(self, n: int) -> list[int]:
        """Calls to verify: the last one and a random one (only one of them if the reference is slow)."""
        last, other = n - 1, _random.randrange(n)
        if self.slow:
            return [_random.choice((last, other))]
        return sorted({last, other})

    def snapshot_plan(self, chosen: list[int]) -> Snapshots:
        """For each chosen call, its outputs' bytes with random positions to look at first."""
        plan = []
        for index in chosen:
            row = []
            for raw in self.calls.raw_outputs(index):
                if raw.numel():
                    where = torch.randint(
                        raw.numel(), (min(_SNAPSHOT_BYTES, raw.numel()),), device=raw.device
                    )
                    row.append((raw, where))
            plan.append(row)
        return plan


def taken_at(snapshots: Snapshots) -> list[list[torch.Tensor]]:
    """The bytes that are at the snapshots' places now (on a GPU once the judge's stream is there)."""
    return [[raw[where] for raw, where in row] for row in snapshots]


def insist_unchanged(snapshots: Snapshots, taken: list[list[torch.Tensor]], message: str) -> None:
    """Raises `Verdict` if outputs are not what they were when the answer had come."""
    for row, sample in zip(snapshots, taken, strict=True):
        for (raw, where), bytes_then in zip(row, sample, strict=True):
            if not torch.equal(raw[where], bytes_then):
                raise Verdict(Status.REWARD_HACK, message)
