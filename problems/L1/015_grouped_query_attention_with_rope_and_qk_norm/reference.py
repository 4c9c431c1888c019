"""Grouped-query attention layer with RMS-normalised queries and keys and rotary embedding."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis: statistics in float32, rounded before and after the weight."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form; both products and the sum round to x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def run(
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    attention_mask: torch.Tensor,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    o_proj_weight: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    scaling: float,
) -> torch.Tensor:
    """Projections, per-head norm, rotary embedding, masked softmax attention, output projection.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        cos, sin: [batch_size, seq_len, head_dim] bf16.
        attention_mask: [batch_size, 1, seq_len, seq_len] bf16, added to the scaled scores.
        q_proj_weight: [num_attention_heads * head_dim, hidden_size] bf16.
        k_proj_weight, v_proj_weight: [num_key_value_heads * head_dim, hidden_size] bf16.
        o_proj_weight: [hidden_size, num_attention_heads * head_dim] bf16.
        q_norm_weight, k_norm_weight: [head_dim] bf16.
        rms_norm_eps: added to the mean square.
        scaling: factor on the scores.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    head_dim = q_norm_weight.shape[0]

    def split_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, head_dim))

    q = rms_norm(split_heads(F.linear(hidden_states, q_proj_weight)), q_norm_weight, rms_norm_eps)
    k = rms_norm(split_heads(F.linear(hidden_states, k_proj_weight)), k_norm_weight, rms_norm_eps)
    v = split_heads(F.linear(hidden_states, v_proj_weight)).transpose(1, 2)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for every head
    q = apply_rope(q.transpose(1, 2), cos, sin)
    k = apply_rope(k.transpose(1, 2), cos, sin)

    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)

    scores = torch.matmul(q, k.transpose(-1, -2)) * scaling + attention_mask
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    heads = torch.matmul(probabilities, v).transpose(1, 2).flatten(2)
    return F.linear(heads, o_proj_weight)
