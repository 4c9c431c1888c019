"""Backward of routed SwiGLU experts: of the tokens, the routing weights and all matrices."""

import torch
import torch.nn.functional as F


def assignments_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """For each expert the flat positions in `experts` [tokens, k] that name it, ascending."""
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    return flat.argsort(stable=True).split(counts)


def run(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_weights: torch.Tensor,
    up_weights: torch.Tensor,
    down_weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All in float32, expert by expert, with the forward computed again.

    Args:
        grad_output, hidden_states: [num_tokens, hidden_size] f32.
        topk_indices: [num_tokens, k] int64, distinct within a row.
        topk_weights: [num_tokens, k] f32.
        gate_weights, up_weights: [n_routed_experts, moe_intermediate_size, hidden_size] f32.
        down_weights: [n_routed_experts, hidden_size, moe_intermediate_size] f32.

    Returns:
        Gradients of hidden_states, topk_weights, gate_weights, up_weights and down_weights, f32.
    """
    top_k = topk_indices.shape[1]
    num_experts = gate_weights.shape[0]
    grad_hidden_states = torch.zeros_like(hidden_states)
    grad_topk_weights = torch.zeros_like(topk_weights)
    # The matrices of experts without tokens have gradient zero.
    grad_gate_weights = torch.zeros_like(gate_weights)
    grad_up_weights = torch.zeros_like(up_weights)
    grad_down_weights = torch.zeros_like(down_weights)

    for expert, chosen in enumerate(assignments_by_expert(topk_indices, num_experts)):
        tokens = chosen // top_k
        x, grad = hidden_states[tokens], grad_output[tokens]
        gate_weight, up_weight = gate_weights[expert], up_weights[expert]
        down_weight = down_weights[expert]

        gate, up = F.linear(x, gate_weight), F.linear(x, up_weight)
        sigmoid = torch.sigmoid(gate)
        activated = gate * sigmoid
        y = F.linear(activated * up, down_weight)

        grad_topk_weights.view(-1)[chosen] = (grad * y).sum(dim=-1)
        grad_y = grad * topk_weights.flatten()[chosen, None]
        grad_down_weights[expert] = grad_y.T @ (activated * up)
        grad_product = grad_y @ down_weight
        grad_up = grad_product * activated
        grad_gate = grad_product * up * (sigmoid * (1 + gate * (1 - sigmoid)))
        grad_gate_weights[expert] = grad_gate.T @ x
        grad_up_weights[expert] = grad_up.T @ x
        grad_hidden_states.index_add_(0, tokens, grad_gate @ gate_weight + grad_up @ up_weight)
    return (
        grad_hidden_states,
        grad_topk_weights,
        grad_gate_weights,
        grad_up_weights,
        grad_down_weights,
    )


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal tokens and gradients, small normal weights, distinct experts at random."""
    axes = axes_and_scalars
    num_tokens, hidden_size = axes["num_tokens"], axes["hidden_size"]
    num_experts, top_k = axes["n_routed_experts"], axes["num_experts_per_tok"]
    intermediate_size = axes["moe_intermediate_size"]

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=device).mul_(std)

    permutations = torch.rand(num_tokens, num_experts, device=device).argsort(dim=-1)
    return {
        "grad_output": normal(num_tokens, hidden_size),
        "hidden_states": normal(num_tokens, hidden_size),
        "topk_indices": permutations[:, :top_k],
        "topk_weights": torch.softmax(normal(num_tokens, top_k), dim=-1),
        "gate_weights": normal(num_experts, intermediate_size, hidden_size, std=0.02),
        "up_weights": normal(num_experts, intermediate_size, hidden_size, std=0.02),
        "down_weights": normal(num_experts, hidden_size, intermediate_size, std=0.02),
    }
