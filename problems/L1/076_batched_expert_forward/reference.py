"""Dense mixture of experts: every token through every expert, summed by routing weight."""

import torch


def run(
    hidden_states: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    gate_up_proj_bias: torch.Tensor,
    down_proj: torch.Tensor,
    down_proj_bias: torch.Tensor,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """Clamped gated units, (up + 1) * gate * sigmoid(alpha * gate), in float32.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] f32.
        routing_weights: [batch_size * seq_len, num_experts] f32.
        gate_up_proj: [num_experts, hidden_size, 2 * expert_dim] f32; gate in the even columns, up
            in the odd ones. gate_up_proj_bias: [num_experts, 2 * expert_dim] f32.
        down_proj: [num_experts, expert_dim, hidden_size] f32.
        down_proj_bias: [num_experts, hidden_size] f32.
        alpha: factor within the sigmoid.
        limit: the gate's upper bound, and the up branch's bound on both sides.

    Returns:
        [batch_size, seq_len, hidden_size] f32.
    """
    num_experts = gate_up_proj.shape[0]
    tokens = hidden_states.flatten(0, 1).expand(num_experts, -1, -1)
    gate_up = torch.baddbmm(gate_up_proj_bias.unsqueeze(1), tokens, gate_up_proj)
    gate = gate_up[..., ::2].clamp(max=limit)
    up = gate_up[..., 1::2].clamp(-limit, limit)
    del gate_up  # 12 GB at the largest size
    activated = (up + 1.0) * (gate * torch.sigmoid(alpha * gate))
    expert_outputs = torch.baddbmm(down_proj_bias.unsqueeze(1), activated, down_proj)
    output = torch.einsum("te,eth->th", routing_weights, expert_outputs)
    return output.view_as(hidden_states)
