"""Continuous adaptive LayerNorm: scale and shift projected from a conditioning vector."""

import torch
import torch.nn.functional as F


def run(
    hidden_states: torch.Tensor,
    temb: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """layer_norm(x) * (1 + scale) + shift in float32.

    Args:
        hidden_states: [batch_size, seq_len, inner_dim] f32.
        temb: [batch_size, inner_dim] f32, the conditioning; no activation is applied.
        linear_weight: [2 * inner_dim, inner_dim] f32, the scale's rows first.
        linear_bias: [2 * inner_dim] f32.
        eps: added to the variance.

    Returns:
        [batch_size, seq_len, inner_dim] f32.
    """
    modulation = F.linear(temb, linear_weight, linear_bias).unsqueeze(1)
    scale, shift = modulation.chunk(2, dim=-1)
    normalized = F.layer_norm(hidden_states, hidden_states.shape[-1:], eps=eps)
    return normalized * (1.0 + scale) + shift
