"""Backward of a normalisation over the spatial plane, with given mean and deviation."""

import torch


def run(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    std: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of weight * (x - mean) / std + bias, mean and std being functions of x; in float32.

    Args:
        grad_output, x: [N, C, H, W] f32.
        weight: [C] f32.
        mean, std: [N, C, 1, 1] f32, used as given: neither is recomputed from x.

    Returns:
        Gradients of x [N, C, H, W], of the weight and of the bias, [C] each, f32.
    """
    plane = (2, 3)
    n = x.shape[2] * x.shape[3]
    centered = x - mean
    grad_bias = grad_output.sum(dim=(0, *plane))
    grad_weight = (grad_output * (centered / std)).sum(dim=(0, *plane))

    grad_normalized = grad_output * weight.view(1, -1, 1, 1)
    grad_variance = -0.5 * std.pow(-3) * (grad_normalized * centered).sum(dim=plane, keepdim=True)
    # The second term is not zero: nothing makes `mean` the mean of x.
    grad_mean = (-grad_normalized / std).sum(dim=plane, keepdim=True) + grad_variance * (
        -2 * centered
    ).sum(dim=plane, keepdim=True) / n
    grad_input = grad_normalized / std + grad_variance * 2 * centered / n + grad_mean / n
    return grad_input, grad_weight, grad_bias
