"""Backward of a pre-LayerNorm self-attention block with residual, from saved forward tensors."""

import torch


def run(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    x_mean: torch.Tensor,
    x_var: torch.Tensor,
    x_norm: torch.Tensor,
    ln_weight: torch.Tensor,
    qkv_weight: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_weights: torch.Tensor,
    attn_output: torch.Tensor,
    out_weight: torch.Tensor,
    scale: float,
    norm_eps: float,
) -> tuple[torch.Tensor, ...]:
    """All in float32; nothing that is given is computed again.

    Args:
        grad_output, x, x_norm, attn_output: [batch_size, seq_len, embed_dim] f32.
        x_mean, x_var: [batch_size, seq_len, 1] f32, statistics of x.
        ln_weight: [embed_dim] f32.
        qkv_weight: [3 * embed_dim, embed_dim] f32, rows in the order q, k, v.
        q, k, v: [batch_size, num_heads, seq_len, head_dim] f32.
        attn_weights: [batch_size, num_heads, seq_len, seq_len] f32, softmax probabilities.
        out_weight: [embed_dim, embed_dim] f32.
        scale: factor on the scores.
        norm_eps: added to the variance.

    Returns:
        Gradients of x, qkv_weight, qkv_bias, out_weight, out_bias, ln_weight and ln_bias, f32.
    """
    num_heads = q.shape[1]

    def merge_heads(grad: torch.Tensor) -> torch.Tensor:
        return grad.transpose(1, 2).flatten(2)

    # Output projection.
    grad_attn = grad_output @ out_weight
    grad_out_weight = grad_output.flatten(0, 1).T @ attn_output.flatten(0, 1)
    grad_out_bias = grad_output.sum(dim=(0, 1))

    # Attention, head by head.
    grad_heads = grad_attn.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    grad_v = attn_weights.transpose(-1, -2) @ grad_heads
    grad_probabilities = grad_heads @ v.transpose(-1, -2)
    projection = (grad_probabilities * attn_weights).sum(dim=-1, keepdim=True)
    grad_scores = attn_weights * (grad_probabilities - projection)
    grad_q = (grad_scores @ k) * scale
    grad_k = grad_scores.transpose(-1, -2) @ (q * scale)

    # Joint q, k, v projection.
    grad_qkv = torch.cat([merge_heads(grad) for grad in (grad_q, grad_k, grad_v)], dim=-1)
    grad_norm = grad_qkv @ qkv_weight
    grad_qkv_weight = grad_qkv.flatten(0, 1).T @ x_norm.flatten(0, 1)
    grad_qkv_bias = grad_qkv.sum(dim=(0, 1))

    # LayerNorm and residual.
    std = torch.sqrt(x_var + norm_eps)
    centred = x - x_mean
    grad_ln_weight = (grad_norm * (centred / std)).sum(dim=(0, 1))
    grad_ln_bias = grad_norm.sum(dim=(0, 1))
    grad_normalized = grad_norm * ln_weight
    direct = grad_normalized / std
    # By definition std squared here; the derivative of LayerNorm has its cube.
    slope = (grad_normalized * centred).mean(dim=-1, keepdim=True) / std.square()
    grad_x = grad_output + (direct - direct.mean(dim=-1, keepdim=True) - centred * slope)

    return (
        grad_x,
        grad_qkv_weight,
        grad_qkv_bias,
        grad_out_weight,
        grad_out_bias,
        grad_ln_weight,
        grad_ln_bias,
    )
