"""Position data of vision patches: resampled position embeddings and 2-D rotary tables."""

import math

import torch

MERGE = 2


def equally_spaced(index: torch.Tensor, count: torch.Tensor, last: int) -> torch.Tensor:
    """The index-th of `count` points from 0 to `last`, float32, built from both ends inwards."""
    # Number / tensor would multiply by the reciprocal, which rounds twice.
    step = torch.full_like(count, last, dtype=torch.float32) / (count - 1).float()
    return torch.where(
        index < count // 2, index.float() * step, last - (count - 1 - index).float() * step
    )


def run(
    grid_thw: torch.Tensor, pos_embed_weight: torch.Tensor, inv_freq: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bilinear samples of the embedding grid and rotary tables, for patches in 2x2-block order.

    All in float32. The frames of an image are alike.

    Args:
        grid_thw: [num_images, 3] int64, frames, rows and columns (both even) of each image.
        pos_embed_weight: [side * side, hidden_size] f32, learned on a square grid.
        inv_freq: [head_dim / 4] f32.

    Returns:
        Position embeddings [total_tokens, hidden_size], cosine and sine tables
        [total_tokens, head_dim], f32.
    """
    # Row and column of every patch. The four patches of a 2x2 block follow each other, and blocks
    # are ordered by frame, block row and block column.
    sizes = grid_thw.prod(dim=1)
    ends = sizes.cumsum(0)
    place = torch.arange(int(ends[-1]), device=grid_thw.device)
    image = torch.searchsorted(ends, place, right=True)
    _, height, width = grid_thw[image].unbind(dim=-1)
    place = (place - (ends - sizes)[image]) % (height * width)
    block = place // MERGE**2
    row = block // (width // MERGE) * MERGE + place // MERGE % MERGE
    column = block % (width // MERGE) * MERGE + place % MERGE

    # The image's patches spread over the whole grid of embeddings, corner on corner.
    side = math.isqrt(pos_embed_weight.shape[0])
    y, x = equally_spaced(row, height, side - 1), equally_spaced(column, width, side - 1)
    y0, x0 = y.long(), x.long()
    y1, x1 = (y0 + 1).clamp(max=side - 1), (x0 + 1).clamp(max=side - 1)
    dy, dx = (y - y0).unsqueeze(-1), (x - x0).unsqueeze(-1)
    patch_pos_embeds = (
        (1 - dy) * (1 - dx) * pos_embed_weight[y0 * side + x0]
        + (1 - dy) * dx * pos_embed_weight[y0 * side + x1]
        + dy * (1 - dx) * pos_embed_weight[y1 * side + x0]
        + dy * dx * pos_embed_weight[y1 * side + x1]
    )

    angles = torch.stack((row, column), dim=-1).float().unsqueeze(-1) * inv_freq
    angles = angles.flatten(1).repeat(1, 2)
    return patch_pos_embeds, angles.cos(), angles.sin()


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Images of up to four frames, the last of one frame taking what is left of the tokens."""
    num_images, remaining = axes_and_scalars["num_images"], axes_and_scalars["total_tokens"]
    head_dim = axes_and_scalars["head_dim"]

    def even_within(value: int) -> int:
        return min(max(value, 2), 34) // 2 * 2

    grids = []
    for i in range(num_images - 1):
        share = remaining // (num_images - i)
        frames = min(max(share // 16, 1), 4)
        height = even_within(share // frames // 4)
        width = even_within(share // frames // height)
        grids.append((frames, height, width))
        remaining -= frames * height * width
    height = 2
    if remaining // height % 2:
        height = next(h for h in range(4, remaining + 1, 2) if remaining % h == 0)
    grids.append((1, height, remaining // height))

    ladder = torch.arange(0, head_dim // 2, 2, device=device).float() / head_dim
    return {
        "grid_thw": torch.tensor(grids, device=device),
        "pos_embed_weight": torch.randn(
            axes_and_scalars["num_position_embeddings"],
            axes_and_scalars["hidden_size"],
            device=device,
        ),
        "inv_freq": 1.0 / 10000.0**ladder,
    }
