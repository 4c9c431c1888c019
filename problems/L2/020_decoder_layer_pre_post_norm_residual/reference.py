"""Llama-style decoder layer in bfloat16 with heads of 96 columns."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis: statistics in float32, rounded before and after the weight."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the two halves; cos and sin have half a head's columns.

    Every product and every sum rounds to x's dtype.
    """
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1)


def run(
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    attention_mask: torch.Tensor,
    input_layernorm_weight: torch.Tensor,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    o_proj_weight: torch.Tensor,
    post_attention_layernorm_weight: torch.Tensor,
    gate_proj_weight: torch.Tensor,
    up_proj_weight: torch.Tensor,
    down_proj_weight: torch.Tensor,
    rms_norm_eps: float,
) -> torch.Tensor:
    """Norm, attention, residual, norm, MLP, residual.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        cos, sin: [batch_size, seq_len, head_dim / 2] bf16.
        attention_mask: [batch_size, 1, seq_len, seq_len] bf16, added to the scaled scores.
        input_layernorm_weight, post_attention_layernorm_weight: [hidden_size] bf16.
        q_proj_weight: [num_attention_heads * head_dim, hidden_size] bf16.
        k_proj_weight, v_proj_weight: [num_key_value_heads * head_dim, hidden_size] bf16.
        o_proj_weight: [hidden_size, num_attention_heads * head_dim] bf16.
        gate_proj_weight, up_proj_weight: [intermediate_size, hidden_size] bf16.
        down_proj_weight: [hidden_size, intermediate_size] bf16.
        rms_norm_eps: added to the mean squares.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    head_dim = 2 * cos.shape[-1]

    def heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight).unflatten(-1, (-1, head_dim)).transpose(1, 2)

    y = rms_norm(hidden_states, input_layernorm_weight, rms_norm_eps)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for every head
    q = apply_rope(heads(y, q_proj_weight), cos, sin)
    k = apply_rope(heads(y, k_proj_weight), cos, sin)
    v = heads(y, v_proj_weight)

    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * head_dim**-0.5 + attention_mask
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    context = torch.matmul(probabilities, v).transpose(1, 2).flatten(2)
    x = hidden_states + F.linear(context, o_proj_weight)

    z = rms_norm(x, post_attention_layernorm_weight, rms_norm_eps)
    mlp = F.silu(F.linear(z, gate_proj_weight)) * F.linear(z, up_proj_weight)
    return x + F.linear(mlp, down_proj_weight)
