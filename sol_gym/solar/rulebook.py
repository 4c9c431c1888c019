"""Rules for operations that the built-in tables do not know, kept as files that a person can read.

A rule is an extended einsum (`einsum`) for one operation with one set of options and ranks. It is
used only after it has been held against torch on small random tensors, once in every process that
uses it: so a file that was changed by hand, or that another release of torch has made wrong, cannot
spoil a bound. From the einsum follows which parts of the arguments are needed; what cannot be
followed (computed indices, conditions) is not demanded, which only makes the bound smaller.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..paths import cache_dir, write_atomically
from .context import Need, Wanted
from .einsum import Einsum, EinsumError, Statement, _indices, _reduction, axis_sizes
from .region import Region
from .trace import Node, Value, dtype_name, map_values, values_in

_SHAPES = 3
"""Sets of small sizes that a rule is tried on."""
_PROBES = 40
"""Elements that are changed one at a time, for each set of sizes."""


class LearnedRule(BaseModel):
    """A rule as it lies in a file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    signature: str
    """Operation, options and ranks that it is for; see `signature`."""
    statements: str
    """The extended einsum; the result is `out`."""
    sizes: dict[str, str] = {}
    """Sizes of axes that no tensor has."""
    model: str = ""
    """Who proposed it."""

    def einsum(self) -> Einsum:
        """The rule, parsed.

        Raises:
            EinsumError: malformed.
        """
        return Einsum.parse(self.statements, self.sizes)


def signature(node: Node) -> str:
    """What a rule is for: operation, overload, ranks and dtypes of tensors, values of the rest."""

    def shown(item: Any) -> str:
        if isinstance(item, Value):
            kind = "float" if item.dtype.is_floating_point else dtype_name(item.dtype)
            return f"{kind}[{len(item.shape)}]"
        if isinstance(item, list | tuple):
            return f"[{', '.join(map(shown, item))}]"
        return repr(item)

    arguments = ", ".join(f"{name}={shown(arg)}" for name, arg in node.args.items())
    return f"{node.plain_name}.{node.overload}({arguments})"


class Rulebook:
    """The accepted rules of a folder.

    Args:
        folder: `<cache>/rules` by default.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_dir() / "rules"
        self._verified: dict[str, LearnedRule | None] = {}

    def get(self, node: Node) -> LearnedRule | None:
        """The rule for an operation; None if there is none, or it does not hold here."""
        name = signature(node)
        if name not in self._verified:
            self._verified[name] = None
            with contextlib.suppress(OSError, ValidationError):
                rule = LearnedRule.model_validate_json(self._file(name).read_text())
                if rule.signature == name and verify(rule, node) is None:
                    self._verified[name] = rule
        return self._verified[name]

    def add(self, rule: LearnedRule) -> Path:
        """Keep a rule that has been verified."""
        file = self._file(rule.signature)
        write_atomically(file, json.dumps(rule.model_dump(), indent=2) + "\n")
        self._verified.pop(rule.signature, None)
        return file

    def digest(self) -> str:
        """Changes when a rule comes, goes or changes; empty without rules."""
        with contextlib.suppress(OSError):
            files = sorted(self.folder.glob("*.json"))
            stamps = [(f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files]
            if stamps:
                return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]
        return ""

    def _file(self, name: str) -> Path:
        short = hashlib.sha256(name.encode()).hexdigest()[:8]
        return self.folder / f"{name.partition('(')[0]}-{short}.json"


def rulebook() -> Rulebook:
    """The rules of the cache folder in use."""
    return _rulebook(str(cache_dir()))


@cache
def _rulebook(folder: str) -> Rulebook:
    return Rulebook(Path(folder) / "rules")


# ---- Verifying -------------------------------------------------------------------------------


def verify(rule: LearnedRule, node: Node) -> str | None:
    """Hold a rule against torch on small random tensors.

    The values must agree, and every element that the rule says a result needs must matter to it:
    else a rule could read what no kernel has to.

    Args:
        rule: to be checked.
        node: a recorded call of the operation; its shapes are made small.

    Returns:
        None if it holds, else what was found, in words that help to mend it.
    """
    outs = [o for o in node.outs if o is not None]
    if len(outs) != 1 or node.written or node.random:
        return "only operations with one result, no side effect and no randomness can have a rule"
    try:
        einsum = rule.einsum()
    except EinsumError as error:
        return str(error)
    if einsum.outputs[-1] != "out":
        return f"the last statement assigns {einsum.outputs[-1]!r}, expected 'out'"
    tried: set[tuple] = set()
    with _disable_current_modes(), torch.no_grad():
        for seed in range(40):
            sample = _sample(node, seed)
            if sample is None or (shape := _shapes(sample)) in tried:
                continue
            tried.add(shape)
            problem = _differs(einsum, node, sample) or _needless(einsum, node, sample, seed)
            if problem is not None:
                return problem
            if len(tried) == _SHAPES:
                return None
    if len(tried) >= 2:
        return None
    return "the operation could not be called on small tensors of two different shapes"


def _shapes(sample: dict[str, Any]) -> tuple:
    return tuple(tuple(t.shape) for t in sample.values() if isinstance(t, Tensor))


def _sample(node: Node, seed: int) -> dict[str, Any] | None:
    """Arguments like the recorded ones but small; None if torch refuses them."""
    generator = torch.Generator().manual_seed(seed)
    random = np.random.default_rng(seed)
    small: dict[int, int] = {1: 1}

    def size(n: int) -> int:
        if n not in small:
            small[n] = n if n <= 3 and seed % 2 else int(random.integers(2, 6))
        return small[n]

    def tensor(value: Value) -> Tensor:
        shape = [size(n) for n in value.shape]
        if value.dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        if value.dtype is torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        return torch.randint(0, 2, shape, generator=generator, dtype=value.dtype)

    arguments = {name: map_values(tensor, arg) for name, arg in node.args.items()}
    for name, arg in arguments.items():
        if isinstance(arg, list) and arg and all(type(x) is int for x in arg):
            arguments[name] = [small.get(x, x) if x > 3 else x for x in arg]
    try:
        made = node.call(**arguments)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None
    return arguments if isinstance(made, Tensor) and made.numel() else None


def _plain(sample: dict[str, Any]) -> dict[str, Any]:
    """Arguments for the interpreter: arrays and numbers; lists of numbers as arrays."""
    plain: dict[str, Any] = {}
    for name, arg in sample.items():
        if isinstance(arg, Tensor):
            plain[name] = arg.numpy()
        elif isinstance(arg, bool | int | float):
            plain[name] = arg
        elif isinstance(arg, list | tuple) and all(isinstance(x, int | float) for x in arg):
            plain[name] = np.array(arg)
    return plain


def _differs(einsum: Einsum, node: Node, sample: dict[str, Any]) -> str | None:
    expected = node.call(**sample).numpy()
    try:
        found = einsum.execute(_plain(sample))["out"]
    except (EinsumError, TypeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    if found.shape != expected.shape:
        return f"for shapes {_shapes(sample)} out is {found.shape}, expected {expected.shape}"
    close = np.isclose(found, expected, rtol=1e-6, atol=1e-8, equal_nan=True)
    if close.all():
        return None
    place = tuple(int(i) for i in np.argwhere(~close)[0])
    return (
        f"for shapes {_shapes(sample)} out{list(place)} is {found[place]!r}, expected "
        f"{expected[place]!r}; {int((~close).sum())} of {close.size} elements differ"
    )


def _needless(einsum: Einsum, node: Node, sample: dict[str, Any], seed: int) -> str | None:
    """An element that the rule says a result needs and that does not matter."""
    random = np.random.default_rng(seed)
    expected = node.call(**sample)
    for _ in range(3):
        place = tuple(int(random.integers(0, n)) for n in expected.shape)
        wanted = np.zeros(expected.shape, dtype=bool)
        wanted[place] = True
        touched = einsum.touched(_plain(sample), {"out": wanted})
        elements = [(name, tuple(p)) for name, m in touched.items() for p in np.argwhere(m)]
        random.shuffle(elements)  # type: ignore[arg-type]
        for name, element in elements[:_PROBES]:
            tensor = sample.get(name)
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            if not _matters(node, sample, name, element, place, expected):
                shown = [int(i) for i in element]
                return (
                    f"out{list(place)} is said to need {name}{shown}, but changing that element "
                    f"does not change it (shapes {_shapes(sample)})"
                )
    return None


def _matters(
    node: Node, sample: dict[str, Any], name: str, element: tuple, place: tuple, expected: Tensor
) -> bool:
    for step in (0.37, -1.9, 23.0, -41.0):
        changed = sample[name].clone()
        changed[element] += step
        if not torch.equal(node.call(**{**sample, name: changed})[place], expected[place]):
            return True
    return False


# ---- Using -----------------------------------------------------------------------------------


def needs(rule: LearnedRule, node: Node, wanted: Wanted) -> Iterator[Need]:
    """What an operation needs of its arguments for a part of its result, by a learned rule."""
    einsum = rule.einsum()
    values = {n: v for n, v in node.args.items() if isinstance(v, Value)}
    stand_ins = _plain_shapes(node)
    shapes = {n: v.shape for n, v in values.items()}
    needed: dict[str, Region] = {"out": wanted[0]} if 0 in wanted else {}
    sizes: list[dict[str, int]] = []
    for statement in einsum.statements:
        found = axis_sizes(statement, stand_ins, einsum.sizes)
        sizes.append(found)
        shapes[statement.target] = tuple(found[a] for a in statement.axes)
        stand_ins[statement.target] = np.broadcast_to(0.0, shapes[statement.target])
    for statement, found in zip(reversed(einsum.statements), reversed(sizes), strict=True):
        region = needed.pop(statement.target, None)
        if region is None or not region:
            continue
        for name, part in _reads(statement, region, found, shapes):
            old = needed.get(name)
            needed[name] = part if old is None else old.union(part)
    for name, value in values.items():
        yield value, needed.get(name, Region.empty(value.shape))
    for item in values_in([a for a in node.args.values() if isinstance(a, list | tuple)]):
        yield item, Region.empty(item.shape, exact=False)


def _plain_shapes(node: Node) -> dict[str, Any]:
    """The arguments for `axis_sizes`: of tensors only the shape."""
    plain: dict[str, Any] = {}
    for name, arg in node.args.items():
        if isinstance(arg, Value):
            plain[name] = np.broadcast_to(0.0, arg.shape)
        elif isinstance(arg, bool | int | float):
            plain[name] = arg
        elif isinstance(arg, list | tuple) and all(isinstance(x, int | float) for x in arg):
            plain[name] = np.array(arg)
    return plain


def _reads(
    statement: Statement, region: Region, sizes: dict[str, int], shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, Region]]:
    for node in ast.walk(statement.expression):
        if isinstance(node, ast.Name) and shapes.get(node.id) == () and node.id not in sizes:
            yield node.id, Region.full(())
    for node, certain in _subscripts(statement.expression, True):
        assert isinstance(node.value, ast.Name)
        shape = shapes[node.value.id]
        names = [i.id if isinstance(i, ast.Name) else "" for i in _indices(node)]
        plain = len(set(names)) == len(names) and all(n in sizes for n in names)
        whole = plain and tuple(sizes[n] for n in names) == shape
        if not certain or not whole:
            yield node.value.id, Region.empty(shape, exact=False)
            continue
        kept = [a for a in statement.axes if a in names]
        part = region.any_over([i for i, a in enumerate(statement.axes) if a not in names])
        part = part.permute([kept.index(n) for n in names if n in kept])
        ones = [sizes[n] if n in kept else 1 for n in names]
        yield node.value.id, part.reshape(ones).broadcast(shape)


def _subscripts(node: ast.AST, certain: bool) -> Iterator[tuple[ast.Subscript, bool]]:
    """Reads of tensors, and whether they happen for every iteration."""
    if isinstance(node, ast.Subscript):
        yield node, certain
        for item in _indices(node):
            yield from _subscripts(item, False)
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "where":
        yield from _subscripts(node.args[0], certain)
        for branch in node.args[1:]:
            yield from _subscripts(branch, False)
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "size":
        return
    for child in ast.iter_child_nodes(node):
        yield from _subscripts(child, certain)


def multiply_adds(rule: LearnedRule, node: Node, wanted: Region) -> int:
    """Multiply-adds of a rule that is one sum of products of two tensors; 0 for any other.

    Every summed axis must belong to both tensors, so that no rule can invent work.
    """
    einsum = rule.einsum()
    if len(einsum.statements) != 1 or not wanted.exact:
        return 0
    (statement,) = einsum.statements
    reduction = _reduction(statement.expression)
    if reduction is None or reduction[0] != "sum":
        return 0
    body = reduction[2]
    if not isinstance(body, ast.BinOp) or not isinstance(body.op, ast.Mult):
        return 0
    factors = [body.left, body.right]
    if not all(isinstance(f, ast.Subscript) for f in factors):
        return 0
    named = [
        {i.id for i in _indices(f) if isinstance(i, ast.Name)}
        for f in factors
        if isinstance(f, ast.Subscript)
    ]
    if not all(set(reduction[1]) <= names for names in named):
        return 0
    sizes = axis_sizes(statement, _plain_shapes(node), einsum.sizes)
    return wanted.count() * math.prod(sizes[a] for a in reduction[1])
