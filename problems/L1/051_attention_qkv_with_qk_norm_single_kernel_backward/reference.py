"""Backward of query, key and value projections whose queries and keys are RMS-normalised."""

import torch


def norm_backward(
    grad: torch.Tensor, normed: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Backward of normed * (1 + weight), where normed = x * rstd, in float32.

    Args:
        grad, normed: [batch_size, heads, seq_len, head_dim] bf16.
        rstd: [batch_size, heads, seq_len, 1] f32, as saved.
        weight: [head_dim] bf16.

    Returns:
        Gradient of x (bf16, shaped like grad) and of the weight ([head_dim] f32).
    """
    normed32 = normed.float()
    grad_weight = (grad.float() * normed32).sum(dim=(0, 1, 2))
    grad_normed = (grad.float() * (1.0 + weight.float())).to(grad.dtype).float()
    projection = (grad_normed * normed32).mean(dim=-1, keepdim=True)
    grad_input = rstd * (grad_normed - projection * normed32)
    return grad_input.to(grad.dtype), grad_weight


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """[batch_size, heads, seq_len, head_dim] to [batch_size, seq_len, heads * head_dim]."""
    return x.transpose(1, 2).flatten(2)


def run(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    hidden_states: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    query_transposed: torch.Tensor,
    key_transposed: torch.Tensor,
    q_rstd: torch.Tensor,
    k_rstd: torch.Tensor,
    q_normed: torch.Tensor,
    k_normed: torch.Tensor,
    rms_norm_eps: float,
) -> tuple[torch.Tensor, ...]:
    """Through the two norms first, then through the three projections.

    Args:
        grad_query: [batch_size, num_attention_heads, seq_len, head_dim] bf16; query_transposed and
            q_normed are alike.
        grad_key: [batch_size, num_key_value_heads, seq_len, head_dim] bf16; grad_value,
            key_transposed and k_normed are alike.
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        q_weight: [num_attention_heads * head_dim, hidden_size] bf16.
        k_weight, v_weight: [num_key_value_heads * head_dim, hidden_size] bf16.
        q_norm_weight, k_norm_weight: [head_dim] bf16; the forward scales by 1 + weight.
        query_transposed, key_transposed: the norms' inputs; not needed.
        q_rstd, k_rstd: [batch_size, heads, seq_len, 1] f32.
        rms_norm_eps: not needed.

    Returns:
        Gradients of hidden_states, q_weight, k_weight and v_weight (bf16), and of q_norm_weight
        and k_norm_weight (f32).
    """
    grad_q, grad_q_norm_weight = norm_backward(grad_query, q_normed, q_rstd, q_norm_weight)
    grad_k, grad_k_norm_weight = norm_backward(grad_key, k_normed, k_rstd, k_norm_weight)
    grad_q, grad_k, grad_v = merge_heads(grad_q), merge_heads(grad_k), merge_heads(grad_value)

    # Each product and each of the two sums rounds to bfloat16.
    grad_hidden_states = grad_q @ q_weight + grad_k @ k_weight + grad_v @ v_weight

    rows = hidden_states.flatten(0, 1)
    return (
        grad_hidden_states,
        grad_q.flatten(0, 1).T @ rows,
        grad_k.flatten(0, 1).T @ rows,
        grad_v.flatten(0, 1).T @ rows,
        grad_q_norm_weight,
        grad_k_norm_weight,
    )
