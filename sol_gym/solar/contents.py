"""Real values on demand, for the few tensors whose values decide what is read and computed.

A recorded run has shapes only. When the values of one tensor matter (a loop bound, a page table, an
expert index, a mask), the operations it depends on, and no others, are run for real on the CPU. For
page tables that is a handful of integers; for a routed mixture of experts it is the router.

Where even that costs too much, a selection is replaced by a stand-in that reads no more than any
real outcome could: a top-k picks the first k everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .trace import Base, Node, Value, map_values

CHEAP = 2**28
"""Budget for what is looked at in passing, such as whether a mask is causal: a second or two at most."""
ROUTING = 2**37
"""Budget for values that decide what is read: about a second on two cores."""

_MATRIX_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "linear"))


class TooExpensive(Exception):
    """The values asked for would take more work than the budget allows."""


class Contents:
    """Finds real values, and remembers at what price.

    Args:
        seed: of every random operation; each is repeatable on its own, in whatever order asked.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.drew_floats: bool = False
        """Whether values of a floating-point input were needed."""
        self.stand_ins: list[str] = []
        """Selections that were replaced."""

    def of(self, value: Value, version: int, *, budget: float) -> Tensor:
        """Real values of a tensor, as of a version of its base.

        Args:
            value: the tensor.
            version: of its base.
            budget: the most work, in elements touched or floating-point operations.

        Raises:
            TooExpensive: it would take more.
        """
        self._make(value.base, version, budget)
        return _seen(value, version)

    def if_cheap(self, value: Value, version: int) -> Tensor | None:
        """Real values if they cost little and no floating-point input is needed."""
        if version in value.base.contents:
            return _seen(value, version)
        try:
            plan = self._plan(value.base, version, CHEAP, floats=False)
        except TooExpensive:
            return None
        self._run(plan)
        return _seen(value, version)

    def choosing(self, value: Value, version: int) -> Tensor | None:
        """Real values of indices, with stand-ins for selections that cost too much to know."""
        if version in value.base.contents:
            return _seen(value, version)
        for replace in (False, True):
            try:
                plan = self._plan(value.base, version, ROUTING, stand_ins=replace)
            except TooExpensive:
                continue
            self._run(plan)
            return _seen(value, version)
        return None

    # ---- Planning and running ----------------------------------------------------------------

    def _make(self, base: Base, version: int, budget: float) -> None:
        self._run(self._plan(base, version, budget))

    def _plan(
        self,
        base: Base,
        version: int,
        budget: float,
        *,
        floats: bool = True,
        stand_ins: bool = False,
    ) -> list[tuple[Base, int, bool]]:
        """What has to be made, in an order that works: (base, version, by stand-in)."""
        needed: dict[tuple[int, int], tuple[Base, int, bool]] = {}
        pending = [(base, version)]
        cost = 0.0
        while pending:
            item, number = pending.pop()
            if number in item.contents or (id(item), number) in needed:
                continue
            maker = item.makers[number]
            replaced = stand_ins and maker is not None and maker.name == "topk"
            needed[id(item), number] = (item, number, replaced)
            cost += item.numel if replaced or maker is None else _cost(maker)
            if maker is None:
                data = item.dtype.is_floating_point and not item.steering
                if item.draw is None or (data and not floats):
                    raise TooExpensive("values of a floating-point input")
            elif not replaced:
                pending += [(v.base, n) for v, n in zip(maker.inputs, maker.versions, strict=True)]
            if cost > budget:
                raise TooExpensive(f"more than {budget:.3g} operations")
        return sorted(needed.values(), key=lambda p: (_position(p[0], p[1]), p[1]))

    def _run(self, plan: list[tuple[Base, int, bool]]) -> None:
        if not plan:
            return
        with _for_real(), torch.no_grad():
            for base, version, replaced in plan:
                self._make_one(base, version, replaced)

    def _make_one(self, base: Base, version: int, replaced: bool) -> None:
        if version in base.contents:
            return
        maker = base.makers[version]
        if maker is None:
            assert base.draw is not None
            self.drew_floats |= base.input_name is not None and base.dtype.is_floating_point
            with _seeded(self._seed):
                base.contents[version] = base.draw()
        elif replaced:
            self._stand_in(maker)
        else:
            self._execute(maker)

    def _execute(self, node: Node) -> None:
        """Run an operation for real and keep all it makes."""
        versions = {id(v.base): n for v, n in zip(node.inputs, node.versions, strict=True)}
        copies = {id(v.base): v.base.contents[versions[id(v.base)]].clone() for v in node.written}

        def real(value: Value) -> Tensor:
            key = id(value.base)
            return value.of_base(
                copies[key] if key in copies else value.base.contents[versions[key]]
            )

        args = {name: map_values(real, arg) for name, arg in node.args.items()}
        # Each random operation has a seed of its own, so that the order of asking does not matter.
        with _seeded(self._seed + 7919 * (node.position + 1)) if node.random else nullcontext():
            results = _call(node, args)
        for value in node.written:
            value.base.contents[versions[id(value.base)] + 1] = copies[id(value.base)]
        results = results if isinstance(results, list | tuple) else [results]
        for out, result in zip(node.outs, results, strict=True):
            if out is not None and out.base.makers[0] is node:
                out.base.contents[0] = result

    def _stand_in(self, node: Node) -> None:
        """Indices 0 to k-1 everywhere: no outcome of a top-k names fewer distinct ones."""
        values, indices = node.outs
        assert values is not None and indices is not None
        dim = node.args["dim"] % max(len(indices.shape), 1)
        along = [-1 if d == dim else 1 for d in range(len(indices.shape))]
        picked = torch.arange(node.args["k"]).reshape(along).expand(indices.shape)
        indices.base.contents[0] = picked.contiguous()
        values.base.contents[0] = torch.ones(values.shape, dtype=values.dtype)
        self.stand_ins.append(str(node))


def _seen(value: Value, version: int) -> Tensor:
    """The real tensor that a value is, once its base's contents are there."""
    if not value.chain:
        return value.base.contents[version]
    with _for_real():
        return value.of_base(value.base.contents[version])


def _for_real() -> AbstractContextManager[Any]:
    """Past the recorder that may be active around the caller; where none is, leaving costs."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return _disable_current_modes()
    return nullcontext()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The CPU's generator at a seed, for a while. (torch.manual_seed would involve the GPUs.)"""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _position(base: Base, version: int) -> int:
    maker = base.makers[version]
    return -1 if maker is None else maker.position


def _cost(node: Node) -> float:
    """Work of running an operation: elements touched, operations of matrix products."""
    touched = sum(v.numel for v in node.inputs) + sum(o.numel for o in node.outs if o is not None)
    if node.name in _MATRIX_PRODUCTS:
        first = node.inputs[-2 if node.name != "linear" else 0]
        out = node.outs[0]
        assert out is not None
        return touched + 2.0 * out.numel * first.shape[-1]
    if node.name == "convolution":
        out, weight = node.outs[0], node.args["weight"]
        assert out is not None
        return touched + 2.0 * out.numel * math.prod(weight.shape[1:])
    return touched


def _call(node: Node, args: dict[str, Any]) -> Any:
    """The operation on real tensors; matrix products of 16-bit floats through float32."""
    tensors = [t for t in args.values() if isinstance(t, Tensor)]
    if node.name in _MATRIX_PRODUCTS and all(
        t.dtype in (torch.bfloat16, torch.float16) for t in tensors
    ):
        # The CPU's own 16-bit products are slower by an order of magnitude, and round the same.
        wide = {k: t.float() if isinstance(t, Tensor) else t for k, t in args.items()}
        return node.call(**wide).to(tensors[0].dtype)
    return node.call(**args)
