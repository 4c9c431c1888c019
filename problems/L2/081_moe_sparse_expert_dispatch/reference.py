"""Mixture of SwiGLU experts with a biased sigmoid router, and a shared expert, bfloat16."""

import torch
import torch.nn.functional as F

EXPERTS_PER_TOKEN = 8


def swiglu(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor
) -> torch.Tensor:
    """SwiGLU feed-forward; every step rounds to x's dtype."""
    gate = F.silu(F.linear(x, gate_weight))
    return F.linear(gate * F.linear(x, up_weight), down_weight)


def run(
    hidden_states: torch.Tensor,
    router_weight: torch.Tensor,
    expert_gate_weights: torch.Tensor,
    expert_up_weights: torch.Tensor,
    expert_down_weights: torch.Tensor,
    shared_gate_weight: torch.Tensor,
    shared_up_weight: torch.Tensor,
    shared_down_weight: torch.Tensor,
    e_score_correction_bias: torch.Tensor,
    routed_scaling_factor: float,
) -> torch.Tensor:
    """Experts are chosen, and weighted, by score plus bias; the router is float32.

    Experts add to a bfloat16 sum in ascending order, each addition rounded.

    Args:
        hidden_states: [num_tokens, hidden_size] bf16.
        router_weight: [num_experts, hidden_size] bf16.
        expert_gate_weights, expert_up_weights: [num_experts, intermediate, hidden_size] bf16.
        expert_down_weights: [num_experts, hidden_size, intermediate] bf16.
        shared_gate_weight, shared_up_weight: [shared_intermediate, hidden_size] bf16;
            shared_down_weight: [hidden_size, shared_intermediate] bf16.
        e_score_correction_bias: [num_experts] f32.
        routed_scaling_factor: factor on the normalised weights.

    Returns:
        [num_tokens, hidden_size] bf16.
    """
    num_experts = router_weight.shape[0]
    scores = torch.sigmoid(F.linear(hidden_states.float(), router_weight.float()))
    weights, experts = (scores + e_score_correction_bias).topk(EXPERTS_PER_TOKEN, dim=-1)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * routed_scaling_factor
    weights = weights.to(hidden_states.dtype).flatten()

    # Rows are (token, slot) pairs; those of one expert stand together in `order`.
    expert_of_row = experts.flatten()
    order = expert_of_row.argsort(stable=True)
    rows_per_expert = torch.bincount(expert_of_row, minlength=num_experts).tolist()

    output = torch.zeros_like(hidden_states)
    for expert, rows in enumerate(order.split(rows_per_expert)):
        if len(rows) == 0:
            continue
        tokens = rows // EXPERTS_PER_TOKEN  # no token twice
        y = swiglu(
            hidden_states[tokens],
            expert_gate_weights[expert],
            expert_up_weights[expert],
            expert_down_weights[expert],
        )
        output[tokens] += y * weights[rows].unsqueeze(-1)

    return output + swiglu(hidden_states, shared_gate_weight, shared_up_weight, shared_down_weight)
