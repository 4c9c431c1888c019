"""Experts of a capacity-limited mixture: what exceeds an expert's capacity is dropped."""

import torch
import torch.nn.functional as F

CAPACITY_FACTOR = 1.25


def assignments_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """For each expert the flat positions in `experts` [tokens, k] that name it, ascending."""
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    return flat.argsort(stable=True).split(counts)


def run(
    hidden_states: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights: torch.Tensor,
    expert_gate_weights: torch.Tensor,
    expert_up_weights: torch.Tensor,
    expert_down_weights: torch.Tensor,
) -> torch.Tensor:
    """SwiGLU experts on the tokens they admit, weighted and summed in bfloat16.

    An expert admits its first `capacity` assignments in token order. The others contribute
    nothing, and the weights of what is left are not scaled up.

    Args:
        hidden_states: [num_tokens, hidden_size] bf16.
        selected_experts: [num_tokens, k] int64, distinct within a row.
        routing_weights: [num_tokens, k] bf16.
        expert_gate_weights, expert_up_weights: [num_experts, hidden_size, moe_intermediate_size]
            bf16, input features first.
        expert_down_weights: [num_experts, moe_intermediate_size, hidden_size] bf16.

    Returns:
        [num_tokens, hidden_size] bf16.
    """
    num_tokens, top_k = selected_experts.shape
    num_experts = expert_gate_weights.shape[0]
    capacity = max(int(num_tokens * top_k / num_experts * CAPACITY_FACTOR), 1)

    output = torch.zeros_like(hidden_states)
    for expert, chosen in enumerate(assignments_by_expert(selected_experts, num_experts)):
        admitted = chosen[:capacity]
        tokens = admitted // top_k
        x = hidden_states[tokens]
        gate, up = x @ expert_gate_weights[expert], x @ expert_up_weights[expert]
        y = (F.silu(gate) * up) @ expert_down_weights[expert]
        output.index_add_(0, tokens, routing_weights.flatten()[admitted, None] * y)
    return output


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal tokens and scaled normal weights; for each token distinct experts at random."""
    axes = axes_and_scalars
    num_tokens, hidden_size = axes["num_tokens"], axes["hidden_size"]
    num_experts, top_k = axes["num_experts"], axes["num_experts_per_tok"]
    intermediate_size = axes["moe_intermediate_size"]

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(std)

    expert_shape = (num_experts, hidden_size, intermediate_size)
    permutations = torch.rand(num_tokens, num_experts, device=device).argsort(dim=-1)
    routing_logits = normal(num_tokens, top_k)
    return {
        "hidden_states": normal(num_tokens, hidden_size),
        "selected_experts": permutations[:, :top_k],
        "routing_weights": torch.softmax(routing_logits.float(), dim=-1).bfloat16(),
        "expert_gate_weights": normal(*expert_shape, std=hidden_size**-0.5),
        "expert_up_weights": normal(*expert_shape, std=hidden_size**-0.5),
        "expert_down_weights": normal(
            num_experts, intermediate_size, hidden_size, std=intermediate_size**-0.5
        ),
    }
