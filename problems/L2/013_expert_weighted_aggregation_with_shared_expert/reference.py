"""Routed SwiGLU experts plus a gated expert that every token shares (Qwen3-Next)."""

import torch
import torch.nn.functional as F


def silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU as a quotient of two values in x's dtype; the denominator rounds before the division."""
    return x / (1 + torch.exp(-x.float())).to(x.dtype)


def swiglu(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor
) -> torch.Tensor:
    """SwiGLU feed-forward of [tokens, hidden]; every step rounds to x's dtype."""
    return F.linear(silu(F.linear(x, gate_weight)) * F.linear(x, up_weight), down_weight)


def assignments_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """For each expert the flat positions in `experts` [tokens, k] that name it, ascending."""
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    return flat.argsort(stable=True).split(counts)


def run(
    hidden_states: torch.Tensor,
    routing_weights: torch.Tensor,
    selected_experts: torch.Tensor,
    expert_gate_proj_weights: torch.Tensor,
    expert_up_proj_weights: torch.Tensor,
    expert_down_proj_weights: torch.Tensor,
    shared_expert_gate_proj_weight: torch.Tensor,
    shared_expert_up_proj_weight: torch.Tensor,
    shared_expert_down_proj_weight: torch.Tensor,
    shared_expert_gate_weight: torch.Tensor,
) -> torch.Tensor:
    """All in bfloat16 with float32 accumulation inside products; every addition rounds.

    Args:
        hidden_states: [tokens, hidden_size] bf16.
        routing_weights: [tokens, k] bf16.
        selected_experts: [tokens, k] int64, distinct within a row.
        expert_gate_proj_weights, expert_up_proj_weights: [num_experts, moe_intermediate_size,
            hidden_size] bf16.
        expert_down_proj_weights: [num_experts, hidden_size, moe_intermediate_size] bf16.
        shared_expert_gate_proj_weight, shared_expert_up_proj_weight:
            [shared_expert_intermediate_size, hidden_size] bf16.
        shared_expert_down_proj_weight: [hidden_size, shared_expert_intermediate_size] bf16.
        shared_expert_gate_weight: [1, hidden_size] bf16.

    Returns:
        [tokens, hidden_size] bf16.
    """
    top_k = selected_experts.shape[1]
    num_experts = expert_gate_proj_weights.shape[0]
    routed = torch.zeros_like(hidden_states)
    # Ascending experts: the order of a token's additions, each of which rounds.
    for expert, chosen in enumerate(assignments_by_expert(selected_experts, num_experts)):
        tokens = chosen // top_k
        y = swiglu(
            hidden_states[tokens],
            expert_gate_proj_weights[expert],
            expert_up_proj_weights[expert],
            expert_down_proj_weights[expert],
        )
        routed.index_add_(0, tokens, y * routing_weights.flatten()[chosen, None])

    shared = swiglu(
        hidden_states,
        shared_expert_gate_proj_weight,
        shared_expert_up_proj_weight,
        shared_expert_down_proj_weight,
    )
    shared_gate = torch.sigmoid(F.linear(hidden_states, shared_expert_gate_weight))
    return routed + shared_gate * shared


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal tokens, small normal weights, and for each token distinct experts at random."""
    axes = axes_and_scalars
    tokens, hidden_size = axes["batch_seq_len"], axes["hidden_size"]
    num_experts, top_k = axes["num_experts"], axes["num_experts_per_tok"]
    routed_size = axes["moe_intermediate_size"]
    shared_size = axes["shared_expert_intermediate_size"]

    def normal(*shape: int, std: float = 0.02) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(std)

    routing_weights = torch.rand(tokens, top_k, dtype=torch.bfloat16, device=device)
    permutations = torch.rand(tokens, num_experts, device=device).argsort(dim=-1)
    return {
        "hidden_states": normal(tokens, hidden_size, std=1.0),
        "routing_weights": routing_weights / routing_weights.sum(dim=-1, keepdim=True),
        "selected_experts": permutations[:, :top_k],
        "expert_gate_proj_weights": normal(num_experts, routed_size, hidden_size),
        "expert_up_proj_weights": normal(num_experts, routed_size, hidden_size),
        "expert_down_proj_weights": normal(num_experts, hidden_size, routed_size),
        "shared_expert_gate_proj_weight": normal(shared_size, hidden_size),
        "shared_expert_up_proj_weight": normal(shared_size, hidden_size),
        "shared_expert_down_proj_weight": normal(hidden_size, shared_size),
        "shared_expert_gate_weight": normal(1, hidden_size),
    }
