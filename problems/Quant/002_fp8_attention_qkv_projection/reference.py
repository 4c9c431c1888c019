"""Query, key and value projections in FP8 with biases; RMSNorm of every query and key head."""

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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis; the normalised value is rounded before the weight."""
    value = x.float()
    normalized = value * torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)


def run(
    hidden_states: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    q_bias: torch.Tensor,
    k_bias: torch.Tensor,
    v_bias: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    rms_norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All tensors are bf16.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size].
        q_weight: [num_heads * head_dim, hidden_size].
        k_weight, v_weight: [num_kv_heads * head_dim, hidden_size].
        q_bias, k_bias, v_bias: [rows of the weight].
        q_norm_weight, k_norm_weight: [head_dim].
        rms_norm_eps: added to the mean square.

    Returns:
        query [batch_size, num_heads, seq_len, head_dim], and key and value
        [batch_size, num_kv_heads, seq_len, head_dim].
    """
    head_dim = q_norm_weight.shape[0]
    activation = fp8_rows(hidden_states)

    def project(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        output = activation @ fp8_tiles(weight).T + bias.float()
        return output.to(hidden_states.dtype).unflatten(-1, (-1, head_dim))

    query = rms_norm(project(q_weight, q_bias), q_norm_weight, rms_norm_eps)
    key = rms_norm(project(k_weight, k_bias), k_norm_weight, rms_norm_eps)
    value = project(v_weight, v_bias)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
