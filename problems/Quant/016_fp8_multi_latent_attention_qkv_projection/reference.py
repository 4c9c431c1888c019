"""Query, key and value projections of latent attention, every linear in block-quantised FP8."""

import torch

BLOCK = 128
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12
NOPE_DIM = 128
ROPE_DIM = 64
VALUE_DIM = 128


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
    """RMSNorm over the last axis with a single rounding, after the weight."""
    value = x.float()
    normalized = value * torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + eps)
    return (weight.float() * normalized).to(x.dtype)


def run(
    hidden_states: torch.Tensor,
    q_a_proj_weight: torch.Tensor,
    q_a_layernorm_weight: torch.Tensor,
    q_b_proj_weight: torch.Tensor,
    kv_a_proj_weight: torch.Tensor,
    kv_a_layernorm_weight: torch.Tensor,
    kv_b_proj_weight: torch.Tensor,
    rms_norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All tensors are bf16.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size].
        q_a_proj_weight: [q_lora_rank, hidden_size]; q_a_layernorm_weight: [q_lora_rank].
        q_b_proj_weight: [num_heads * (128 + 64), q_lora_rank].
        kv_a_proj_weight: [padded, hidden_size]; rows of the latent, of the rotary key, and padding.
        kv_a_layernorm_weight: [kv_lora_rank].
        kv_b_proj_weight: [num_heads * (128 + 128), kv_lora_rank].
        rms_norm_eps: added to the mean squares.

    Returns:
        q_nope, q_pe, k_nope, k_pe and value, [batch_size, seq_len, num_heads, dim] (k_pe has a
        single head); the rotary parts are not rotated.
    """
    dtype = hidden_states.dtype
    kv_lora_rank = kv_a_layernorm_weight.shape[0]
    activation = fp8_rows(hidden_states)

    query_latent = (activation @ fp8_tiles(q_a_proj_weight).T).to(dtype)
    query_latent = rms_norm(query_latent, q_a_layernorm_weight, rms_norm_eps)
    query = (fp8_rows(query_latent) @ fp8_tiles(q_b_proj_weight).T).to(dtype)
    query = query.unflatten(-1, (-1, NOPE_DIM + ROPE_DIM))
    q_nope, q_pe = query.split((NOPE_DIM, ROPE_DIM), dim=-1)

    # Padding rows have a say in the scale of their tile, and none in the output.
    down = fp8_tiles(kv_a_proj_weight)[: kv_lora_rank + ROPE_DIM]
    compressed = (activation @ down.T).to(dtype)
    latent, k_pe = compressed.split((kv_lora_rank, ROPE_DIM), dim=-1)
    latent = rms_norm(latent, kv_a_layernorm_weight, rms_norm_eps)
    key_value = (fp8_rows(latent) @ fp8_tiles(kv_b_proj_weight).T).to(dtype)
    key_value = key_value.unflatten(-1, (-1, NOPE_DIM + VALUE_DIM))
    k_nope, value = key_value.split((NOPE_DIM, VALUE_DIM), dim=-1)
    # Copies: tensors of their own, not views of three matrices.
    return q_nope.clone(), q_pe.clone(), k_nope.clone(), k_pe.unsqueeze(2), value.clone()
