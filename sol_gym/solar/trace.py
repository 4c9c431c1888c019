"""The recorded run of a reference: operations in program order over values and their memory.

A `Value` is a tensor the reference saw. It lies in a `Base`, the memory some operation allocated,
and reaches it through a chain of view steps; so two views of one buffer alias, and an in-place
operation on one is seen by the other. Every write makes a new version of a base.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .region import Region
from .terms import Shape
from .views import Step


@dataclass(eq=False)
class Base:
    """Memory of one allocation, in the shape of the tensor it was made for."""

    shape: Shape
    dtype: torch.dtype
    makers: list[Node | None]
    """The operation that made each version; None where it came from outside."""
    input_name: str | None = None
    """The problem's input it is, if it is one."""
    draw: Callable[[], Tensor] | None = None
    """Makes the first version's real values, where it came from outside."""
    steering: bool = False
    """Whether it is a floating-point input whose values only mask."""
    contents: dict[int, Tensor] = field(default_factory=dict)
    """Version -> real values, as far as somebody asked; never changed in place."""
    keep: Tensor | None = None
    """Keeps the meta tensor alive, so that its storage stays unique."""
    geometry: tuple = ()
    """Offset, shape, strides and dtype of the tensor it was made for."""

    @property
    def version(self) -> int:
        """The newest version."""
        return len(self.makers) - 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(eq=False)
class Value:
    """A tensor: a base, or a view of another value."""

    base: Base
    shape: Shape
    dtype: torch.dtype
    source: Value | None = None
    step: Step | None = None
    geometry: tuple = ()
    """Offset, shape, strides and dtype: two views of equal bases that agree here are equal."""
    numel: int = field(init=False)
    """Number of elements."""
    chain: tuple[Step, ...] = field(init=False)
    """The steps from this value to its base."""
    opaque: bool = field(init=False)
    """Whether a step on the way to the base has no rule."""

    def __post_init__(self) -> None:
        self.numel = math.prod(self.shape)
        if self.source is None or self.step is None:
            self.chain, self.opaque = (), False
        else:
            self.chain = (self.step, *self.source.chain)
            self.opaque = self.step.opaque or self.source.opaque

    @property
    def root(self) -> Value:
        """The value this is a view of in the end: all of its base."""
        value = self
        while value.source is not None:
            value = value.source
        return value

    def to_base(self, region: Region) -> Region:
        """The elements of the base that a region of this value is."""
        for step in self.chain:
            region = step.to_source(region)
        return region

    def from_base(self, region: Region) -> Region:
        """The elements of this value that are in a region of its base."""
        for step in reversed(self.chain):
            region = step.from_source(region)
        return region

    def of_base(self, tensor: Tensor) -> Tensor:
        """This view of a real tensor that has the base's shape and type."""
        for step in reversed(self.chain):
            tensor = step.replay(tensor)
        return tensor


@dataclass(eq=False)
class Node:
    """One operation that was run, other than a view."""

    name: str
    """E.g. `mm`, `add_`."""
    overload: str
    call: Callable[..., Any]
    """The operation; takes all arguments by name."""
    args: dict[str, Any]
    """All arguments by name, defaults included; tensors are Values."""
    inputs: list[Value]
    """Tensor arguments, in order."""
    versions: list[int]
    """The version of each input's base that the operation saw."""
    written: list[Value]
    """Arguments that the operation changes."""
    outs: list[Value | None]
    """Results, in order; an in-place operation returns the value it wrote."""
    pointwise: bool
    random: bool
    position: int
    """Place in program order."""
    line: int | None = None
    """Line of the reference that asked for it."""
    plain_name: str = field(init=False)
    """The name without the mark of an in-place variant."""

    def __post_init__(self) -> None:
        self.plain_name = _plain_name(self.name)
        self._seen = dict(zip(map(id, self.inputs), self.versions, strict=True))

    @property
    def fresh(self) -> list[Value]:
        """Results in memory of their own."""
        return [o for o in self.outs if o is not None and o.base.makers[0] is self]

    def version_of(self, value: Value) -> int:
        """The version of an argument's base that the operation saw."""
        return self._seen[id(value)]

    def __str__(self) -> str:
        return f"{self.name}.{self.overload}"


@cache
def _plain_name(name: str) -> str:
    return name if name.endswith("__") else name.removesuffix("_")


@dataclass(eq=False)
class Control:
    """Values that the reference read to decide what to do (`.item()`, `.tolist()`)."""

    value: Value
    version: int


@dataclass
class Trace:
    """A whole run."""

    inputs: dict[str, Value]
    """Tensor inputs by name."""
    outputs: list[Value]
    """What was returned, in order."""
    steps: list[Node | Control]
    """What happened, in program order; views are not listed, for they do nothing."""

    def nodes(self) -> Iterator[Node]:
        """The operations, in program order."""
        return (step for step in self.steps if isinstance(step, Node))

    def release(self) -> None:
        """Cut the ties between operations and their results, when nobody will ask any more.

        They refer to each other, so that without this gigabytes wait for the collector of cycles.
        """
        for step in self.steps:
            values = (*step.inputs, *step.outs) if isinstance(step, Node) else (step.value,)
            for value in values:
                if value is not None:
                    base = value.base
                    base.makers, base.contents, base.draw, base.keep = [], {}, None, None
        self.steps = []

    def names(self) -> dict[int, str]:
        """Names of all bases by id: inputs by their own, results as `%` and a running number."""
        names = {id(value.base): name for name, value in self.inputs.items()}
        for number, node in enumerate(self.nodes()):
            for i, out in enumerate(node.fresh):
                suffix = "" if len(node.fresh) == 1 else "abcdefghijklmnop"[i % 16]
                names.setdefault(id(out.base), f"%{number}{suffix}")
        return names

    def __str__(self) -> str:
        """One line an operation, e.g. `%3 = mm(x [8, 4], %2 [4, 4])  # line 7`."""
        names = self.names()

        def shown(value: Value) -> str:
            name = names.get(id(value.base), "constant")
            return f"{name} {list(value.shape)}"

        lines = []
        for step in self.steps:
            if isinstance(step, Control):
                lines.append(f"read the values of {shown(step.value)}")
                continue
            made = ", ".join(names[id(o.base)] for o in step.fresh)
            changed = ", ".join(names.get(id(v.base), "constant") for v in step.written)
            where = f"  # line {step.line}" if step.line else ""
            inputs = ", ".join(map(shown, step.inputs))
            lines.append(f"{made or changed or '_'} = {step.name}({inputs}){where}")
        returned = ", ".join(map(shown, self.outputs))
        return "\n".join([*lines, f"return {returned}"])


def dtype_name(dtype: torch.dtype) -> str:
    """E.g. `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def values_in(item: Any) -> Iterator[Value]:
    """All Values in nested lists, tuples and dictionaries, in order."""
    if isinstance(item, Value):
        yield item
    elif isinstance(item, list | tuple):
        for part in item:
            yield from values_in(part)
    elif isinstance(item, dict):
        for part in item.values():
            yield from values_in(part)


def map_values(function: Callable[[Value], Any], item: Any) -> Any:
    """`item` with every Value in nested lists and tuples replaced."""
    if isinstance(item, Value):
        return function(item)
    if isinstance(item, list | tuple):
        return type(item)([map_values(function, part) for part in item])
    return item
