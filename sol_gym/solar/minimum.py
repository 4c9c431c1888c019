"""Algebraic minima: the least work of products that may be rewritten without changing their result.

A kernel need not multiply in the order in which the reference does. Two rewritings are searched,
so that a bound holds against them:

- Equal products (the same operation on the same values) are computed once.
- A chain of products with nothing nonlinear in between may be associated in any order, and a sum
  over rows or columns of a result may be taken of the operands. A chain is followed through views,
  casts, factors that are scalars or vectors, and added vectors, as long as the intermediate result
  is used nowhere else. It counts with the least FLOPs of any order, by dynamic programming over
  subsets of its operands.

Where masks or a partial demand thin out a chain, each order counts with the least share of its
iterations that they can leave, which makes a bound smaller and never larger. Not searched:
intermediates that several products use, distributing over sums of matrices, factors of which each
element is its own (gates), and anything through slices, concatenations and gathers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from .demand import Operation, Outcome
from .facts import Facts
from .precision import WorkClass
from .trace import Control, Node, Trace, Value
from .work import CONTRACTIONS, Product, Work

MOST_OPERANDS = 8
"""Longer chains are cut."""
_ROUNDING = 1.0 - 1e-6
"""Shares are floating-point numbers, counts are exact: less of a difference is none."""
_FASTEST_FIRST: tuple[WorkClass, ...] = (
    "nvfp4_tc", "fp8_tc", "fp16_tc", "bf16_tc", "tf32_tc", "fp32", "fp64", "fp32_fma",
)  # fmt: skip
_SAME = frozenset(("_to_copy", "clone", "neg", "contiguous"))
_SCALED = frozenset(("mul", "div", "true_divide"))
_SHIFTED = frozenset(("add", "sub", "rsub"))
_COMPARED = frozenset((type(None), bool, int, str, torch.dtype))
"""Types of arguments that are the same if they are equal."""
_SUMS = frozenset(("sum", "mean"))


def least_work(trace: Trace, facts: Facts, outcome: Outcome) -> Outcome:
    """An outcome with the work of its products at the algebraic minimum.

    Args:
        trace, facts: of the run.
        outcome: what the run demands; its products count in the order of the reference.
    """
    operations = list(outcome.operations)
    rewrites: dict[str, None] = {}
    if not any(map(_counts, operations)):
        return outcome
    for positions in _equal_products(trace, operations):
        kept = max(positions, key=lambda i: _flops(operations[i]))
        for i in positions:
            if i != kept:
                why = "the same product is computed elsewhere"
                operations[i] = _instead(operations[i], 0, why)
        rewrites[f"{operations[kept].node.name}: {len(positions)} equal products count once"] = None
    for chain in _chains(trace, operations):
        least = chain.least(facts, operations)
        before = sum(_flops(operations[i]) for i in chain.members)
        if least >= before * _ROUNDING:
            continue
        unit = min((_unit(operations[i]) for i in chain.members), key=_FASTEST_FIRST.index)
        fast = [i for i in chain.members if _unit(operations[i]) == unit]
        most = sum(_flops(operations[i]) for i in fast)
        # On mixed units, what even the order of the reference needs of the fastest one.
        least = min(least, most)
        text = f"{chain.named(operations)}: {before:,} FLOP as associated, {least:,} at least"
        rewrites[text] = None
        given = 0
        for i in chain.members:
            # Each member stands for its share; that they add up is what counts.
            part = _flops(operations[i]) * least // most if i in fast else 0
            if fast and i == fast[-1]:
                part = least - given
            given += part
            operations[i] = _instead(operations[i], part, text)
    return replace(outcome, operations=operations, rewrites=list(rewrites))


def _unit(operation: Operation) -> WorkClass:
    assert operation.work is not None
    return operation.work.unit


def _flops(operation: Operation) -> int:
    return operation.work.flops if operation.work is not None else 0


def _counts(operation: Operation) -> bool:
    return _flops(operation) > 0 and operation.node.name in CONTRACTIONS


def _instead(operation: Operation, flops: int, why: str) -> Operation:
    work = operation.work
    assert isinstance(work, Work)
    return replace(operation, work=replace(work, flops=flops), rewrite=why)


# ---- Equal products -------------------------------------------------------------------------


def _equal_products(trace: Trace, operations: list[Operation]) -> Iterator[list[int]]:
    """Places of products that compute the same, by numbering values."""
    names = {id(value.base): name for name, value in trace.inputs.items()}
    numbers: dict[tuple[int, int], int] = {}
    known: dict[Any, int] = {}

    def number(key: Any) -> int:
        return known.setdefault(key, len(known))

    def of(value: Value, version: int) -> tuple:
        base = value.base
        place = id(base), version
        if place not in numbers:
            numbers[place] = number(("from outside", names.get(id(base), place)))
        return numbers[place], base.geometry, value.geometry

    def of_argument(node: Node, arg: Any) -> Any:
        if isinstance(arg, Value):
            return of(arg, node.version_of(arg))
        if isinstance(arg, list | tuple):
            return tuple(of_argument(node, item) for item in arg)
        # Types apart, for True equals 1; and 0.0 equals -0.0, so floats by what they print as.
        return (type(arg), arg) if type(arg) in _COMPARED else repr(arg)

    groups: dict[int, list[int]] = {}
    for i, operation in enumerate(operations):
        node = operation.node
        given = tuple((name, of_argument(node, arg)) for name, arg in node.args.items())
        made = number((str(node), i if node.random else -1, given))
        for place, out in enumerate(node.outs):
            if out is not None and out.base.makers[0] is node:
                numbers[id(out.base), 0] = number((made, place))
        for place, value in enumerate(node.written):
            numbers[id(value.base), node.version_of(value) + 1] = number((made, "wrote", place))
        if _counts(operation):
            groups.setdefault(made, []).append(i)
    # `of_argument` refers to itself and so to these: nothing is left for the collector of cycles.
    numbers.clear()
    known.clear()
    return (group for group in groups.values() if len(group) > 1)


# ---- Chains ---------------------------------------------------------------------------------


class _Axes:
    """Axes as they are divided by reshapes: each is whole, or an outer and an inner one."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parts: dict[int, tuple[int, int]] = {}

    def new(self, size: int) -> list[int]:
        """A new axis; none for size 1."""
        if size == 1:
            return []
        self._sizes.append(size)
        return [len(self._sizes) - 1]

    def size(self, axis: int) -> int:
        return self._sizes[axis]

    def resolve(self, axes: Sequence[int]) -> list[int]:
        """The undivided axes that some are made of, outermost first."""
        found: list[int] = []
        for axis in axes:
            parts = self._parts.get(axis)
            found += [axis] if parts is None else self.resolve(parts)
        return found

    def regroup(self, dims: Sequence[list[int]], shape: Sequence[int]) -> list[list[int]] | None:
        """Axes of dimensions under another shape; None where an axis would have to be cut oddly."""
        left = self.resolve([axis for dim in dims for axis in dim])[::-1]
        result = []
        for size in shape:
            taken: list[int] = []
            while size > 1:
                if not left:
                    return None
                axis = left.pop()
                own = self._sizes[axis]
                if size % own == 0:
                    taken.append(axis)
                    size //= own
                elif own % size == 0:
                    (outer,), (inner,) = self.new(size), self.new(own // size)
                    self._parts[axis] = outer, inner
                    taken.append(outer)
                    left.append(inner)
                    size = 1
                else:
                    return None
            result.append(taken)
        return None if left else result


class _Place(NamedTuple):
    """A tensor that goes into an operation, and the axes of its dimensions (in any grouping)."""

    node: Node
    value: Value
    dims: list[list[int]]


class _Chain:
    """Products that may be associated in any order."""

    def __init__(self, root: int, axes: _Axes) -> None:
        self.root = root
        self.axes = axes
        self.members: list[int] = []
        self.leaves: list[_Place] = []
        self.out: list[list[int]] = []
        self.repeats = False
        """Whether an operand is an expanded view of a smaller tensor."""

    def named(self, operations: list[Operation]) -> str:
        """The chain in words."""
        lines = sorted({operations[i].node.line or 0 for i in {*self.members, self.root}})
        return (
            f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}: "
            f"{len(self.members)} product{'s' if len(self.members) > 1 else ''} of "
            f"{len(self.leaves)} operands"
        )

    def least(self, facts: Facts, operations: list[Operation]) -> int:
        """FLOPs of the best order, or less where masks and partial demands thin it out."""
        axes = self.axes
        own = [frozenset(axes.resolve([a for d in leaf.dims for a in d])) for leaf in self.leaves]
        out = frozenset(axes.resolve([a for d in self.out for a in d]))
        shares = [_share(facts, leaf) for leaf in self.leaves]
        demand = operations[self.root].demand
        assert demand is not None
        numel = math.prod(demand.firm.shape)
        wanted = demand.share * demand.firm.count() / max(numel, 1)
        every = (1 << len(own)) - 1

        @cache
        def letters(subset: int) -> frozenset[int]:
            """Axes of an intermediate result: those that the rest or the output still needs."""
            inside = frozenset[int]().union(*(o for i, o in enumerate(own) if subset >> i & 1))
            rest = frozenset[int]().union(*(o for i, o in enumerate(own) if not subset >> i & 1))
            return inside & (rest | out)

        def pair(a: int, b: int) -> float:
            thin = 1.0 - wanted
            for subset in (a, b):
                if subset & (subset - 1) == 0:
                    thin += 1.0 - shares[subset.bit_length() - 1]
            volume = math.prod(axes.size(x) for x in letters(a) | letters(b))
            return 2.0 * volume * max(0.0, 1.0 - thin)

        @cache
        def best(subset: int) -> float:
            if subset & (subset - 1) == 0:
                return 0.0
            least, lowest = math.inf, subset & -subset
            part = (subset - 1) & subset
            while part:
                if part & lowest:
                    other = subset ^ part
                    least = min(least, best(part) + best(other) + pair(part, other))
                part = (part - 1) & subset
            return least

        return int(best(every))


def _share(facts: Facts, leaf: _Place) -> float:
    """Share of an operand that is not known to be zero."""
    fact = facts.at(leaf.node, leaf.value)
    if fact.rest != 0.0:
        return fact.density
    return fact.density * fact.live.count() / max(leaf.value.numel, 1)


def _chains(trace: Trace, operations: list[Operation]) -> Iterator[_Chain]:
    """All chains worth a search: two products or more, or one under a sum or of repeats."""
    made_by = {id(out.base): i for i, o in enumerate(operations) for out in o.node.fresh}
    uses: Counter[int] = Counter(id(v.base) for v in trace.outputs)
    for step in trace.steps:
        if isinstance(step, Control):
            uses[id(step.value.base)] += 2  # it has to be there
    for operation in operations:
        if operation.demand is not None:
            uses.update(id(v.base) for v in operation.node.inputs)
    taken: set[int] = set()
    for i in reversed(range(len(operations))):
        operation = operations[i]
        node = operation.node
        sums = node.name in _SUMS and operation.demand is not None and len(node.inputs) == 1
        if i in taken or not (sums or _counts(operation)):
            continue
        builder = _Builder(operations, made_by, uses)
        chain = builder.from_sum(i) if sums else builder.from_product(i)
        taken.update(chain.members)
        if len(chain.members) > 1 or (chain.members and (sums or chain.repeats)):
            yield chain


class _Builder:
    """Follows a chain from its last operation to its operands."""

    def __init__(
        self, operations: list[Operation], made_by: dict[int, int], uses: Counter[int]
    ) -> None:
        self._operations = operations
        self._made_by = made_by
        self._uses = uses
        self._axes = _Axes()

    def from_product(self, root: int) -> _Chain:
        chain = _Chain(root, self._axes)
        out = self._operations[root].node.outs[0]
        assert out is not None
        chain.out = [self._axes.new(n) for n in out.shape]
        self._product(chain, root, chain.out)
        return chain

    def from_sum(self, root: int) -> _Chain:
        chain = _Chain(root, self._axes)
        node = self._operations[root].node
        (value,) = node.inputs
        dims = [self._axes.new(n) for n in value.shape]
        given = node.args.get("dim")
        summed = [given] if isinstance(given, int) else given or range(len(dims))
        gone = {d % max(len(dims), 1) for d in summed}
        chain.out = [dim for d, dim in enumerate(dims) if d not in gone]
        self._operand(chain, node, value, dims)
        return chain

    def _product(self, chain: _Chain, i: int, out: list[list[int]]) -> None:
        node = self._operations[i].node
        spec: Product = CONTRACTIONS[node.name]
        chain.members.append(i)
        letters = dict(zip(spec.out, out, strict=True))
        for name, axes in ((spec.left, spec.left_axes), (spec.right, spec.right_axes)):
            value = node.args[name]
            for letter, size in zip(axes, value.shape, strict=True):
                if letter not in letters:
                    letters[letter] = self._axes.new(size)
            self._operand(chain, node, value, [letters[x] for x in axes])

    def _operand(self, chain: _Chain, node: Node, value: Value, dims: list[list[int]]) -> None:
        """Add what an operand is made of: a product of the chain, or a leaf."""
        place = _Place(node, value, dims)
        while (source := self._before(place)) is not None:
            place = source
        product = self._product_behind(place)
        if product is None or len(chain.members) + len(chain.leaves) >= MOST_OPERANDS:
            below, _ = self._on_base(place.value, place.dims)
            chain.repeats |= sum(map(len, below)) < sum(map(len, self._resolved(dims)))
            chain.leaves.append(place._replace(dims=below))
        else:
            self._product(chain, *product)

    def _resolved(self, dims: list[list[int]]) -> list[list[int]]:
        return [self._axes.resolve(dim) for dim in dims]

    def _maker(self, place: _Place) -> tuple[int, list[list[int]]] | None:
        """The operation whose result a tensor is a view of, used here only, and the axes there."""
        base = place.value.base
        i = self._made_by.get(id(base))
        if i is None or self._uses[id(base)] != 1 or len(base.makers) > 1:
            return None
        dims, whole = self._on_base(place.value, place.dims)
        return (i, dims) if whole else None

    def _before(self, place: _Place) -> _Place | None:
        """What an operation that keeps it linear made a tensor of."""
        found = self._maker(place)
        if found is None:
            return None
        maker = self._operations[found[0]].node
        passed = _passed(maker)
        if passed is None or passed.shape != place.value.base.shape:
            return None
        return _Place(maker, passed, found[1])

    def _product_behind(self, place: _Place) -> tuple[int, list[list[int]]] | None:
        """The product that a tensor is the result of, but for added vectors."""
        found = self._maker(place)
        if found is None or not _counts(self._operations[found[0]]):
            return None
        maker = self._operations[found[0]].node
        spec = CONTRACTIONS[maker.name]
        added = [
            arg
            for name, arg in maker.args.items()
            if isinstance(arg, Value) and name not in (spec.left, spec.right)
        ]
        return found if all(map(_is_vector, added)) else None

    def _on_base(self, value: Value, dims: list[list[int]]) -> tuple[list[list[int]], bool]:
        """Axes of a base's dimensions, from those of a view of it; whether all steps have some.

        Where a step has none, the axes of what it is a step to.
        """
        dims = self._resolved(dims)
        for step in value.chain:
            match step.layout:
                case "reshape":
                    regrouped = self._axes.regroup(dims, step.source_shape)
                    if regrouped is None:
                        return dims, False
                    dims = regrouped
                case "expand":
                    kept = dims[len(dims) - len(step.source_shape) :]
                    sizes = zip(kept, step.source_shape, strict=True)
                    dims = [dim if size != 1 else [] for dim, size in sizes]
                case tuple(order):
                    dims = [dims[order.index(d)] for d in range(len(order))]
                case _:
                    return dims, False
        return dims, True


def _is_vector(value: Value) -> bool:
    return sum(n > 1 for n in value.shape) <= 1


def _passed(node: Node) -> Value | None:
    """The argument that an operation hands on linearly, but for factors and added vectors."""
    if node.written or not node.outs:
        return None
    name, tensors = node.name, [v for v in node.args.values() if isinstance(v, Value)]
    if name in _SAME and len(tensors) == 1:
        return tensors[0]
    if name in _SCALED or name in _SHIFTED:
        wide = [v for v in tensors if not _is_vector(v)]
        if len(wide) != 1 or (name not in _SHIFTED and name != "mul" and tensors[0] is not wide[0]):
            return None
        return wide[0]
    return None
