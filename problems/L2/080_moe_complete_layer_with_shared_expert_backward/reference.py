"""Partial backward of a mixture-of-experts layer: shared expert exact, router by a surrogate."""

import torch
import torch.nn.functional as F


def run(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    router_weight: torch.Tensor,
    e_score_correction_bias: torch.Tensor,
    router_logits: torch.Tensor,
    scores: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    score_mask: torch.Tensor,
    shared_expert_gate_weight: torch.Tensor,
    shared_expert_up_weight: torch.Tensor,
    shared_expert_down_weight: torch.Tensor,
    shared_gate_output: torch.Tensor,
    shared_up_output: torch.Tensor,
    shared_activated: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The routed experts have no part in it. T tokens, H hidden_size, I intermediate, E experts.

    Args:
        grad_output, hidden_states: [T, H] bf16.
        router_weight: [E, H] bf16.
        e_score_correction_bias, router_logits: not needed.
        scores: [T, E] f32, sigmoid of the logits.
        topk_indices: [T, top_k] int64; topk_weights: [T, top_k] f32.
        score_mask: [T, E] f32, factor on the router's gradient.
        shared_expert_gate_weight, shared_expert_up_weight: [I, H] bf16;
            shared_expert_down_weight: [H, I] bf16.
        shared_gate_output, shared_up_output: [T, I] bf16, before the activation.
        shared_activated: [T, I] bf16, silu(gate) * up.

    Returns:
        Gradients of hidden_states (bf16), router_weight (f32) and the gate, up and down weights of
        the shared expert (bf16).
    """
    dtype = grad_output.dtype

    def weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Product over the tokens in float32."""
        return grad.float().T @ x.float()

    # Shared expert; the derivative of SiLU is evaluated in float32.
    grad_activated = grad_output @ shared_expert_down_weight
    grad_silu = grad_activated * shared_up_output
    grad_up = grad_activated * F.silu(shared_gate_output)
    gate = shared_gate_output.float()
    sigmoid = torch.sigmoid(gate)
    grad_gate = (grad_silu.float() * (sigmoid * (1 + gate * (1 - sigmoid)))).to(dtype)
    grad_from_up = grad_up @ shared_expert_up_weight
    grad_from_gate = grad_gate @ shared_expert_gate_weight

    # Router: each slot's weight is credited with an equal share of the token's squared gradient,
    # taken back through the normalisation of the weights and the sigmoid.
    top_k = topk_weights.shape[1]
    share = grad_output.float().square().sum(dim=-1, keepdim=True) / top_k
    grad_weights = share.expand_as(topk_weights)
    total = topk_weights.sum(dim=-1, keepdim=True) + 1e-20
    projection = (grad_weights * topk_weights).sum(dim=-1, keepdim=True) / total
    grad_chosen = (grad_weights - projection) / total
    grad_scores = torch.zeros_like(scores).scatter_add(1, topk_indices, grad_chosen) * score_mask
    grad_logits = grad_scores * scores * (1 - scores)
    grad_from_router = grad_logits.to(dtype) @ router_weight

    return (
        grad_from_up + grad_from_gate + grad_from_router,
        weight_gradient(grad_logits, hidden_states),
        weight_gradient(grad_gate, hidden_states).to(dtype),
        weight_gradient(grad_up, hidden_states).to(dtype),
        weight_gradient(grad_output, shared_activated).to(dtype),
    )


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """All that one forward pass of router and shared expert saves."""
    axes = axes_and_scalars
    tokens, hidden = axes["batch_seq_len"], axes["hidden_size"]
    inner, experts = axes["moe_intermediate_size"], axes["n_routed_experts"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    hidden_states = normal(tokens, hidden).bfloat16()
    router_weight = (0.02 * normal(experts, hidden)).bfloat16()
    gate_weight = (0.02 * normal(inner, hidden)).bfloat16()
    up_weight = (0.02 * normal(inner, hidden)).bfloat16()
    down_weight = (0.02 * normal(hidden, inner)).bfloat16()

    correction_bias = torch.zeros(experts, device=device)
    router_logits = F.linear(hidden_states.float(), router_weight.float())
    scores = torch.sigmoid(router_logits)
    choice = scores + correction_bias
    topk_weights, topk_indices = choice.topk(axes["num_experts_per_tok"], dim=-1, sorted=False)
    gate_output = F.linear(hidden_states, gate_weight)
    up_output = F.linear(hidden_states, up_weight)
    return {
        "grad_output": normal(tokens, hidden).bfloat16(),
        "hidden_states": hidden_states,
        "router_weight": router_weight,
        "e_score_correction_bias": correction_bias,
        "router_logits": router_logits,
        "scores": scores,
        "topk_indices": topk_indices,
        "topk_weights": topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20),
        "score_mask": torch.ones(tokens, experts, device=device),
        "shared_expert_gate_weight": gate_weight,
        "shared_expert_up_weight": up_weight,
        "shared_expert_down_weight": down_weight,
        "shared_gate_output": gate_output,
        "shared_up_output": up_output,
        "shared_activated": F.silu(gate_output.float()).bfloat16() * up_output,
    }
