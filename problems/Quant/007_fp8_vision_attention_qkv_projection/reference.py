"""Fused query, key and value projection of vision attention in FP8, split into three tensors."""

import torch

BLOCK = 128
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12
HEAD_DIM = 96


def block_scale(blocks: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Decode scale of each float32 block, whose axes are `dims`: largest magnitude / 448."""
    # Times the rounded reciprocal: how CUDA divides by a number, here on every device.
    scale = blocks.abs().amax(dim=dims, keepdim=True) * (1.0 / E4M3_MAX)
    return scale.clamp(min=SMALLEST_SCALE)


def fake_quantize(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float32 blocks rounded to float8_e4m3fn in units of their scale, and dequantised."""
    rounded = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return rounded.float() * scale


def fp8_rows(x: torch.Tensor) -> torch.Tensor:
    """x [.., K] in FP8 with a scale for every 128 values of a row; dequantised, float32."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    return fake_quantize(blocks, block_scale(blocks, dims=(-1,))).flatten(-2)


def fp8_tiles(weight: torch.Tensor) -> torch.Tensor:
    """weight [N, K] in FP8 with a scale for every tile of 128 x 128; dequantised, float32."""
    tiles = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return fake_quantize(tiles, block_scale(tiles, dims=(1, 3))).flatten(2).flatten(0, 1)


def run(
    hidden_states: torch.Tensor, qkv_weight: torch.Tensor, qkv_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contraction of the dequantised operands and bias in float32, rounded to bf16.

    Args:
        hidden_states: [seq_len, hidden_size] bf16.
        qkv_weight: [3 * num_heads * head_dim, hidden_size] bf16.
        qkv_bias: [3 * num_heads * head_dim] bf16.

    Returns:
        query, key and value, each [seq_len, num_heads, head_dim] bf16.
    """
    output = fp8_rows(hidden_states) @ fp8_tiles(qkv_weight).T + qkv_bias.float()
    parts = output.to(hidden_states.dtype).unflatten(-1, (3, -1, HEAD_DIM))
    # Copies: three tensors of their own, not views of one.
    query, key, value = parts.unbind(dim=1)
    return query.clone(), key.clone(), value.clone()
