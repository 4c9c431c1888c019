"""Dependence through indices: gathers read the rows named, scatters write to them.

Both go by the indices' real values. Where those cost too much to know, nothing is demanded of what
is gathered from, and everything that was there counts as overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .context import Context, Need, Rule, Wanted, only, tensors
from .region import Region
from .terms import MAX_VECTOR
from .trace import Node, Value

# ---- Gathers --------------------------------------------------------------------------------


def gathered(
    shape: tuple[int, ...], dims: Sequence[int], indices: Sequence[np.ndarray], region: Region
) -> Region:
    """Elements of a tensor of `shape` that x[..., i0, i1, ..., :] takes for a demanded region.

    Args:
        shape: of the tensor.
        dims: indexed axes; adjacent and ascending.
        indices: an array of indices for each, of a common shape.
        region: demanded part of the result, whose index axes stand where `dims` stood.
    """
    flat, merged = _flat_index(shape, dims, indices)
    return region.untake(dims[0], merged, flat).reshape(shape)


def _flat_index(
    shape: tuple[int, ...], dims: Sequence[int], indices: Sequence[np.ndarray]
) -> tuple[np.ndarray, int]:
    """Indices of adjacent axes as one index of the axes joined, and the joined axis' size."""
    sizes = [shape[d] for d in dims]
    wrapped = [np.where(i < 0, i + n, i) for i, n in zip(indices, sizes, strict=True)]
    if len(sizes) == 1:
        return wrapped[0], sizes[0]
    return np.ravel_multi_index(wrapped, sizes), math.prod(sizes)


def _index_places(
    node: Node, value: Value, region: Region
) -> tuple[list[int], list[Value], Region | None]:
    """Indexed axes, their indices, and the demand with the index axes at the first of them."""
    pairs = [(d, i) for d, i in enumerate(node.args["indices"]) if isinstance(i, Value)]
    dims = [d for d, _ in pairs]
    if dims != list(range(dims[0], dims[0] + len(dims))):
        return dims, [i for _, i in pairs], None
    return dims, [i for _, i in pairs], region


def index(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    value, region = node.args["self"], only(wanted)
    dims, indices, placed = _index_places(node, value, region)
    rank = max(len(i.shape) for i in indices)
    if placed is None:
        yield value, Region.empty(value.shape, exact=False)
        for index in indices:
            yield index, Region.full(index.shape)
        return
    inside = range(dims[0], dims[0] + rank)
    chosen = region.any_over([d for d in range(len(region.shape)) if d not in inside])
    for index in indices:
        yield index, chosen.unbroadcast(index.shape)
    if context.facts.at(node, value).constant:
        yield value, Region.full(value.shape)
        return
    found = [context.indices(node, i) for i in indices]
    known = [f for f in found if f is not None]
    if len(known) < len(found):
        yield value, Region.empty(value.shape, exact=False)
        return
    yield value, gathered(value.shape, dims, np.broadcast_arrays(*known), region)


def select_rows(table: str, index: str, dim: Callable[[Node], int]) -> Rule:
    """index_select and embedding: rows of a table by a tensor of indices."""

    def rule(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
        value, chosen, region = node.args[table], node.args[index], only(wanted)
        axis = dim(node) % len(value.shape)
        rank = len(chosen.shape)
        inside = range(axis, axis + rank)
        picked = region.any_over([d for d in range(len(region.shape)) if d not in inside])
        yield chosen, picked.reshape(chosen.shape)
        if context.facts.at(node, value).constant:
            yield value, Region.full(value.shape)
            return
        found = context.indices(node, chosen)
        if found is None:
            yield value, Region.empty(value.shape, exact=False)
            return
        yield value, gathered(value.shape, [axis], [found], region)

    return rule


def gather(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    value, index, region = node.args["self"], node.args["index"], only(wanted)
    yield index, region
    dim = node.args["dim"] % len(value.shape)
    if value.numel > MAX_VECTOR // 4 or (found := context.indices(node, index)) is None:
        yield value, Region.empty(value.shape, exact=False)
        return
    places = region.mask()
    if places is None:
        yield value, Region.empty(value.shape, exact=False)
        return
    where = list(np.nonzero(places))
    where[dim] = found[places] % value.shape[dim]
    taken = np.zeros(value.shape, dtype=bool)
    taken[tuple(where)] = True
    yield value, Region.of_mask(taken)


# ---- Scatters -------------------------------------------------------------------------------


def written_region(context: Context, node: Node, value: Value) -> Region | None:
    """The elements of `value` that an operation overwrites whatever they were; None if unknown."""
    name = node.plain_name
    if name in ("copy", "fill", "zero", "normal", "uniform", "random", "bernoulli"):
        return Region.full(value.shape)
    if name == "index_put" and not node.args["accumulate"]:
        dims, indices, placed = _index_places(node, value, Region.empty(value.shape))
        found = [context.indices(node, i) for i in indices]
        known = [f for f in found if f is not None]
        if placed is not None and len(known) == len(found):
            arrays = np.broadcast_arrays(*known)
            kept = value.shape[: dims[0]], value.shape[dims[0] + len(dims) :]
            shape = (*kept[0], *arrays[0].shape, *kept[1])
            return gathered(value.shape, dims, arrays, Region.full(shape))
        return None
    if name == "scatter":
        index = context.indices(node, node.args["index"])
        if index is None or value.numel > MAX_VECTOR // 16:
            return None
        dim = node.args["dim"] % max(len(value.shape), 1)
        mask = np.zeros(value.shape, dtype=bool)
        places = np.indices(index.shape, sparse=True)
        mask[(*places[:dim], index % value.shape[dim], *places[dim + 1 :])] = True
        return Region.of_mask(mask)
    if name == "masked_scatter":
        return None
    if name in ("index_copy", "index_fill"):
        found_rows = context.indices(node, node.args["index"])
        if found_rows is not None:
            dim = node.args["dim"] % len(value.shape)
            rows = np.zeros(value.shape[dim], dtype=bool)
            rows[found_rows] = True
            return Region.product(value.shape, {dim: rows})
        return None
    if name == "slice_scatter":
        source, dim = node.args["src"], node.args["dim"] % len(value.shape)
        start, _, step = slice(node.args["start"], node.args["end"], node.args["step"]).indices(
            value.shape[dim]
        )
        return Region.full(source.shape).unslice(dim, value.shape[dim], start, step)
    if name == "select_scatter":
        dim = node.args["dim"] % len(value.shape)
        row = np.zeros(value.shape[dim], dtype=bool)
        row[node.args["index"]] = True
        return Region.product(value.shape, {dim: row})
    return Region.empty(value.shape)


def _kept(context: Context, node: Node, base: Value, region: Region) -> Region:
    """What of a demanded region still comes from the tensor that is written to."""
    overwritten = written_region(context, node, base)
    if overwritten is None or not overwritten.exact:
        return Region.empty(base.shape, exact=False)
    return region.subtract(overwritten)


def scatter(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """Functional and in-place writes to places named by indices."""
    region, base = only(wanted), node.args["self"]
    if not node.written:
        yield base, _kept(context, node, base, region)
    landing = _landing(context, node, base, region)
    for name, value in tensors(node):
        if name != "self":
            part = Region.empty(value.shape, exact=False)
            if node.plain_name == "masked_scatter" and name == "source":
                pass  # how much of the source the mask takes is not followed
            elif region.is_full:
                part = Region.full(value.shape)
            elif landing is not None:
                part = landing.unbroadcast(value.shape)
            yield value, part
    for index in node.args.get("indices") or ():
        if isinstance(index, Value):
            yield index, Region.full(index.shape)


def _landing(context: Context, node: Node, base: Value, region: Region) -> Region | None:
    """Which of the places written to are demanded, in the shape of what is written there."""
    name = node.plain_name
    if name == "index_put":
        dims, indices, placed = _index_places(node, base, region)
        found = [context.indices(node, i) for i in indices]
        known = [f for f in found if f is not None]
        if placed is None or len(known) < len(found):
            return None
        arrays = np.broadcast_arrays(*known)
        before, after = base.shape[: dims[0]], base.shape[dims[0] + len(dims) :]
        flat, merged = _flat_index(base.shape, dims, arrays)
        taken = region.reshape((*before, merged, *after)).take(dims[0], flat.reshape(-1))
        return taken.reshape((*before, *arrays[0].shape, *after))
    if name in ("scatter", "scatter_add"):
        places = region.mask()
        dim = node.args["dim"] % max(len(base.shape), 1)
        index = context.indices(node, node.args["index"])
        if places is None or index is None:
            return None
        for d, size in enumerate(index.shape):
            if d != dim and size < places.shape[d]:
                places = places.take(range(size), axis=d)
        return Region.of_mask(np.take_along_axis(places, index % base.shape[dim], axis=dim))
    return None


def rows_to_rows(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """index_add and index_copy: row r of the source goes to row index[r]."""
    region, base = only(wanted), node.args["self"]
    index, source = node.args["index"], node.args["source"]
    dim = node.args["dim"] % max(len(base.shape), 1)
    if not node.written:
        yield base, _kept(context, node, base, region)
    if region.is_full:
        yield source, Region.full(source.shape)
        yield index, Region.full(index.shape)
        return
    found = context.indices(node, index)
    if found is None:
        yield source, Region.empty(source.shape, exact=False)
        yield index, Region.empty(index.shape, exact=False)
        return
    landing = region.take(dim, found % base.shape[dim])
    yield source, landing
    yield index, landing.any_over([d for d in range(len(landing.shape)) if d != dim])


def slice_scatter(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    region, base, source = only(wanted), node.args["self"], node.args["src"]
    yield base, _kept(context, node, base, region)
    dim = node.args["dim"] % len(base.shape)
    if node.name == "select_scatter":
        at = node.args["index"] % base.shape[dim]
        yield source, region.slice(dim, at, at + 1).reshape(source.shape)
    else:
        start, stop, step = slice(node.args["start"], node.args["end"], node.args["step"]).indices(
            base.shape[dim]
        )
        yield source, region.slice(dim, start, stop, step)
