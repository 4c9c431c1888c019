"""References in float64."""

import pytest
import torch
import torch.nn.functional as F

from sol_gym.float64 import recording_codes, run_in_float64

BF16 = torch.bfloat16


def test_every_way_to_narrow_is_widened():
    def run(x):
        y = x.float() + x.to(BF16) + x.half() + x.bfloat16() + x.to(dtype=torch.float16)
        y = y + F.softmax(x, dim=-1, dtype=torch.float32) + torch.ones(3, dtype=BF16)
        return y + torch.tensor(1 / 3) + torch.linspace(0, 1, 3) + x.type(torch.float32)

    x = torch.randn(2, 3, dtype=BF16)
    (result,) = run_in_float64(run, [x])
    wide = x.double()
    thirds = torch.full((), 1 / 3, dtype=torch.float64)
    expected = (
        6 * wide + wide.softmax(-1) + 1 + thirds + torch.linspace(0, 1, 3, dtype=torch.float64)
    )
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, expected, rtol=1e-14, atol=1e-14)


def test_integers_and_numbers_stay_and_the_default_dtype_comes_back():
    def run(x, index, scale):
        assert index.dtype == torch.int32 and isinstance(scale, float)
        return x[index.long()] * scale, index + 1

    outputs = run_in_float64(run, [torch.arange(3.0), torch.tensor([2, 0], dtype=torch.int32), 0.1])
    assert [o.dtype for o in outputs] == [torch.float64, torch.int32]
    assert outputs[0].tolist() == [0.2, 0.0]
    assert torch.get_default_dtype() == torch.float32


def test_the_default_dtype_comes_back_after_a_failure():
    with pytest.raises(ZeroDivisionError):
        run_in_float64(lambda: 1 / 0, [])
    assert torch.get_default_dtype() == torch.float32


def quantized_product(x):
    rounded = x.to(BF16)  # what is quantised has been rounded before
    codes = (rounded * 3).to(torch.float8_e4m3fn)
    return codes.float() / 3


def test_recorded_codes_are_used_again():
    x = torch.tensor([1.1015625 + 2**-9 - 2**-14])  # 3 * x lies near a tie of e4m3
    with recording_codes() as codes:
        declared = quantized_product(x)
    assert [c.dtype for c in codes.results] == [torch.float8_e4m3fn]
    (same_codes,) = run_in_float64(quantized_product, [x], codes)
    torch.testing.assert_close(same_codes, declared.double(), rtol=1e-6, atol=0)


def test_codes_turn_on_the_last_bit_without_a_record():
    # 3 * bf16(x) is a tie of e4m3 and 3 * x is not.
    x = torch.tensor([(3.25 + 0.125) / 3 - 1e-4])
    tie = x.to(BF16).float() * 3
    assert (tie.to(torch.float8_e4m3fn) != (x * 3).to(torch.float8_e4m3fn)).all()
    with recording_codes() as codes:
        declared = quantized_product(x)
    (anew,) = run_in_float64(quantized_product, [x])
    (again,) = run_in_float64(quantized_product, [x], codes)
    assert anew.item() != declared.item()
    assert abs(again.item() - declared.item()) < 1e-6


def test_tables_made_at_load_time_are_widened_and_bits_of_floats_are_refused():
    table = torch.tensor([0.1, 0.2])
    (result,) = run_in_float64(lambda x: x * table, [torch.ones(2)])
    assert torch.equal(result, table.double())
    with pytest.raises(TypeError, match="bits of a float"):
        run_in_float64(lambda x: x.view(dtype=torch.int32), [torch.ones(2)])
