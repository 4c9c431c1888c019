"""Which elements of its operands an operation needs for given elements of its result.

The rules run backwards: from the region of a result that somebody demands to the regions of the
arguments that have to be there. Elementwise operations need no rule. An operation without a rule
demands nothing and is named in the bound's notes, which can only make the bound smaller; to add
one, add an entry to `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from . import indexing
from .context import Context, Need, Rule, Wanted, only, tensors
from .fact_rules import padding_of, triangle
from .region import Region
from .trace import Node


def needs(context: Context, node: Node, wanted: Wanted) -> Iterator[Need] | None:
    """What an operation needs of its arguments; None if there is no rule for it."""
    rule = RULES.get(node.name, RULES.get(node.plain_name))
    if rule is not None:
        return rule(context, node, wanted)
    if node.pointwise:
        return _elementwise(context, node, wanted)
    if not node.inputs:
        return iter(())
    return None


# ---- Elementwise, and along axes ------------------------------------------------------------


def _elementwise(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    region = only(wanted)
    for _, value in tensors(node):
        yield value, region.unbroadcast(value.shape)


def _copy(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    source = node.args["src"]
    yield source, only(wanted).unbroadcast(source.shape)


def _where(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    region = only(wanted)
    condition = node.args["condition"]
    yield condition, region.unbroadcast(condition.shape)
    truth = context.facts.mask(node, condition).true_region()
    for name, value in tensors(node, "self", "other"):
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
    for _, value in tensors(node):
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
        for _, value in tensors(node):
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
    region = only(wanted)
    dim, start = node.args["dim"] % len(region.shape), 0
    for value in node.args["tensors"]:
        if value.shape == (0,):
            continue
        stop = start + value.shape[dim]
        yield value, region.slice(dim, start, stop)
        start = stop


def _stack(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    region = only(wanted)
    dim = node.args["dim"] % len(region.shape)
    for i, value in enumerate(node.args["tensors"]):
        yield value, region.slice(dim, i, i + 1).reshape(value.shape)


def _pad(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    region = only(wanted)
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
        yield value, only(wanted).intersect(band)

    return rule


def _repeat(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    value, repeats = node.args["self"], node.args["repeats"]
    shape = (1,) * (len(repeats) - len(value.shape)) + value.shape
    split = [n for pair in zip(repeats, shape, strict=True) for n in pair]
    region = only(wanted).reshape(split).any_over(range(0, len(split), 2))
    yield value, region.reshape(value.shape)


def _flip(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    value, region = node.args["self"], only(wanted)
    for dim in node.args["dims"]:
        dim %= len(value.shape)
        region = region.take(dim, np.arange(value.shape[dim])[::-1])
    yield value, region


def _roll(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    value, region = node.args["self"], only(wanted)
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


# ---- Others ----------------------------------------------------------------------------------


def _slice_backward(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """Gradient of a slice or a row: placed among zeros."""
    gradient, region = node.args["grad_output"], only(wanted)
    dim = node.args["dim"] % len(region.shape)
    if node.name == "select_backward":
        at = node.args["index"] % region.shape[dim]
        yield gradient, region.slice(dim, at, at + 1).reshape(gradient.shape)
        return
    limits = slice(node.args["start"], node.args["end"], node.args["step"])
    yield gradient, region.slice(dim, *limits.indices(region.shape[dim]))


def _local(number: int) -> Rule:
    """Leading axes pass; along the others neighbours are mixed (pooling, resampling)."""
    whole_rows = _trailing(lambda node: number)

    def rule(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
        for region in wanted.values():
            rows = region.any_over(range(number, len(region.shape)), keep=True)
            if not rows.broadcast(region.shape).subtract(region):
                continue
            # Which neighbours a part of a row needs is not followed.
            for value in node.inputs:
                yield value, Region.empty(value.shape, exact=False)
            return
        yield from whole_rows(context, node, wanted)

    return rule


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
            "grid_sampler_2d",
            "im2col",
            "col2im",
        ),
        _local(1),
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
            "avg_pool2d_backward",
            "max_pool2d_with_indices_backward",
            "upsample_nearest2d_backward",
            "upsample_bilinear2d_backward",
        ),
        _local(2),
    ),
    "native_group_norm": _trailing(lambda node: 1),
    **dict.fromkeys(("linalg_solve_triangular", "triangular_solve"), _LAST_TWO_MIXED),
    **dict.fromkeys(
        (
            "searchsorted",
            "bucketize",
            "bincount",
            "nonzero",
            "native_layer_norm_backward",
            "embedding_dense_backward",
        ),
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
    "index": indexing.index,
    "index_select": indexing.select_rows("self", "index", lambda node: node.args["dim"]),
    "embedding": indexing.select_rows("weight", "indices", lambda node: 0),
    "gather": indexing.gather,
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
        indexing.scatter,
    ),
    **dict.fromkeys(("index_add", "index_copy"), indexing.rows_to_rows),
    **dict.fromkeys(("slice_scatter", "select_scatter"), indexing.slice_scatter),
    **dict.fromkeys(("slice_backward", "select_backward"), _slice_backward),
}
