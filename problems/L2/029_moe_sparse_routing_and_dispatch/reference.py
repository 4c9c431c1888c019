"""Mixture of experts with a bias on the router's probabilities and a shared expert (ERNIE-4.5)."""

import torch
import torch.nn.functional as F

TOP_K = 8


def swiglu(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor
) -> torch.Tensor:
    """SwiGLU feed-forward of [tokens, hidden]; every step rounds to x's dtype."""
    return F.linear(F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight), down_weight)


def assignments_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """For each expert the flat positions in `experts` [tokens, k] that name it, ascending."""
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    return flat.argsort(stable=True).split(counts)


def run(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    e_score_correction_bias: torch.Tensor,
    expert_gate_proj: torch.Tensor,
    expert_up_proj: torch.Tensor,
    expert_down_proj: torch.Tensor,
    shared_gate_proj: torch.Tensor,
    shared_up_proj: torch.Tensor,
    shared_down_proj: torch.Tensor,
    norm_min: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router in float32, experts in bfloat16; every addition of the result rounds.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        gate_weight: [num_experts, hidden_size] f32, the router.
        e_score_correction_bias: [1, num_experts] f32, added to the probabilities.
        expert_gate_proj, expert_up_proj: [num_experts, intermediate_size, hidden_size] bf16.
        expert_down_proj: [num_experts, hidden_size, intermediate_size] bf16.
        shared_gate_proj, shared_up_proj: [shared_intermediate_size, hidden_size] bf16.
        shared_down_proj: [hidden_size, shared_intermediate_size] bf16.
        norm_min: least value of the sum that the weights are divided by.

    Returns:
        The result [batch_size, seq_len, hidden_size] bf16, and the router's logits
        [batch_size * seq_len, num_experts] f32, before softmax and bias.
    """
    x = hidden_states.flatten(0, 1)
    shared = swiglu(x, shared_gate_proj, shared_up_proj, shared_down_proj)

    router_logits = F.linear(x.float(), gate_weight)
    scores = torch.softmax(router_logits, dim=-1) + e_score_correction_bias
    # The biased scores select the experts and weigh them.
    weights, experts = scores.topk(TOP_K, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=norm_min)
    weights = weights.to(x.dtype)

    routed = torch.zeros_like(x)
    # Ascending experts: the order of a token's additions, each of which rounds.
    for expert, chosen in enumerate(assignments_by_expert(experts, gate_weight.shape[0])):
        tokens = chosen // TOP_K
        y = swiglu(
            x[tokens], expert_gate_proj[expert], expert_up_proj[expert], expert_down_proj[expert]
        )
        routed.index_add_(0, tokens, y * weights.flatten()[chosen, None])
    return (routed + shared).view_as(hidden_states), router_logits
