"""Patch merger of a vision encoder: layer norm, 2x2 blocks of patches to one row, two-layer MLP."""

import math

import torch
import torch.nn.functional as F

MERGE = 2


def merged_order(grid_thw: torch.Tensor, num_patches: int) -> torch.Tensor:
    """The patch at each place of the merged order, computed without reading the grids on the host.

    A grid's patches lie frame by frame and row by row. In the merged order the four patches of a
    2x2 block follow each other, blocks being ordered by frame, block row and block column.

    Args:
        grid_thw: [num_grids, 3] int64, frames, rows and columns of each grid.
        num_patches: of all grids together.

    Returns:
        [num_patches] int64, patch numbers.
    """
    sizes = grid_thw.prod(dim=1)
    ends = sizes.cumsum(0)
    place = torch.arange(num_patches, device=grid_thw.device)
    grid = torch.searchsorted(ends, place, right=True)
    start, width = (ends - sizes)[grid], grid_thw[grid, 2]

    place = place - start
    column_in_block = place % MERGE
    row_in_block = place // MERGE % MERGE
    block = place // MERGE**2
    block_column = block % (width // MERGE)
    block_row = block // (width // MERGE)  # counted through all frames
    row, column = block_row * MERGE + row_in_block, block_column * MERGE + column_in_block
    return start + row * width + column


def run(
    hidden: torch.Tensor,
    grid_thw: torch.Tensor,
    ln_weight: torch.Tensor,
    ln_bias: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Each step rounds to bfloat16 once; the layer norm is over single patches.

    Args:
        hidden: [num_patches, hidden_size] bf16.
        grid_thw: [num_grids, 3] int64, frames, rows and columns (both even) of each grid.
        ln_weight, ln_bias: [hidden_size] bf16.
        fc1_weight, fc1_bias: [4 * hidden_size, 4 * hidden_size] and [4 * hidden_size] bf16.
        fc2_weight, fc2_bias: [out_hidden_size, 4 * hidden_size] and [out_hidden_size] bf16.
        eps: added to the variance.

    Returns:
        [num_patches / 4, out_hidden_size] bf16.
    """
    num_patches, hidden_size = hidden.shape
    x = F.layer_norm(hidden.float(), (hidden_size,), ln_weight.float(), ln_bias.float(), eps)
    x = x.to(hidden.dtype)
    merged = x[merged_order(grid_thw, num_patches)].view(-1, MERGE**2 * hidden_size)
    y = F.gelu(F.linear(merged, fc1_weight, fc1_bias))
    return F.linear(y, fc2_weight, fc2_bias)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Square grids of one frame and equal size, normal patches, and an identity layer norm."""
    num_patches, num_grids = axes_and_scalars["num_patches"], axes_and_scalars["num_grids"]
    hidden_size = axes_and_scalars["hidden_size"]
    expanded = axes_and_scalars["hidden_size_expanded"]
    out_hidden_size = axes_and_scalars["out_hidden_size"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    side = math.isqrt(num_patches // num_grids)
    return {
        "hidden": normal(num_patches, hidden_size),
        "grid_thw": torch.tensor([[1, side, side]], device=device).repeat(num_grids, 1),
        "ln_weight": torch.ones(hidden_size, dtype=torch.bfloat16, device=device),
        "ln_bias": torch.zeros(hidden_size, dtype=torch.bfloat16, device=device),
        "fc1_weight": normal(expanded, expanded) / math.sqrt(expanded),
        "fc1_bias": normal(expanded),
        "fc2_weight": normal(out_hidden_size, expanded) / math.sqrt(expanded),
        "fc2_bias": normal(out_hidden_size),
        "eps": 1e-6,
    }
