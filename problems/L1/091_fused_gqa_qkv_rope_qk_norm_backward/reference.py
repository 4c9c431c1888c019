"""Backward of a joint projection, rotary embedding and per-head RMSNorm, in that forward order."""

import torch


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """(first, second) half of the last axis to (-second, first)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def norm_backward(
    grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Backward of x * rstd * weight in float32; gradients of x and of the weight, rounded once.

    Args:
        grad, x: [batch_size, heads, seq_len, head_dim] bf16.
        rstd: [batch_size, heads, seq_len, 1] bf16, as saved.
        weight: [head_dim] bf16.
    """
    grad32, x32, rstd32 = grad.float(), x.float(), rstd.float()
    grad_weight = (grad32 * (x32 * rstd32)).sum(dim=(0, 1, 2))
    grad_normed = grad32 * weight.float()
    projection = (grad_normed * x32).sum(dim=-1, keepdim=True)
    grad_x = grad_normed * rstd32 - projection * (rstd32**3 * x32 / x.shape[-1])
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def rope_backward(
    grad: torch.Tensor, rotated: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the rotary embedding's input and of its tables, elementwise in bfloat16.

    Two things are as the problem has them and not as calculus would: sine comes after the swap of
    halves, and what stands for the unrotated input is the rotated one rotated once more.

    Args:
        grad, rotated: [batch_size, heads, seq_len, head_dim] bf16.
        cos, sin: [batch_size, seq_len, head_dim] bf16.

    Returns:
        Gradient of the input (shaped like grad), of cos and of sin (summed over heads), bf16.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    grad_input = grad * cos - rotate_half(grad) * sin
    unrotated = rotated * cos + rotate_half(rotated) * sin

    def sum_heads(x: torch.Tensor) -> torch.Tensor:
        return x.sum(dim=1, dtype=torch.float32).to(x.dtype)

    return grad_input, sum_heads(grad * unrotated), sum_heads(grad * rotate_half(unrotated))


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """[batch_size, heads, seq_len, head_dim] to [batch_size, seq_len, heads * head_dim]."""
    return x.transpose(1, 2).flatten(2)


def run(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qkv_weight: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    query_pre_norm: torch.Tensor,
    key_pre_norm: torch.Tensor,
    q_rstd: torch.Tensor,
    k_rstd: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Norms, then rotary embedding, then the projection.

    Args:
        grad_query, query_pre_norm: [batch_size, num_heads, seq_len, head_dim] bf16.
        grad_key, grad_value, key_pre_norm: [batch_size, num_kv_heads, seq_len, head_dim] bf16.
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        cos, sin: [batch_size, seq_len, head_dim] bf16.
        qkv_weight: [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size] bf16, rows of the
            queries, then of the keys, then of the values.
        q_norm_weight, k_norm_weight: [head_dim] bf16.
        q_rstd, k_rstd: [batch_size, heads, seq_len, 1] bf16.
        eps: not needed.

    Returns:
        Gradients of hidden_states, cos, sin, qkv_weight, q_norm_weight and k_norm_weight, bf16.
    """
    grad_q, grad_q_norm_weight = norm_backward(grad_query, query_pre_norm, q_rstd, q_norm_weight)
    grad_k, grad_k_norm_weight = norm_backward(grad_key, key_pre_norm, k_rstd, k_norm_weight)
    grad_q, q_grad_cos, q_grad_sin = rope_backward(grad_q, query_pre_norm, cos, sin)
    grad_k, k_grad_cos, k_grad_sin = rope_backward(grad_k, key_pre_norm, cos, sin)

    grad_qkv = torch.cat([merge_heads(g) for g in (grad_q, grad_k, grad_value)], dim=-1)
    return (
        grad_qkv @ qkv_weight,
        q_grad_cos + k_grad_cos,
        q_grad_sin + k_grad_sin,
        grad_qkv.flatten(0, 1).T @ hidden_states.flatten(0, 1),
        grad_q_norm_weight,
        grad_k_norm_weight,
    )
