"""Group-limited routing: only experts of the best-scoring groups stay eligible."""

import torch

NUM_GROUPS = 8
GROUPS_KEPT = 4


def run(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank groups by the sum of their two best scores, keep four, mask the rest.

    Args:
        scores: [num_tokens, num_experts] f32; consecutive experts form 8 groups.

    Returns:
        Scores with -infinity in the groups not kept ([num_tokens, num_experts] f32), and 1.0 or
        0.0 for each group ([num_tokens, 8] f32).
    """
    groups = scores.unflatten(-1, (NUM_GROUPS, -1))
    group_scores = groups.topk(2, dim=-1).values.sum(dim=-1)
    kept = group_scores.topk(GROUPS_KEPT, dim=-1).indices
    group_mask = torch.zeros_like(group_scores).scatter(-1, kept, 1.0)
    masked_scores = groups.masked_fill(group_mask.unsqueeze(-1) == 0, -torch.inf)
    return masked_scores.flatten(-2), group_mask
