"""Quantisation to the bit: exhaustive over codes, midpoints by hand, and the packs' own functions."""

import inspect
import math
import struct
import subprocess
import sys

import pytest
import torch

from sol_gym.draws import pack_e2m1 as draw_packed
from sol_gym.problems import list_ids
from sol_gym.quantization import (
    E2M1_VALUES,
    NVFP4,
    decode_e2m1,
    decode_ue8m0,
    dequantize_fp8,
    dequantize_nvfp4,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
    fp8_scales,
    pack_e2m1,
    quantize_fp8,
    quantize_nvfp4,
    swizzle_scales,
    swizzled_offset,
    unpack_e2m1,
    unswizzle_scales,
)


def e4m3_by_hand(code):
    """The value of an E4M3 code, from its bits."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def float32(value):
    """A double rounded to float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def codes_of(values):
    return encode_e4m3(torch.tensor(values, dtype=torch.float32)).view(torch.uint8).tolist()


def test_all_e4m3_codes_mean_what_their_bits_say():
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float().tolist()
    for code, value in enumerate(values):
        expected = e4m3_by_hand(code)
        assert value == expected or (math.isnan(value) and math.isnan(expected))


def test_all_finite_e4m3_values_come_back():
    codes = [c for c in range(256) if c & 0x7F != 0x7F]
    assert codes_of([e4m3_by_hand(c) for c in codes]) == codes


def test_midpoints_between_e4m3_neighbours_go_to_the_even_code():
    codes = list(range(126))
    middles = [(e4m3_by_hand(c) + e4m3_by_hand(c + 1)) / 2 for c in codes]
    even = [c + c % 2 for c in codes]
    assert codes_of(middles) == even
    assert codes_of([-m for m in middles]) == [c | 0x80 for c in even]
    assert codes_of([math.nextafter(m, 0) * (1 - 2**-20) for m in middles]) == codes
    assert codes_of([m * (1 + 2**-20) for m in middles]) == [c + 1 for c in codes]


def test_e4m3_saturates_and_keeps_nan():
    assert codes_of([449.0, 1e30, math.inf, -math.inf]) == [0x7E, 0x7E, 0x7E, 0xFE]
    assert codes_of([math.nan])[0] & 0x7F == 0x7F
    assert codes_of([2**-10, math.nextafter(2**-10, 1) * (1 + 2**-20)]) == [0, 1]


def test_fp8_scales_are_the_block_maxima_over_448():
    values = torch.zeros(256, 256)
    values[3, 5], values[3, 200], values[130, 131] = -448.0, 7.0, 1e-20
    assert fp8_scales(values, (1, 128))[3].tolist() == [1.0, float32(7 * float32(1 / 448))]
    tiles = fp8_scales(values, (128, 128))
    assert tiles.tolist() == [[1.0, float32(7 * float32(1 / 448))], [float32(1e-12)] * 2]


def test_fp8_of_hand_worked_values():
    row = torch.zeros(1, 128)
    row[0, :6] = torch.tensor([448.0, 17.0, -19.0, 0.3, 2**-10, 3 * 2**-10])
    codes, scales = quantize_fp8(row)
    assert scales.tolist() == [[1.0]]
    # 17 and 19 are ties between 16, 18 and 20: mantissas 0, 1, 2.
    assert codes.float()[0, :6].tolist() == [448.0, 16.0, -20.0, 0.3125, 0.0, 2**-8]
    assert dequantize_fp8(codes, scales)[0, 2] == -20.0


@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
def test_what_fp8_can_hold_survives_a_round_trip(block):
    torch.manual_seed(0)
    codes = torch.randint(0, 0x7F, (256, 256), dtype=torch.uint8)  # every finite positive code
    codes[:, ::128] = 0x7E  # a maximum in every block, so that scales come back
    codes = codes.view(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(-8, 8, (256 // block[0], 2)).float()
    again, found = quantize_fp8(dequantize_fp8(codes, scales, block), block)
    assert torch.equal(found, scales)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))


def test_a_block_of_zeros_has_the_smallest_scale_and_zero_codes():
    codes, scales = quantize_fp8(torch.zeros(2, 128, dtype=torch.bfloat16))
    assert scales.tolist() == [[float32(1e-12)]] * 2
    assert not codes.view(torch.uint8).any()


def test_given_fp8_scales_are_used_and_too_large_values_saturate():
    codes, _ = quantize_fp8(torch.full((1, 128), 1000.0), scales=torch.full((1, 1), 2.0))
    assert codes.float().unique().tolist() == [448.0]


def test_fp8_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"multiples of 1 x 128, got \[2, 100\]"):
        quantize_fp8(torch.zeros(2, 100))
    with pytest.raises(ValueError, match=r"expected scales of shape \[2, 1\].*got \[1, 2\]"):
        quantize_fp8(torch.zeros(2, 128), scales=torch.ones(1, 2))


def test_all_ue8m0_codes_are_powers_of_two_and_come_back():
    codes = torch.arange(255, dtype=torch.uint8)
    values = decode_ue8m0(codes)
    assert values.tolist() == [2.0 ** (c - 127) for c in range(255)]
    assert torch.equal(encode_ue8m0(values), codes)
    assert math.isnan(decode_ue8m0(torch.tensor([255], dtype=torch.uint8)).item())


def test_ue8m0_agrees_with_torchs_own_type():
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e8m0fnu).float()
    assert torch.equal(decode_ue8m0(codes).nan_to_num(-1), theirs.nan_to_num(-1))


def test_ue8m0_rounds_up():
    scales = torch.tensor([1.0, 1.0000001, 1.5, 2.0, 0.75, 0.0, 3e38, math.inf, math.nan])
    assert encode_ue8m0(scales).tolist() == [127, 128, 128, 128, 127, 0, 255, 255, 255]


def test_all_e2m1_codes_come_back():
    codes = torch.arange(16, dtype=torch.uint8)
    values = decode_e2m1(codes)
    assert values.tolist() == [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    assert math.copysign(1, values[8].item()) == -1
    assert encode_e2m1(values).tolist() == [*range(8), 0, *range(9, 16)]  # a zero has no sign


def test_midpoints_between_e2m1_neighbours_go_to_the_even_code():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert encode_e2m1(middles).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert encode_e2m1(-middles).tolist() == [8, 10, 10, 12, 12, 14, 14]
    below, above = (torch.nextafter(middles, torch.tensor(end)) for end in (0.0, 9.0))
    assert encode_e2m1(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert encode_e2m1(above).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_e2m1_saturates_and_takes_nan_for_zero():
    ends = torch.tensor([7.0, math.inf, -math.inf, math.nan, -0.0, -0.1])
    assert encode_e2m1(ends).tolist() == [7, 7, 15, 0, 0, 8]


def test_all_bytes_unpack_and_pack():
    packed = torch.arange(256, dtype=torch.uint8)
    codes = unpack_e2m1(packed)
    assert codes[2 * 0xA7 : 2 * 0xA7 + 2].tolist() == [0x7, 0xA]  # the even index is the low nibble
    assert torch.equal(pack_e2m1(codes), packed)
    with pytest.raises(ValueError, match="even number"):
        pack_e2m1(codes[:3])


def test_the_random_draws_pack_alike():
    values = torch.cat((torch.linspace(-7, 7, 2049), torch.tensor([0.25])))
    assert torch.equal(draw_packed(values), pack_e2m1(encode_e2m1(values)))


def test_nvfp4_of_hand_worked_values():
    values = torch.zeros(2, 32)
    values[0, :4] = torch.tensor([6.0, 2.5, -0.25, 0.3])
    values[0, 16:19] = torch.tensor([3.0, -1.75, 0.1])
    values[1, 0] = 2688.0  # makes the global scale 1
    quantized = quantize_nvfp4(values)
    assert quantized.global_scale.item() == 1.0
    # Block maxima over 6: 1, 0.5, 448 and 0.
    assert quantized.block_scales.float().tolist() == [[1.0, 0.5], [448.0, 0.0]]
    codes = unpack_e2m1(quantized.packed)
    assert codes[0, :4].tolist() == [7, 4, 8, 1]
    assert codes[0, 16:19].tolist() == [7, 14, 0]  # over 0.5: 6, the tie -3.5 and 0.2
    decoded = dequantize_nvfp4(quantized)
    assert decoded[0, :4].tolist() == [6.0, 2.0, 0.0, 0.5]
    assert decoded[0, 16:19].tolist() == [3.0, -2.0, 0.0]
    assert decoded[1, 0] == 2688.0
    assert not decoded[1, 1:].any()


def test_what_nvfp4_can_hold_survives_a_round_trip():
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (8, 64), dtype=torch.uint8)
    codes[codes == 8] = 0
    codes[:, ::16] = 7  # a maximum in every block
    scale_codes = torch.randint(0x30, 0x7E, (8, 4), dtype=torch.uint8)
    scale_codes[0, 0] = 0x7E
    original = NVFP4(pack_e2m1(codes), scale_codes.view(torch.float8_e4m3fn), torch.tensor(0.25))
    again = quantize_nvfp4(dequantize_nvfp4(original))
    assert again.global_scale == original.global_scale
    assert torch.equal(again.block_scales.view(torch.uint8), scale_codes)
    assert torch.equal(again.packed, original.packed)


def test_decoded_nvfp4_without_its_global_scale_is_exact_in_bfloat16():
    torch.manual_seed(0)
    values = dequantize_nvfp4(quantize_nvfp4(torch.randn(64, 256)), with_global_scale=False)
    assert torch.equal(values.bfloat16().float(), values)
    assert torch.equal(values.half().float(), values)


def test_bfloat16_block_maxima_are_rounded_before_the_encode_scale():
    torch.manual_seed(0)
    values = torch.randn(64, 256).bfloat16()
    narrow, wide = quantize_nvfp4(values), quantize_nvfp4(values.float())
    differ = narrow.block_scales.view(torch.uint8) != wide.block_scales.view(torch.uint8)
    assert 0 < differ.float().mean() < 0.2


def test_a_tensor_of_zeros_decodes_to_zeros():
    assert not dequantize_nvfp4(quantize_nvfp4(torch.zeros(4, 32))).any()


def test_nvfp4_refuses_other_dtypes_and_ragged_rows():
    with pytest.raises(TypeError, match=r"float32 or bfloat16, got torch\.float16"):
        quantize_nvfp4(torch.zeros(1, 16, dtype=torch.float16))
    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        quantize_nvfp4(torch.zeros(1, 24))


def test_swizzled_scales_stand_where_the_layout_says():
    rows, columns = 256, 8
    scales = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    swizzled = swizzle_scales(scales).tolist()
    for row in range(rows):
        for column in range(columns):
            assert swizzled[swizzled_offset(row, column, columns)] == scales[row, column]


@pytest.mark.parametrize(
    ("place", "offset"),
    [((0, 0), 0), ((0, 3), 3), ((32, 0), 4), ((1, 0), 16), ((127, 3), 511), ((0, 4), 512),
     ((128, 0), 1024), ((161, 6), 1024 + 512 + 16 + 4 + 2)],
)  # fmt: skip
def test_hand_worked_offsets_of_eight_columns(place, offset):
    assert swizzled_offset(*place, columns=8) == offset


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 5), (384, 12)])
def test_swizzling_comes_back_and_fills_up_with_zeros(shape):
    scales = torch.randint(1, 0x7F, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    swizzled = swizzle_scales(scales)
    assert swizzled.dtype == torch.float8_e4m3fn and swizzled.numel() % 512 == 0
    assert (swizzled.view(torch.uint8) != 0).sum() == scales.numel()
    again = unswizzle_scales(swizzled, *shape)
    assert torch.equal(again.view(torch.uint8), scales.view(torch.uint8))


def test_swizzling_refuses_what_is_no_matrix_of_bytes():
    with pytest.raises(ValueError, match=r"one-byte scales, got torch\.float32"):
        swizzle_scales(torch.zeros(128, 4))
    with pytest.raises(ValueError, match="expected 512 scales for 128 x 4, got 511"):
        unswizzle_scales(torch.zeros(511, dtype=torch.uint8), 128, 4)


# ---- The packs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packs():
    """Problem id -> the functions of its reference."""
    from sol_gym.problems import load

    namespaces = {}
    for problem_id in list_ids("Quant"):
        namespace = {"__name__": "reference"}
        exec(load(problem_id).reference, namespace)
        namespaces[problem_id] = namespace
    return namespaces


def having(packs, name):
    found = {i: n[name] for i, n in packs.items() if name in n}
    assert found
    return found.values()


def test_the_packs_round_to_e2m1_alike(packs):
    values = torch.cat((torch.linspace(-6, 6, 4801), torch.tensor([math.nan, -0.0])))
    for function in having(packs, "e2m1_codes"):
        assert torch.equal(function(values), encode_e2m1(values))
    codes = torch.arange(16, dtype=torch.uint8)
    for function in having(packs, "e2m1_values"):
        assert torch.equal(function(codes), decode_e2m1(codes))
    for function in having(packs, "pack"):
        assert torch.equal(function(codes).view(torch.uint8), pack_e2m1(codes))
    for function in having(packs, "unpack"):
        assert torch.equal(function(pack_e2m1(codes)), codes)


@pytest.mark.parametrize("spread", [1.0, 1e-4, 300.0])
def test_the_packs_quantise_to_nvfp4_alike(packs, spread):
    torch.manual_seed(0)
    values = (torch.randn(2, 24, 128) * spread).bfloat16()
    values[0, 0] = 0
    for function in having(packs, "nvfp4_quantize"):
        # Some are written for float32 alone, as their problems say.
        narrow = "dtype" in function.__code__.co_names
        tensor = values if narrow else values.float()
        codes, scales, global_scale = function(tensor)
        expected = quantize_nvfp4(tensor)
        assert torch.equal(pack_e2m1(codes), expected.packed)
        assert torch.equal(scales.view(torch.uint8), expected.block_scales.view(torch.uint8))
        assert torch.equal(global_scale, expected.global_scale)


@pytest.mark.parametrize("spread", [1.0, 1e-14, 1e4])
def test_the_packs_quantise_to_fp8_alike(packs, spread):
    torch.manual_seed(0)
    values = (torch.randn(256, 384) * spread).bfloat16()
    for name, block in (("fp8_rows", (1, 128)), ("fp8_tiles", (128, 128))):
        codes, scales = quantize_fp8(values, block)
        expected = dequantize_fp8(codes, scales, block)
        for function in having(packs, name):
            if len(inspect.signature(function).parameters) == 1:
                assert torch.equal(function(values), expected)
            else:  # scales are arguments; those of tiles come transposed
                given = scales if block[0] == 1 else scales.T
                assert torch.equal(function(values, given), expected)
    for name, block in (("quantize_rows", (1, 128)), ("quantize_tiles", (128, 128))):
        codes, scales = quantize_fp8(values, block)
        for function in having(packs, name):
            found_codes, found_scales = function(values.float())
            assert torch.equal(found_codes.view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(found_scales, scales)


def test_importing_sol_gym_loads_neither_torch_nor_this_module():
    code = "import sol_gym, sys; assert not {'torch', 'sol_gym.quantization'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
