"""The quantisation schemes of the library's FP8 and NVFP4 problems, to the bit.

Three element formats and two scale formats:

| name   | bits                      | values                                           |
|--------|---------------------------|--------------------------------------------------|
| E4M3   | sign, 4 exponent, 3 mantissa | up to 448, NaN but no infinities (`float8_e4m3fn`) |
| E2M1   | sign, 2 exponent, 1 mantissa | 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives   |
| UE8M0  | 8 exponent                | powers of two from 2^-127 to 2^127, NaN; a scale |

Two schemes use them:

* **Block-scaled FP8**: E4M3 codes with a float32 scale a block, `amax / 448`; blocks are 1 x 128
  along a row of activations and 128 x 128 in a weight. A value is code * scale.
* **NVFP4**: E2M1 codes, an E4M3 scale for every 16 values of a row and one float32 scale for the
  whole tensor. A value is value(code) * block scale * global scale.

Every rounding is to nearest, ties to even. Where one operation order or another would change the
last bit, the published one is kept and named: CUDA divides a tensor by a Python number by
multiplying with the number's float32 reciprocal, and so does this module on every device.

Only torch operations on bytes and float32 are used, so everything works on the CPU and on devices
without FP8 or FP4 units. The references of the problem packs do not import this module (each pack
stands alone); the tests hold the two against each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "NVFP4",
    "decode_e2m1",
    "decode_ue8m0",
    "dequantize_fp8",
    "dequantize_nvfp4",
    "encode_e2m1",
    "encode_e4m3",
    "encode_ue8m0",
    "fp8_scales",
    "pack_e2m1",
    "quantize_fp8",
    "quantize_nvfp4",
    "swizzle_scales",
    "swizzled_offset",
    "unpack_e2m1",
    "unswizzle_scales",
]

E4M3_MAX = 448.0
"""Largest finite E4M3 value."""
E2M1_MAX = 6.0
"""Largest E2M1 value."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; codes 8 to 15 are their negatives (8 is -0)."""
NVFP4_BLOCK = 16
"""Consecutive values of a row that share an E4M3 scale."""
_SMALLEST_FP8_SCALE = 1e-12
_LARGEST_FLOAT = torch.finfo(torch.float32).max
_TILE_ROWS, _TILE_COLUMNS = 128, 4


# ---- E4M3 and block-scaled FP8 --------------------------------------------------------------


def encode_e4m3(values: Tensor) -> Tensor:
    """Values clamped to [-448, 448] and rounded to E4M3; NaN stays NaN.

    Args:
        values: any shape, floating point.

    Returns:
        `torch.float8_e4m3fn` of the same shape. 2^-10, half the smallest subnormal, becomes 0.
    """
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def fp8_scales(values: Tensor, block: tuple[int, int] = (1, 128)) -> Tensor:
    """Decode scales of block-scaled FP8: the largest magnitude of each block over 448.

    Args:
        values: [rows, columns], floating point; both multiples of the block's.
        block: (1, 128) for activations, (128, 128) for weights.

    Returns:
        float32 [rows / block rows, columns / block columns], at least 1e-12.

    Raises:
        ValueError: the shape is no multiple of the block.
    """
    amax = _blocks(values.float(), block).abs().amax(dim=(1, 3))
    return (amax * (1.0 / E4M3_MAX)).clamp(min=_SMALLEST_FP8_SCALE)


def quantize_fp8(
    values: Tensor, block: tuple[int, int] = (1, 128), scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of block-scaled FP8.

    Args:
        values: [rows, columns], floating point; both multiples of the block's.
        block: (1, 128) for activations, (128, 128) for weights.
        scales: those to use, as `fp8_scales` gives; computed if left out.

    Returns:
        `float8_e4m3fn` [rows, columns] and float32 [rows / block rows, columns / block columns].

    Raises:
        ValueError: the shape is no multiple of the block, or the scales do not fit it.
    """
    scales = fp8_scales(values, block) if scales is None else scales
    # A true division, tensor by tensor.
    scaled = _blocks(values.float(), block) / _over_blocks(scales, values, block)
    return encode_e4m3(scaled).reshape(values.shape), scales


def dequantize_fp8(codes: Tensor, scales: Tensor, block: tuple[int, int] = (1, 128)) -> Tensor:
    """code * scale, rounded to float32.

    Args:
        codes: `float8_e4m3fn` [rows, columns].
        scales: float32 [rows / block rows, columns / block columns].
        block: as the codes were made with.

    Raises:
        ValueError: the shape is no multiple of the block, or the scales do not fit it.
    """
    scaled = _blocks(codes.float(), block) * _over_blocks(scales, codes, block)
    return scaled.reshape(codes.shape)


def _blocks(values: Tensor, block: tuple[int, int]) -> Tensor:
    """[rows, columns] as [row blocks, rows of a block, column blocks, columns of a block]."""
    rows, columns = values.shape[0] if values.dim() == 2 else -1, values.shape[-1]
    if values.dim() != 2 or rows % block[0] or columns % block[1]:
        raise ValueError(
            f"expected a matrix of multiples of {block[0]} x {block[1]}, got {list(values.shape)}"
        )
    return values.reshape(rows // block[0], block[0], columns // block[1], block[1])


def _over_blocks(scales: Tensor, values: Tensor, block: tuple[int, int]) -> Tensor:
    expected = [values.shape[0] // block[0], values.shape[1] // block[1]]
    if list(scales.shape) != expected:
        raise ValueError(
            f"expected scales of shape {expected} for {list(values.shape)} in blocks of "
            f"{block[0]} x {block[1]}, got {list(scales.shape)}"
        )
    return scales[:, None, :, None]


# ---- UE8M0 ----------------------------------------------------------------------------------


def encode_ue8m0(scales: Tensor) -> Tensor:
    """The smallest power of two that is not below each scale, as a biased exponent.

    Rounding up keeps what is divided by the scale within the element format's range.

    Args:
        scales: float32, positive.

    Returns:
        uint8 codes: exponent + 127. Scales up to 2^-127 give 0, scales above 2^127, infinities
        and NaN give 255 (NaN).
    """
    mantissa, exponent = torch.frexp(scales.float())  # mantissa in [0.5, 1)
    power = exponent - (mantissa == 0.5).int()
    codes = (power + 127).clamp(0, 255).masked_fill(scales == 0, 0)
    return codes.masked_fill(~torch.isfinite(scales), 255).to(torch.uint8)


def decode_ue8m0(codes: Tensor) -> Tensor:
    """float32 values 2^(code - 127) of uint8 codes; 255 is NaN."""
    # float32 has the same exponent field; 2^-127 alone is subnormal there.
    bits = (
        (codes.int() << 23).masked_fill(codes == 0, 1 << 22).masked_fill(codes == 255, 0x7FC00000)
    )
    return bits.view(torch.float32)


# ---- E2M1 -----------------------------------------------------------------------------------


def encode_e2m1(values: Tensor) -> Tensor:
    """Codes of values rounded to E2M1, ties to the even code; magnitudes above 6 saturate.

    Args:
        values: any shape, floating point.

    Returns:
        uint8 of the same shape, codes 0 to 15. Negative values that round to zero give 8 (-0);
        zeros of either sign and NaN give 0.
    """
    magnitude = values.abs()
    code = (magnitude > 0.25).to(torch.uint8)
    # Between two neighbours the even code gets the midpoint.
    for midpoint, upper_is_even in (
        (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False),
    ):  # fmt: skip
        code += magnitude >= midpoint if upper_is_even else magnitude > midpoint
    return code | (values < 0).to(torch.uint8) << 3


def decode_e2m1(codes: Tensor) -> Tensor:
    """float32 values of uint8 codes 0 to 15."""
    values = E2M1_VALUES + tuple(-v for v in E2M1_VALUES)
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.int()]


def pack_e2m1(codes: Tensor) -> Tensor:
    """Two codes a byte, the even index in the low nibble.

    Args:
        codes: uint8 [.., 2 k].

    Returns:
        uint8 [.., k]; `.view(torch.float4_e2m1fn_x2)` is what problems take.

    Raises:
        ValueError: an odd number of codes in a row.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"expected an even number of codes in a row, got {codes.shape[-1]}")
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Codes uint8 [.., 2 k] of packed ones [.., k], uint8 or `float4_e2m1fn_x2`."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


# ---- NVFP4 ----------------------------------------------------------------------------------


class NVFP4(NamedTuple):
    """A tensor in NVFP4."""

    packed: Tensor
    """uint8 [.., K / 2], two E2M1 codes a byte."""
    block_scales: Tensor
    """`float8_e4m3fn` [.., K / 16], row-major."""
    global_scale: Tensor
    """0-d float32: the decode scale."""


def quantize_nvfp4(values: Tensor) -> NVFP4:
    """A tensor in NVFP4 with scales from its data; the global scale needs all of it first.

    Args:
        values: [.., K] float32 or bfloat16, K a multiple of 16. A bfloat16 tensor's block maxima
            over 6 are rounded to bfloat16, as published.

    Raises:
        ValueError: K is no multiple of 16.
        TypeError: another dtype.
    """
    if values.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"expected float32 or bfloat16, got {values.dtype}")
    if values.shape[-1] % NVFP4_BLOCK:
        raise ValueError(
            f"expected a last axis of a multiple of {NVFP4_BLOCK}, got {values.shape[-1]}"
        )
    blocks = values.unflatten(-1, (-1, NVFP4_BLOCK))
    block_amax = blocks.abs().amax(dim=-1)
    amax = block_amax.amax().float()
    # A tensor over a tensor is a true division. The last bit of the encode scale decides on which
    # side of a tie many block scales fall.
    encode = (torch.full_like(amax, E4M3_MAX * E2M1_MAX) / amax).clamp(max=_LARGEST_FLOAT)
    encode = torch.where(encode == 0, 1.0, encode)
    global_scale = encode.reciprocal()
    per_block = (block_amax.float() * (1.0 / E2M1_MAX)).to(values.dtype).float()
    block_scales = encode_e4m3(per_block * encode)
    factor = (block_scales.float() * global_scale).reciprocal().clamp(max=_LARGEST_FLOAT)
    scaled = (blocks.float() * factor.unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX)
    return NVFP4(pack_e2m1(encode_e2m1(scaled).flatten(-2)), block_scales, global_scale)


def dequantize_nvfp4(quantized: NVFP4, *, with_global_scale: bool = True) -> Tensor:
    """value(code) * block scale * global scale, [.., K] float32.

    Without the global scale the result has at most 6 significant bits and is exact in bfloat16,
    float16 and TF32 too: this is what a contraction on devices without FP4 units multiplies.
    """
    values = decode_e2m1(unpack_e2m1(quantized.packed)).unflatten(-1, (-1, NVFP4_BLOCK))
    scaled = (values * quantized.block_scales.float().unsqueeze(-1)).flatten(-2)
    return scaled * quantized.global_scale if with_global_scale else scaled


# ---- Layouts of block scales ----------------------------------------------------------------


def swizzled_offset(row: int, column: int, columns: int) -> int:
    """Where the scale of (row, column) stands in the 128 x 4 layout, in bytes.

    The matrix is cut into tiles of 128 rows and 4 columns, 512 bytes each, row of tiles by row of
    tiles. In a tile, rows r, r + 32, r + 64 and r + 96 lie side by side, 4 columns each.

    Args:
        row, column: of the scale matrix.
        columns: of the whole matrix; counted up to a multiple of 4.
    """
    tile = (row // _TILE_ROWS) * -(-columns // _TILE_COLUMNS) + column // _TILE_COLUMNS
    within = row % 32 * 16 + row % _TILE_ROWS // 32 * 4 + column % _TILE_COLUMNS
    return tile * 512 + within


def swizzle_scales(scales: Tensor) -> Tensor:
    """Row-major block scales in the 128 x 4 layout that hardware block-scaled products read.

    Args:
        scales: [rows, columns], one byte an element (E4M3, UE8M0 or uint8).

    Returns:
        The same dtype, flat: rows and columns filled up with zero bytes to multiples of 128 and 4.

    Raises:
        ValueError: not a matrix of bytes.
    """
    if scales.dim() != 2 or scales.element_size() != 1:
        raise ValueError(
            f"expected a matrix of one-byte scales, got {scales.dtype} {list(scales.shape)}"
        )
    rows, columns = scales.shape
    padding = (0, -columns % _TILE_COLUMNS, 0, -rows % _TILE_ROWS)
    padded = torch.nn.functional.pad(scales.view(torch.uint8), padding)
    tiles = padded.unflatten(1, (-1, _TILE_COLUMNS)).unflatten(0, (-1, 4, 32))
    # [row tiles, quarter, row, column tiles, column] -> tiles, then row, quarter, column
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def unswizzle_scales(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The [rows, columns] scales of a flat 128 x 4 layout, row-major and without padding.

    Raises:
        ValueError: the number of scales is not that of the padded matrix.
    """
    row_tiles, column_tiles = -(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS)
    if swizzled.numel() != row_tiles * column_tiles * 512:
        raise ValueError(
            f"expected {row_tiles * column_tiles * 512} scales for {rows} x {columns}, "
            f"got {swizzled.numel()}"
        )
    tiles = swizzled.view(torch.uint8).reshape(row_tiles, column_tiles, 32, 4, _TILE_COLUMNS)
    matrix = tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * _TILE_ROWS, -1)
    return matrix[:rows, :columns].contiguous().view(swizzled.dtype)
