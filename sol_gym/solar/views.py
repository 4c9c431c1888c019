"""View operations as maps between index spaces.

A view costs nothing: it only says which element of its source each of its elements is. A `Step` is
one view operation; it carries regions both ways and replays the operation on real values. Adding a
view operation is adding an entry to `VIEWS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from .region import Region
from .terms import Shape

Layout = Literal["reshape", "expand"] | tuple[int, ...]
"""The same elements in row-major order, repeated along axes of size 1, or axes in another order."""


@dataclass(frozen=True, eq=False)
class Step:
    """One view of a source tensor.

    Opaque steps (strided views without a rule here) let no region through: reading through one
    demands nothing, which can only make a bound smaller.
    """

    source_shape: Shape
    shape: Shape
    replay: Callable[[Tensor], Tensor]
    """Makes the same view of another tensor with the source's shape."""
    pull: Callable[[Region], Region] | None
    """Region of the source -> the elements of the view that are in it."""
    push: Callable[[Region], Region] | None
    """Region of the view -> the elements of the source that it is."""
    layout: Layout | None = None
    """How the axes move, for views that keep all elements or repeat them."""

    @property
    def opaque(self) -> bool:
        """Whether regions cannot be carried through."""
        return self.pull is None or self.push is None

    def from_source(self, region: Region) -> Region:
        """The elements of the view that are in a region of its source."""
        return self.pull(region) if self.pull else Region.empty(self.shape, exact=False)

    def to_source(self, region: Region) -> Region:
        """The elements of the source that a region of the view is."""
        return self.push(region) if self.push else Region.empty(self.source_shape, exact=False)


Maps = tuple[Callable[[Region], Region], Callable[[Region], Region]]
"""From the source to the view, and back."""
Rule = Callable[[Shape, Shape, tuple[Any, ...]], Maps | None]
"""(source shape, view's shape, arguments after the source) -> its maps."""


def _reshape(source: Shape, shape: Shape, args: tuple[Any, ...]) -> Maps:
    return lambda r: r.reshape(shape), lambda r: r.reshape(source)


def _permute(order: Sequence[int]) -> Maps:
    inverse = sorted(range(len(order)), key=lambda i: order[i])
    return lambda r: r.permute(order), lambda r: r.permute(inverse)


def _permute_rule(source: Shape, shape: Shape, args: tuple[Any, ...]) -> Maps:
    return _permute([d % len(source) for d in args[0]])


def _transpose_rule(source: Shape, shape: Shape, args: tuple[Any, ...]) -> Maps:
    order = list(range(len(source)))
    if order:
        a, b = (d % len(source) for d in args[:2])
        order[a], order[b] = order[b], order[a]
    return _permute(order)


def _t_rule(source: Shape, shape: Shape, args: tuple[Any, ...]) -> Maps:
    return _permute(list(range(len(source)))[::-1])


def _expand_rule(source: Shape, shape: Shape, args: tuple[Any, ...]) -> Maps:
    return lambda r: r.broadcast(shape), lambda r: r.unbroadcast(source)


def _slice(source: Shape, dim: int, start: int, stop: int, step: int = 1) -> Maps:
    return (
        lambda r: r.slice(dim, start, stop, step),
        lambda r: r.unslice(dim, source[dim], start, step),
    )


def _slice_rule(source: Shape, shape: Shape, args: tuple[Any, ...]) -> Maps:
    given = (*args, *(0, None, None, 1)[len(args) :])
    dim = given[0] % len(source)
    start, stop, step = slice(*given[1:]).indices(source[dim])
    return _slice(source, dim, start, max(start, stop), step)


def _select_rule(source: Shape, shape: Shape, args: tuple[Any, ...]) -> Maps:
    dim, index = args[0] % len(source), args[1]
    index %= source[dim]
    pull, push = _slice(source, dim, index, index + 1)
    one = (*source[:dim], 1, *source[dim + 1 :])
    return lambda r: pull(r).reshape(shape), lambda r: push(r.reshape(one))


def _complex_rule(source: Shape, shape: Shape, args: tuple[Any, ...]) -> Maps:
    """view_as_real: a last axis of size 2, both parts of an element together."""
    return (
        lambda r: r.reshape((*source, 1)).broadcast(shape),
        lambda r: r.any_over([len(shape) - 1]),
    )


def _bitcast_rule(source: Shape, shape: Shape, args: tuple[Any, ...]) -> Maps | None:
    """view(dtype): same shape, or elements of another size along the last axis, all together."""
    if source == shape:
        return _reshape(source, shape, args)
    last = len(source) - 1
    narrow, wide = sorted((source, shape), key=lambda s: s[-1])
    grouped = (*narrow, wide[-1] // narrow[-1])

    def widen(r: Region) -> Region:
        return r.reshape((*narrow, 1)).broadcast(grouped).reshape(wide)

    def narrow_down(r: Region) -> Region:
        return r.reshape(grouped).any_over([last + 1])

    return (widen, narrow_down) if source == narrow else (narrow_down, widen)


def _unfold_rule(source: Shape, shape: Shape, args: tuple[Any, ...]) -> Maps | None:
    """Windows along an axis, overlapping or not; the place in the window is a new last axis."""
    if not source:
        return None
    dim, size, step = args[0] % len(source), args[1], args[2]
    index = np.arange(shape[dim])[:, None] * step + np.arange(size)
    windows = (*source[:dim], shape[dim], size, *source[dim + 1 :])
    order = [d for d in range(len(windows)) if d != dim + 1] + [dim + 1]
    inverse = sorted(range(len(order)), key=lambda i: order[i])
    return (
        lambda r: r.take(dim, index.reshape(-1)).reshape(windows).permute(order),
        lambda r: r.permute(inverse).untake(dim, source[dim], index),
    )


VIEWS: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "view",
            "_unsafe_view",
            "_reshape_alias",
            "reshape",
            "squeeze",
            "unsqueeze",
            "alias",
            "detach",
            "lift_fresh",
            "_conj",
            "_neg_view",
        ),
        _reshape,
    ),
    "permute": _permute_rule,
    "transpose": _transpose_rule,
    "t": _t_rule,
    "expand": _expand_rule,
    "slice": _slice_rule,
    "select": _select_rule,
    "unfold": _unfold_rule,
    "view_as_real": _complex_rule,
    "view.dtype": _bitcast_rule,
}
"""View operations by name (with the overload's name where it matters)."""


def make_step(
    name: str,
    overload: str,
    args: tuple[Any, ...],
    source: Shape,
    shape: Shape,
    position: int,
    replay: Callable[[Tensor], Tensor],
) -> Step:
    """The step of one output of a view operation.

    Args:
        name: the operation, e.g. `slice`.
        overload: its overload, e.g. `Tensor`.
        args: its arguments after the source, by position.
        source: shape of the source.
        shape: shape of the view.
        position: which of the outputs, for operations that cut a tensor in parts.
        replay: makes the same view of another tensor.
    """
    maps: Maps | None
    if name in _CUTS:
        dim, start, length = _part(name, args, source, shape, position)
        if name == "unbind":
            maps = _select_rule(source, shape, (dim, start))
            return Step(source, shape, lambda t: t.select(dim, start), *maps)
        maps = _slice(source, dim, start, start + length)
        return Step(source, shape, lambda t: t.narrow(dim, start, length), *maps)
    rule = VIEWS.get(f"{name}.{overload}", VIEWS.get(name))
    maps = rule(source, shape, args) if rule else None
    pull, push = maps or (None, None)
    return Step(source, shape, replay, pull, push, _layout(name, rule, source, args))


def _layout(name: str, rule: Rule | None, source: Shape, args: tuple[Any, ...]) -> Layout | None:
    if rule is _reshape and name not in ("_conj", "_neg_view"):
        return "reshape"
    rank = len(source)
    match name:
        case "expand":
            return "expand"
        case "permute":
            return tuple(d % rank for d in args[0])
        case "transpose" if rank:
            a, b = (d % rank for d in args[:2])
            return tuple({a: b, b: a}.get(d, d) for d in range(rank))
        case "t":
            return tuple(range(rank))[::-1]
    return None


_CUTS = frozenset(("split", "split_with_sizes", "unsafe_split", "unbind"))
"""Operations that cut a tensor into several views."""


def _part(
    name: str, args: tuple[Any, ...], source: Shape, shape: Shape, position: int
) -> tuple[int, int, int]:
    """Axis, start and length of one of the parts that a tensor is cut into."""
    if name == "unbind":
        return (args[0] if args else 0) % len(source), position, 1
    dim = (args[1] if len(args) > 1 else 0) % len(source)
    sizes = args[0]
    start = position * sizes if isinstance(sizes, int) else sum(sizes[:position])
    return dim, start, shape[dim]
