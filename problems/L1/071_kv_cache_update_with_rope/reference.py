"""Append rotated keys and plain values to a key/value cache."""

import torch


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form; both products and the sum round to x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def run(
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New caches that hold the old rows followed by the new ones.

    Args:
        key_states, value_states: [batch_size, num_kv_heads, new_seq_len, head_dim] bf16.
        cos, sin: [batch_size, 1, new_seq_len, head_dim] bf16.
        key_cache, value_cache: [batch_size, num_kv_heads, current_seq_len, head_dim] bf16;
            current_seq_len may be 0.

    Returns:
        Key and value cache, each
        [batch_size, num_kv_heads, current_seq_len + new_seq_len, head_dim] bf16.
    """
    rotated = apply_rope(key_states, cos, sin)
    return torch.cat((key_cache, rotated), dim=2), torch.cat((value_cache, value_states), dim=2)
