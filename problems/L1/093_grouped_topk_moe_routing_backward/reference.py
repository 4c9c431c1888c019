"""Backward of a sigmoid router: top-k gather, normalisation, scaling, projection."""

import torch


def run(
    grad_topk_weights: torch.Tensor,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    scores: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_weights_normalized: torch.Tensor,
    denominator: torch.Tensor,
    routed_scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All elementwise arithmetic is bfloat16; sums and products accumulate in float32.

    Args:
        grad_topk_weights: [N, top_k] bf16.
        hidden_states: [N, hidden_size] bf16.
        weight: [n_routed_experts, hidden_size] bf16.
        scores: sigmoids of the logits, [N, n_routed_experts] bf16.
        topk_indices: [N, top_k] int64, distinct within a row.
        topk_weights: the gathered scores, [N, top_k] bf16; not needed.
        topk_weights_normalized: those over their sum, [N, top_k] bf16.
        denominator: their sum, [N, 1] bf16.
        routed_scaling_factor: factor on the normalised weights.

    Returns:
        Gradients of hidden_states and weight, bf16.
    """
    # Scaling, and the division by the row's sum.
    grad = grad_topk_weights * routed_scaling_factor
    projection = (grad * topk_weights_normalized).sum(dim=-1, keepdim=True, dtype=torch.float32)
    grad_gathered = (grad - projection.to(grad.dtype)) / denominator

    # The gather, and the sigmoid.
    grad_scores = torch.zeros_like(scores).scatter_add(-1, topk_indices, grad_gathered)
    grad_logits = grad_scores * scores * (1.0 - scores)

    return grad_logits @ weight, grad_logits.T @ hidden_states


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Scores of normal logits; each token's experts are distinct, at random, in no order."""
    n, hidden_size, num_experts, top_k = (
        axes_and_scalars[name] for name in ("N", "hidden_size", "n_routed_experts", "top_k")
    )

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    scores = torch.sigmoid(normal(n, num_experts))
    # The order of random keys is a random permutation.
    topk_indices = torch.rand(n, num_experts, device=device).argsort(dim=-1)[:, :top_k]
    topk_weights = scores.gather(-1, topk_indices)
    denominator = topk_weights.sum(dim=-1, keepdim=True) + 1e-20
    return {
        "grad_topk_weights": normal(n, top_k),
        "hidden_states": normal(n, hidden_size),
        "weight": 0.02 * normal(num_experts, hidden_size),
        "scores": scores,
        "topk_indices": topk_indices,
        "topk_weights": topk_weights,
        "topk_weights_normalized": topk_weights / denominator,
        "denominator": denominator,
        "routed_scaling_factor": 2.5,
    }
