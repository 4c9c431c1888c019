"""Mixture of experts: softmax router, the eight likeliest SwiGLU experts, weighted sum."""

import torch
import torch.nn.functional as F

TOP_K = 8


def assignments_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """For each expert the flat positions in `experts` [tokens, k] that name it, ascending."""
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    return flat.argsort(stable=True).split(counts)


def run(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    expert_gate_proj: torch.Tensor,
    expert_up_proj: torch.Tensor,
    expert_down_proj: torch.Tensor,
    norm_topk_prob: bool,
) -> torch.Tensor:
    """Routing and experts on bfloat16 values; the sum over experts rounds at every addition.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        gate_weight: [num_experts, hidden_size] bf16, the router.
        expert_gate_proj, expert_up_proj: [num_experts, intermediate_size, hidden_size] bf16.
        expert_down_proj: [num_experts, hidden_size, intermediate_size] bf16.
        norm_topk_prob: whether the chosen experts' weights are scaled to sum to one.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    x = hidden_states.flatten(0, 1)
    logits = F.linear(x, gate_weight)
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32).to(x.dtype)
    weights, experts = probabilities.topk(TOP_K, dim=-1)
    if norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-9)

    output = torch.zeros_like(x)
    # Ascending experts: the order of a token's additions, each of which rounds.
    for expert, chosen in enumerate(assignments_by_expert(experts, gate_weight.shape[0])):
        tokens = chosen // TOP_K
        gate = F.linear(x[tokens], expert_gate_proj[expert])
        up = F.linear(x[tokens], expert_up_proj[expert])
        y = F.linear(gate * torch.sigmoid(gate) * up, expert_down_proj[expert])
        output.index_add_(0, tokens, y * weights.flatten()[chosen, None])
    return output.view_as(hidden_states)
