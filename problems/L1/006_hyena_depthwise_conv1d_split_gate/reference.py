"""Hyena's short filter: causal depthwise convolution, three-way split, first gate."""

import torch
import torch.nn.functional as F


def run(
    u: torch.Tensor, short_filter_weight: torch.Tensor, short_filter_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All in float32.

    Args:
        u: [batch_size, 3 * d_model, seq_len] f32.
        short_filter_weight: [3 * d_model, 1, short_filter_order] f32; the last tap multiplies the
            current sample.
        short_filter_bias: [3 * d_model] f32.

    Returns:
        v * x0, x0 and x1, each [batch_size, d_model, seq_len] f32, where x0, x1 and v are the
        three parts of the filtered channels.
    """
    inner_width, _, order = short_filter_weight.shape
    padded = F.pad(u, (order - 1, 0))
    filtered = F.conv1d(padded, short_filter_weight, short_filter_bias, groups=inner_width)
    x0, x1, v = filtered.chunk(3, dim=1)
    return v * x0, x0.clone(), x1.clone()
