"""Scaled attention scores, with key heads shared by groups of query heads."""

import torch


def run(query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
    """Query times transposed key times the scale, in float32, rounded once.

    Args:
        query: [batch_size, num_attention_heads, seq_len, head_dim] bf16.
        key: [batch_size, num_key_value_heads, seq_len, head_dim] bf16.
        scaling: factor on the scores.

    Returns:
        [batch_size, num_attention_heads, seq_len, seq_len] bf16.
    """
    # Query head h reads key head h // group_size.
    group_size = query.shape[1] // key.shape[1]
    key = key.float().repeat_interleave(group_size, dim=1)
    scores = torch.matmul(query.float(), key.transpose(-1, -2)) * scaling
    return scores.to(query.dtype)
