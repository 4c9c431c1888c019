"""Collapse of AltUp's parallel streams: unembed, match the first stream's magnitude, average."""

import torch
import torch.nn.functional as F


def run(
    hidden_states: torch.Tensor,
    unembed_proj_1: torch.Tensor,
    unembed_proj_2: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """Mean of stream 0 and the two projected, rescaled streams; float32, rounded once.

    Args:
        hidden_states: [3, batch_size, seq_len, hidden_size] bf16, the streams.
        unembed_proj_1, unembed_proj_2: [hidden_size, hidden_size] bf16.
        epsilon: lower bound of a projected stream's mean square.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    streams = hidden_states.float()
    first = streams[0]
    target = first.square().mean(dim=-1, keepdim=True).sqrt()

    def rescaled(stream: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        projected = F.linear(stream, weight.float())
        mean_square = projected.square().mean(dim=-1, keepdim=True)
        return projected * (target / mean_square.clamp(min=epsilon).sqrt())

    total = first + rescaled(streams[1], unembed_proj_1) + rescaled(streams[2], unembed_proj_2)
    return (total / streams.shape[0]).to(hidden_states.dtype)
