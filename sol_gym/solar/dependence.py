"""Which elements of its operands an operation needs for given elements of its result.

The rules run backwards: from the region of a result that somebody demands to the regions of the
arguments that have to be there. Elementwise operations need no rule. An operation without a rule
demands nothing and is named in the bound's notes, which can only make the bound smaller; to add
one, add an entry to `RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .contents import Contents
from .facts import Facts, padding_of, triangle
from .region import Region
from .terms import MAX_VECTOR
from .trace import Node, Value

Need = tuple[Value, Region]
"""An argument and the part of it that is needed."""
Wanted = dict[int, Region]
"""Position of a result -> its demanded part."""


class Context:
    """What the rules may ask: facts, and real values of indices."""

    def __init__(self, facts: Facts, contents: Contents) -> None:
        self.facts = facts
        self._contents = contents

    def indices(self, node: Node, value: Value) -> np.ndarray | None:
        """Real values of an index argument; None if they cost too much."""
        found = self._contents.choosing(value, node.version_of(value))
        return None if found is None else found.numpy().astype(np.int64)


Rule = Callable[[Context, Node, Wanted], Iterator[Need]]


def needs(context: Context, node: Node, wanted: Wanted) -> Iterator[Need] | None:
    """What an operation needs of its arguments; None if there is no rule for it."""
    rule = RULES.get(node.name, RULES.get(node.name.rstrip("_")))
    if rule is not None:
        return rule(context, node, wanted)
    if node.pointwise:
        return _elementwise(context, node, wanted)
    if not node.inputs:
        return iter(())
    return None


def _only(wanted: Wanted) -> Region:
    return next(iter(wanted.values()))


def _tensors(node: Node, *names: str) -> Iterator[tuple[str, Value]]:
    """The tensor arguments among those named (all if none), with their names."""
    for name, arg in node.args.items():
        if isinstance(arg, Value) and (not names or name in names):
            yield name, arg


# ---- Elementwise, and along axes ------------------------------------------------------------


def _elementwise(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    region = _only(wanted)
    for _, value in _tensors(node):
        yield value, region.unbroadcast(value.shape)


def _copy(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    source = node.args["src"]
    yield source, _only(wanted).unbroadcast(source.shape)


def _where(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    region = _only(wanted)
    condition = node.args["condition"]
    yield condition, region.unbroadcast(condition.shape)
    truth = context.facts.mask(node, condition).true_region()
    for name, value in _tensors(node, "self", "other"):
        part = region
        if truth is not None:
            chosen = truth.broadcast(region.shape)
            part = region.intersect(chosen) if name == "self" else region.subtract(chosen)
        yield value, part.unbroadcast(value.shape)


def _dims(node: Node, rank: int) -> list[int]:
    dims = node.args.get("dim")
    if dims is None or dims == []:
        return list(range(rank))
    return [d % max(rank, 1) for d in (dims if isinstance(dims, list | tuple) else [dims])]


def _reduction(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """Some axes are reduced: all of them is needed wherever the result is."""
    value = node.args["self"]
    dims = _dims(node, len(value.shape))
    kept = [1 if d in dims else n for d, n in enumerate(value.shape)]
    for region in wanted.values():
        yield value, region.reshape(kept).broadcast(value.shape)


def _along(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """Each result depends on the whole of some axes (softmax, sort, FFT)."""
    for _, value in _tensors(node):
        dims = _dims(node, len(value.shape))
        for region in wanted.values():
            if len(region.shape) != len(value.shape):
                continue
            kept = [1 if d in dims else n for d, n in enumerate(value.shape)]
            yield value, region.any_over(dims, keep=True).reshape(kept).broadcast(value.shape)


def _running(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """Cumulative operations need what comes before the last demanded place."""
    value = node.args["self"]
    dim = node.args["dim"] % max(len(value.shape), 1)
    for region in wanted.values():
        if not region or not value.shape:
            yield value, region
            continue
        others = [d for d in range(len(value.shape)) if d != dim]
        places = region.any_over(others).mask()
        if places is None:
            yield value, Region.empty(value.shape, exact=False)
            continue
        before = np.arange(len(places)) <= np.flatnonzero(places)[-1]
        rows = region.any_over([dim], keep=True).broadcast(value.shape)
        yield value, rows.intersect(Region.product(value.shape, {dim: before}))


def _trailing(first: Callable[[Node], int]) -> Rule:
    """The axes from some number on are mixed; those before pass. Parameters are needed whole."""

    def rule(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
        source = next(iter(node.args.values()))
        passing = first(node)
        rows = Region.empty(source.shape[:passing])
        for region in wanted.values():
            if len(region.shape) >= passing and region.shape[:passing] == source.shape[:passing]:
                rows = rows.union(region.any_over(range(passing, len(region.shape))))
            elif region:
                rows = Region.full(source.shape[:passing])
        for _, value in _tensors(node):
            same = len(value.shape) == len(source.shape)
            if same and value.shape[:passing] == source.shape[:passing]:
                ones = (*rows.shape, *(1,) * (len(value.shape) - passing))
                yield value, rows.reshape(ones).broadcast(value.shape)
            elif rows:
                yield value, Region.full(value.shape)

    return rule


def _nothing(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """Only the shape of the arguments matters."""
    return iter(())


def _everything(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    for value in node.inputs:
        yield value, Region.full(value.shape)


# ---- Moving elements around -----------------------------------------------------------------


def _cat(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    region = _only(wanted)
    dim, start = node.args["dim"] % len(region.shape), 0
    for value in node.args["tensors"]:
        if value.shape == (0,):
            continue
        stop = start + value.shape[dim]
        yield value, region.slice(dim, start, stop)
        start = stop


def _stack(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    region = _only(wanted)
    dim = node.args["dim"] % len(region.shape)
    for i, value in enumerate(node.args["tensors"]):
        yield value, region.slice(dim, i, i + 1).reshape(value.shape)


def _pad(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    region = _only(wanted)
    value = node.args["self"]
    for dim, before, after in padding_of(node):
        size = value.shape[dim]
        region = region.slice(dim, max(0, before), region.shape[dim] - max(0, after))
        region = region.unslice(dim, size, max(0, -before))
    yield value, region


def _triangle(lower: bool) -> Rule:
    def rule(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
        value = node.args["self"]
        band = triangle(value.shape, node.args["diagonal"], lower=lower)
        yield value, _only(wanted).intersect(band)

    return rule


def _repeat(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    value, repeats = node.args["self"], node.args["repeats"]
    shape = (1,) * (len(repeats) - len(value.shape)) + value.shape
    split = [n for pair in zip(repeats, shape, strict=True) for n in pair]
    region = _only(wanted).reshape(split).any_over(range(0, len(split), 2))
    yield value, region.reshape(value.shape)


def _flip(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    value, region = node.args["self"], _only(wanted)
    for dim in node.args["dims"]:
        dim %= len(value.shape)
        region = region.take(dim, np.arange(value.shape[dim])[::-1])
    yield value, region


def _roll(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    value, region = node.args["self"], _only(wanted)
    shifts, dims = node.args["shifts"], node.args["dims"]
    if not dims:
        flat = region.reshape([value.numel]).take(0, _rolled(value.numel, -shifts[0]))
        yield value, flat.reshape(value.shape)
        return
    for shift, dim in zip(shifts, dims, strict=True):
        dim %= len(value.shape)
        region = region.take(dim, _rolled(value.shape[dim], -shift))
    yield value, region


def _rolled(size: int, shift: int) -> np.ndarray:
    return np.roll(np.arange(size), shift)


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


def _index(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    value, region = node.args["self"], _only(wanted)
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


def _select_rows(table: str, index: str, dim: Callable[[Node], int]) -> Rule:
    """index_select and embedding: rows of a table by a tensor of indices."""

    def rule(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
        value, chosen, region = node.args[table], node.args[index], _only(wanted)
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


def _gather(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    value, index, region = node.args["self"], node.args["index"], _only(wanted)
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


def written_region(context: Context, node: Node, value: Value) -> Region:
    """The elements of `value` that an operation overwrites whatever they were."""
    name = node.name.rstrip("_")
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
    if name in ("index_copy", "index_fill"):
        found_rows = context.indices(node, node.args["index"])
        if found_rows is not None:
            dim = node.args["dim"] % len(value.shape)
            rows = np.zeros(value.shape[dim], dtype=bool)
            rows[found_rows] = True
            return Region.product(value.shape, {dim: rows})
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


def _scatter(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """Functional and in-place writes to places named by indices."""
    region, base = _only(wanted), node.args["self"]
    overwritten = written_region(context, node, base)
    if overwritten.exact and not node.written:
        yield base, region.subtract(overwritten)
    elif not node.written:
        yield base, Region.empty(base.shape, exact=False)
    landing = _landing(context, node, base, region)
    for name, value in _tensors(node):
        if name != "self":
            part = Region.empty(value.shape, exact=False)
            if region.is_full:
                part = Region.full(value.shape)
            elif landing is not None:
                part = landing.unbroadcast(value.shape)
            yield value, part
    for index in node.args.get("indices") or ():
        if isinstance(index, Value):
            yield index, Region.full(index.shape)


def _landing(context: Context, node: Node, base: Value, region: Region) -> Region | None:
    """Which of the places written to are demanded, in the shape of what is written there."""
    name = node.name.rstrip("_")
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


def _rows_to_rows(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """index_add and index_copy: row r of the source goes to row index[r]."""
    region, base = _only(wanted), node.args["self"]
    index, source = node.args["index"], node.args["source"]
    dim = node.args["dim"] % max(len(base.shape), 1)
    if not node.written:
        yield base, region.subtract(written_region(context, node, base))
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


def _slice_scatter(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    region, base, source = _only(wanted), node.args["self"], node.args["src"]
    yield base, region.subtract(written_region(context, node, base))
    dim = node.args["dim"] % len(base.shape)
    if node.name == "select_scatter":
        at = node.args["index"] % base.shape[dim]
        yield source, region.slice(dim, at, at + 1).reshape(source.shape)
    else:
        start, stop, step = slice(node.args["start"], node.args["end"], node.args["step"]).indices(
            base.shape[dim]
        )
        yield source, region.slice(dim, start, stop, step)


def _by_batch(number: int) -> Rule:
    """Leading axes pass, all else is mixed (pooling, normalisation by group, resampling)."""
    return _trailing(lambda node: number)


def _normalised(node: Node) -> int:
    source = next(iter(node.args.values()))
    return len(source.shape) - len(node.args["normalized_shape"])


_LAST_TWO_MIXED = _trailing(lambda node: max(0, len(node.inputs[0].shape) - 2))

RULES: dict[str, Rule] = {
    "copy": _copy,
    "_to_copy": _elementwise,
    "where": _where,
    **dict.fromkeys(
        (
            "sum",
            "mean",
            "amax",
            "amin",
            "max",
            "min",
            "argmax",
            "argmin",
            "prod",
            "any",
            "all",
            "logsumexp",
            "var",
            "std",
            "var_mean",
            "std_mean",
            "linalg_vector_norm",
            "norm",
            "nansum",
            "count_nonzero",
            "aminmax",
            "kthvalue",
            "median",
            "_local_scalar_dense",
        ),
        _reduction,
    ),
    **dict.fromkeys(
        (
            "_softmax",
            "_log_softmax",
            "_safe_softmax",
            "_softmax_backward_data",
            "_log_softmax_backward_data",
            "sort",
            "argsort",
            "topk",
            "_fft_r2c",
            "_fft_c2c",
            "_fft_c2r",
        ),
        _along,
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), _running),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm"), _trailing(_normalised)),
    **dict.fromkeys(
        (
            "native_group_norm",
            "grid_sampler_2d",
            "im2col",
            "col2im",
        ),
        _by_batch(1),
    ),
    **dict.fromkeys(
        (
            "avg_pool2d",
            "avg_pool3d",
            "max_pool2d_with_indices",
            "max_pool3d_with_indices",
            "_adaptive_avg_pool2d",
            "adaptive_max_pool2d",
            "upsample_nearest1d",
            "upsample_nearest2d",
            "upsample_bilinear2d",
            "upsample_bicubic2d",
            "reflection_pad1d",
            "reflection_pad2d",
            "replication_pad1d",
            "replication_pad2d",
        ),
        _by_batch(2),
    ),
    **dict.fromkeys(("linalg_solve_triangular", "triangular_solve"), _LAST_TWO_MIXED),
    **dict.fromkeys(
        ("searchsorted", "bucketize", "bincount", "nonzero", "native_layer_norm_backward"),
        _everything,
    ),
    **dict.fromkeys(("native_group_norm_backward", "native_batch_norm"), _everything),
    **dict.fromkeys(
        (
            "zeros_like",
            "ones_like",
            "empty_like",
            "full_like",
            "rand_like",
            "randn_like",
            "new_zeros",
            "new_ones",
            "new_empty",
            "new_full",
            "new_empty_strided",
            "fill",
            "zero",
            "normal",
            "uniform",
            "random",
        ),
        _nothing,
    ),
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "tril": _triangle(lower=True),
    "triu": _triangle(lower=False),
    "repeat": _repeat,
    "flip": _flip,
    "roll": _roll,
    "index": _index,
    "index_select": _select_rows("self", "index", lambda node: node.args["dim"]),
    "embedding": _select_rows("weight", "indices", lambda node: 0),
    "gather": _gather,
    **dict.fromkeys(
        (
            "index_put",
            "scatter",
            "scatter_add",
            "scatter_reduce",
            "masked_scatter",
            "index_fill",
            "index_reduce",
        ),
        _scatter,
    ),
    **dict.fromkeys(("index_add", "index_copy"), _rows_to_rows),
    **dict.fromkeys(("slice_scatter", "select_scatter"), _slice_scatter),
}
