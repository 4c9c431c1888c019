"""Llama decoder layer: grouped-query attention with rotary embedding, and a SwiGLU MLP."""

import torch
import torch.nn.functional as F

HEAD_DIM = 128


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis: statistics in float32, rounded before and after the weight."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form, in float32 with one rounding to x's dtype."""
    x32 = x.float()
    first, second = x32.chunk(2, dim=-1)
    return (x32 * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def run(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    o_proj_weight: torch.Tensor,
    gate_proj_weight: torch.Tensor,
    up_proj_weight: torch.Tensor,
    down_proj_weight: torch.Tensor,
    input_layernorm_weight: torch.Tensor,
    post_attention_layernorm_weight: torch.Tensor,
    rms_norm_eps: float,
    rope_theta: float,
) -> torch.Tensor:
    """The layer with both residuals; heads are 128 wide.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        attention_mask: [batch_size, 1, seq_len, seq_len] bf16, added to the scaled scores.
        q_proj_weight: [num_heads * 128, hidden_size]; k_proj_weight, v_proj_weight:
            [num_key_value_heads * 128, hidden_size]; o_proj_weight: [hidden_size, num_heads * 128];
            bf16.
        gate_proj_weight, up_proj_weight: [intermediate_size, hidden_size]; down_proj_weight:
            [hidden_size, intermediate_size]; bf16.
        input_layernorm_weight, post_attention_layernorm_weight: [hidden_size] bf16.
        rms_norm_eps: added to the mean square.
        rope_theta: base of the rotary frequencies.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    seq_len = hidden_states.shape[1]
    device = hidden_states.device

    def split_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    x = rms_norm(hidden_states, input_layernorm_weight, rms_norm_eps)
    q = split_heads(F.linear(x, q_proj_weight))
    k = split_heads(F.linear(x, k_proj_weight))
    v = split_heads(F.linear(x, v_proj_weight))

    exponent = torch.arange(0, HEAD_DIM, 2, dtype=torch.float32, device=device) / HEAD_DIM
    position = torch.arange(seq_len, dtype=torch.float32, device=device)
    angle = torch.outer(position, 1.0 / rope_theta**exponent).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)

    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)
    scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5 + attention_mask
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    heads = (probabilities @ v).transpose(1, 2).flatten(2)
    h = hidden_states + F.linear(heads, o_proj_weight)

    y = rms_norm(h, post_attention_layernorm_weight, rms_norm_eps)
    gate = F.silu(F.linear(y, gate_proj_weight))
    up = F.linear(y, up_proj_weight)
    return h + F.linear(gate * up, down_proj_weight)
