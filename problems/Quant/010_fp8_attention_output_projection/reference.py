"""Attention output projection: both operands quantised to FP8 in blocks inside the call."""

import torch

BLOCK = 128
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12


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


def run(attn_output: torch.Tensor, o_proj_weight: torch.Tensor) -> torch.Tensor:
    """Contraction of the dequantised operands in float32, rounded to bf16.

    Args:
        attn_output: [batch_seq_len, input_dim] bf16.
        o_proj_weight: [hidden_size, input_dim] bf16.

    Returns:
        [batch_seq_len, hidden_size] bf16.
    """
    return (fp8_rows(attn_output) @ fp8_tiles(o_proj_weight).T).to(attn_output.dtype)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Standard normals, the weight too: it is not scaled by its width."""
    m, k = axes_and_scalars["batch_seq_len"], axes_and_scalars["input_dim"]
    n = axes_and_scalars["hidden_size"]
    return {
        "attn_output": torch.randn(m, k, dtype=torch.bfloat16, device=device),
        "o_proj_weight": torch.randn(n, k, dtype=torch.bfloat16, device=device),
    }
