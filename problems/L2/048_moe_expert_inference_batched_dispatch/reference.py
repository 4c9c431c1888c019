"""Mixture of SwiGLU experts with given routing, bfloat16 tensors and float32 arithmetic."""

import torch
import torch.nn.functional as F


def run(
    hidden_states: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weight: torch.Tensor,
    gate_weights: torch.Tensor,
    up_weights: torch.Tensor,
    down_weights: torch.Tensor,
) -> torch.Tensor:
    """Float32 between the inputs and the result.

    Args:
        hidden_states: [num_tokens, hidden_size] bf16.
        topk_idx: [num_tokens, top_k] int64, the token's experts.
        topk_weight: [num_tokens, top_k] bf16.
        gate_weights, up_weights: [num_experts, intermediate_size, hidden_size] bf16.
        down_weights: [num_experts, hidden_size, intermediate_size] bf16.

    Returns:
        [num_tokens, hidden_size] bf16.
    """
    num_tokens, top_k = topk_idx.shape
    num_experts = gate_weights.shape[0]
    x_all = hidden_states.float()

    # Rows are (token, slot) pairs; those of one expert stand together in `order`.
    expert_of_row = topk_idx.flatten()
    order = expert_of_row.argsort(stable=True)
    rows_per_expert = torch.bincount(expert_of_row, minlength=num_experts).tolist()

    y = x_all.new_empty(num_tokens * top_k, x_all.shape[1])
    for expert, rows in enumerate(order.split(rows_per_expert)):
        x = x_all[rows // top_k]
        gate = F.silu(F.linear(x, gate_weights[expert].float()))
        up = F.linear(x, up_weights[expert].float())
        y[rows] = F.linear(gate * up, down_weights[expert].float())

    weighted = y.view(num_tokens, top_k, -1) * topk_weight.float().unsqueeze(-1)
    return weighted.sum(dim=1).to(hidden_states.dtype)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Distinct random experts for each token, normalised uniform weights, normal tensors."""
    axes = axes_and_scalars
    tokens, top_k = axes["num_tokens"], axes["num_experts_per_tok"]
    hidden, inner, experts = axes["hidden_size"], axes["intermediate_size"], axes["num_experts"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    permutations = torch.rand(tokens, experts, device=device).argsort(dim=-1)
    topk_weight = torch.rand(tokens, top_k, device=device)
    topk_weight = topk_weight / topk_weight.sum(dim=-1, keepdim=True)
    return {
        "hidden_states": normal(tokens, hidden),
        "topk_idx": permutations[:, :top_k].contiguous(),
        "topk_weight": topk_weight.bfloat16(),
        "gate_weights": normal(experts, inner, hidden).mul_(0.02),
        "up_weights": normal(experts, inner, hidden).mul_(0.02),
        "down_weights": normal(experts, hidden, inner).mul_(0.02),
    }
