"""Attention probabilities times values, heads concatenated."""

import torch


def run(attn_weights: torch.Tensor, value_states: torch.Tensor) -> torch.Tensor:
    """One product a head, stored token by token.

    Args:
        attn_weights: [batch_size, num_attention_heads, seq_len, seq_len] bf16.
        value_states: [batch_size, num_attention_heads, seq_len, head_dim] bf16.

    Returns:
        [batch_size, seq_len, num_attention_heads * head_dim] bf16.
    """
    return torch.matmul(attn_weights, value_states).transpose(1, 2).flatten(2)
