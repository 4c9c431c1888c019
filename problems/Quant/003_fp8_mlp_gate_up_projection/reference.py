"""Gate and up projections of pre-quantised FP8 operands, and the SwiGLU that joins them."""

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
    x: torch.Tensor,
    scale_x: torch.Tensor,
    gate_proj_weight: torch.Tensor,
    scale_gate: torch.Tensor,
    up_proj_weight: torch.Tensor,
    scale_up: torch.Tensor,
) -> torch.Tensor:
    """Contractions in float32; gate, up, silu(gate) and the product are each rounded to bf16.

    Args:
        x: [M, hidden_size] e4m3; scale_x: [M, hidden_size / 128] f32.
        gate_proj_weight, up_proj_weight: [intermediate_size, hidden_size] e4m3.
        scale_gate, scale_up: [intermediate_size / 128, hidden_size / 128] f32.

    Returns:
        [M, intermediate_size] bf16.
    """
    activation = dequantize_rows(x, scale_x)
    gate = (activation @ dequantize_tiles(gate_proj_weight, scale_gate).T).to(torch.bfloat16)
    up = (activation @ dequantize_tiles(up_proj_weight, scale_up).T).to(torch.bfloat16)
    return torch.nn.functional.silu(gate) * up


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal activations and weights, the latter scaled by 1 / sqrt(hidden_size), quantised."""
    m, hidden = axes_and_scalars["M"], axes_and_scalars["hidden_size"]
    intermediate = axes_and_scalars["intermediate_size"]

    def weight() -> torch.Tensor:
        return torch.randn(intermediate, hidden, device=device) * hidden**-0.5

    x, scale_x = quantize_rows(torch.randn(m, hidden, device=device))
    gate, scale_gate = quantize_tiles(weight())
    up, scale_up = quantize_tiles(weight())
    return {
        "x": x,
        "scale_x": scale_x,
        "gate_proj_weight": gate,
        "scale_gate": scale_gate,
        "up_proj_weight": up,
        "scale_up": scale_up,
    }
