"""Sparse mixture of experts with a softmax router, and a shared expert behind a sigmoid gate."""

import torch
import torch.nn.functional as F

EXPERTS_PER_TOKEN = 10


def swiglu(
    x: torch.Tensor, gate_proj: torch.Tensor, up_proj: torch.Tensor, down_proj: torch.Tensor
) -> torch.Tensor:
    """SwiGLU feed-forward; the sigmoid and every product round to x's dtype."""
    gate = F.linear(x, gate_proj)
    gate = gate * torch.sigmoid(gate)
    return F.linear(gate * F.linear(x, up_proj), down_proj)


def run(
    hidden_states: torch.Tensor,
    router_weight: torch.Tensor,
    expert_gate_proj: torch.Tensor,
    expert_up_proj: torch.Tensor,
    expert_down_proj: torch.Tensor,
    shared_gate_proj: torch.Tensor,
    shared_up_proj: torch.Tensor,
    shared_down_proj: torch.Tensor,
    shared_expert_gate_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ten likeliest experts of each token, weighted by their renormalised probabilities.

    Experts add to a bfloat16 sum in ascending order, each addition rounded.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        router_weight: [num_experts, hidden_size] bf16.
        expert_gate_proj, expert_up_proj: [num_experts, intermediate, hidden_size] bf16.
        expert_down_proj: [num_experts, hidden_size, intermediate] bf16.
        shared_gate_proj, shared_up_proj: [shared_intermediate, hidden_size] bf16.
        shared_down_proj: [hidden_size, shared_intermediate] bf16.
        shared_expert_gate_weight: [1, hidden_size] bf16.

    Returns:
        [batch_size, seq_len, hidden_size] bf16, and the router's logits
        [batch_size * seq_len, num_experts] bf16.
    """
    x = hidden_states.flatten(0, 1)
    num_experts = router_weight.shape[0]
    router_logits = F.linear(x, router_weight)

    # Bfloat16 logits are often equal; the lower expert goes first.
    probabilities = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
    weights, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :EXPERTS_PER_TOKEN], experts[:, :EXPERTS_PER_TOKEN]
    weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype).flatten()

    # Rows are (token, slot) pairs; those of one expert stand together in `order`.
    expert_of_row = experts.flatten()
    order = expert_of_row.argsort(stable=True)
    rows_per_expert = torch.bincount(expert_of_row, minlength=num_experts).tolist()

    output = torch.zeros_like(x)
    for expert, rows in enumerate(order.split(rows_per_expert)):
        if len(rows) == 0:
            continue
        tokens = rows // EXPERTS_PER_TOKEN  # no token twice
        y = swiglu(
            x[tokens], expert_gate_proj[expert], expert_up_proj[expert], expert_down_proj[expert]
        )
        output[tokens] += y * weights[rows].unsqueeze(-1)

    shared = swiglu(x, shared_gate_proj, shared_up_proj, shared_down_proj)
    output += torch.sigmoid(F.linear(x, shared_expert_gate_weight)) * shared
    return output.view_as(hidden_states), router_logits
