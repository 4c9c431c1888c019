"""Grouped-query self-attention with rotary embedding that also returns its probabilities."""

import torch
import torch.nn.functional as F


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def run(
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    o_proj_weight: torch.Tensor,
    inv_freq: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Projections, rotary embedding, unscaled softmax attention, output projection; float32.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] f32.
        position_ids: [batch_size, seq_len] int64.
        q_proj_weight: [num_heads * head_dim, hidden_size] f32.
        k_proj_weight, v_proj_weight: [num_key_value_heads * head_dim, hidden_size] f32.
        o_proj_weight: [hidden_size, num_heads * head_dim] f32.
        inv_freq: [head_dim / 2] f32.
        is_causal: whether a query sees only keys up to its own position.

    Returns:
        Output [batch_size, seq_len, hidden_size] f32 and attention probabilities
        [batch_size, num_heads, seq_len, seq_len] f32.
    """
    head_dim = 2 * inv_freq.shape[0]

    def project(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_states, weight).unflatten(-1, (-1, head_dim)).transpose(1, 2)

    angles = position_ids.to(inv_freq.dtype).unsqueeze(-1) * inv_freq
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # the same for every head
    cos, sin = angles.cos(), angles.sin()
    q = apply_rope(project(q_proj_weight), cos, sin)
    k = apply_rope(project(k_proj_weight), cos, sin)
    v = project(v_proj_weight)

    # Query head h reads key/value head h // group_size.
    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)

    scores = torch.matmul(q, k.transpose(-1, -2))  # not divided by the root of head_dim
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    attn_weights = torch.softmax(scores, dim=-1)
    heads = torch.matmul(attn_weights, v).transpose(1, 2).flatten(2)
    return F.linear(heads, o_proj_weight), attn_weights


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal states, weights a fiftieth of that, positions in order, base-10000 frequencies."""
    batch_size, seq_len, hidden_size, head_dim, q_size, kv_size = (
        axes_and_scalars[n]
        for n in (
            "batch_size", "seq_len", "hidden_size", "head_dim", "q_proj_size", "kv_proj_size",
        )
    )  # fmt: skip
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return {
        "hidden_states": torch.randn(batch_size, seq_len, hidden_size, device=device),
        "position_ids": torch.arange(seq_len, device=device).expand(batch_size, -1),
        "q_proj_weight": 0.02 * torch.randn(q_size, hidden_size, device=device),
        "k_proj_weight": 0.02 * torch.randn(kv_size, hidden_size, device=device),
        "v_proj_weight": 0.02 * torch.randn(kv_size, hidden_size, device=device),
        "o_proj_weight": 0.02 * torch.randn(hidden_size, q_size, device=device),
        "inv_freq": 10000.0**-exponents,
        "is_causal": False,
    }
