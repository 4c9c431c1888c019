"""Output head of an image model: residual convolution block, adaptive norm, final convolution."""

import math

import torch
import torch.nn.functional as F

NUM_GROUPS = 32


def group_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """GroupNorm in float32, affine part included, rounded once."""
    return F.group_norm(x.float(), NUM_GROUPS, weight.float(), bias.float(), eps).to(x.dtype)


def run(
    x: torch.Tensor,
    timestep_emb: torch.Tensor,
    time_emb_mlp_linear_weight: torch.Tensor,
    time_emb_mlp_linear_bias: torch.Tensor,
    resblock_in_norm_weight: torch.Tensor,
    resblock_in_norm_bias: torch.Tensor,
    resblock_in_conv_weight: torch.Tensor,
    resblock_in_conv_bias: torch.Tensor,
    resblock_emb_linear_weight: torch.Tensor,
    resblock_emb_linear_bias: torch.Tensor,
    resblock_out_norm_weight: torch.Tensor,
    resblock_out_norm_bias: torch.Tensor,
    resblock_out_conv_weight: torch.Tensor,
    resblock_out_conv_bias: torch.Tensor,
    resblock_skip_conv_weight: torch.Tensor,
    resblock_skip_conv_bias: torch.Tensor,
    final_norm_weight: torch.Tensor,
    final_norm_bias: torch.Tensor,
    final_conv_weight: torch.Tensor,
    final_conv_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Every operation's result rounds to bfloat16. C hidden_size, D hidden_channels.

    Args:
        x: [batch_size, height * width, C], tokens in row-major order; height is the largest
            divisor of the length that does not exceed its square root.
        timestep_emb: [batch_size, emb_channels].
        time_emb_mlp_linear_*: not needed.
        resblock_in_norm_*: [C]; resblock_in_conv_weight: [D, C, 3, 3].
        resblock_emb_linear_weight: [2 D, emb_channels], scale first, then shift.
        resblock_out_norm_*, final_norm_*: [D]; resblock_out_conv_weight: [D, D, 3, 3].
        resblock_skip_conv_weight: [D, C, 1, 1].
        final_conv_weight: [out_channels, D, 3, 3].
        *_bias: [out features] of their layer.
        eps: added to the variances.

    Returns:
        [batch_size, out_channels, height, width] bf16.
    """
    length = x.shape[1]
    height = max(d for d in range(1, math.isqrt(length) + 1) if length % d == 0)
    features = x.transpose(1, 2).unflatten(2, (height, -1))

    y = F.silu(group_norm(features, resblock_in_norm_weight, resblock_in_norm_bias, eps))
    y = F.conv2d(y, resblock_in_conv_weight, resblock_in_conv_bias, padding=1)
    modulation = F.linear(
        F.silu(timestep_emb), resblock_emb_linear_weight, resblock_emb_linear_bias
    )
    scale, shift = modulation[:, :, None, None].chunk(2, dim=1)
    y = group_norm(y, resblock_out_norm_weight, resblock_out_norm_bias, eps)
    y = y * (1 + scale) + shift
    y = F.conv2d(F.silu(y), resblock_out_conv_weight, resblock_out_conv_bias, padding=1)
    y = F.conv2d(features, resblock_skip_conv_weight, resblock_skip_conv_bias) + y

    y = F.silu(group_norm(y, final_norm_weight, final_norm_bias, eps))
    return F.conv2d(y, final_conv_weight, final_conv_bias, padding=1)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """A small time embedding, and convolution weights scaled by their fan-in."""
    axes = axes_and_scalars
    hidden_size, channels = axes["hidden_size"], axes["hidden_channels"]

    def conv_weight(out_channels: int, in_channels: int, kernel: int) -> torch.Tensor:
        weight = torch.randn(out_channels, in_channels, kernel, kernel, device=device)
        return (weight * math.sqrt(2.0 / (in_channels * kernel * kernel))).bfloat16()

    emb = 0.1 * torch.randn(axes["batch_size"], axes["emb_channels"], device=device)
    return {
        "timestep_emb": emb.bfloat16(),
        "resblock_in_conv_weight": conv_weight(channels, hidden_size, 3),
        "resblock_out_conv_weight": conv_weight(channels, channels, 3),
        "resblock_skip_conv_weight": conv_weight(channels, hidden_size, 1),
        "final_conv_weight": conv_weight(axes["out_channels"], channels, 3),
    }
