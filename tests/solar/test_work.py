"""Contraction work and its units, against counts made another way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sol_gym.device import get_device
from sol_gym.solar import analyze
from sol_gym.solar.precision import format_of_content, work_class

BF16, F16, F32, F64 = "bfloat16", "float16", "float32", "float64"
FP8, FP4, U8, I8, I64 = "float8_e4m3fn", "float4_e2m1fn_x2", "uint8", "int8", "int64"
H200 = get_device("h200")


def work_of(problem) -> dict[str, int]:
    (workload,) = problem.workloads
    return analyze(problem, workload, H200, precision="declared").work


@pytest.mark.parametrize(
    ("source", "shapes", "flops"),
    [
        ("x @ y", ([4, 5], [5, 6]), 2 * 4 * 5 * 6),
        ("torch.addmm(y[:1], x, y)", ([4, 4], [4, 4]), 2 * 4 * 4 * 4),
        ("x @ y", ([7, 4, 5], [5, 6]), 2 * 7 * 4 * 5 * 6),
        ("x @ y", ([3, 4, 5], [3, 5, 6]), 2 * 3 * 4 * 5 * 6),
        ("torch.baddbmm(x @ y, x, y)[0]", ([3, 4, 5], [3, 5, 6]), 2 * 2 * 4 * 5 * 6),
        ("x @ y[:, 0]", ([4, 5], [5, 6]), 2 * 4 * 5),
        ("torch.dot(x[0], y[0])", ([4, 5], [2, 5]), 2 * 5),
        (
            "torch.einsum('bhqd,bkhd->bhqk', x, y)",
            ([2, 3, 4, 5], [2, 6, 3, 5]),
            2 * 2 * 3 * 4 * 6 * 5,
        ),
        ("torch.outer(x[0], y[0])", ([4, 5], [2, 5]), 0),
        ("(x[:, None] * y.T).sum(-1)", ([4, 5], [5, 6]), 0),
        ("F.one_hot(torch.arange(3), 4).float() @ x", ([4, 5], [1]), 0),
        ("F.pad(x, (0, 3)) @ F.pad(y, (0, 0, 0, 3))", ([4, 5], [5, 6]), 2 * 4 * 5 * 6),
        ("(x @ y).tril()[:, :4]", ([4, 5], [5, 6]), 0),
        ("torch.ones(4, 4).tril() @ x", ([4, 5], [1]), 0),
        ("((x @ x.T) * torch.ones(4, 4).tril()) @ x", ([4, 5], [1]), 0),
        (
            "(x @ x.T + torch.full((4, 4), -torch.inf).triu(1)).softmax(-1) @ x",
            ([4, 5], [1]),
            2 * 2 * 10 * 5,
        ),
    ],
)
def test_products_are_counted_where_they_are_needed(make_problem, source, shapes, flops):
    sample = [torch.randn(s) for s in shapes]
    out = eval(source, {"torch": torch, "F": F}, dict(zip("xy", sample, strict=True)))
    problem = make_problem(
        f"def run(x, y): return {source}",
        {n: (s, F32) for n, s in zip("xy", shapes, strict=True)},
        {"out": (list(out.shape), F32)},
    )
    assert work_of(problem) == ({"fp32": flops} if flops else {})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2), (2, 3, 2)]
)
def test_convolution_counts_the_taps_that_meet_data(
    make_problem, transposed, groups, stride, padding, dilation
):
    x, weight = (
        torch.ones(2, 4, 6, 5),
        torch.ones(4, 6 // groups if transposed else 4 // groups, 3, 2),
    )
    call = F.conv_transpose2d if transposed else F.conv2d
    options = f"stride={stride}, padding={padding}, dilation={dilation}, groups={groups}"
    # With ones everywhere, each output counts its own multiplications.
    out = call(x, weight, stride=stride, padding=padding, dilation=dilation, groups=groups)
    problem = make_problem(
        f"def run(x, w): return F.{call.__name__}(x, w, {options})",
        {"x": (list(x.shape), F32), "w": (list(weight.shape), F32)},
        {"y": (list(out.shape), F32)},
    )
    assert work_of(problem) == {"fp32": 2 * int(out.sum())}


def test_convolution_gradients_cost_what_the_forward_pass_does(make_problem):
    problem = make_problem(
        """
        def run(x, w):
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            y = F.conv1d(x, w, padding=1)
            return torch.autograd.grad((y * y).sum(), (x, w))
        """,
        {"x": ([2, 4, 8], F32), "w": ([6, 4, 3], F32)},
        {"gx": ([2, 4, 8], F32), "gw": ([6, 4, 3], F32)},
    )
    forward = 2 * 2 * 6 * 4 * (3 * 8 - 2)
    assert work_of(problem) == {"fp32": 3 * forward}


def block_scaled(cast: str) -> str:
    return f"""
        def q(x):
            blocks = x.float().unflatten(-1, (-1, 32))
            scale = blocks.abs().amax(-1, keepdim=True) / 448.0
            return ((blocks / scale){cast}.float() * scale).flatten(-2)
        def run(x, w): return q(x) @ q(w).T
        """


@pytest.mark.parametrize(
    ("source", "left", "right", "out", "unit"),
    [
        ("x @ w.T", BF16, BF16, BF16, "bf16_tc"),
        ("x @ w.T", F16, F16, F16, "fp16_tc"),
        ("x @ w.T", F32, F32, F32, "fp32"),
        ("x @ w.T", F64, F64, F64, "fp64"),
        ("x.float() @ w.float().T", BF16, BF16, F32, "bf16_tc"),
        ("x.float() @ w.float().T", BF16, FP8, F32, "bf16_tc"),
        ("x.float() @ w.float().T", FP8, FP8, F32, "fp8_tc"),
        ("x.float() @ w.float().T", I8, I8, F32, "fp8_tc"),
        ("x @ w.float().T", F32, BF16, F32, "fp32"),
        # Rounded to 16 bits in the end, 16-bit operands lose no more.
        ("(x @ w.T).to(torch.bfloat16)", F32, F32, BF16, "bf16_tc"),
        ("(x @ w.T).softmax(-1).to(torch.bfloat16)", F32, F32, BF16, "bf16_tc"),
        ("(x.to(torch.bfloat16).float() * 3) @ w.float().T", F32, BF16, F32, "bf16_tc"),
    ],
)
def test_unit_follows_the_narrowest_exact_format(make_problem, source, left, right, out, unit):
    problem = make_problem(
        f"def run(x, w): return {source}",
        {"x": ([32, 64], left), "w": ([16, 64], right)},
        {"y": ([32, 16], out)},
    )
    assert work_of(problem) == {unit: 2 * 32 * 64 * 16}


@pytest.mark.parametrize(
    ("cast", "unit"),
    [(".to(torch.float8_e4m3fn)", "fp8_tc"), (".round()", "nvfp4_tc"), ("", "fp32")],
)
def test_scales_of_blocks_do_not_widen_what_was_rounded(make_problem, cast, unit):
    problem = make_problem(
        block_scaled(cast),
        {"x": ([32, 64], F32), "w": ([16, 64], F32)},
        {"y": ([32, 16], F32)},
    )
    assert work_of(problem) == {unit: 2 * 32 * 64 * 16}


@pytest.mark.parametrize(
    "decode",
    [
        "table[codes.int()]",
        "torch.where(codes > 7, -table[(codes & 7).int()], table[(codes & 7).int()])",
        "(codes.float() - 7.0) / 2.0",
    ],
)
def test_packed_codes_run_on_four_bit_units_however_they_are_decoded(make_problem, decode):
    problem = make_problem(
        f"""
        def run(p, s, x):
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2)
            p = p.view(torch.uint8)
            codes = torch.stack((p & 15, p >> 4), -1).flatten(-2)
            values = {decode}
            scaled = values.unflatten(-1, (-1, 16)) * s.float().unsqueeze(-1)
            return x.sign() @ scaled.flatten(-2).T
        """,
        {"p": ([16, 32], FP4), "s": ([16, 4], FP8), "x": ([8, 64], F32)},
        {"y": ([8, 16], F32)},
    )
    assert work_of(problem) == {"nvfp4_tc": 2 * 8 * 64 * 16}


def test_formats_of_constants_are_the_narrowest_that_hold_them():
    assert format_of_content(torch.tensor([0.5, -6.0, 0.0])) == "fp4"
    assert format_of_content(torch.tensor([0.5, 7.0])) == "fp8"
    assert format_of_content(torch.tensor([257.0 / 256, 1.0]).bfloat16()) == "fp4"
    assert format_of_content(torch.tensor([1.0 + 2**-7])) == "bf16"
    assert format_of_content(torch.tensor([1.0 + 2**-10])) == "fp16"
    assert format_of_content(torch.tensor([1.0 + 2**-20])) == "fp32"
    assert format_of_content(torch.tensor([3, 4])) == "fp64"


def test_widest_operand_decides():
    assert work_class("fp4", "fp8", full_precision=True) == "fp8_tc"
    assert work_class("fp8", "bf16", full_precision=True) == "bf16_tc"
    assert work_class("bf16", "fp32", full_precision=True) == "fp32"
    assert work_class("bf16", "fp32", full_precision=False) == "bf16_tc"
