"""Key/value compression of latent attention: FP8 projection down, RMSNorm, FP8 projection up."""

import torch

BLOCK = 128
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12
ROPE_DIM = 64
HEAD_OUT_DIM = 256  # 128 of the key without rotary embedding, 128 of the value


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
    kv_a_proj_weight: torch.Tensor,
    kv_a_layernorm_weight: torch.Tensor,
    kv_b_proj_weight: torch.Tensor,
    rms_norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tensors are bf16.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size].
        kv_a_proj_weight: [640, hidden_size]; rows of the latent, of the rotary key, and padding.
        kv_a_layernorm_weight: [kv_lora_rank].
        kv_b_proj_weight: [num_heads * 256, kv_lora_rank].
        rms_norm_eps: added to the mean square.

    Returns:
        Expanded keys and values [batch_size, seq_len, num_heads, 256] and the rotary part of the
        key, not rotated, [batch_size, seq_len, 1, 64].
    """
    dtype = hidden_states.dtype
    kv_lora_rank = kv_a_layernorm_weight.shape[0]
    # Padding rows have a say in the scale of their tile, and none in the output.
    down = fp8_tiles(kv_a_proj_weight)[: kv_lora_rank + ROPE_DIM]
    compressed = (fp8_rows(hidden_states) @ down.T).to(dtype)
    latent, k_pe = compressed.split((kv_lora_rank, ROPE_DIM), dim=-1)
    latent = rms_norm(latent, kv_a_layernorm_weight, rms_norm_eps)
    expanded = (fp8_rows(latent) @ fp8_tiles(kv_b_proj_weight).T).to(dtype)
    return expanded.unflatten(-1, (-1, HEAD_OUT_DIM)), k_pe.unsqueeze(2)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Standard normals, the weights and their padding rows too; a norm weight of ones."""
    batch_size, seq_len = axes_and_scalars["batch_size"], axes_and_scalars["seq_len"]
    hidden, rank = axes_and_scalars["hidden_size"], axes_and_scalars["kv_lora_rank"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    return {
        "hidden_states": normal(batch_size, seq_len, hidden),
        "kv_a_proj_weight": normal(640, hidden),
        "kv_a_layernorm_weight": torch.ones(rank, dtype=torch.bfloat16, device=device),
        "kv_b_proj_weight": normal(axes_and_scalars["kv_b_output_dim"], rank),
        "rms_norm_eps": 1e-6,
    }
