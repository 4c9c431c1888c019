"""Encoder layer: bidirectional grouped-query attention with given rotary tables, gated MLP."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def run(
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pre_sa_norm_weight: torch.Tensor,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    o_proj_weight: torch.Tensor,
    post_sa_norm_weight: torch.Tensor,
    gate_up_proj_weight: torch.Tensor,
    down_proj_weight: torch.Tensor,
    norm_eps: float,
) -> torch.Tensor:
    """Both pre-norm branches with their residuals, in float32.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size].
        cos, sin: [batch_size, seq_len, head_dim].
        pre_sa_norm_weight, post_sa_norm_weight: [hidden_size].
        q_proj_weight: [num_heads * head_dim, hidden_size]; k_proj_weight, v_proj_weight:
            [num_kv_heads * head_dim, hidden_size]; o_proj_weight:
            [hidden_size, num_heads * head_dim].
        gate_up_proj_weight: [2 * intermediate_size, hidden_size], gate first; down_proj_weight:
            [hidden_size, intermediate_size].
        norm_eps: added to the mean squares.

    Returns:
        [batch_size, seq_len, hidden_size] f32.
    """
    head_dim = cos.shape[-1]

    def split_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)

    x = rms_norm(hidden_states, pre_sa_norm_weight, norm_eps)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for every head
    q = apply_rope(split_heads(F.linear(x, q_proj_weight)), cos, sin)
    k = apply_rope(split_heads(F.linear(x, k_proj_weight)), cos, sin)
    v = split_heads(F.linear(x, v_proj_weight))

    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)
    probabilities = torch.softmax(q @ k.transpose(-1, -2) * head_dim**-0.5, dim=-1)
    heads = (probabilities @ v).transpose(1, 2).flatten(2)
    h = hidden_states + F.linear(heads, o_proj_weight)

    y = rms_norm(h, post_sa_norm_weight, norm_eps)
    gate, up = F.linear(y, gate_up_proj_weight).chunk(2, dim=-1)
    return h + F.linear(up * F.silu(gate), down_proj_weight)
