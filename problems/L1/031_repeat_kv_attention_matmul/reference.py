"""Scaled attention scores of every query with every key."""

import torch


def run(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Products and scale in float32, rounded once; there is one key head a query head.

    Args:
        query, key: [batch_size, num_attention_heads, seq_len, head_dim] bf16.

    Returns:
        [batch_size, num_attention_heads, seq_len, seq_len] bf16.
    """
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2))
    return (scores * query.shape[-1] ** -0.5).to(query.dtype)
