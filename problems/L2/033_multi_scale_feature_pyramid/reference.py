"""Three-scale U-Net of plain convolutions with skip concatenations and no activation."""

import torch
import torch.nn.functional as F


def run(
    x: torch.Tensor,
    encoder_conv0_weight: torch.Tensor,
    encoder_conv0_bias: torch.Tensor,
    downsample_conv0_weight: torch.Tensor,
    downsample_conv0_bias: torch.Tensor,
    encoder_conv1_weight: torch.Tensor,
    encoder_conv1_bias: torch.Tensor,
    downsample_conv1_weight: torch.Tensor,
    downsample_conv1_bias: torch.Tensor,
    encoder_conv2_weight: torch.Tensor,
    encoder_conv2_bias: torch.Tensor,
    bottleneck_weight: torch.Tensor,
    bottleneck_bias: torch.Tensor,
    upsample_conv0_weight: torch.Tensor,
    upsample_conv0_bias: torch.Tensor,
    decoder_conv0_weight: torch.Tensor,
    decoder_conv0_bias: torch.Tensor,
    upsample_conv1_weight: torch.Tensor,
    upsample_conv1_bias: torch.Tensor,
    decoder_conv1_weight: torch.Tensor,
    decoder_conv1_bias: torch.Tensor,
    output_conv_weight: torch.Tensor,
    output_conv_bias: torch.Tensor,
) -> torch.Tensor:
    """All in float32.

    Args:
        x: [batch_size, 3, height, width] f32, height and width multiples of 4.
        *_weight: [c_out, c_in, 3, 3] f32; of upsample_conv{i}, which are transposed convolutions,
            [c_in, c_out, 2, 2].
        *_bias: one value an output channel, f32.

    Returns:
        [batch_size, 3, height, width] f32.
    """
    skip0 = F.conv2d(x, encoder_conv0_weight, encoder_conv0_bias, padding=1)
    h = F.conv2d(skip0, downsample_conv0_weight, downsample_conv0_bias, stride=2, padding=1)
    skip1 = F.conv2d(h, encoder_conv1_weight, encoder_conv1_bias, padding=1)
    h = F.conv2d(skip1, downsample_conv1_weight, downsample_conv1_bias, stride=2, padding=1)
    h = F.conv2d(h, encoder_conv2_weight, encoder_conv2_bias, padding=1)
    h = F.conv2d(h, bottleneck_weight, bottleneck_bias, padding=1)

    h = F.conv_transpose2d(h, upsample_conv0_weight, upsample_conv0_bias, stride=2)
    h = torch.cat((h, skip1), dim=1)
    h = F.conv2d(h, decoder_conv0_weight, decoder_conv0_bias, padding=1)
    h = F.conv_transpose2d(h, upsample_conv1_weight, upsample_conv1_bias, stride=2)
    h = torch.cat((h, skip0), dim=1)
    h = F.conv2d(h, decoder_conv1_weight, decoder_conv1_bias, padding=1)
    return F.conv2d(h, output_conv_weight, output_conv_bias, padding=1)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights of variance 2 / (second axis times kernel area); biases and image standard normal."""
    axes = axes_and_scalars
    channels = axes["input_channels"]
    c1, c2, c3 = (axes[f"scale{i}_channels"] for i in (1, 2, 3))
    # Name: output channels (input channels where transposed), the other channels, kernel size.
    layers = {
        "encoder_conv0": (c1, channels, 3),
        "downsample_conv0": (c2, c1, 3),
        "encoder_conv1": (c2, c2, 3),
        "downsample_conv1": (c3, c2, 3),
        "encoder_conv2": (c3, c3, 3),
        "bottleneck": (c3, c3, 3),
        "upsample_conv0": (c3, c2, 2),
        "decoder_conv0": (c2, 2 * c2, 3),
        "upsample_conv1": (c2, c1, 2),
        "decoder_conv1": (c1, 2 * c1, 3),
        "output_conv": (channels, c1, 3),
    }
    shape = (axes["batch_size"], channels, axes["height"], axes["width"])
    inputs = {"x": torch.randn(shape, device=device)}
    for name, (first, second, size) in layers.items():
        std = (2 / (second * size**2)) ** 0.5
        inputs[f"{name}_weight"] = torch.randn(first, second, size, size, device=device) * std
        out_channels = second if name.startswith("upsample") else first
        inputs[f"{name}_bias"] = torch.randn(out_channels, device=device)
    return inputs
