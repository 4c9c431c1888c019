"""What is known about the values of a recorded run, found forwards through its operations.

For every tensor: where its elements are a known constant (padding, a masked score, a fresh buffer),
which number format holds its values, and how it depends on earlier contractions. From this the
demand pass tells which elements nobody needs to compute, and the work table which products are of
zeros, which units may do them, and which triangular products are scans in disguise.

The rules by operation are in `fact_rules`. One that is missing costs precision, not correctness:
the default claims nothing, and where masked elements go in, that any number may come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .contents import Contents
from .precision import Format, format_of, format_of_content, wider
from .region import Region
from .trace import Node, Trace, Value

SCALE_REUSE = 8
"""A tensor with at most one independent value per this many elements is made of scales."""
MASKED = -1e4
"""Scores at or below this count as minus infinity: their exponential is zero."""


@dataclass(frozen=True)
class Fact:
    """What is known about one tensor.

    Elements outside `live` are all `rest`. `live` may be a subset of the truth where it is not
    exact, which makes bounds smaller.
    """

    live: Region
    rest: float = 0.0
    inside: float | None = None
    """The value of all elements in `live`, where that is known as well."""
    format: Format = "fp64"
    distinct: int = 0
    """Number of independent values, at most the number of elements."""
    density: float = 1.0
    """Share of `live` that is not `rest`, where it is known to be scattered; 0 if unknown."""
    product: bool = False
    """Whether a contraction went into it."""
    linear: bool = False
    """Whether it is a linear function of a contraction's result."""
    scan: bool = False
    """Whether it is linear with a triangular mask on it: a scan can replace what follows."""
    constant: bool = False
    """Whether it depends on no input."""
    steering: bool = False
    """Whether it depends on no floating-point input other than masks."""

    def but(self, **changes: Any) -> Fact:
        """These facts with some changed. (dataclasses.replace costs four times as much.)"""
        fact = object.__new__(Fact)
        fact.__dict__.update(self.__dict__)
        fact.__dict__.update(changes)
        return fact

    @property
    def fixed(self) -> float | None:
        """The value of all elements, if there is one."""
        return self.rest if not self.live and self.live.exact else None

    @property
    def patterned(self) -> bool:
        """Whether some of it is masked away: contractions with it may cost less than they seem."""
        hidden = self.rest == 0.0 or self.rest <= MASKED
        return self.density < 1.0 or (hidden and not self.live.is_full and bool(self.live))

    @property
    def triangular(self) -> bool:
        """Whether it is a mask or a decay between places: few values make all its pairs.

        Attention probabilities are not: each pair is a value of its own, from a contraction.
        """
        few = self.distinct * SCALE_REUSE <= math.prod(self.live.shape)
        return self.rest == 0.0 and self.live.coupled and (few or not self.product)

    def true_region(self) -> Region | None:
        """Where a mask is true, if that is known."""
        if (value := self.fixed) is not None:
            full = Region.full(self.live.shape)
            return full if value else Region.empty(self.live.shape)
        if self.inside is None or not self.live.exact or self.density < 1.0:
            return None
        if self.inside and not self.rest:
            return self.live
        if self.rest and not self.inside:
            return Region.full(self.live.shape).subtract(self.live)
        return None


class Facts:
    """Facts about every tensor of a run, as each operation saw it.

    Args:
        trace: the run.
        contents: where real values of masks and small constants come from.
        known: inputs whose values follow from their name: facts by input name.
    """

    def __init__(self, trace: Trace, contents: Contents, known: dict[str, Fact]) -> None:
        from .fact_rules import MIXING, RULES, elementwise

        self._rules, self._elementwise, self._mixing = RULES, elementwise, MIXING
        self._contents = contents
        self._of: dict[tuple[int, int], Fact] = {}
        self._of_views: dict[tuple[int, int], Fact] = {}
        self._usual: dict[tuple, Fact] = {}
        self._looked_at: dict[tuple[int, int], tuple[Region, float] | None] = {}
        for name, value in trace.inputs.items():
            fact = known.get(name) or _plain(value).but(
                steering=value.base.steering or not value.dtype.is_floating_point
            )
            self._of[id(value.base), 0] = fact
        for step in trace.steps:
            if isinstance(step, Node):
                self._learn(step)

    def of(self, value: Value, version: int) -> Fact:
        """What is known about a tensor, as of a version of its base."""
        if value.source is not None:
            key = id(value), version
            found = self._of_views.get(key)
            if found is None:
                found = self._of_views[key] = self._of_view(value, version)
            return found
        fact = self._of.get((id(value.base), version))
        if fact is None:
            fact = self._of[id(value.base), version] = self._from_outside(value, version)
        return fact

    def _of_view(self, value: Value, version: int) -> Fact:
        fact = self.of(value.root, version)
        sizes = [math.prod(step.source_shape) for step in value.chain]
        fact = fact.but(
            live=Region.full(value.shape) if value.opaque else value.from_base(fact.live),
            distinct=min(fact.distinct, value.numel, *sizes),
        )
        if value.dtype != value.base.dtype:
            fact = fact.but(
                format=format_of(value.dtype), inside=None, live=Region.full(value.shape)
            )
        return fact

    def at(self, node: Node, value: Value) -> Fact:
        """What is known about an argument when the operation ran."""
        return self.of(value, node.version_of(value))

    def content(self, node: Node, value: Value) -> Tensor | None:
        """Real values of an argument when the operation ran, where they are cheap to have."""
        return self._contents.if_cheap(value, node.version_of(value))

    def mask(self, node: Node, value: Value) -> Fact:
        """`at`, with a look at the real values of a mask where they are cheap to have."""
        fact = self.at(node, value)
        if fact.true_region() is not None or value.dtype not in MASK_DTYPES:
            return fact
        seen = self._look(node, value, lambda content: content != 0)
        if seen is None or not seen[0].exact:
            return fact if seen is None else fact.but(density=seen[1])
        return fact.but(live=seen[0], rest=0.0, inside=1.0, density=1.0)

    def additive_mask(self, node: Node, value: Value) -> Fact:
        """`at`, with a look for very negative values in what no floating-point data went into."""
        fact = self.at(node, value)
        if not fact.steering or not fact.live.is_full:
            return fact
        seen = self._look(node, value, lambda content: content > MASKED)
        if seen is None or seen[0].is_full:
            return fact
        if not seen[0].exact:
            return fact.but(density=seen[1])
        return fact.but(live=seen[0], rest=-math.inf)

    def _look(
        self, node: Node, value: Value, test: Callable[[Tensor], Tensor]
    ) -> tuple[Region, float] | None:
        """Where a tensor's real values pass a test, and the share of them that do."""
        if value.opaque:
            return None
        version = node.version_of(value)
        key = id(value.base), version
        if key not in self._looked_at:
            content = self._contents.if_cheap(value.root, version)
            self._looked_at[key] = None
            if content is not None:
                passed = test(content).numpy()
                self._looked_at[key] = Region.of_mask(passed), float(passed.mean())
        seen = self._looked_at[key]
        return seen and (value.from_base(seen[0]), seen[1])

    # ---- Learning ----------------------------------------------------------------------------

    def _from_outside(self, value: Value, version: int) -> Fact:
        """A constant that the reference brought along, such as a table of decoded values."""
        fact = _plain(value).but(constant=True, steering=True)
        content = value.base.contents.get(version)
        return fact if content is None else fact.but(format=format_of_content(content))

    def _learn(self, node: Node) -> None:
        for out in node.fresh:
            fact = self._result(node, out)
            self._of[id(out.base), 0] = fact
        for value in node.written:
            old = self.of(value.root, node.version_of(value))
            self._of[id(value.base), node.version_of(value) + 1] = self._after_write(
                node, value, old
            )

    def _result(self, node: Node, out: Value) -> Fact:
        inputs = [self.at(node, v) for v in node.inputs]
        rule = self._rules.get(node.plain_name)
        usual = None
        if rule is None and node.pointwise:
            usual = _usual(node, out, inputs)
            if usual is not None and (known := self._usual.get(usual)) is not None:
                return known
        fact = _plain(out).but(
            product=any(f.product for f in inputs),
            constant=all(f.constant for f in inputs) and not node.random,
            steering=all(f.steering for f in inputs) and not node.random,
        )
        if rule is not None:
            return rule(self, node, out, fact)
        if node.pointwise:
            fact = self._elementwise(self, node, out, fact)
            if usual is not None:
                self._usual[usual] = fact
            return fact
        if node.name not in self._mixing and any(f.patterned for f in inputs):
            # Where the masked elements went is not known.
            return fact.but(density=0.0)
        return fact

    def _after_write(self, node: Node, value: Value, old: Fact) -> Fact:
        """The base's facts after an in-place operation on a view of it."""
        new = self._result(node, value)
        merged = old.but(
            format=wider(old.format, new.format) if old.fixed is None else new.format,
            distinct=min(value.base.numel, old.distinct + new.distinct),
            product=old.product or new.product,
            linear=new.linear and (old.linear or old.fixed is not None),
            scan=new.scan and (old.scan or old.fixed is not None),
            constant=old.constant and new.constant,
            steering=old.steering and new.steering,
            density=new.density if old.fixed is not None else min(old.density, new.density),
            inside=None,
        )
        if value.opaque:
            return merged.but(live=Region.full(value.base.shape))
        whole = value.to_base(Region.full(value.shape))
        live = value.to_base(new.live)
        if whole.is_full:
            return merged.but(live=live, rest=new.rest, inside=new.inside)
        if new.rest != old.rest and not new.live.is_full:
            live = whole
        return merged.but(live=old.live.subtract(whole).union(live))


def _usual(node: Node, out: Value, inputs: list[Fact]) -> tuple | None:
    """All that the facts of an elementwise result follow from, where no value has to be looked at.

    Loops repeat the same operation on tensors of the same shape a thousand times. None where
    anything may be masked, or is a mask.
    """
    operands = [(name, a.dtype) for name, a in node.args.items() if isinstance(a, Value)]
    if len(operands) != len(inputs):
        return None
    key: list[Any] = [node.plain_name, node.random, out.shape, out.dtype]
    for (name, dtype), f in zip(operands, inputs, strict=True):
        if dtype in MASK_DTYPES or not f.live.is_full:
            return None
        if f.steering and node.plain_name == "add":
            return None
        key += (
            *(name, dtype, f.format, f.distinct, f.density),
            *(f.product, f.linear, f.scan, f.constant, f.steering),
        )
    return tuple(key)


MASK_DTYPES = (torch.bool, torch.uint8)
"""Dtypes whose values may say where something is."""


def _plain(value: Value) -> Fact:
    return Fact(live=Region.full(value.shape), format=format_of(value.dtype), distinct=value.numel)
