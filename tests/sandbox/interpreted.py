"""What a corrected Triton interpreter computes, against torch. Run by `test_interpreter`.

Triton decides at its import whether it interprets, so these tests need a process of their own with
TRITON_INTERPRET=1; pytest does not collect this file by its name.
"""

import importlib.util
import inspect
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter_module

from sol_gym import problems
from sol_gym.inputs import InputMaker
from sol_gym.sandbox.correctness import Comparison
from sol_gym.sandbox.reference import Reference
from sol_gym.sandbox.worker import interpreter

FAULTS_OF_THIS_TRITON = interpreter.interpreter_faults()
CORRECTED = interpreter.correct_interpreter()
MISSING = [  # Triton 3.6 and before have no scaled product in their interpreter.
    f"InterpreterBuilder.{name}"
    for name in ("create_dot_scaled",)
    if not hasattr(interpreter_module.InterpreterBuilder, name)
]
KERNELS = Path(__file__).parents[2] / "benchmarks" / "kernels"
BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2


def load(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def codes(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_bits(got, expected):
    """Equal bit for bit, where any NaN is as good as another."""
    assert got.dtype == expected.dtype
    nan = expected.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    different = (codes(got) != codes(expected)) & ~nan
    assert not different.any(), f"{int(different.sum())} differ, first {got[different][0]}"


# -- the corrections as such --------------------------------------------------------------------


def test_every_fault_found_is_mended():
    assert set(CORRECTED) <= set(FAULTS_OF_THIS_TRITON)
    assert interpreter.interpreter_faults() == MISSING


def test_a_right_interpreter_is_left_alone():
    before = dict(vars(interpreter_module.InterpreterBuilder))
    assert interpreter.correct_interpreter() == []
    assert dict(vars(interpreter_module.InterpreterBuilder)) == before


def test_only_what_is_wrong_is_replaced(monkeypatch):
    builder = interpreter_module.InterpreterBuilder
    monkeypatch.setattr(builder, "create_fma", lambda self, x, y, z: z)
    before = dict(vars(builder))
    assert interpreter.correct_interpreter() == ["InterpreterBuilder.create_fma"]
    changed = {name for name, value in vars(builder).items() if before.get(name) is not value}
    assert changed == {"create_fma"}


def test_a_missing_function_stays_a_fault(monkeypatch):
    monkeypatch.delattr(interpreter_module.InterpreterBuilder, "create_dot")
    assert interpreter.correct_interpreter() == []
    assert interpreter.interpreter_faults() == ["InterpreterBuilder.create_dot", *MISSING]


def test_an_interpreter_built_otherwise_is_not_touched(monkeypatch):
    monkeypatch.setattr(interpreter_module, "_get_np_dtype", lambda dtype: np.dtype(np.float32))
    monkeypatch.setattr(interpreter_module.InterpreterBuilder, "create_fma", None)
    assert interpreter.correct_interpreter() == []
    assert interpreter_module.InterpreterBuilder.create_fma is None
    (fault,) = interpreter.interpreter_faults()
    assert "storage" in fault


def test_the_module_works_under_another_name():
    module = load("elsewhere.interpreter", Path(interpreter.__file__))
    assert module.correct_interpreter() == []


# -- casts --------------------------------------------------------------------------------------


@triton.jit
def cast_kernel(x_ptr, y_ptr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index)
    tl.store(y_ptr + index, x.to(y_ptr.dtype.element_ty, fp_downcast_rounding=ROUNDING))


def cast(x, dtype, rounding=None):
    size = triton.next_power_of_2(x.numel())
    padded = torch.zeros(size, dtype=x.dtype)
    codes_of = padded.view(torch.uint8).view(size, -1)
    codes_of[: x.numel()] = x.contiguous().view(torch.uint8).view(x.numel(), -1)
    y = torch.empty(size, dtype=dtype)
    cast_kernel[(1,)](padded, y, ROUNDING=rounding, BLOCK=size)
    return y[: x.numel()]


def every(dtype):
    """All values of a type of 8 or 16 bits."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def float32_values():
    """Random bit patterns, values around 1, and the halfway cases of bfloat16 and FP8."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=generator).int()
    halfway = torch.cat(
        [(every(BF16).view(torch.int16).int() << 16) + d for d in (2**15 - 1, 2**15, 2**15 + 1)]
    )
    near = torch.randn(50_000, generator=generator) * torch.logspace(-8, 5, 50_000, base=2)
    steps = torch.arange(-2048, 2049) / 2048
    ties = torch.cat([steps * 2.0**e for e in range(-16, 18)])
    edges = torch.tensor(
        [
            0.0,
            -0.0,
            448,
            464,
            464.1,
            57344,
            61440,
            65504,
            1e38,
            3.4e38,
            float("inf"),
            -float("inf"),
            float("nan"),
        ]
    )
    return torch.cat([patterns.view(torch.float32), halfway.view(torch.float32), near, ties, edges])


def expected_cast(x, dtype):
    """By torch; FP8 saturates as on a GPU, which torch's own casts do not always do."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        x = x.float().clamp(-largest, largest)
    return x.to(dtype)


@pytest.mark.parametrize("target", [BF16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [torch.float32, FP16, BF16], ids=str)
def test_casts_round_to_nearest_even(source, target):
    if source is target:
        pytest.skip("no cast")
    x = float32_values() if source is torch.float32 else every(source)
    assert_same_bits(cast(x, target), expected_cast(x, target))


@pytest.mark.parametrize("target", [torch.float32, FP16, BF16], ids=str)
@pytest.mark.parametrize("source", [BF16, E4M3, E5M2], ids=str)
def test_casts_to_wider_types_keep_the_value(source, target):
    if source is target:
        pytest.skip("no cast")
    assert_same_bits(cast(every(source), target), every(source).to(target))


def test_infinity_and_nan_become_what_a_gpu_makes_of_them():
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), -float("nan")])
    assert codes(cast(x, E4M3)).tolist() == [0x7E, 0xFE, 0x7F, 0x7F]
    assert codes(cast(x, E5M2)).tolist() == [0x7B, 0xFB, 0x7F, 0x7F]
    assert codes(cast(x, BF16)).tolist() == [0x7F80, 0xFF80 - 2**16, 0x7FFF, 0x7FFF]


def test_float64_is_rounded_once():
    tie = 1 + 2**-8
    x = torch.tensor([tie, tie + 2**-40, tie - 2**-40, -tie - 2**-40], dtype=torch.float64)
    assert cast(x, BF16).tolist() == [1, 1 + 2**-7, 1, -1 - 2**-7]


@pytest.mark.parametrize("target", [BF16, E4M3], ids=str)
def test_rounding_toward_zero_drops_what_does_not_fit(target):
    x = float32_values()
    x = x[x.abs() <= torch.finfo(target).max]
    got = cast(x, target, rounding="rtz")
    assert (got.float().abs() <= x.abs()).all()
    next_up = (codes(got) + 1).view(target).float().abs()
    assert ((next_up > x.abs()) | next_up.isnan()).all()


@pytest.mark.parametrize("integer", [torch.int8, torch.int32, torch.int64, torch.bool], ids=str)
def test_integers_become_bfloat16_and_back(integer):
    x = torch.arange(-128, 128).to(integer)
    assert_same_bits(cast(x, BF16), x.to(BF16))
    if integer is not torch.bool:
        assert torch.equal(cast(x.to(BF16) + 0.5, integer), (x.to(BF16) + 0.5).to(integer))


# -- operators ----------------------------------------------------------------------------------


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def subtract(a, b):
    return a - b


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def divide(a, b):
    return a / b


@triton.jit
def negate_and_scale(a, b):
    return -a * 1.7


@triton.jit
def fused(a, b):
    return tl.fma(a, b, a)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def clamped(a, b):
    return tl.clamp(a, -0.5, 0.5)


@triton.jit
def magnitude(a, b):
    return tl.abs(a)


@triton.jit
def chosen(a, b):
    return tl.where((a < b) & (b != 0.5), a, b)


@triton.jit
def exponential(a, b):
    return tl.exp(a.to(tl.float32))


OPERATORS = {
    add: lambda a, b: a + b,
    subtract: lambda a, b: a - b,
    multiply: lambda a, b: a * b,
    divide: lambda a, b: a / b,
    negate_and_scale: lambda a, b: -a * torch.tensor(1.7, dtype=BF16),
    fused: lambda a, b: (a.double() * b.double() + a.double()).to(BF16),
    larger: torch.maximum,
    smaller: torch.minimum,
    clamped: lambda a, b: a.clamp(-0.5, 0.5),
    magnitude: lambda a, b: a.abs(),
    chosen: lambda a, b: torch.where((a < b) & (b != 0.5), a, b),
    exponential: lambda a, b: a.float().exp().to(BF16),
}


@triton.jit
def binary_kernel(a_ptr, b_ptr, y_ptr, OPERATOR: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    y = OPERATOR(tl.load(a_ptr + index), tl.load(b_ptr + index))
    tl.store(y_ptr + index, y.to(tl.bfloat16))


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.fn.__name__)
def test_bfloat16_operators_work_on_values(operator):
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(4096, generator=generator).to(BF16) for _ in range(2))
    b[:8] = 0.5
    y = torch.empty_like(a)
    binary_kernel[(1,)](a, b, y, OPERATOR=operator, BLOCK=4096)
    assert_same_bits(y, OPERATORS[operator](a, b))


@triton.jit
def atomic_add_kernel(x_ptr, index_ptr, y_ptr, size, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    inside = index < size
    x = tl.load(x_ptr + index, mask=inside)
    where = tl.load(index_ptr + index, mask=inside, other=0)
    tl.atomic_add(y_ptr + where, x, mask=inside)


def test_atomic_add_of_bfloat16_counts_every_element():
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-4, 5, (50,), generator=generator).to(BF16)
    index = torch.randint(0, 7, (50,), generator=generator)
    y = torch.ones(7, dtype=BF16)
    expected = y.float().index_add(0, index, x.float()).to(BF16)
    atomic_add_kernel[(1,)](x, index, y, 50, BLOCK=64)
    assert torch.equal(y, expected)


# -- reductions and scans -----------------------------------------------------------------------


@triton.jit
def farther_from_zero(a, b):
    return tl.where(tl.abs(a) > tl.abs(b), a, b)


@triton.jit
def reduce_kernel(x_ptr, row_ptr, scan_ptr, where_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    offset = row[:, None] * COLUMNS + column[None, :]
    x = tl.load(x_ptr + offset)
    tl.store(row_ptr + row, tl.max(x, axis=1))
    tl.store(row_ptr + ROWS + row, tl.min(x, axis=1))
    tl.store(row_ptr + 2 * ROWS + row, tl.sum(x, axis=1))
    tl.store(row_ptr + 3 * ROWS + row, tl.reduce(x, 1, farther_from_zero))
    tl.store(row_ptr + 4 * ROWS + row, tl.full((ROWS,), 0.0, tl.bfloat16) + tl.max(x))
    tl.store(where_ptr + row, tl.argmax(x, axis=1))
    tl.store(where_ptr + ROWS + row, tl.argmin(x, axis=1))
    tl.store(scan_ptr + offset, tl.cumsum(x, axis=1))
    tl.store(scan_ptr + ROWS * COLUMNS + offset, tl.sort(x, dim=1))


def test_bfloat16_reductions_and_scans_work_on_values():
    generator = torch.Generator().manual_seed(3)
    # Different small integers in each row: every order of summation gives the same.
    x = torch.stack([torch.randperm(61, generator=generator)[:32] - 30 for _ in range(4)]).to(BF16)
    rows, scans = torch.empty(5, 4, dtype=BF16), torch.empty(2, 4, 32, dtype=BF16)
    where = torch.empty(2, 4, dtype=torch.int32)
    reduce_kernel[(1,)](x, rows, scans, where, ROWS=4, COLUMNS=32)
    wide = x.float()
    assert torch.equal(rows[0], x.amax(1))
    assert torch.equal(rows[1], x.amin(1))
    assert torch.equal(rows[2], wide.sum(1).to(BF16))
    assert torch.equal(rows[3].abs(), x.abs().amax(1))
    assert torch.equal(rows[4], x.max().expand(4))
    assert torch.equal(where, torch.stack([x.argmax(1), x.argmin(1)]).int())
    assert torch.equal(scans[0], wide.cumsum(1).to(BF16))
    assert torch.equal(scans[1], x.sort(1).values)


# -- products -----------------------------------------------------------------------------------


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    c_ptrs = c_ptr + m[:, None] * N + n[None, :]
    tl.store(c_ptrs, tl.dot(a, b, tl.load(c_ptrs), out_dtype=c_ptr.dtype.element_ty))


@pytest.mark.parametrize("accumulator", [torch.float32, FP16], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3, E5M2], ids=str)
def test_dot_multiplies_values_and_sums_in_float32(dtype, accumulator):
    if dtype is BF16 and accumulator is FP16:
        pytest.skip("Triton has no such product")
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    c = torch.randn(32, 32, generator=generator).to(accumulator)
    expected = (a.float() @ b.float() + c.float()).to(accumulator)
    dot_kernel[(1,)](a, b, c, M=32, N=32, K=32)
    tolerance = 1e-5 if accumulator is torch.float32 else 2e-3
    torch.testing.assert_close(c, expected, rtol=tolerance, atol=tolerance)


@triton.jit
def dot_scaled_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, A: tl.constexpr, B: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, K_A: tl.constexpr, K_B: tl.constexpr,
):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    a = tl.load(a_ptr + m[:, None] * K_A + tl.arange(0, K_A)[None, :])
    b = tl.load(b_ptr + n[None, :] * K_B + tl.arange(0, K_B)[:, None])
    if A == "bf16":
        a_scale = None
    else:
        a_scale = tl.load(a_scale_ptr + m[:, None] * (K // 32) + k[None, :])
    b_scale = tl.load(b_scale_ptr + n[:, None] * (K // 32) + k[None, :])
    c = tl.dot_scaled(a, a_scale, A, b, b_scale, B)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c)


E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def scaled_operand(kind, generator, rows=32, k=64):
    """Stored codes [rows, k or k / 2], E8M0 scales [rows, k / 32], and what they stand for."""
    scale = torch.randint(120, 134, (rows, k // 32), generator=generator, dtype=torch.uint8)
    if kind == "e2m1":
        code = torch.randint(0, 16, (rows, k), generator=generator, dtype=torch.uint8)
        stored = code[:, 0::2] | (code[:, 1::2] << 4)
        values = E2M1_VALUES[(code & 7).int()] * torch.where(code >= 8, -1, 1)
    else:
        dtype = {"e4m3": E4M3, "e5m2": E5M2, "bf16": BF16}[kind]
        scaled = torch.randn(rows, k, generator=generator) * (2.0**40 if kind == "bf16" else 1)
        stored = scaled.to(dtype)
        values = stored.float()
    if kind != "bf16":
        values = values * (2.0 ** (scale.float() - 127)).repeat_interleave(32, dim=1)
    return stored, scale, values


@pytest.mark.skipif(bool(MISSING), reason="no scaled product in this interpreter")
@pytest.mark.parametrize(
    "kinds", [("e4m3", "e2m1"), ("e2m1", "e5m2"), ("bf16", "e4m3")], ids="-".join
)
def test_dot_scaled_multiplies_values_by_scales(kinds):
    generator = torch.Generator().manual_seed(5)
    (a, a_scale, a_values), (b, b_scale, b_values) = (scaled_operand(k, generator) for k in kinds)
    c = torch.empty(32, 32)
    dot_scaled_kernel[(1,)](
        a, a_scale, b, b_scale, c, A=kinds[0], B=kinds[1],
        M=32, N=32, K=64, K_A=a.shape[1], K_B=b.shape[1],
    )  # fmt: skip
    expected = a_values.double() @ b_values.double().T
    torch.testing.assert_close(
        c.double() / expected.abs().max(), expected / expected.abs().max(), rtol=0, atol=1e-6
    )


# -- whole kernels ------------------------------------------------------------------------------


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, y_ptr, size_ptr, eps, BLOCK: tl.constexpr):
    hidden_size = tl.load(size_ptr)
    x_ptr += tl.program_id(0) * hidden_size
    y_ptr += tl.program_id(0) * hidden_size
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, hidden_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < hidden_size, other=0.0).to(tl.float32)
        total += x * x
    rstd = tl.rsqrt(tl.sum(total, axis=0) / hidden_size + eps)
    for start in range(0, hidden_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden_size
        x = tl.load(x_ptr + column, mask=inside, other=0.0)
        normalized = (x.to(tl.float32) * rstd).to(tl.bfloat16)
        tl.store(
            y_ptr + column, normalized * tl.load(weight_ptr + column, mask=inside), mask=inside
        )


def test_rms_norm_with_a_product_in_bfloat16():
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(8, 600, generator=generator).to(BF16)
    weight = torch.randn(600, generator=generator).to(BF16)
    y = torch.empty_like(x)
    rms_norm_kernel[(8,)](x, weight, y, torch.tensor([600]), 1e-6, BLOCK=256)
    wide = x.double()
    rstd = torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6).float()
    expected = (x.float() * rstd).to(BF16) * weight
    # The order of the sum may move rstd by its last bit, and with it a value on a rounding edge.
    assert (y == expected).float().mean() > 0.999
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=0)


SMALL_AXES = {
    "L1/069": {"batch_size": 1, "seq_len": 13},
    "FIB/021": {"batch_size": 61},
    "L1/015": {"batch_size": 1, "seq_len": 12},
    "FIB/012": {},
    "Quant/001": {"batch_size": 1, "seq_len": 70},
    "Quant/024": {},
    "L2/004": {"batch_size": 1, "seq_len": 21},
}
"""Smoke workloads with fewer rows where a program a row would take the interpreter minutes."""


@pytest.mark.parametrize("prefix", SMALL_AXES)
def test_honest_kernels_match_the_reference(prefix):
    (file,) = KERNELS.glob(prefix.replace("/", "_").lower() + "_*.py")
    solution = load(file.stem, file)
    problem = problems.load(prefix, "smoke")
    workload = problem.workloads[0]
    workload = workload.model_copy(update={"axes": {**workload.axes, **SMALL_AXES[prefix]}})
    inputs = list(InputMaker(problem, workload, "cpu", seed=7).draw().values())
    outputs = problem.outputs(workload)
    expected = Reference(problem)(inputs, outputs)
    if len(inspect.signature(solution.run).parameters) > len(inputs):
        got = [torch.empty(o.shape, dtype=getattr(torch, o.dtype)) for o in outputs.values()]
        solution.run(*inputs, *got)
    else:
        returned = solution.run(*inputs)
        got = list(returned) if isinstance(returned, tuple) else [returned]
    comparison = Comparison(workload.tolerance)
    for name, made, right in zip(outputs, got, expected, strict=True):
        assert comparison.add(name, made, right), comparison.reasons
