"""Cross-attention from video to text tokens: forward again, and backward through all of it."""

import torch
import torch.nn.functional as F

HEAD_DIM = 64


def split_heads(x: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, heads * HEAD_DIM] to [batch, heads, tokens, HEAD_DIM]."""
    return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """The reverse of `split_heads`."""
    return x.transpose(1, 2).flatten(2)


def linear_gradients(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of weight and bias of a linear layer, summed over batch and tokens."""
    return grad.flatten(0, 1).T @ x.flatten(0, 1), grad.sum(dim=(0, 1))


def run(
    grad_output: torch.Tensor,
    video_latents: torch.Tensor,
    text_embeddings: torch.Tensor,
    query_weight: torch.Tensor,
    query_bias: torch.Tensor,
    key_weight: torch.Tensor,
    key_bias: torch.Tensor,
    value_weight: torch.Tensor,
    value_bias: torch.Tensor,
    output_weight: torch.Tensor,
    output_bias: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """All in float32; no mask.

    Args:
        grad_output, video_latents: [batch_size, num_video_tokens, hidden_size] f32.
        text_embeddings: [batch_size, num_text_tokens, hidden_size] f32.
        query_weight, key_weight, value_weight, output_weight: [hidden_size, hidden_size] f32.
        query_bias, key_bias, value_bias: [hidden_size] f32.
        output_bias: [hidden_size] f32, not needed.
        scale: factor on the scores.

    Returns:
        Gradients of video_latents and text_embeddings, then of weight and bias of the query, the
        key, the value and the output projection, f32.
    """
    q = split_heads(F.linear(video_latents, query_weight, query_bias))
    k = split_heads(F.linear(text_embeddings, key_weight, key_bias))
    v = split_heads(F.linear(text_embeddings, value_weight, value_bias))
    probabilities = torch.softmax(q @ k.transpose(-1, -2) * scale, dim=-1)
    context = merge_heads(probabilities @ v)

    grad_context = split_heads(grad_output @ output_weight)
    grad_probabilities = grad_context @ v.transpose(-1, -2)
    projection = (grad_probabilities * probabilities).sum(dim=-1, keepdim=True)
    grad_scores = probabilities * (grad_probabilities - projection) * scale
    grad_q = merge_heads(grad_scores @ k)
    grad_k = merge_heads(grad_scores.transpose(-1, -2) @ q)
    grad_v = merge_heads(probabilities.transpose(-1, -2) @ grad_context)

    return (
        grad_q @ query_weight,
        grad_k @ key_weight + grad_v @ value_weight,
        *linear_gradients(grad_q, video_latents),
        *linear_gradients(grad_k, text_embeddings),
        *linear_gradients(grad_v, text_embeddings),
        *linear_gradients(grad_output, context),
    )
