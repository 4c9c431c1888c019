"""Experts of a mixture whose routing is given: SwiGLU in float32, summed in bfloat16."""

import torch
import torch.nn.functional as F


def assignments_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """For each expert the flat positions in `experts` [tokens, k] that name it, ascending."""
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    return flat.argsort(stable=True).split(counts)


def run(
    hidden_states: torch.Tensor,
    routing_weights: torch.Tensor,
    selected_experts: torch.Tensor,
    gate_proj_weights: torch.Tensor,
    up_proj_weights: torch.Tensor,
    down_proj_weights: torch.Tensor,
) -> torch.Tensor:
    """Expert arithmetic in float32; weighted contributions and every sum round to bfloat16.

    Args:
        hidden_states: [tokens, hidden_size] bf16.
        routing_weights: [tokens, k] f32.
        selected_experts: [tokens, k] int64, distinct within a row.
        gate_proj_weights, up_proj_weights: [num_experts, moe_intermediate_size, hidden_size] bf16.
        down_proj_weights: [num_experts, hidden_size, moe_intermediate_size] bf16.

    Returns:
        [tokens, hidden_size] bf16.
    """
    top_k = selected_experts.shape[1]
    num_experts = gate_proj_weights.shape[0]
    x = hidden_states.float()
    output = torch.zeros_like(hidden_states)
    # Ascending experts: the order of a token's additions, each of which rounds.
    for expert, chosen in enumerate(assignments_by_expert(selected_experts, num_experts)):
        tokens = chosen // top_k
        gate = F.linear(x[tokens], gate_proj_weights[expert].float())
        up = F.linear(x[tokens], up_proj_weights[expert].float())
        y = F.linear(F.silu(gate) * up, down_proj_weights[expert].float())
        contribution = (y * routing_weights.flatten()[chosen, None]).to(output.dtype)
        output.index_add_(0, tokens, contribution)
    return output


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal tokens, small normal weights, and for each token distinct experts at random."""
    axes = axes_and_scalars
    tokens, hidden_size = axes["batch_seq_len"], axes["hidden_size"]
    num_experts, top_k = axes["num_experts"], axes["num_experts_per_tok"]
    intermediate_size = axes["moe_intermediate_size"]

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(std)

    routing_weights = torch.rand(tokens, top_k, device=device)
    permutations = torch.rand(tokens, num_experts, device=device).argsort(dim=-1)
    return {
        "hidden_states": normal(tokens, hidden_size),
        "routing_weights": routing_weights / routing_weights.sum(dim=-1, keepdim=True),
        "selected_experts": permutations[:, :top_k],
        "gate_proj_weights": normal(num_experts, intermediate_size, hidden_size, std=0.02),
        "up_proj_weights": normal(num_experts, intermediate_size, hidden_size, std=0.02),
        "down_proj_weights": normal(num_experts, hidden_size, intermediate_size, std=0.02),
    }
