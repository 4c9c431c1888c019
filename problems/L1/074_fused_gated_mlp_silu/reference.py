"""SwiGLU feed-forward block in float32 with stacked gate and up weights."""

import torch
import torch.nn.functional as F


def run(
    hidden_states: torch.Tensor, gate_up_weight: torch.Tensor, down_weight: torch.Tensor
) -> torch.Tensor:
    """down(silu(gate) * up).

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] f32.
        gate_up_weight: [2 * intermediate_size, hidden_size] f32, the gate's rows first.
        down_weight: [hidden_size, intermediate_size] f32.

    Returns:
        [batch_size, seq_len, hidden_size] f32.
    """
    gate, up = F.linear(hidden_states, gate_up_weight).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down_weight)
