"""Decoder layer with causal self-attention, cross-attention to an encoder, and a SwiGLU MLP."""

import math

import torch
import torch.nn.functional as F

HEAD_DIM = 128


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis in float32, weight included, rounded once."""
    x32 = x.float()
    inverse_rms = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (x32 * inverse_rms * weight.float()).to(x.dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form; both products and the sum round to x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def split_heads(x: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, heads * HEAD_DIM] to [batch, heads, tokens, HEAD_DIM]."""
    return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Softmax attention of [batch, heads, tokens, HEAD_DIM], returned with the heads merged."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return (probabilities @ v).transpose(1, 2).flatten(2)


def run(
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    self_attn_norm_weight: torch.Tensor,
    self_attn_q_weight: torch.Tensor,
    self_attn_k_weight: torch.Tensor,
    self_attn_v_weight: torch.Tensor,
    self_attn_o_weight: torch.Tensor,
    cross_attn_norm_weight: torch.Tensor,
    cross_attn_q_weight: torch.Tensor,
    cross_attn_k_weight: torch.Tensor,
    cross_attn_v_weight: torch.Tensor,
    cross_attn_o_weight: torch.Tensor,
    mlp_norm_weight: torch.Tensor,
    mlp_gate_weight: torch.Tensor,
    mlp_up_weight: torch.Tensor,
    mlp_down_weight: torch.Tensor,
    norm_eps: float,
    rope_theta: float,
) -> torch.Tensor:
    """Three pre-norm branches with residuals; heads are 128 wide. All tensors bfloat16.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size].
        encoder_hidden_states: [batch_size, encoder_seq_len, encoder_size].
        self_attn_norm_weight, cross_attn_norm_weight, mlp_norm_weight: [hidden_size].
        self_attn_q_weight: [num_heads * 128, hidden_size]; self_attn_k_weight,
            self_attn_v_weight: [num_kv_heads * 128, hidden_size].
        cross_attn_q_weight: [cross_heads * 128, hidden_size]; cross_attn_k_weight,
            cross_attn_v_weight: [cross_heads * 128, encoder_size].
        self_attn_o_weight, cross_attn_o_weight: [hidden_size, heads * 128].
        mlp_gate_weight, mlp_up_weight: [intermediate_size, hidden_size]; mlp_down_weight:
            [hidden_size, intermediate_size].
        norm_eps: added to the mean squares.
        rope_theta: base of the rotary frequencies of the self-attention.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    seq_len = hidden_states.shape[1]
    dtype, device = hidden_states.dtype, hidden_states.device

    x = rms_norm(hidden_states, self_attn_norm_weight, norm_eps)
    q = split_heads(F.linear(x, self_attn_q_weight))
    k = split_heads(F.linear(x, self_attn_k_weight))
    v = split_heads(F.linear(x, self_attn_v_weight))
    exponent = torch.arange(0, HEAD_DIM, 2, dtype=torch.float32, device=device) / HEAD_DIM
    position = torch.arange(seq_len, dtype=torch.float32, device=device)
    angle = torch.outer(position, 1.0 / rope_theta**exponent).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)
    h = hidden_states + F.linear(attention(q, k, v, causal=True), self_attn_o_weight)

    x = rms_norm(h, cross_attn_norm_weight, norm_eps)
    q = split_heads(F.linear(x, cross_attn_q_weight))
    k = split_heads(F.linear(encoder_hidden_states, cross_attn_k_weight))
    v = split_heads(F.linear(encoder_hidden_states, cross_attn_v_weight))
    h = h + F.linear(attention(q, k, v, causal=False), cross_attn_o_weight)

    x = rms_norm(h, mlp_norm_weight, norm_eps)
    gate = F.silu(F.linear(x, mlp_gate_weight))
    return h + F.linear(gate * F.linear(x, mlp_up_weight), mlp_down_weight)
