"""Mixture of experts with renormalised softmax routing; the router's logits are returned too."""

import torch
import torch.nn.functional as F

TOP_K = 8


def silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU as a quotient of two values in x's dtype; the denominator rounds before the division."""
    return x / (1 + torch.exp(-x.float())).to(x.dtype)


def assignments_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """For each expert the flat positions in `experts` [tokens, k] that name it, ascending."""
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    return flat.argsort(stable=True).split(counts)


def run(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    expert_gate_proj_weights: torch.Tensor,
    expert_up_proj_weights: torch.Tensor,
    expert_down_proj_weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing weights in float32, then rounded; experts in bfloat16, every addition rounds.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        gate_weight: [num_experts, hidden_size] bf16, the router.
        expert_gate_proj_weights, expert_up_proj_weights: [num_experts, moe_intermediate_size,
            hidden_size] bf16.
        expert_down_proj_weights: [num_experts, hidden_size, moe_intermediate_size] bf16.

    Returns:
        The weighted sum [batch_size, seq_len, hidden_size] and the router's logits
        [batch_size * seq_len, num_experts], bf16.
    """
    x = hidden_states.flatten(0, 1)
    router_logits = F.linear(x, gate_weight)
    weights, experts = torch.softmax(router_logits.float(), dim=-1).topk(TOP_K, dim=-1)
    weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)

    output = torch.zeros_like(x)
    # Ascending experts: the order of a token's additions, each of which rounds.
    for expert, chosen in enumerate(assignments_by_expert(experts, gate_weight.shape[0])):
        tokens = chosen // TOP_K
        gate = F.linear(x[tokens], expert_gate_proj_weights[expert])
        up = F.linear(x[tokens], expert_up_proj_weights[expert])
        y = F.linear(silu(gate) * up, expert_down_proj_weights[expert])
        output.index_add_(0, tokens, y * weights.flatten()[chosen, None])
    return output.view_as(hidden_states), router_logits
