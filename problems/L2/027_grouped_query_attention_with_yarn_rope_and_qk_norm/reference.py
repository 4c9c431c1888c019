"""Grouped-query attention with normalised projections and scaled (YaRN) rotary embedding."""

import math

import torch
import torch.nn.functional as F

SLIDING_WINDOW = 4096
ROPE_THETA = 500000.0
ROPE_FACTOR = 8.0
ORIGINAL_POSITIONS = 8192
BETA_FAST, BETA_SLOW = 32.0, 1.0
ATTENTION_FACTOR = 0.1 * math.log(ROPE_FACTOR) + 1.0


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis in float32, weight included; one rounding."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (weight.float() * normalized).to(x.dtype)


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
    inv_freq: torch.Tensor,
    rms_norm_eps: float,
    attention_factor: float,
    scaling: float,
) -> torch.Tensor:
    """The norms go over all heads of a projection together; angles are formed in float32.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        position_ids: [batch_size, seq_len] int64.
        attention_mask: [batch_size, 1, seq_len, seq_len] bf16, added to the scaled scores.
        q_proj_weight: [num_attention_heads * head_dim, hidden_size] bf16.
        k_proj_weight, v_proj_weight: [num_key_value_heads * head_dim, hidden_size] bf16.
        o_proj_weight: [hidden_size, num_attention_heads * head_dim] bf16.
        q_norm_weight: [num_attention_heads * head_dim] bf16.
        k_norm_weight: [num_key_value_heads * head_dim] bf16.
        inv_freq: [head_dim / 2] f32, radians a position.
        rms_norm_eps: added to the mean squares.
        attention_factor: factor on cosine and sine.
        scaling: factor on the scores.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    dtype = hidden_states.dtype
    head_dim = 2 * inv_freq.shape[0]

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)

    q = rms_norm(F.linear(hidden_states, q_proj_weight), q_norm_weight, rms_norm_eps)
    k = rms_norm(F.linear(hidden_states, k_proj_weight), k_norm_weight, rms_norm_eps)
    v = heads(F.linear(hidden_states, v_proj_weight))

    angle = position_ids.float().unsqueeze(-1) * inv_freq
    angle = torch.cat((angle, angle), dim=-1).unsqueeze(1)  # the same for every head
    cos = (angle.cos() * attention_factor).to(dtype)
    sin = (angle.sin() * attention_factor).to(dtype)
    q, k = apply_rope(heads(q), cos, sin), apply_rope(heads(k), cos, sin)

    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scaling + attention_mask
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype)
    context = torch.matmul(probabilities, v).transpose(1, 2).flatten(2)
    return F.linear(context, o_proj_weight)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal activations, small projections, a causal sliding window, YaRN's frequencies."""
    axes = axes_and_scalars
    batch_size, seq_len = axes["batch_size"], axes["seq_len"]
    hidden_size, kv_size = axes["hidden_size"], axes["kv_hidden_size"]
    head_dim = axes["head_dim"]
    bf16 = {"dtype": torch.bfloat16, "device": device}

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, **bf16).mul_(std)

    position = torch.arange(seq_len, device=device)
    distance = position.unsqueeze(1) - position
    hidden = (distance < 0) | (distance >= SLIDING_WINDOW)
    mask = torch.zeros(seq_len, seq_len, **bf16).masked_fill(hidden, -torch.inf)

    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    base = ROPE_THETA**-exponent
    turns = ORIGINAL_POSITIONS * base / (2 * math.pi)
    ramp = ((turns - BETA_FAST) / (BETA_SLOW - BETA_FAST)).clamp(0, 1)
    return {
        "hidden_states": normal(batch_size, seq_len, hidden_size),
        "position_ids": position.expand(batch_size, -1),
        "attention_mask": mask.expand(batch_size, 1, -1, -1),
        "q_proj_weight": normal(hidden_size, hidden_size, std=0.02),
        "k_proj_weight": normal(kv_size, hidden_size, std=0.02),
        "v_proj_weight": normal(kv_size, hidden_size, std=0.02),
        "o_proj_weight": normal(hidden_size, hidden_size, std=0.02),
        "q_norm_weight": torch.ones(hidden_size, **bf16),
        "k_norm_weight": torch.ones(kv_size, **bf16),
        "inv_freq": (1 - ramp) * base / ROPE_FACTOR + ramp * base,
        "rms_norm_eps": 1e-6,
        "attention_factor": ATTENTION_FACTOR,
        "scaling": head_dim**-0.5,
    }
