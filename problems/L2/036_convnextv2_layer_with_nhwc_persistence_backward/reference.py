"""Backward of a ConvNeXt-V2 block with drop path, from saved forward tensors."""

import math

import torch
import torch.nn.functional as F

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


def gelu_derivative(u: torch.Tensor) -> torch.Tensor:
    """Derivative of the tanh form of GELU."""
    tanh = torch.tanh(SQRT_2_OVER_PI * (u + GELU_CUBIC * u**3))
    inner = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * u.square())
    return 0.5 * (1 + tanh) + u * 0.5 * (1 - tanh.square()) * inner


def over_pixels(grad: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
    """Weight gradient of a pointwise layer: [.., out] and [.., in] to [out, in]."""
    return grad.flatten(0, 2).T @ activation.flatten(0, 2)


def run(
    grad_output: torch.Tensor,
    residual: torch.Tensor,
    x_dwconv: torch.Tensor,
    x_nhwc: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    x_normalized: torch.Tensor,
    x_ln: torch.Tensor,
    x_expanded: torch.Tensor,
    x_gelu: torch.Tensor,
    global_features: torch.Tensor,
    gf_mean: torch.Tensor,
    norm_features: torch.Tensor,
    x_grn_scaled: torch.Tensor,
    x_grn: torch.Tensor,
    dwconv_weight: torch.Tensor,
    layernorm_weight: torch.Tensor,
    pwconv1_weight: torch.Tensor,
    grn_weight: torch.Tensor,
    pwconv2_weight: torch.Tensor,
    drop_mask: torch.Tensor,
    drop_path_prob: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """All in float32, from the output back to the block's input, residual included.

    Args:
        grad_output, residual, x_dwconv: [B, C, H, W] f32; residual is the block's input, x_dwconv
            is not needed.
        x_nhwc, x_normalized, x_ln: [B, H, W, C] f32, before and after LayerNorm, without and with
            its weight.
        mean, var: [B, H, W, 1] f32, LayerNorm's statistics.
        x_expanded, x_gelu, x_grn_scaled, x_grn: [B, H, W, 4C] f32.
        global_features, norm_features: [B, 1, 1, 4C] f32, channel norms and their ratios to
            gf_mean [B, 1, 1, 1] f32.
        dwconv_weight: [C, 1, 7, 7] f32; layernorm_weight: [C] f32.
        pwconv1_weight: [4C, C] f32; grn_weight: [1, 1, 1, 4C] f32; pwconv2_weight: [C, 4C] f32.
        drop_mask: [B, 1, 1, 1] f32, 0 for samples whose branch was dropped.
        drop_path_prob: their probability; at 0 the mask is not applied.
        eps: added to LayerNorm's variance and to the mean of the channel norms.

    Returns:
        Gradients of the block's input, then of weight and bias of the depthwise convolution,
        LayerNorm, first pointwise layer, GRN and second pointwise layer, f32.
    """
    channels, expanded_channels = pwconv2_weight.shape
    pixels = (0, 1, 2)

    # Drop path and second pointwise layer.
    grad = grad_output
    if drop_path_prob > 0:
        grad = grad * drop_mask / (1 - drop_path_prob)
    grad = grad.permute(0, 2, 3, 1)
    grad_pwconv2_weight = over_pixels(grad, x_grn)
    grad_pwconv2_bias = grad.sum(dim=pixels)
    grad_grn = grad @ pwconv2_weight

    # Global response normalisation.
    grad_grn_weight = (grad_grn * x_grn_scaled).sum(dim=pixels).view_as(grn_weight)
    grad_grn_bias = grad_grn.sum(dim=pixels).view_as(grn_weight)
    grad_scaled = grad_grn * grn_weight
    grad_ratio = (grad_scaled * x_gelu).sum(dim=(1, 2), keepdim=True)
    denominator = gf_mean + eps
    # By definition channel by channel: the derivative of the mean would sum over the channels.
    through_mean = -(grad_ratio * global_features) / denominator.square() / expanded_channels
    grad_norm = grad_ratio / denominator + through_mean
    grad_gelu = grad_grn + grad_scaled * norm_features
    grad_gelu = grad_gelu + x_gelu * grad_norm / (global_features + eps)

    # GELU and first pointwise layer.
    grad_expanded = grad_gelu * gelu_derivative(x_expanded)
    grad_pwconv1_weight = over_pixels(grad_expanded, x_ln)
    grad_pwconv1_bias = grad_expanded.sum(dim=pixels)
    grad_ln = grad_expanded @ pwconv1_weight

    # LayerNorm over the channels.
    grad_layernorm_weight = (grad_ln * x_normalized).sum(dim=pixels)
    grad_layernorm_bias = grad_ln.sum(dim=pixels)
    grad_normalized = grad_ln * layernorm_weight
    std, centred = torch.sqrt(var + eps), x_nhwc - mean
    grad_var = -(grad_normalized * centred).sum(dim=-1, keepdim=True) / (2 * (var + eps) * std)
    grad_mean = -(grad_normalized / std).sum(dim=-1, keepdim=True)
    grad_mean = grad_mean - grad_var * 2 * centred.sum(dim=-1, keepdim=True) / channels
    grad_nhwc = grad_normalized / std + grad_var * 2 * centred / channels + grad_mean / channels
    grad_conv = grad_nhwc.permute(0, 3, 1, 2)

    # Depthwise convolution.
    padding = dwconv_weight.shape[-1] // 2
    grad_dwconv_weight = torch.nn.grad.conv2d_weight(
        residual, dwconv_weight.shape, grad_conv, padding=padding, groups=channels
    )
    grad_dwconv_bias = grad_conv.sum(dim=(0, 2, 3))
    grad_x = grad_output + F.conv_transpose2d(
        grad_conv, dwconv_weight, padding=padding, groups=channels
    )
    return (
        grad_x,
        grad_dwconv_weight,
        grad_dwconv_bias,
        grad_layernorm_weight,
        grad_layernorm_bias,
        grad_pwconv1_weight,
        grad_pwconv1_bias,
        grad_grn_weight,
        grad_grn_bias,
        grad_pwconv2_weight,
        grad_pwconv2_bias,
    )


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """A forward pass without biases, its saved tensors, and a normal gradient."""
    batch, height, width = axes_and_scalars["B"], axes_and_scalars["H"], axes_and_scalars["W"]
    channels, expanded = axes_and_scalars["C"], axes_and_scalars["C4"]
    drop_path_prob, eps = 0.1, 1e-6

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=device).mul_(std)

    residual = normal(batch, channels, height, width, std=0.1)
    dwconv_weight = normal(channels, 1, 7, 7, std=1 / 7)
    layernorm_weight = 1 + normal(channels, std=0.01)
    pwconv1_weight = normal(expanded, channels, std=math.sqrt(2 / channels))
    grn_weight = normal(1, 1, 1, expanded, std=0.01)

    x_dwconv = F.conv2d(residual, dwconv_weight, padding=3, groups=channels)
    x_nhwc = x_dwconv.permute(0, 2, 3, 1)
    mean = x_nhwc.mean(dim=-1, keepdim=True)
    var = x_nhwc.var(dim=-1, keepdim=True, correction=0)
    x_normalized = (x_nhwc - mean) / torch.sqrt(var + eps)
    x_ln = x_normalized * layernorm_weight
    x_expanded = F.linear(x_ln, pwconv1_weight)
    x_gelu = F.gelu(x_expanded, approximate="tanh")
    global_features = torch.linalg.vector_norm(x_gelu, dim=(1, 2), keepdim=True)
    gf_mean = global_features.mean(dim=-1, keepdim=True)
    norm_features = global_features / (gf_mean + eps)
    x_grn_scaled = x_gelu * norm_features
    return {
        "grad_output": normal(batch, channels, height, width),
        "residual": residual,
        "x_dwconv": x_dwconv,
        "x_nhwc": x_nhwc,
        "mean": mean,
        "var": var,
        "x_normalized": x_normalized,
        "x_ln": x_ln,
        "x_expanded": x_expanded,
        "x_gelu": x_gelu,
        "global_features": global_features,
        "gf_mean": gf_mean,
        "norm_features": norm_features,
        "x_grn_scaled": x_grn_scaled,
        "x_grn": grn_weight * x_grn_scaled + x_gelu,
        "dwconv_weight": dwconv_weight,
        "layernorm_weight": layernorm_weight,
        "pwconv1_weight": pwconv1_weight,
        "grn_weight": grn_weight,
        "pwconv2_weight": normal(channels, expanded, std=math.sqrt(2 / expanded)),
        "drop_mask": (torch.rand(batch, 1, 1, 1, device=device) >= drop_path_prob).float(),
        "drop_path_prob": drop_path_prob,
        "eps": eps,
    }
