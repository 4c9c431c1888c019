"""Rotary embedding of queries and keys in float32, with tables shared by batch and heads."""

import torch


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def run(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate both by the same tables.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim] f32.
        key: [batch_size, num_kv_heads, seq_len, head_dim] f32.
        cos, sin: [seq_len, head_dim] f32.

    Returns:
        Rotated query and key, f32.
    """
    return apply_rope(query, cos, sin), apply_rope(key, cos, sin)
