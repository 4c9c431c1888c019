"""Grouped-query attention block with multimodal rotary embedding (Qwen2.5-VL)."""

import torch
import torch.nn.functional as F

SECTIONS = (32, 48, 48)
"""Columns of a head that turn with time, height and width."""


def select_sections(table: torch.Tensor) -> torch.Tensor:
    """[3, batch, seq, head_dim] to [batch, seq, head_dim]: each column from its axis's plane."""
    parts = table.split(SECTIONS, dim=-1)
    return torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form; both products and the sum round to x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def run(
    hidden_states: torch.Tensor,
    q_weight: torch.Tensor,
    q_bias: torch.Tensor,
    k_weight: torch.Tensor,
    k_bias: torch.Tensor,
    v_weight: torch.Tensor,
    v_bias: torch.Tensor,
    o_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    attention_mask: torch.Tensor,
) -> torch.Tensor:
    """Projections, rotary embedding, masked softmax attention, output projection.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        q_weight: [num_heads * head_dim, hidden_size] bf16; q_bias: [num_heads * head_dim] bf16.
        k_weight, v_weight: [num_kv_heads * head_dim, hidden_size] bf16.
        k_bias, v_bias: [num_kv_heads * head_dim] bf16.
        o_weight: [hidden_size, num_heads * head_dim] bf16.
        cos, sin: [3, batch_size, seq_len, head_dim] bf16, a plane for each axis.
        attention_mask: [batch_size, 1, seq_len, seq_len] bf16, added to the scaled scores.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    head_dim = cos.shape[-1]

    def heads(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        projected = F.linear(hidden_states, weight, bias)
        return projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)

    # The same rotation for every head.
    cos, sin = select_sections(cos).unsqueeze(1), select_sections(sin).unsqueeze(1)
    q = apply_rope(heads(q_weight, q_bias), cos, sin)
    k = apply_rope(heads(k_weight, k_bias), cos, sin)
    v = heads(v_weight, v_bias)

    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * head_dim**-0.5 + attention_mask
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    context = torch.matmul(probabilities, v).transpose(1, 2).flatten(2)
    return F.linear(context, o_weight)
