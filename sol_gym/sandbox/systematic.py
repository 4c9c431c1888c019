"""Errors that a whole row shares: what a statistic in low precision leaves, and rounding does not.

A mean of squares, a row sum of a softmax or a mean taken in bfloat16 puts one factor, or one
offset, on every element that is made from it. That error may be smaller than the rounding of the
result and is told from it all the same: roundings of n elements are independent, so that their sum
grows like the square root of n, where a shared error grows like n.

Per row, errors against float64 are weighted by 1 / max(|exact|, size of the row), so that no few
large elements decide, and added up twice: with the sign of the exact value, which finds a factor,
and without, which finds an offset. The *unit* of these sums is what independent errors as large as
the reference's would make, or a factor of 1 + 2^-14 where that is more: long sums in a tensor core
cut off instead of rounding, and are honest. Rows are also pooled over trailing axes and over all
axes but one, for statistics of groups, images and channels.

The *level* of a version is the root mean square of its sums over rows (blocks, slices), in units.
A candidate may reach `FACTOR` times the level of the reference, of the run in the precision that
the policy admits, or of independent errors, whichever is largest; its worst eighth does not count.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..problem import PrecisionPolicy, Problem

__all__ = ["FACTOR", "Systematic", "applies_to", "row_magnitudes", "row_sums"]

FACTOR = 3.0
"""Times the honest level; from honest reformulations (docs/correctness.md)."""
_HONEST_FACTOR = 2.0**-14
_LEAST_GROUPS = 8
"""Of fewer rows the reference's own level says too little."""
_LEFT_OUT = 8
"""One row in so many may be anything that the other tests let pass: there a softmax may be decided
by rounding."""
_WHAT = ("a factor", "an offset")


def applies_to(problem: Problem) -> bool:
    """Whether shared errors tell a wrong version of a problem from an honest one.

    Not where a selection or a code may fall otherwise, which moves all that depends on it together;
    not for quantised operands, whose products some tensor cores add up with few bits, cutting off;
    not where TF32 is admitted, to which hardware may cut operands instead of rounding them; and not
    without 16-bit inputs, where an error that is not fine is one of few float32 roundings, grown.
    """
    pack = problem.pack
    policy = pack.precision_policy if pack else PrecisionPolicy()
    if pack and (pack.selects or pack.rounding_sensitive):
        return False
    if "tf32" in (policy.contraction, policy.convolution):
        return False
    definition = problem.definition
    tensors = [
        s
        for s in (*definition.inputs.values(), *definition.outputs.values())
        if s.shape is not None
    ]
    if not {s.dtype for s in tensors} & {"bfloat16", "float16"}:
        return False
    texts = [*(s.dtype for s in tensors), problem.reference]
    return not any("float8" in text or "float4" in text for text in texts)


def row_sums(error: Tensor, exact: Tensor) -> Tensor:
    """[3, rows]: weighted errors added up with the sign of `exact`, without it, and squared.

    Both are [rows, n] float64 and finite, with zeros where an element is left out.
    """
    weighted = error * _weights(exact)
    factor = torch.linalg.vecdot(weighted, exact.sign())
    return torch.stack([factor, weighted.sum(-1), torch.linalg.vecdot(weighted, weighted)])


def row_magnitudes(exact: Tensor) -> Tensor:
    """[2, rows]: weighted absolute values added up, and their squares."""
    weighted = _weights(exact).mul_(exact).abs_()
    return torch.stack([weighted.sum(-1), torch.linalg.vecdot(weighted, weighted)])


def _weights(exact: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(exact, dim=-1, keepdim=True) / exact.shape[-1] ** 0.5
    size = torch.where(size > 0, size, 1.0)
    return torch.maximum(exact.abs(), size).reciprocal_()


class Systematic:
    """The shared errors that are honest for one output.

    Args:
        shape: of the output, at least two axes; rows are its last one.
        rounding: relative error of rounding to the output's dtype, root mean square.
        magnitudes: `row_magnitudes` of the exact output.
        runs: `row_sums` of the honest runs measured, the reference's first.
    """

    def __init__(
        self, shape: torch.Size, rounding: float, magnitudes: Tensor, runs: list[Tensor]
    ):  # fmt: skip
        self._lead = shape[:-1]
        total, squares = magnitudes
        unit = torch.maximum(rounding**2 * squares, torch.stack([r[2] for r in runs]).amax(0))
        # A row in which the reference has no error by chance is judged by the others.
        unit = torch.maximum(unit, unit[total > 0].median() if bool((total > 0).any()) else unit)
        self._inverse = torch.where(total > 0, unit.rsqrt(), 0)
        self._floor = _HONEST_FACTOR * total * self._inverse
        self._reference = runs[0][:2]
        levels = [self._levels(run[None, :2], 0) for run in runs]
        self._honest = {name: max(1.0, *(of[name] for of in levels)) for name in levels[0]}

    def worst(self, sums: Tensor) -> tuple[float, str]:
        """The largest level in units of the honest one, and what it is a level of.

        Args:
            sums: `row_sums` of a candidate, against float64. What counts is the distance from
                there or from the reference, whichever is nearer.
        """
        from_both = torch.stack([sums[:2], sums[:2] - self._reference])
        ratios = {
            name: level / self._honest[name]
            for name, level in self._levels(from_both, _LEFT_OUT).items()
        }
        name = max(ratios, key=ratios.__getitem__, default="")
        return (ratios[name], name) if name else (0.0, "")

    def _levels(self, sums: Tensor, left_out: int) -> dict[str, float]:
        """Levels by name, without the largest of every `left_out` groups (0: with all).

        `sums` are [yardsticks, 2, rows]; each group is measured by the one that is nearest to it.
        """
        units = (sums * self._inverse).view(-1, 2, *self._lead)
        floor = self._floor.view(self._lead)
        found = {}
        for where, axes in self._pooled():
            floors = (floor.sum(axes) if axes else floor).flatten()
            if floors.numel() < _LEAST_GROUPS:
                continue
            pooled = units.sum([a + 2 for a in axes]) if axes else units
            pooled = pooled.reshape(len(sums), 2, -1).abs().amin(0)
            together = (floor.numel() / floors.numel()) ** 0.5
            squares = (pooled / floors.clamp_min(together)).square_()
            if left_out:
                kept = floors.numel() - max(1, floors.numel() // left_out)
                squares = squares.sort(-1).values[:, :kept]
            for what, level in zip(_WHAT, squares.mean(-1).sqrt().tolist(), strict=True):
                found[f"{what} on {where}"] = level
        return found

    def _pooled(self) -> Iterator[tuple[str, list[int]]]:
        """What is left in words, and the axes in front of the last that are pooled over."""
        axes = range(len(self._lead))
        yield "rows", []
        for axis in axes[1:]:
            yield f"blocks of the last {len(axes) - axis + 1} axes", list(axes[axis:])
        for axis in axes[1:]:
            yield f"slices along axis {axis}", [a for a in axes if a != axis]
