"""GELU in its tanh form."""

import torch
import torch.nn.functional as F


def run(x: torch.Tensor) -> torch.Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) in float32.

    Args:
        x: [batch_size, seq_len, intermediate_size] f32.

    Returns:
        Shaped like x, f32.
    """
    return F.gelu(x, approximate="tanh")
