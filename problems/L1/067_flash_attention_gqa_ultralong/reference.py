"""Causal grouped-query attention layer with rotary embedding, in float32, for long sequences."""

import torch
import torch.nn.functional as F

SCORES_AT_ONCE = 2**30
"""Scores held at a time; longer sequences go through blocks of query rows (4 GiB each)."""


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v over the keys up to each query's own position.

    Args:
        q, k, v: [batch_size, num_heads, seq_len, head_dim].

    Returns:
        Shaped like q.
    """
    batch_size, num_heads, seq_len, head_dim = q.shape
    rows = max(1, SCORES_AT_ONCE // (batch_size * num_heads * seq_len))
    blocks = []
    for start in range(0, seq_len, rows):
        stop = min(start + rows, seq_len)
        # Keys from `stop` on are hidden from all queries of the block.
        keys, values = k[:, :, :stop], v[:, :, :stop]
        scores = torch.matmul(q[:, :, start:stop], keys.transpose(-1, -2)) * head_dim**-0.5
        hidden = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).triu(start + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
        blocks.append(torch.matmul(torch.softmax(scores, dim=-1), values))
    return torch.cat(blocks, dim=2)


def run(
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    o_proj_weight: torch.Tensor,
) -> torch.Tensor:
    """Projections, rotary embedding, causal attention, output projection.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] f32.
        cos, sin: [batch_size, seq_len, head_dim] f32, the same for every head.
        q_proj_weight: [num_attention_heads * head_dim, hidden_size] f32.
        k_proj_weight, v_proj_weight: [num_key_value_heads * head_dim, hidden_size] f32.
        o_proj_weight: [hidden_size, num_attention_heads * head_dim] f32.

    Returns:
        [batch_size, seq_len, hidden_size] f32.
    """
    head_dim = cos.shape[-1]

    def project(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_states, weight).unflatten(-1, (-1, head_dim)).transpose(1, 2)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q = apply_rope(project(q_proj_weight), cos, sin)
    k = apply_rope(project(k_proj_weight), cos, sin)
    v = project(v_proj_weight)

    # Query head h reads key/value head h // group_size.
    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)
    heads = causal_attention(q, k, v).transpose(1, 2).flatten(2)
    return F.linear(heads, o_proj_weight)
