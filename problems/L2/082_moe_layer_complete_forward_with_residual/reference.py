"""Mixture of SwiGLU experts summed in float32, with a biased sigmoid router and a shared expert."""

import torch
import torch.nn.functional as F

EXPERTS_PER_TOKEN = 8


def swiglu(
    x: torch.Tensor, gate_proj: torch.Tensor, up_proj: torch.Tensor, down_proj: torch.Tensor
) -> torch.Tensor:
    """SwiGLU feed-forward; every step rounds to x's dtype."""
    gate = F.silu(F.linear(x, gate_proj))
    return F.linear(gate * F.linear(x, up_proj), down_proj)


def run(
    hidden_states: torch.Tensor,
    router_weight: torch.Tensor,
    e_score_correction_bias: torch.Tensor,
    expert_gate_projs: torch.Tensor,
    expert_up_projs: torch.Tensor,
    expert_down_projs: torch.Tensor,
    shared_gate_proj_weight: torch.Tensor,
    shared_up_proj_weight: torch.Tensor,
    shared_down_proj_weight: torch.Tensor,
    routed_scaling_factor: float,
    norm_topk_prob: bool,
) -> torch.Tensor:
    """Experts are chosen, and weighted, by score plus bias; router and weighted sum are float32.

    The input is not added to the result.

    Args:
        hidden_states: [tokens, hidden_size] bf16.
        router_weight: [num_experts, hidden_size] bf16.
        e_score_correction_bias: [num_experts] f32.
        expert_gate_projs, expert_up_projs: [num_experts, intermediate, hidden_size] bf16.
        expert_down_projs: [num_experts, hidden_size, intermediate] bf16.
        shared_gate_proj_weight, shared_up_proj_weight: [shared_intermediate, hidden_size] bf16;
            shared_down_proj_weight: [hidden_size, shared_intermediate] bf16.
        routed_scaling_factor: factor on the weights.
        norm_topk_prob: divide a token's weights by their sum.

    Returns:
        [tokens, hidden_size] bf16.
    """
    num_experts = router_weight.shape[0]
    scores = torch.sigmoid(F.linear(hidden_states.float(), router_weight.float()))
    weights, experts = (scores + e_score_correction_bias).topk(EXPERTS_PER_TOKEN, dim=-1)
    if norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    weights = (weights * routed_scaling_factor).flatten()

    # Rows are (token, slot) pairs; those of one expert stand together in `order`.
    expert_of_row = experts.flatten()
    order = expert_of_row.argsort(stable=True)
    rows_per_expert = torch.bincount(expert_of_row, minlength=num_experts).tolist()

    routed = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert, rows in enumerate(order.split(rows_per_expert)):
        if len(rows) == 0:
            continue
        tokens = rows // EXPERTS_PER_TOKEN  # no token twice
        y = swiglu(
            hidden_states[tokens],
            expert_gate_projs[expert],
            expert_up_projs[expert],
            expert_down_projs[expert],
        )
        routed[tokens] += y.float() * weights[rows].unsqueeze(-1)

    shared = swiglu(
        hidden_states, shared_gate_proj_weight, shared_up_proj_weight, shared_down_proj_weight
    )
    return routed.to(hidden_states.dtype) + shared
