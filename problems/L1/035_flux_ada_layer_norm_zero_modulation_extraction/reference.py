"""Six modulation vectors from one linear layer, for an adaptive layer norm."""

import torch
import torch.nn.functional as F


def run(
    emb: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """A linear layer in float32, cut in six; no activation before it.

    Args:
        emb: [batch_size, inner_dim] f32.
        weight, bias: [6 * inner_dim, inner_dim] and [6 * inner_dim] f32.

    Returns:
        Shift, scale and gate for the attention, then for the MLP, each [batch_size, inner_dim] f32.
    """
    return tuple(part.clone() for part in F.linear(emb, weight, bias).chunk(6, dim=-1))
