"""Backward of a softmax top-k router: gradients of the tokens and of the router's matrix."""

import torch


def run(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    router_logits: torch.Tensor,
    routing_probs: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights_sum: torch.Tensor,
    grad_routing_weights: torch.Tensor,
    grad_expert_mask: torch.Tensor,
    grad_router_logits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Down to the logits in float32, one rounding there, then two products in bfloat16.

    Args:
        hidden_states: [num_tokens, hidden_size] bf16.
        gate_weight: [num_experts, hidden_size] bf16.
        router_logits: [num_tokens, num_experts] bf16; not needed.
        routing_probs: [num_tokens, num_experts] f32, their softmax.
        selected_experts: [num_tokens, top_k] int64, distinct within a row.
        routing_weights_sum: [num_tokens, 1] f32, sum of the selected probabilities.
        grad_routing_weights: [num_tokens, top_k] bf16, of the renormalised weights.
        grad_expert_mask: [num_experts, top_k, num_tokens] bf16, read at the selected experts.
        grad_router_logits: [num_tokens, num_experts] bf16, added to the probabilities' gradient.

    Returns:
        Gradients of hidden_states and gate_weight, bf16.
    """
    num_tokens, top_k = selected_experts.shape

    # Through the renormalisation of the selected probabilities.
    grad = grad_routing_weights.float()
    selected_probs = routing_probs.gather(1, selected_experts)
    projection = (grad * selected_probs / routing_weights_sum).sum(dim=-1, keepdim=True)
    grad_selected = grad / routing_weights_sum - projection / routing_weights_sum

    slot = torch.arange(top_k, device=grad.device)
    token = torch.arange(num_tokens, device=grad.device).unsqueeze(1)
    grad_selected = grad_selected + grad_expert_mask[selected_experts, slot, token].float()
    grad_probs = torch.zeros_like(routing_probs).scatter(1, selected_experts, grad_selected)
    grad_probs = grad_probs + grad_router_logits.float()

    # Through the softmax.
    mean = (grad_probs * routing_probs).sum(dim=-1, keepdim=True)
    grad_logits = (routing_probs * (grad_probs - mean)).to(hidden_states.dtype)
    return grad_logits @ gate_weight, grad_logits.T @ hidden_states


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """A consistent forward (softmax, top k and its sum) and small normal gradients."""
    axes = axes_and_scalars
    num_tokens, hidden_size = axes["num_tokens"], axes["hidden_size"]
    num_experts, top_k = axes["num_experts"], axes["top_k"]

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(std)

    router_logits = normal(num_tokens, num_experts)
    routing_probs = torch.softmax(router_logits.float(), dim=-1)
    largest, selected_experts = routing_probs.topk(top_k, dim=-1)
    return {
        "hidden_states": normal(num_tokens, hidden_size),
        "gate_weight": normal(num_experts, hidden_size, std=0.02),
        "router_logits": router_logits,
        "routing_probs": routing_probs,
        "selected_experts": selected_experts,
        "routing_weights_sum": largest.sum(dim=-1, keepdim=True),
        "grad_routing_weights": normal(num_tokens, top_k, std=0.1),
        "grad_expert_mask": normal(num_experts, top_k, num_tokens, std=0.01),
        "grad_router_logits": normal(num_tokens, num_experts, std=0.1),
    }
