"""Quant/024_nvfp4_attention_output_projection without FP4 units.

A code times its block scale is exact in bfloat16, so both operands are decoded to bfloat16 and
multiplied on the bfloat16 tensor cores with float32 accumulation; the global scales come last.
"""

import torch
import triton
import triton.language as tl

BLOCK = 16


@triton.jit
def amax_kernel(x_ptr, amax_ptr, numel, SIZE: tl.constexpr):
    """Largest magnitude, as the bits of a non-negative float: they order like the float."""
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + index, mask=index < numel, other=0.0)
    largest = tl.max(tl.abs(x), axis=0)
    tl.atomic_max(amax_ptr, largest.to(tl.int32, bitcast=True))


@triton.jit
def round_to_e2m1(y):
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign kept; ties to the even code."""
    a = tl.abs(y)
    value = tl.where(a > 0.25, 0.5, 0.0)
    value = tl.where(a >= 0.75, 1.0, value)
    value = tl.where(a > 1.25, 1.5, value)
    value = tl.where(a >= 1.75, 2.0, value)
    value = tl.where(a > 2.5, 3.0, value)
    value = tl.where(a >= 3.5, 4.0, value)
    value = tl.where(a > 5.0, 6.0, value)
    return tl.where(y < 0, -value, value)


@triton.jit
def fake_quantize_kernel(
    x_ptr, amax_ptr, output_ptr, decode_ptr, num_blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Code value times block scale, in bfloat16; and the global decode scale."""
    largest_float: tl.constexpr = 3.4028234663852886e38
    amax = tl.load(amax_ptr).to(tl.float32, bitcast=True)
    # True divisions throughout: the last bit decides ties of the block scales.
    encode = tl.minimum(tl.div_rn(2688.0, amax), largest_float)
    encode = tl.where(encode == 0.0, 1.0, encode)
    decode = tl.div_rn(1.0, encode)
    tl.store(decode_ptr, decode)

    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (block < num_blocks)[:, None]
    offset = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0)
    scale = (tl.max(tl.abs(x), axis=1) * (1.0 / 6.0)) * encode
    scale = tl.clamp(scale, -448.0, 448.0).to(tl.float8e4nv).to(tl.float32)
    factor = tl.minimum(
        tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale * decode), largest_float
    )
    y = tl.clamp(x * factor[:, None], -6.0, 6.0)
    tl.store(output_ptr + offset, (round_to_e2m1(y) * scale[:, None]).to(tl.bfloat16), mask=inside)


@triton.jit
def e2m1_to_float(code):
    """Value of a 4-bit code: sign, two exponent bits, one mantissa bit."""
    exponent = (code >> 1) & 3
    mantissa = (code & 1).to(tl.float32)
    power = (1 << exponent).to(tl.float32)
    value = tl.where(exponent == 0, 0.5 * mantissa, 0.25 * power * (2.0 + mantissa))
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def decode_weight_kernel(
    packed_ptr, scale_ptr, output_ptr, num_blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = block < num_blocks
    element = tl.arange(0, BLOCK)
    # Both nibbles of a byte are wanted: each lane reads its byte and takes its half.
    offset = block[:, None] * (BLOCK // 2) + (element // 2)[None, :]
    byte = tl.load(packed_ptr + offset, mask=inside[:, None], other=0).to(tl.int32)
    code = (byte >> ((element % 2) * 4)[None, :]) & 15
    scale = tl.load(scale_ptr + block, mask=inside, other=0.0).to(tl.float32)
    value = (e2m1_to_float(code) * scale[:, None]).to(tl.bfloat16)
    offset = block[:, None] * BLOCK + element[None, :]
    tl.store(output_ptr + offset, value, mask=inside[:, None])


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    decode_ptr,
    weight_decode,
    output_ptr,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIZZLE: tl.constexpr,
):
    """output [m, n] = (a [m, k] b [n, k]^T) * global scales; m, n, k are multiples of the tile."""
    tiles_m, tiles_n = m // BLOCK_M, n // BLOCK_N
    width = SWIZZLE * tiles_n
    first_m = (tl.program_id(0) // width) * SWIZZLE
    height = tl.minimum(tiles_m - first_m, SWIZZLE)
    tile_m = first_m + (tl.program_id(0) % width) % height
    tile_n = (tl.program_id(0) % width) // height

    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + row[:, None] * k + inner[None, :]
    b_ptrs = b_ptr + column[None, :] * k + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, k, BLOCK_K):
        total = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), total)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    scale = tl.load(decode_ptr) * weight_decode
    tl.store(output_ptr + row[:, None] * n + column[None, :], total * scale)


def run(hidden_states, weight_fp4, weight_scale_fp8, weight_global_decode_scale):
    m, k = hidden_states.shape
    n = weight_fp4.shape[0]
    device = hidden_states.device
    amax = torch.zeros((), dtype=torch.int32, device=device)
    decode = torch.empty((), dtype=torch.float32, device=device)
    activation = torch.empty(m, k, dtype=torch.bfloat16, device=device)
    weight = torch.empty(n, k, dtype=torch.bfloat16, device=device)
    output = torch.empty(m, n, dtype=torch.float32, device=device)

    size, rows = 4096, 128
    amax_kernel[(triton.cdiv(m * k, size),)](hidden_states, amax, m * k, SIZE=size, num_warps=8)
    blocks = m * k // BLOCK
    fake_quantize_kernel[(triton.cdiv(blocks, rows),)](
        hidden_states, amax, activation, decode, blocks, ROWS=rows, BLOCK=BLOCK, num_warps=4
    )
    blocks = n * k // BLOCK
    decode_weight_kernel[(triton.cdiv(blocks, rows),)](
        weight_fp4.view(torch.uint8),
        weight_scale_fp8,
        weight,
        blocks,
        ROWS=rows,
        BLOCK=BLOCK,
        num_warps=4,
    )
    tile = 128
    matmul_kernel[((m // tile) * (n // tile),)](
        activation,
        weight,
        decode,
        weight_global_decode_scale,
        output,
        m,
        n,
        k,
        BLOCK_M=tile,
        BLOCK_N=tile,
        BLOCK_K=64,
        SWIZZLE=8,
        num_warps=8,
        num_stages=4,
    )
    return output
