"""Multi-head self-attention layer in float32 with LayerNorm on each query and key head."""

import torch
import torch.nn.functional as F


def run(
    hidden_states: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    q_norm_weight: torch.Tensor,
    q_norm_bias: torch.Tensor,
    k_norm_weight: torch.Tensor,
    k_norm_bias: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Joint projection, per-head norm, unmasked softmax attention, output projection.

    Args:
        hidden_states: [batch_size, seq_len, dim] f32.
        qkv_weight: [3 * dim, dim] f32, rows ordered by (query | key | value, head, channel), with
            qkv_bias [3 * dim] f32.
        q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias: [head_dim] f32.
        out_proj_weight: [dim, dim] f32; out_proj_bias: [dim] f32.
        eps: added to the variance.

    Returns:
        [batch_size, seq_len, dim] f32.
    """
    head_dim = q_norm_weight.shape[0]
    qkv = F.linear(hidden_states, qkv_weight, qkv_bias).unflatten(-1, (3, -1, head_dim))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch_size, num_heads, seq_len, head_dim]
    q = F.layer_norm(q, (head_dim,), q_norm_weight, q_norm_bias, eps) * head_dim**-0.5
    k = F.layer_norm(k, (head_dim,), k_norm_weight, k_norm_bias, eps)
    probabilities = torch.softmax(torch.matmul(q, k.transpose(-1, -2)), dim=-1)
    heads = torch.matmul(probabilities, v).transpose(1, 2).flatten(2)
    return F.linear(heads, out_proj_weight, out_proj_bias)
