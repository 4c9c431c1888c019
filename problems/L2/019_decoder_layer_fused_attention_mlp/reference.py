"""Qwen2.5-VL decoder layer in float32: causal attention with multimodal rotary embedding, MLP."""

import torch
import torch.nn.functional as F

SECTIONS = (32, 48, 48)
"""Columns of a head that turn with time, height and width."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis."""
    return weight * (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps))


def select_sections(table: torch.Tensor) -> torch.Tensor:
    """[3, batch, seq, head_dim] to [batch, seq, head_dim]: each column from its axis's plane."""
    parts = table.split(SECTIONS, dim=-1)
    return torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention to oneself and what came before, [batch, heads, seq, head_dim]."""
    seq_len, head_dim = q.shape[-2:]
    future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device).triu(diagonal=1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * head_dim**-0.5
    return torch.matmul(torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1), v)


def run(
    hidden_states: torch.Tensor,
    input_layernorm_weight: torch.Tensor,
    q_proj_weight: torch.Tensor,
    q_proj_bias: torch.Tensor,
    k_proj_weight: torch.Tensor,
    k_proj_bias: torch.Tensor,
    v_proj_weight: torch.Tensor,
    v_proj_bias: torch.Tensor,
    o_proj_weight: torch.Tensor,
    rope_cos: torch.Tensor,
    rope_sin: torch.Tensor,
    post_attention_layernorm_weight: torch.Tensor,
    gate_proj_weight: torch.Tensor,
    up_proj_weight: torch.Tensor,
    down_proj_weight: torch.Tensor,
    rms_norm_eps: float,
) -> torch.Tensor:
    """Norm, attention, residual, norm, MLP, residual.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] f32.
        input_layernorm_weight, post_attention_layernorm_weight: [hidden_size] f32.
        q_proj_weight: [num_heads * head_dim, hidden_size] f32, and its bias.
        k_proj_weight, v_proj_weight: [num_kv_heads * head_dim, hidden_size] f32, and their biases.
        o_proj_weight: [hidden_size, num_heads * head_dim] f32.
        rope_cos, rope_sin: [3, batch_size, kv_seq_len, head_dim] f32, a plane for each axis; the
            first seq_len rows are used.
        gate_proj_weight, up_proj_weight: [intermediate_size, hidden_size] f32.
        down_proj_weight: [hidden_size, intermediate_size] f32.
        rms_norm_eps: added to the mean squares.

    Returns:
        [batch_size, seq_len, hidden_size] f32.
    """
    seq_len, head_dim = hidden_states.shape[1], rope_cos.shape[-1]

    def heads(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias).unflatten(-1, (-1, head_dim)).transpose(1, 2)

    y = rms_norm(hidden_states, input_layernorm_weight, rms_norm_eps)
    # The same rotation for every head.
    cos = select_sections(rope_cos[:, :, :seq_len]).unsqueeze(1)
    sin = select_sections(rope_sin[:, :, :seq_len]).unsqueeze(1)
    q = apply_rope(heads(y, q_proj_weight, q_proj_bias), cos, sin)
    k = apply_rope(heads(y, k_proj_weight, k_proj_bias), cos, sin)
    v = heads(y, v_proj_weight, v_proj_bias)

    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)
    context = causal_attention(q, k, v).transpose(1, 2).flatten(2)
    x = hidden_states + F.linear(context, o_proj_weight)

    z = rms_norm(x, post_attention_layernorm_weight, rms_norm_eps)
    mlp = F.silu(F.linear(z, gate_proj_weight)) * F.linear(z, up_proj_weight)
    return x + F.linear(mlp, down_proj_weight)
