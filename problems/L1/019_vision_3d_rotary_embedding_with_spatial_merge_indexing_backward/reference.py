"""Backward of a rotary embedding of queries and keys, with the gradient of the angles."""

import torch


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """The second half negated, before the first."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_half_adjoint(g: torch.Tensor) -> torch.Tensor:
    """The transpose of `rotate_half`, which is its inverse."""
    first, second = g.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)


def run(
    grad_q_embed: torch.Tensor,
    grad_k_embed: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    embeddings: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x cos(e) + rotate_half(x) sin(e) for x = q and k, in float32.

    Args:
        grad_q_embed, grad_k_embed, q, k: [seq_len, num_heads, head_dim] f32.
        embeddings: [seq_len, head_dim] f32, the angles e.

    Returns:
        Gradients of q and k (shaped like them) and of the angles [seq_len, head_dim], f32.
    """
    cos, sin = embeddings.cos(), embeddings.sin()
    cos_heads, sin_heads = cos.unsqueeze(1), sin.unsqueeze(1)
    grad_q = grad_q_embed * cos_heads + rotate_half_adjoint(grad_q_embed * sin_heads)
    grad_k = grad_k_embed * cos_heads + rotate_half_adjoint(grad_k_embed * sin_heads)

    grad_cos = (grad_q_embed * q + grad_k_embed * k).sum(dim=1)
    grad_sin = (grad_q_embed * rotate_half(q) + grad_k_embed * rotate_half(k)).sum(dim=1)
    return grad_q, grad_k, grad_sin * cos - grad_cos * sin
