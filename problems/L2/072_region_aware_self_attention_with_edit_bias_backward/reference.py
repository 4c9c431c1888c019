"""Backward of self-attention with a position bias table, edit-region biases and dropout."""

import torch
import torch.nn.functional as F


def edit_region_pairs(edit_region_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs (query, key) within the edited region, and across its border.

    Args:
        edit_region_mask: [batch, seq], 0 or 1.

    Returns:
        Two tensors [batch, 1, seq, seq] of 0 and 1.
    """
    m_q, m_k = edit_region_mask[:, None, :, None], edit_region_mask[:, None, None, :]
    return m_q * m_k, m_q * (1 - m_k) + (1 - m_q) * m_k


def run(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    edit_region_mask: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor,
    edit_region_bias: torch.Tensor,
    within_edit_bias: torch.Tensor,
    cross_edit_bias: torch.Tensor,
    attention_mask: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_scores: torch.Tensor,
    attention_probs: torch.Tensor,
    attention_probs_dropped: torch.Tensor,
    attention_output: torch.Tensor,
    dropout_mask: torch.Tensor,
    scale: float,
    dropout_p: float,
) -> tuple[torch.Tensor, ...]:
    """Gradients of the input and all parameters, from tensors the forward saved; float32.

    B batch, S sequence, C hidden_size, N heads, D head_dim, M max_position_embeddings.

    Args:
        grad_output, hidden_states, attention_output: [B, S, C].
        edit_region_mask: [B, S], 1 in the edited region.
        qkv_weight: [3 C, C]; out_weight: [C, C].
        qkv_bias, out_bias, within_edit_bias, cross_edit_bias: not needed.
        edit_region_bias: [N, M, M], needed for its shape.
        attention_mask: [B, S], 0 for keys that are left out.
        query, key, value: [B, N, S, D].
        attention_scores: not needed.
        attention_probs, attention_probs_dropped: [B, N, S, S], before and after the dropout.
        dropout_mask: [B, N, S, S], 0 or 1.
        scale: factor on the dot products.
        dropout_p: probability of a zero in dropout_mask.

    Returns:
        Gradients of hidden_states, qkv weight and bias, out weight and bias, edit_region_bias,
        within_edit_bias and cross_edit_bias, each shaped like its tensor.
    """
    seq_len, head_dim = query.shape[2:]

    # Output projection.
    grad = grad_output.flatten(0, 1)
    grad_out_weight = grad.T @ attention_output.flatten(0, 1)
    grad_out_bias = grad.sum(dim=0)
    grad_heads = (grad_output @ out_weight).unflatten(-1, (-1, head_dim)).transpose(1, 2)

    # Dropout and softmax.
    grad_probs = grad_heads @ value.transpose(-1, -2)
    grad_value = attention_probs_dropped.transpose(-1, -2) @ grad_heads
    if dropout_p > 0:
        grad_probs = grad_probs * dropout_mask / (1 - dropout_p)
    projection = (grad_probs * attention_probs).sum(dim=-1, keepdim=True)
    grad_scores = attention_probs * (grad_probs - projection)
    grad_scores = grad_scores.masked_fill(attention_mask[:, None, None, :] == 0, 0.0)

    # Biases.
    within, cross = edit_region_pairs(edit_region_mask)
    grad_within = (grad_scores * within).sum(dim=(0, 2, 3)).view(-1, 1, 1)
    grad_cross = (grad_scores * cross).sum(dim=(0, 2, 3)).view(-1, 1, 1)
    grad_edit_region_bias = torch.zeros_like(edit_region_bias)
    if seq_len <= edit_region_bias.shape[-1]:
        grad_edit_region_bias[:, :seq_len, :seq_len] = grad_scores.sum(dim=0)

    # Projections: columns are ordered (query | key | value, head, channel).
    grad_dots = grad_scores * scale
    grad_query = grad_dots @ key
    grad_key = grad_dots.transpose(-1, -2) @ query
    grad_qkv = torch.stack((grad_query, grad_key, grad_value))  # [3, B, N, S, D]
    grad_qkv = grad_qkv.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)
    grad_hidden_states = (grad_qkv @ qkv_weight).view_as(hidden_states)
    return (
        grad_hidden_states,
        grad_qkv.T @ hidden_states.flatten(0, 1),
        grad_qkv.sum(dim=0),
        grad_out_weight,
        grad_out_bias,
        grad_edit_region_bias,
        grad_within,
        grad_cross,
    )


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """All that one forward pass with dropout saves."""
    axes = axes_and_scalars
    batch, seq_len, hidden = axes["batch_size"], axes["seq_len"], axes["hidden_size"]
    heads, head_dim = axes["num_attention_heads"], axes["head_dim"]
    positions = axes["max_position_embeddings"]
    scale, dropout_p = head_dim**-0.5, 0.1

    def small(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(*shape, device=device)

    hidden_states = torch.randn(batch, seq_len, hidden, device=device)
    edit_region_mask = (torch.rand(batch, seq_len, device=device) > 0.5).float()
    attention_mask = torch.ones(batch, seq_len, device=device)
    qkv_weight, qkv_bias = small(3 * hidden, hidden), torch.zeros(3 * hidden, device=device)
    edit_region_bias = small(heads, positions, positions)
    within_edit_bias, cross_edit_bias = small(heads, 1, 1), small(heads, 1, 1)

    qkv = F.linear(hidden_states, qkv_weight, qkv_bias).view(batch, seq_len, 3, heads, head_dim)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    within, cross = edit_region_pairs(edit_region_mask)
    scores = query @ key.transpose(-1, -2) * scale + edit_region_bias[:, :seq_len, :seq_len]
    scores = scores + within_edit_bias * within + cross_edit_bias * cross
    scores = scores.masked_fill(attention_mask[:, None, None, :] == 0, -torch.inf)
    probs = torch.softmax(scores, dim=-1)
    dropout_mask = (torch.rand(batch, heads, seq_len, seq_len, device=device) > dropout_p).float()
    probs_dropped = probs * dropout_mask / (1 - dropout_p)
    return {
        "grad_output": torch.randn(batch, seq_len, hidden, device=device),
        "hidden_states": hidden_states,
        "edit_region_mask": edit_region_mask,
        "qkv_weight": qkv_weight,
        "qkv_bias": qkv_bias,
        "out_weight": small(hidden, hidden),
        "out_bias": torch.zeros(hidden, device=device),
        "edit_region_bias": edit_region_bias,
        "within_edit_bias": within_edit_bias,
        "cross_edit_bias": cross_edit_bias,
        "attention_mask": attention_mask,
        "query": query,
        "key": key,
        "value": value,
        "attention_scores": scores,
        "attention_probs": probs,
        "attention_probs_dropped": probs_dropped,
        "attention_output": (probs_dropped @ value).transpose(1, 2).flatten(2),
        "dropout_mask": dropout_mask,
        "scale": scale,
        "dropout_p": dropout_p,
    }
