"""Multi-query attention with normalised q, k and v and capped logits; keys, values returned."""

import math

import torch
import torch.nn.functional as F


def normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its root mean square along the last axis, in float32."""
    x32 = x.float()
    return x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form; both products and the sum round to x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def run(
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    o_proj_weight: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    rope_theta: float,
    softcap: float,
    rms_norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores round to bfloat16 at every step before the softmax.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        position_ids: [batch_size, seq_len] int64.
        attention_mask: [batch_size, 1, seq_len, seq_len] bf16, added to the capped scores.
        q_proj_weight: [num_attention_heads * head_dim, hidden_size] bf16.
        k_proj_weight, v_proj_weight: [num_key_value_heads * head_dim, hidden_size] bf16.
        o_proj_weight: [hidden_size, num_attention_heads * head_dim] bf16.
        q_norm_weight, k_norm_weight: [head_dim] bf16; values are normalised without a weight.
        rope_theta: base of the rotary frequencies.
        softcap: bound of the scaled scores, by cap * tanh(score / cap).
        rms_norm_eps: added to the mean squares.

    Returns:
        Attention output [batch_size, seq_len, hidden_size], the rotated keys and the normalised
        values, both [batch_size, num_key_value_heads, seq_len, head_dim], bf16.
    """
    dtype, head_dim = hidden_states.dtype, q_norm_weight.shape[0]

    def heads(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_states, weight).unflatten(-1, (-1, head_dim)).transpose(1, 2)

    q = (normalize(heads(q_proj_weight), rms_norm_eps) * q_norm_weight.float()).to(dtype)
    k = (normalize(heads(k_proj_weight), rms_norm_eps) * k_norm_weight.float()).to(dtype)
    v = normalize(heads(v_proj_weight), rms_norm_eps).to(dtype)

    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=q.device) / head_dim
    angle = position_ids.float().unsqueeze(-1) * rope_theta**-exponent
    angle = torch.cat((angle, angle), dim=-1).unsqueeze(1)  # the same for every head
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)

    group_size = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group_size, dim=1)
    values = v.repeat_interleave(group_size, dim=1)
    scores = torch.matmul(q, keys.transpose(-1, -2)) / math.sqrt(head_dim)
    scores = torch.tanh(scores / softcap) * softcap + attention_mask
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype)
    context = torch.matmul(probabilities, values).transpose(1, 2).flatten(2)
    return F.linear(context, o_proj_weight), k, v


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal activations, small projections, positions in order, a causal mask of -infinity."""
    axes = axes_and_scalars
    batch_size, seq_len = axes["batch_size"], axes["seq_len"]
    hidden_size, head_dim = axes["hidden_size"], axes["head_dim"]
    q_size, kv_size = axes["qkv_out_dim"], axes["kv_out_dim"]
    bf16 = {"dtype": torch.bfloat16, "device": device}

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, **bf16).mul_(std)

    blocked = torch.full((seq_len, seq_len), -torch.inf, **bf16).triu(diagonal=1)
    return {
        "hidden_states": normal(batch_size, seq_len, hidden_size),
        "position_ids": torch.arange(seq_len, device=device).expand(batch_size, -1),
        "attention_mask": blocked.expand(batch_size, 1, -1, -1),
        "q_proj_weight": normal(q_size, hidden_size, std=0.02),
        "k_proj_weight": normal(kv_size, hidden_size, std=0.02),
        "v_proj_weight": normal(kv_size, hidden_size, std=0.02),
        "o_proj_weight": normal(hidden_size, q_size, std=0.02),
        "q_norm_weight": torch.ones(head_dim, **bf16),
        "k_norm_weight": torch.ones(head_dim, **bf16),
        "rope_theta": 10000.0,
        "softcap": 30.0,
        "rms_norm_eps": 1e-6,
    }
