"""The float64 oracle: roundings vanish, quantising steps stay, nothing leaks out."""

from __future__ import annotations

import pytest
import torch

from sol_gym.problem import Problem, TensorArg
from sol_gym.sandbox.oracle import OracleUnsupported, oracle_outputs
from sol_gym.sandbox.reference import Reference


def oracle(source, *arguments, dtype="float32", shape=None):
    problem = Problem.model_validate(
        {
            "id": "toy/oracle",
            "definition": {
                "name": "oracle", "axes": {"n": {"type": "var"}},
                "inputs": {"x": {"shape": ["n"], "dtype": "float32"}},
                "outputs": {"y": {"shape": ["n"], "dtype": dtype}},
                "reference": "import math\nimport torch\nimport torch.nn.functional as F\n" + source,
            },
            "workloads": [{"uuid": "w", "axes": {"n": 4}, "inputs": {"x": {"type": "random"}}}],
        }
    )  # fmt: skip
    shape = tuple(arguments[0].shape) if shape is None else shape
    outputs = {"y": TensorArg(name="y", shape=shape, dtype=dtype)}
    return oracle_outputs(Reference(problem), list(arguments), outputs)[0]


X = torch.tensor([0.1, 1 / 3, 3.0, 7.7])


@pytest.mark.parametrize(
    "cast",
    ["x.bfloat16().float()", "x.to(torch.bfloat16)", "x.half()", "x.type(torch.float16)",
     "x.to(dtype=torch.bfloat16).float()", "x + torch.zeros(4, dtype=torch.bfloat16)",
     "torch.tensor([0.0]).bfloat16() + x", "torch.empty_like(x, dtype=torch.bfloat16).copy_(x)"],
)  # fmt: skip
def test_a_rounding_step_vanishes(cast):
    y = oracle(f"def run(x):\n    return ({cast}) * 2", X)
    assert y.dtype is torch.float64 and torch.equal(y, X.double() * 2)


def test_constants_and_tables_are_float64():
    y = oracle("def run(x):\n    return x * torch.arange(4) / 3 + torch.tensor(0.1)", X)
    assert torch.equal(y, X.double() * torch.arange(4) / 3 + 0.1)
    table = "TABLE = torch.tensor([0.5, 1.0, 2.0, 4.0])\ndef run(x):\n    return torch.outer(x, TABLE).sum(1)"
    assert torch.allclose(oracle(table, X), X.double() * 7.5, rtol=1e-15)


def test_products_and_transforms_are_float64():
    a, b = torch.randn(5, 6), torch.randn(6, 3)
    source = "def run(a, b):\n    return torch.einsum('ik,kj->ij', a.bfloat16(), b.bfloat16())"
    assert torch.allclose(oracle(source, a, b, shape=(5, 3)), a.double() @ b.double(), rtol=1e-12)
    y = oracle(
        "def run(x):\n    return torch.fft.rfft(x, n=4).to(torch.complex64).real", X, shape=(3,)
    )
    assert torch.allclose(y, torch.fft.rfft(X.double()).real, rtol=1e-14)


def test_quantising_to_float8_stays():
    y = oracle("def run(x):\n    return x.to(torch.float8_e4m3fn).float()", X)
    assert torch.equal(y, X.double().to(torch.float8_e4m3fn).double())


def test_integers_stay_and_inputs_and_the_default_dtype_are_left_as_they_are():
    x = X.clone()
    y = oracle("def run(x):\n    return x.argsort()", x, dtype="int64")
    assert y.dtype is torch.int64 and torch.equal(x, X) and x.dtype is torch.float32
    with pytest.raises(OracleUnsupported, match="ZeroDivisionError"):
        oracle("def run(x):\n    return 1 / 0", x)
    assert torch.get_default_dtype() is torch.float32


def test_looking_at_the_bits_of_a_float_is_unsupported():
    with pytest.raises(OracleUnsupported, match="bits of a float"):
        oracle("def run(x):\n    return x.view(torch.int32)", X, dtype="int32")
