"""Attention probabilities times values, heads merged."""

import torch


def run(attention_weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One product a head, rounded to bfloat16 once, heads side by side.

    Args:
        attention_weights: [batch_size, num_heads, seq_len_q, seq_len_kv] bf16.
        value: [batch_size, num_heads, seq_len_kv, head_dim] bf16.

    Returns:
        [batch_size, seq_len_q, num_heads * head_dim] bf16, contiguous.
    """
    return torch.matmul(attention_weights, value).transpose(1, 2).flatten(2)
