"""Backward of SiLU from a saved sigmoid."""

import torch


def run(grad_output: torch.Tensor, x: torch.Tensor, sigmoid_x: torch.Tensor) -> torch.Tensor:
    """grad * s * (1 + x * (1 - s)) in float32, s as given.

    Args:
        grad_output, x, sigmoid_x: [num_elements] f32.

    Returns:
        Gradient of x, [num_elements] f32.
    """
    return grad_output * (sigmoid_x * (1.0 + x * (1.0 - sigmoid_x)))
