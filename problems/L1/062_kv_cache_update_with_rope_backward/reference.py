"""Backward of a key/value cache update with rotary embedding of the new keys."""

import torch


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """(first, second) half of the last axis to (-second, first)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_half_transposed(x: torch.Tensor) -> torch.Tensor:
    """The transpose of `rotate_half`: (first, second) to (second, -first)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)


def run(
    grad_key_cache: torch.Tensor,
    grad_value_cache: torch.Tensor,
    key_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache_position: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gather the gradients of the written rows, undo the rotation, clear those rows.

    All elementwise arithmetic is bfloat16; sums over heads accumulate in float32.

    Args:
        grad_key_cache, grad_value_cache: [batch_size, num_kv_heads, max_seq_len, head_dim] bf16.
        key_states: the keys before rotation, [batch_size, num_kv_heads, new_seq_len, head_dim]
            bf16.
        cos, sin: [batch_size, new_seq_len, head_dim] bf16.
        cache_position: [new_seq_len] int64, distinct rows of the caches.

    Returns:
        Gradients of key_states, of the new values (shaped like key_states), of cos and sin, and of
        the two caches before the update; bf16.
    """
    grad_keys = grad_key_cache[:, :, cache_position]
    grad_values = grad_value_cache[:, :, cache_position]

    def sum_heads(x: torch.Tensor) -> torch.Tensor:
        return x.sum(dim=1, dtype=torch.float32).to(x.dtype)

    grad_key_states = grad_keys * cos.unsqueeze(1)
    grad_key_states = grad_key_states + rotate_half_transposed(grad_keys * sin.unsqueeze(1))
    grad_cos = sum_heads(grad_keys * key_states)
    grad_sin = sum_heads(grad_keys * rotate_half(key_states))
    return (
        grad_key_states,
        grad_values,
        grad_cos,
        grad_sin,
        grad_key_cache.index_fill(2, cache_position, 0.0),
        grad_value_cache.index_fill(2, cache_position, 0.0),
    )


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal tensors (cos and sin too, so no true rotation); the new rows are the first ones."""
    batch_size, num_kv_heads, new_seq_len, max_seq_len, head_dim = (
        axes_and_scalars[n]
        for n in ("batch_size", "num_kv_heads", "new_seq_len", "max_seq_len", "head_dim")
    )

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    return {
        "grad_key_cache": normal(batch_size, num_kv_heads, max_seq_len, head_dim),
        "grad_value_cache": normal(batch_size, num_kv_heads, max_seq_len, head_dim),
        "key_states": normal(batch_size, num_kv_heads, new_seq_len, head_dim),
        "cos": normal(batch_size, new_seq_len, head_dim),
        "sin": normal(batch_size, new_seq_len, head_dim),
        "cache_position": torch.arange(new_seq_len, device=device),
    }
