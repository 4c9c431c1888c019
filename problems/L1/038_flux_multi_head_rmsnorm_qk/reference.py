"""RMSNorm of each head of query and key, with weights of its own for every head."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def run(
    query: torch.Tensor,
    key: torch.Tensor,
    weight_q: torch.Tensor,
    weight_k: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All in float32.

    Args:
        query, key: [batch_size, seq_len, num_heads, head_dim] f32.
        weight_q, weight_k: [num_heads, head_dim] f32.
        eps: added to the mean square.

    Returns:
        Normalised query and key, f32.
    """
    return rms_norm(query, weight_q, eps), rms_norm(key, weight_k, eps)
