"""ConvNeXt-V2 block: depthwise convolution, pointwise expansion and projection around GRN."""

import torch
import torch.nn.functional as F


def run(
    x: torch.Tensor,
    dwconv_weight: torch.Tensor,
    dwconv_bias: torch.Tensor,
    layernorm_weight: torch.Tensor,
    layernorm_bias: torch.Tensor,
    pwconv1_weight: torch.Tensor,
    pwconv1_bias: torch.Tensor,
    grn_weight: torch.Tensor,
    grn_bias: torch.Tensor,
    pwconv2_weight: torch.Tensor,
    pwconv2_bias: torch.Tensor,
    eps: float,
    layer_norm_eps: float,
) -> torch.Tensor:
    """The block in float32, residual included.

    Args:
        x: [batch_size, dim, height, width] f32.
        dwconv_weight: [dim, 1, kernel_size, kernel_size] f32, odd kernel size, same padding.
        dwconv_bias, layernorm_weight, layernorm_bias, pwconv2_bias: [dim] f32.
        pwconv1_weight: [expansion_dim, dim] f32; pwconv1_bias: [expansion_dim] f32.
        grn_weight, grn_bias: [1, 1, 1, expansion_dim] f32.
        pwconv2_weight: [dim, expansion_dim] f32.
        eps: added to GRN's mean norm.
        layer_norm_eps: added to LayerNorm's variance.

    Returns:
        [batch_size, dim, height, width] f32.
    """
    padding = dwconv_weight.shape[-1] // 2
    y = F.conv2d(x, dwconv_weight, dwconv_bias, padding=padding, groups=x.shape[1])
    y = y.permute(0, 2, 3, 1)
    y = F.layer_norm(y, (y.shape[-1],), layernorm_weight, layernorm_bias, layer_norm_eps)
    z = F.gelu(F.linear(y, pwconv1_weight, pwconv1_bias))

    # Global response normalisation: each channel against the image's average channel energy.
    norm = torch.linalg.vector_norm(z, dim=(1, 2), keepdim=True)
    response = norm / (norm.mean(dim=-1, keepdim=True) + eps)
    z = grn_weight * (z * response) + grn_bias + z

    return x + F.linear(z, pwconv2_weight, pwconv2_bias).permute(0, 3, 1, 2)
