"""L2/035_convnextv2_block_with_grn: Triton between cuDNN and cuBLAS, float32 throughout.

GRN is z * (1 + weight * response) + bias with one response per image and channel, so it becomes a
factor on the columns of the second product (or of its weight) and a constant, and costs no pass of
its own over the expanded tensor. The second product writes channels first and adds the residual.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


@triton.jit
def layer_norm_kernel(
    y_ptr,
    weight_ptr,
    bias_ptr,
    output_ptr,
    channels,
    pixels,
    eps,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """[image, channels, pixels] to normalised [image, pixels, channels]."""
    image = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = tl.arange(0, BLOCK_C)
    valid_c, valid_p = channel < channels, pixel < pixels
    inside = valid_c[:, None] & valid_p[None, :]
    base = image * channels * pixels
    y = tl.load(y_ptr + base + channel[:, None] * pixels + pixel[None, :], mask=inside, other=0.0)
    mean = tl.sum(y, axis=0) / channels
    centered = tl.where(valid_c[:, None], y - mean[None, :], 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=0) / channels + eps)
    weight = tl.load(weight_ptr + channel, mask=valid_c, other=0.0)
    bias = tl.load(bias_ptr + channel, mask=valid_c, other=0.0)
    y = centered * rstd[None, :] * weight[:, None] + bias[:, None]
    tl.store(output_ptr + base + pixel[None, :] * channels + channel[:, None], y, mask=inside)


@triton.jit
def gelu_square_sum_kernel(
    z_ptr, partial_ptr, pixels, width, tiles_each, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr
):
    """z <- gelu(z) in place, and the sum of its squares over this program's pixels."""
    column = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(1)
    image = tl.program_id(2).to(tl.int64)
    valid_e = column < width
    squares = tl.zeros((BLOCK_E,), dtype=tl.float32)
    for tile in range(part * tiles_each, (part + 1) * tiles_each):
        pixel = tile * BLOCK_P + tl.arange(0, BLOCK_P)
        inside = (pixel < pixels)[:, None] & valid_e[None, :]
        offset = (image * pixels + pixel)[:, None] * width + column[None, :]
        z = tl.load(z_ptr + offset, mask=inside, other=0.0)
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
        tl.store(z_ptr + offset, z, mask=inside)
        squares += tl.sum(z * z, axis=0)
    offset = (image * tl.num_programs(1) + part) * width + column
    tl.store(partial_ptr + offset, squares, mask=valid_e)


@triton.jit
def grn_factor_kernel(
    partial_ptr, weight_ptr, factor_ptr, num_parts, width, eps, BLOCK: tl.constexpr
):
    """1 + weight * norm / (mean norm + eps) of one image."""
    image = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(0, num_parts):
        offset = (image * num_parts + part) * width + column
        squares += tl.load(partial_ptr + offset, mask=inside, other=0.0)
    norm = tl.sqrt(squares)
    response = norm / (tl.sum(norm, axis=0) / width + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    tl.store(factor_ptr + image * width + column, 1.0 + weight * response, mask=inside)


def run(
    x,
    dwconv_weight,
    dwconv_bias,
    layernorm_weight,
    layernorm_bias,
    pwconv1_weight,
    pwconv1_bias,
    grn_weight,
    grn_bias,
    pwconv2_weight,
    pwconv2_bias,
    eps,
    layer_norm_eps,
):
    batch_size, channels, height, width = x.shape
    pixels = height * width
    expansion = pwconv1_weight.shape[0]
    y = F.conv2d(
        x, dwconv_weight, dwconv_bias, padding=dwconv_weight.shape[-1] // 2, groups=channels
    )

    normalized = torch.empty(batch_size * pixels, channels, device=x.device)
    block_p = 16
    layer_norm_kernel[(triton.cdiv(pixels, block_p), batch_size)](
        y.contiguous(),
        layernorm_weight,
        layernorm_bias,
        normalized,
        channels,
        pixels,
        layer_norm_eps,
        BLOCK_C=triton.next_power_of_2(channels),
        BLOCK_P=block_p,
        num_warps=4 if channels <= 256 else 8,
    )
    z = torch.addmm(pwconv1_bias, normalized, pwconv1_weight.T)

    block_p, block_e = 16, 128
    tiles = triton.cdiv(pixels, block_p)
    tiles_each = triton.cdiv(tiles, 32)
    parts = triton.cdiv(tiles, tiles_each)
    partial = torch.empty(batch_size, parts, expansion, device=x.device)
    gelu_square_sum_kernel[(triton.cdiv(expansion, block_e), parts, batch_size)](
        z, partial, pixels, expansion, tiles_each, BLOCK_P=block_p, BLOCK_E=block_e, num_warps=4
    )
    factor = torch.empty(batch_size, 1, expansion, device=x.device)
    grn_factor_kernel[(batch_size,)](
        partial,
        grn_weight,
        factor,
        parts,
        expansion,
        eps,
        BLOCK=triton.next_power_of_2(expansion),
        num_warps=8,
    )

    constant = torch.addmv(pwconv2_bias, pwconv2_weight, grn_bias.flatten())
    residual = x.flatten(2) + constant[:, None]
    z = z.view(batch_size, pixels, expansion)
    # The factor goes where it is cheaper to apply: on the weight, or on z for small images.
    if pixels > channels:
        weight = pwconv2_weight * factor
    else:
        weight = pwconv2_weight.expand(batch_size, channels, expansion)
        z *= factor
    return torch.baddbmm(residual, weight, z.transpose(1, 2)).view_as(x)
