"""Two-layer feed-forward network with the tanh form of GELU."""

import torch
import torch.nn.functional as F


def run(
    hidden_states: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
) -> torch.Tensor:
    """All in float32.

    Args:
        hidden_states: [batch_size, seq_len, hidden_dim] f32.
        fc1_weight, fc1_bias: [mlp_hidden_dim, hidden_dim] and [mlp_hidden_dim] f32.
        fc2_weight, fc2_bias: [hidden_dim, mlp_hidden_dim] and [hidden_dim] f32.

    Returns:
        [batch_size, seq_len, hidden_dim] f32.
    """
    hidden = F.gelu(F.linear(hidden_states, fc1_weight, fc1_bias), approximate="tanh")
    return F.linear(hidden, fc2_weight, fc2_bias)
