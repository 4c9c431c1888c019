"""Grouped-query attention layer with query and key norm, rotary embedding and capped scores."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis with scale 1 + weight, in float32, rounded once."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (normalized * (1.0 + weight.float())).to(x.dtype)


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
    attn_logit_softcapping: float,
    rms_norm_eps: float,
) -> torch.Tensor:
    """Every operation on the scores rounds to bfloat16; the softmax is float32.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        cos, sin: [batch_size, seq_len, head_dim] bf16.
        attention_mask: [batch_size, 1, seq_len, seq_len] bf16, added to the capped scores.
        q_proj_weight: [num_attention_heads * head_dim, hidden_size] bf16.
        k_proj_weight, v_proj_weight: [num_key_value_heads * head_dim, hidden_size] bf16.
        o_proj_weight: [hidden_size, num_attention_heads * head_dim] bf16.
        q_norm_weight, k_norm_weight: [head_dim] bf16, the scale being one more.
        attn_logit_softcapping: bound of the scaled scores.
        rms_norm_eps: added to the mean square.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    head_dim = q_norm_weight.shape[0]

    def heads(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_states, weight).unflatten(-1, (-1, head_dim)).transpose(1, 2)

    q = rms_norm(heads(q_proj_weight), q_norm_weight, rms_norm_eps)
    k = rms_norm(heads(k_proj_weight), k_norm_weight, rms_norm_eps)
    v = heads(v_proj_weight)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for every head
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)

    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)

    scores = torch.matmul(q, k.transpose(-1, -2)) * head_dim**-0.5
    scores = torch.tanh(scores / attn_logit_softcapping) * attn_logit_softcapping
    scores = scores + attention_mask
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    output = torch.matmul(probabilities, v).transpose(1, 2).flatten(2)
    return F.linear(output, o_proj_weight)
