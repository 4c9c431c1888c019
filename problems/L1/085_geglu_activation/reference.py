"""GEGLU: one half of the features gated by the GELU of the other."""

import torch
import torch.nn.functional as F


def run(x: torch.Tensor) -> torch.Tensor:
    """gelu(first half) * second half in float32, with the tanh form of GELU.

    Args:
        x: [batch_size, seq_len, 2 * inner_dim] f32.

    Returns:
        [batch_size, seq_len, inner_dim] f32.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
