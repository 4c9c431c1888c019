"""Backward of global image attention with decomposed relative positions, forward recomputed."""

import math

import torch
import torch.nn.functional as F


def relative_rows(size: int, device: torch.device) -> torch.Tensor:
    """Row of the table of relative positions for each pair (query, key), [size, size]."""
    coordinate = torch.arange(size, device=device)
    return coordinate.unsqueeze(1) - coordinate + size - 1


def run(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    rel_pos_h: torch.Tensor,
    rel_pos_w: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Gradients of the input and all parameters, in float32.

    The score of two positions is scale * q . k plus q . rel_pos_h and q . rel_pos_w of their
    distances; the relative terms use the unscaled q. B batch, H height, W width, C channels.

    Args:
        grad_output, hidden_states: [B, H, W, C].
        qkv_weight: [3 C, C]; qkv_bias: [3 C]; rows ordered (query | key | value, head, channel).
        proj_weight: [C, C]; proj_bias: not needed.
        rel_pos_h: [2 H - 1, head_dim]; rel_pos_w: [2 W - 1, head_dim].
        scale: factor on the dot products.

    Returns:
        Gradients of hidden_states, qkv weight and bias, projection weight and bias, rel_pos_h and
        rel_pos_w, each shaped like its tensor.
    """
    height, width = hidden_states.shape[1:3]
    head_dim = rel_pos_h.shape[1]

    def split_heads(x: torch.Tensor) -> torch.Tensor:
        """[B, H, W, C] to [B, heads, H * W, head_dim]."""
        return x.flatten(1, 2).unflatten(-1, (-1, head_dim)).transpose(1, 2)

    def merge_heads(x: torch.Tensor) -> torch.Tensor:
        """[B, heads, H * W, head_dim] to [B * H * W, C]."""
        return x.transpose(1, 2).flatten(2).flatten(0, 1)

    # Forward, up to the input of the output projection. Axes of relative terms: b batch, n head,
    # y and x of the query, i and j of the key, d head_dim.
    q, k, v = (split_heads(x) for x in F.linear(hidden_states, qkv_weight, qkv_bias).chunk(3, -1))
    q_grid = q.unflatten(2, (height, width))
    rows_h = relative_rows(height, q.device)
    rows_w = relative_rows(width, q.device)
    table_h, table_w = rel_pos_h[rows_h], rel_pos_w[rows_w]
    relative_h = torch.einsum("bnyxd,yid->bnyxi", q_grid, table_h)
    relative_w = torch.einsum("bnyxd,xjd->bnyxj", q_grid, table_w)
    scores = (q * scale) @ k.transpose(-1, -2)
    scores = scores.unflatten(3, (height, width)).unflatten(2, (height, width))
    scores = scores + relative_h.unsqueeze(-1) + relative_w.unsqueeze(-2)
    probs = torch.softmax(scores.flatten(4).flatten(2, 3), dim=-1)

    # Backward.
    grad = grad_output.flatten(0, 2)
    grad_proj_weight = grad.T @ merge_heads(probs @ v)
    grad_heads = split_heads(grad_output @ proj_weight)
    grad_probs = grad_heads @ v.transpose(-1, -2)
    grad_v = probs.transpose(-1, -2) @ grad_heads
    grad_scores = probs * (grad_probs - (grad_probs * probs).sum(dim=-1, keepdim=True))
    grad_q = grad_scores @ k * scale
    grad_k = grad_scores.transpose(-1, -2) @ (q * scale)

    grid = grad_scores.unflatten(3, (height, width)).unflatten(2, (height, width))
    grad_relative_h, grad_relative_w = grid.sum(dim=-1), grid.sum(dim=-2)
    grad_q_relative = torch.einsum("bnyxi,yid->bnyxd", grad_relative_h, table_h)
    grad_q_relative += torch.einsum("bnyxj,xjd->bnyxd", grad_relative_w, table_w)
    grad_q = grad_q + grad_q_relative.flatten(2, 3)
    grad_table_h = torch.einsum("bnyxi,bnyxd->yid", grad_relative_h, q_grid)
    grad_table_w = torch.einsum("bnyxj,bnyxd->xjd", grad_relative_w, q_grid)
    grad_rel_pos_h = torch.zeros_like(rel_pos_h)
    grad_rel_pos_h.index_add_(0, rows_h.flatten(), grad_table_h.flatten(0, 1))
    grad_rel_pos_w = torch.zeros_like(rel_pos_w)
    grad_rel_pos_w.index_add_(0, rows_w.flatten(), grad_table_w.flatten(0, 1))

    grad_qkv = torch.cat([merge_heads(x) for x in (grad_q, grad_k, grad_v)], dim=1)
    return (
        (grad_qkv @ qkv_weight).view_as(hidden_states),
        grad_qkv.T @ hidden_states.flatten(0, 2),
        grad_qkv.sum(dim=0),
        grad_proj_weight,
        grad.sum(dim=0),
        grad_rel_pos_h,
        grad_rel_pos_w,
    )


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Small activations and tables, weights scaled by their fan-in, zero biases."""
    axes = axes_and_scalars
    shape = axes["batch_size"], axes["height"], axes["width"], axes["hidden_size"]
    channels, head_dim = axes["hidden_size"], axes["head_dim"]

    def weight(rows: int) -> torch.Tensor:
        return torch.randn(rows, channels, device=device) * math.sqrt(2.0 / channels)

    return {
        "grad_output": torch.randn(*shape, device=device),
        "hidden_states": 0.1 * torch.randn(*shape, device=device),
        "qkv_weight": weight(3 * channels),
        "qkv_bias": torch.zeros(3 * channels, device=device),
        "proj_weight": weight(channels),
        "proj_bias": torch.zeros(channels, device=device),
        "rel_pos_h": 0.02 * torch.randn(2 * axes["height"] - 1, head_dim, device=device),
        "rel_pos_w": 0.02 * torch.randn(2 * axes["width"] - 1, head_dim, device=device),
        "scale": head_dim**-0.5,
    }
