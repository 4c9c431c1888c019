"""ConvNeXt-V2's pointwise MLP, with global response normalisation between its two layers."""

import torch
import torch.nn.functional as F


def global_response_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Scale each channel by its norm over the image, relative to the mean norm of all channels.

    Args:
        x: [batch_size, height, width, channels].
        weight, bias: [1, 1, 1, channels].
        eps: added to the mean norm.
    """
    norm = x.square().sum(dim=(1, 2), keepdim=True).sqrt()
    return weight * (x * (norm / (norm.mean(dim=-1, keepdim=True) + eps))) + bias + x


def run(
    hidden_states: torch.Tensor,
    pwconv1_weight: torch.Tensor,
    pwconv1_bias: torch.Tensor,
    grn_weight: torch.Tensor,
    grn_bias: torch.Tensor,
    pwconv2_weight: torch.Tensor,
    pwconv2_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Linear layer, exact GELU, global response norm, linear layer; in float32.

    Args:
        hidden_states: [batch_size, height, width, dim] f32.
        pwconv1_weight, pwconv1_bias: [hidden_dim, dim] and [hidden_dim] f32.
        grn_weight, grn_bias: [1, 1, 1, hidden_dim] f32.
        pwconv2_weight, pwconv2_bias: [dim, hidden_dim] and [dim] f32.
        eps: added to the mean norm.

    Returns:
        [batch_size, height, width, dim] f32.
    """
    x = F.gelu(F.linear(hidden_states, pwconv1_weight, pwconv1_bias))
    x = global_response_norm(x, grn_weight, grn_bias, eps)
    return F.linear(x, pwconv2_weight, pwconv2_bias)
