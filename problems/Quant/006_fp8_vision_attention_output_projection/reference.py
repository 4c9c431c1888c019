"""Output projection of vision attention: both operands rounded to FP8 by block scales given."""

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


def fp8_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [M, K] in FP8 by the scales [M, K / 128] of its blocks; dequantised, float32."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    return fake_quantize(blocks, scale.unsqueeze(-1)).flatten(-2)


def fp8_tiles(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight [N, K] in FP8 by the scales [K / 128, N / 128] of its tiles; dequantised, float32."""
    tiles = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return fake_quantize(tiles, scale.T[:, None, :, None]).flatten(2).flatten(0, 1)


def row_scales(x: torch.Tensor) -> torch.Tensor:
    """Scales [M, K / 128] of x [M, K]."""
    return block_scale(x.float().unflatten(-1, (-1, BLOCK)), dims=(-1,)).squeeze(-1)


def tile_scales(weight: torch.Tensor) -> torch.Tensor:
    """Scales [K / 128, N / 128] of weight [N, K]."""
    tiles = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return block_scale(tiles, dims=(1, 3))[:, 0, :, 0].T.contiguous()


def run(
    attn_output: torch.Tensor,
    weight: torch.Tensor,
    scale_attn: torch.Tensor,
    scale_weight: torch.Tensor,
) -> torch.Tensor:
    """Contraction of the dequantised operands in float32, rounded to bf16.

    Args:
        attn_output: [seq_len, hidden_size] bf16.
        weight: [out, in] bf16, both hidden_size.
        scale_attn: [seq_len, hidden_size / 128] f32.
        scale_weight: [in / 128, out / 128] f32.

    Returns:
        [seq_len, hidden_size] bf16.
    """
    output = fp8_rows(attn_output, scale_attn) @ fp8_tiles(weight, scale_weight).T
    return output.to(attn_output.dtype)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal activations and weight with the scales that suit them."""
    seq_len, hidden = axes_and_scalars["seq_len"], axes_and_scalars["hidden_size"]
    attn_output = torch.randn(seq_len, hidden, dtype=torch.bfloat16, device=device)
    weight = torch.randn(hidden, hidden, dtype=torch.bfloat16, device=device)
    return {
        "attn_output": attn_output,
        "weight": weight,
        "scale_attn": row_scales(attn_output),
        "scale_weight": tile_scales(weight),
    }
