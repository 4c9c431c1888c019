"""Axis expressions: arithmetic only, and errors that say what is wrong."""

import pytest

from sol_gym.axes import check_constraint, concerns_values, evaluate_axis, names_in
from sol_gym.errors import ProblemError

VALUES = {"a": 6, "b": 4}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("a", 6),
        ("12", 12),
        ("a * b + 1", 25),
        ("a // b", 1),
        ("a / 2", 3),
        ("a % b", 2),
        ("a - -b", 10),
        ("+a", 6),
        ("2 ** b", 16),
        ("(a + b) // 3", 3),
        (" a ", 6),
        ("a - 6", 0),
    ],
)
def test_arithmetic(expression, value):
    result = evaluate_axis(expression, VALUES)
    assert result == value
    assert isinstance(result, int)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("c", r"uses 'c'; known axes: \['a', 'b'\]"),
        ("a / b", "gives 1.5, expected an integer"),
        ("b - a", "gives -2, expected 0 or more"),
        ("a // (b - 4)", "divides by zero"),
        ("a % 0", "divides by zero"),
        ("2 ** 65", "exponent 65 is too large"),
        ("a +", "is not valid"),
        ("", "is not valid"),
        ("max(a, b)", "contains Call"),
        ("a.real", "contains Attribute"),
        ("__import__('os')", "contains Call"),
        ("a if a else b", "contains IfExp"),
        ("True", "contains Constant"),
        ("'a'", "contains Constant"),
        ("a < b", "contains Compare"),
    ],
)
def test_what_is_wrong_is_said(expression, message):
    with pytest.raises(ProblemError, match=message):
        evaluate_axis(expression, VALUES)


@pytest.mark.parametrize(
    ("constraint", "holds"),
    [
        ("a == b + 2", True),
        ("a > b", True),
        ("b < a <= 6", True),
        ("b < a < 6", False),
        ("a != 6", False),
    ],
)
def test_constraints(constraint, holds):
    assert check_constraint(constraint, VALUES) is holds


@pytest.mark.parametrize("constraint", ["a + b", "a in b", "a is b"])
def test_what_is_no_comparison_of_numbers_is_refused(constraint):
    with pytest.raises(ProblemError, match="constraint"):
        check_constraint(constraint, VALUES)


def test_names():
    assert names_in("(a + b) * 2 // a") == {"a", "b"}
    assert names_in("7") == set()


def test_constraints_over_values_of_inputs_are_told_from_those_over_axes():
    inputs = {"kv_indptr": None}
    assert concerns_values("a == kv_indptr[-1].item()", inputs)
    assert not concerns_values("a == b + 2", inputs)
