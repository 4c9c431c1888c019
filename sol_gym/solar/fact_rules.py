"""What each operation makes of what is known about its arguments.

A rule gets the default facts of a result and returns better ones. Elementwise operations share one:
constants are found by applying the operation to constants, and a masked score, a zero or a false
absorbs what it meets. To add a rule, add an entry to `RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .facts import MASK_DTYPES, MASKED, SCALE_REUSE, Fact, Facts
from .precision import Format, format_of, format_of_content, is_quantised, narrower, widest
from .region import Region
from .trace import Node, Value

Rule = Callable[[Facts, Node, Value, Fact], Fact]


# ---- Elementwise operations -----------------------------------------------------------------


def _operand(facts: Facts, node: Node, arg: Any) -> Fact | None:
    """Facts of an operand, scalars as constants; None for what is no operand."""
    if isinstance(arg, Value):
        if arg.dtype in MASK_DTYPES:
            return facts.mask(node, arg)
        if node.plain_name == "add" and arg.dtype.is_floating_point:
            return facts.additive_mask(node, arg)
        return facts.at(node, arg)
    if isinstance(arg, bool | int | float):
        return Fact(Region.empty(()), rest=float(arg), format="fp4", distinct=1, constant=True)
    return None


def elementwise(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    """Any elementwise operation: constants are found by applying it to constants."""
    operands = {
        name: f for name, a in node.args.items() if (f := _operand(facts, node, a)) is not None
    }
    tensors = {n: f for n, f in operands.items() if isinstance(node.args[n], Value)}
    fact = fact.but(
        format=_format(node, out, tensors),
        distinct=min(out.numel, sum(f.distinct for f in tensors.values())),
        density=_density(node, tensors),
        linear=_is_linear(node, tensors),
        scan=any(f.scan for f in tensors.values()) and _is_linear(node, tensors),
    )
    if all(f.live.is_full for f in tensors.values()):
        return fact  # no constant anywhere, as nearly always
    lives = {n: f.live.broadcast(out.shape) for n, f in tensors.items()}
    name = node.plain_name
    if len(tensors) > 1 and (absorbing := _absorbing(name, tensors)):
        rest, names = absorbing
        live = Region.full(out.shape)
        for n in names:
            live = live.intersect(lives[n])
        masked = False
        inside = None
        if name == "mul" and rest == 0.0:
            others = [f for n, f in tensors.items() if n not in names] or list(tensors.values())
            triangular = any(tensors[n].triangular for n in names)
            masked = triangular and any(f.linear for f in others)
        elif name in _CONJUNCTION and all(f.inside for f in tensors.values()):
            inside = 1.0
        return fact.but(live=live, rest=rest, inside=inside, scan=fact.scan or masked)
    live = Region.empty(out.shape)
    for region in lives.values():
        live = live.union(region)
    if live.is_full:
        return fact
    outside = _apply(node, {n: f.rest for n, f in tensors.items()})
    if outside is None:
        return fact.but(density=0.0 if any(f.patterned for f in tensors.values()) else 1.0)
    inside = None
    if len(tensors) == 1:
        (only,) = tensors
        if (value := tensors[only].inside) is not None:
            inside = _apply(node, {only: value})
    if inside is not None and inside <= MASKED and live.exact:
        # Masked elements are the ones outside, whichever way round the mask was built.
        live, outside, inside = Region.full(out.shape).subtract(live), inside, outside
    return fact.but(live=live, rest=outside, inside=inside)


_CONJUNCTION = frozenset(("bitwise_and", "logical_and", "__and__"))


def _absorbing(name: str, tensors: dict[str, Fact]) -> tuple[float, list[str]] | None:
    """The constant that wins over whatever it meets, and the operands that have it outside."""
    partial = {n: f for n, f in tensors.items() if not f.live.is_full}
    masked = [n for n, f in partial.items() if f.rest <= MASKED]
    zeros = [n for n, f in partial.items() if f.rest == 0.0]
    if name == "add" and masked:
        return -math.inf, masked
    if name in ("sub", "div", "true_divide") and "self" in masked:
        return -math.inf, ["self"]
    if name == "mul" and masked:
        return -math.inf, masked  # a scale, which is positive
    if name == "mul" and zeros:
        return 0.0, zeros
    if name in ("div", "true_divide") and "self" in zeros:
        return 0.0, ["self"]
    if name in _CONJUNCTION and zeros:
        return 0.0, zeros
    return None


def _apply(node: Node, constants: dict[str, float]) -> float | None:
    """An elementwise operation on constants."""
    args = {}
    for name, arg in node.args.items():
        if isinstance(arg, Value):
            args[name] = torch.tensor(constants[name]).to(arg.dtype)
        else:
            args[name] = arg
    call = getattr(torch.ops.aten, node.plain_name, None)
    overload = getattr(call, node.overload, None)
    if overload is None:
        return None
    try:
        result = float(overload(**args))
    except (RuntimeError, TypeError):
        return None
    return None if math.isnan(result) else result


def _format(node: Node, out: Value, tensors: dict[str, Fact]) -> Format:
    """Scales leave a format alone, and codes of 8 bits or fewer stay what they are."""
    own = format_of(out.dtype)
    carriers = [f for f in tensors.values() if f.distinct * SCALE_REUSE > out.numel]
    if not carriers:
        carriers = list(tensors.values())
    name = node.plain_name
    if name in _ROUNDING:
        return "fp4"
    if len(carriers) == 1 and name in _SCALING:
        return narrower(carriers[0].format, own)
    coded = [f.format for f in carriers if not f.constant]
    if coded and all(map(is_quantised, coded)):
        return narrower(widest(coded), own)
    return own


_SCALING = frozenset(("mul", "div", "clone", "neg", "abs", "masked_fill", "_to_copy", "where"))
_ROUNDING = frozenset(("round", "floor", "ceil", "trunc", "sign", "bucketize", "searchsorted"))
_COMPARING = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))


def _density(node: Node, tensors: dict[str, Fact]) -> float:
    name = node.plain_name
    if name in _COMPARING:
        # Indices against indices make a structure (who attends whom, which expert); numbers
        # against numbers make scattered signs that no unit can use.
        values = [a for a in node.args.values() if isinstance(a, Value)]
        structured = not any(v.dtype.is_floating_point for v in values)
        return 0.0 if structured else 1.0
    shares = [f.density for f in tensors.values()]
    if name == "mul":
        return math.prod(shares)
    if name in ("div", "true_divide"):
        return tensors["self"].density if "self" in tensors else 1.0
    # Where a dense operand is added, nothing stays masked.
    every = all(f.patterned for f in tensors.values())
    return (min if every else max)(shares, default=1.0)


def _is_linear(node: Node, tensors: dict[str, Fact]) -> bool:
    """Whether the result is linear in a contraction, given which operands are."""
    name = node.plain_name
    linear = [f for f in tensors.values() if f.linear]
    if not linear:
        return False
    if name in ("mul", "div", "true_divide"):
        return sum(f.product for f in tensors.values()) == 1
    return name in (
        "add",
        "sub",
        "rsub",
        "neg",
        "clone",
        "_to_copy",
        "masked_fill",
        "where",
        "copy",
    )


# ---- Rules ----------------------------------------------------------------------------------


def _fixed(value: float) -> Callable[[Facts, Node, Value, Fact], Fact]:
    return lambda facts, node, out, fact: fact.but(
        live=Region.empty(out.shape), rest=value, distinct=1, format="fp4"
    )


def _full(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    key = next((k for k in ("fill_value", "value", "s") if k in node.args), None)
    arg = node.args[key] if key else None
    if isinstance(arg, Value):
        given = facts.at(node, arg).fixed
        if given is None:
            return fact.but(distinct=1, format=facts.at(node, arg).format)
        arg = given
    if not isinstance(arg, bool | int | float):
        return fact
    made = _fixed(float(arg))(facts, node, out, fact)
    return made.but(format=format_of_content(torch.tensor(float(arg))))


def _copy(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    """copy_: the source's facts, expanded."""
    source = node.args["src"]
    given = facts.at(node, source)
    return given.but(
        live=given.live.broadcast(out.shape),
        format=narrower(given.format, format_of(out.dtype)),
    )


def _masked_fill(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    own = facts.at(node, node.args["self"])
    mask = facts.mask(node, node.args["mask"])
    filler = _operand(facts, node, node.args["value"])
    value = None if filler is None else filler.fixed
    base = fact.but(
        format=own.format,
        distinct=min(out.numel, own.distinct + 1),
        linear=own.linear,
        scan=own.scan,
        density=own.density,
    )
    hides = value is not None and (value == 0.0 or value <= MASKED)
    own_live = own.live.broadcast(out.shape)
    if value is None:
        return base
    truth = mask.true_region()
    if truth is None:
        hidden = mask.density if hides else 1.0
        # Share that stays, if scattered masks are known; nothing, if they are not.
        share = 1.0 - hidden if 0.0 < mask.density < 1.0 else mask.density
        return (
            base.but(live=own_live, rest=own.rest, density=base.density * share) if hides else base
        )
    kept = Region.full(out.shape).subtract(truth.broadcast(out.shape))
    value = -math.inf if value <= MASKED else value
    if own_live.is_full or _alike(own.rest, value):
        masked = value == 0.0 and own.linear and kept.coupled
        return base.but(live=own_live.intersect(kept), rest=value, scan=base.scan or masked)
    return base.but(live=own_live.union(truth.broadcast(out.shape)), rest=own.rest)


def _where(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    mask = facts.mask(node, node.args["condition"])
    picked = [_operand(facts, node, node.args.get(k)) for k in ("self", "other")]
    yes, no = picked
    if yes is None or no is None:
        return fact
    fact = fact.but(
        format=widest([f.format for f in (yes, no) if f.fixed is None] or ["fp4"]),
        distinct=min(out.numel, yes.distinct + no.distinct),
        linear=yes.linear or no.linear,
        scan=yes.scan or no.scan,
    )
    truth = mask.true_region()
    for chosen, other, inverted in ((yes, no, False), (no, yes, True)):
        value = other.fixed
        if value is None:
            continue
        value = -math.inf if value <= MASKED else value
        if truth is None:
            if value == 0.0 or value == -math.inf:
                return fact.but(density=chosen.density * mask.density)
            continue
        region = truth.broadcast(out.shape)
        if inverted:
            region = Region.full(out.shape).subtract(region)
        if chosen.fixed is not None:
            return fact.but(live=region, rest=value, inside=chosen.fixed)
        live = chosen.live.broadcast(out.shape)
        if live.is_full or _alike(chosen.rest, value):
            region = region.intersect(live)
        masked = value == 0.0 and chosen.linear and region.coupled
        return fact.but(live=region, rest=value, scan=fact.scan or masked)
    return fact


def _triangle(lower: bool) -> Callable[[Facts, Node, Value, Fact], Fact]:
    def rule(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
        own = facts.at(node, node.args["self"])
        band = triangle(out.shape, node.args["diagonal"], lower=lower)
        fact = fact.but(format=own.format, linear=own.linear, density=own.density, rest=0.0)
        if (value := own.fixed) is not None:
            value = -math.inf if value <= MASKED else value
            if value == -math.inf:
                # A mask to be added: minus infinity on one side, 0 on the other.
                other = Region.full(out.shape).subtract(band)
                return fact.but(live=other, rest=value, inside=0.0, distinct=2)
            return fact.but(live=band, inside=value, distinct=2)
        live = own.live.intersect(band) if own.rest == 0.0 else band
        return fact.but(live=live, scan=own.scan or own.linear)

    return rule


def triangle(shape: tuple[int, ...], diagonal: int, *, lower: bool) -> Region:
    """The lower or upper triangle of the last two axes, as `torch.tril` and `torch.triu`."""
    rows = np.arange(shape[-2])
    edge = rows + diagonal
    low, high = (0 * rows, edge + 1) if lower else (edge, 0 * rows + shape[-1])
    return Region.of_band(shape, row=len(shape) - 2, col=len(shape) - 1, low=low, high=high)


def _softmax(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    own = facts.at(node, node.args["self"])
    if own.rest > MASKED and own.density == 1.0:
        return fact
    live = own.live if own.rest <= MASKED else fact.live
    return fact.but(live=live, rest=0.0, density=own.density)


def _pad(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    source = node.args["self"]
    own = facts.at(node, source)
    value = float(node.args["value"])
    fact = fact.but(
        format=own.format, distinct=own.distinct, density=own.density, linear=own.linear
    )
    live = own.live if own.live.is_full or _alike(own.rest, value) else Region.full(source.shape)
    for dim, before, after in padding_of(node):
        size = live.shape[dim]
        if before < 0 or after < 0:
            live = live.slice(dim, max(0, -before), size - max(0, -after))
        live = live.unslice(dim, out.shape[dim], max(0, before))
    return fact.but(live=live, rest=value)


def padding_of(node: Node) -> list[tuple[int, int, int]]:
    """(axis, before, after) of a constant_pad_nd; negative ones cut."""
    pad, rank = node.args["pad"], len(node.args["self"].shape)
    return [(rank - 1 - i // 2, pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]


def _placed(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    """Gradient of a slice or a row: zero everywhere else."""
    gradient = node.args["grad_output"]
    own = facts.at(node, gradient)
    dim = node.args["dim"] % len(out.shape)
    live = own.live if own.rest == 0.0 else Region.full(gradient.shape)
    if node.name == "select_backward":
        live = live.reshape((*out.shape[:dim], 1, *out.shape[dim + 1 :]))
        start, step = node.args["index"] % out.shape[dim], 1
    else:
        limits = slice(node.args["start"], node.args["end"], node.args["step"])
        start, _, step = limits.indices(out.shape[dim])
    live = live.unslice(dim, out.shape[dim], start, step)
    return fact.but(live=live, rest=0.0, format=own.format, linear=own.linear)


def _cat(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    parts = [v for v in node.args["tensors"] if v.shape != (0,)]
    known = [facts.at(node, v) for v in parts]
    fact = _joined(fact, known, out)
    rests = {f.rest for f in known if not f.live.is_full}
    if len(rests) != 1:
        return fact.but(density=0.0) if rests else fact
    dim = node.args["dim"] % len(out.shape)
    live, start = Region.empty(out.shape), 0
    for value, own in zip(parts, known, strict=True):
        live = live.union(own.live.unslice(dim, out.shape[dim], start))
        start += value.shape[dim]
    return fact.but(live=live, rest=rests.pop())


def _stack(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    parts = node.args["tensors"]
    known = [facts.at(node, v) for v in parts]
    fact = _joined(fact, known, out)
    rests = {f.rest for f in known if not f.live.is_full}
    if len(rests) != 1:
        return fact.but(density=0.0) if rests else fact
    dim = node.args["dim"] % len(out.shape)
    live = Region.empty(out.shape)
    for i, own in enumerate(known):
        one = (*out.shape[:dim], 1, *out.shape[dim + 1 :])
        live = live.union(own.live.reshape(one).unslice(dim, out.shape[dim], i))
    return fact.but(live=live, rest=rests.pop())


def _joined(fact: Fact, parts: list[Fact], out: Value) -> Fact:
    """Facts of a tensor put together from others."""
    if not parts:
        return fact
    return fact.but(
        format=narrower(widest([p.format for p in parts]), fact.format),
        distinct=min(out.numel, sum(p.distinct for p in parts)),
        density=max(p.density for p in parts),
        linear=all(p.linear or p.fixed == 0.0 for p in parts) and any(p.linear for p in parts),
        scan=any(p.scan for p in parts),
    )


def _selected(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    """Elements of one tensor picked or moved around: its format, but not where they are."""
    source = node.args["self"] if "self" in node.args else node.args["weight"]
    own = facts.at(node, source)
    others = [facts.at(node, v) for v in node.inputs if v is not source]
    # Chosen by data, elements of a small table are as many independent values as choices.
    chosen = any(not f.constant for f in others)
    if node.name == "index" and len(source.shape) == 1 and len(others) == 1:
        fact = _looked_up(facts, node, source, others[0], out, fact)
    elif own.patterned:
        fact = fact.but(density=0.0)
    if not fact.live.is_full:
        return fact.but(format=own.format, distinct=out.numel, product=True)
    return fact.but(
        live=Region.empty(out.shape) if own.fixed is not None else fact.live,
        rest=own.rest if own.fixed is not None else 0.0,
        format=own.format,
        distinct=out.numel if chosen else min(out.numel, own.distinct),
        linear=own.linear,
        scan=own.scan,
        density=min(fact.density, own.density),
        product=own.product or any(f.product for f in others),
    )


def _looked_up(facts: Facts, node: Node, table: Value, index: Fact, out: Value, fact: Fact) -> Fact:
    """Values of a table by codes: where all codes are one constant, so are the values."""
    if index.live.is_full:
        return fact.but(density=index.density)
    entries = facts.content(node, table)
    if entries is None or not index.rest.is_integer():
        return fact.but(density=0.0)
    rest = float(entries[int(index.rest)])
    return fact.but(live=index.live, rest=rest, density=index.density)


def _scattered(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    """Values written to places: into zeros they make a pattern that is not followed further."""
    own = facts.at(node, node.args["self"])
    values = [
        facts.at(node, v)
        for k in ("src", "values", "source")
        for v in [node.args.get(k)]
        if isinstance(v, Value)
    ]
    fact = _joined(fact, [own, *values], out)
    into_nothing = own.fixed is not None and (own.fixed == 0.0 or own.fixed <= MASKED)
    return fact.but(density=0.0) if into_nothing else fact


def _accumulated(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    return fact.but(linear=False)


def _reduced(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    own = facts.at(node, node.args["self"])
    distinct = min(out.numel, own.distinct)
    return fact.but(linear=own.linear, scan=own.scan, distinct=distinct)


def _contracted(facts: Facts, node: Node, out: Value, fact: Fact) -> Fact:
    return fact.but(product=True, linear=True)


def _alike(a: float, b: float) -> bool:
    return a == b or (a <= MASKED and b <= MASKED)


RULES: dict[str, Callable[[Facts, Node, Value, Fact], Fact]] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero"), _fixed(0.0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _fixed(1.0)),
    **dict.fromkeys(("full", "full_like", "new_full", "fill", "scalar_tensor"), _full),
    "copy": _copy,
    "_to_copy": elementwise,
    "masked_fill": _masked_fill,
    "where": _where,
    "tril": _triangle(lower=True),
    "triu": _triangle(lower=False),
    **dict.fromkeys(("_softmax", "_safe_softmax"), _softmax),
    "constant_pad_nd": _pad,
    **dict.fromkeys(("slice_backward", "select_backward"), _placed),
    "cat": _cat,
    "stack": _stack,
    **dict.fromkeys(
        ("index", "index_select", "gather", "embedding", "repeat", "flip", "roll", "sort"),
        _selected,
    ),
    **dict.fromkeys(("scatter", "index_put", "masked_scatter", "index_copy"), _scattered),
    **dict.fromkeys(("index_add", "scatter_add", "scatter_reduce"), _accumulated),
    **dict.fromkeys(("sum", "mean", "cumsum"), _reduced),
    **dict.fromkeys(
        (
            "mm",
            "bmm",
            "addmm",
            "baddbmm",
            "mv",
            "dot",
            "linear",
            "convolution",
            "_scaled_mm",
            "_int_mm",
        ),
        _contracted,
    ),
}

MIXING = frozenset(
    (
        "amax",
        "amin",
        "max",
        "min",
        "argmax",
        "argmin",
        "any",
        "all",
        "prod",
        "logsumexp",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "linalg_vector_norm",
        "_log_softmax",
        "_softmax_backward_data",
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "_fft_r2c",
        "_fft_c2c",
        "_fft_c2r",
        "convolution_backward",
        "bincount",
        "nonzero",
        "sort",
        "topk",
    )
)
"""Operations whose results are made of many elements each, so that masked ones leave no pattern."""
