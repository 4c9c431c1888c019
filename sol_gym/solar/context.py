"""What a rule of dependence is: from a demanded part of results to the parts of arguments needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .contents import Contents
from .facts import Facts
from .region import Region
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
        self._indices: dict[tuple[int, int], np.ndarray] = {}

    def indices(self, node: Node, value: Value) -> np.ndarray | None:
        """Real values of an index argument, not to be changed; None if they cost too much."""
        key = id(value), node.version_of(value)
        known = self._indices.get(key)
        if known is None:
            found = self._contents.choosing(value, key[1])
            if found is not None:
                known = self._indices[key] = found.numpy().astype(np.int64)
        return known


Rule = Callable[[Context, Node, Wanted], Iterator[Need]]


def only(wanted: Wanted) -> Region:
    """The demanded part of the one result that matters."""
    return next(iter(wanted.values()))


def tensors(node: Node, *names: str) -> Iterator[tuple[str, Value]]:
    """The tensor arguments among those named (all if none), with their names."""
    for name, arg in node.args.items():
        if isinstance(arg, Value) and (not names or name in names):
            yield name, arg
