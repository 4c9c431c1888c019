"""Gate and up projections of a GeGLU feed-forward block, joined by their product."""

import torch
import torch.nn.functional as F


def run(x: torch.Tensor, gate_proj: torch.Tensor, up_proj: torch.Tensor) -> torch.Tensor:
    """gelu(x Wg^T) * (x Wu^T) with the tanh form of GELU; every step rounds to bfloat16.

    Args:
        x: [batch_size, seq_len, hidden_size] bf16.
        gate_proj, up_proj: [intermediate_size, hidden_size] bf16.

    Returns:
        [batch_size, seq_len, intermediate_size] bf16.
    """
    gate = F.linear(x, gate_proj)
    up = F.linear(x, up_proj)
    # GELU computes in float32 and rounds its result, as the product does.
    return F.gelu(gate, approximate="tanh") * up
