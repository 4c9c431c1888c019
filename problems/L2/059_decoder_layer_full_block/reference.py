"""Qwen3 decoder layer: attention with normalised queries and keys, given positions, SwiGLU MLP."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis in float32, weight included, rounded once."""
    x32 = x.float()
    inverse_rms = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (x32 * inverse_rms * weight.float()).to(x.dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form; both products and the sum round to x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def run(
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    input_layernorm_weight: torch.Tensor,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    o_proj_weight: torch.Tensor,
    post_attention_layernorm_weight: torch.Tensor,
    gate_proj_weight: torch.Tensor,
    up_proj_weight: torch.Tensor,
    down_proj_weight: torch.Tensor,
    inv_freq: torch.Tensor,
    rms_norm_eps: float,
    attention_scale: float,
) -> torch.Tensor:
    """The layer with both residuals.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        position_ids: [batch_size, seq_len] int64, of any sign and order.
        attention_mask: [batch_size, 1, seq_len, seq_len] bf16, added to the scaled scores.
        input_layernorm_weight, post_attention_layernorm_weight: [hidden_size] bf16.
        q_proj_weight: [num_heads * head_dim, hidden_size]; k_proj_weight, v_proj_weight:
            [num_kv_heads * head_dim, hidden_size]; o_proj_weight:
            [hidden_size, num_heads * head_dim]; bf16.
        q_norm_weight, k_norm_weight: [head_dim] bf16.
        gate_proj_weight, up_proj_weight: [intermediate_size, hidden_size]; down_proj_weight:
            [hidden_size, intermediate_size]; bf16.
        inv_freq: [head_dim / 2] f32, angle per position.
        rms_norm_eps: added to the mean squares.
        attention_scale: factor on the scores.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    dtype = hidden_states.dtype
    head_dim = q_norm_weight.shape[0]

    def split_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, head_dim))

    x = rms_norm(hidden_states, input_layernorm_weight, rms_norm_eps)
    q = rms_norm(split_heads(F.linear(x, q_proj_weight)), q_norm_weight, rms_norm_eps)
    k = rms_norm(split_heads(F.linear(x, k_proj_weight)), k_norm_weight, rms_norm_eps)
    v = split_heads(F.linear(x, v_proj_weight)).transpose(1, 2)

    # Angles reach thousands of radians: a plain float32 product, not a matrix product.
    angle = (position_ids.float().unsqueeze(-1) * inv_freq).repeat(1, 1, 2).unsqueeze(1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    q = apply_rope(q.transpose(1, 2), cos, sin)
    k = apply_rope(k.transpose(1, 2), cos, sin)

    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)
    scores = q @ k.transpose(-1, -2) * attention_scale + attention_mask
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype)
    heads = (probabilities @ v).transpose(1, 2).flatten(2)
    h = hidden_states + F.linear(heads, o_proj_weight)

    y = rms_norm(h, post_attention_layernorm_weight, rms_norm_eps)
    gate = F.silu(F.linear(y, gate_proj_weight))
    up = F.linear(y, up_proj_weight)
    return h + F.linear(gate * up, down_proj_weight)
