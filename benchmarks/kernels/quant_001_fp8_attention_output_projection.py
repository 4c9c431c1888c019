"""Quant/001_fp8_attention_output_projection in Triton: quantise both operands, FP8 products.

The FP8 products of 128 consecutive inputs are summed by the tensor core; each such block is then
rescaled and added up in float32, which also hides the tensor core's short FP8 accumulator.
"""

import torch
import triton
import triton.language as tl

GROUP = 128


@triton.jit
def quantize_activation_kernel(
    x_ptr, q_ptr, scale_ptr, num_blocks, ROWS: tl.constexpr, GROUP: tl.constexpr
):
    """A scale for every 128 consecutive values; a program takes ROWS such blocks."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = block < num_blocks
    offset = block[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + offset, mask=inside[:, None], other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1) * (1.0 / 448.0), 1e-12)
    q = tl.clamp(tl.div_rn(x, scale[:, None]), -448.0, 448.0)
    tl.store(q_ptr + offset, q.to(tl.float8e4nv), mask=inside[:, None])
    tl.store(scale_ptr + block, scale, mask=inside)


@triton.jit
def quantize_weight_kernel(w_ptr, q_ptr, scale_ptr, input_dim, GROUP: tl.constexpr):
    """A scale for every tile of 128 x 128."""
    tile_n, tile_k = tl.program_id(0), tl.program_id(1)
    row = tile_n.to(tl.int64) * GROUP + tl.arange(0, GROUP)
    column = tile_k * GROUP + tl.arange(0, GROUP)
    offset = row[:, None] * input_dim + column[None, :]
    w = tl.load(w_ptr + offset).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(w)) * (1.0 / 448.0), 1e-12)
    q = tl.clamp(tl.div_rn(w, tl.zeros_like(w) + scale), -448.0, 448.0)
    tl.store(q_ptr + offset, q.to(tl.float8e4nv))
    tl.store(scale_ptr + tile_n * tl.num_programs(1) + tile_k, scale)


@triton.jit
def scaled_matmul_kernel(
    qx_ptr,
    sx_ptr,
    qw_ptr,
    sw_ptr,
    bias_ptr,
    output_ptr,
    num_tokens,
    hidden_size,
    input_dim,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    SWIZZLE: tl.constexpr,
):
    """A program makes BLOCK_M x 128 outputs, the width of one weight scale."""
    tiles_m, tiles_n = tl.cdiv(num_tokens, BLOCK_M), hidden_size // GROUP
    # Programs that run together share rows and columns of the operands in L2.
    width = SWIZZLE * tiles_n
    first_m = (tl.program_id(0) // width) * SWIZZLE
    height = tl.minimum(tiles_m - first_m, SWIZZLE)
    tile_m = first_m + (tl.program_id(0) % width) % height
    tile_n = (tl.program_id(0) % width) // height

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < num_tokens
    safe_row = tl.where(inside, row, 0).to(tl.int64)
    column = tile_n * GROUP + tl.arange(0, GROUP)
    k = tl.arange(0, GROUP)
    num_groups = input_dim // GROUP
    qx_ptrs = qx_ptr + safe_row[:, None] * input_dim + k[None, :]
    qw_ptrs = qw_ptr + column[None, :].to(tl.int64) * input_dim + k[:, None]
    total = tl.zeros((BLOCK_M, GROUP), dtype=tl.float32)
    for group in range(0, num_groups):
        qx = tl.load(qx_ptrs)
        qw = tl.load(qw_ptrs)
        sx = tl.load(sx_ptr + safe_row * num_groups + group)
        sw = tl.load(sw_ptr + tile_n * num_groups + group)
        total += tl.dot(qx, qw) * (sx * sw)[:, None]
        qx_ptrs += GROUP
        qw_ptrs += GROUP
    bias = tl.load(bias_ptr + column).to(tl.float32)
    result = (total + bias[None, :]).to(tl.bfloat16)
    offset = safe_row[:, None] * hidden_size + column[None, :]
    tl.store(output_ptr + offset, result, mask=inside[:, None])


def run(attn_output, o_proj_weight, o_proj_bias):
    num_tokens, input_dim = attn_output.shape
    hidden_size = o_proj_weight.shape[0]
    device = attn_output.device
    groups = input_dim // GROUP
    qx = torch.empty(num_tokens, input_dim, dtype=torch.float8_e4m3fn, device=device)
    sx = torch.empty(num_tokens, groups, dtype=torch.float32, device=device)
    qw = torch.empty(hidden_size, input_dim, dtype=torch.float8_e4m3fn, device=device)
    sw = torch.empty(hidden_size // GROUP, groups, dtype=torch.float32, device=device)
    output = torch.empty(num_tokens, hidden_size, dtype=torch.bfloat16, device=device)
    rows = 16
    quantize_activation_kernel[(triton.cdiv(sx.numel(), rows),)](
        attn_output, qx, sx, sx.numel(), ROWS=rows, GROUP=GROUP, num_warps=4
    )
    quantize_weight_kernel[tuple(sw.shape)](
        o_proj_weight, qw, sw, input_dim, GROUP=GROUP, num_warps=8
    )
    block_m = 64 if num_tokens <= 512 else 128
    tiles = triton.cdiv(num_tokens, block_m) * (hidden_size // GROUP)
    scaled_matmul_kernel[(tiles,)](
        qx,
        sx,
        qw,
        sw,
        o_proj_bias,
        output,
        num_tokens,
        hidden_size,
        input_dim,
        BLOCK_M=block_m,
        GROUP=GROUP,
        SWIZZLE=8,
        num_warps=4 if block_m == 64 else 8,
        num_stages=3,
    )
    return output
