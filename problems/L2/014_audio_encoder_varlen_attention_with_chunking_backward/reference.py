"""Backward of self-attention within chunks of a packed sequence, projections included."""

import torch


def attention_and_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax attention of one chunk: its output, and the gradients of q, k and v.

    Args:
        q, k, v, grad: [num_heads, length, head_dim], grad being that of the output.
    """
    scale = q.shape[-1] ** -0.5
    probabilities = torch.softmax(q @ k.transpose(-1, -2) * scale, dim=-1)
    grad_probabilities = grad @ v.transpose(-1, -2)
    projection = (probabilities * grad_probabilities).sum(dim=-1, keepdim=True)
    grad_scores = probabilities * (grad_probabilities - projection)
    return (
        probabilities @ v,
        grad_scores @ k * scale,
        grad_scores.transpose(-1, -2) @ q * scale,
        probabilities.transpose(-1, -2) @ grad,
    )


def run(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    out_weight: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Everything in float32; each result rounds to bfloat16 once, at the end.

    Args:
        grad_output, hidden_states: [total_seq_len, d_model] bf16.
        query_states, key_states, value_states: [1, num_heads, total_seq_len, head_dim] bf16.
        cu_seqlens: [num_chunks + 1] int32; chunk c is rows cu_seqlens[c] to cu_seqlens[c + 1] - 1.
        q_weight, k_weight, v_weight: [num_heads * head_dim, d_model] bf16.
        out_weight: [d_model, num_heads * head_dim] bf16.

    Returns:
        Gradients of hidden_states, then of weight and bias of the q, the k, the v and the output
        projection, bf16.
    """
    dtype = grad_output.dtype
    grad_output, hidden_states = grad_output.float(), hidden_states.float()
    q, k, v = query_states[0].float(), key_states[0].float(), value_states[0].float()
    num_heads = q.shape[0]

    grad_attn = grad_output @ out_weight.float()
    grad_heads = grad_attn.unflatten(-1, (num_heads, -1)).transpose(0, 1)
    lengths = cu_seqlens.diff().tolist()
    split = [t.split(lengths, dim=1) for t in (q, k, v, grad_heads)]
    chunks = [attention_and_gradients(*parts) for parts in zip(*split, strict=True)]
    attn_output, grad_q, grad_k, grad_v = (
        torch.cat(parts, dim=1).transpose(0, 1).flatten(1) for parts in zip(*chunks, strict=True)
    )

    grad_hidden_states = (
        grad_q @ q_weight.float() + grad_k @ k_weight.float() + grad_v @ v_weight.float()
    )
    grads = (
        grad_hidden_states,
        grad_q.T @ hidden_states,
        grad_q.sum(dim=0),
        grad_k.T @ hidden_states,
        grad_k.sum(dim=0),
        grad_v.T @ hidden_states,
        grad_v.sum(dim=0),
        grad_output.T @ attn_output,
        grad_output.sum(dim=0),
    )
    return tuple(grad.to(dtype) for grad in grads)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Standard normal tensors, weights included, and chunks of equal length but for one row."""
    axes = axes_and_scalars
    total, num_chunks = axes["total_seq_len"], axes["num_chunks"]
    d_model, qkv_dim = axes["d_model"], axes["qkv_dim"]
    heads_shape = (1, axes["num_heads"], total, axes["head_dim"])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    chunk = torch.arange(num_chunks + 1, dtype=torch.int32, device=device)
    return {
        "grad_output": normal(total, d_model),
        "hidden_states": normal(total, d_model),
        "query_states": normal(*heads_shape),
        "key_states": normal(*heads_shape),
        "value_states": normal(*heads_shape),
        # The first (total mod num_chunks) chunks are one row longer.
        "cu_seqlens": chunk * (total // num_chunks) + chunk.clamp(max=total % num_chunks),
        "q_weight": normal(qkv_dim, d_model),
        "k_weight": normal(qkv_dim, d_model),
        "v_weight": normal(qkv_dim, d_model),
        "out_weight": normal(d_model, qkv_dim),
    }
