"""Routed mixture of SwiGLU experts."""

import torch
import torch.nn.functional as F


def run(
    hidden_states: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_proj_weights: torch.Tensor,
    up_proj_weights: torch.Tensor,
    down_proj_weights: torch.Tensor,
) -> torch.Tensor:
    """Each expert on its tokens, in ascending order of experts; every step rounds to bfloat16.

    Args:
        hidden_states: [num_tokens, hidden_size] bf16.
        expert_ids: [num_tokens, num_experts_per_tok] int64, no expert twice for a token.
        expert_weights: [num_tokens, num_experts_per_tok] bf16.
        gate_proj_weights, up_proj_weights: [num_experts, intermediate_size, hidden_size] bf16.
        down_proj_weights: [num_experts, hidden_size, intermediate_size] bf16.

    Returns:
        [num_tokens, hidden_size] bf16.
    """
    num_experts, experts_per_token = gate_proj_weights.shape[0], expert_ids.shape[1]
    flat_ids = expert_ids.flatten()
    order = flat_ids.argsort(stable=True)  # the expert's (token, slot) pairs side by side
    counts = flat_ids.bincount(minlength=num_experts).tolist()

    output = torch.zeros_like(hidden_states)
    for expert, pairs in enumerate(order.split(counts)):
        if pairs.numel() == 0:
            continue
        tokens = pairs // experts_per_token
        x = hidden_states[tokens]
        gate = F.silu(F.linear(x, gate_proj_weights[expert]))
        up = F.linear(x, up_proj_weights[expert])
        y = F.linear(gate * up, down_proj_weights[expert])
        output.index_add_(0, tokens, y * expert_weights.flatten()[pairs].unsqueeze(-1))
    return output


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Uniform routing to distinct experts, positive weights that add up to one."""
    num_tokens, num_experts = axes_and_scalars["num_tokens"], axes_and_scalars["num_experts"]
    hidden_size = axes_and_scalars["hidden_size"]
    intermediate_size = axes_and_scalars["intermediate_size"]
    per_token = axes_and_scalars["num_experts_per_tok"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    permutations = torch.rand(num_tokens, num_experts, device=device).argsort(dim=-1)
    weights = torch.rand(num_tokens, per_token, dtype=torch.bfloat16, device=device) + 0.1
    return {
        "hidden_states": normal(num_tokens, hidden_size),
        "expert_ids": permutations[:, :per_token].contiguous(),
        "expert_weights": weights / weights.sum(dim=-1, keepdim=True),
        "gate_proj_weights": normal(num_experts, intermediate_size, hidden_size).mul_(0.02),
        "up_proj_weights": normal(num_experts, intermediate_size, hidden_size).mul_(0.02),
        "down_proj_weights": normal(num_experts, hidden_size, intermediate_size).mul_(0.02),
    }
