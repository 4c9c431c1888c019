"""Backward of cross-attention's projections, with keys and values repeated over head groups."""

import math

import torch


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """[batch_size, heads, seq_len, head_dim] to [batch_size, seq_len, heads * head_dim]."""
    return x.transpose(1, 2).flatten(2)


def weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of W in x W^T: summed over batch and sequence."""
    return grad.flatten(0, 1).T @ x.flatten(0, 1)


def run(
    grad_query_states: torch.Tensor,
    grad_key_states: torch.Tensor,
    grad_value_states: torch.Tensor,
    decoder_hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Sum the repeated heads' gradients, then go back through the projections; float32.

    Args:
        grad_query_states: [batch_size, num_heads, seq_len_dec, head_dim] f32.
        grad_key_states, grad_value_states: [batch_size, num_heads, seq_len_enc, head_dim] f32.
        decoder_hidden_states: [batch_size, seq_len_dec, hidden_size] f32.
        encoder_hidden_states: [batch_size, seq_len_enc, cross_hidden_size] f32.
        q_weight: [num_heads * head_dim, hidden_size] f32.
        k_weight, v_weight: [num_key_value_heads * head_dim, cross_hidden_size] f32.

    Returns:
        Gradients of decoder_hidden_states, encoder_hidden_states, q_weight, k_weight and v_weight,
        f32.
    """
    _, num_heads, _, head_dim = grad_query_states.shape
    group_size = num_heads * head_dim // k_weight.shape[0]

    def sum_group(grad: torch.Tensor) -> torch.Tensor:
        return grad.unflatten(1, (-1, group_size)).sum(dim=2)

    grad_q = merge_heads(grad_query_states)
    grad_k = merge_heads(sum_group(grad_key_states))
    grad_v = merge_heads(sum_group(grad_value_states))
    return (
        grad_q @ q_weight,
        grad_k @ k_weight + grad_v @ v_weight,
        weight_gradient(grad_q, decoder_hidden_states),
        weight_gradient(grad_k, encoder_hidden_states),
        weight_gradient(grad_v, encoder_hidden_states),
    )


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal tensors, each divided by the root of a width."""
    batch_size, num_heads, head_dim, seq_len_dec, seq_len_enc, hidden_size, cross_hidden_size = (
        axes_and_scalars[n]
        for n in (
            "batch_size", "num_heads", "head_dim", "seq_len_dec", "seq_len_enc",
            "hidden_size", "cross_hidden_size",
        )
    )  # fmt: skip
    q_out_dim, kv_out_dim = axes_and_scalars["q_out_dim"], axes_and_scalars["kv_out_dim"]

    def normal(width: int, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device) / math.sqrt(width)

    return {
        "grad_query_states": normal(q_out_dim, batch_size, num_heads, seq_len_dec, head_dim),
        "grad_key_states": normal(q_out_dim, batch_size, num_heads, seq_len_enc, head_dim),
        "grad_value_states": normal(q_out_dim, batch_size, num_heads, seq_len_enc, head_dim),
        "decoder_hidden_states": normal(hidden_size, batch_size, seq_len_dec, hidden_size),
        "encoder_hidden_states": normal(
            cross_hidden_size, batch_size, seq_len_enc, cross_hidden_size
        ),
        "q_weight": normal(hidden_size, q_out_dim, hidden_size),
        "k_weight": normal(cross_hidden_size, kv_out_dim, cross_hidden_size),
        "v_weight": normal(cross_hidden_size, kv_out_dim, cross_hidden_size),
    }
