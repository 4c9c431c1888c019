"""Safe evaluation of axis expressions such as ``"batch_size * seq_len // 2"``.

The public schema allows ``+ - * / // % **``, parentheses, unary signs, axis names and numbers.
The expression is parsed to a syntax tree and only those nodes are evaluated, so that a problem
file cannot run code.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping

from .errors import ProblemError

_BINARY: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type, Callable] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_COMPARE: dict[type, Callable] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_MAX_EXPONENT = 64


def evaluate_axis(expression: str, values: Mapping[str, int]) -> int:
    """Value of `expression` given the axis `values`.

    Raises:
        ProblemError: on a syntax error, an unknown name, a forbidden construct, a division by
            zero or a result that is not a non-negative integer.
    """
    result = _evaluate(_parse(expression), values, expression)
    if isinstance(result, float):
        if not result.is_integer():
            raise ProblemError(
                f"axis expression {expression!r} gives {result}, expected an integer"
            )
        result = int(result)
    if result < 0:
        raise ProblemError(f"axis expression {expression!r} gives {result}, expected 0 or more")
    return result


def check_constraint(constraint: str, values: Mapping[str, int]) -> bool:
    """Whether a comparison between axes, such as ``"H_qo == H_kv * H_r"``, holds."""
    tree = _parse(constraint)
    if not isinstance(tree, ast.Compare):
        raise ProblemError(
            f"constraint {constraint!r} is not a comparison, expected e.g. 'A == B * 2'"
        )
    left = _evaluate(tree.left, values, constraint)
    for op, right_node in zip(tree.ops, tree.comparators, strict=True):
        if type(op) not in _COMPARE:
            raise ProblemError(f"constraint {constraint!r} uses an operator that is not allowed")
        right = _evaluate(right_node, values, constraint)
        if not _COMPARE[type(op)](left, right):
            return False
        left = right
    return True


def concerns_values(constraint: str, inputs: Iterable[str]) -> bool:
    """Whether a constraint speaks of an input's values, as ``"n == kv_indptr[-1].item()"`` does.

    Such constraints are for whoever makes the inputs; shapes cannot show whether they hold.
    """
    return not names_in(constraint).isdisjoint(inputs)


def names_in(expression: str) -> set[str]:
    """Axis names an expression refers to."""
    return {node.id for node in ast.walk(_parse(expression)) if isinstance(node, ast.Name)}


def _parse(expression: str) -> ast.expr:
    try:
        return ast.parse(expression.strip(), mode="eval").body
    except SyntaxError as error:
        raise ProblemError(f"axis expression {expression!r} is not valid: {error.msg}") from None


def _evaluate(node: ast.expr, values: Mapping[str, int], expression: str) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            if name not in values:
                raise ProblemError(
                    f"axis expression {expression!r} uses {name!r}; known axes: {sorted(values)}"
                )
            return values[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_evaluate(operand, values, expression))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _evaluate(left, values, expression), _evaluate(right, values, expression)
            if isinstance(op, ast.Pow) and abs(b) > _MAX_EXPONENT:
                raise ProblemError(f"axis expression {expression!r}: exponent {b} is too large")
            try:
                return _BINARY[type(op)](a, b)
            except ZeroDivisionError:
                raise ProblemError(f"axis expression {expression!r} divides by zero") from None
    raise ProblemError(
        f"axis expression {expression!r} contains {type(node).__name__}; "
        "allowed are names, numbers, + - * / // % ** and parentheses"
    )
