"""Backward of 2-D rotary tables with respect to the inverse frequencies."""

import torch


def run(
    grad_cos: torch.Tensor,
    grad_sin: torch.Tensor,
    pos_ids: torch.Tensor,
    inv_freq: torch.Tensor,
    emb: torch.Tensor,
) -> torch.Tensor:
    """All in float32.

    Args:
        grad_cos, grad_sin: [total_patches, head_dim] f32.
        pos_ids: [total_patches, 2] int64, row and column.
        inv_freq: [head_dim / 4] f32; its values are not needed.
        emb: [total_patches, head_dim] f32, the angles.

    Returns:
        Gradient of inv_freq, [head_dim / 4] f32.
    """
    grad_emb = grad_sin * emb.cos() - grad_cos * emb.sin()
    # Both halves of the tables come from the same row angles, then column angles.
    first, second = grad_emb.chunk(2, dim=-1)
    grad_angles = (first + second).unflatten(-1, (2, -1))
    # Not a matrix product, whose operands a GPU may round to TF32.
    return (grad_angles * pos_ids.float().unsqueeze(-1)).sum(dim=(0, 1))


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal values, angles that no position explains, and positions on a square grid."""
    total_patches, head_dim = axes_and_scalars["total_patches"], axes_and_scalars["head_dim"]
    return {
        "grad_cos": torch.randn(total_patches, head_dim, device=device),
        "grad_sin": torch.randn(total_patches, head_dim, device=device),
        "pos_ids": torch.randint(
            0, axes_and_scalars["max_grid_size"], (total_patches, 2), device=device
        ),
        "inv_freq": torch.randn(axes_and_scalars["head_dim_quarter"], device=device),
        "emb": torch.randn(total_patches, head_dim, device=device),
    }
