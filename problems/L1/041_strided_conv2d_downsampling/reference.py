"""Strided 3x3 convolution that halves the image."""

import torch
import torch.nn.functional as F


def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Stride 2, padded with one ring of zeros; in float32.

    Args:
        x: [batch_size, in_channels, height, width] f32.
        weight, bias: [out_channels, in_channels, 3, 3] and [out_channels] f32.

    Returns:
        [batch_size, out_channels, ceil(height / 2), ceil(width / 2)] f32.
    """
    return F.conv2d(x, weight, bias, stride=2, padding=1)
