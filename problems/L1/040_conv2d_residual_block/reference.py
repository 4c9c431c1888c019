"""Two 3x3 convolutions in a row, added to the input."""

import torch
import torch.nn.functional as F


def run(
    x: torch.Tensor,
    conv_in_weight: torch.Tensor,
    conv_in_bias: torch.Tensor,
    conv_out_weight: torch.Tensor,
    conv_out_bias: torch.Tensor,
) -> torch.Tensor:
    """No activation between the convolutions, each padded with zeros; in float32.

    Args:
        x: [batch_size, channels, height, width] f32.
        conv_in_weight, conv_in_bias: [hidden_channels, channels, 3, 3] and [hidden_channels] f32.
        conv_out_weight, conv_out_bias: [channels, hidden_channels, 3, 3] and [channels] f32.

    Returns:
        Shaped like x, f32.
    """
    hidden = F.conv2d(x, conv_in_weight, conv_in_bias, padding=1)
    return F.conv2d(hidden, conv_out_weight, conv_out_bias, padding=1) + x
