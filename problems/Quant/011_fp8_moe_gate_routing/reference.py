"""MoE gate: FP8 logits, sigmoid scores, group-limited top-8 with a correction bias."""

import torch

BLOCK = 128
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12
NUM_GROUPS = 8
TOP_GROUPS = 4
TOP_EXPERTS = 8


def block_scale(blocks: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Decode scale of each float32 block, whose axes are `dims`: largest magnitude / 448."""
    # Times the rounded reciprocal: how CUDA divides by a number, here on every device.
    scale = blocks.abs().amax(dim=dims, keepdim=True) * (1.0 / E4M3_MAX)
    return scale.clamp(min=SMALLEST_SCALE)


def fake_quantize(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float32 blocks rounded to float8_e4m3fn in units of their scale, and dequantised."""
    rounded = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return rounded.float() * scale


def fp8_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [M, K] in FP8 by the scales [M, K / 128] of its blocks; dequantised, float32."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    return fake_quantize(blocks, scale.unsqueeze(-1)).flatten(-2)


def fp8_tiles(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight [N, K] in FP8 by the scales [K / 128, N / 128] of its tiles; dequantised, float32."""
    tiles = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return fake_quantize(tiles, scale.T[:, None, :, None]).flatten(2).flatten(0, 1)


def row_scales(x: torch.Tensor) -> torch.Tensor:
    """Scales [M, K / 128] of x [M, K]."""
    return block_scale(x.float().unflatten(-1, (-1, BLOCK)), dims=(-1,)).squeeze(-1)


def tile_scales(weight: torch.Tensor) -> torch.Tensor:
    """Scales [K / 128, N / 128] of weight [N, K]."""
    tiles = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return block_scale(tiles, dims=(1, 3))[:, 0, :, 0].T.contiguous()


def top_k_indices(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest values of each row, in the order an unsorted selection leaves them.

    First those larger than the k-th largest, then those equal to it, each by ascending index. Of
    equal values the lowest indices are taken.
    """
    order = values.sort(dim=-1, descending=True, stable=True)
    indices, largest = order.indices[..., :k], order.values[..., :k]
    # Ties with the k-th go behind all others.
    width = values.shape[-1]
    rank = indices + width * (largest == largest[..., -1:])
    return rank.sort(dim=-1).values % width


def run(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    e_score_correction_bias: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    routed_scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits are rounded to bf16; everything after is float32.

    Args:
        hidden_states: [num_tokens, hidden_size] bf16; scale_x: [num_tokens, hidden_size / 128] f32.
        weight: [num_experts, hidden_size] bf16.
        scale_w: [hidden_size / 128, num_experts / 128] f32.
        e_score_correction_bias: [num_experts] bf16, for the selection alone.
        routed_scaling_factor: factor on the normalised weights.

    Returns:
        Experts [num_tokens, 8] int64 and their weights [num_tokens, 8] f32.
    """
    logits = fp8_rows(hidden_states, scale_x) @ fp8_tiles(weight, scale_w).T
    scores = torch.sigmoid(logits.to(hidden_states.dtype).float())
    choice = scores + e_score_correction_bias.float()

    # A group counts by its two best experts; outside the best groups nothing is selected.
    grouped = choice.unflatten(-1, (NUM_GROUPS, -1))
    group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(group_scores, dtype=torch.bool)
    kept.scatter_(1, top_k_indices(group_scores, TOP_GROUPS), True)
    choice = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)

    topk_idx = top_k_indices(choice, TOP_EXPERTS)
    topk_weight = scores.gather(1, topk_idx)
    topk_weight = topk_weight / (topk_weight.sum(dim=-1, keepdim=True) + 1e-20)
    return topk_idx, topk_weight * routed_scaling_factor


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal activations and weight with the scales that suit them, and a small bias."""
    num_tokens, hidden = axes_and_scalars["num_tokens"], axes_and_scalars["hidden_size"]
    num_experts = axes_and_scalars["n_routed_experts"]
    hidden_states = torch.randn(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    weight = torch.randn(num_experts, hidden, dtype=torch.bfloat16, device=device)
    bias = torch.randn(num_experts, dtype=torch.bfloat16, device=device) * 0.1
    return {
        "hidden_states": hidden_states,
        "weight": weight,
        "e_score_correction_bias": bias,
        "scale_x": row_scales(hidden_states),
        "scale_w": tile_scales(weight),
        "routed_scaling_factor": 2.5,
    }
