"""Mixture of experts with clamped, interleaved gated units, given routing, float32."""

import torch

GATE_SLOPE = 1.702
LIMIT = 7.0


def run(
    hidden_states: torch.Tensor,
    router_indices: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    gate_up_proj_bias: torch.Tensor,
    down_proj: torch.Tensor,
    down_proj_bias: torch.Tensor,
) -> torch.Tensor:
    """Sum over a token's slots; an expert chosen twice counts twice.

    Args:
        hidden_states: [num_tokens, hidden_size] f32.
        router_indices: [num_tokens, slots] int64; num_experts stands for no expert.
        routing_weights: [num_tokens, num_experts] f32, read at the chosen experts.
        gate_up_proj: [num_experts, hidden_size, 2 * intermediate] f32, gate in the even columns
            and up in the odd ones; gate_up_proj_bias: [num_experts, 2 * intermediate] f32.
        down_proj: [num_experts, intermediate, hidden_size] f32; down_proj_bias:
            [num_experts, hidden_size] f32.

    Returns:
        [num_tokens, hidden_size] f32.
    """
    num_tokens, slots = router_indices.shape
    num_experts, hidden_size = down_proj_bias.shape

    # Rows are (token, slot) pairs; those of one expert stand together in `order`, and those
    # without an expert at its end.
    expert_of_row = router_indices.flatten()
    order = expert_of_row.argsort(stable=True)
    rows_per_expert = torch.bincount(expert_of_row, minlength=num_experts + 1).tolist()

    contributions = hidden_states.new_zeros(num_tokens * slots, hidden_size)
    for expert, rows in enumerate(order.split(rows_per_expert)[:num_experts]):
        tokens = rows // slots
        z = hidden_states[tokens] @ gate_up_proj[expert] + gate_up_proj_bias[expert]
        gate = z[:, 0::2].clamp(max=LIMIT)
        up = z[:, 1::2].clamp(-LIMIT, LIMIT)
        inner = (up + 1) * (gate * torch.sigmoid(GATE_SLOPE * gate))
        y = inner @ down_proj[expert] + down_proj_bias[expert]
        contributions[rows] = routing_weights[tokens, expert].unsqueeze(-1) * y
    return contributions.view(num_tokens, slots, hidden_size).sum(dim=1)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Experts drawn with replacement, weights of a softmax unrelated to them, zero biases."""
    axes = axes_and_scalars
    tokens, slots = axes["num_tokens"], axes["num_experts_per_tok"]
    experts, hidden = axes["num_local_experts"], axes["hidden_size"]
    inner = axes["intermediate_size"]
    logits = torch.randn(tokens, experts, device=device)
    return {
        "hidden_states": torch.randn(tokens, hidden, device=device),
        "router_indices": torch.randint(0, experts, (tokens, slots), device=device),
        "routing_weights": torch.softmax(logits, dim=-1),
        "gate_up_proj": torch.randn(experts, hidden, 2 * inner, device=device).mul_(0.02),
        "gate_up_proj_bias": torch.zeros(experts, 2 * inner, device=device),
        "down_proj": torch.randn(experts, inner, hidden, device=device).mul_(0.02),
        "down_proj_bias": torch.zeros(experts, hidden, device=device),
    }
