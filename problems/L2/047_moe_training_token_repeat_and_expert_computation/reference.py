"""Mixture of SwiGLU experts with given routing, float16."""

import torch
import torch.nn.functional as F


def run(
    hidden_states: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weight: torch.Tensor,
    expert_gate_projs: torch.Tensor,
    expert_up_projs: torch.Tensor,
    expert_down_projs: torch.Tensor,
) -> torch.Tensor:
    """Each product rounds to float16; the weighted slots of a token are summed in float32.

    Args:
        hidden_states: [tokens, hidden_size] f16.
        topk_idx: [tokens, top_k] int64, the token's experts.
        topk_weight: [tokens, top_k] f16.
        expert_gate_projs, expert_up_projs: [num_experts, intermediate_size, hidden_size] f16.
        expert_down_projs: [num_experts, hidden_size, intermediate_size] f16.

    Returns:
        [tokens, hidden_size] f16.
    """
    tokens, top_k = topk_idx.shape
    num_experts = expert_gate_projs.shape[0]

    # Rows are (token, slot) pairs; those of one expert stand together in `order`.
    expert_of_row = topk_idx.flatten()
    order = expert_of_row.argsort(stable=True)
    rows_per_expert = torch.bincount(expert_of_row, minlength=num_experts).tolist()

    y = hidden_states.new_empty(tokens * top_k, hidden_states.shape[1])
    for expert, rows in enumerate(order.split(rows_per_expert)):
        x = hidden_states[rows // top_k]
        gate = F.silu(F.linear(x, expert_gate_projs[expert]))
        up = F.linear(x, expert_up_projs[expert])
        y[rows] = F.linear(gate * up, expert_down_projs[expert])

    weighted = y.view(tokens, top_k, -1) * topk_weight.unsqueeze(-1)
    return weighted.sum(dim=1, dtype=torch.float32).to(hidden_states.dtype)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Distinct random experts for each token, normalised uniform weights, normal tensors."""
    axes = axes_and_scalars
    tokens, top_k = axes["batch_seq_len"], axes["num_experts_per_tok"]
    hidden, inner, experts = axes["hidden_size"], axes["moe_intermediate_size"], axes["num_experts"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float16, device=device)

    permutations = torch.rand(tokens, experts, device=device).argsort(dim=-1)
    topk_weight = torch.rand(tokens, top_k, dtype=torch.float16, device=device)
    return {
        "hidden_states": normal(tokens, hidden),
        "topk_idx": permutations[:, :top_k].contiguous(),
        "topk_weight": topk_weight / topk_weight.sum(dim=-1, keepdim=True),
        "expert_gate_projs": normal(experts, inner, hidden).mul_(0.02),
        "expert_up_projs": normal(experts, inner, hidden).mul_(0.02),
        "expert_down_projs": normal(experts, hidden, inner).mul_(0.02),
    }
