"""Expansion of multi-head latent attention's latent into keys and values."""

import torch
import torch.nn.functional as F

HEAD_DIM = 128  # of the keys without rotary part, and of the values


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis in float32, weight included; rounded once."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (normalized * weight.float()).to(x.dtype)


def run(
    compressed_kv: torch.Tensor,
    kv_a_layernorm_weight: torch.Tensor,
    kv_b_proj_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the latent, expand it, split each head into key and value.

    Args:
        compressed_kv: [batch_size, seq_len, kv_lora_rank] bf16.
        kv_a_layernorm_weight: [kv_lora_rank] bf16.
        kv_b_proj_weight: [num_heads * (128 + 128), kv_lora_rank] bf16; of each head first the key's
            rows, then the value's.
        eps: added to the mean square.

    Returns:
        Keys without their rotary part and values, each [batch_size, num_heads, seq_len, 128] bf16,
        contiguous.
    """
    latent = rms_norm(compressed_kv, kv_a_layernorm_weight, eps)
    heads = F.linear(latent, kv_b_proj_weight).unflatten(-1, (-1, 2 * HEAD_DIM)).transpose(1, 2)
    k_nope, value_states = heads.chunk(2, dim=-1)
    return k_nope.contiguous(), value_states.contiguous()
