"""Head-wise RMSNorm and rotary embedding of queries and keys, and a write into a static cache."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis in float32, rounded once, after the weight."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (weight.float() * normalized).to(x.dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form; both products and the sum round to x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_ids: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cache_position: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    inv_freq: torch.Tensor,
    rms_norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm, rotation by the position, and the caches with the new tokens in their slots.

    Args:
        query: [batch_size, num_attention_heads, seq_len, head_dim] bf16.
        key, value: [batch_size, num_key_value_heads, seq_len, head_dim] bf16.
        position_ids: [batch_size, seq_len] int64.
        key_cache, value_cache: [batch_size, num_key_value_heads, slots, head_dim] bf16; left as
            they are.
        cache_position: [seq_len] int64, the slot each new token is written to.
        q_norm_weight, k_norm_weight: [head_dim] bf16.
        inv_freq: [head_dim / 2] f32.
        rms_norm_eps: added to the mean square.

    Returns:
        The rotated query and key, and copies of the two caches with the new tokens written, bf16.
    """
    angles = position_ids.float().unsqueeze(-1) * inv_freq
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # the same for every head
    cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)

    query_rotated = apply_rope(rms_norm(query, q_norm_weight, rms_norm_eps), cos, sin)
    key_rotated = apply_rope(rms_norm(key, k_norm_weight, rms_norm_eps), cos, sin)
    key_cache = key_cache.index_copy(2, cache_position, key_rotated)
    value_cache = value_cache.index_copy(2, cache_position, value)
    return query_rotated, key_rotated, key_cache, value_cache


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Tokens that follow cache_len earlier ones, and caches full of normal values."""
    batch_size, seq_len = axes_and_scalars["batch_size"], axes_and_scalars["seq_len"]
    num_heads = axes_and_scalars["num_attention_heads"]
    num_key_value_heads = axes_and_scalars["num_key_value_heads"]
    head_dim, slots = axes_and_scalars["head_dim"], axes_and_scalars["max_position_embeddings"]

    def normal(heads: int, length: int) -> torch.Tensor:
        return torch.randn(
            batch_size, heads, length, head_dim, dtype=torch.bfloat16, device=device
        )

    start = axes_and_scalars["cache_len"]
    cache_position = torch.arange(start, start + seq_len, device=device)
    ladder = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    return {
        "query": normal(num_heads, seq_len),
        "key": normal(num_key_value_heads, seq_len),
        "value": normal(num_key_value_heads, seq_len),
        "position_ids": cache_position.repeat(batch_size, 1),
        "key_cache": normal(num_key_value_heads, slots),
        "value_cache": normal(num_key_value_heads, slots),
        "cache_position": cache_position,
        "q_norm_weight": torch.ones(head_dim, dtype=torch.bfloat16, device=device),
        "k_norm_weight": torch.ones(head_dim, dtype=torch.bfloat16, device=device),
        "inv_freq": 1.0 / 1e7**ladder,
        "rms_norm_eps": 1e-6,
    }
