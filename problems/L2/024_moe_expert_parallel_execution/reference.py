"""Experts of a mixture whose routing is given, with an accumulator in float32."""

import torch
import torch.nn.functional as F


def assignments_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """For each expert the flat positions in `experts` [tokens, k] that name it, ascending."""
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    return flat.argsort(stable=True).split(counts)


def run(
    hidden_states: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_proj_weights: torch.Tensor,
    up_proj_weights: torch.Tensor,
    down_proj_weights: torch.Tensor,
) -> torch.Tensor:
    """SwiGLU experts, weights and sum in float32; the only rounding is at the end.

    Args:
        hidden_states: [num_tokens, hidden_size] bf16.
        topk_indices: [num_tokens, k] int64; a row may name an expert more than once.
        topk_weights: [num_tokens, k] bf16.
        gate_proj_weights, up_proj_weights: [n_routed_experts, moe_intermediate_size, hidden_size]
            bf16.
        down_proj_weights: [n_routed_experts, hidden_size, moe_intermediate_size] bf16.

    Returns:
        [num_tokens, hidden_size] bf16.
    """
    top_k = topk_indices.shape[1]
    num_experts = gate_proj_weights.shape[0]
    x = hidden_states.float()
    weights = topk_weights.float().flatten()
    output = torch.zeros_like(x)
    for expert, chosen in enumerate(assignments_by_expert(topk_indices, num_experts)):
        tokens = chosen // top_k
        gate = F.linear(x[tokens], gate_proj_weights[expert].float())
        up = F.linear(x[tokens], up_proj_weights[expert].float())
        y = F.linear(F.silu(gate) * up, down_proj_weights[expert].float())
        output.index_add_(0, tokens, y * weights[chosen, None])
    return output.to(hidden_states.dtype)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal tokens, small normal weights, and experts drawn with replacement."""
    axes = axes_and_scalars
    num_tokens, hidden_size = axes["num_tokens"], axes["hidden_size"]
    num_experts, top_k = axes["n_routed_experts"], axes["num_experts_per_tok"]
    intermediate_size = axes["moe_intermediate_size"]

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(std)

    routing_logits = normal(num_tokens, top_k)
    return {
        "hidden_states": normal(num_tokens, hidden_size),
        "topk_indices": torch.randint(0, num_experts, (num_tokens, top_k), device=device),
        "topk_weights": torch.softmax(routing_logits.float(), dim=-1).bfloat16(),
        "gate_proj_weights": normal(num_experts, intermediate_size, hidden_size, std=0.02),
        "up_proj_weights": normal(num_experts, intermediate_size, hidden_size, std=0.02),
        "down_proj_weights": normal(num_experts, hidden_size, intermediate_size, std=0.02),
    }
