"""Errors that rows share: statistics in low precision are told from honest roundings."""

from __future__ import annotations

import pytest
import torch

from sol_gym.problem import PrecisionPolicy, Problem
from sol_gym.problems import load
from sol_gym.sandbox.precision import Yardstick
from sol_gym.sandbox.reference import Reference
from sol_gym.sandbox.systematic import FACTOR, applies_to

BF16 = torch.bfloat16
NORM = """
def run(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w
"""
LAYER_NORM = """
def run(x, w):
    return F.layer_norm(x.float(), w.shape, w.float(), eps=1e-6).to(x.dtype)
"""
ATTENTION = """
def run(x, w):
    return (x.float() @ w.float().T).softmax(-1).to(x.dtype) @ w
"""
INSTANCE_NORM = """
def run(x, w):
    wide = x.float() * w.float()
    return (wide * torch.rsqrt(wide.square().mean((2, 3), keepdim=True))).to(x.dtype)
"""


def problem(reference, x, w, shape, **pack):
    axes = {f"a{n}": {"type": "var"} for n in {*x.shape, *w.shape, *shape}}
    return Problem.model_validate(
        {
            "id": "toy/systematic",
            "definition": {
                "name": "systematic", "axes": axes,
                "inputs": {
                    name: {"shape": [f"a{n}" for n in t.shape], "dtype": str(t.dtype)[6:]}
                    for name, t in (("x", x), ("w", w))
                },
                "outputs": {"y": {"shape": [f"a{n}" for n in shape], "dtype": "bfloat16"}},
                "reference": "import torch\nimport torch.nn.functional as F\n" + reference,
            },
            "workloads": [
                {
                    "uuid": "w", "axes": {a: int(a[1:]) for a in axes},
                    "inputs": {"x": {"type": "random"}, "w": {"type": "random"}},
                }
            ],
            "pack": {"id": "toy/systematic", "title": "", **pack},
        }
    )  # fmt: skip


def yardstick(reference, x, w, shape=None, **pack):
    toy = problem(reference, x, w, shape or tuple(x.shape), **pack)
    found = Yardstick(toy, Reference(toy), [x, w], toy.outputs(toy.workloads[0]))
    assert not found.void
    return found


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def normed(rows=64, width=1024, mean=0.0):
    scale = torch.exp2(torch.empty(rows, 1).uniform_(-4, 4))
    x = ((torch.randn(rows, width) + mean) * scale).to(BF16)
    return x, torch.empty(width).uniform_(0.25, 1.75).to(BF16)


def low(t):
    return t.to(BF16).float()


def test_a_mean_of_squares_in_bfloat16_is_seen_though_its_error_is_small():
    x, w = normed()
    y = yardstick(NORM, x, w)
    wide = x.float()
    square = low(wide.square().mean(-1, keepdim=True))
    got = y.compare(0, (wide * torch.rsqrt(square + 1e-6)).to(BF16) * w)
    assert got.rms < 1 and got.shared > FACTOR
    assert len(got.faults) == 1 and "a factor on rows" in got.faults[0]
    whole = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * w
    assert y.compare(0, whole).shared > FACTOR


def test_honest_norms_pass_with_room():
    x, w = normed()
    y = yardstick(NORM, x, w)
    wide, fine = x.float(), w.float()
    sequential = wide.square().cumsum(-1)[:, -1:] / x.shape[1]
    chunks = sum(c.square().sum(-1, keepdim=True) for c in wide.split(32, -1)) / x.shape[1]
    for square in (sequential, chunks):
        scale = torch.rsqrt(square + 1e-6)
        fast = scale * (1 + 2**-20)
        for got in (wide * scale * fine, wide * fast * fine, low(wide * fast) * fine, wide * low(scale * fine)):  # fmt: skip
            deviation = y.compare(0, got.to(BF16))
            assert not deviation.faults and deviation.shared < FACTOR / 2


def test_a_mean_in_bfloat16_is_seen_as_an_offset_where_rows_have_a_mean():
    x, w = normed(mean=2.0)
    y = yardstick(LAYER_NORM, x, w)
    wide, mean = x.float(), x.float().mean(-1, keepdim=True)
    spread = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + 1e-6)
    assert y.faults(0, ((wide - mean) * spread * w.float()).to(BF16)) == []
    assert "offset on rows" in y.faults(0, ((wide - low(mean)) * spread * w.float()).to(BF16))[-1]


def test_row_sums_of_a_softmax_in_bfloat16_are_seen_and_rounded_probabilities_pass():
    x, w = (torch.randn(96, 128) * 0.05).to(BF16), torch.randn(512, 128).to(BF16)
    w = (w.float() + 1).to(BF16)  # a mean, so that all outputs depend on the sum
    policy = PrecisionPolicy(contraction="bfloat16").model_dump()
    y = yardstick(ATTENTION, x, w, precision_policy=policy)
    scores = x.float() @ w.float().T
    raised = (scores - scores.amax(-1, keepdim=True)).exp()
    total = raised.sum(-1, keepdim=True)
    for numerators, sums in ((raised, total), (low(raised), total), (low(raised), low(raised).sum(-1, keepdim=True))):  # fmt: skip
        deviation = y.compare(0, (numerators @ w.float() / sums).to(BF16))
        assert not deviation.faults and deviation.shared < FACTOR / 2
    assert "factor" in y.faults(0, (raised @ w.float() / low(total)).to(BF16))[0]


def test_statistics_of_images_are_seen_through_short_rows():
    x, w = torch.randn(8, 16, 24, 8).to(BF16), torch.rand(8, 16, 24, 8).add(0.5).to(BF16)
    y = yardstick(INSTANCE_NORM, x, w)
    wide = x.float() * w.float()
    square = wide.square().mean((2, 3), keepdim=True)
    assert y.faults(0, (wide * torch.rsqrt(square)).to(BF16)) == []
    faults = y.faults(0, (wide * torch.rsqrt(low(square))).to(BF16))
    assert "a factor on" in faults[0] and "on rows" not in faults[0]


def test_rounding_that_cuts_off_long_sums_passes_and_cutting_off_the_result_does_not():
    x, w = normed(256, 2048)
    y = yardstick(NORM, x, w)
    assert y.faults(0, (y.oracle[0] * (1 - 2**-14)).to(BF16)) == []
    cut = (y.oracle[0].float().view(torch.int32) & ~0xFFFF).view(torch.float32).to(BF16)
    assert any("factor" in fault for fault in y.faults(0, cut))


def test_one_row_in_eight_is_left_to_the_other_tests_and_few_rows_are_not_judged():
    x, w = normed()
    y = yardstick(NORM, x, w)
    got = y.expected[0].clone()
    got[::8] = (got[::8].float() * (1 + 2**-8)).to(BF16)
    assert y.compare(0, got).shared < 1
    got[::4] = (y.expected[0][::4].float() * (1 + 2**-8)).to(BF16)
    assert y.compare(0, got).shared > FACTOR
    x, w = normed(7)
    y = yardstick(NORM, x, w)
    assert y.compare(0, (y.expected[0].float() * (1 + 2**-8)).to(BF16)).shared == 0


def test_rows_of_zeros_and_infinities_that_are_the_references_do_no_harm():
    x, w = normed()
    x[3] = 0
    source = NORM.replace("return ", "y = ") + "    return torch.where(x > w, torch.inf, y)\n"
    y = yardstick(source, x, w)
    assert torch.isinf(y.expected[0]).any()
    assert y.compare(0, y.expected[0]).shared == 0
    assert 0 < y.compare(0, y.oracle[0].to(BF16)).shared < 1


@pytest.mark.parametrize(
    "pack",
    [{"selects": 0.01}, {"rounding_sensitive": "codes turn on the last bit"},
     {"precision_policy": PrecisionPolicy(convolution="tf32").model_dump()}],
)  # fmt: skip
def test_where_honest_versions_may_share_errors_they_are_not_judged(pack):
    x, w = normed()
    assert applies_to(problem(NORM, x, w, x.shape))
    assert not applies_to(problem(NORM, x, w, x.shape, **pack))
    assert not applies_to(problem(NORM + "# through torch.float8_e4m3fn\n", x, w, x.shape))


def test_quantised_problems_are_left_out_and_norms_are_not():
    assert not applies_to(load("Quant/001"))
    assert not applies_to(load("L2/076")), "float32 throughout"
    assert applies_to(load("L1/069")) and applies_to(load("FIB/023"))
