"""Pointwise convolution to the mean and the log-scale of a Gaussian, channel halves of one map."""

import torch


def run(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A convolution of kernel 1 is a matrix product for each batch element, here in float32.

    Args:
        x: [batch_size, in_channels, time] f32.
        weight: [2 * out_channels, in_channels, 1] f32.
        bias: [2 * out_channels] f32.

    Returns:
        Mean and log-scale, each [batch_size, out_channels, time] f32.
    """
    # Not F.conv1d: cuDNN would be free to multiply in TF32.
    statistics = torch.matmul(weight.squeeze(-1), x) + bias.unsqueeze(-1)
    mean, logs = statistics.chunk(2, dim=1)
    return mean.clone(), logs.clone()
