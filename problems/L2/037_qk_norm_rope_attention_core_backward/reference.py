"""Causal attention with normalised queries and keys and capped logits: forward and backward."""

import torch
import torch.nn.functional as F

ROPE_THETA = 10000.0


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rope_backward(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Gradient through `apply_rope`."""
    first, second = (grad * sin).chunk(2, dim=-1)
    return grad * cos + torch.cat((second, -first), dim=-1)


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of the weight of x * rstd * (1 + weight), rstd depending on x.

    Args:
        grad, x: [batch, heads, seq, head_dim]; rstd: [batch, heads, seq, 1]; weight: [head_dim].
    """
    grad_weight = (grad * (x * rstd)).sum(dim=(0, 1, 2))
    grad_normalized = grad * (1 + weight)
    grad_var = -0.5 * (grad_normalized * x).sum(dim=-1, keepdim=True) * rstd**3
    return grad_normalized * rstd + 2 * x * grad_var / x.shape[-1], grad_weight


def run(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    o_weight: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    scaling: float,
    attn_logit_softcapping: float,
    rms_norm_eps: float,
) -> tuple[torch.Tensor, ...]:
    """All in float32; the forward is computed again from the inputs.

    Args:
        grad_output, hidden_states: [batch_size, seq_len, hidden_size] f32.
        cos, sin: [batch_size, seq_len, head_dim] f32.
        q_weight: [num_attention_heads * head_dim, hidden_size] f32.
        k_weight, v_weight: [num_key_value_heads * head_dim, hidden_size] f32.
        o_weight: [hidden_size, num_attention_heads * head_dim] f32.
        q_norm_weight, k_norm_weight: [head_dim] f32; the norms multiply by one plus them.
        scaling: factor on the scores.
        attn_logit_softcapping: bound of the scaled scores, by cap * tanh(score / cap).
        rms_norm_eps: added to the mean squares.

    Returns:
        Gradients of hidden_states, q_weight, k_weight, v_weight, o_weight, q_norm_weight and
        k_norm_weight, f32.
    """
    seq_len, head_dim = cos.shape[1:]

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)

    def merge_heads(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(2)

    def inverse_rms(x: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + rms_norm_eps)

    # Forward.
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for every head
    q, k = heads(F.linear(hidden_states, q_weight)), heads(F.linear(hidden_states, k_weight))
    v = heads(F.linear(hidden_states, v_weight))
    q_rstd, k_rstd = inverse_rms(q), inverse_rms(k)
    q_rotated = apply_rope(q * q_rstd * (1 + q_norm_weight), cos, sin)
    k_rotated = apply_rope(k * k_rstd * (1 + k_norm_weight), cos, sin)
    num_kv_heads, group_size = k.shape[1], q.shape[1] // k.shape[1]
    k_rotated = k_rotated.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)

    future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device).triu(diagonal=1)
    scores = torch.matmul(q_rotated, k_rotated.transpose(-1, -2)) * scaling
    tanh = torch.tanh(scores / attn_logit_softcapping)
    capped = (tanh * attn_logit_softcapping).masked_fill(future, -torch.inf)
    probabilities = torch.softmax(capped, dim=-1)
    context = merge_heads(torch.matmul(probabilities, v))

    # Backward through attention.
    def sum_groups(grad: torch.Tensor) -> torch.Tensor:
        return grad.unflatten(1, (num_kv_heads, group_size)).sum(dim=2)

    grad_o_weight = grad_output.flatten(0, 1).T @ context.flatten(0, 1)
    grad_heads = heads(grad_output @ o_weight)
    grad_v = sum_groups(torch.matmul(probabilities.transpose(-1, -2), grad_heads))
    grad_probabilities = torch.matmul(grad_heads, v.transpose(-1, -2))
    projection = (grad_probabilities * probabilities).sum(dim=-1, keepdim=True)
    grad_capped = probabilities * (grad_probabilities - projection)
    grad_scores = grad_capped * (1 - tanh.square()) * scaling
    grad_q = torch.matmul(grad_scores, k_rotated)
    grad_k = sum_groups(torch.matmul(grad_scores.transpose(-1, -2), q_rotated))

    # Backward through rotation, norms and projections.
    grad_q, grad_q_norm_weight = rms_norm_backward(
        rope_backward(grad_q, cos, sin), q, q_rstd, q_norm_weight
    )
    grad_k, grad_k_norm_weight = rms_norm_backward(
        rope_backward(grad_k, cos, sin), k, k_rstd, k_norm_weight
    )
    grad_q, grad_k, grad_v = merge_heads(grad_q), merge_heads(grad_k), merge_heads(grad_v)
    tokens = hidden_states.flatten(0, 1)
    return (
        grad_q @ q_weight + grad_k @ k_weight + grad_v @ v_weight,
        grad_q.flatten(0, 1).T @ tokens,
        grad_k.flatten(0, 1).T @ tokens,
        grad_v.flatten(0, 1).T @ tokens,
        grad_o_weight,
        grad_q_norm_weight,
        grad_k_norm_weight,
    )


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal gradients, small hidden states, weights of variance 2 / fan-in, usual rotations."""
    axes = axes_and_scalars
    batch_size, seq_len = axes["batch_size"], axes["seq_len"]
    hidden_size, head_dim = axes["hidden_size"], axes["head_dim"]
    q_size, kv_size = axes["q_proj_out"], axes["kv_proj_out"]

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=device).mul_(std)

    def weight(*shape: int) -> torch.Tensor:
        return normal(*shape, std=(2 / shape[-1]) ** 0.5)

    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    position = torch.arange(seq_len, dtype=torch.float32, device=device)
    angle = torch.outer(position, ROPE_THETA**-exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return {
        "grad_output": normal(batch_size, seq_len, hidden_size),
        "hidden_states": normal(batch_size, seq_len, hidden_size, std=hidden_size**-0.5),
        "cos": angle.cos().expand(batch_size, -1, -1),
        "sin": angle.sin().expand(batch_size, -1, -1),
        "q_weight": weight(q_size, hidden_size),
        "k_weight": weight(kv_size, hidden_size),
        "v_weight": weight(kv_size, hidden_size),
        "o_weight": weight(hidden_size, q_size),
        "q_norm_weight": normal(head_dim, std=0.02),
        "k_norm_weight": normal(head_dim, std=0.02),
        "scaling": head_dim**-0.5,
        "attn_logit_softcapping": 50.0,
        "rms_norm_eps": 1e-6,
    }
