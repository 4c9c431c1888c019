"""Mamba-2 output projection: a product of pre-quantised FP8 operands."""

import torch

BLOCK = 128
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12


def quantize(blocks: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 blocks, whose axes are `dims`, as float8_e4m3fn and their float32 decode scales."""
    # Times the rounded reciprocal: how CUDA divides by a number, here on every device.
    scale = blocks.abs().amax(dim=dims, keepdim=True) * (1.0 / E4M3_MAX)
    scale = scale.clamp(min=SMALLEST_SCALE)
    rounded = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return rounded, scale


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [.., K] float32 as FP8, and the scales [.., K / 128]."""
    rounded, scale = quantize(x.unflatten(-1, (-1, BLOCK)), dims=(-1,))
    return rounded.flatten(-2), scale.squeeze(-1)


def quantize_tiles(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] float32 as FP8, and the scales [N / 128, K / 128]."""
    tiles = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    rounded, scale = quantize(tiles, dims=(1, 3))
    return rounded.flatten(2).flatten(0, 1), scale[:, 0, :, 0]


def dequantize_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [.., K] FP8 times scale [.., K / 128], float32."""
    return (x.float().unflatten(-1, (-1, BLOCK)) * scale.unsqueeze(-1)).flatten(-2)


def dequantize_tiles(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight [N, K] FP8 times scale [N / 128, K / 128], float32."""
    tiles = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return (tiles * scale[:, None, :, None]).flatten(2).flatten(0, 1)


def run(
    x: torch.Tensor, w: torch.Tensor, scale_x: torch.Tensor, scale_w: torch.Tensor
) -> torch.Tensor:
    """Contraction of the dequantised operands in float32, rounded to bf16.

    Args:
        x: [M, K] e4m3; scale_x: [M, K / 128] f32.
        w: [N, K] e4m3; scale_w: [N / 128, K / 128] f32.

    Returns:
        [M, N] bf16.
    """
    return (dequantize_rows(x, scale_x) @ dequantize_tiles(w, scale_w).T).to(torch.bfloat16)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Standard normals in bf16, quantised."""
    m, n, k = axes_and_scalars["M"], axes_and_scalars["N"], axes_and_scalars["K"]
    activation = torch.randn(m, k, dtype=torch.bfloat16, device=device)
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=device)
    x, scale_x = quantize_rows(activation.float())
    w, scale_w = quantize_tiles(weight.float())
    return {"x": x, "w": w, "scale_x": scale_x, "scale_w": scale_w}
