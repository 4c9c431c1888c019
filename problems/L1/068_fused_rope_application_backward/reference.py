"""Backward of rotary embedding of queries and keys, towards them and the tables."""

import torch


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """(first, second) half of the last axis to (-second, first)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def run(
    grad_q_embed: torch.Tensor,
    grad_k_embed: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Everything in float32.

    Args:
        grad_q_embed, q: [batch_size, num_heads, seq_len, head_dim] f32.
        grad_k_embed, k: [batch_size, num_kv_heads, seq_len, head_dim] f32.
        cos, sin: [batch_size, seq_len, head_dim] f32, the same for every head.

    Returns:
        Gradients of q, k, cos and sin, f32.
    """

    def rotate_back(grad: torch.Tensor) -> torch.Tensor:
        # Sine after the swap: the true transpose only where both halves of sin agree.
        return grad * cos.unsqueeze(1) - rotate_half(grad) * sin.unsqueeze(1)

    grad_cos = (grad_q_embed * q).sum(dim=1) + (grad_k_embed * k).sum(dim=1)
    grad_sin = (grad_q_embed * rotate_half(q)).sum(dim=1)
    grad_sin = grad_sin + (grad_k_embed * rotate_half(k)).sum(dim=1)
    return rotate_back(grad_q_embed), rotate_back(grad_k_embed), grad_cos, grad_sin
