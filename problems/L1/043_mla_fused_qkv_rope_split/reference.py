"""Projections of multi-head latent attention: low-rank queries and compressed keys and values."""

import torch
import torch.nn.functional as F

QK_NOPE_HEAD_DIM = 128
QK_ROPE_HEAD_DIM = 64


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis: statistics in float32, rounded before and after the weight."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)


def run(
    hidden_states: torch.Tensor,
    q_a_proj_weight: torch.Tensor,
    q_a_layernorm_weight: torch.Tensor,
    q_b_proj_weight: torch.Tensor,
    kv_a_proj_weight: torch.Tensor,
    rms_norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """No rotation, and no norm of the compressed keys and values; each step rounds to bfloat16.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        q_a_proj_weight: [q_lora_rank, hidden_size] bf16.
        q_a_layernorm_weight: [q_lora_rank] bf16.
        q_b_proj_weight: [num_heads * (128 + 64), q_lora_rank] bf16.
        kv_a_proj_weight: [kv_lora_rank + 64, hidden_size] bf16.
        rms_norm_eps: added to the mean square.

    Returns:
        Per head the 128 query columns that are not to be rotated and the 64 that are, the
        compressed keys and values [batch_size, seq_len, kv_lora_rank], and the shared key columns
        to be rotated [batch_size, seq_len, 1, 64]; all bf16.
    """
    head_split = (QK_NOPE_HEAD_DIM, QK_ROPE_HEAD_DIM)
    q = rms_norm(F.linear(hidden_states, q_a_proj_weight), q_a_layernorm_weight, rms_norm_eps)
    q = F.linear(q, q_b_proj_weight).unflatten(-1, (-1, sum(head_split)))
    q_nope, q_pe = q.split(head_split, dim=-1)

    kv = F.linear(hidden_states, kv_a_proj_weight)
    kv_lora_rank = kv.shape[-1] - QK_ROPE_HEAD_DIM
    compressed_kv, k_pe = kv.split((kv_lora_rank, QK_ROPE_HEAD_DIM), dim=-1)
    return (
        q_nope.contiguous(),
        q_pe.contiguous(),
        compressed_kv.contiguous(),
        k_pe.unsqueeze(2).contiguous(),
    )
