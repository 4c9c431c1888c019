"""One rank of an expert-parallel MoE layer with group-limited routing and FP8 block scales."""

import torch

BLOCK = 128
NUM_GROUPS = 8
TOP_GROUPS = 4
TOP_EXPERTS = 8


def dequantize_tiles(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight [N, K] e4m3 times scale [N / 128, K / 128], float32."""
    tiles = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return (tiles * scale[:, None, :, None]).flatten(2).flatten(0, 1)


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest values of each row; of equal ones the lowest indices."""
    return values.argsort(dim=-1, descending=True, stable=True)[..., :k]


def route(
    logits: torch.Tensor, bias: torch.Tensor, routed_scaling_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts chosen for each token and their weights, both [tokens, 8]."""
    scores = torch.sigmoid(logits)
    # The bias has a say in the choice alone. A group counts by its two best experts; outside the
    # best groups nothing is chosen.
    choice = (scores + bias.float()).unflatten(-1, (NUM_GROUPS, -1))
    group_scores = choice.topk(2, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(group_scores, dtype=torch.bool)
    kept.scatter_(1, largest(group_scores, TOP_GROUPS), True)
    choice = choice.masked_fill(~kept.unsqueeze(-1), torch.finfo(torch.float32).min).flatten(1)
    experts = largest(choice, TOP_EXPERTS)
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, weights * routed_scaling_factor


def run(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    local_expert_offset: int,
    routed_scaling_factor: float,
) -> torch.Tensor:
    """Float32 throughout, rounded to bf16 at the end.

    Args:
        routing_logits: [seq_len, num_experts] f32; routing_bias: [num_experts] bf16.
        hidden_states: [seq_len, hidden] e4m3; hidden_states_scale: [hidden / 128, seq_len] f32.
        gemm1_weights: [num_local, 2 * intermediate, hidden] e4m3, the gate in the second half.
        gemm2_weights: [num_local, hidden, intermediate] e4m3.
        *_weights_scale: [num_local, out / 128, in / 128] f32.
        local_expert_offset: number of the first local expert.
        routed_scaling_factor: factor on the routing weights.

    Returns:
        [seq_len, hidden] bf16, the part of the layer's output that local experts contribute.
    """
    num_experts = routing_logits.shape[1]
    blocks = hidden_states.float().unflatten(-1, (-1, BLOCK))
    activation = (blocks * hidden_states_scale.T.unsqueeze(-1)).flatten(-2)

    # (token, choice) pairs grouped by expert.
    experts, weights = route(routing_logits, routing_bias, routed_scaling_factor)
    chosen, weights = experts.flatten(), weights.flatten()
    order = chosen.argsort(stable=True)
    ends = torch.bincount(chosen, minlength=num_experts).cumsum(0).tolist()
    starts = [0, *ends[:-1]]

    output = torch.zeros_like(activation)
    for local in range(gemm1_weights.shape[0]):
        expert = local_expert_offset + local
        if not 0 <= expert < num_experts or starts[expert] == ends[expert]:
            continue
        pairs = order[starts[expert] : ends[expert]]
        tokens = pairs // TOP_EXPERTS
        first = dequantize_tiles(gemm1_weights[local], gemm1_weights_scale[local])
        up, gate = (activation[tokens] @ first.T).chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * up
        second = dequantize_tiles(gemm2_weights[local], gemm2_weights_scale[local])
        output.index_add_(0, tokens, (hidden @ second.T) * weights[pairs].unsqueeze(1))
    return output.to(torch.bfloat16)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """A router's logits and bias: normal, the bias small."""
    seq_len, num_experts = axes_and_scalars["seq_len"], axes_and_scalars["num_experts"]
    bias = torch.randn(num_experts, device=device) * 0.1
    return {
        "routing_logits": torch.randn(seq_len, num_experts, device=device),
        "routing_bias": bias.to(torch.bfloat16),
    }
