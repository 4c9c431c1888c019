"""Normalising flow of four additive coupling layers with convolutional networks."""

import torch
import torch.nn.functional as F


def coupling_network(
    x: torch.Tensor, convolutions: tuple[tuple[torch.Tensor, torch.Tensor], ...]
) -> torch.Tensor:
    """1-D convolutions of same length with ReLU between them; nothing is masked in between."""
    for index, (weight, bias) in enumerate(convolutions):
        if index:
            x = F.relu(x)
        x = F.conv1d(x, weight, bias, padding=weight.shape[-1] // 2)
    return x


def run(
    x: torch.Tensor,
    x_mask: torch.Tensor,
    reverse: bool,
    transform_0_conv0_weight: torch.Tensor,
    transform_0_conv0_bias: torch.Tensor,
    transform_0_conv1_weight: torch.Tensor,
    transform_0_conv1_bias: torch.Tensor,
    transform_0_conv2_weight: torch.Tensor,
    transform_0_conv2_bias: torch.Tensor,
    transform_1_conv0_weight: torch.Tensor,
    transform_1_conv0_bias: torch.Tensor,
    transform_1_conv1_weight: torch.Tensor,
    transform_1_conv1_bias: torch.Tensor,
    transform_1_conv2_weight: torch.Tensor,
    transform_1_conv2_bias: torch.Tensor,
    transform_2_conv0_weight: torch.Tensor,
    transform_2_conv0_bias: torch.Tensor,
    transform_2_conv1_weight: torch.Tensor,
    transform_2_conv1_bias: torch.Tensor,
    transform_2_conv2_weight: torch.Tensor,
    transform_2_conv2_bias: torch.Tensor,
    transform_3_conv0_weight: torch.Tensor,
    transform_3_conv0_bias: torch.Tensor,
    transform_3_conv1_weight: torch.Tensor,
    transform_3_conv1_bias: torch.Tensor,
    transform_3_conv2_weight: torch.Tensor,
    transform_3_conv2_bias: torch.Tensor,
) -> torch.Tensor:
    """Each layer adds to the second half of the channels what it computes from the first half.

    Args:
        x: [batch_size, channels, time] f32.
        x_mask: [batch_size, 1, time] f32, 0 or 1.
        reverse: apply the inverse: last layer first, subtracting.
        transform_*_conv0_weight: [hidden, channels / 2, kernel_size] f32;
            transform_*_conv1_weight: [hidden, hidden, kernel_size];
            transform_*_conv2_weight: [channels / 2, hidden, kernel_size]; each with its bias.

    Returns:
        [batch_size, channels, time] f32, zero where the mask is.
    """
    layers = (
        (
            (transform_0_conv0_weight, transform_0_conv0_bias),
            (transform_0_conv1_weight, transform_0_conv1_bias),
            (transform_0_conv2_weight, transform_0_conv2_bias),
        ),
        (
            (transform_1_conv0_weight, transform_1_conv0_bias),
            (transform_1_conv1_weight, transform_1_conv1_bias),
            (transform_1_conv2_weight, transform_1_conv2_bias),
        ),
        (
            (transform_2_conv0_weight, transform_2_conv0_bias),
            (transform_2_conv1_weight, transform_2_conv1_bias),
            (transform_2_conv2_weight, transform_2_conv2_bias),
        ),
        (
            (transform_3_conv0_weight, transform_3_conv0_bias),
            (transform_3_conv1_weight, transform_3_conv1_bias),
            (transform_3_conv2_weight, transform_3_conv2_bias),
        ),
    )
    for convolutions in reversed(layers) if reverse else layers:
        x0, x1 = x.chunk(2, dim=1)
        shift = coupling_network(x0, convolutions) * x_mask
        x1 = x1 - shift if reverse else x1 + shift
        x = torch.cat((x0, x1), dim=1) * x_mask
    return x


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Convolution weights scaled by their fan-in, so that activations keep their size."""
    half, hidden = axes_and_scalars["half_channels"], axes_and_scalars["hidden_channels"]
    kernel_size = axes_and_scalars["kernel_size"]
    shapes = ((hidden, half), (hidden, hidden), (half, hidden))
    weights = {}
    for layer in range(axes_and_scalars["n_layers"]):
        for index, (out_channels, in_channels) in enumerate(shapes):
            weight = torch.randn(out_channels, in_channels, kernel_size, device=device)
            scale = (2.0 / (in_channels * kernel_size)) ** 0.5
            weights[f"transform_{layer}_conv{index}_weight"] = weight * scale
    return weights
