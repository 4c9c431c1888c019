"""Comparing outputs with the reference's, in the judge's own memory.

An element passes if |out - ref| <= max_atol + max_rtol * |ref|, in float32 (SOL-ExecBench). NaN
never matches anything; +-inf matches only the same infinity, and -inf only where the tolerance
allows it. Strict sets have another yardstick (`precision`) and count into the same verdict. Work is
done in chunks, so that comparing never needs more than a few hundred MiB.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..evaluation import Correctness, Mismatch
from ..problem import Tolerance
from .precision import Yardstick

_CHUNK = 32 << 20
HARD_CAP = 64.0
"""Tolerances that an element may be off at most under the strict profile, whatever share may be."""


@dataclass
class Comparison:
    """Running verdict over rounds and outputs of one workload."""

    tolerance: Tolerance
    hard_cap: float | None = None
    """No element may be off by more than so many tolerances, its row's scale taken for its own
    where it is larger; None for no such cap."""
    rounds: int = 0
    strict_rounds: int = 0
    strict_error: float | None = None
    skipped: list[str] = field(default_factory=list)
    max_absolute: float = 0.0
    max_relative: float = 0.0
    matched_ratio: float = 1.0
    has_nan: bool = False
    has_inf: bool = False
    mismatch: Mismatch | None = None
    failed: bool = False
    reasons: list[str] = field(default_factory=list)

    def add(self, name: str, got: torch.Tensor, expected: torch.Tensor) -> bool:
        """Compare one output of one round; returns whether it passes."""
        tolerance = self.tolerance
        flat_got, flat_expected = _flat(got), _flat(expected)
        total = flat_expected.numel()
        bad = 0
        first: int | None = None
        worst_absolute = worst_relative = 0.0
        outside = 0
        hard_cap = self.hard_cap if flat_expected.is_floating_point() else None
        cap: torch.Tensor | None = None
        for start in range(0, total, _CHUNK):
            a = _as_float(flat_got[start : start + _CHUNK])
            b = _as_float(flat_expected[start : start + _CHUNK])
            quick = _all_within(a, b, tolerance)
            if quick is not None:
                worst_absolute = max(worst_absolute, quick[0])
                worst_relative = max(worst_relative, quick[1])
                continue
            finite = torch.isfinite(a) & torch.isfinite(b)
            same_inf = (a == b) & torch.isinf(b)
            if not tolerance.allow_negative_inf:
                same_inf &= b > 0
            difference = torch.where(finite, (a - b).abs(), torch.zeros_like(b))
            magnitude = torch.where(finite, b.abs(), torch.zeros_like(b))
            ok = (
                finite & (difference <= tolerance.max_atol + tolerance.max_rtol * magnitude)
            ) | same_inf
            beyond = torch.zeros((), device=b.device)
            if hard_cap is not None:
                cap = self._cap(flat_expected, hard_cap) if cap is None else cap
                own = hard_cap * tolerance.max_rtol * magnitude
                beyond = (difference > torch.maximum(cap, own)).sum()
            relative = difference / magnitude.clamp_min(1e-12)
            counts = torch.stack(
                [
                    (~ok).sum().double(),
                    difference.max().double(),
                    torch.where(difference > tolerance.max_atol, relative, 0).max().double(),
                    torch.isnan(a).any().double(),
                    (torch.isinf(a) & ~same_inf).any().double(),
                    beyond.double(),
                ]
            ).tolist()
            if counts[0] and first is None:
                first = start + int(torch.argmax((~ok).to(torch.uint8)))
            bad += int(counts[0])
            worst_absolute, worst_relative = (
                max(worst_absolute, counts[1]),
                max(worst_relative, counts[2]),
            )
            self.has_nan |= bool(counts[3])
            self.has_inf |= bool(counts[4])
            outside += int(counts[5])
        ratio = 1 - bad / total if total else 1.0
        self.max_absolute = max(self.max_absolute, worst_absolute)
        self.max_relative = max(self.max_relative, worst_relative)
        self.matched_ratio = min(self.matched_ratio, ratio)
        reasons = []
        if ratio < tolerance.required_matched_ratio:
            reasons.append(
                f"{100 * ratio:.4g} % of {name} within tolerance, {100 * tolerance.required_matched_ratio:g} % required"
            )
        if tolerance.max_error_cap is not None and worst_absolute > tolerance.max_error_cap:
            reasons.append(
                f"an element of {name} is off by {worst_absolute:.4g}, cap {tolerance.max_error_cap:g}"
            )
        if outside:
            reasons.append(
                f"{outside} elements of {name} are off by more than {self.hard_cap:g} times the tolerance"
            )
        if bad and _not_finite_where_expected_is(flat_got, flat_expected, first):
            reasons.append(f"{name} has NaN or infinite values where finite ones are expected")
        if reasons:
            self.failed = True
            self.reasons = self.reasons or reasons
            if self.mismatch is None and first is not None:
                self.mismatch = Mismatch(
                    output=name,
                    index=_unravel(first, expected.shape),
                    got=_value(flat_got[first]),
                    expected=_value(flat_expected[first]),
                    mismatched=bad,
                    total=total,
                )
        return not reasons

    def _cap(self, expected: torch.Tensor, hard_cap: float) -> torch.Tensor:
        """The hard cap for an element no larger than the root mean square of its output."""
        sums = torch.zeros(2, dtype=torch.float64, device=expected.device)
        for start in range(0, expected.numel(), _CHUNK):
            part = _as_float(expected[start : start + _CHUNK]).double()
            finite = torch.isfinite(part)
            sums += torch.stack([torch.where(finite, part, 0).square().sum(), finite.sum()])
        scale = (sums[0] / sums[1].clamp_min(1)).sqrt()
        return hard_cap * (self.tolerance.max_atol + self.tolerance.max_rtol * scale)

    def add_strict(self, variant: str, yardstick: Yardstick, got: list[torch.Tensor]) -> bool:
        """Compare all outputs of one strict round; returns whether they pass."""
        if yardstick.void:
            self.skipped.append(f"{variant}: {yardstick.void}")
            return True
        reasons = []
        for position, output in enumerate(got):
            found = yardstick.compare(position, output)
            reasons += found.faults
            if found.rms < float("inf"):
                self.strict_error = max(self.strict_error or 0.0, found.rms)
        self.strict_rounds += 1
        if reasons:
            self.failed = True
            self.reasons = self.reasons or [f"on {_MEANING[variant]}: {r}" for r in reasons]
        return not reasons

    def result(self) -> Correctness:
        """The record for the evaluation."""
        return Correctness(
            rounds=self.rounds,
            max_absolute_error=self.max_absolute,
            max_relative_error=self.max_relative,
            matched_ratio=self.matched_ratio,
            has_nan=self.has_nan,
            has_inf=self.has_inf,
            mismatch=self.mismatch,
            strict_rounds=self.strict_rounds,
            strict_error=self.strict_error,
            strict_skipped=self.skipped,
        )


_MEANING = {
    "timed": "inputs of timed calls",
    "plain": "inputs where every one matters (no weights of ones, no biases of zeros)",
    "rows": "inputs whose rows differ in scale, with outliers and means that are not zero",
    "tiny": "small inputs",
    "huge": "large inputs",
}
"""Strict variants in words for the author of a kernel."""


def _all_within(
    a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance
) -> tuple[float, float] | None:
    """Largest absolute and relative error if every element passes and is finite, else None.

    The usual case, at half the passes over memory that telling the exceptions apart takes.
    """
    if not a.numel():
        return 0.0, 0.0
    difference = (a - b).abs_()
    magnitude = b.abs()
    relative = (difference / magnitude.clamp_min(1e-12)).masked_fill_(
        difference <= tolerance.max_atol, 0
    )
    passes = difference <= magnitude.mul_(tolerance.max_rtol).add_(tolerance.max_atol)
    # NaN or an infinity on either side makes the difference NaN or infinite.
    figures = torch.stack(
        [passes.all().double(), difference.max().double(), relative.max().double()]
    )
    all_pass, absolute, worst = figures.tolist()
    if not all_pass or not absolute < float("inf"):
        return None
    return absolute, worst


def _not_finite_where_expected_is(
    got: torch.Tensor, expected: torch.Tensor, first: int | None
) -> bool:
    """Any non-finite element where the reference is finite: wrong whatever the matched ratio."""
    for start in range(0, expected.numel(), _CHUNK):
        a, b = _as_float(got[start : start + _CHUNK]), _as_float(expected[start : start + _CHUNK])
        if bool((~torch.isfinite(a) & torch.isfinite(b)).any()):
            return True
    return False


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is getattr(torch, "float4_e2m1fn_x2", None):
        tensor = tensor.view(torch.uint8)  # Compared as codes: a packed byte has no float value.
    return tensor.reshape(-1)


def _as_float(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if tensor.dtype in (torch.float64, torch.int64) else torch.float32
    return tensor.to(wide)


def _value(element: torch.Tensor) -> float | str:
    value = float(element.double() if element.dtype is not torch.bool else element.float())
    return value if value == value and abs(value) != float("inf") else str(value)


def _unravel(index: int, shape: torch.Size) -> tuple[int, ...]:
    where: list[int] = []
    for size in reversed(shape):
        where.append(index % size)
        index //= size
    return tuple(reversed(where))
