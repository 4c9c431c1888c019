"""Front end of an audio encoder: three strided convolutions, a projection, a position table."""

import math

import torch
import torch.nn.functional as F


def run(
    input_features: torch.Tensor,
    conv2d1_weight: torch.Tensor,
    conv2d1_bias: torch.Tensor,
    conv2d2_weight: torch.Tensor,
    conv2d2_bias: torch.Tensor,
    conv2d3_weight: torch.Tensor,
    conv2d3_bias: torch.Tensor,
    conv_out_weight: torch.Tensor,
    positional_embedding: torch.Tensor,
    embed_scale: float,
) -> torch.Tensor:
    """Each step rounds to bfloat16; GELU is the exact one.

    Args:
        input_features: [batch_size, 1, num_mel_bins, time_dim] bf16.
        conv2d1_weight: [channels, 1, 3, 3] bf16; conv2d1_bias: [channels] bf16.
        conv2d2_weight, conv2d3_weight: [channels, channels, 3, 3] bf16, with biases [channels].
        conv_out_weight: [d_model, channels * num_mel_bins / 8] bf16.
        positional_embedding: [max_source_positions, d_model] bf16; its first rows are added.
        embed_scale: factor on the projection.

    Returns:
        [batch_size, time_dim / 8, d_model] bf16.
    """
    x = input_features
    for weight, bias in (
        (conv2d1_weight, conv2d1_bias),
        (conv2d2_weight, conv2d2_bias),
        (conv2d3_weight, conv2d3_bias),
    ):
        x = F.gelu(F.conv2d(x, weight, bias, stride=2, padding=1))
    # [batch, channels, freq, time] to a feature vector a time step, frequency fastest.
    x = x.permute(0, 3, 1, 2).flatten(2)
    return F.linear(x, conv_out_weight) * embed_scale + positional_embedding[: x.shape[1]]


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Convolutions that keep the scale, a sinusoidal table, everything else normal."""
    axes = axes_and_scalars
    channels, d_model = axes["downsample_hidden_size"], axes["d_model"]
    kernel_size, conv_out_dim = axes["kernel_size"], axes["conv_out_dim"]

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=device) * std).bfloat16()

    def convolution(in_channels: int) -> torch.Tensor:
        std = math.sqrt(2 / (in_channels * kernel_size**2))
        return normal(channels, in_channels, kernel_size, kernel_size, std=std)

    position = torch.arange(axes["max_source_positions"], dtype=torch.float32, device=device)
    exponent = torch.arange(0, d_model, 2, dtype=torch.float32, device=device) / d_model
    angle = torch.outer(position, torch.exp(-math.log(10000.0) * exponent))
    return {
        "input_features": normal(
            axes["batch_size"], axes["one"], axes["num_mel_bins"], axes["time_dim"]
        ),
        "conv2d1_weight": convolution(axes["one"]),
        "conv2d1_bias": normal(channels),
        "conv2d2_weight": convolution(channels),
        "conv2d2_bias": normal(channels),
        "conv2d3_weight": convolution(channels),
        "conv2d3_bias": normal(channels),
        "conv_out_weight": normal(d_model, conv_out_dim, std=conv_out_dim**-0.5),
        # Even columns are sines, odd ones cosines.
        "positional_embedding": torch.stack((angle.sin(), angle.cos()), dim=-1)
        .flatten(1)
        .bfloat16(),
    }
