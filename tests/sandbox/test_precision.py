"""Candidates measured by the error that the declared precision itself makes."""

from __future__ import annotations

import pytest
import torch

from sol_gym.problem import PrecisionPolicy, Problem
from sol_gym.sandbox.precision import Yardstick, round_mantissa
from sol_gym.sandbox.reference import Reference

ROWS, WIDTH, OUT = 48, 96, 80
LINEAR = "def run(x, w):\n    return x @ w.T\n"


def yardstick(reference, x, w, dtype="float32", shape=("rows", "out"), **pack):
    problem = Problem.model_validate(
        {
            "id": "toy/precision",
            "definition": {
                "name": "precision",
                "axes": {"rows": {"type": "var"}, "width": {"type": "var"}, "out": {"type": "var"}},
                "inputs": {
                    "x": {"shape": ["rows", "width"], "dtype": str(x.dtype)[6:]},
                    "w": {"shape": ["out", "width"], "dtype": str(w.dtype)[6:]},
                },
                "outputs": {"y": {"shape": list(shape), "dtype": dtype}},
                "reference": "import torch\n" + reference,
            },
            "workloads": [
                {
                    "uuid": "w", "axes": {"rows": x.shape[0], "width": x.shape[1], "out": w.shape[0]},
                    "inputs": {"x": {"type": "random"}, "w": {"type": "random"}},
                }
            ],
            "pack": {"id": "toy/precision", "title": "", **pack},
        }
    )  # fmt: skip
    return Yardstick(problem, Reference(problem), [x, w], problem.outputs(problem.workloads[0]))


@pytest.fixture
def floats():
    torch.manual_seed(0)
    scale = torch.exp2(torch.randint(-8, 4, (ROWS, 1)).float())
    return torch.randn(ROWS, WIDTH) * scale, torch.randn(OUT, WIDTH)


def test_the_reference_and_other_orders_of_its_sums_pass(floats):
    x, w = floats
    y = yardstick(LINEAR, x, w)
    assert not y.void and y.faults(0, y.expected[0]) == []
    chunks = sum(x[:, i : i + 4] @ w[:, i : i + 4].T for i in range(0, WIDTH, 4))
    assert y.faults(0, chunks) == []
    assert y.faults(0, (x.double() @ w.double().T).float()) == []


@pytest.mark.parametrize("bits", [7, 10])
def test_a_float32_problem_in_lower_precision_fails(floats, bits):
    x, w = floats
    lower = round_mantissa(x, bits) @ round_mantissa(w, bits).T
    assert any("float64" in fault for fault in yardstick(LINEAR, x, w).faults(0, lower))


def test_the_policy_admits_what_it_names_and_nothing_below(floats):
    x, w = floats
    policy = PrecisionPolicy(contraction="tf32").model_dump()
    y = yardstick(LINEAR, x, w, precision_policy=policy)
    assert y.faults(0, round_mantissa(x, 10) @ round_mantissa(w, 10).T) == []
    assert y.faults(0, round_mantissa(x, 7) @ round_mantissa(w, 7).T)


def test_bfloat16_results_may_be_rounded_elsewhere_but_not_go_through_float8(floats):
    x, w = (t.bfloat16() for t in floats)
    y = yardstick(LINEAR, x, w, dtype="bfloat16")
    assert y.faults(0, (x.float() @ w.float().T).bfloat16()) == []
    assert y.faults(0, ((x @ w.T).float() * (1 + 2**-9)).bfloat16()) == []
    scale = x.abs().amax(-1, keepdim=True).float() / 448
    low = (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
    assert y.faults(0, (low @ w.float().T).bfloat16())


@pytest.mark.parametrize("row", [0, 17, ROWS - 1])
@pytest.mark.parametrize("fault", ["zero", "stale", "tenth"])
def test_a_single_wrong_row_fails_whatever_its_scale(floats, row, fault):
    x, w = (t.bfloat16() for t in floats)
    y = yardstick(LINEAR, x, w, dtype="bfloat16")
    got = y.expected[0].clone()
    if fault == "zero":
        got[row] = 0
    elif fault == "stale":
        got[row] = y.expected[0][row - 1]
    else:
        got[row] *= 1.125
    assert any("beyond" in reason for reason in y.faults(0, got))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_value_that_is_not_finite_fails(floats, bad):
    y = yardstick(LINEAR, *floats)
    got = y.expected[0].clone()
    got[3, 4] = bad
    assert y.faults(0, got)


def test_minus_infinity_must_be_where_the_reference_has_it(floats):
    source = "def run(x, w):\n    y = x @ w.T\n    return torch.where(y > 0, y, -torch.inf)\n"
    y = yardstick(source, *floats)
    assert not y.void and y.faults(0, y.expected[0]) == []
    got = y.expected[0].clone()
    got[torch.isinf(got)] = -1e30
    assert y.faults(0, got)


def test_a_result_that_is_nothing_but_rounding_error_is_compared_by_size(floats):
    source = "def run(x, w):\n    y = x @ w.T\n    return (y - y.mean(1, keepdim=True)).sum(1)\n"
    y = yardstick(source, *floats, shape=("rows",))
    got = y.expected[0].flip(0)
    assert not y.void and y.faults(0, got) == []
    assert y.faults(0, got + 1)


def test_a_set_on_which_the_reference_is_no_measure_is_void(floats):
    x, w = floats
    noise = "def run(x, w):\n    big = 3e7 + x\n    return (big - 3e7) @ w.T\n"
    assert "rounding error" in yardstick(noise, x / x.abs().max(), w).void
    overflow = "def run(x, w):\n    return (x * 1e30) @ (w * 1e30).T\n"
    assert "overflows" in yardstick(overflow, x, w).void


def test_integers_must_be_the_references_but_for_the_share_a_selection_decides(floats):
    source = "def run(x, w):\n    return (x @ w.T).argsort(-1)\n"
    y = yardstick(source, *floats, dtype="int64")
    got = y.expected[0].clone()
    assert y.faults(0, got) == []
    got[0, :2] = got[0, :2].flip(0)
    assert "2 of" in y.faults(0, got)[0]
    lenient = yardstick(source, *floats, dtype="int64", selects=0.01)
    assert lenient.faults(0, got) == []


def test_mantissas_are_rounded_to_nearest_even():
    value = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1.5, -1 - 2**-7, 0.0, float("inf")])
    assert torch.equal(round_mantissa(value, 7), value.bfloat16().float())
    assert torch.equal(round_mantissa(torch.tensor([1 + 2**-11]), 10), torch.tensor([1.0]))
