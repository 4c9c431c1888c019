"""Backward of a pre-norm decoder layer (grouped-query attention, SwiGLU) from saved activations."""

import math

import torch
import torch.nn.functional as F


def rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    variance: torch.Tensor,
    normalized: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input gradient, rounded to x's dtype, and weight gradient in float32; float32 arithmetic."""
    grad, x32 = grad.float(), x.float()
    grad_weight = (grad * normalized).sum(dim=(0, 1))
    inverse_rms = torch.rsqrt(variance + eps)
    grad_normalized = grad * weight.float()
    grad_variance = -0.5 * (grad_normalized * x32).sum(dim=-1, keepdim=True) * inverse_rms.pow(3)
    grad_x = grad_normalized * inverse_rms + (2.0 / x.shape[-1]) * x32 * grad_variance
    return grad_x.to(x.dtype), grad_weight


def rope_backward(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Gradient before the rotary embedding; both products and the sum round to grad's dtype."""
    first, second = grad.chunk(2, dim=-1)
    return grad * cos + torch.cat((-second, first), dim=-1) * -sin


def run(
    grad_output: torch.Tensor,
    residual: torch.Tensor,
    attn_input: torch.Tensor,
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    query_states_rotated: torch.Tensor,
    key_states_rotated: torch.Tensor,
    key_states_repeated: torch.Tensor,
    value_states_repeated: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    attn_weights: torch.Tensor,
    attn_output: torch.Tensor,
    residual2: torch.Tensor,
    ffn_input: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    silu_up: torch.Tensor,
    swiglu_output: torch.Tensor,
    input_ln_weight: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    o_weight: torch.Tensor,
    post_attn_ln_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    variance1: torch.Tensor,
    variance2: torch.Tensor,
    hidden_states_normalized1: torch.Tensor,
    hidden_states_normalized2: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Gradients of the layer's input and nine weights.

    The forward was swiglu = gate * silu(up). B batch, S sequence, H hidden_size, I intermediate,
    N query heads, K key/value heads, D head_dim; bfloat16 where not said otherwise.

    Args:
        grad_output, residual, attn_input, residual2, ffn_input: [B, S, H].
        query_states, query_states_rotated, key_states_repeated, value_states_repeated:
            [B, N, S, D]; key_states, value_states, key_states_rotated: [B, K, S, D].
        cos, sin: [B, S, D].
        attn_weights: [B, N, S, S], probabilities.
        attn_output: [B, S, N * D].
        gate, up, silu_up, swiglu_output: [B, S, I].
        input_ln_weight, post_attn_ln_weight: [H].
        q_weight: [N * D, H]; k_weight, v_weight: [K * D, H]; o_weight: [H, N * D].
        gate_weight, up_weight: [I, H]; down_weight: [H, I].
        variance1, variance2: [B, S, 1] f32, mean squares of residual and residual2.
        hidden_states_normalized1, hidden_states_normalized2: [B, S, H] f32.
        eps: added to the mean squares.

    Returns:
        Gradients of the input (bf16), input norm (f32), q, k, v, o weights (bf16), norm after the
        attention (f32), gate, up and down weights (bf16).
    """
    dtype = grad_output.dtype
    head_dim = query_states.shape[-1]
    num_kv_heads = key_states.shape[1]

    def weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return grad.flatten(0, 1).T @ x.flatten(0, 1)

    def merge_heads(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(2)

    def sum_over_group(x: torch.Tensor) -> torch.Tensor:
        """Query heads that share a key/value head are consecutive."""
        return x.unflatten(1, (num_kv_heads, -1)).sum(dim=2, dtype=torch.float32).to(dtype)

    # Feed-forward branch.
    grad_swiglu = grad_output @ down_weight
    grad_down_weight = weight_gradient(grad_output, swiglu_output)
    grad_gate = grad_swiglu * silu_up
    sigmoid = torch.sigmoid(up.float())
    silu_derivative = (sigmoid * (1 + up.float() * (1 - sigmoid))).to(dtype)
    grad_up = grad_swiglu * gate * silu_derivative
    grad_ffn_input = grad_gate @ gate_weight + grad_up @ up_weight
    grad_gate_weight = weight_gradient(grad_gate, ffn_input)
    grad_up_weight = weight_gradient(grad_up, ffn_input)
    grad_residual2, grad_post_attn_ln_weight = rms_norm_backward(
        grad_ffn_input, residual2, post_attn_ln_weight, variance2, hidden_states_normalized2, eps
    )
    grad_residual2 = grad_output + grad_residual2

    # Attention branch.
    grad_attn_output = grad_residual2 @ o_weight
    grad_o_weight = weight_gradient(grad_residual2, attn_output)
    grad_heads = grad_attn_output.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    grad_probabilities = (grad_heads @ value_states_repeated.transpose(-1, -2)).float()
    grad_value = sum_over_group(attn_weights.transpose(-1, -2) @ grad_heads)
    probabilities = attn_weights.float()
    projection = (grad_probabilities * probabilities).sum(dim=-1, keepdim=True)
    grad_scores = probabilities * (grad_probabilities - projection)
    grad_scores = (grad_scores / math.sqrt(head_dim)).to(dtype)
    grad_query = grad_scores @ key_states_repeated
    grad_key = sum_over_group(grad_scores.transpose(-1, -2) @ query_states_rotated)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for every head
    grad_query = merge_heads(rope_backward(grad_query, cos, sin))
    grad_key = merge_heads(rope_backward(grad_key, cos, sin))
    grad_value = merge_heads(grad_value)

    grad_attn_input = grad_query @ q_weight + grad_key @ k_weight + grad_value @ v_weight
    grad_residual, grad_input_ln_weight = rms_norm_backward(
        grad_attn_input, residual, input_ln_weight, variance1, hidden_states_normalized1, eps
    )
    return (
        grad_residual2 + grad_residual,
        grad_input_ln_weight,
        weight_gradient(grad_query, attn_input),
        weight_gradient(grad_key, attn_input),
        weight_gradient(grad_value, attn_input),
        grad_o_weight,
        grad_post_attn_ln_weight,
        grad_gate_weight,
        grad_up_weight,
        grad_down_weight,
    )


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """All that one causal forward pass of the layer saves."""
    axes = axes_and_scalars
    batch, seq_len, hidden = axes["batch_size"], axes["seq_len"], axes["hidden_size"]
    heads, kv_heads, head_dim = axes["num_heads"], axes["num_kv_heads"], axes["head_dim"]
    inner = axes["intermediate_size"]
    eps = 1e-6

    def weight(out_features: int, in_features: int) -> torch.Tensor:
        normal = torch.randn(out_features, in_features, device=device)
        return (normal * math.sqrt(2.0 / in_features)).bfloat16()

    def norm_weight() -> torch.Tensor:
        return (1 + 0.02 * torch.randn(hidden, device=device)).bfloat16()

    def rms_norm(
        x: torch.Tensor, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        variance = x.float().square().mean(dim=-1, keepdim=True)
        normalized = x.float() * torch.rsqrt(variance + eps)
        return (norm.float() * normalized).bfloat16(), variance, normalized

    def split_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, head_dim)).transpose(1, 2).contiguous()

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)

    input_ln_weight, post_attn_ln_weight = norm_weight(), norm_weight()
    q_weight, o_weight = weight(heads * head_dim, hidden), weight(hidden, heads * head_dim)
    k_weight, v_weight = weight(kv_heads * head_dim, hidden), weight(kv_heads * head_dim, hidden)
    gate_weight, up_weight = weight(inner, hidden), weight(inner, hidden)
    down_weight = weight(hidden, inner)

    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    position = torch.arange(seq_len, dtype=torch.float32, device=device)
    angle = torch.outer(position, 1e6**-exponent).repeat(1, 2).expand(batch, -1, -1)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()

    residual = (0.02 * torch.randn(batch, seq_len, hidden, device=device)).bfloat16()
    attn_input, variance1, normalized1 = rms_norm(residual, input_ln_weight)
    query_states = split_heads(F.linear(attn_input, q_weight))
    key_states = split_heads(F.linear(attn_input, k_weight))
    value_states = split_heads(F.linear(attn_input, v_weight))
    query_states_rotated, key_states_rotated = rotate(query_states), rotate(key_states)
    key_states_repeated = key_states_rotated.repeat_interleave(heads // kv_heads, dim=1)
    value_states_repeated = value_states.repeat_interleave(heads // kv_heads, dim=1)
    scores = query_states_rotated @ key_states_repeated.transpose(-1, -2) / math.sqrt(head_dim)
    future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).triu(1)
    scores = scores.masked_fill(future, -torch.inf)
    attn_weights = torch.softmax(scores, dim=-1, dtype=torch.float32).bfloat16()
    attn_output = (attn_weights @ value_states_repeated).transpose(1, 2).flatten(2)

    residual2 = residual + F.linear(attn_output, o_weight)
    ffn_input, variance2, normalized2 = rms_norm(residual2, post_attn_ln_weight)
    gate, up = F.linear(ffn_input, gate_weight), F.linear(ffn_input, up_weight)
    silu_up = F.silu(up.float()).bfloat16()
    return {
        "grad_output": torch.randn(batch, seq_len, hidden, device=device).bfloat16(),
        "residual": residual,
        "attn_input": attn_input,
        "query_states": query_states,
        "key_states": key_states,
        "value_states": value_states,
        "query_states_rotated": query_states_rotated,
        "key_states_rotated": key_states_rotated,
        "key_states_repeated": key_states_repeated,
        "value_states_repeated": value_states_repeated,
        "cos": cos,
        "sin": sin,
        "attn_weights": attn_weights,
        "attn_output": attn_output,
        "residual2": residual2,
        "ffn_input": ffn_input,
        "gate": gate,
        "up": up,
        "silu_up": silu_up,
        "swiglu_output": gate * silu_up,
        "input_ln_weight": input_ln_weight,
        "q_weight": q_weight,
        "k_weight": k_weight,
        "v_weight": v_weight,
        "o_weight": o_weight,
        "post_attn_ln_weight": post_attn_ln_weight,
        "gate_weight": gate_weight,
        "up_weight": up_weight,
        "down_weight": down_weight,
        "variance1": variance1,
        "variance2": variance2,
        "hidden_states_normalized1": normalized1,
        "hidden_states_normalized2": normalized2,
        "eps": eps,
    }
