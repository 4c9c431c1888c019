"""Residual block of two stages of 3x3 convolution, group norm and SiLU."""

import torch
import torch.nn.functional as F

NUM_GROUPS = 32


def run(
    x: torch.Tensor,
    conv1_weight: torch.Tensor,
    norm1_weight: torch.Tensor,
    norm1_bias: torch.Tensor,
    conv2_weight: torch.Tensor,
    norm2_weight: torch.Tensor,
    norm2_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Both stages and the identity skip, in float32.

    Args:
        x: [batch_size, channels, height, width] f32.
        conv1_weight, conv2_weight: [channels, channels, 3, 3] f32, no bias.
        norm1_weight, norm1_bias, norm2_weight, norm2_bias: [channels] f32.
        eps: added to the variance of each of the 32 groups.

    Returns:
        Shaped like x, f32.
    """
    y = F.conv2d(x, conv1_weight, padding=1)
    y = F.silu(F.group_norm(y, NUM_GROUPS, norm1_weight, norm1_bias, eps))
    y = F.conv2d(y, conv2_weight, padding=1)
    y = F.silu(F.group_norm(y, NUM_GROUPS, norm2_weight, norm2_bias, eps))
    return y + x
