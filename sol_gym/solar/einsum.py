"""Extended einsums: operations written down so that they can be executed, and their dependence read.

A rule is a few statements. Each assigns a tensor, element by element, from sums (or other
reductions) of expressions over elements of other tensors:

    out[m, n] = sum(k)(self[m, k] * mat2[k, n])
    out[b, o, t] = sum(c, k)(input[b, c, 2 * t + k - 1] * weight[o, c, k])
    top[i] = max(j)(self[i, j]);  out[i, j] = exp(self[i, j] - top[i])
    out[i, j] = where(j <= i + diagonal, self[i, j], 0)
    out[r, j] = self[r, j] + sum(i)(where(index[i] == r, source[i, j], 0))

An index is any integer expression over axes, scalar arguments and elements of integer tensors.
Reading outside of a tensor gives 0, as padding does. An axis ranges over the size of the dimension
that it indexes by itself; other sizes are given with the rule.

`execute` computes the result on real tensors. `touched` says which elements of which arguments the
demanded part of a result needs: the truth by definition, to which `dependence` and `work` are held
in the tests, and from which rules for unknown operations are derived (`synthesis`). Both enumerate
all iterations, so they are for small tensors.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import BoundError

MAX_ITERATIONS = 2**22
"""Iterations of one statement that are enumerated at most."""

Array = np.ndarray


class EinsumError(BoundError):
    """A rule is malformed, or does not fit its arguments."""


_REDUCTIONS: dict[str, tuple[Callable[..., Any], float]] = {
    "sum": (np.sum, 0.0),
    "prod": (np.prod, 1.0),
    "max": (np.max, -math.inf),
    "min": (np.min, math.inf),
    "any": (np.max, 0.0),
    "all": (np.min, 1.0),
}


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[float])(x)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x), "abs": np.abs, "sign": np.sign, "floor": np.floor,
    "ceil": np.ceil, "round": np.round, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "tanh": np.tanh, "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)), "erf": _erf,
    "maximum": np.maximum, "minimum": np.minimum, "pow": np.power, "atan2": np.arctan2,
    "real": np.real, "imag": np.imag, "conj": np.conj, "int": np.floor, "log2": np.log2,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "inf": math.inf, "e": math.e, "I": 1j}
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.true_divide,
    ast.FloorDiv: np.floor_divide, ast.Mod: np.mod, ast.Pow: np.power,
}  # fmt: skip
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: np.equal, ast.NotEq: np.not_equal, ast.Lt: np.less, ast.LtE: np.less_equal,
    ast.Gt: np.greater, ast.GtE: np.greater_equal,
}  # fmt: skip


@dataclass(frozen=True)
class Statement:
    """One assignment."""

    text: str
    target: str
    axes: tuple[str, ...]
    expression: ast.expr

    @property
    def reduced(self) -> tuple[str, ...]:
        """Axes that are reduced somewhere in the expression."""
        found: dict[str, None] = {}
        for node in ast.walk(self.expression):
            if (reduction := _reduction(node)) is not None:
                found |= dict.fromkeys(reduction[1])
        return tuple(found)


@dataclass(frozen=True)
class Einsum:
    """A rule for one operation.

    Example:
        >>> mm = Einsum.parse("out[m, n] = sum(k)(self[m, k] * mat2[k, n])")
        >>> mm.execute({"self": np.ones((2, 3)), "mat2": np.ones((3, 4))})["out"].shape
        (2, 4)
    """

    statements: tuple[Statement, ...]
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Axis -> its size, an expression over scalar arguments and `size(tensor, dim)`."""

    @staticmethod
    def parse(text: str, sizes: Mapping[str, str] | None = None) -> Einsum:
        """Read statements, separated by line breaks or semicolons.

        Raises:
            EinsumError: not of the form described above; the message quotes the statement.
        """
        statements = []
        for line in text.replace(";", "\n").splitlines():
            if line.strip():
                statements.append(_parse(line.strip()))
        if not statements:
            raise EinsumError("a rule needs at least one statement, e.g. 'out[i] = 2 * self[i]'")
        for name, size in (sizes or {}).items():
            if not name.isidentifier():
                raise EinsumError(f"sizes names axis {name!r}, expected an identifier")
            try:
                ast.parse(size, mode="eval")
            except (SyntaxError, TypeError) as error:
                raise EinsumError(f"size of axis {name!r} is {size!r}: {error}") from None
        return Einsum(tuple(statements), dict(sizes or {}))

    @property
    def outputs(self) -> list[str]:
        """Tensors that statements assign, in order."""
        return [s.target for s in self.statements]

    def reads(self) -> set[str]:
        """Names of tensors that are indexed and not assigned before: the arguments."""
        made: set[str] = set()
        found: set[str] = set()
        for statement in self.statements:
            for node in ast.walk(statement.expression):
                if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                    found |= {node.value.id} - made
            made.add(statement.target)
        return found

    def execute(self, arguments: Mapping[str, Any]) -> dict[str, Array]:
        """All tensors that the statements assign.

        Args:
            arguments: tensors as arrays and scalars, by name.

        Raises:
            EinsumError: sizes do not fit, a name is unknown, or it would take too many iterations.
        """
        values: dict[str, Any] = dict(arguments)
        for statement in self.statements:
            space = _Space(statement, values, self.sizes)
            values[statement.target] = space.result()
        return {name: values[name] for name in self.outputs}

    def touched(
        self, arguments: Mapping[str, Any], wanted: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Which elements of the arguments the wanted part of the results needs.

        Args:
            arguments: as for `execute`.
            wanted: for each result that matters, a boolean array of its shape.

        Returns:
            For every tensor argument that the rule reads, a boolean array of its shape. What stands
            in a branch of `where` that is not taken does not count, nor what lies outside.
        """
        values: dict[str, Any] = dict(arguments)
        spaces = []
        for statement in self.statements:
            space = _Space(statement, values, self.sizes)
            values[statement.target] = space.result()
            spaces.append(space)
        needed = {name: np.asarray(mask, dtype=bool) for name, mask in wanted.items()}
        for statement, space in zip(reversed(self.statements), reversed(spaces), strict=True):
            mask = needed.pop(statement.target, None)
            if mask is None or not mask.any():
                continue
            for name, part in space.reads(mask).items():
                old = needed.get(name)
                needed[name] = part if old is None else old | part
        return {
            name: needed.get(name, np.zeros(np.shape(arguments[name]), dtype=bool))
            for name in self.reads()
            if name in arguments
        }

    def products(self, arguments: Mapping[str, Any], wanted: Mapping[str, Array]) -> int:
        """Multiply-adds of sums of products of two tensors, for the wanted part of the results.

        Terms with a factor outside of its tensor, or in a branch not taken, do not count.
        """
        values: dict[str, Any] = dict(arguments)
        total = 0
        for statement in self.statements:
            space = _Space(statement, values, self.sizes)
            values[statement.target] = space.result()
            mask = wanted.get(statement.target, np.ones(values[statement.target].shape, dtype=bool))
            total += space.products(np.asarray(mask, dtype=bool))
        return total

    def __str__(self) -> str:
        lines = [s.text for s in self.statements]
        return "\n".join(lines + [f"  with {a} < {n}" for a, n in self.sizes.items()])


# ---- Reading ---------------------------------------------------------------------------------


def _parse(line: str) -> Statement:
    def wrong(why: str) -> EinsumError:
        return EinsumError(f"statement {line!r}: {why}")

    try:
        tree = ast.parse(line)
    except SyntaxError as error:
        raise wrong(f"not an assignment in Python's syntax ({error.msg})") from None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Assign):
        raise wrong("expected 'target[axes] = expression'")
    assign = tree.body[0]
    target = assign.targets[0]
    if len(assign.targets) != 1:
        raise wrong("expected one target")
    if isinstance(target, ast.Name):
        name = target.id
        axes: tuple[str, ...] = ()
    elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
        name = target.value.id
        items = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
        if not all(isinstance(i, ast.Name) for i in items):
            raise wrong("the target is indexed by axis names only")
        axes = tuple(i.id for i in items if isinstance(i, ast.Name))
        if len(set(axes)) < len(axes):
            raise wrong("the target names an axis twice")
    else:
        raise wrong("expected 'target[axes] = expression'")
    for node in ast.walk(assign.value):
        _check(node, wrong)
    return Statement(line, name, axes, assign.value)


_ALLOWED = (
    ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Call, ast.Subscript, ast.Name, ast.Tuple,
    ast.Constant, ast.Load, ast.USub, ast.UAdd, ast.Not, ast.And, ast.Or, *_BINARY, *_COMPARE,
)  # fmt: skip


def _check(node: ast.AST, wrong: Callable[[str], EinsumError]) -> None:
    if not isinstance(node, _ALLOWED):
        raise wrong(f"{type(node).__name__} is not allowed")
    if isinstance(node, ast.Constant) and not isinstance(node.value, int | float | complex | bool):
        raise wrong(f"constant {node.value!r} is not a number")
    if isinstance(node, ast.Subscript) and not isinstance(node.value, ast.Name):
        raise wrong("only tensors can be indexed")
    if isinstance(node, ast.Call):
        if node.keywords:
            raise wrong("keyword arguments are not allowed")
        if _reduction(node) is not None:
            return
        if isinstance(node.func, ast.Call) or (
            isinstance(node.func, ast.Name) and node.func.id in _REDUCTIONS
        ):
            return  # the head of a reduction, checked where it is applied
        known = {*_FUNCTIONS, "where", "size"}
        if not isinstance(node.func, ast.Name) or node.func.id not in known:
            raise wrong(
                f"unknown function {ast.unparse(node.func)!r}; known: {', '.join(sorted(known))}, "
                f"and reductions {', '.join(_REDUCTIONS)} as in 'sum(k)(...)'"
            )


def _reduction(node: ast.AST) -> tuple[str, tuple[str, ...], ast.expr] | None:
    """(name, axes, body) of `sum(i, j)(body)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Call):
        return None
    head = node.func
    if not isinstance(head.func, ast.Name) or head.func.id not in _REDUCTIONS:
        return None
    if len(node.args) != 1 or not head.args or not all(isinstance(a, ast.Name) for a in head.args):
        return None
    return head.func.id, tuple(a.id for a in head.args if isinstance(a, ast.Name)), node.args[0]


def axis_sizes(
    statement: Statement, values: Mapping[str, Any], sizes: Mapping[str, str]
) -> dict[str, int]:
    """Sizes of a statement's axes for arguments of which only the shapes matter.

    Raises:
        EinsumError: a size cannot be told.
    """
    return dict(_Space(statement, values, sizes).sizes)


# ---- Executing -------------------------------------------------------------------------------


class _Space:
    """The iterations of one statement: each axis is a dimension of every array in it."""

    def __init__(
        self, statement: Statement, values: Mapping[str, Any], sizes: Mapping[str, str]
    ) -> None:
        self._statement, self._values = statement, values
        self._order = (*statement.axes, *(a for a in statement.reduced if a not in statement.axes))
        self.sizes = {a: self._size(a, sizes) for a in self._order}
        self._reads: dict[str, Array] | None = None
        self._products = 0

    def _size(self, axis: str, sizes: Mapping[str, str]) -> int:
        if axis in sizes:
            tree = ast.parse(sizes[axis], mode="eval").body
            return int(self._scalar(tree))
        found: set[int] = set()
        for node in ast.walk(self._statement.expression):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                array: Any = self._values.get(node.value.id)
                items = _indices(node)
                for d, item in enumerate(items):
                    if isinstance(item, ast.Name) and item.id == axis and np.ndim(array) > d:
                        found.add(np.shape(array)[d])
        if len(found) != 1:
            what = "no tensor says" if not found else f"tensors disagree ({sorted(found)})"
            raise EinsumError(
                f"{self._statement.text!r}: {what} how large axis {axis!r} is; give its size"
            )
        return found.pop()

    def _scalar(self, node: ast.expr) -> Any:
        """A number made of scalars and sizes."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            value = self._values.get(node.id, _CONSTANTS.get(node.id))
            if value is None or np.ndim(value):
                raise EinsumError(f"{node.id!r} is no scalar argument")
            return value
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            return np.asarray(self._values[node.value.id])[int(self._scalar(node.slice))]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "size":
                return self._size_of(node)
            return _FUNCTIONS[node.func.id](*(self._scalar(a) for a in node.args))
        if isinstance(node, ast.BinOp):
            return _BINARY[type(node.op)](self._scalar(node.left), self._scalar(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._scalar(node.operand)
        raise EinsumError(f"{ast.unparse(node)!r} is not a size")

    def _size_of(self, node: ast.Call) -> int:
        if len(node.args) != 2 or not isinstance(node.args[0], ast.Name):
            raise EinsumError(f"{ast.unparse(node)!r}: expected size(tensor, dim)")
        array = self._values.get(node.args[0].id)
        if array is None:
            raise EinsumError(f"unknown tensor {node.args[0].id!r}")
        return np.shape(array)[int(self._scalar(node.args[1]))]

    def result(self) -> Array:
        """The assigned tensor."""
        if math.prod(self.sizes.values()) > MAX_ITERATIONS:
            raise EinsumError(
                f"{self._statement.text!r} has more than {MAX_ITERATIONS} iterations; use smaller "
                "tensors"
            )
        shape = tuple(self.sizes[a] for a in self._statement.axes)
        with np.errstate(all="ignore"):
            value = self._value(self._statement.expression, None)
        return np.array(self._without_reduced(value, shape))

    def _without_reduced(self, value: Any, shape: tuple[int, ...]) -> Array:
        array = np.asarray(value)
        full = (*shape, *(1,) * (len(self._order) - len(shape)))
        if array.ndim == 0:
            return np.broadcast_to(array, shape)
        if array.shape[len(shape) :] != full[len(shape) :]:
            raise EinsumError(
                f"{self._statement.text!r}: an axis is neither reduced nor a target's"
            )
        return np.broadcast_to(array, full).reshape(shape)

    def reads(self, wanted: Array) -> dict[str, Array]:
        """Elements of each tensor that the wanted results are made of."""
        self._reads, self._products = {}, 0
        guard = wanted.reshape(*wanted.shape, *(1,) * (len(self._order) - wanted.ndim))
        with np.errstate(all="ignore"):
            self._value(self._statement.expression, guard)
        found, self._reads = self._reads, None
        return found

    def products(self, wanted: Array) -> int:
        """Multiply-adds of the wanted results; see `Einsum.products`."""
        self.reads(wanted)
        return self._products

    # A value is an array with one dimension an axis (of size 1 where it does not vary). `guard` is
    # None while executing, else where in the iteration space the value matters.

    def _value(self, node: ast.expr, guard: Array | None) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            value = self._named(node.id)
            scalar = isinstance(value, np.ndarray) and node.id in self._values
            if guard is not None and self._reads is not None and scalar:
                self._reads[node.id] = np.array(bool(guard.any()))
            return value
        if isinstance(node, ast.Subscript):
            return self._element(node, guard)[0]
        if isinstance(node, ast.UnaryOp):
            value = self._value(node.operand, guard)
            if isinstance(node.op, ast.Not):
                return np.logical_not(value)
            return np.negative(value) if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.BinOp):
            if guard is not None and isinstance(node.op, ast.Mult):
                guard = guard & self._inside(node)
            left, right = self._value(node.left, guard), self._value(node.right, guard)
            return _BINARY[type(node.op)](left, right)
        if isinstance(node, ast.Compare):
            result: Any = True
            left = self._value(node.left, guard)
            for op, item in zip(node.ops, node.comparators, strict=True):
                right = self._value(item, guard)
                result = np.logical_and(result, _COMPARE[type(op)](left, right))
                left = right
            return result
        if isinstance(node, ast.BoolOp):
            parts = [self._value(v, guard) for v in node.values]
            combine = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            made = parts[0]
            for part in parts[1:]:
                made = combine(made, part)
            return made
        if isinstance(node, ast.Call):
            return self._call(node, guard)
        raise EinsumError(f"{ast.unparse(node)!r} has no value")

    def _named(self, name: str) -> Any:
        if name in self._order:
            place = self._order.index(name)
            shape = [1] * len(self._order)
            shape[place] = self.sizes[name]
            return np.arange(self.sizes[name]).reshape(shape)
        if name in self._values:
            if np.ndim(self._values[name]):
                raise EinsumError(f"{self._statement.text!r}: tensor {name!r} is not indexed")
            return self._values[name]
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        raise EinsumError(
            f"{self._statement.text!r}: unknown name {name!r}; axes are {', '.join(self._order)}, "
            f"arguments {', '.join(self._values)}"
        )

    def _element(self, node: ast.Subscript, guard: Array | None) -> tuple[Any, Array]:
        """An element of a tensor (0 outside of it), and where it lies inside."""
        assert isinstance(node.value, ast.Name)
        name = node.value.id
        if name not in self._values:
            raise EinsumError(f"{self._statement.text!r}: unknown tensor {name!r}")
        array = np.asarray(self._values[name])
        items = _indices(node)
        if len(items) != array.ndim:
            raise EinsumError(
                f"{self._statement.text!r}: {name} has {array.ndim} axes, indexed with {len(items)}"
            )
        places = [np.asarray(self._value(i, guard)).astype(np.int64) for i in items]
        places = list(np.broadcast_arrays(*places)) if places else []
        inside = np.array(True)
        for place, size in zip(places, array.shape, strict=True):
            inside = inside & (place >= 0) & (place < size)
        clipped = tuple(
            np.clip(p, 0, max(n - 1, 0)) for p, n in zip(places, array.shape, strict=True)
        )
        if array.size == 0:
            return np.zeros(np.shape(inside)), inside
        value = np.where(inside, array[clipped], 0)
        if guard is not None and self._reads is not None:
            seen = self._reads.setdefault(name, np.zeros(array.shape, dtype=bool))
            matters = np.broadcast_to(
                inside & guard, np.broadcast_shapes(np.shape(inside), guard.shape)
            )
            where = tuple(np.broadcast_to(c, matters.shape)[matters] for c in clipped)
            seen[where] = True
        return value, inside

    def _inside(self, product: ast.expr) -> Array:
        """Where all factors lie inside of their tensors: elsewhere none of them matters."""
        kept, self._reads = self._reads, None
        inside = np.array(True)
        for factor in _factors(product):
            if isinstance(factor, ast.Subscript):
                inside = inside & self._element(factor, None)[1]
        self._reads = kept
        return inside

    def _call(self, node: ast.Call, guard: Array | None) -> Any:
        reduction = _reduction(node)
        if reduction is not None:
            return self._reduce(*reduction, guard)
        assert isinstance(node.func, ast.Name)
        if node.func.id == "size":
            return self._size_of(node)
        if node.func.id == "where":
            if len(node.args) != 3:
                raise EinsumError(f"{ast.unparse(node)!r}: expected where(condition, a, b)")
            condition = np.asarray(self._value(node.args[0], guard), dtype=bool)
            yes = None if guard is None else guard & condition
            no = None if guard is None else guard & ~condition
            return np.where(
                condition, self._value(node.args[1], yes), self._value(node.args[2], no)
            )
        return _FUNCTIONS[node.func.id](*(self._value(a, guard) for a in node.args))

    def _reduce(self, name: str, axes: tuple[str, ...], body: ast.expr, guard: Array | None) -> Any:
        function, start = _REDUCTIONS[name]
        value = np.asarray(self._value(body, guard))
        dims = tuple(self._order.index(a) for a in axes)
        shape = list(value.shape) if value.ndim else [1] * len(self._order)
        for d in dims:
            shape[d] = self.sizes[self._order[d]]
        value = np.broadcast_to(value, shape)
        if guard is not None and name == "sum":
            self._count(body, guard)
        if 0 in shape:
            kept = [1 if d in dims else n for d, n in enumerate(shape)]
            return np.full(kept, start)
        return function(value, axis=dims, keepdims=True)

    def _count(self, body: ast.expr, guard: Array) -> None:
        """Count a sum of products of elements of two tensors."""
        condition: Array | bool = True
        if (
            isinstance(body, ast.Call)
            and isinstance(body.func, ast.Name)
            and body.func.id == "where"
        ):
            condition = np.asarray(self._value(body.args[0], None), dtype=bool)
            body = body.args[1]
        factors = [n for n in _factors(body) if isinstance(n, ast.Subscript)]
        if len(factors) < 2:
            return
        alive = self._inside(body)
        whole = np.broadcast_to(alive & condition & guard, [self.sizes[a] for a in self._order])
        self._products += int(whole.sum())


def _indices(node: ast.Subscript) -> list[ast.expr]:
    return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]


def _factors(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*_factors(node.left), *_factors(node.right)]
    return [node]
