import math

import pytest
import torch

from sol_gym.problem import Tolerance
from sol_gym.sandbox.correctness import Comparison

NAN, INF = float("nan"), float("inf")


def verdict(got, expected, **tolerance):
    comparison = Comparison(Tolerance(**tolerance))
    passed = comparison.add("y", torch.tensor(got), torch.tensor(expected))
    return passed, comparison.result()


def test_the_tolerance_is_absolute_plus_relative():
    assert verdict([1.019], [1.0], max_atol=0.01, max_rtol=0.01)[0]
    assert not verdict([1.021], [1.0], max_atol=0.01, max_rtol=0.01)[0]


def test_a_share_of_the_elements_may_be_off():
    got, expected = [0.0] * 99 + [5.0], [0.0] * 100
    assert verdict(got, expected, required_matched_ratio=0.99)[0]
    assert not verdict(got, expected, required_matched_ratio=0.995)[0]


def test_no_element_may_be_off_by_more_than_the_cap():
    got, expected = [0.0] * 99 + [5.0], [0.0] * 100
    assert not verdict(got, expected, max_error_cap=4.0)[0]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_single_non_finite_value_where_a_finite_one_is_due_fails(bad):
    passed, record = verdict([bad] + [0.0] * 999, [0.0] * 1000)
    assert not passed
    assert record.has_nan == math.isnan(bad)


def test_nan_matches_nothing():
    assert not verdict([NAN], [NAN])[0]


def test_minus_infinity_matches_only_where_it_is_allowed():
    assert not verdict([-INF], [-INF])[0]
    assert verdict([-INF], [-INF], allow_negative_inf=True)[0]
    assert not verdict([0.0], [-INF], allow_negative_inf=True)[0]
    assert not verdict([INF], [-INF], allow_negative_inf=True)[0]


def test_the_first_mismatch_is_named_with_index_and_values():
    comparison = Comparison(Tolerance())
    expected = torch.zeros(3, 4)
    got = expected.clone()
    got[1, 2] = 7
    assert not comparison.add("y", got, expected)
    mismatch = comparison.result().mismatch
    assert (mismatch.index, mismatch.got, mismatch.expected, mismatch.mismatched) == (
        (1, 2),
        7.0,
        0.0,
        1,
    )
    assert "y[1, 2]" in str(mismatch)


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.bool, torch.float16, torch.bfloat16, torch.float8_e4m3fn],
)
def test_every_dtype_compares(dtype):
    value = torch.tensor([0.0, 1.0, 1.0]).to(dtype)
    assert Comparison(Tolerance()).add("y", value, value.clone())
    assert not Comparison(Tolerance()).add("y", torch.zeros(3).to(dtype), value)


def test_large_integers_are_not_rounded_before_comparing():
    big = torch.tensor([2**40 + 5, 2**30 + 1])
    assert not Comparison(Tolerance(max_atol=0, max_rtol=0)).add("y", big + 1, big)


def test_packed_fp4_compares_by_code():
    dtype = getattr(torch, "float4_e2m1fn_x2", None)
    if dtype is None:
        pytest.skip("this torch has no packed fp4")
    codes = torch.arange(16, dtype=torch.uint8)
    assert Comparison(Tolerance()).add("y", codes.view(dtype), codes.clone().view(dtype))
    assert not Comparison(Tolerance()).add("y", codes.view(dtype), (codes ^ 0x70).view(dtype))


def test_empty_outputs_pass():
    assert Comparison(Tolerance()).add("y", torch.empty(0), torch.empty(0))
