"""Sparse activation that keeps what lies above a Gaussian quantile of its row."""

import math

import torch


def run(inputs: torch.Tensor, target_sparsity: float) -> torch.Tensor:
    """relu(x - (mean + z * std)) with z the standard normal quantile of the target sparsity.

    Args:
        inputs: [batch_size, seq_len, intermediate_size] bf16.
        target_sparsity: share of each row to zero if it were normal; 0 leaves the inputs alone.

    Returns:
        [batch_size, seq_len, intermediate_size] bf16.
    """
    if target_sparsity == 0.0:
        return inputs.clone()
    # A 0-d tensor, since math has no inverse error function; nothing waits for the device.
    probability = torch.full((), target_sparsity, dtype=torch.float64, device=inputs.device)
    z = (math.sqrt(2.0) * torch.erfinv(2.0 * probability - 1.0)).float()

    x = inputs.float()
    mean = x.mean(dim=-1, keepdim=True)
    std = (x - mean).square().mean(dim=-1, keepdim=True).sqrt()
    return torch.relu(x - (mean + std * z)).to(inputs.dtype)
