"""Packed vision attention with rotary embedding: forward again, and backward through all of it."""

import torch
import torch.nn.functional as F


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split form."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rope_backward(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Gradient through `apply_rope`."""
    first, second = (grad * sin).chunk(2, dim=-1)
    return grad * cos + torch.cat((second, -first), dim=-1)


def attention_and_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax attention of one sequence: its output, and the gradients of q, k and v.

    Args:
        q, k, v, grad: [num_heads, length, head_dim], grad being that of the output.
        scaling: factor on the scores.
    """
    probabilities = torch.softmax(q @ k.transpose(-1, -2) * scaling, dim=-1)
    grad_probabilities = grad @ v.transpose(-1, -2)
    projection = (probabilities * grad_probabilities).sum(dim=-1, keepdim=True)
    grad_scores = probabilities * (grad_probabilities - projection) * scaling
    return (
        probabilities @ v,
        grad_scores @ k,
        grad_scores.transpose(-1, -2) @ q,
        probabilities.transpose(-1, -2) @ grad,
    )


def run(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cu_seqlens: torch.Tensor,
    attention_dropout: float,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All in float32; attention stays within each sequence and has no mask.

    Args:
        grad_output, hidden_states: [total_seq_len, hidden_size] f32.
        qkv_weight: [3 * hidden_size, hidden_size] f32, rows in the order q, k, v; qkv_bias.
        proj_weight: [hidden_size, hidden_size] f32; proj_bias: [hidden_size] f32, not needed.
        cos, sin: [total_seq_len, head_dim] f32.
        cu_seqlens: [num_sequences + 1] int32; sequence i is rows cu_seqlens[i] to
            cu_seqlens[i + 1] - 1.
        attention_dropout: not used.
        scaling: factor on the scores.

    Returns:
        Gradients of hidden_states, qkv_weight, qkv_bias, proj_weight and proj_bias, f32.
    """
    head_dim = cos.shape[-1]

    qkv = F.linear(hidden_states, qkv_weight, qkv_bias).unflatten(-1, (3, -1, head_dim))
    q, k, v = qkv.permute(1, 2, 0, 3).unbind(dim=0)  # [num_heads, tokens, head_dim] each
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)

    grad_attn = grad_output @ proj_weight
    grad_heads = grad_attn.unflatten(-1, (-1, head_dim)).transpose(0, 1)
    lengths = cu_seqlens.diff().tolist()
    split = [t.split(lengths, dim=1) for t in (q, k, v, grad_heads)]
    sequences = [attention_and_gradients(*parts, scaling) for parts in zip(*split, strict=True)]
    context, grad_q, grad_k, grad_v = (
        torch.cat(parts, dim=1) for parts in zip(*sequences, strict=True)
    )
    grad_proj_weight = grad_output.T @ context.transpose(0, 1).flatten(1)
    grad_proj_bias = grad_output.sum(dim=0)

    grad_q, grad_k = rope_backward(grad_q, cos, sin), rope_backward(grad_k, cos, sin)
    grad_qkv = torch.stack((grad_q, grad_k, grad_v)).permute(2, 0, 1, 3).flatten(1)
    grad_hidden_states = grad_qkv @ qkv_weight
    grad_qkv_weight = grad_qkv.T @ hidden_states
    grad_qkv_bias = grad_qkv.sum(dim=0)
    return grad_hidden_states, grad_qkv_weight, grad_qkv_bias, grad_proj_weight, grad_proj_bias


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal activations, small weights, and sequences of equal length but for one row.

    cos and sin are plain normal noise, not the cosine and sine of anything.
    """
    axes = axes_and_scalars
    total, num_sequences = axes["total_seq_len"], axes["num_sequences"]
    hidden_size, head_dim = axes["hidden_size"], axes["head_dim"]
    qkv_out_size = axes["qkv_out_size"]

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=device).mul_(std)

    sequence = torch.arange(num_sequences + 1, dtype=torch.int32, device=device)
    # The first (total mod num_sequences) sequences are one row longer.
    cu_seqlens = sequence * (total // num_sequences) + sequence.clamp(max=total % num_sequences)
    return {
        "grad_output": normal(total, hidden_size),
        "hidden_states": normal(total, hidden_size),
        "qkv_weight": normal(qkv_out_size, hidden_size, std=0.02),
        "qkv_bias": normal(qkv_out_size, std=0.01),
        "proj_weight": normal(hidden_size, hidden_size, std=0.02),
        "proj_bias": normal(hidden_size, std=0.01),
        "cos": normal(total, head_dim),
        "sin": normal(total, head_dim),
        "cu_seqlens": cu_seqlens,
        "attention_dropout": 0.0,
        "scaling": head_dim**-0.5,
    }
