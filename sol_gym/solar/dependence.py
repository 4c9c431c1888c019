"""Which elements of its operands an operation needs for given elements of its result.

The rules run backwards: from the region of a result that somebody demands to the regions of the
arguments that have to be there. Elementwise operations need no rule. An operation without a rule
demands nothing and is named in the bound's notes, which can only make the bound smaller; to add
one, add an entry to `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from . import indexing
from .context import Context, Need, Rule, Wanted, only, tensors
from .fact_rules import padding_of, triangle
from .region import Region
from .trace import Node, Value


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
    """Cumulative operations need what comes before a demanded place, in its own row."""
    value = node.args["self"]
    dim = node.args["dim"] % max(len(value.shape), 1)
    for region in wanted.values():
        yield value, _before(region, dim) if value.shape else region


def _before(region: Region, dim: int) -> Region:
    """Everything at or before an element along an axis."""
    if region.is_full:
        return region
    if (mask := region.mask()) is not None:
        reached = np.logical_or.accumulate(np.flip(mask, dim), axis=dim)
        before = Region.of_mask(np.flip(reached, dim))
        return before if region.exact else Region(before.shape, before.terms, False, before.bits)
    found = Region.empty(region.shape, exact=region.exact)
    for term in region.in_terms().terms:
        one = Region(region.shape, (term,), region.exact)
        if term.band is not None and dim in (term.band.row, term.band.col):
            if term.band.col != dim or term.axes[dim] is not None:
                found = found.union(Region(one.shape, one.terms, False))
                continue
            rows = one.any_over([dim], keep=True).broadcast(region.shape)
            low = np.zeros_like(term.band.low)
            high = np.where(term.band.high > term.band.low, term.band.high, 0)
            band = Region.of_band(region.shape, row=term.band.row, col=dim, low=low, high=high)
            found = found.union(rows.intersect(band))
            continue
        axis = term.axes[dim]
        last = region.shape[dim] - 1 if axis is None else int(np.flatnonzero(axis)[-1])
        rows = one.any_over([dim], keep=True).broadcast(region.shape)
        reached_places = np.arange(region.shape[dim]) <= last
        found = found.union(rows.intersect(Region.product(region.shape, {dim: reached_places})))
    return found


def _layer_norm(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """Trailing axes are mixed; those before pass. Weight and bias go with the first result only."""
    source = node.args["input"]
    passing = len(source.shape) - len(node.args["normalized_shape"])
    yield source, _whole_rows(wanted.values(), source.shape, passing)
    if 0 in wanted:
        for _, value in tensors(node, "weight", "bias"):
            yield value, wanted[0].any_over(range(passing)).reshape(value.shape)


def _whole_rows(regions: Iterable[Region], shape: Sequence[int], passing: int) -> Region:
    """All of the trailing axes wherever any region has something in the leading ones."""
    rows = Region.empty(shape[:passing])
    for region in regions:
        rows = rows.union(region.any_over(range(passing, len(region.shape))))
    ones = (*rows.shape, *(1,) * (len(shape) - passing))
    return rows.reshape(ones).broadcast(shape)


def _layer_norm_backward(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    gradient, source = node.args["grad_out"], node.args["input"]
    passing = len(source.shape) - len(node.args["normalized_shape"])
    columns = {
        i: wanted[i].reshape((*(1,) * passing, *source.shape[passing:])).broadcast(source.shape)
        for i in (1, 2)
        if i in wanted
    }
    rows = _whole_rows([wanted[0]] if 0 in wanted else [], source.shape, passing)
    both = rows.union(columns[1]) if 1 in columns else rows
    yield source, both
    yield gradient, both.union(columns[2]) if 2 in columns else both
    for _, value in tensors(node, "mean", "rstd"):
        yield (
            value,
            both.any_over(range(passing, len(source.shape)), keep=True).reshape(value.shape),
        )
    weight = node.args["weight"]
    if isinstance(weight, Value) and rows:
        yield weight, Region.full(weight.shape)


def _groups(node: Node, region: Region) -> tuple[Region, Region]:
    """A region [N, C, ...] as whole groups of channels, and as groups [N, G]."""
    shape, number = region.shape, node.args["group"]
    split = (shape[0], number, shape[1] // number, *shape[2:])
    chosen = region.reshape(split).any_over(range(2, len(split)), keep=True)
    return chosen.broadcast(split).reshape(shape), chosen.reshape((shape[0], number))


def _group_norm(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    source = node.args["input"]
    needed = Region.empty(source.shape)
    for i, region in wanted.items():
        if i == 0:
            needed = needed.union(_groups(node, region)[0])
            continue
        number = node.args["group"]
        split = (source.shape[0], number, source.shape[1] // number, *source.shape[2:])
        ones = (source.shape[0], number, *(1,) * (len(split) - 2))
        needed = needed.union(region.reshape(ones).broadcast(split).reshape(source.shape))
    yield source, needed
    if 0 in wanted:
        others = [d for d in range(len(source.shape)) if d != 1]
        for _, value in tensors(node, "weight", "bias"):
            yield value, wanted[0].any_over(others)


def _group_norm_backward(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    source = node.args["input"]
    ones = (1, source.shape[1], *(1,) * (len(source.shape) - 2))
    columns = {i: wanted[i].reshape(ones).broadcast(source.shape) for i in (1, 2) if i in wanted}
    whole = _groups(node, wanted[0])[0] if 0 in wanted else Region.empty(source.shape)
    both = whole.union(columns[1]) if 1 in columns else whole
    yield source, both
    yield node.args["grad_out"], both.union(columns[2]) if 2 in columns else both
    for _, value in tensors(node, "mean", "rstd"):
        yield value, _groups(node, both)[1].reshape(value.shape)
    weight = node.args["weight"]
    if isinstance(weight, Value):
        yield weight, whole.any_over([d for d in range(len(source.shape)) if d != 1])


def _batch_norm(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    source = node.args["input"]
    others = [d for d in range(len(source.shape)) if d != 1]
    channels = Region.empty((source.shape[1],))
    for i, region in wanted.items():
        if i == 0:
            channels = channels.union(region.any_over(others))
        elif region.shape == channels.shape:
            channels = channels.union(region)
    ones = (1, source.shape[1], *(1,) * (len(source.shape) - 2))
    if node.args["training"]:
        yield source, channels.reshape(ones).broadcast(source.shape)
    elif 0 in wanted:
        yield source, wanted[0]
        for _, value in tensors(node, "running_mean", "running_var"):
            yield value, channels
    if 0 in wanted:
        for _, value in tensors(node, "weight", "bias"):
            yield value, wanted[0].any_over(others)


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


def _gradient_rows(number: int) -> Rule:
    """Backward of pooling and resampling: where whole planes are wanted, all of the gradient is."""

    def rule(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
        region = only(wanted)
        rows = region.any_over(range(number, len(region.shape)), keep=True)
        whole = not rows.broadcast(region.shape).subtract(region)
        for _, value in tensors(node, "grad_output", "indices"):
            if not whole:
                yield value, Region.empty(value.shape, exact=False)
                continue
            ones = (*rows.shape[:number], *(1,) * (len(value.shape) - number))
            yield value, rows.reshape(ones).broadcast(value.shape)

    return rule


Pairs = Callable[[Node, int, int, int, int], np.ndarray]
"""(operation, spatial axis, number of them, size in, size out) -> [output, tap] -> index of the
input, -1 outside."""


def _windows(number: int, pairs: Pairs) -> Rule:
    """Pooling, padding and resampling: each output needs a window along each spatial axis."""

    def rule(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
        value = next(v for _, v in tensors(node))
        region = next(iter(wanted.values()))
        for other in list(wanted.values())[1:]:
            region = region.union(other)
        lead = len(value.shape) - number
        needed = Region.empty(value.shape, exact=region.exact)
        taps = [
            pairs(node, i, number, value.shape[lead + i], region.shape[lead + i])
            for i in range(number)
        ]
        for term in region.in_terms().terms:
            if term.band is not None:
                yield value, Region.empty(value.shape, exact=False)
                return
            axes = {d: a for d, a in enumerate(term.axes[:lead]) if a is not None}
            for i, table in enumerate(taps):
                chosen = term.axes[lead + i]
                used = table if chosen is None else table[chosen]
                touched = np.zeros(value.shape[lead + i], dtype=bool)
                touched[used[used >= 0]] = True
                axes[lead + i] = touched
            needed = needed.union(Region.product(value.shape, axes))
        yield value, needed

    return rule


def _at(node: Node, name: str, axis: int, default: int) -> int:
    values = node.args.get(name)
    if values is None or values == []:
        return default
    if isinstance(values, int):
        return values
    return values[axis] if len(values) > 1 else values[0]


def _pool(node: Node, axis: int, number: int, size: int, outputs: int) -> np.ndarray:
    kernel = _at(node, "kernel_size", axis, 1)
    stride = _at(node, "stride", axis, kernel)
    padding, dilation = _at(node, "padding", axis, 0), _at(node, "dilation", axis, 1)
    place = np.arange(outputs)[:, None] * stride - padding + np.arange(kernel) * dilation
    return np.where((place >= 0) & (place < size), place, -1)


def _adaptive(node: Node, axis: int, number: int, size: int, outputs: int) -> np.ndarray:
    out = np.arange(outputs)
    start, stop = out * size // outputs, -(-(out + 1) * size // outputs)
    place = start[:, None] + np.arange(int((stop - start).max(initial=1)))
    return np.where(place < stop[:, None], place, -1)


def _nearest(node: Node, axis: int, number: int, size: int, outputs: int) -> np.ndarray:
    names = ("scales",) if number == 1 else ("scales_d", "scales_h", "scales_w")[-number:]
    scale = node.args.get(names[axis])
    step = np.float32(1.0 / scale) if scale else np.float32(size) / np.float32(outputs)
    place = np.floor(np.arange(outputs, dtype=np.float32) * step).astype(np.int64)
    return np.minimum(place, size - 1)[:, None]


def _padded(reflect: bool) -> Pairs:
    def pairs(node: Node, axis: int, number: int, size: int, outputs: int) -> np.ndarray:
        before = node.args["padding"][2 * (number - 1 - axis)]
        place = np.arange(outputs) - before
        if reflect:
            place = np.abs(place)
            place = np.where(place >= size, 2 * (size - 1) - place, place)
        return np.clip(place, 0, size - 1)[:, None]

    return pairs


def _resampled(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """Bilinear and bicubic: making larger uses every pixel, making smaller may skip some."""
    value, region = node.args["input" if "input" in node.args else "self"], only(wanted)
    rows = region.any_over(range(2, len(region.shape)), keep=True)
    grows = all(o >= n for o, n in zip(region.shape[2:], value.shape[2:], strict=True))
    if not grows or rows.broadcast(region.shape).subtract(region):
        yield value, Region.empty(value.shape, exact=False)
        return
    yield value, rows.reshape((*rows.shape[:2], 1, 1)).broadcast(value.shape)


def _grid_sampler(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """Which pixels are sampled depends on the grid's values, which are not known."""
    region, grid = only(wanted), node.args["grid"]
    places = region.any_over([1])
    yield grid, places.reshape((*places.shape, 1)).broadcast(grid.shape)
    yield node.args["input"], Region.empty(node.args["input"].shape, exact=False)


def _im2col(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    value, region = node.args["self"], only(wanted)
    if not region.is_full:
        yield value, Region.empty(value.shape, exact=False)
        return
    axes: dict[int, np.ndarray] = {}
    for axis in (0, 1):
        size, lead = value.shape[-2 + axis], len(value.shape) - 2
        kernel, stride, padding, dilation = (
            _at(node, name, axis, 1) for name in ("kernel_size", "stride", "padding", "dilation")
        )
        outputs = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        place = np.arange(outputs)[:, None] * stride - padding + np.arange(kernel) * dilation
        touched = np.zeros(size, dtype=bool)
        touched[place[(place >= 0) & (place < size)]] = True
        axes[lead + axis] = touched
    yield value, Region.product(value.shape, axes)


def _col2im(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """Columns that fall on padding reach no pixel; which these are is not followed."""
    value, region = node.args["self"], only(wanted)
    certain = region.is_full and not any(node.args["padding"])
    yield value, Region.full(value.shape) if certain else Region.empty(value.shape, exact=False)


def _log_softmax_backward(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    gradient, output, region = node.args["grad_output"], node.args["output"], only(wanted)
    yield gradient, region.any_over([node.args["dim"]], keep=True).broadcast(gradient.shape)
    yield output, region


def _solve_triangular(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """Only one triangle is looked at. Parts of a solution are not followed."""
    matrix, right, region = node.args["self"], node.args["B"], only(wanted)
    if not region.is_full or len(matrix.shape) != len(right.shape):
        for value in (matrix, right):
            yield value, Region.empty(value.shape, exact=False)
        return
    lower, inside = not node.args["upper"], -1 if node.args["unitriangular"] else 0
    yield matrix, triangle(matrix.shape, inside if lower else -inside, lower=lower)
    yield right, Region.full(right.shape)


def _sorted_places(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """searchsorted and bucketize: a few values are found without looking at all boundaries."""
    region = only(wanted)
    values = node.args["self"]
    if isinstance(values, Value):
        yield values, region
    for _, places in tensors(node, "sorted_sequence", "boundaries"):
        many = len(places.shape) == 1 and region.count() >= places.numel and region.is_full
        yield places, Region.full(places.shape) if many else Region.empty(places.shape, exact=False)


def _embedding_backward(context: Context, node: Node, wanted: Wanted) -> Iterator[Need]:
    """The gradient of a row is the sum of those of the places that name it."""
    gradient, indices, region = node.args["grad_output"], node.args["indices"], only(wanted)
    yield indices, Region.full(indices.shape)
    if node.args["padding_idx"] >= 0:
        yield gradient, Region.empty(gradient.shape, exact=False)
    elif region.is_full:
        yield gradient, Region.full(gradient.shape)
    elif (found := context.indices(node, indices)) is None:
        yield gradient, Region.empty(gradient.shape, exact=False)
    else:
        yield gradient, region.take(0, found.reshape(-1)).reshape(gradient.shape)


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
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm"), _layer_norm),
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "native_batch_norm": _batch_norm,
    **dict.fromkeys(("avg_pool2d", "max_pool2d_with_indices"), _windows(2, _pool)),
    **dict.fromkeys(("avg_pool3d", "max_pool3d_with_indices"), _windows(3, _pool)),
    **dict.fromkeys(("_adaptive_avg_pool2d", "adaptive_max_pool2d"), _windows(2, _adaptive)),
    "upsample_nearest1d": _windows(1, _nearest),
    "upsample_nearest2d": _windows(2, _nearest),
    "reflection_pad1d": _windows(1, _padded(reflect=True)),
    "reflection_pad2d": _windows(2, _padded(reflect=True)),
    "replication_pad1d": _windows(1, _padded(reflect=False)),
    "replication_pad2d": _windows(2, _padded(reflect=False)),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_bicubic2d"), _resampled),
    **dict.fromkeys(
        (
            "avg_pool2d_backward",
            "max_pool2d_with_indices_backward",
            "upsample_nearest2d_backward",
            "upsample_bilinear2d_backward",
        ),
        _gradient_rows(2),
    ),
    "grid_sampler_2d": _grid_sampler,
    "im2col": _im2col,
    "col2im": _col2im,
    "linalg_solve_triangular": _solve_triangular,
    **dict.fromkeys(("searchsorted", "bucketize"), _sorted_places),
    **dict.fromkeys(("bincount", "nonzero"), _everything),
    "embedding_dense_backward": _embedding_backward,
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
    "_log_softmax_backward_data": _log_softmax_backward,
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
