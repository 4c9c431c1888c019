"""Contractions: which multiply-adds a run demands, and on which units they may run.

`CONTRACTIONS` says for each matrix product which axes of its operands and result belong together,
in the manner of an einsum; the iterations that count are those whose result is demanded and whose
factors are not known to be zero. Convolutions have a rule of their own. To add a product, add an
entry; to add another kind of contraction, write a function like `convolution`.

Counted is the usual algorithm: neither Strassen nor Winograd nor transforms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .context import Need
from .facts import Fact, Facts
from .precision import WorkClass, work_class
from .region import Region
from .trace import Node, Trace, Value

if TYPE_CHECKING:
    from .demand import Operation


@dataclass(frozen=True)
class Work:
    """Contraction work of one operation."""

    operation: str
    flops: int
    """2 for a multiply-add."""
    unit: WorkClass
    exact: bool
    """False if some of it was left out for want of knowledge."""


class Product(NamedTuple):
    """Axes of a product of two tensors: a letter for each, the same letter for the same axis."""

    out: str
    left: str
    left_axes: str
    right: str
    right_axes: str


CONTRACTIONS: dict[str, Product] = {
    "mm": Product("mn", "self", "mk", "mat2", "kn"),
    "_int_mm": Product("mn", "self", "mk", "mat2", "kn"),
    "_scaled_mm": Product("mn", "self", "mk", "mat2", "kn"),
    "addmm": Product("mn", "mat1", "mk", "mat2", "kn"),
    "bmm": Product("bmn", "self", "bmk", "mat2", "bkn"),
    "baddbmm": Product("bmn", "batch1", "bmk", "batch2", "bkn"),
    "addbmm": Product("mn", "batch1", "bmk", "batch2", "bkn"),
    "mv": Product("m", "self", "mk", "vec", "k"),
    "addmv": Product("m", "mat", "mk", "vec", "k"),
    "dot": Product("", "self", "k", "tensor", "k"),
    "vdot": Product("", "self", "k", "other", "k"),
}


class Demand(NamedTuple):
    """How much of a result is wanted."""

    region: Region
    """What is needed at all."""
    firm: Region
    """What is needed as such, not as the input of a triangular product a scan could replace."""
    share: float
    """Share of `firm` that is needed, where a scattered mask hides the rest."""
    full_precision: bool
    """Whether it reaches an output with more than 16 bits."""


def is_contraction(node: Node) -> bool:
    """Whether an operation multiplies and sums."""
    return node.name in CONTRACTIONS or node.name in ("convolution", "convolution_backward")


def as_written(node: Node) -> int:
    """FLOPs of a contraction with every element of its operands, as the reference says it."""
    if not is_contraction(node):
        return 0
    if node.name in CONTRACTIONS:
        spec = CONTRACTIONS[node.name]
        sizes = dict(zip(spec.left_axes, node.args[spec.left].shape, strict=True))
        sizes |= zip(spec.right_axes, node.args[spec.right].shape, strict=True)
        return 2 * math.prod(sizes.values())
    weight = node.args["weight"]
    if node.name == "convolution":
        out = node.outs[0]
        assert out is not None
        moving = node.args["input"] if node.args["transposed"] else out
        return 2 * moving.numel * math.prod(weight.shape[1:])
    passes = sum(bool(m) for m in node.args["output_mask"][:2])
    moving = node.args["input"] if node.args["transposed"] else node.args["grad_output"]
    return 2 * passes * moving.numel * math.prod(weight.shape[1:])


def contract(facts: Facts, node: Node, demand: Demand) -> tuple[list[Need], Work | None]:
    """What a contraction needs, and the work it is."""
    if node.name == "convolution":
        return convolution(facts, node, demand)
    if node.name == "convolution_backward":
        return convolution_backward(facts, node, demand)
    return product(facts, node, demand)


def product(facts: Facts, node: Node, demand: Demand) -> tuple[list[Need], Work | None]:
    """Rule of the matrix products in `CONTRACTIONS`."""
    spec = CONTRACTIONS[node.name]
    left, right = node.args[spec.left], node.args[spec.right]
    sizes = dict(zip(spec.left_axes, left.shape, strict=True))
    sizes |= zip(spec.right_axes, right.shape, strict=True)
    letters = "".join(sorted(sizes))
    shape = tuple(sizes[x] for x in letters)

    def lifted(region: Region, axes: str) -> Region:
        """A region of one tensor in the space of all axes."""
        order = [axes.index(x) for x in letters if x in axes]
        ones = [sizes[x] if x in axes else 1 for x in letters]
        return region.permute(order).reshape(ones).broadcast(shape)

    def dropped(region: Region, axes: str) -> Region:
        """What a region of all axes takes of a tensor with some of them."""
        part = region.any_over([i for i, x in enumerate(letters) if x not in axes])
        kept = [x for x in letters if x in axes]
        return part.permute([kept.index(x) for x in axes])

    factors = facts.at(node, left), facts.at(node, right)
    region = demand.region
    if (
        region.is_full
        and region.exact
        and demand.firm is region
        and all(f.rest != 0.0 or (f.live.is_full and f.live.exact) for f in factors)
    ):
        # Nothing is masked and all is wanted, as nearly always.
        whole: list[Need] = [(left, Region.full(left.shape)), (right, Region.full(right.shape))]
        whole += _added(node, spec, region)
        return whole, _work(node, factors, math.prod(shape), demand, True, region.count())
    alive = Region.full(shape)
    for fact, axes in zip(factors, (spec.left_axes, spec.right_axes), strict=True):
        if fact.rest == 0.0:
            alive = alive.intersect(lifted(fact.live, axes))
    iterations = alive.intersect(lifted(region, spec.out))
    needs: list[Need] = [
        (left, dropped(iterations, spec.left_axes)),
        (right, dropped(iterations, spec.right_axes)),
    ]
    needs += _added(node, spec, region)
    firm = iterations
    if demand.firm is not region:
        firm = alive.intersect(lifted(demand.firm, spec.out))
    results = dropped(firm, spec.out).count()
    return needs, _work(node, factors, firm.count(), demand, firm.exact, results)


def _added(node: Node, spec: Product, region: Region) -> list[Need]:
    """What is needed of the arguments that are added to a product."""
    return [
        (arg, region.unbroadcast(arg.shape))
        for name, arg in node.args.items()
        if name not in (spec.left, spec.right) and isinstance(arg, Value) and _adds(arg, node)
    ]


def _adds(value: Value, node: Node) -> bool:
    """Whether an argument is added to the result (a bias), its shape fitting."""
    out = node.outs[0]
    assert out is not None
    shape = (1,) * (len(out.shape) - len(value.shape)) + value.shape
    return len(shape) == len(out.shape) and all(
        a in (1, b) for a, b in zip(shape, out.shape, strict=True)
    )


def _work(
    node: Node,
    factors: tuple[Fact, Fact],
    iterations: int,
    demand: Demand,
    exact: bool,
    results: int,
    unit: WorkClass | None = None,
) -> Work | None:
    left, right = factors
    if left.scan or right.scan or left.triangular or right.triangular:
        # Linear attention and its kin: a scan over the sequence does with less.
        return Work(str(node), 0, "bf16_tc", True)
    if iterations <= results:
        return None  # one product for each result: elementwise, or a selection by one-hot rows
    share = demand.share * left.density * right.density
    return Work(
        operation=str(node),
        flops=int(2 * iterations * share),
        unit=unit or work_class(left.format, right.format, full_precision=demand.full_precision),
        exact=exact and share > 0.0,
    )


# ---- Convolutions ---------------------------------------------------------------------------


class _Taps(NamedTuple):
    """One spatial axis of a convolution: which outputs, inputs and taps go together."""

    pairs: np.ndarray
    """[output, tap] -> index of the input, -1 where it is padding."""
    size: int
    """Length of the input axis."""

    def live(self, outputs: np.ndarray | None, inputs: np.ndarray | None) -> np.ndarray:
        """[output, tap] -> whether it multiplies a real input for a demanded output."""
        alive = self.pairs >= 0
        if outputs is not None:
            alive = alive & outputs[:, None]
        if inputs is not None:
            alive = alive & inputs[self.pairs]
        return alive

    def touched(self, alive: np.ndarray) -> np.ndarray:
        """Which inputs are read."""
        used = np.zeros(self.size, dtype=bool)
        used[self.pairs[alive]] = True
        return used


def _taps(node: Node, size: int, outputs: int, kernel: int, axis: int) -> _Taps:
    def at(name: str) -> int:
        values = node.args[name]
        return values[axis] if len(values) > 1 else values[0]

    stride, padding, dilation = at("stride"), at("padding"), at("dilation")
    out, tap = np.arange(outputs)[:, None], np.arange(kernel)[None, :]
    if node.args["transposed"]:
        place = out + padding - tap * dilation
        source = np.where(place % stride == 0, place // stride, -1)
    else:
        source = out * stride - padding + tap * dilation
    return _Taps(np.where((source >= 0) & (source < size), source, -1), size)


def convolution(facts: Facts, node: Node, demand: Demand) -> tuple[list[Need], Work | None]:
    """Grouped, strided, dilated, possibly transposed convolution of any number of axes.

    Taps on padding do not count. Without a sum over channels (depthwise) the work is vector work.
    """
    source, weight, bias = node.args["input"], node.args["weight"], node.args["bias"]
    out = node.outs[0]
    assert out is not None
    groups = node.args["groups"]
    factors = facts.at(node, source), facts.at(node, weight)
    per_group = source.shape[1] // groups
    axes = range(len(source.shape) - 2)
    taps = [
        _taps(node, source.shape[2 + i], out.shape[2 + i], weight.shape[2 + i], i) for i in axes
    ]
    alive_inputs = _spatial(factors[0].live, source.shape) if factors[0].rest == 0.0 else None
    channels = np.arange(out.shape[1])
    group_of = channels // (out.shape[1] // groups)
    needed = Region.empty(source.shape, exact=demand.region.exact)
    kernels = Region.empty(weight.shape, exact=demand.region.exact)
    iterations, exact = 0, demand.firm.exact
    for region in (
        (demand.region,)
        if demand.firm is demand.region
        else (
            demand.region,
            demand.firm,
        )
    ):
        for term in region.in_terms().terms:
            if term.band is not None:
                exact = False
                continue
            live = [
                t.live(term.axes[2 + i], alive_inputs[i] if alive_inputs else None)
                for i, t in enumerate(taps)
            ]
            batch = source.shape[0] if term.axes[0] is None else int(term.axes[0].sum())
            wanted = np.ones(out.shape[1], dtype=bool) if term.axes[1] is None else term.axes[1]
            if region is demand.firm:
                iterations += (
                    batch * int(wanted.sum()) * per_group * math.prod(int(x.sum()) for x in live)
                )
            if region is not demand.region:
                continue
            used_groups = np.zeros(groups, dtype=bool)
            used_groups[group_of[wanted]] = True
            part: dict[int, np.ndarray] = {1: np.repeat(used_groups, per_group)}
            if term.axes[0] is not None:
                part[0] = term.axes[0]
            part |= {2 + i: t.touched(x) for (i, t), x in zip(enumerate(taps), live, strict=True)}
            needed = needed.union(Region.product(source.shape, part))
            window = {2 + i: np.any(x, axis=0) for i, x in enumerate(live)}
            for shape in _channels_of_weight(node, weight, wanted, used_groups, per_group):
                kernels = kernels.union(Region.product(weight.shape, shape | window))
    needs: list[Need] = [(source, needed), (weight, kernels)]
    if isinstance(bias, Value):
        others = [d for d in range(len(out.shape)) if d != 1]
        needs.append((bias, demand.region.any_over(others)))
    unit: WorkClass | None = "fp32_fma" if per_group == 1 else None
    return needs, _work(node, factors, iterations, demand, exact, 0, unit)


def _channels_of_weight(
    node: Node, weight: Value, wanted: np.ndarray, used_groups: np.ndarray, per_group: int
) -> Iterator[dict[int, np.ndarray]]:
    """Which of a weight's first two axes go with the wanted channels of the result."""
    if not node.args["transposed"]:
        yield {0: wanted}
        return
    channels = wanted.reshape(len(used_groups), -1)
    if (channels[used_groups] == channels[used_groups][:1]).all():
        yield {0: np.repeat(used_groups, per_group), 1: channels[used_groups][0]}
        return
    for group in np.flatnonzero(used_groups):
        rows = np.repeat(np.arange(len(used_groups)) == group, per_group)
        yield {0: rows, 1: channels[group]}


def _spatial(live: Region, shape: tuple[int, ...]) -> list[np.ndarray | None] | None:
    """Per spatial axis the indices that are not known to be zero, if that is a product."""
    if len(live.terms) != 1 or live.coupled:
        return None
    return list(live.terms[0].axes[2:])


def convolution_backward(
    facts: Facts, node: Node, demand: Demand
) -> tuple[list[Need], Work | None]:
    """Gradients of a convolution: each of input and weight costs what the forward pass does."""
    gradient, source, weight = (node.args[k] for k in ("grad_output", "input", "weight"))
    groups = node.args["groups"]
    per_group = source.shape[1] // groups
    taps = [
        _taps(node, source.shape[2 + i], gradient.shape[2 + i], weight.shape[2 + i], i)
        for i in range(len(source.shape) - 2)
    ]
    pairs = math.prod(int(t.live(None, None).sum()) for t in taps)
    forward = source.shape[0] * gradient.shape[1] * per_group * pairs
    needs: list[Need] = [(gradient, Region.full(gradient.shape))]
    for_input, for_weight = (bool(m) for m in node.args["output_mask"][:2])
    if for_input:
        needs.append((weight, Region.full(weight.shape)))
    if for_weight:
        needs.append((source, Region.full(source.shape)))
    factors = facts.at(node, gradient), facts.at(node, weight if for_input else source)
    unit: WorkClass | None = "fp32_fma" if per_group == 1 else None
    return needs, _work(node, factors, forward * (for_input + for_weight), demand, True, 0, unit)


def total(work: Iterator[Work]) -> dict[WorkClass, int]:
    """FLOPs by unit."""
    sums: dict[WorkClass, int] = {}
    for item in work:
        if item.flops:
            sums[item.unit] = sums.get(item.unit, 0) + item.flops
    return sums


_SPECIAL = frozenset(
    (
        *("exp", "exp2", "expm1", "log", "log2", "log1p", "log10", "sqrt", "rsqrt", "reciprocal"),
        *("sin", "cos", "tan", "tanh", "sigmoid", "erf", "silu", "gelu", "mish", "softplus"),
        *("elu", "pow", "_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "log_sigmoid"),
    )
)
_PER_ROW = frozenset(("native_layer_norm", "native_group_norm", "_fused_rms_norm"))


def special_functions(operation: Operation) -> int:
    """Demanded results of an operation that a special-function unit would make."""
    node = operation.node
    name = node.plain_name
    if name in _PER_ROW:
        return node.outs[-1].numel if node.outs[-1] is not None and operation.demand else 0
    if name not in _SPECIAL or (name == "pow" and _is_small_integer(node.args.get("exponent"))):
        return 0
    return operation.results


def _is_small_integer(exponent: object) -> bool:
    return isinstance(exponent, int | float) and float(exponent).is_integer() and abs(exponent) <= 8


def external(operations: list[Operation], trace: Trace) -> tuple[int, int]:
    """Multiply-adds of products whose operands both lie in memory, and the narrowest's width.

    An elementwise function of a single tensor in memory counts as lying there, at that tensor's
    width: whoever wants its element has to load one.
    """
    width_of = {id(v.base): v.dtype.itemsize for v in trace.inputs.values()}
    macs, narrowest = 0, 0
    for operation in operations:
        node = operation.node
        if node.pointwise and len(node.fresh) == 1:
            sources = [v for v in node.inputs if v.numel > 1]
            (out,) = node.fresh
            if len(sources) == 1 and sources[0].numel == out.numel:
                source = sources[0]
                if id(source.base) in width_of and source.numel <= source.base.numel:
                    width_of[id(out.base)] = width_of[id(source.base)]
        if operation.work is None or operation.rewrite or node.name not in CONTRACTIONS:
            continue
        spec = CONTRACTIONS[node.name]
        sides = [node.args[spec.left], node.args[spec.right]]
        known = [width_of.get(id(v.base)) for v in sides]
        if None in known or any(v.numel > v.base.numel for v in sides):
            continue
        macs += operation.work.flops // 2
        widths = [w for w in known if w is not None]
        narrowest = min([narrowest, *widths] if narrowest else widths)
    return macs, narrowest or 2
