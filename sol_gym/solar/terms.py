"""Terms: the pieces a `Region` is a union of, and what can be done with one of them.

A term is a product of one index set per axis, with at most one pair of axes coupled by a band. The
functions here are pure and work on plain (axes, band) pairs; where an operation leaves this family
they return a subset of the true set and say that it does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]
Axis = np.ndarray | None
"""Which indices of an axis belong, as a boolean vector; None is all of them."""

MAX_TERMS = 64
"""A set that would need more terms is cut to a subset."""
_FEW_BLOCKS = 8
"""Intervals cut into more blocks than this are followed by whole blocks."""
MAX_VECTOR = 2**26
"""Longest boolean vector that is ever built."""


@dataclass(frozen=True, eq=False)
class Band:
    """Couples two axes: index r of `row` goes with the indices [low[r], high[r]) of `col`."""

    row: int
    col: int
    low: np.ndarray
    high: np.ndarray

    def on(self, row: int, col: int) -> Band:
        """The same intervals between other axes."""
        return Band(row, col, self.low, self.high)

    def transposed(self, columns: int) -> Band | None:
        """The same pairs with row and column exchanged, if each column's rows are an interval."""
        low, high = self.low, self.high
        if (np.diff(low) < 0).any() or (np.diff(high) < 0).any():
            return None
        column = np.arange(columns)
        first = np.searchsorted(high, column, side="right")
        last = np.searchsorted(low, column, side="right")
        return Band(self.col, self.row, first, np.maximum(first, last))


class Term(NamedTuple):
    """A product of index sets, with at most one coupled pair of axes."""

    axes: tuple[Axis, ...]
    band: Band | None = None


def normal(shape: Shape, term: Term) -> Term | None:
    """The term with whole axes as None and no trivial band; None if it is empty."""
    axes = list(term.axes)
    band = term.band
    if band is not None:
        low, high = band.low, np.maximum(band.high, band.low)
        if shape[band.row] == 1:
            axes[band.col] = _and(axes[band.col], _interval(shape[band.col], low[0], high[0]))
            band = None
        elif shape[band.col] == 1:
            axes[band.row] = _and(axes[band.row], high > low)
            band = None
        else:
            rows = _index(axes[band.row])
            if not (high > low)[rows].any():
                return None
            trivial = not low[rows].any() and (high[rows] == shape[band.col]).all()
            band = None if trivial else Band(band.row, band.col, low, high)
    for d, axis in enumerate(axes):
        if axis is None:
            continue
        if axis.all():
            axes[d] = None
        elif not axis.any():
            return None
    if 0 in shape:
        return None
    return Term(tuple(axes), band)


def count(shape: Shape, term: Term) -> int:
    """Number of elements of a term."""
    axes, band = term
    coupled = (band.row, band.col) if band else ()
    free = math.prod(
        shape[d] if axis is None else int(axis.sum())
        for d, axis in enumerate(axes)
        if d not in coupled
    )
    if band is None:
        return free
    return free * int(row_lengths(term)[_index(axes[band.row])].sum())


def row_lengths(term: Term) -> np.ndarray:
    """How many columns of its band each row has, the column axis' own index set respected."""
    axes, band = term
    assert band is not None
    columns = axes[band.col]
    if columns is None:
        return np.maximum(band.high - band.low, 0)
    before = np.concatenate(([0], np.cumsum(columns)))
    return np.maximum(before[np.maximum(band.high, band.low)] - before[band.low], 0)


def dense(shape: Shape, term: Term) -> np.ndarray:
    """The term as a boolean array."""
    result = np.ones(shape, dtype=bool)
    for d, axis in enumerate(term.axes):
        if axis is not None:
            result &= axis.reshape([-1 if i == d else 1 for i in range(len(shape))])
    if band := term.band:
        column = np.arange(shape[band.col])
        pairs = (band.low[:, None] <= column) & (column < band.high[:, None])
        if band.row > band.col:
            pairs = pairs.T
        result &= pairs.reshape(
            [n if i in (band.row, band.col) else 1 for i, n in enumerate(shape)]
        )
    return result


def intersect(shape: Shape, a: Term, b: Term) -> tuple[Term | None, bool]:
    """Elements in both terms, and whether that is all of them."""
    axes = tuple(_and(x, y) for x, y in zip(a.axes, b.axes, strict=True))
    if a.band is None or b.band is None:
        return normal(shape, Term(axes, a.band or b.band)), True
    other = _aligned(shape, b.band, a.band)
    if other is None:
        return None, False
    low = np.maximum(a.band.low, other.low)
    high = np.minimum(a.band.high, other.high)
    return normal(shape, Term(axes, Band(a.band.row, a.band.col, low, high))), True


def subtract(shape: Shape, a: Term, b: Term) -> tuple[list[Term], bool]:
    """Disjoint terms whose union is a without b, and whether that is all of it."""
    pieces: list[Term | None] = []
    axes = list(a.axes)
    for d, taken in enumerate(b.axes):
        if taken is None:
            continue
        outside = axes.copy()
        outside[d] = ~taken if axes[d] is None else axes[d] & ~taken
        pieces.append(normal(shape, Term(tuple(outside), a.band)))
        axes[d] = _and(axes[d], taken)
    # What is left of a lies within b's axes; b's band still lets some of it stay.
    fits = True
    if b.band is not None:
        size = shape[b.band.col]
        low, high = np.zeros_like(b.band.low), np.full_like(b.band.high, size)
        own = Band(b.band.row, b.band.col, low, high) if a.band is None else a.band
        other = _aligned(shape, b.band, own)
        if other is None:
            fits = False
        else:
            left = Band(own.row, own.col, own.low, np.minimum(own.high, other.low))
            right = Band(own.row, own.col, np.maximum(own.low, other.high), own.high)
            pieces += [normal(shape, Term(tuple(axes), side)) for side in (left, right)]
    return [p for p in pieces if p is not None], fits


def merged(a: Term, b: Term) -> Term | None:
    """The union of two disjoint terms as one term, where it is one."""
    if (a.band is None and b.band is None) or _same_band(a.band, b.band):
        d = _only_difference(a.axes, b.axes)
        if d is None or d < 0:
            return None
        x, y = a.axes[d], b.axes[d]
        if x is None or y is None:
            return None
        return Term(tuple(x | y if i == d else axis for i, axis in enumerate(a.axes)), a.band)
    p, q = a.band, b.band
    if p is None or q is None or (p.row, p.col) != (q.row, q.col):
        return None
    for first, second in ((p, q), (q, p)):
        # An empty interval continues any other.
        some, more = first.high > first.low, second.high > second.low
        if ((first.high == second.low) | ~some | ~more).all():
            if _only_difference(a.axes, b.axes) != -1:
                return None
            low = np.where(some, first.low, second.low)
            high = np.where(more, second.high, np.where(some, first.high, low))
            return Term(a.axes, Band(p.row, p.col, low, high))
    return None


def _only_difference(a: tuple[Axis, ...], b: tuple[Axis, ...]) -> int | None:
    """The one axis along which two products differ; -1 if there is none, None if several."""
    found = -1
    for d, (x, y) in enumerate(zip(a, b, strict=True)):
        if x is not y and not _same(x, y):
            if found >= 0:
                return None
            found = d
    return found


def joined(shape: Shape, a: Term, b: Term) -> Term | None:
    """The union of two products, disjoint or not, that differ along one axis; None for others."""
    if a.band is not None or b.band is not None:
        return None
    d = _only_difference(a.axes, b.axes)
    if d is None:
        return None
    if d < 0:
        return a
    x, y = a.axes[d], b.axes[d]
    both = None if x is None or y is None else x | y
    if both is not None and both.all():
        both = None
    return Term((*a.axes[:d], both, *a.axes[d + 1 :]))


def project(shape: Shape, term: Term, dim: int) -> Term:
    """The term with axis `dim` of size 1: what belongs for some index of it."""
    axes, band = list(term.axes), term.band
    if band and band.col == dim:
        axes[band.row] = _and(axes[band.row], row_lengths(term) > 0)
        band = None
    elif band and band.row == dim:
        rows = _index(axes[dim])
        low, high = band.low[rows], band.high[rows]
        real = high > low
        steps = np.zeros(shape[band.col] + 1, dtype=np.int64)
        np.add.at(steps, low[real], 1)
        np.add.at(steps, high[real], -1)
        axes[band.col] = _and(axes[band.col], np.cumsum(steps[:-1]) > 0)
        band = None
    axes[dim] = None
    return Term(tuple(axes), band)


def shifted(term: Term, position: dict[int, int]) -> Band | None:
    """The term's band with its axes renumbered."""
    return term.band and term.band.on(position[term.band.row], position[term.band.col])


# ---- Reshaping ------------------------------------------------------------------------------


def reshape(shape: Shape, term: Term, target: Shape) -> tuple[list[Term], bool]:
    """The term's elements in row-major order under another shape, and whether that is all."""
    terms, fits = [term], True
    current = list(shape)
    # From the last group to the first, so that the axes still to come keep their numbers.
    for dims, sizes in reversed(_groups(shape, target)):
        done: list[Term] = []
        start, stop = dims
        for t in terms:
            for joined, whole in [_join(tuple(current), t, start, stop)]:
                fits = fits and whole
                size = math.prod(current[start:stop])
                after = (*current[:start], size, *current[stop:])
                for one in joined:
                    parts, whole = _split(after, one, start, sizes)
                    fits = fits and whole
                    done += parts
        current[start:stop] = sizes
        terms = done
        if len(terms) > MAX_TERMS:
            terms, fits = terms[:MAX_TERMS], False
    return terms, fits


def _groups(shape: Shape, target: Shape) -> list[tuple[tuple[int, int], Shape]]:
    """Runs of axes [start, stop) of `shape` and the sizes of `target` that each becomes."""
    groups = []
    i = j = 0
    while i < len(shape) or j < len(target):
        start, first = i, j
        have = want = 1
        if i < len(shape):
            have, i = shape[i], i + 1
        if j < len(target):
            want, j = target[j], j + 1
        while have != want:
            if have < want:
                have, i = have * shape[i], i + 1
            else:
                want, j = want * target[j], j + 1
        groups.append(((start, i), target[first:j]))
    return groups


def _join(shape: Shape, term: Term, start: int, stop: int) -> tuple[list[Term], bool]:
    """Axes [start, stop) as one; with start == stop, a new axis of size 1."""
    sizes = shape[start:stop]
    if stop - start == 1:
        return [term], True
    position = {d: d if d < start else max(start, d - len(sizes) + 1) for d in range(len(shape))}
    axes, band = term

    def with_axis(axis: Axis, band: Band | None) -> Term:
        return Term((*axes[:start], axis, *axes[stop:]), band)

    inside = [d for d in range(start, stop) if shape[d] > 1]
    if len(inside) <= 1:
        axis = axes[inside[0]] if inside else None
        return [with_axis(axis, shifted(term, position))], True
    row_in = band is not None and start <= band.row < stop
    col_in = band is not None and start <= band.col < stop
    if math.prod(sizes) > MAX_VECTOR and (row_in or col_in or any(axes[start:stop])):
        return [], False
    if band is not None and row_in and col_in:
        local = Term(axes[start:stop], band.on(band.row - start, band.col - start))
        return [with_axis(dense(sizes, local).reshape(-1), None)], True
    if band is not None and col_in:
        return _join_column(shape, term, start, stop, inside)
    axis = None
    if any(a is not None for a in axes[start:stop]):
        axis = dense(sizes, Term(axes[start:stop])).reshape(-1)
    if band is not None and row_in:
        along = [-1 if d == band.row else 1 for d in range(start, stop)]
        low, high = (
            np.broadcast_to(bound.reshape(along), sizes).reshape(-1)
            for bound in (band.low, band.high)
        )
        band = Band(start, position[band.col], low, high)
    else:
        band = shifted(term, position)
    return [with_axis(axis, band)], True


def _join_column(
    shape: Shape, term: Term, start: int, stop: int, inside: list[int]
) -> tuple[list[Term], bool]:
    """`_join` of a band's column axis with others: an interval for each index of those before."""
    axes, band = term
    assert band is not None
    if any(axes[d] is not None for d in inside if d > band.col):
        return [], False
    outer = math.prod(shape[start : band.col])
    inner = math.prod(shape[band.col + 1 : stop])
    if outer > MAX_TERMS:
        return [], False
    width = shape[band.col] * inner
    before = dense(shape[start : band.col], Term(axes[start : band.col])).reshape(-1)
    row = band.row if band.row < start else band.row - (stop - start) + 1
    column = axes[band.col]
    result = []
    for i in np.flatnonzero(before):
        axis = None
        if column is not None:
            axis = np.zeros(outer * width, dtype=bool)
            axis[i * width : (i + 1) * width] = np.repeat(column, inner)
        low, high = band.low * inner + i * width, band.high * inner + i * width
        result.append(Term((*axes[:start], axis, *axes[stop:]), Band(row, start, low, high)))
    return result, True


def _split(shape: Shape, term: Term, dim: int, sizes: Shape) -> tuple[list[Term], bool]:
    """Axis `dim` as axes of the given sizes."""
    real = [n for n in sizes if n > 1]
    if len(real) > 1 and len(sizes) > 1:
        # One axis off the front at a time: first leading ones, then (first, rest).
        lead = next(i for i, n in enumerate(sizes) if n > 1)
        rest = math.prod(sizes[lead + 1 :])
        halves, fits = _split_two(shape, term, dim, sizes[lead], rest)
        result: list[Term] = []
        after = (*shape[:dim], sizes[lead], rest, *shape[dim + 1 :])
        for half in halves:
            parts, whole = _split(after, half, dim + 1, sizes[lead + 1 :])
            fits = fits and whole
            result += parts
        return [_with_ones(t, dim, lead) for t in result], fits
    lead = next((i for i, n in enumerate(sizes) if n > 1), 0)
    axes = term.axes
    position = {
        d: d if d < dim else d + lead if d == dim else d + len(sizes) - 1 for d in range(len(shape))
    }
    middle: list[Axis] = [None] * len(sizes)
    if sizes:
        middle[lead] = axes[dim]
    band = shifted(term, position)
    return [Term((*axes[:dim], *middle, *axes[dim + 1 :]), band)], True


def _with_ones(term: Term, dim: int, number: int) -> Term:
    """The term with axes of size 1 inserted before axis `dim`."""
    if not number:
        return term
    position = {d: d if d < dim else d + number for d in range(len(term.axes))}
    axes = (*term.axes[:dim], *(None,) * number, *term.axes[dim:])
    return Term(axes, shifted(term, position))


def _split_two(shape: Shape, term: Term, dim: int, a: int, b: int) -> tuple[list[Term], bool]:
    """Axis `dim` of size a * b as two axes (a, b)."""
    axes, band = term
    position = {d: d if d <= dim else d + 1 for d in range(len(shape))}

    def with_axes(x: Axis, y: Axis, band: Band | None) -> Term:
        return Term((*axes[:dim], x, y, *axes[dim + 1 :]), band)

    parts: list[tuple[Axis, Axis]] = [(None, None)]
    inner: Band | None = None
    fits = True
    vector = axes[dim]
    if vector is not None:
        parts, inner, fits = _factor(vector.reshape(a, b))
    if band is None or dim not in (band.row, band.col):
        moved = shifted(term, position)
        if inner is not None:
            if moved is not None:
                return [], False
            moved = inner.on(dim, dim + 1)
        return [with_axes(x, y, moved) for x, y in parts], fits
    if inner is not None:
        return [], False
    if band.row == dim:
        low, high = band.low.reshape(a, b), band.high.reshape(a, b)
        col = position[band.col]
        split: list[tuple[int | None, Band]]
        if (low == low[:, :1]).all() and (high == high[:, :1]).all():
            split = [(None, Band(dim, col, low[:, 0], high[:, 0]))]
        elif (low == low[:1]).all() and (high == high[:1]).all():
            split = [(None, Band(dim + 1, col, low[0], high[0]))]
        elif a <= MAX_TERMS:
            split = [(i, Band(dim + 1, col, low[i], high[i])) for i in range(a)]
        else:
            return [], False
    elif a <= _FEW_BLOCKS:
        row = position[band.row]
        split = []
        for i in range(a):
            low, high = (np.clip(bound - i * b, 0, b) for bound in (band.low, band.high))
            split.append((i, Band(row, dim + 1, low, high)))
    else:
        # Whole blocks only; those that an interval begins or ends in are left out.
        low, high = -(-band.low // b), band.high // b
        split, fits = [(None, Band(position[band.row], dim, low, np.maximum(low, high)))], False
    result = []
    for x, y in parts:
        for only, piece in split:
            result.append(with_axes(x if only is None else _and(x, _one(a, only)), y, piece))
    kept = [t for t in result if normal((*shape[:dim], a, b, *shape[dim + 1 :]), t) is not None]
    return kept, fits


def _factor(matrix: np.ndarray) -> tuple[list[tuple[Axis, Axis]], Band | None, bool]:
    """A boolean matrix as products of row and column sets, or as a band (row 0, column 1)."""
    rows, columns = np.asarray(matrix.any(axis=1)), np.asarray(matrix.any(axis=0))
    lengths = matrix.sum(axis=1)
    if lengths.sum() == rows.sum() * columns.sum():
        return [(rows, columns)], None, True
    first = matrix.argmax(axis=1)
    last = matrix.shape[1] - matrix[:, ::-1].argmax(axis=1)
    patterns: dict[bytes, list[int]] = {}
    if intervals := bool((last - first == lengths)[rows].all()):
        low, high = np.where(rows, first, 0), np.where(rows, last, 0)
        if len(set(zip(low.tolist(), high.tolist(), strict=True)) - {(0, 0)}) > 4:
            return [(None, None)], Band(0, 1, low, high), True
    if intervals or matrix.shape[0] <= 2**12:
        for i in np.flatnonzero(rows):
            patterns.setdefault(matrix[i].tobytes(), []).append(int(i))
        if len(patterns) <= MAX_TERMS:
            products = []
            for members in patterns.values():
                chosen = np.zeros(len(rows), dtype=bool)
                chosen[members] = True
                products.append((chosen, matrix[members[0]].copy()))
            return list(products), None, True
    return [], None, False


# ---- Small pieces ---------------------------------------------------------------------------


def _and(a: Axis, b: Axis) -> Axis:
    if a is None or a is b:
        return b
    return a if b is None else a & b


def _same(a: Axis, b: Axis) -> bool:
    return a is b or (a is not None and b is not None and bool((a == b).all()))


def _same_band(a: Band | None, b: Band | None) -> bool:
    if a is b:
        return True
    if a is None or b is None or (a.row, a.col) != (b.row, b.col):
        return False
    return bool((a.low == b.low).all() and (a.high == b.high).all())


def _aligned(shape: Shape, band: Band, like: Band) -> Band | None:
    """The band between the same axes, in the same roles, as another."""
    if (band.row, band.col) == (like.row, like.col):
        return band
    if (band.col, band.row) == (like.row, like.col):
        return band.transposed(shape[band.col])
    return None


def _index(axis: Axis) -> np.ndarray | slice:
    return slice(None) if axis is None else axis


def _interval(size: int, low: int, high: int) -> np.ndarray:
    position = np.arange(size)
    return (position >= low) & (position < high)


def _one(size: int, index: int | Sequence[int]) -> np.ndarray:
    vector = np.zeros(size, dtype=bool)
    vector[index] = True
    return vector
