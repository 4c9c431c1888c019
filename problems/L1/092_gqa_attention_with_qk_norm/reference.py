"""Causal grouped-query attention layer with biased projections, RMS-normalised heads and RoPE."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis in float32, weight included; rounded once."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (normalized * weight.float()).to(x.dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form; both products and the sum round to x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def run(
    hidden_states: torch.Tensor,
    q_proj_weight: torch.Tensor,
    q_proj_bias: torch.Tensor,
    k_proj_weight: torch.Tensor,
    k_proj_bias: torch.Tensor,
    v_proj_weight: torch.Tensor,
    v_proj_bias: torch.Tensor,
    o_proj_weight: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rms_norm_eps: float,
) -> torch.Tensor:
    """Projections, per-head norm, rotary embedding, causal attention, output projection.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        q_proj_weight: [num_attention_heads * head_dim, hidden_size] bf16, with q_proj_bias.
        k_proj_weight, v_proj_weight: [num_key_value_heads * head_dim, hidden_size] bf16, with
            k_proj_bias and v_proj_bias.
        o_proj_weight: [hidden_size, num_attention_heads * head_dim] bf16.
        q_norm_weight, k_norm_weight: [head_dim] bf16.
        cos, sin: [batch_size, seq_len, head_dim] bf16, the same for every head.
        rms_norm_eps: added to the mean square.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    head_dim = q_norm_weight.shape[0]

    def project(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_states, weight, bias).unflatten(-1, (-1, head_dim))

    q = rms_norm(project(q_proj_weight, q_proj_bias), q_norm_weight, rms_norm_eps)
    k = rms_norm(project(k_proj_weight, k_proj_bias), k_norm_weight, rms_norm_eps)
    v = project(v_proj_weight, v_proj_bias).transpose(1, 2)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q = apply_rope(q.transpose(1, 2), cos, sin)
    k = apply_rope(k.transpose(1, 2), cos, sin)

    # Query head h reads key/value head h // group_size.
    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)

    scores = torch.matmul(q, k.transpose(-1, -2)) * head_dim**-0.5  # two roundings
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    heads = torch.matmul(probabilities, v).transpose(1, 2).flatten(2)
    return F.linear(heads, o_proj_weight)
