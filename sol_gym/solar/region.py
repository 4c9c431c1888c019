"""Sets of elements of a tensor, compact enough for published sizes and exact where it matters.

Which elements of a tensor are demanded, and which may be other than a known constant, decides what
a bound counts. The tensors have up to 2^34 elements, so a `Region` never lists them: it is a union
of disjoint terms, each a product of index sets in which one pair of axes may be coupled by a band.
Slices, selected rows and padding are products; causal masks, windows and ragged lengths are bands.
A small tensor's region that is neither (the positions an expert was chosen at) is kept as bits.

Where an operation leaves this family, the result is a subset of the true set and says so
(`exact` is False). Regions say what must be read and computed, so a subset can only make a bound
smaller. What is taken away by `subtract` must therefore be exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from . import terms as _terms
from .terms import MAX_TERMS, MAX_VECTOR, Band, Shape, Term

_FEW_TERMS = 8
"""Regions of small tensors with more terms are kept as bits."""
_SMALL = 2**22
"""Elements of a small tensor."""


@dataclass(frozen=True, eq=False)
class Region:
    """A set of index tuples of a tensor of `shape`: a union of disjoint terms, or bits.

    Example:
        >>> lower = Region.of_band((1, 4, 4), row=1, col=2, low=[0] * 4, high=[1, 2, 3, 4])
        >>> lower.count()
        10
        >>> lower.slice(1, 0, 2).count()
        3
    """

    shape: Shape
    terms: tuple[Term, ...]
    exact: bool = True
    """False if this is only known to be a subset of the true set."""
    bits: np.ndarray | None = None
    """The set as a boolean array, instead of terms."""

    # ---- making ------------------------------------------------------------------------------

    @staticmethod
    def full(shape: Sequence[int]) -> Region:
        """All elements."""
        return _full(tuple(shape))

    @staticmethod
    def empty(shape: Sequence[int], *, exact: bool = True) -> Region:
        """No element."""
        return Region(tuple(shape), (), exact)

    @staticmethod
    def product(shape: Sequence[int], axes: dict[int, np.ndarray]) -> Region:
        """The product of the index sets given, as boolean vectors; axes not named are whole."""
        vectors = tuple(axes.get(d) for d in range(len(shape)))
        return _build(tuple(shape), [Term(vectors)])

    @staticmethod
    def of_band(shape: Sequence[int], *, row: int, col: int, low: object, high: object) -> Region:
        """Intervals [low[r], high[r]) of axis `col` for each index r of axis `row`."""
        size = shape[col]
        lows = np.clip(np.asarray(low, dtype=np.int64), 0, size)
        highs = np.clip(np.asarray(high, dtype=np.int64), lows, size)
        return _build(tuple(shape), [Term((None,) * len(shape), Band(row, col, lows, highs))])

    @staticmethod
    def of_mask(mask: np.ndarray) -> Region:
        """The true elements of a boolean array."""
        if mask.all():
            return Region.full(mask.shape)
        flat = Region.product((mask.size,), {0: mask.reshape(-1)})
        return flat.reshape(mask.shape)

    # ---- asking ------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self.terms) or self.bits is not None

    @cached_property
    def is_full(self) -> bool:
        """Whether all elements are known to belong."""
        return any(t.band is None and all(a is None for a in t.axes) for t in self.terms)

    @property
    def coupled(self) -> bool:
        """Whether axes depend on each other, as in a triangle; not in slices and selected rows."""
        return self.bits is not None or any(t.band is not None for t in self.terms)

    def count(self) -> int:
        """Number of elements."""
        if self.bits is not None:
            return int(self.bits.sum())
        return sum(_terms.count(self.shape, term) for term in self.terms)

    def mask(self) -> np.ndarray | None:
        """The region as a boolean array, or None if that would be too large."""
        if self.bits is not None:
            return self.bits
        if math.prod(self.shape) > MAX_VECTOR:
            return None
        result = np.zeros(self.shape, dtype=bool)
        for term in self.terms:
            result |= _terms.dense(self.shape, term)
        return result

    # ---- sets --------------------------------------------------------------------------------

    def intersect(self, other: Region) -> Region:
        """Elements in both."""
        if self is other or self.is_full:
            return other
        if other.is_full:
            return self
        if (pair := self._as_bits(other)) is not None:
            return _of_bits(pair[0] & pair[1], self.exact and other.exact)
        pairs = [_terms.intersect(self.shape, a, b) for a in self.terms for b in other.terms]
        fits = all(fits for _, fits in pairs)
        if not fits and (pair := self._as_bits(other, force=True)) is not None:
            return _of_bits(pair[0] & pair[1], self.exact and other.exact)
        exact = self.exact and other.exact and fits
        return _capped(self.shape, [term for term, _ in pairs if term is not None], exact)

    def subtract(self, other: Region) -> Region:
        """Elements of this region that are not in `other`, which must be exact."""
        if not other or not self:
            return self
        if self is other or other.is_full:
            return Region.empty(self.shape, exact=self.exact)
        if (pair := self._as_bits(other)) is not None:
            return _of_bits(pair[0] & ~pair[1], self.exact)
        terms, fits = list(self.terms), True
        for b in other.terms:
            pieces = [_terms.subtract(self.shape, a, b) for a in terms]
            terms = [term for piece, _ in pieces for term in piece]
            fits = fits and all(whole for _, whole in pieces)
        if not fits and (pair := self._as_bits(other, force=True)) is not None:
            return _of_bits(pair[0] & ~pair[1], self.exact)
        return _capped(self.shape, terms, self.exact and fits)

    def union(self, other: Region) -> Region:
        """Elements in either."""
        if self is other or self.is_full:
            return self
        if other.is_full:
            return other
        if not other and other.exact:
            return self
        if not self and self.exact:
            return other
        if len(self.terms) == 1 and len(other.terms) == 1:
            joined = _terms.joined(self.shape, self.terms[0], other.terms[0])
            if joined is not None:
                return Region(self.shape, (joined,), self.exact and other.exact)
        if (pair := self._as_bits(other)) is not None:
            return _of_bits(pair[0] | pair[1], self.exact and other.exact)
        fresh = other.subtract(self)
        if fresh.bits is not None:
            mask = self.mask()
            assert mask is not None
            return _of_bits(mask | fresh.bits, self.exact and fresh.exact)
        terms = list(self.terms)
        for term in fresh.terms:
            _insert(terms, term)
        return _capped(self.shape, terms, self.exact and other.exact and fresh.exact)

    def _as_bits(
        self, other: Region, *, force: bool = False
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Both as boolean arrays, if either is one already (or `force`, for small tensors)."""
        already = self.bits is not None or other.bits is not None
        if not already and (not force or math.prod(self.shape) > _SMALL):
            return None
        mine, others = self.mask(), other.mask()
        assert mine is not None and others is not None
        return mine, others

    # ---- axes --------------------------------------------------------------------------------

    def permute(self, order: Sequence[int]) -> Region:
        """Axes in another order: axis i of the result is axis order[i] of this."""
        order = [d % len(self.shape) for d in order]
        if self.is_full:
            return _whole(tuple(self.shape[d] for d in order), self)
        if self.bits is not None:
            return _of_bits(self.bits.transpose(order), self.exact)
        position = {d: i for i, d in enumerate(order)}
        return self._map(
            tuple(self.shape[d] for d in order),
            lambda t: [Term(tuple(t.axes[d] for d in order), _terms.shifted(t, position))],
        )

    def any_over(self, dims: Iterable[int], *, keep: bool = False) -> Region:
        """Projection: what belongs for some index of `dims`; with `keep` they stay, of size 1."""
        gone = sorted({d % len(self.shape) for d in dims}, reverse=True) if self.shape else []
        if not gone:
            return self
        if self.is_full:
            sizes = [(1 if i in gone else n) for i, n in enumerate(self.shape)]
            return _whole(tuple(n for i, n in enumerate(sizes) if keep or i not in gone), self)
        result = self
        if self.bits is not None:
            return _of_bits(np.any(self.bits, axis=tuple(gone), keepdims=keep), self.exact)
        for d in gone:
            shape = tuple(1 if i == d else n for i, n in enumerate(result.shape))
            collected = Region.empty(shape, exact=result.exact)
            for term in result.terms:
                one = _build(shape, [_terms.project(result.shape, term, d)])
                collected = collected.union(one)
            result = collected
        return (
            result
            if keep
            else result.reshape([n for i, n in enumerate(self.shape) if i not in gone])
        )

    def broadcast(self, shape: Sequence[int]) -> Region:
        """This region of a tensor after the tensor's expansion to `shape`."""
        shape = tuple(shape)
        if self.is_full:
            return _whole(shape, self)
        if self.bits is not None:
            if math.prod(shape) <= _SMALL:
                return _of_bits(np.broadcast_to(self.bits, shape), self.exact)
            return self.in_terms().broadcast(shape)
        lead = len(shape) - len(self.shape)
        position = {d: d + lead for d in range(len(self.shape))}
        # An axis of size 1 has no index set and no band, so its terms fit any size.
        return self._map(
            shape, lambda t: [Term((None,) * lead + t.axes, _terms.shifted(t, position))]
        )

    def unbroadcast(self, shape: Sequence[int]) -> Region:
        """What this region of an expansion takes of the tensor of `shape` that was expanded."""
        shape = tuple(shape)
        if shape == self.shape:
            return self
        result = self.any_over(range(len(self.shape) - len(shape)))
        grown = [i for i, n in enumerate(shape) if n == 1 and result.shape[i] != 1]
        return result.any_over(grown, keep=True)

    def slice(self, dim: int, start: int, stop: int, step: int = 1) -> Region:
        """The region within x[start:stop:step] along an axis."""
        if self.bits is not None:
            cutting = (slice(None),) * dim + (slice(start, stop, step),)
            return _of_bits(self.bits[cutting], self.exact)
        length = len(range(start, stop, step))
        shape = tuple(length if i == dim else n for i, n in enumerate(self.shape))
        if self.is_full:
            return _whole(shape, self)

        def cut(t: Term) -> list[Term]:
            axes, band = list(t.axes), t.band
            vector = axes[dim]
            axes[dim] = None if vector is None else vector[start:stop:step]
            if band and band.row == dim:
                band = Band(dim, band.col, band.low[start:stop:step], band.high[start:stop:step])
            elif band and band.col == dim:
                low, high = (-((start - bound) // step) for bound in (band.low, band.high))
                band = Band(band.row, dim, np.clip(low, 0, length), np.clip(high, 0, length))
            return [Term(tuple(axes), band)]

        return self._map(shape, cut)

    def unslice(self, dim: int, size: int, start: int, step: int = 1) -> Region:
        """Reverse of `slice`: the region on an axis of `size`, at start, start + step, ..."""
        shape = tuple(size if i == dim else n for i, n in enumerate(self.shape))
        length = self.shape[dim]
        if (length, start) == (size, 0):
            return self
        chosen = slice(start, start + (length - 1) * step + 1, step)
        if self.bits is not None:
            if math.prod(shape) > MAX_VECTOR:
                return self.in_terms().unslice(dim, size, start, step)
            placed = np.zeros(shape, dtype=bool)
            placed[(slice(None),) * dim + (chosen,)] = self.bits
            return _of_bits(placed, self.exact)
        if size > MAX_VECTOR:
            return Region.empty(shape, exact=not self)

        def place(t: Term) -> list[Term]:
            axes, band = list(t.axes), t.band
            vector = np.zeros(size, dtype=bool)
            vector[chosen] = True if axes[dim] is None else axes[dim]
            axes[dim] = vector
            if band and band.row == dim:
                low, high = np.zeros(size, np.int64), np.zeros(size, np.int64)
                low[chosen], high[chosen] = band.low, band.high
                band = Band(dim, band.col, low, high)
            elif band and band.col == dim:
                low = band.low * step + start
                high = np.where(band.high > band.low, (band.high - 1) * step + start + 1, low)
                band = Band(band.row, dim, np.clip(low, 0, size), np.clip(high, 0, size))
            return [Term(tuple(axes), band)]

        return self._map(shape, place)

    def take(self, dim: int, index: np.ndarray) -> Region:
        """The region within x.index_select(dim, index), for a vector of non-negative indices."""
        if self.bits is not None:
            return _of_bits(self.bits.take(index, axis=dim), self.exact)
        shape = tuple(len(index) if i == dim else n for i, n in enumerate(self.shape))

        def pick(t: Term) -> list[Term]:
            axes, band = list(t.axes), t.band
            vector = axes[dim]
            axes[dim] = None if vector is None else vector[index]
            if band and band.col == dim:
                return []  # the interval does not stay one
            if band and band.row == dim:
                band = Band(dim, band.col, band.low[index], band.high[index])
            return [Term(tuple(axes), band)]

        lost = any(t.band is not None and t.band.col == dim for t in self.terms)
        result = self._map(shape, pick)
        return Region(shape, result.terms, exact=False) if lost else result

    def untake(self, dim: int, size: int, index: np.ndarray) -> Region:
        """Reverse of `take`: which of an axis of `size` the region of x[..., index, ...] takes.

        Args:
            dim: the indexed axis; in this region the axes of `index` stand in its place.
            size: its size.
            index: non-negative indices, of any rank.
        """
        inside = range(dim, dim + index.ndim)
        shape = (*self.shape[:dim], size, *self.shape[dim + index.ndim :])
        if size > MAX_VECTOR:
            return Region.empty(shape, exact=not self)
        if self.is_full and self.exact:
            rows = np.zeros(size, dtype=bool)
            rows[index.reshape(-1)] = True
            return Region.product(shape, {dim: rows})
        result = Region.empty(shape, exact=self.exact)
        region = self.in_terms()
        outside = [d for d in range(len(self.shape)) if d not in inside]
        for term in region.terms:
            band = term.band
            if band is not None and (band.row in inside) != (band.col in inside):
                return Region.empty(shape, exact=False)
            part = Region(self.shape, (term,), region.exact)
            chosen = part.any_over(outside).mask()
            if chosen is None:
                return Region.empty(shape, exact=False)
            rows = np.zeros(size, dtype=bool)
            rows[index[chosen]] = True
            rest = part.any_over(inside)
            whole = rest.reshape((*rest.shape[:dim], 1, *rest.shape[dim:])).broadcast(shape)
            result = result.union(whole.intersect(Region.product(shape, {dim: rows})))
        return result

    def reshape(self, shape: Sequence[int]) -> Region:
        """The same elements in row-major order under another shape."""
        shape = tuple(shape)
        if shape == self.shape:
            return self
        if self.bits is not None:
            return _of_bits(self.bits.reshape(shape), self.exact)
        if not self.terms:
            return Region(shape, (), self.exact)
        if self.is_full:
            return _whole(shape, self)
        pieces = [_terms.reshape(self.shape, term, shape) for term in self.terms]
        fits = all(whole for _, whole in pieces)
        if not fits and math.prod(shape) <= _SMALL:
            mask = self.mask()
            assert mask is not None
            return _of_bits(mask.reshape(shape), self.exact)
        return _build(shape, [term for piece, _ in pieces for term in piece], self.exact and fits)

    def in_terms(self) -> Region:
        """The same region without bits, as far as a few terms can say it."""
        if self.bits is None:
            return self
        flat = self.bits.reshape(-1)
        made, fits = _terms.reshape((flat.size,), Term((flat,)), self.shape)
        return _build(self.shape, made, self.exact and fits, bits=False)

    def _map(self, shape: Shape, change: Callable[[Term], list[Term]]) -> Region:
        """The region of the terms `change` makes, which must leave distinct elements distinct."""
        return _build(shape, [term for t in self.terms for term in change(t)], self.exact)


def describe(region: Region) -> str:
    """A region in words: how much of the tensor, and which part where that is short to say."""
    whole = math.prod(region.shape)
    found = region.count()
    at_least = "" if region.exact else "at least "
    if not found:
        return f"{at_least}nothing"
    if region.is_full:
        return "all"
    parts = []
    if len(region.terms) == 1:
        term = region.terms[0]
        for d, axis in enumerate(term.axes):
            if axis is not None:
                places = axis.nonzero()[0]
                first, last = int(places[0]), int(places[-1])
                run = f" ({first}..{last})" if last - first + 1 == len(places) else ""
                parts.append(f"{len(places)} of {region.shape[d]} along axis {d}{run}")
        if term.band is not None:
            parts.append(f"a band of axes {term.band.row} and {term.band.col}")
    else:
        kind = "coupled pieces" if region.coupled else "pieces"
        parts.append(f"{len(region.terms)} {kind}" if region.terms else "scattered elements")
    return f"{at_least}{found:,} of {whole:,} elements: {', '.join(parts)}"


@lru_cache(maxsize=4096)
def _full(shape: Shape) -> Region:
    return Region(shape, () if 0 in shape else (Term((None,) * len(shape)),))


def _whole(shape: Shape, like: Region) -> Region:
    """All elements of a shape, as far as `like` is all of its own."""
    return _full(shape) if like.exact else Region(shape, _full(shape).terms, False)


def _build(shape: Shape, terms: Iterable[Term], exact: bool = True, *, bits: bool = True) -> Region:
    """A region of disjoint terms that are not yet normalised."""
    normal = [_terms.normal(shape, term) for term in terms]
    return _capped(shape, [term for term in normal if term is not None], exact, bits=bits)


def _of_bits(mask: np.ndarray, exact: bool) -> Region:
    """A region of a boolean array; in terms where they are trivial."""
    found = np.count_nonzero(mask)
    if found in (0, mask.size):
        whole = Region.full(mask.shape) if found else Region.empty(mask.shape)
        return Region(whole.shape, whole.terms, exact)
    if sum(n > 1 for n in mask.shape) <= 1:
        made, _ = _terms.reshape((mask.size,), Term((mask.reshape(-1),)), mask.shape)
        return Region(mask.shape, tuple(made), exact)
    return Region(mask.shape, (), exact, mask)


def _insert(terms: list[Term], term: Term) -> None:
    """Add a term disjoint from all, as part of one of them where it fits."""
    for i, other in enumerate(terms):
        if (joined := _terms.merged(other, term)) is not None:
            del terms[i]
            _insert(terms, joined)
            return
    terms.append(term)


def _capped(shape: Shape, terms: list[Term], exact: bool, *, bits: bool = True) -> Region:
    if bits and len(terms) > _FEW_TERMS and math.prod(shape) <= _SMALL:
        mask = np.zeros(shape, dtype=bool)
        for term in terms:
            mask |= _terms.dense(shape, term)
        return _of_bits(mask, exact)
    if len(terms) > 1:
        joined: list[Term] = []
        for term in terms:
            _insert(joined, term)
        terms = joined
    normal = [_terms.normal(shape, term) for term in terms]
    terms = [term for term in normal if term is not None]
    if len(terms) > MAX_TERMS:
        terms.sort(key=lambda term: _terms.count(shape, term), reverse=True)
        terms, exact = terms[:MAX_TERMS], False
    return Region(shape, tuple(terms), exact)
