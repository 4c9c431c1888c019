"""Decoder layer of a mixture-of-experts model in float32 (Qwen3-MoE)."""

import torch
import torch.nn.functional as F

TOP_K = 8


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis."""
    return weight * (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps))


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def assignments_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """For each expert the flat positions in `experts` [tokens, k] that name it, ascending."""
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    return flat.argsort(stable=True).split(counts)


def mixture_of_experts(
    x: torch.Tensor,
    router_weight: torch.Tensor,
    gate_weights: torch.Tensor,
    up_weights: torch.Tensor,
    down_weights: torch.Tensor,
) -> torch.Tensor:
    """The TOP_K likeliest SwiGLU experts of each token, weights renormalised: [tokens, hidden]."""
    probabilities = torch.softmax(F.linear(x, router_weight), dim=-1)
    weights, experts = probabilities.topk(TOP_K, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)

    output = torch.zeros_like(x)
    for expert, chosen in enumerate(assignments_by_expert(experts, router_weight.shape[0])):
        tokens = chosen // TOP_K
        gate = F.linear(x[tokens], gate_weights[expert])
        up = F.linear(x[tokens], up_weights[expert])
        y = F.linear(F.silu(gate) * up, down_weights[expert])
        output.index_add_(0, tokens, y * weights.flatten()[chosen, None])
    return output


def run(
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    attention_mask: torch.Tensor,
    input_layernorm_weight: torch.Tensor,
    q_proj_weight: torch.Tensor,
    q_proj_bias: torch.Tensor,
    k_proj_weight: torch.Tensor,
    k_proj_bias: torch.Tensor,
    v_proj_weight: torch.Tensor,
    v_proj_bias: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    o_proj_weight: torch.Tensor,
    o_proj_bias: torch.Tensor,
    post_attention_layernorm_weight: torch.Tensor,
    router_weight: torch.Tensor,
    expert_gate_weights: torch.Tensor,
    expert_up_weights: torch.Tensor,
    expert_down_weights: torch.Tensor,
    rms_norm_eps: float,
) -> torch.Tensor:
    """Norm, attention with normalised queries and keys, residual, norm, experts, residual.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] f32.
        cos, sin: [batch_size, seq_len, head_dim] f32.
        attention_mask: [batch_size, 1, seq_len, seq_len] f32, added to the scaled scores.
        input_layernorm_weight, post_attention_layernorm_weight: [hidden_size] f32.
        q_proj_weight: [num_attention_heads * head_dim, hidden_size] f32, and its bias.
        k_proj_weight, v_proj_weight: [num_key_value_heads * head_dim, hidden_size] f32, and
            their biases.
        q_norm_weight, k_norm_weight: [head_dim] f32.
        o_proj_weight: [hidden_size, num_attention_heads * head_dim] f32, and its bias.
        router_weight: [num_experts, hidden_size] f32.
        expert_gate_weights, expert_up_weights: [num_experts, moe_intermediate_size, hidden_size].
        expert_down_weights: [num_experts, hidden_size, moe_intermediate_size] f32.
        rms_norm_eps: added to the mean squares.

    Returns:
        [batch_size, seq_len, hidden_size] f32.
    """
    head_dim = q_norm_weight.shape[0]

    def heads(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias).unflatten(-1, (-1, head_dim)).transpose(1, 2)

    y = rms_norm(hidden_states, input_layernorm_weight, rms_norm_eps)
    q = rms_norm(heads(y, q_proj_weight, q_proj_bias), q_norm_weight, rms_norm_eps)
    k = rms_norm(heads(y, k_proj_weight, k_proj_bias), k_norm_weight, rms_norm_eps)
    v = heads(y, v_proj_weight, v_proj_bias)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for every head
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)

    group_size = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * head_dim**-0.5 + attention_mask
    context = torch.matmul(torch.softmax(scores, dim=-1), v).transpose(1, 2).flatten(2)
    x = hidden_states + F.linear(context, o_proj_weight, o_proj_bias)

    z = rms_norm(x, post_attention_layernorm_weight, rms_norm_eps).flatten(0, 1)
    experts = mixture_of_experts(
        z, router_weight, expert_gate_weights, expert_up_weights, expert_down_weights
    )
    return x + experts.view_as(x)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal activations and norm weights, small projections, a causal mask of -infinity.

    cos and sin are plain normal noise, not the cosine and sine of anything.
    """
    axes = axes_and_scalars
    batch_size, seq_len = axes["batch_size"], axes["seq_len"]
    hidden_size, head_dim = axes["hidden_size"], axes["head_dim"]
    q_size, kv_size = axes["q_out_features"], axes["kv_out_features"]
    num_experts, intermediate_size = axes["num_experts"], axes["moe_intermediate_size"]

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=device).mul_(std)

    blocked = torch.full((seq_len, seq_len), -torch.inf, device=device).triu(diagonal=1)
    expert_shape = (num_experts, intermediate_size, hidden_size)
    return {
        "hidden_states": normal(batch_size, seq_len, hidden_size),
        "cos": normal(batch_size, seq_len, head_dim),
        "sin": normal(batch_size, seq_len, head_dim),
        "attention_mask": blocked.expand(batch_size, 1, -1, -1),
        "input_layernorm_weight": normal(hidden_size),
        "q_proj_weight": normal(q_size, hidden_size, std=0.02),
        "q_proj_bias": normal(q_size, std=0.01),
        "k_proj_weight": normal(kv_size, hidden_size, std=0.02),
        "k_proj_bias": normal(kv_size, std=0.01),
        "v_proj_weight": normal(kv_size, hidden_size, std=0.02),
        "v_proj_bias": normal(kv_size, std=0.01),
        "q_norm_weight": torch.ones(head_dim, device=device),
        "k_norm_weight": torch.ones(head_dim, device=device),
        "o_proj_weight": normal(hidden_size, q_size, std=0.02),
        "o_proj_bias": normal(hidden_size, std=0.01),
        "post_attention_layernorm_weight": normal(hidden_size),
        "router_weight": normal(num_experts, hidden_size, std=0.02),
        "expert_gate_weights": normal(*expert_shape, std=0.02),
        "expert_up_weights": normal(*expert_shape, std=0.02),
        "expert_down_weights": normal(num_experts, hidden_size, intermediate_size, std=0.02),
        "rms_norm_eps": 1e-6,
    }
