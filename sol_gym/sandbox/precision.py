"""Comparing outputs on strict inputs: by the error that the declared precision itself makes.

A published tolerance fits the published draws alone, so on strict inputs it says nothing. There the
yardstick is measured, per draw and per row of each output: the reference's error against its
float64 oracle, together with that of a run whose contractions round their operands to the lowest
precision the problem's policy admits. A candidate passes if

- no element is further from both oracle and reference than a hard cap, a multiple of the row's
  noise (a share of the elements may be, where the problem selects: two candidates that are equal
  up to rounding may be decided either way);
- the root mean square of its errors, in units of the row's noise, stays within a factor of one;
- errors that a whole row shares stay within a factor of the reference's (`systematic`);
- it is infinite where the reference is, and nowhere else; integers are the reference's.

Factors come from measured honest variation (benchmarks/verifier_strength.py, docs/correctness.md).

A draw on which the reference is no measure is void, and counts for nobody: it overflows, or its
error is as large as its result (cancellation, a selection among equals).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..problem import Precision, PrecisionPolicy, Problem, TensorArg
from .oracle import oracle_outputs
from .reference import Reference
from .systematic import FACTOR, Systematic, applies_to, row_magnitudes, row_sums

__all__ = ["FACTORS", "Deviation", "Factors", "Yardstick", "rounded_outputs"]


@dataclass(frozen=True)
class Factors:
    """How much worse than the reference a candidate may be."""

    rms: float
    """On the root mean square over an output, in units of the noise."""
    cap: float
    """On a single element, in units of the noise, unless the reference's own worst is larger."""


FACTORS = {
    "coarse": Factors(rms=3.0, cap=40.0),
    "fine": Factors(rms=32.0, cap=400.0),
}
"""`coarse` where the noise is that of 16-bit (or narrower) roundings, which a candidate makes at
the same places or leaves out; `fine` where it is float32's, which depends on the order of sums,
and where an output is nothing but noise."""

_FINE_BELOW = 2.0**-14
_NOISE_ABOVE = 0.5
_VOID_ABOVE = 0.25
_SHORT_ROW = 16
_CHUNK = 16 << 20
_EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-23}
_TINY = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133, "float64": 2.0**-149}
_BITS: dict[Precision, int] = {"tf32": 10, "bfloat16": 7, "float16": 10}


@dataclass(frozen=True)
class Deviation:
    """How far one output is off, in units of the row's noise (0 for integers)."""

    rms: float = 0.0
    worst: float = 0.0
    shared: float = 0.0
    """Errors that rows share, in units of the reference's; 0 where they are not judged."""
    faults: list[str] = field(default_factory=list)
    """What is wrong; empty if it passes."""


class Yardstick:
    """Reference, oracle and policy run on one strict set, ready to measure candidates.

    Args:
        problem: for its precision policy and the share of selected elements.
        reference: the problem's reference.
        arguments: the set's inputs in call order; they are not changed.
        outputs: the declared outputs.

    Raises:
        InvalidReference: the reference fails.
        OracleUnsupported: it has no float64 run.
        torch.OutOfMemoryError: no room for float64.
    """

    def __init__(
        self, problem: Problem, reference: Reference, arguments: list[Any],
        outputs: dict[str, TensorArg],
    ):  # fmt: skip
        policy = problem.pack.precision_policy if problem.pack else PrecisionPolicy()
        self.selects = problem.pack.selects if problem.pack else 0.0
        self.outputs = outputs
        self.expected = reference(arguments, outputs)
        self.oracle = oracle_outputs(reference, arguments, outputs)
        rounded = rounded_outputs(reference, arguments, outputs, policy)
        lowered: list[Tensor | None] = [None] * len(outputs) if rounded is None else [*rounded]
        shared = applies_to(problem)
        self._noise = [
            _Noise(spec, right, exact, lower, shared)
            for spec, right, exact, lower in zip(
                outputs.values(),
                self.expected,
                self.oracle,
                lowered,
                strict=True,
            )
        ]

    @property
    def void(self) -> str:
        """Why this set cannot be judged by; empty if it can."""
        return next((n.void for n in self._noise if n.void), "")

    def compare(self, position: int, got: Tensor) -> Deviation:
        """How far a candidate's output is off."""
        return self._noise[position].compare(got, self.selects)

    def faults(self, position: int, got: Tensor) -> list[str]:
        """What is wrong with a candidate's output; empty if it passes."""
        return self.compare(position, got).faults


class _Noise:
    """How far one output of the reference is from its oracle, row by row."""

    def __init__(
        self, spec: TensorArg, right: Tensor, exact: Tensor, lower: Tensor | None, shared: bool
    ):  # fmt: skip
        self.name, self.dtype, self.shape = spec.name, spec.dtype, right.shape
        self.floats = right.is_floating_point() and right.dtype.itemsize > 1
        self.right, self.exact = _rows(right), _rows(exact)
        self.void = ""
        self.kind = "fine"
        self.systematic: Systematic | None = None
        if not self.floats or not right.numel():
            return
        self._measure(None if lower is None else _rows(lower), shared and right.dim() > 1)

    def _measure(self, lower: Tensor | None, shared: bool) -> None:
        squares, sizes, odd = [], [], []
        own, admitted, magnitudes = [], [], []
        for part in _parts(self.right):
            r, o = self.right[part].double(), self.exact[part].double()
            finite = torch.isfinite(r) & torch.isfinite(o)
            # The same infinity in both is fine; NaN equals nothing.
            odd.append((~finite & (r != o)).any())
            error = torch.where(finite, r - o, 0)
            o = torch.where(finite, o, 0)
            if shared:
                own.append(row_sums(error, o))
                magnitudes.append(row_magnitudes(o))
            error.square_()
            if lower is not None:
                more = lower[part].double()
                more = torch.where(finite & torch.isfinite(more), more - o, 0)
                if shared:
                    admitted.append(row_sums(more, o))
                error = torch.maximum(error, more.square_())
            count = finite.sum(-1).clamp_min(1)
            squares.append(error.sum(-1) / count)
            sizes.append(o.square_().sum(-1) / count)
        noise, size = torch.cat(squares).sqrt_(), torch.cat(sizes).sqrt_()
        relative = torch.where(size > 0, noise / size, torch.nan)
        overflows, typical = torch.stack(
            [torch.stack(odd).any().double(), relative.nanmedian().nan_to_num(0.0)]
        ).tolist()
        if overflows:
            self.void = f"{self.name} of the reference overflows or is not a number"
            return
        if _VOID_ABOVE < typical < 1e3:
            self.void = f"{self.name} of the reference is mostly rounding error"
        self.kind = "coarse" if _FINE_BELOW < typical < _NOISE_ABOVE else "fine"
        floor = 0.29 * _EPS[self.dtype] * size + 0.29 * _TINY[self.dtype]
        noise = torch.maximum(torch.maximum(noise, floor), size * min(typical, 1.0))
        if self.right.shape[-1] < _SHORT_ROW:
            noise = torch.maximum(noise, _grouped(torch.cat(squares), self.right.shape[-1]))
        if typical > _NOISE_ABOVE:
            # Nothing but rounding error, which may by chance be none in a row of the reference's.
            noise = noise.max().expand_as(noise).clone()
        self.size, self.noise = size, noise
        if shared and self.kind == "coarse":
            runs = [torch.cat(sums, -1) for sums in (own, admitted) if sums]
            magnitude = torch.cat(magnitudes, -1)
            self.systematic = Systematic(self.shape, 0.29 * _EPS[self.dtype], magnitude, runs)

    @cached_property
    def worst(self) -> float:
        """The reference's own largest error, in units of the noise."""
        if not self.floats or self.void or not self.right.numel():
            return 0.0
        parts = _parts(self.right)
        return float(torch.stack([self._units(p, self.right, False).max() for p in parts]).max())

    def _units(self, part: slice, got: Tensor, against_reference: bool = True) -> Tensor:
        """Errors of a chunk in units of the noise; infinite where finiteness differs."""
        c, r, o = got[part].double(), self.right[part].double(), self.exact[part].double()
        error = (c - o).abs_()
        if against_reference:
            error = torch.minimum(error, (c - r).abs_())
        noise, size = self.noise[part].unsqueeze(-1), self.size[part].unsqueeze(-1)
        noise = torch.where(size > 0, noise * (o.abs() / size).clamp_min(1), noise)
        units = error / noise
        same = c == r
        wrong = ~torch.isfinite(units)
        return torch.where(same, 0 if against_reference else units, units).masked_fill_(
            wrong & ~same, torch.inf
        ).nan_to_num_(nan=0.0, posinf=torch.inf)  # fmt: skip

    def compare(self, got: Tensor, selects: float) -> Deviation:
        """How far an output is off; a share `selects` of its elements may be anything."""
        if not got.numel() or self.void:
            return Deviation()
        got, total = _rows(got), got.numel()
        if not self.floats:
            return Deviation(faults=self._wrong_codes(_codes(got), selects))
        factors = FACTORS[self.kind]
        rms, worst, beyond, inside = self._figures(got, factors.cap)
        cap = factors.cap
        if beyond and not selects and factors.rms * self.worst > cap:
            cap = factors.rms * self.worst
            rms, worst, beyond, inside = self._figures(got, cap)
        faults = []
        if beyond > selects * total:
            faults.append(
                f"{beyond:.0f} of {total} elements of {self.name} are beyond {cap:.3g} times the "
                f"reference's own error against float64 (the worst at {worst:.3g})"
            )
        if inside > factors.rms:
            faults.append(
                f"the error of {self.name} is {inside:.3g} times the reference's own against "
                f"float64 (root mean square; {factors.rms:g} allowed)"
            )
        ratio, what = self._shared(got)
        if ratio > FACTOR:
            faults.append(
                f"{self.name} is off systematically: its errors against float64 amount to {what} "
                f"{ratio:.3g} times the reference's own ({FACTOR:g} allowed), as if a mean or a sum "
                "were taken in low precision"
            )
        return Deviation(rms, worst, ratio, faults)

    def _shared(self, got: Tensor) -> tuple[float, str]:
        """Errors that rows share in units of the reference's, and what they amount to."""
        if self.systematic is None:
            return 0.0, ""
        sums = []
        for part in _parts(got):
            exact = self.exact[part].double()
            # What is not finite is compared one by one.
            error = (got[part].double() - exact).nan_to_num_(0, 0, 0)
            sums.append(row_sums(error, exact.nan_to_num(0, 0, 0)))
        return self.systematic.worst(torch.cat(sums, -1))

    def _figures(self, got: Tensor, cap: float) -> tuple[float, float, float, float]:
        """In units of the noise: rms, largest, number beyond `cap`, and rms of the others."""
        rows = []
        for part in _parts(got):
            units = self._units(part, got)
            outside = units > cap
            largest = units.max()
            squares = units.square_()
            whole = squares.sum()
            inside = squares.masked_fill_(outside, 0).sum()
            rows.append(torch.stack([whole, largest, outside.sum().double(), inside]))
        sums, worsts, numbers, insides = zip(*torch.stack(rows).tolist(), strict=True)
        total = got.numel()
        return (sum(sums) / total) ** 0.5, max(worsts), sum(numbers), (sum(insides) / total) ** 0.5

    def _wrong_codes(self, got: Tensor, selects: float) -> list[str]:
        """Integers and packed numbers must be the reference's or the oracle's."""
        wrong = int(((got != _codes(self.right)) & (got != _codes(self.exact))).sum())
        if wrong > selects * got.numel():
            return [f"{wrong} of {got.numel()} elements of {self.name} are not the reference's"]
        return []


# ---- Lower precisions that the policy admits ---------------------------------------------------


def rounded_outputs(
    reference: Reference, arguments: list[Any], outputs: dict[str, TensorArg],
    policy: PrecisionPolicy,
) -> list[Tensor] | None:  # fmt: skip
    """The reference with operands of contractions rounded as the policy admits.

    Returns:
        Its outputs, or None where rounding changed no operand.
    """
    if policy.contraction == policy.convolution == "float32":
        return None
    mode = _RoundOperands(policy)
    with mode:
        results = reference.returned(arguments, outputs)
    return results if mode.changed else None


_PRODUCTS: set[Callable[..., Any]] = {
    torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.addbmm, torch.einsum,
    torch.mv, torch.dot, torch.inner, torch.tensordot, torch.Tensor.matmul, torch.Tensor.mm,
    torch.Tensor.bmm, torch.Tensor.addmm, torch.Tensor.baddbmm, torch.Tensor.mv, torch.Tensor.dot,
    torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, F.linear, F.scaled_dot_product_attention,
}  # fmt: skip
_CONVOLUTIONS: set[Callable[..., Any]] = {
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d,
    torch.conv_transpose3d, torch.convolution,
}  # fmt: skip


class _RoundOperands(TorchFunctionMode):
    def __init__(self, policy: PrecisionPolicy):
        super().__init__()
        self.policy = policy
        self.changed = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        precision: Precision = "float32"
        if func in _PRODUCTS:
            precision = self.policy.contraction
        elif func in _CONVOLUTIONS or "convolution" in getattr(func, "__name__", ""):
            precision = self.policy.convolution
        if precision != "float32":
            args = tuple(self._round(a, precision) for a in args)
            kwargs = {k: self._round(v, precision) for k, v in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))

    def _round(self, value: Any, precision: Precision) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._round(v, precision) for v in value)
        # Biases are addends, not operands.
        if not isinstance(value, Tensor) or value.dtype is not torch.float32 or value.dim() < 2:
            return value
        lower = round_mantissa(value, _BITS[precision], half=precision == "float16")
        self.changed = self.changed or not torch.equal(lower, value)
        return lower


def round_mantissa(value: Tensor, bits: int, *, half: bool = False) -> Tensor:
    """float32 values rounded to nearest even with `bits` bits behind the leading one.

    With `half` in float16's range too: what overflows it is kept (such operands need scaling).
    """
    if half:
        lower = value.half().float()
        return torch.where(torch.isfinite(lower), lower, value)
    shift = 23 - bits
    code = value.contiguous().view(torch.int32)
    code = code + ((1 << (shift - 1)) - 1) + ((code >> shift) & 1)
    rounded = (code & ~((1 << shift) - 1)).view(torch.float32)
    return torch.where(torch.isfinite(value), rounded, value)


# ---- Shapes ----------------------------------------------------------------------------------


def _rows(tensor: Tensor) -> Tensor:
    if tensor.dtype is getattr(torch, "float4_e2m1fn_x2", None):
        tensor = tensor.view(torch.uint8)
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)


def _codes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _parts(rows: Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK // max(1, rows.shape[-1]))
    for start in range(0, rows.shape[0], step):
        yield slice(start, start + step)


def _grouped(squares: Tensor, width: int) -> Tensor:
    """Root mean square noise of groups of neighbouring short rows, for each row."""
    rows = -(-_SHORT_ROW // width)
    padding = -squares.numel() % rows
    groups = torch.cat((squares, squares[-1:].expand(padding))).view(-1, rows).mean(-1).sqrt()
    return groups.repeat_interleave(rows)[: squares.numel()]
