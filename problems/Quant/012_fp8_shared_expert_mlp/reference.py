"""SwiGLU MLP whose three linears are quantised to FP8 in blocks inside the call."""

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


def run(
    hidden_states: torch.Tensor,
    gate_proj_weight: torch.Tensor,
    up_proj_weight: torch.Tensor,
    down_proj_weight: torch.Tensor,
) -> torch.Tensor:
    """All tensors are bf16, and so is every intermediate result.

    Args:
        hidden_states: [num_tokens, hidden_size].
        gate_proj_weight, up_proj_weight: [intermediate_size, hidden_size].
        down_proj_weight: [hidden_size, intermediate_size].

    Returns:
        [num_tokens, hidden_size].
    """
    dtype = hidden_states.dtype
    activation = fp8_rows(hidden_states)
    gate = (activation @ fp8_tiles(gate_proj_weight).T).to(dtype)
    up = (activation @ fp8_tiles(up_proj_weight).T).to(dtype)
    hidden = torch.nn.functional.silu(gate) * up
    return (fp8_rows(hidden) @ fp8_tiles(down_proj_weight).T).to(dtype)
