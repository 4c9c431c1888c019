"""Sigmoid router that first limits each token to some groups of experts."""

import torch
import torch.nn.functional as F

NUM_GROUPS = 8
GROUPS_PER_TOKEN = 4
EXPERTS_PER_TOKEN = 8


def top_k_in_index_order(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest entries of each row, in the order CUDA's unsorted top-k emits them.

    First those strictly above the k-th largest value, by ascending index, then those equal to it,
    the lowest indices first.
    """
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    values, indices = values[..., :k], indices[..., :k]
    is_last = values == values[..., -1:]
    order = (indices + x.shape[-1] * is_last).argsort(dim=-1)
    return indices.gather(-1, order)


def run(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    expert_bias: torch.Tensor,
    routed_scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choice by biased scores, weights from the scores without bias; float32.

    Args:
        hidden_states: [num_tokens, gating_dim] bf16.
        weight: [num_experts, gating_dim] bf16.
        expert_bias: [num_experts] bf16, enters the choice alone.
        routed_scaling_factor: factor on the normalised weights.

    Returns:
        Indices [num_tokens, 8] int64, ordered as `top_k_in_index_order` says, and their weights
        [num_tokens, 8] f32.
    """
    scores = torch.sigmoid(F.linear(hidden_states.float(), weight.float()))
    choice = (scores + expert_bias.float()).unflatten(-1, (NUM_GROUPS, -1))

    group_score = choice.topk(2, dim=-1).values.sum(dim=-1)
    kept = top_k_in_index_order(group_score, GROUPS_PER_TOKEN)
    dropped = torch.ones_like(group_score, dtype=torch.bool).scatter(-1, kept, False)
    lowest = torch.finfo(choice.dtype).min
    choice = choice.masked_fill(dropped.unsqueeze(-1), lowest).flatten(-2)

    topk_idx = top_k_in_index_order(choice, EXPERTS_PER_TOKEN)
    topk_weight = scores.gather(-1, topk_idx)
    topk_weight = topk_weight / (topk_weight.sum(dim=-1, keepdim=True) + 1e-20)
    return topk_idx, topk_weight * routed_scaling_factor
