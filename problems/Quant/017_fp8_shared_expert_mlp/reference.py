"""SwiGLU MLP quantised to FP8 inside the call; the weights' scales are given."""

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


def fp8_tiles(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight [N, K] in FP8 by the scales [K / 128, N / 128] of its tiles; dequantised, float32."""
    tiles = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return fake_quantize(tiles, scale.T[:, None, :, None]).flatten(2).flatten(0, 1)


def tile_scales(weight: torch.Tensor) -> torch.Tensor:
    """Scales [K / 128, N / 128] of weight [N, K]."""
    tiles = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return block_scale(tiles, dims=(1, 3))[:, 0, :, 0].T.contiguous()


def run(
    x: torch.Tensor,
    gate_proj_weight: torch.Tensor,
    gate_proj_weight_scales: torch.Tensor,
    up_proj_weight: torch.Tensor,
    up_proj_weight_scales: torch.Tensor,
    down_proj_weight: torch.Tensor,
    down_proj_weight_scales: torch.Tensor,
) -> torch.Tensor:
    """Every intermediate result is bf16.

    Args:
        x: [num_tokens, hidden_size] bf16.
        gate_proj_weight, up_proj_weight: [intermediate_size, hidden_size] bf16.
        down_proj_weight: [hidden_size, intermediate_size] bf16.
        *_scales: [in / 128, out / 128] f32 of their weight.

    Returns:
        [num_tokens, hidden_size] bf16.
    """
    dtype = x.dtype
    activation = fp8_rows(x)
    gate = (activation @ fp8_tiles(gate_proj_weight, gate_proj_weight_scales).T).to(dtype)
    up = (activation @ fp8_tiles(up_proj_weight, up_proj_weight_scales).T).to(dtype)
    hidden = torch.nn.functional.silu(gate) * up
    down = fp8_tiles(down_proj_weight, down_proj_weight_scales)
    return (fp8_rows(hidden) @ down.T).to(dtype)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal activations, normal weights times 1 / sqrt(in), and the scales that suit them."""
    num_tokens, hidden = axes_and_scalars["num_tokens"], axes_and_scalars["hidden_size"]
    intermediate = axes_and_scalars["intermediate_size"]

    def weight(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, dtype=torch.bfloat16, device=device) * k**-0.5

    gate, up = weight(intermediate, hidden), weight(intermediate, hidden)
    down = weight(hidden, intermediate)
    return {
        "x": torch.randn(num_tokens, hidden, dtype=torch.bfloat16, device=device),
        "gate_proj_weight": gate,
        "gate_proj_weight_scales": tile_scales(gate),
        "up_proj_weight": up,
        "up_proj_weight_scales": tile_scales(up),
        "down_proj_weight": down,
        "down_proj_weight_scales": tile_scales(down),
    }
