"""Traffic as a function of on-chip capacity: what a chip that is too small has to read again.

Compulsory traffic assumes that whatever was read stays. With room for S words, a contraction of V
multiply-adds whose operands lie in memory has to move at least 2 V / sqrt(S) - 2 S words (Hong and
Kung 1981 for the order; Smith, Lowery, Langou and van de Geijn 2019 for the constant). The argument
counts how many multiply-adds S words can take part in, so it also holds for masked and batched
products and for several products together; it counts the usual algorithm, like `work`.

`search` goes the other way: it tries all tilings and loop orders of any einsum-like nest and
returns the least traffic found, which is an upper bound of the truth. Between the two lies what a
kernel can reach.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..device import Device


def on_chip_bytes(device: Device) -> int:
    """Everything on the chip that can hold an operand: last-level cache, shared memory, registers.

    All of it counts, so that the bound cannot be beaten by a kernel that uses it all.
    """
    per_sm = device.shared_bytes_per_sm + device.register_bytes_per_sm
    return device.l2_bytes + device.sm_count * per_sm


def least_words(macs: float, capacity_words: float) -> float:
    """Least number of words moved by contractions of `macs` multiply-adds, by the closed form."""
    if capacity_words <= 0:
        raise ValueError(f"capacity is {capacity_words} words, expected more than 0")
    return max(0.0, 2.0 * macs / math.sqrt(capacity_words) - 2.0 * capacity_words)


def least_bytes(macs: float, width: int, capacity_bytes: float) -> float:
    """`least_words` in bytes, for operands of `width` bytes an element (the narrowest of them)."""
    return width * least_words(macs, capacity_bytes / width)


@dataclass(frozen=True)
class Operand:
    """A tensor of a loop nest.

    Example:
        >>> Operand("A", "mk").axes
        'mk'
    """

    name: str
    axes: str
    """A letter for each axis."""
    width: int = 2
    """Bytes an element."""
    output: bool = False
    """Whether it is written; partial sums that leave the chip are written and read again."""
    on_chip: bool = False
    """Whether it is an intermediate that never leaves: it takes room and moves nothing."""


@dataclass(frozen=True)
class Nest:
    """A loop nest over axes, each of which is tiled once."""

    sizes: dict[str, int]
    operands: tuple[Operand, ...]
    whole: str = ""
    """Axes that are not tiled, because the tile needs all of them (the head size of attention)."""


@dataclass
class Schedules:
    """All schedules of a nest that were tried, as room needed and traffic caused."""

    footprint: np.ndarray
    """Bytes on the chip, ascending."""
    traffic: np.ndarray
    """Least bytes moved by any schedule with at most that footprint."""
    best: list[tuple[dict[str, int], str]] = field(default_factory=list)
    """Tile sizes and loop order (outermost first) behind each entry."""

    def at(self, capacity_bytes: float) -> float:
        """Least traffic found for a capacity; infinite if not even the smallest tiles fit."""
        place = int(np.searchsorted(self.footprint, capacity_bytes, side="right")) - 1
        return float(self.traffic[place]) if place >= 0 else math.inf

    def schedule(self, capacity_bytes: float) -> tuple[dict[str, int], str] | None:
        """The schedule behind `at`."""
        place = int(np.searchsorted(self.footprint, capacity_bytes, side="right")) - 1
        return self.best[place] if place >= 0 else None


def search(nest: Nest) -> Schedules:
    """Try all tilings (powers of two and whole axes) and all loop orders of a nest.

    An operand's tile stays while the loops inside the innermost one that moves it run; it is loaded
    once for each iteration of the others.

    Example:
        >>> gemm = Nest({"m": 512, "n": 512, "k": 512},
        ...             (Operand("A", "mk"), Operand("B", "kn"), Operand("C", "mn", output=True)))
        >>> search(gemm).at(2**30) == 3 * 512 * 512 * 2
        True
    """
    axes = [a for a in nest.sizes if a not in nest.whole]
    choices = [_tiles(nest.sizes[a]) for a in axes]
    grids = dict(zip(axes, (g.ravel() for g in np.meshgrid(*choices, indexing="ij")), strict=True))
    count = len(next(iter(grids.values()))) if grids else 1
    for a in nest.whole:
        grids[a] = np.full(count, nest.sizes[a])
    trips = {a: -(-nest.sizes[a] // grids[a]) for a in nest.sizes}
    footprint = np.zeros(count)
    for operand in nest.operands:
        footprint += operand.width * _product(count, [grids[a] for a in operand.axes])
    orders = list(itertools.permutations(axes))
    costs = np.empty((len(orders), count))
    for i, order in enumerate(orders):
        costs[i] = sum(_moved(o, nest, order, trips, count) for o in nest.operands)
    chosen = costs.argmin(axis=0)
    traffic = costs[chosen, np.arange(count)]
    rank = np.lexsort((traffic, footprint))
    least = np.minimum.accumulate(traffic[rank])
    keep = np.flatnonzero(np.r_[True, np.diff(least) < 0])
    best = []
    for place in rank[keep]:
        tiles = {a: int(grids[a][place]) for a in nest.sizes}
        best.append((tiles, "".join(orders[chosen[place]])))
    return Schedules(footprint[rank][keep], least[keep], best)


def _tiles(size: int) -> np.ndarray:
    powers = [2**i for i in range(size.bit_length()) if 2**i < size]
    return np.array([*powers, size], dtype=np.int64)


def _product(count: int, factors: Sequence[np.ndarray]) -> np.ndarray:
    result = np.ones(count)
    for factor in factors:
        result = result * factor
    return result


def _moved(
    operand: Operand, nest: Nest, order: tuple[str, ...], trips: dict[str, np.ndarray], count: int
) -> np.ndarray:
    """Bytes of one operand that move, for one loop order and all tilings."""
    if operand.on_chip:
        return np.zeros(count)
    size = operand.width * math.prod(nest.sizes[a] for a in operand.axes)
    again = np.ones(count)
    for i, axis in enumerate(order):
        # A loop over another axis reloads the tile if a loop inside it moves the tile.
        if axis in operand.axes:
            continue
        inner = [trips[a] for a in order[i + 1 :] if a in operand.axes]
        moves = _product(count, inner) > 1
        again = again * np.where(moves, trips[axis], 1)
    return size * (2 * again - 1 if operand.output else again)


def matmul(m: int, n: int, k: int, width: int = 2, batch: int = 1) -> Nest:
    """The nest of a (batched) matrix product."""
    lead = "b" if batch > 1 else ""
    sizes = ({"b": batch} if batch > 1 else {}) | {"m": m, "n": n, "k": k}
    return Nest(
        sizes,
        (
            Operand("A", f"{lead}mk", width),
            Operand("B", f"{lead}kn", width),
            Operand("C", f"{lead}mn", width, output=True),
        ),
    )


def attention(queries: int, keys: int, head: int, width: int = 2) -> Nest:
    """The nest of one head of fused attention, whose scores stay on the chip.

    Its traffic falls as queries * keys * head^2 / S (Saha and Ye 2024).
    """
    return Nest(
        {"q": queries, "k": keys, "d": head},
        (
            Operand("Q", "qd", width),
            Operand("K", "kd", width),
            Operand("V", "kd", width),
            Operand("scores", "qk", width, on_chip=True),
            Operand("O", "qd", width, output=True),
        ),
        whole="d",
    )


def capacities(largest: int = 2**30) -> list[int]:
    """Capacities that a curve is drawn at: half powers of two from 16 KiB on."""
    return [int(2 ** (i / 2)) for i in range(28, 2 * largest.bit_length() - 1)]
